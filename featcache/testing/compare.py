"""Compares features: bit for bit, or up to rounding and ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.extractors.base import Clip
from featcache.testing.signals import what


def difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference of two arrays of floats, in parts of the largest magnitude of `other`."""
    largest = float(np.abs(other).max(initial=0.0))
    found = float(np.abs(one.astype(np.float64) - other).max(initial=0.0))
    return found / largest if largest else found


def differing(one: NDArray[Any], other: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Which frames of two items differ, bool `[frames]`: by more than rounding, or in any code."""
    allowed = 0.0 if other.dtype.kind in "iu" else tolerance * float(np.abs(other).max(initial=0.0))
    apart = np.abs(one.astype(np.float64) - other).reshape(len(one), -1)
    return np.asarray((apart > allowed).any(axis=1))


def assert_same(found: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]], clips: Sequence[Clip], how: str) -> None:
    """Assert that the clips' features are the same, bit for bit, though they were extracted so: `how`."""
    for ours, theirs, clip in zip(found, wanted, clips, strict=True):
        if ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes():
            continue
        assert ours.shape == theirs.shape, f"{what(clip)} has {len(ours)} frames {how}, and {len(theirs)} else"
        wrong = (ours != theirs).reshape(len(ours), -1).any(axis=1)
        raise AssertionError(
            f"{what(clip)} has different values {how}: frames {listed(wrong)} of {len(ours)}, by "
            f"{difference(ours, theirs):.2g} of the largest; no bit may depend on that"
        )


def assert_near(
    found: Sequence[NDArray[Any]],
    wanted: Sequence[NDArray[Any]],
    clips: Sequence[Clip],
    whose: str,
    *,
    tolerance: float,
    ties: float,
) -> None:
    """Assert that the clips' features are those wanted, which are `whose`: but for rounding and ties."""
    apart, frames, first = 0, 0, ""
    for ours, theirs, clip in zip(found, wanted, clips, strict=True):
        assert ours.shape == theirs.shape, f"{what(clip)} has shape {ours.shape}, and not {theirs.shape}, {whose}"
        frames += len(ours)
        wrong = differing(ours, theirs, tolerance)
        if not wrong.any():
            continue
        assert theirs.dtype.kind in "iu", (
            f"{what(clip)}: frames {listed(wrong)} of {len(ours)} differ from {whose}, by "
            f"{difference(ours, theirs):.2g} of the largest value; tolerance: {tolerance:.2g}"
        )
        apart += int(wrong.sum())
        first = first or f"{what(clip)}, frames {listed(wrong)} of {len(ours)}"
    assert apart <= math.ceil(ties * frames), (
        f"codes of {apart} of {frames} frames differ from {whose}; ties: {ties:.2g}; the first are in {first}"
    )


def listed(wrong: NDArray[np.bool_]) -> str:
    """Where it is true, for a message."""
    found = np.flatnonzero(wrong).tolist()
    return ", ".join(map(str, found[:5])) + (" …" if len(found) > 5 else "")
