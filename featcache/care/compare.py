"""Compares two results of an extractor for the same clip, and tells rounding from errors.

Two computations of the same numbers differ in their last bits if their devices or the
shapes of their batches differ, because sums are added in another order. For float
features that is all. A code is the index of the nearest codeword: if the distances of two
codewords are nearly equal, the last bits decide. Such a frame is a *tie*.

The quantised latents tell a tie from an error. Quantisation looks at one frame's latents
and at nothing else, so if the latents agree to rounding and the codes do not, the frame
was tied, and nothing was wrong before it. (After the first codebook in which two residual
quantisations differ, they quantise different residuals, and rightly differ.)

Differences are measured frame by frame, as the norm of the difference relative to the
norm of the reference. Padding that leaks into a frame changes it by a thousandth or more;
another shape of the batch, in float32, by 4e-8 to 3e-6."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio.decode import Cut, decode
from featcache.audio.resample import WaveformBuilder
from featcache.audio.waveform import WaveformMaker
from featcache.device import Device
from featcache.errors import AudioError
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.base import main_track
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import Rows
from featcache.manifest.audio_locations import AudioLocation, locate
from featcache.manifest.segments import Utterance

ROUNDING = 2e-5
"""The largest difference of a frame by rounding in float32, relative to the frame's norm."""

_DRAWS = 64
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class SampledClip:
    """An utterance to try something on."""

    id: str
    waveform: NDArray[np.float32]
    """The waveform, float32 `[num_samples]` at the config's rate."""


Clips = Sequence[SampledClip]


@dataclass(frozen=True)
class ClipResult:
    """What an extractor gave for a clip."""

    features: torch.Tensor
    """The features, `[F, *item_shape]`."""
    latents: torch.Tensor | None = None
    """For codes, what was quantised, float `[F, D]`; None if the extractor does not tell,
    and for float features."""

    @property
    def continuous(self) -> torch.Tensor:
        """What tells rounding from errors: the latents, or without them the features."""
        return self.features if self.latents is None else self.latents

    def cpu(self) -> ClipResult:
        """The features and latents in the memory of the CPU."""
        return ClipResult(self.features.cpu(), None if self.latents is None else self.latents.cpu())


def decode_waveform(
    utterance: Utterance, root: AudioLocation, waveform_maker: WaveformMaker
) -> NDArray[np.float32]:
    """Decode an utterance and make its waveform, float32 `[num_samples]`. Raises
    AudioError if it cannot be decoded."""

    def collect(_number: int, rate: int, num_samples: int) -> WaveformBuilder:
        speed = waveform_maker.speed(utterance.id)
        return waveform_maker.builder(rate, speed, utterance.channel, num_samples)

    cut = Cut(utterance.start, utterance.duration)
    (decoded,) = decode(locate(root, utterance.path), [cut], collect=collect)
    if isinstance(decoded, AudioError):
        raise decoded
    return waveform_maker.with_noise(decoded[0], utterance.id)


def extract_results(extractor: Extractor[Params], clips: Clips, device: Device) -> list[ClipResult]:
    """Extract clips in one call. The results are on the device, of which the caller holds
    a slot."""
    waveforms = device.upload([clip.waveform for clip in clips])
    given = [Clip(clip.id, waveform) for clip, waveform in zip(clips, waveforms, strict=True)]
    if isinstance(extractor, CodecExtractor):
        num_codebooks = len(extractor.spec.codebook_sizes)
        both = [rows.features for rows in _with_latents(extractor).extract_rows(given)]
        return [ClipResult(one[:, :num_codebooks].long(), one[:, num_codebooks:]) for one in both]
    as_entries = extractor.spec.axis.as_entries
    found = [as_entries(main_track(features)) for features in extractor.extract(given)]
    # torch cannot compare all unsigned integers
    return [
        ClipResult(features if features.is_floating_point() else features.long())
        for features in found
    ]


