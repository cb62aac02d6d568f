"""Trial runs of an extractor for a probe: every batching at one precision, compared with each utterance alone.

Batches hold sampled utterances and cuts of others, and are computed as in extraction.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from featcache.care.clips import SampledClip, extract_results
from featcache.care.compare import ROUNDING, ClipResult, compare_all
from featcache.device import Device
from featcache.errors import ExtractorError, FeatcacheError
from featcache.extraction.features import OutOfMemoryRetry
from featcache.extraction.padded_rows import BATCHINGS, declared_batchings
from featcache.extractors import Extractor, Params
from featcache.extractors.base import Batching
from featcache.extractors.rows import RowExtractor

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
    rounding: float
    """How much rounding may change a frame, relative in norm."""


def try_batchings(
    extractor: RowExtractor[Params],
    clips: Sequence[SampledClip],
    device: Device,
    precision: str,
    reference: Alone | None = None,
) -> tuple[list[Measured], Alone]:
    """Measure the batchings that an extractor declares, and in fp32 the others too; and compute the clips alone.

    `reference` holds the results alone in fp32; it is None if this precision is fp32."""
    declared = declared_batchings(extractor)
    measured: list[Measured] = []
    alone = Alone([], _ROUNDING[precision])
    for batching in declared if reference else BATCHINGS:
        is_declared = batching in declared
        extractor.chosen_batching = batching
        try:
            first, _ = _compute_rows(extractor, clips, device, None if batching == "equal_length" else 1)
            second, speed = _compute_rows(extractor, clips, device, 2)
            if batching == "single":
                alone = Alone(first, alone.rounding)
            elif batching == "equal_length":
                alone = _with_measured_rounding(alone, first, math.inf if reference else _LARGEST_ROUNDING)
            found = _measured(batching, precision, is_declared, first, second, alone, reference or alone, speed)
            if not math.isfinite(found.relative):
                raise ExtractorError(f"values at {precision} are NaN or infinite")
            measured.append(found)
        except (RuntimeError, FeatcacheError) as error:  # no device can do everything at every precision
            if is_declared and not reference:
                raise
            measured.append(Measured(batching, precision, is_declared, error=str(error).partition("\n")[0]))
            if batching == "single":
                break  # there is nothing to compare the others with
    return measured, alone


def _with_measured_rounding(alone: Alone, among_copies: Sequence[ClipResult], at_most: float) -> Alone:
    """Raise the rounding to what clips among copies of themselves show."""
    if not alone.results[0].continuous.is_floating_point():
        return alone
    shown = 4 * compare_all(among_copies, alone.results, math.inf).relative
    return Alone(alone.results, max(alone.rounding, min(shown, at_most)))


def whole_clips(extractor: Extractor[Params], clips: Sequence[SampledClip], device: Device) -> list[Measured]:
    """Measure an extractor that takes no rows: each clip alone, all at once, and in two batches in the opposite order.

    Such an extractor promises the same bits, so none may differ."""

    def compute(groups: Sequence[Sequence[int]]) -> tuple[list[ClipResult], float]:
        batches = []
        for group in groups:
            members = [clips[number] for number in group]
            batches.append(_Batch(members, dict(enumerate(group)), sum(len(clip.waveform) for clip in members)))
        return _compute_batches(extractor, batches, device)

    every = range(len(clips))
    results, alone_speed = compute([[number] for number in every])
    together, _ = compute([every])
    reordered, speed = compute([every[::-1][first::2] for first in range(min(2, len(clips)))])
    alone = Alone(results, 0.0)
    batched = _measured(extractor.batching, "fp32", True, together, reordered, alone, alone, speed)
    return [Measured("single", "fp32", is_declared=True, times_real_time=alone_speed), batched]


def _measured(
    batching: Batching,
    precision: str,
    is_declared: bool,
    first: list[ClipResult],
    second: list[ClipResult],
    alone: Alone,
    reference: Alone,
    times_real_time: float,
) -> Measured:
    """Compare what clips gave with one set of neighbours, and with another, with each clip alone."""
    total = compare_all([*first, *second], reference.results, reference.rounding)
    by_batching = compare_all([*first, *second], alone.results, alone.rounding)
    is_repeatable = all(torch.equal(a.features, b.features) for a, b in zip(first, second, strict=True))
    return Measured(
        policy=batching,
        precision=precision,
        is_declared=is_declared,
        differing=total.differing / total.values,
        tied=(total.differing - total.mismatched) / total.values,
        mismatch=total.mismatched / total.values,
        disturbed=by_batching.disturbed / by_batching.frames,
        relative=total.relative,
        absolute=total.absolute,
        first=by_batching.first,
        last=by_batching.last,
        repeatable=None if batching == "single" else is_repeatable,
        times_real_time=times_real_time,
    )


@dataclass(frozen=True)
class _Batch:
    """Clips that are computed in one call."""

    clips: list[SampledClip]
    """The clips, in the order of the call."""
    wanted: dict[int, int]
    """The clips that are in the sample: position in `clips` -> number in the sample."""
    num_samples: int
    """Samples of audio that count for the speed."""


def compute_alone(extractor: RowExtractor[Params], clips: Sequence[SampledClip], device: Device) -> list[ClipResult]:
    """The results of clips that are computed alone."""
    extractor.chosen_batching = "single"
    return _compute_rows(extractor, clips, device, None)[0]


def _compute_rows(
    extractor: RowExtractor[Params], clips: Sequence[SampledClip], device: Device, seed: int | None
) -> tuple[list[ClipResult], float]:
    """The result of each clip in its batch, and × real time; `seed` is that of `_row_batches`."""
    pieces = (piece for clip in clips for piece in extractor.pieces(len(clip.waveform)))
    lengths = {extractor.padded_length(piece.num_samples) for piece in pieces}

    def compute(_: int, alone: bool) -> tuple[list[ClipResult], float]:
        return _compute_batches(extractor, _row_batches(extractor, clips, device, seed), device, alone)

    return OutOfMemoryRetry(extractor, lengths, device).run(compute)


def _compute_batches(
    extractor: Extractor[Params], batches: Sequence[_Batch], device: Device, alone: bool = False
) -> tuple[list[ClipResult], float]:
    """Compute batches: as many at once as extraction does, or with `alone` one after the other.

    The results of the wanted clips are in the order of their numbers; beside them, seconds of audio per second."""

    def compute_batch(batch: _Batch) -> dict[int, ClipResult]:
        with device.slot(alone):
            results = extract_results(extractor, batch.clips, device)
            return {number: results[position].cpu() for position, number in batch.wanted.items()}

    with ThreadPoolExecutor(device.slots) as pool:
        if device.is_cuda:  # once more, since each new thread makes plans for its convolutions
            list(pool.map(compute_batch, batches))
        started = perf_counter()
        results = {number: result for found in pool.map(compute_batch, batches) for number, result in found.items()}
        seconds = perf_counter() - started
    audio_seconds = sum(batch.num_samples for batch in batches) / extractor.spec.sample_rate
    return [results[number] for number in sorted(results)], audio_seconds / seconds


def _row_batches(
    extractor: RowExtractor[Params], clips: Sequence[SampledClip], device: Device, seed: int | None
) -> list[_Batch]:
    """A batch for each clip, of the shape that follows from its length.

    With a seed, cuts of other clips fill the batch, in any order: of lengths that may share a batch with the clip, by
    the extractor's chosen batching. All rows of a padded batch count for the speed, since any corpus fills them: there
    are few padded lengths. Of a batch of equal lengths, as many rows count as clips of the sample have this length."""
    same_length = Counter(len(clip.waveform) for clip in clips)
    batches = []
    for number, clip in enumerate(clips):
        rows = 1 if seed is None else _clips_in_batch(extractor, len(clip.waveform), device)
        generator = np.random.default_rng((seed or 0, number))
        batch = [_neighbour(extractor, clips, number, generator) for _ in range(rows - 1)]
        position = int(generator.integers(rows))
        batch.insert(position, clip)
        num_counted = sum(len(clip.waveform) for clip in batch)
        if extractor.chosen_batching == "equal_length":
            num_counted = min(rows, same_length[len(clip.waveform)]) * len(clip.waveform)
        batches.append(_Batch(batch, {position: number}, num_counted))
    return batches


def _clips_in_batch(extractor: RowExtractor[Params], num_samples: int, device: Device) -> int:
    """How many clips of a length fill a batch; for clips in chunks, how many fill one of the longest chunks."""
    pieces = extractor.pieces(num_samples)
    longest = extractor.padded_length(max(piece.num_samples for piece in pieces))
    return math.ceil(extractor.rows(longest, device.torch_device) / len(pieces))


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
