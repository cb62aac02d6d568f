"""Compares codes with those of a reference, and tells ties from errors."""

from dataclasses import dataclass

import pytest
import real_speech
import torch
import torchaudio

from featcache.extractors import Clip
from featcache.extractors.base import main_track
from featcache.extractors.rows import pad_rows

POLICIES = [
    "padded",
    *(pytest.param(policy, marks=pytest.mark.slow) for policy in ("equal_length", "single")),
]
"""How clips may share a batch; what padding could spoil is tried each time."""

ROUNDING = 1e-5
"""Of latents, relative to the largest of the clip's: what another batch shape may change."""

RARE = 5e-4
"""The share of a codec's choices that may be tied, at most; one tie is always allowed."""


@dataclass(frozen=True)
class Reference:
    """What a real model, run on one clip alone, gives."""

    codes: torch.Tensor
    """The codes, int64 `[F, Q]`."""
    latents: torch.Tensor
    """The latents that the codes were looked up for, float32 `[F, D]`."""


def digits(count, rate):
    resample = torchaudio.functional.resample
    return [
        resample(torch.from_numpy(waveform), given, rate)
        for waveform, given in real_speech.digits(count)
    ]


def extract(extractor, waveforms):
    """The features of waveforms, in one call."""
    with torch.inference_mode():
        clips = [Clip(str(i), waveform) for i, waveform in enumerate(waveforms)]
        return [*map(main_track, extractor.extract(clips))]


def encode(extractor, waveforms, padded_length):
    """Latents and codes of waveforms in a batch of that shape, each of them `[frames, …]`."""
    with torch.inference_mode():
        batch = pad_rows(waveforms, len(waveforms), padded_length)
        frames = [extractor.num_frames(len(waveform)) for waveform in waveforms]
        latents, codes = extractor.latents(*batch), extractor.run(*batch).features
    return [(latents[row, :n], codes[row, :n]) for row, n in enumerate(frames)]


def assert_equal(extractor, waveforms, references, features=None):
    """Each waveform's codes are the reference's, but for rare ties; the share of those.

    Latents are looked at where codes differ: in a row of the waveform's own. A frame is
    tied once: the codebooks behind the tie quantise another residual, and rightly give
    other codes."""
    features = extract(extractor, waveforms) if features is None else features
    total = tied = 0
    for waveform, reference, found in zip(waveforms, references, features, strict=True):
        assert (
            found.shape
            == reference.codes.shape
            == (extractor.num_frames(len(waveform)), *extractor.spec.item_shape)
        )
        total += found.numel()
        differing = int((found.long() != reference.codes).any(1).sum())
        if differing:
            ((latents, _),) = encode(extractor, [waveform], extractor.padded_length(len(waveform)))
            assert_close(latents, reference.latents)
            tied += differing
    assert tied <= max(1, RARE * total), (
        f"{tied} frames of {total} codes differ, in latents that do not"
    )
    return tied / total


def assert_close(latents, expected):
    """Latents are equal to rounding."""
    error = float((latents - expected).abs().max())
    assert error <= ROUNDING * float(expected.abs().max()), f"latents differ by {error}"
