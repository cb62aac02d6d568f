"""Clips that the checks extract, and comparisons of their features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import listing
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.base import main_track

AnyExtractor = Extractor[Params]
Features = NDArray[Any]

UNUSUAL: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silence": lambda numbers: torch.zeros(len(numbers)),
    "full scale": lambda numbers: 1.0 - 2.0 * (numbers % 2),
    "constant": lambda numbers: torch.full((len(numbers),), 0.5),
    "impulse": lambda numbers: (numbers == len(numbers) // 2).float(),
    "quiet": lambda numbers: 1e-7 * torch.sin(numbers / 10),
}
"""Waveforms unlike speech, float32 `[num_samples]`, from the numbers of their samples."""


def make_clip(seed: int, num_samples: int, device: str = "cpu") -> Clip:
    """Make a clip of a tone that swells and fades in noise; each seed, another one."""
    generator = np.random.default_rng(seed)
    seconds = np.arange(num_samples) / 16000
    swell = np.sin(2 * np.pi * (3 + seed % 3) * seconds + 1)
    tone = np.sin(2 * np.pi * (100 + 40 * (seed % 7)) * seconds) * swell
    waveform = 10.0 ** -(seed % 3) * (0.5 * tone + 0.1 * generator.normal(size=num_samples))
    samples = torch.from_numpy(waveform.clip(-1, 1).astype(np.float32))
    return Clip(f"clip-{seed}", samples.to(device))


def label(clip: Clip) -> str:
    """Name a clip in messages."""
    return f"{clip.id} ({len(clip.waveform)} samples)"


def hop_of(extractor: AnyExtractor) -> int:
    """Return about how many samples are between two frames; 10 ms without frames."""
    return max(1, round(extractor.spec.sample_rate / (extractor.spec.frame_rate or 100)))


def granularity_of(extractor: AnyExtractor) -> int:
    """Return the number of samples of which padded lengths are multiples, at least a hop."""
    return max(hop_of(extractor), getattr(extractor, "granularity", 1))


def extract(extractor: AnyExtractor, clips: Sequence[Clip]) -> list[Features]:
    """Call `extract` as a run does, and copy the features."""
    with torch.inference_mode():
        of_clips = extractor.extract(clips)
    assert isinstance(of_clips, list), f"extract returned a {type(of_clips).__name__}, not a list"
    assert len(of_clips) == len(clips), (
        f"extract returned {len(of_clips)} tensors for {len(clips)} clips"
    )
    as_entries = extractor.spec.axis.as_entries
    return [as_entries(main_track(features)).cpu().numpy().copy() for features in of_clips]


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
