"""The base of codecs, and how a model of transformers is loaded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from pydantic import Field

from featcache import weights
from featcache.errors import ConfigError
from featcache.extractors.model import ModelExtractor, ModelParams, computing
from featcache.extractors.rows import Rows
from featcache.spec import FeatureSpec

if TYPE_CHECKING:
    from torch import Tensor


class CodecParams(ModelParams):
    """The parameters of every codec."""

    codebooks: int | None = Field(default=None, ge=1)
    """Number of codebooks, from the first on. Default: all that the model has."""


class BandwidthParams(CodecParams):
    """The parameters of codecs that were trained for several bandwidths."""

    bandwidth: float | None = Field(default=None, gt=0)
    """In kbps, one of the bandwidths that the model was trained for: another way to
    choose the number of codebooks. Without `bandwidth` and `codebooks`, all codebooks.
    With fewer codebooks, the codes are the first columns of those with more."""


C = TypeVar("C", bound=CodecParams)


class CodecExtractor(ModelExtractor[C]):
    """The base of extractors whose model computes latents, and codes from the latents.

    If codes differ although latents differ by rounding only, two codewords were tied.
    Codes are always looked up in float32. There is one frame for every `granularity`
    samples that have begun."""

    _codebooks: Iterable[Any]
    """The model's codebooks in use, unless a subclass has its own `quantize`."""

    def _load_model(self, class_name: str, part: weights.Part | None = None) -> Any:
        needed_for = f"the extractor {type(self).__name__.lower()}"
        return self._load_from(weights.transformers_class(class_name, needed_for), part)

    def _load_from(self, model_class: Any, part: weights.Part | None = None) -> Any:
        model = weights.load(model_class, self._locate(), self.device, part)
        names = ("sampling_rate", "sample_rate", "input_sampling_rate")
        rates = (getattr(model.config, name, None) for name in names)
        self.require_sample_rate(next(filter(None, rates)))
        return model

    def _set_spec(
        self, name: str, num_codebooks: int, codebook_size: int, frame_length: int = 0
    ) -> None:
        self.spec = FeatureSpec(
            (num_codebooks,),
            code_dtype(codebook_size),
            self.sample_rate / self.granularity,
            frame_length,
            self.sample_rate,
            f"{name} code",
            (codebook_size,) * num_codebooks,
        )

    @property
    def codes_per_frame(self) -> int:
        """The number of codes that `codes_of` gives for a frame."""
        return len(self.spec.codebook_sizes)

    def num_frames(self, num_samples: int) -> int:
        return -(-num_samples // self.granularity)

    @abstractmethod
    def latents(self, waveforms: Tensor, num_samples: Tensor) -> Tensor:
        """Compute the input of the quantizer, float `[R, F, D]`."""

    def quantize(self, latents: Tensor) -> Tensor:
        """Look up codes, int64 `[R, F, Q]`, of latents, float32 `[R, F, D]`. Each codebook
        encodes the residual of those before it."""
        residual_RDF = latents.mT
        codes = []
        for codebook in self._codebooks:
            codes_RF, decoded_RDF = self._look_up(codebook, residual_RDF)
            residual_RDF = residual_RDF - decoded_RDF
            codes.append(codes_RF)
        return torch.stack(codes, dim=2)

    def _look_up(self, codebook: Any, residual_RDF: Tensor) -> tuple[Tensor, Tensor]:
        codes_RF = codebook.encode(residual_RDF)
        return codes_RF, codebook.decode(codes_RF)

    def encode(self, waveforms: Tensor, num_samples: Tensor) -> Rows:
        return Rows(self.codes_of(self.latents(waveforms, num_samples)))

    def codes_of(self, latents_RFD: Tensor) -> Tensor:
        """Quantise latents, to codes of `spec.dtype`, `[R, F, Q]`."""
        with computing("fp32", latents_RFD.device):
            codes_RFQ = self.quantize(latents_RFD.float())
        return codes_RFQ.to(getattr(torch, self.spec.dtype))

    @classmethod
    def stored_dtype(cls, params: C) -> str:
        config = weights.read_json(weights.locate(params.weights, params.revision), "config.json")
        return code_dtype(int(config.get("codebook_size", 1024)))


def code_dtype(codebook_size: int) -> str:
    """Return the numpy name of the smallest unsigned dtype for a codebook's codes."""
    return np.min_scalar_type(codebook_size - 1).name


def num_codebooks(params: CodecParams, at_most: int, at_least: int = 1) -> int:
    """Return the number of codebooks in use; raise ConfigError if the model cannot give so
    many."""
    count = params.codebooks or at_most
    if not at_least <= count <= at_most:
        limits = f", of which at least {at_least} must be taken" if at_least > 1 else ""
        raise ConfigError(f"params.codebooks: {count}, but {params.weights} has {at_most}{limits}")
    return count


def num_codebooks_at_bandwidth(params: BandwidthParams, model: Any) -> int:
    """Return the number of codebooks in use, by `codebooks` or `bandwidth`; raise
    ConfigError if the model lacks them, or the two contradict."""
    count = num_codebooks(params, int(model.quantizer.num_quantizers))
    bandwidth = params.bandwidth
    if bandwidth is None:
        return count
    targets = model.config.target_bandwidths
    if bandwidth not in targets:
        known = ", ".join(f"{target:g}" for target in targets)
        raise ConfigError(f"params.bandwidth: {bandwidth:g}; {params.weights} has {known} kbps")
    count = int(model.quantizer.get_num_quantizers_for_bandwidth(bandwidth))
    if params.codebooks not in (None, count):
        raise ConfigError(
            f"params.codebooks: {params.codebooks}, but a bandwidth of {bandwidth:g} kbps "
            f"means {count}"
        )
    return count