def _with_latents(extractor: CodecExtractor[Any]) -> CodecExtractor[Any]:
    """A copy of the extractor whose features are float64 `[R, F, Q + D]`: codes, and the
    latents they are made from."""
    showing = copy.copy(extractor)

    def encode(waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        latents = extractor.latents(waveforms, num_samples)
        this_call = copy.copy(extractor)  # threads call at once
        this_call.latents = lambda *_: latents  # type: ignore[method-assign]
        rows = this_call.encode(waveforms, num_samples)
        return Rows(torch.cat([rows.features.double(), latents.double()], dim=2), rows.side)

    showing.encode = encode  # type: ignore[method-assign]
    return showing


@dataclass(frozen=True)
class Difference:
    """How much two results differ, over some clips. Differences of two sets of clips can
    be added."""

    values: int = 0
    """The number of values compared: codes, or for float features, frames."""
    differing: int = 0
    """The number of values that differ; of frames, in any bit."""
    mismatched: int = 0
    """The number of differing values that rounding does not explain. The others are ties."""
    frames: int = 0
    disturbed: int = 0
    """The number of frames whose latents or features differ by more than rounding, even
    if no code does."""
    relative: float = 0.0
    """The largest difference of a frame's latents or features, relative to the frame's
    norm."""
    absolute: float = 0.0
    """The largest difference of any latent or feature."""
    first: int = 0
    """Every disturbed frame is among the first `first` frames of its clip; 0 if there is
    none."""
    last: int = 0
    """Every disturbed frame is among the last `last` frames of its clip; 0 if there is
    none."""

    def __add__(self, other: Difference) -> Difference:
        both = {
            name: (getattr(self, name), getattr(other, name))
            for name in Difference.__dataclass_fields__
        }
        largest = ("relative", "absolute", "first", "last")
        return Difference(
            **{name: max(pair) if name in largest else sum(pair) for name, pair in both.items()}
        )


def compare(found: ClipResult, reference: ClipResult, rounding: float = ROUNDING) -> Difference:
    """Compare a clip's result with a reference of the same shape.

    A frame may differ by `rounding`, relative to its norm. Codes without latents are
    mismatched wherever they differ.
    """
    is_float = reference.features.is_floating_point()
    frames = len(reference.features)
    unequal = (found.features != reference.features).reshape(frames, -1)
    counts = unequal.any(1, keepdim=True) if is_float else unequal
    by_frame = counts.sum(1)
    relative, absolute, disturbed = torch.zeros(frames), torch.zeros(frames), by_frame > 0
    if is_float or reference.latents is not None:
        relative, absolute = frame_differences(found.continuous, reference.continuous)
        disturbed = relative > rounding
    at = disturbed.nonzero()[:, 0].tolist()
    return Difference(
        values=counts.numel(),
        differing=int(by_frame.sum()),
        mismatched=int(by_frame[disturbed].sum()),
        frames=frames,
        disturbed=len(at),
        relative=float(relative.max()) if frames else 0.0,
        absolute=float(absolute.max()) if frames else 0.0,
        first=at[-1] + 1 if at else 0,
        last=frames - at[0] if at else 0,
    )


def compare_all(
    found: Sequence[ClipResult], reference: Sequence[ClipResult], rounding: float = ROUNDING
) -> Difference:
    """Compare the results of all clips; `found` may have all of them several times, one
    time after the other."""
    pairs = zip(found, cycle(reference), strict=False)
    return sum((compare(result, expected, rounding) for result, expected in pairs), Difference())


def frame_differences(
    found: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The difference of each frame of two tensors `[F, ...]`: relative in norm, and
    largest absolute; float64 `[F]`.

    The relative difference from or to NaN is infinite."""
    a, b = (tensor.reshape(len(tensor), -1).double() for tensor in (found, reference))
    apart = a - b
    relative = apart.norm(dim=1) / b.norm(dim=1).clamp(min=_TINY)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf), apart.abs().amax(1)


def largest_difference(
    found: NDArray[Any], reference: NDArray[Any], step: NDArray[Any] | float = 0.0
) -> float:
    """The largest difference of two arrays of one shape, beyond `step`; relative where
    the reference is above 1."""
    a, b = found.astype(np.float64), reference.astype(np.float64)
    beyond = np.maximum(np.abs(a - b) - step, 0.0)
    return float((beyond / np.maximum(1.0, np.abs(b))).max(initial=0.0))


def tied_frames(
    quantize: Callable[[torch.Tensor], torch.Tensor],
    latents: torch.Tensor,
    codes: torch.Tensor,
    others: torch.Tensor,
) -> torch.Tensor:
    """Which frames have `others` instead of `codes` because of rounding, if the latents
    of `others` are not known.

    A frame is tied if noise of the size of rounding, added to its latents, turns the
    first of its codes that differs into that of `others`, and leaves the codes before it
    alone: in one of 64 draws, from a fixed seed. This asks the quantiser itself, so it
    holds for any quantiser: residual, factorised, scalar. (Two codewords that are nearly
    the same are tied whatever the latents are, which this does not see.)

    Args:
        quantize: Turns latents `[R, F, D]` into codes `[R, F, Q]`, frame by frame.
        latents: The latents of `codes`, float32 `[F, D]`.
        codes, others: Two choices of codes, `[F, Q]`, which differ in every frame.

    Returns:
        Bool `[F]`.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_DRAWS, *latents.shape, generator=generator).to(latents.device)
    noise *= ROUNDING * latents.norm(dim=1, keepdim=True) / latents.shape[1] ** 0.5
    drawn = quantize(latents + noise).to(others.device)
    first = (codes.to(others.device) != others).int().argmax(1)  # [F]
    later = torch.arange(others.shape[1], device=others.device) > first[:, None]
    return ((drawn == others) | later).all(2).any(0)
