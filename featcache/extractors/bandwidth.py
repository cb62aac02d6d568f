"""The number of codebooks of a residual quantizer, given directly or as the bandwidth of the codes."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from featcache.errors import ConfigError
from featcache.extractors.model import CodecParams


class BandwidthParams(CodecParams):
    """The parameters of codecs that were trained for several bandwidths."""

    bandwidth: float | None = Field(default=None, gt=0)
    """In kbps, one of the bandwidths that the model was trained for: another way to choose the number of codebooks.
    Without `bandwidth` and `codebooks`, all codebooks. With fewer codebooks, the codes are the first columns of those
    with more."""


def num_codebooks(params: BandwidthParams, model: Any) -> int:
    """How many codebooks the parameters ask for, of a model of transformers that has `config.target_bandwidths`.

    Raises:
        ConfigError: more than there are, a bandwidth that the model was not trained for, or one that contradicts
            `codebooks`.
    """
    at_most, bandwidth = int(model.quantizer.num_quantizers), params.bandwidth
    if params.codebooks is not None and params.codebooks > at_most:
        raise ConfigError(f"params.codebooks: {params.codebooks}, but {params.weights} has {at_most}")
    if bandwidth is None:
        return params.codebooks or at_most
    if bandwidth not in model.config.target_bandwidths:
        known = ", ".join(f"{one:g}" for one in model.config.target_bandwidths)
        raise ConfigError(f"params.bandwidth: {bandwidth:g}; {params.weights} has {known} kbps")
    count = int(model.quantizer.get_num_quantizers_for_bandwidth(bandwidth))
    if params.codebooks not in (None, count):
        raise ConfigError(f"params.codebooks: {params.codebooks}, but a bandwidth of {bandwidth:g} kbps means {count}")
    return count
