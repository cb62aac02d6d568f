"""Trial runs of an extractor for a probe: every batching at one precision, compared with each utterance alone.

Batches hold sampled utterances and cuts of others, and are computed as in extraction.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch

from featcache.device import Device
from featcache.errors import ExtractorError, FeatcacheError
from featcache.extract.batching import BATCHINGS, declared_batchings
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.base import Batching
from featcache.extractors.codec import CodecExtractor
from featcache.extractors.rows import RowExtractor, Rows
from featcache.health.compare import ROUNDING, ClipResult, compare_all
from featcache.health.sampling import SampledClip

_ROUNDING = {"fp32": ROUNDING, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The least that rounding may do to a frame, relative to its norm; below fp32, half a unit in the last place."""

_LARGEST_ROUNDING = 1e-3
"""The most that rounding may do in fp32: what differs by more among copies of itself does not only round."""

_DRAWS = 20


@dataclass(frozen=True)
class Measured:
    """How one batching did at one precision. Shares are of codes; for float features, of frames."""

    policy: str
    """`single`, `equal_length` or `padded`; if the extractor takes no rows, `single` or its own `batching`."""
    precision: str
    """The precision: `fp32`, `tf32`, `bf16` or `fp16`."""
    is_declared: bool
    """Whether the extractor declares that its values do not depend on this batching."""
    error: str | None = None
    """Why the batching could not be measured; None if it was."""
    differing: float = 0.0
    """The share of values that differ from the reference."""
    tied: float = 0.0
    """The share of values that differ because of rounding."""
    mismatch: float = 0.0
    """The share of values that differ by more than rounding."""
    disturbed: float = 0.0
    """The share of frames whose latents or features batching changes by more than rounding, compared with each
    utterance alone at this same precision. For codes without known latents: of frames in which a code differs. A code
    may stay the same though its frame is disturbed, as in the silence at the end of a clip; in another clip it will
    not."""
    relative: float = 0.0
    """The largest difference of a frame from the reference, relative in norm: of its latents, or without latents of its
    features."""
    absolute: float = 0.0
    """The largest difference of any latent or feature."""
    first: int = 0
    """Every disturbed frame is among the first `first` frames of its utterance."""
    last: int = 0
    """Every disturbed frame is among the last `last` frames of its utterance."""
    repeatable: bool | None = None
    """Whether every bit stayed the same with other neighbours; None for utterances alone."""
    times_real_time: float = 0.0
    """Seconds of audio per second."""


@dataclass(frozen=True)
class Alone:
    """The results of clips that were computed alone, at one precision."""

    results: list[ClipResult]
    """The result of each clip."""
    rounding: float
    """How much rounding may change a frame, relative in norm."""


class Trials:
    """Every batching at one precision.

    Args:
        extractor: The extractor, at this precision.
        clips: The sampled utterances.
        device: The device to measure on.
        reference: The results in fp32; None if this precision is fp32.
        precision: The name of the precision.
    """

    alone: list[ClipResult]
    """The result of each clip alone at this precision."""
    rounding: float
    """How much rounding may change a frame, relative in norm."""

    def __init__(
        self,
        extractor: RowExtractor[Params],
        clips: Sequence[SampledClip],
        device: Device,
        reference: Alone | None,
        precision: str,
    ) -> None:
        self.alone = []
        self.rounding = _ROUNDING[precision]
        self._extractor = extractor
        self._clips = clips
        self._device = device
        self._reference = reference
        self._precision = precision

    def run(self) -> Iterator[Measured]:
        """Yield how each batching does: those that the extractor declares, and in fp32 the others too."""
        declared = declared_batchings(self._extractor)
        for batching in declared if self._reference else BATCHINGS:
            is_declared = batching in declared
            self._extractor.chosen_batching = batching
            try:
                yield self._measure(batching, is_declared)
            except (RuntimeError, FeatcacheError) as error:  # no device can do everything at every precision
                if is_declared and not self._reference:
                    raise
                yield Measured(batching, self._precision, is_declared, error=str(error).partition("\n")[0])
                if batching == "single":
                    return  # there is nothing to compare the others with

    def _measure(self, batching: Batching, is_declared: bool) -> Measured:
        first, _ = self._compute(None if batching == "equal_length" else 1)
        second, times_real_time = self._compute(2)
        if batching == "single":
            self.alone = first
        if batching == "equal_length":
            self._set_rounding(first)
        reference = self._reference or Alone(self.alone, self.rounding)
        found = [*first, *second]
        total = compare_all(found, reference.results, reference.rounding)
        if not math.isfinite(total.relative):
            raise ExtractorError(f"values at {self._precision} are NaN or infinite")
        by_batching = compare_all(found, self.alone, self.rounding)
        return Measured(
            policy=batching,
            precision=self._precision,
            is_declared=is_declared,
            differing=total.differing / total.values,
            tied=(total.differing - total.mismatched) / total.values,
            mismatch=total.mismatched / total.values,
            disturbed=by_batching.disturbed / by_batching.frames,
            relative=total.relative,
            absolute=total.absolute,
            first=by_batching.first,
            last=by_batching.last,
            repeatable=None if batching == "single" else _same_bits(first, second),
            times_real_time=times_real_time,
        )

    def _set_rounding(self, among_copies: Sequence[ClipResult]) -> None:
        if self.alone[0].continuous.is_floating_point():
            measured = 4 * compare_all(among_copies, self.alone, math.inf).relative
            self.rounding = max(self.rounding, min(measured, math.inf if self._reference else _LARGEST_ROUNDING))

    def _compute(self, seed: int | None) -> tuple[list[ClipResult], float]:
        """The result of each clip in its batch, and × real time. Batches are made smaller if they do not fit."""
        try:
            batches = row_batches(self._extractor, self._clips, self._device, seed)
            return compute_batches(self._extractor, batches, self._device)
        except torch.OutOfMemoryError:
            longest = max(len(clip.waveform) for clip in self._clips)
            rows = max(clips_in_batch(self._extractor, len(clip.waveform), self._device) for clip in self._clips)
            length = self._extractor.padded_length(longest)
            if rows == 1 or not self._extractor.shrink(rows, length, self._device.torch_device):
                raise
        torch.cuda.empty_cache()
        return self._compute(seed)


