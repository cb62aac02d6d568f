"""Compares two results of an extractor for the same clip, and tells rounding from errors.

On another device, or in a batch of another shape, the last bits of floats differ. If two
codewords are nearly equally near, these bits decide on the code: the frame is a *tie*. It
was tied if its latents agree to rounding and its codes do not.

The difference of a frame is its norm, relative to the reference's: a thousandth or more if
padding leaks into it; 4e-8 to 3e-6 in a batch of another shape, in float32."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
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
from featcache.manifest.audio_locations import AudioLocation, locate
from featcache.manifest.segments import Utterance

ROUNDING = 2e-5
"""The largest difference of a frame by rounding in float32, relative to the frame's norm."""

_DRAWS = 64
_TINY = 1e-30


@dataclass(frozen=True, eq=False)
class SampledClip:
    """An utterance, with its waveform."""

    id: str
    waveform: NDArray[np.float32]
    """Float32 `[num_samples]`, at the config's rate."""


Clips = Sequence[SampledClip]


@dataclass(frozen=True)
class ClipResult:
    """The output of an extractor for a clip."""

    features: torch.Tensor
    """`[F, *item_shape]`."""
    latents: torch.Tensor | None = None
    """The input of the quantiser, float `[F, D]`; None for features that are no codes of
    latents."""

    @property
    def continuous(self) -> torch.Tensor:
        """The latents, or without them the features."""
        return self.features if self.latents is None else self.latents

    def cpu(self) -> ClipResult:
        """Copy the result to the CPU."""
        if self.latents is None:
            return ClipResult(self.features.cpu())
        return ClipResult(self.features.cpu(), self.latents.cpu())


def decode_waveform(
    utterance: Utterance, root: AudioLocation, waveform_maker: WaveformMaker
) -> NDArray[np.float32]:
    """Decode an utterance and make its waveform, float32 `[num_samples]`."""

    def collect(_number: int, rate: int, num_samples: int) -> WaveformBuilder:
        speed = waveform_maker.speed(utterance.id)
        return waveform_maker.builder(rate, speed, utterance.channel, num_samples)

    cut = Cut(utterance.start, utterance.duration)
    (decoded,) = decode(locate(root, utterance.path), [cut], collect=collect)
    if isinstance(decoded, AudioError):
        raise decoded
    return waveform_maker.with_noise(decoded[0], utterance.id)


def extract_results(extractor: Extractor[Params], clips: Clips, device: Device) -> list[ClipResult]:
    """Extract clips in one call, into the device's memory. The caller holds a slot of it."""
    waveforms = device.upload([clip.waveform for clip in clips])
    inputs = [Clip(clip.id, waveform) for clip, waveform in zip(clips, waveforms, strict=True)]
    if extractor.quantizes_latents:
        pairs = extractor.codes_and_latents(inputs)
        return [ClipResult(codes.long(), latents) for codes, latents in pairs]
    results = []
    for tracks in extractor.extract(inputs):
        features = extractor.spec.axis.as_entries(main_track(tracks))
        if not features.is_floating_point():
            features = features.long()  # torch cannot compare all unsigned integers
        results.append(ClipResult(features))
    return results


@dataclass(frozen=True)
class Difference:
    """The difference of two results, over some clips."""

    values: int = 0
    differing: int = 0
    mismatched: int = 0
    """The number of values that differ by more than rounding. The others are ties."""
    frames: int = 0
    disturbed: int = 0
    """The number of frames whose latents or features differ by more than rounding."""
    relative: float = 0.0
    """The largest difference of a frame's latents or features, relative to its norm."""
    absolute: float = 0.0
    first: int = 0
    """The number of frames from a clip's beginning to its last disturbed frame."""
    last: int = 0
    """The number of frames from a clip's first disturbed frame to its end."""

    def __add__(self, other: Difference) -> Difference:
        values, others = astuple(self), astuple(other)
        counts = map(operator.add, values[:5], others[:5])
        return Difference(*counts, *map(max, values[5:], others[5:]))


def compare(result: ClipResult, reference: ClipResult, rounding: float = ROUNDING) -> Difference:
    """Compare a clip's result with a reference of the same shape. Codes without latents are
    mismatched wherever they differ."""
    is_float = reference.features.is_floating_point()
    num_frames = len(reference.features)
    if not num_frames:
        return Difference()
    unequal = (result.features != reference.features).reshape(num_frames, -1)
    if is_float:
        unequal = unequal.any(1, keepdim=True)
    by_frame = unequal.sum(1)
    relative = absolute = torch.zeros(num_frames)
    is_disturbed = by_frame > 0
    if is_float or reference.latents is not None:
        relative, absolute = frame_differences(result.continuous, reference.continuous)
        is_disturbed = relative > rounding
    disturbed = is_disturbed.nonzero()[:, 0].tolist()
    return Difference(
        values=unequal.numel(),
        differing=int(by_frame.sum()),
        mismatched=int(by_frame[is_disturbed].sum()),
        frames=num_frames,
        disturbed=len(disturbed),
        relative=float(relative.max()),
        absolute=float(absolute.max()),
        first=max(disturbed, default=-1) + 1,
        last=num_frames - min(disturbed, default=num_frames),
    )


def compare_all(
    results: Sequence[ClipResult], reference: Sequence[ClipResult], rounding: float = ROUNDING
) -> Difference:
    """Compare all clips' results, which `results` may have several times in turn."""
    pairs = zip(results, cycle(reference), strict=False)
    return sum((compare(result, expected, rounding) for result, expected in pairs), Difference())


def frame_differences(
    values: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure the difference of each frame of two tensors `[F, ...]`: relative in norm,
    infinite from or to NaN; and the largest absolute one; float64 `[F]`."""
    a, b = (tensor.reshape(len(tensor), -1).double() for tensor in (values, reference))
    relative = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=_TINY)
    return relative.nan_to_num(nan=torch.inf, posinf=torch.inf), (a - b).abs().amax(1)


def largest_difference(
    values: NDArray[Any], reference: NDArray[Any], step: NDArray[Any] | float = 0.0
) -> float:
    """Return the largest difference of two arrays of one shape, beyond `step`; relative
    where the reference is above 1."""
    a, b = values.astype(np.float64), reference.astype(np.float64)
    beyond = np.maximum(np.abs(a - b) - step, 0.0)
    return float((beyond / np.maximum(1.0, np.abs(b))).max(initial=0.0))


def tied_frames(
    quantize: Callable[[torch.Tensor], torch.Tensor],
    latents: torch.Tensor,
    codes: torch.Tensor,
    others: torch.Tensor,
) -> torch.Tensor:
    """Find the frames that have `others` instead of `codes`, both `[F, Q]`, because of
    rounding, bool `[F]`. `quantize` turns latents `[R, F, D]` into codes `[R, F, Q]`;
    `latents` belong to `codes`, float32 `[F, D]`.

    Noise of the size of rounding is added to them, in 64 draws from a fixed seed. A frame
    is tied if a draw turns the first code that differs into the code of `others`, and does
    not change the codes before it."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(_DRAWS, *latents.shape, generator=generator).to(latents.device)
    noise *= ROUNDING * latents.norm(dim=1, keepdim=True) / latents.shape[1] ** 0.5
    # of a codec with several tracks, the main one is first
    drawn = quantize(latents + noise)[..., : others.shape[1]].to(others.device)
    first = (codes.to(others.device) != others).int().argmax(1)  # [F]
    later = torch.arange(others.shape[1], device=others.device) > first[:, None]
    return ((drawn == others) | later).all(2).any(0)
