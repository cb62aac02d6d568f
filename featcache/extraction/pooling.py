"""One vector for each utterance, of all its frames: `store.pool` of a config.

Frames are first rounded as a version without `pool` stores them. So the vector is the same
from audio and from that version. Source of `mean+std`: the statistics pooling of x-vectors
(Snyder et al., 2018), with the standard deviation over all frames, sqrt(mean((x - mean)²))."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ConfigError
from featcache.extractors import fingerprint
from featcache.spec import MAIN, Clip, FeatureSpec, Track


def pooled_spec(spec: FeatureSpec, pool: str) -> FeatureSpec:
    """Describe the vectors that `pool` makes of features. Raises ConfigError if they are
    codes, or not along time."""
    if spec.codebook_sizes or not spec.axis.exact_rate:
        raise ConfigError(
            f"store.pool: {pool}, but the features are {spec.main.shape_text()}, {spec.units}: "
            "only frames of floats have a mean"
        )
    first, *rest = spec.item_shape or (1,)
    shape = (first * len(pool.split("+")), *rest)
    return FeatureSpec.of(
        spec.sample_rate, Track(MAIN, shape, "float32", f"{pool} over time: {spec.units}", Clip())
    )


def pooled(frames: NDArray[Any], pool: str) -> NDArray[np.float32]:
    """Return the vector of an utterance's frames `[frames, *item_shape]`, as the only entry:
    float32 `[1, *item_shape]`, computed in float64."""
    values = frames.astype(np.float64)
    if values.ndim == 1:
        values = values[:, None]
    mean = values.mean(axis=0)
    statistics = {"mean": mean, "std": np.sqrt(np.square(values - mean).mean(axis=0))}
    vector = np.concatenate([statistics[name] for name in pool.split("+")])
    return vector[None].astype(np.float32)


def source_of(config: Mapping[str, Any]) -> str:
    """Return the fingerprint of the version whose frames a resolved config pools."""
    return fingerprint({**config, "store": {"dtype": config["store"]["dtype"]}})