def whole_clips(extractor: Extractor[Params], clips: Sequence[SampledClip], device: Device) -> list[Measured]:
    """Measure an extractor that takes no rows: each clip alone, all at once, and in two batches in the opposite order.

    Such an extractor promises the same bits, so none may differ.
    """
    every = range(len(clips))
    alone, alone_speed = _compute_clips(extractor, clips, [[number] for number in every], device)
    together, _ = _compute_clips(extractor, clips, [list(every)], device)
    halves = [list(every)[::-1][first::2] for first in range(min(2, len(clips)))]
    reordered, speed = _compute_clips(extractor, clips, halves, device)
    total = compare_all([*together, *reordered], alone, 0.0)
    share = total.differing / total.values
    batched = Measured(
        policy=extractor.batching,
        precision="fp32",
        is_declared=True,
        differing=share,
        mismatch=share,
        disturbed=share,
        relative=total.relative,
        absolute=total.absolute,
        first=total.first,
        last=total.last,
        repeatable=_same_bits(together, reordered),
        times_real_time=speed,
    )
    return [Measured("single", "fp32", is_declared=True, times_real_time=alone_speed), batched]


def _compute_clips(
    extractor: Extractor[Params], clips: Sequence[SampledClip], groups: Sequence[Sequence[int]], device: Device
) -> tuple[list[ClipResult], float]:
    rate = extractor.spec.sample_rate
    batches = [
        Batch(
            clips=[clips[number] for number in group],
            wanted=dict(enumerate(group)),
            seconds=sum(len(clips[number].waveform) for number in group) / rate,
        )
        for group in groups
    ]
    return compute_batches(extractor, batches, device)


def _same_bits(first: Sequence[ClipResult], second: Sequence[ClipResult]) -> bool:
    return all(torch.equal(a.features, b.features) for a, b in zip(first, second, strict=True))


@dataclass(frozen=True)
class Batch:
    """Clips that are computed in one call."""

    clips: list[SampledClip]
    """The clips, in the order of the call."""
    wanted: dict[int, int]
    """The clips that are in the sample: position in `clips` -> number in the sample."""
    seconds: float
    """Seconds of audio that count for the speed."""


