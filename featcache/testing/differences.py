"""Comparisons of features, with messages that name the clip and the frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from featcache.errors import listing
from featcache.extractors import Clip
from featcache.testing.clips import Features, label


def assert_same(
    features: Sequence[Features], expected: Sequence[Features], clips: Sequence[Clip], how: str
) -> None:
    """Assert that features, extracted as `how` says, are the same bit for bit."""
    for values, reference, clip in zip(features, expected, clips, strict=True):
        is_same = values.shape == reference.shape and values.tobytes() == reference.tobytes()
        assert is_same, (
            f"{label(clip)} has different values {how}: it "
            f"{described_difference(values, reference)}; no bit may depend on that"
        )


def described_difference(values: Features, reference: Features) -> str:
    """Describe where features differ from `reference`, and by how much."""
    if values.shape != reference.shape:
        return f"has shape {values.shape}, and not {reference.shape}"
    frames = np.flatnonzero(_differences(values, reference)).tolist()
    error = largest_error(values, reference)
    return (
        f"differs in frames {listing(map(str, frames), 5)} of {len(values)}, by {error:.2g} of the "
        "largest value"
    )


def largest_error(values: Features, reference: Features) -> float:
    """Return the largest difference, relative to the largest magnitude of `reference`."""
    largest = float(np.abs(reference).max(initial=0.0))
    absolute = float(_differences(values, reference).max(initial=0.0))
    return absolute / (largest or 1.0)


def differing_frames(values: Features, reference: Features, tolerance: float) -> NDArray[np.bool_]:
    """Find the frames that differ, bool `[frames]`: by more than rounding, or in any code."""
    allowed = 0.0
    if reference.dtype.kind not in "iu":
        allowed = tolerance * float(np.abs(reference).max(initial=0.0))
    return np.asarray(_differences(values, reference) > allowed)


def _differences(values: Features, reference: Features) -> NDArray[np.float64]:
    apart = np.abs(values.astype(np.float64) - reference.astype(np.float64))
    by_frame = apart.reshape(len(apart), math.prod(apart.shape[1:]))
    return np.asarray(by_frame.max(axis=1, initial=0.0))
