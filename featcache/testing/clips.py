"""Clips for the checks, some like speech and some as unlike speech as real files can be; and how features compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.care.compare import frame_differences
from featcache.extractors.base import Clip

UNUSUAL = ("silence", "full scale", "constant", "impulse", "quiet")
"""The kinds of clips that `unusual_clip` makes."""


def make_clip(seed: int, num_samples: int, device: str = "cpu") -> Clip:
    """A clip of a tone that swells and fades in noise. Each seed gives another tone and level; none is clipped."""
    generator = np.random.default_rng(seed)
    at = np.arange(num_samples) / 16000
    tone = np.sin(2 * np.pi * (100 + 40 * (seed % 7)) * at) * np.sin(2 * np.pi * (3 + seed % 3) * at + 1)
    waveform = 10.0 ** -(seed % 3) * (0.5 * tone + 0.1 * generator.normal(size=num_samples))
    return Clip(f"clip-{seed}", torch.from_numpy(waveform.clip(-1, 1).astype(np.float32)).to(device))


def unusual_clip(kind: str, num_samples: int, device: str = "cpu") -> Clip:
    """A clip of one of the kinds `UNUSUAL`."""
    waveform = torch.zeros(num_samples)
    if kind == "full scale":
        waveform[0::2], waveform[1::2] = 1.0, -1.0
    elif kind == "constant":
        waveform += 0.5
    elif kind == "impulse":
        waveform[num_samples // 2] = 1.0
    elif kind == "quiet":
        waveform += 1e-7 * torch.sin(torch.arange(num_samples) / 10)
    return Clip(kind.replace(" ", "-"), waveform.to(device))


def label(clip: Clip) -> str:
    """The name of a clip in messages."""
    return f"{clip.id} ({len(clip.waveform)} samples)"


def largest_error(found: NDArray[Any], reference: NDArray[Any]) -> float:
    """The largest difference of two arrays of features, in parts of the largest magnitude of `reference`."""
    largest = float(np.abs(reference).max(initial=0.0))
    absolute = float(_absolute(found, reference).max(initial=0.0))
    return absolute / largest if largest else absolute


def differing_frames(found: NDArray[Any], reference: NDArray[Any], tolerance: float) -> NDArray[np.bool_]:
    """Which frames of a clip differ, bool `[frames]`: by more than rounding, or in any code."""
    allowed = 0.0 if reference.dtype.kind in "iu" else tolerance * float(np.abs(reference).max(initial=0.0))
    return np.asarray(_absolute(found, reference) > allowed)


def assert_same(found: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]], clips: Sequence[Clip], how: str) -> None:
    """Assert that features of clips are the same, bit for bit. `how` says how `found` was extracted."""
    for ours, theirs, clip in zip(found, wanted, clips, strict=True):
        if ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes():
            continue
        assert ours.shape == theirs.shape, f"{label(clip)} has {len(ours)} frames {how}, and {len(theirs)} else"
        wrong = (ours != theirs).reshape(len(ours), -1).any(axis=1)
        raise AssertionError(
            f"{label(clip)} has different values {how}: frames {_listed(wrong)} of {len(ours)}, by "
            f"{largest_error(ours, theirs):.2g} of the largest; no bit may depend on that"
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
    """Assert that features of clips are the same up to rounding and ties. `whose` says what `wanted` is."""
    num_wrong, frames, first = 0, 0, ""
    for ours, theirs, clip in zip(found, wanted, clips, strict=True):
        assert ours.shape == theirs.shape, f"{label(clip)} has shape {ours.shape}, and not {theirs.shape}, {whose}"
        frames += len(ours)
        wrong = differing_frames(ours, theirs, tolerance)
        if not wrong.any():
            continue
        assert theirs.dtype.kind in "iu", (
            f"{label(clip)}: frames {_listed(wrong)} of {len(ours)} differ from {whose}, by "
            f"{largest_error(ours, theirs):.2g} of the largest value; tolerance: {tolerance:.2g}"
        )
        num_wrong += int(wrong.sum())
        first = first or f"{label(clip)}, frames {_listed(wrong)} of {len(ours)}"
    assert num_wrong <= math.ceil(ties * frames), (
        f"codes of {num_wrong} of {frames} frames differ from {whose}; ties: {ties:.2g}; the first are in {first}"
    )


def _listed(wrong: NDArray[np.bool_]) -> str:
    numbers = np.flatnonzero(wrong).tolist()
    return ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")


def _absolute(found: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.float64]:
    """The largest difference in each frame, float64 `[frames]`."""
    tensors = (torch.from_numpy(np.array(array, np.float64)) for array in (found, reference))
    return np.asarray(frame_differences(*tensors)[1])