def compute_batches(
    extractor: Extractor[Params], batches: Sequence[Batch], device: Device
) -> tuple[list[ClipResult], float]:
    """Compute batches, as many at once as extraction does.

    Returns:
        The results of the wanted clips, in the order of their numbers, and seconds of audio per second.

    Raises:
        RuntimeError: The model fails.
    """
    num_codebooks = len(extractor.spec.codebook_sizes)
    seen = with_latents(extractor) if isinstance(extractor, CodecExtractor) else extractor

    def result_of(features: torch.Tensor) -> ClipResult:
        if seen is extractor:
            return ClipResult(features if features.is_floating_point() else features.long())
        return ClipResult(features[:, :num_codebooks].long(), features[:, num_codebooks:])

    def compute_batch(batch: Batch) -> dict[int, ClipResult]:
        with device.slot():
            waveforms = device.upload([clip.waveform for clip in batch.clips])
            pairs = zip(batch.clips, waveforms, strict=True)
            features = seen.extract([Clip(clip.id, waveform) for clip, waveform in pairs])
            return {number: result_of(features[position].cpu()) for position, number in batch.wanted.items()}

    with ThreadPoolExecutor(device.workers) as pool:
        started = perf_counter()
        results = {number: result for found in pool.map(compute_batch, batches) for number, result in found.items()}
        seconds = perf_counter() - started
    return [results[number] for number in sorted(results)], sum(batch.seconds for batch in batches) / seconds


def row_batches(
    extractor: RowExtractor[Params], clips: Sequence[SampledClip], device: Device, seed: int | None
) -> list[Batch]:
    """A batch for each clip, of the shape that follows from its length.

    With a seed, cuts of other clips fill the batch, in any order: of lengths that may share a batch with the clip, by
    the extractor's chosen batching. All rows of a padded batch count for the speed, since any corpus fills them: there
    are few padded lengths. Of a batch of equal lengths, as many rows count as clips of the sample have this length.

    Args:
        extractor: The extractor, whose batching has been chosen.
        clips: The sampled utterances.
        device: The device that will compute the batches.
        seed: Decides the other clips and their order. None for batches of the clip alone.
    """
    same_length = Counter(len(clip.waveform) for clip in clips)
    batches = []
    for number, clip in enumerate(clips):
        rows = 1 if seed is None else clips_in_batch(extractor, len(clip.waveform), device)
        generator = np.random.default_rng((seed or 0, number))
        batch = [_neighbour(extractor, clips, number, generator) for _ in range(rows - 1)]
        position = int(generator.integers(rows))
        batch.insert(position, clip)
        num_counted = sum(len(clip.waveform) for clip in batch)
        if extractor.chosen_batching == "equal_length":
            num_counted = min(rows, same_length[len(clip.waveform)]) * len(clip.waveform)
        batches.append(Batch(batch, {position: number}, num_counted / extractor.spec.sample_rate))
    return batches


def clips_in_batch(extractor: RowExtractor[Params], num_samples: int, device: Device) -> int:
    """How many clips of a length fill a batch; for clips in chunks, how many fill one of the longest chunks."""
    pieces = extractor.pieces(num_samples)
    longest = extractor.padded_length(max(piece.num_samples for piece in pieces))
    return math.ceil(extractor.rows(longest, device.torch_device) / len(pieces))


def with_latents(extractor: CodecExtractor[Any]) -> CodecExtractor[Any]:
    """A copy of the extractor whose features are float64 `[R, F, Q + D]`: codes, and the latents they are made from."""
    showing = copy.copy(extractor)

    def encode(waveforms: torch.Tensor, num_samples: torch.Tensor) -> Rows:
        found: list[torch.Tensor] = []
        this_call = copy.copy(extractor)

        def latents(waveforms: torch.Tensor, num_samples: torch.Tensor) -> torch.Tensor:
            found.append(extractor.latents(waveforms, num_samples))
            return found[-1]

        this_call.latents = latents  # type: ignore[method-assign]
        rows = this_call.encode(waveforms, num_samples)
        (of_call,) = found
        return Rows(torch.cat([rows.features.double(), of_call.double()], dim=2), rows.side)

    showing.encode = encode  # type: ignore[method-assign]
    return showing


def _neighbour(
    extractor: RowExtractor[Params], clips: Sequence[SampledClip], number: int, generator: np.random.Generator
) -> SampledClip:
    """A cut of a clip other than `number`, repeated if it is too short, that may share a batch with `number`."""
    num_samples = _length_beside(extractor, len(clips[number].waveform), generator)
    others = [other for other in range(len(clips)) if other != number] or [number]
    clip = clips[int(generator.choice(others))]
    first = int(generator.integers(len(clip.waveform)))
    return SampledClip(f"{clip.id} from {first}", np.resize(np.roll(clip.waveform, -first), num_samples))


def _length_beside(extractor: RowExtractor[Params], num_samples: int, generator: np.random.Generator) -> int:
    """A length near `num_samples` whose padded length is the same; `num_samples` if a few draws do not give one."""
    padded = extractor.padded_length(num_samples)
    for length in generator.integers(max(1, num_samples * 7 // 8), padded + 1, _DRAWS).tolist():
        if extractor.padded_length(length) == padded and extractor.num_frames(length):
            return int(length)
    return num_samples
