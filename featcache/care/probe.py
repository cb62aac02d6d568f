"""A probe: what batching and precision change in the values of some utterances, and how
fast they are.

Every batching is tried, at every precision, and compared with each utterance alone.
Batches hold sampled utterances and cuts of others, and are computed as in extraction."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from time import perf_counter
from typing import Any

import numpy as np
import torch

from featcache.audio.decode import probe_seconds
from featcache.audio.remote import each_at_once
from featcache.audio.waveform import WaveformMaker
from featcache.care.compare import (
    ROUNDING,
    ClipResult,
    Clips,
    SampledClip,
    compare_all,
    decode_waveform,
    extract_results,
)
from featcache.config import Config
from featcache.device import Device
from featcache.errors import (
    AudioError,
    ConfigError,
    ExtractorError,
    FeatcacheError,
    ManifestError,
    Reason,
)
from featcache.extraction.audio_files import rows_of_first_copy
from featcache.extraction.features import until_it_fits
from featcache.extraction.padded_rows import BATCHINGS, declared_batchings, precision_of
from featcache.extractors import Extractor, Params
from featcache.extractors.rows import RowExtractor
from featcache.manifest.copies import expand
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest
from featcache.spec import FeatureSpec
from featcache.version.version import library_versions

_LONGEST_SECONDS = 30.0
"""Longer utterances are cut to this length, or to three chunks if these are longer."""

_MOST_HEADERS = 256
"""The number of files whose headers are read if the manifest does not give all durations."""

_NEAR = 4096
"""The first rows, of which those in one container are sampled."""

_SEED = 0

_ROUNDING = {"fp32": ROUNDING, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The least that rounding may do to a frame, relative to its norm; below fp32, half a
unit in the last place."""

_LARGEST_ROUNDING = 1e-3
"""The most that rounding may do in fp32: what differs by more among copies of itself does
not only round."""

_DRAWS = 20

_Batch = list[tuple[int, SampledClip]]
"""Clips that are computed in one call, each with its number in the sample; -1 for those
that are not in it."""

_Timed = tuple[list[ClipResult], float]
"""The results of the sample's clips, in the order of their numbers; and seconds of audio
per second."""


@dataclass(frozen=True)
class Measured:
    """How one batching did at one precision. Shares are of codes; for float features, of
    frames."""

    policy: str
    """`single`, `equal_length` or `padded`; if the extractor takes no rows, `single` or
    its own `batching`."""
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
    """The share of frames whose latents or features batching changes by more than
    rounding, compared with each utterance alone at the same precision. For codes without
    known latents: of frames in which a code differs. A code may stay the same in a
    disturbed frame, as in the silence at the end of a clip, but in another clip it will
    not."""
    relative: float = 0.0
    """The frames' largest difference from the reference, relative in norm: of latents, or
    without them of features."""
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
class Chunks:
    """What cutting into chunks changes: each utterance in chunks, alone, in fp32,
    compared with the whole utterance."""

    exact: bool
    """Whether the overlap covers the model's receptive field, so that nothing may change."""
    utterances: int
    """How many utterances of the sample are longer than a chunk. If there is none,
    nothing was measured."""
    differing: float
    """The share of codes, or for float features of frames, that differ."""
    mismatch: float
    """The share that differs by more than rounding."""
    relative: float
    """The largest difference of a frame, relative in norm."""


@dataclass(frozen=True)
class Probe:
    """The result of a probe."""

    config: str
    fingerprint: str
    extractor: str
    """The extractor, as the config names it."""
    declared: str
    """The loosest batching that the extractor declares."""
    precision: str
    device: str
    threads: int
    date: str
    """When the probe was made: ISO 8601, in UTC."""
    made_by: dict[str, str]
    utterances: int
    skipped: list[str]
    """The utterances of the sample that could not be measured, each with the reason."""
    shortest: float
    """The length of the shortest utterance, in seconds."""
    longest: float
    """The length of the longest utterance, in seconds."""
    seconds: float
    """The length of all utterances together, in seconds."""
    frames: int
    spec: FeatureSpec
    """What the extractor's features are."""
    rounding: dict[str, float]
    """How much rounding may change a frame, relative in norm, by precision; empty if no
    bit may differ."""
    measured: list[Measured]
    chunks: Chunks | None
    """What chunks change; None if the config has none."""

    @property
    def fastest(self) -> Measured | None:
        """The fastest of the declared batchings, at any precision, of which no value is
        mismatched or disturbed."""
        measured = [trial for trial in self.measured if trial.is_declared and trial.error is None]
        clean = [trial for trial in measured if not trial.mismatch and not trial.disturbed]
        return max(clean, key=lambda trial: trial.times_real_time, default=None)

    def document(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {**asdict(self), "fastest": self.fastest and asdict(self.fastest)}


def probe(
    config: Config,
    manifest: Manifest,
    device: Device,
    count: int,
    report: Callable[[str], object] = lambda what: None,
) -> Probe:
    """Measure what batching and precision do to a config's values, on a device.

    `count` of the manifest's utterances are sampled, over the whole range of their
    lengths. `report` is called with the name of each precision, before it is measured.
    Raises ConfigError if the extractor cannot be built; ManifestError if none of the
    sampled utterances can be extracted."""
    device.configure_torch()
    extractor = config.build(device.torch_device)
    clips, skipped = _sample(config, extractor, manifest, count)
    measured: list[Measured] = []
    rounding: dict[str, float] = {}
    chunks = None
    if not isinstance(extractor, RowExtractor):
        measured = whole_clips(extractor, clips, device)
    else:
        reference: Alone | None = None
        for params in _precisions(config, device):
            precision = precision_of(params)
            report(precision)
            # The weights of one precision at a time: they are freed when those of the
            # next have been loaded.
            extractor = _build_rows(config, device, params)
            found, alone = try_batchings(extractor, clips, device, precision, reference)
            measured += found
            rounding[precision] = alone.rounding
            reference = reference or alone
        if getattr(config.params, "chunk", None) and reference:
            report("whole utterances")
            chunks = _chunks(config, extractor, clips, device, reference)
    seconds = [len(clip.waveform) / extractor.spec.sample_rate for clip in clips]
    return Probe(
        config=config.name,
        fingerprint=config.fingerprint(),
        extractor=config.extractor,
        declared=extractor.batching,
        precision=precision_of(config.params),
        device=device.label,
        threads=device.threads,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        made_by=library_versions(),
        utterances=len(clips),
        skipped=skipped,
        shortest=min(seconds),
        longest=max(seconds),
        seconds=sum(seconds),
        frames=sum(extractor.num_frames(len(clip.waveform)) for clip in clips),
        spec=extractor.spec,
        rounding=rounding,
        measured=measured,
        chunks=chunks,
    )


def _build_rows(config: Config, device: Device, params: Params) -> RowExtractor[Params]:
    """Build an extractor that takes rows with these parameters."""
    extractor = replace(config, params=params).build(device.torch_device)
    if not isinstance(extractor, RowExtractor):
        raise ConfigError(
            f"config {config.name}: {config.extractor} takes rows only with some parameters"
        )
    return extractor


def _precisions(config: Config, device: Device) -> list[Params]:
    """The config's parameters at each precision, fp32 first; only as they are if they
    name no precision."""
    if "precision" not in type(config.params).model_fields:
        return [config.params]
    precisions = ("fp32", "tf32", "bf16", "fp16") if device.is_cuda else ("fp32", "bf16", "fp16")
    return [config.params.model_copy(update={"precision": precision}) for precision in precisions]


def _sample(
    config: Config, extractor: Extractor[Params], manifest: Manifest, count: int
) -> tuple[list[SampledClip], list[str]]:
    """The sampled utterances, and what is wrong with those that cannot be extracted."""
    chunk = getattr(config.params, "chunk", None)
    longest = max(_LONGEST_SECONDS, 3 * chunk.seconds if chunk else 0.0)
    longest = min(
        limit for limit in (longest, config.audio.max_seconds, extractor.max_seconds) if limit
    )
    clips: list[SampledClip] = []
    faults: list[str] = []
    rate, waveform_maker = config.audio.sample_rate, WaveformMaker.of(config.audio, config.augment)
    for utterance in utterances_by_length(expand(manifest, waveform_maker.copies), count):
        longest_cut = longest * waveform_maker.speed(utterance.id)
        if longest_cut < _seconds(manifest, utterance) < math.inf:
            utterance = replace(utterance, duration=longest_cut)
        try:
            waveform = decode_waveform(utterance, manifest.root, waveform_maker)[
                : int(longest * rate)
            ]
            if not extractor.num_frames(len(waveform)):
                raise AudioError(
                    Reason.TOO_SHORT, f"{len(waveform)} samples are too few for one frame"
                )
            if isinstance(extractor, RowExtractor):
                extractor.pieces(len(waveform))
        except AudioError as error:
            faults.append(f"{utterance.id}: {error.reason}: {error}")
        else:
            clips.append(SampledClip(utterance.id, waveform))
    if not clips:
        raise ManifestError(
            f"{manifest.source}: none of the utterances that were tried can be extracted: "
            f"{faults[0]}"
        )
    return clips, faults


def _chunks(
    config: Config, in_chunks: RowExtractor[Params], clips: Clips, device: Device, reference: Alone
) -> Chunks:
    """Measure what the config's chunks change, into which this extractor of it cuts clips."""
    numbers = [
        number for number, clip in enumerate(clips) if len(in_chunks.pieces(len(clip.waveform))) > 1
    ]
    if not numbers:
        return Chunks(in_chunks.chunks_are_exact, 0, 0.0, 0.0, 0.0)
    whole = _build_rows(
        config, device, config.params.model_copy(update={"precision": "fp32", "chunk": None})
    )
    whole.chosen_batching = "single"
    values, _ = _compute_rows(whole, [clips[number] for number in numbers], device, None)
    total = compare_all(
        values, [reference.results[number] for number in numbers], reference.rounding
    )
    shares = total.differing / total.values, total.mismatched / total.values
    return Chunks(in_chunks.chunks_are_exact, len(numbers), *shares, total.relative)


# The sample


def utterances_by_length(manifest: Manifest, count: int) -> list[Utterance]:
    """Sample `count` utterances at even steps in the order of their lengths, from the
    shortest to the longest.

    If the manifest does not give all durations, only rows whose headers are read can be
    chosen: `_MOST_HEADERS` of them, drawn with a fixed seed. If audio is in containers
    that have to be copied, only those in the first."""
    if len(near := rows_of_first_copy(manifest, np.arange(min(len(manifest), _NEAR)))):
        manifest = manifest.take(near)
    rows = np.arange(len(manifest))
    seconds = manifest.duration
    if np.isnan(seconds).any():
        rows = np.random.default_rng(_SEED).permutation(rows)[: max(_MOST_HEADERS, count)]
        seconds = np.array(
            each_at_once(lambda row: _seconds(manifest, manifest[row]), rows.tolist())
        )
    order = rows[np.argsort(seconds, kind="stable")]
    chosen = order[
        np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))
    ]
    return [manifest[row] for row in chosen.tolist()]


def _seconds(manifest: Manifest, utterance: Utterance) -> float:
    """The length of an utterance, by its row or its file's header; infinite if neither
    gives it."""
    if utterance.duration is not None:
        return utterance.duration
    held = probe_seconds(manifest.resolve(utterance.path))
    return math.inf if held is None else held - (utterance.start or 0.0)


# Trials


@dataclass(frozen=True)
class Alone:
    """The results of clips that were computed alone, at one precision."""

    results: list[ClipResult]
    rounding: float
    """How much rounding may change a frame, relative in norm."""


def try_batchings(
    extractor: RowExtractor[Params],
    clips: Clips,
    device: Device,
    precision: str,
    reference: Alone | None,
) -> tuple[list[Measured], Alone]:
    """Measure the batchings that an extractor declares, and in fp32 the others too; and
    compute the clips alone.

    `reference` holds the results alone in fp32; it is None if this precision is fp32."""
    declared = declared_batchings(extractor)
    measured: list[Measured] = []
    alone = Alone([], _ROUNDING[precision])
    for batching in declared if reference else BATCHINGS:
        trial = Measured(batching, precision, is_declared=batching in declared)
        extractor.chosen_batching = batching
        try:
            first, _ = _compute_rows(
                extractor, clips, device, None if batching == "equal_length" else 1
            )
            second, speed = _compute_rows(extractor, clips, device, 2)
            if batching == "single":
                alone = Alone(first, alone.rounding)
            elif batching == "equal_length":
                alone = _with_measured_rounding(
                    alone, first, math.inf if reference else _LARGEST_ROUNDING
                )
            found = _measured(trial, first, second, alone, reference or alone, speed)
            if not math.isfinite(found.relative):
                raise ExtractorError(f"values at {precision} are NaN or infinite")
            measured.append(found)
        except (
            RuntimeError,
            FeatcacheError,
        ) as error:  # no device can do everything at every precision
            if trial.is_declared and not reference:
                raise
            measured.append(replace(trial, error=str(error).partition("\n")[0]))
            if batching == "single":
                break  # there is nothing to compare the others with
    return measured, alone


def _with_measured_rounding(
    alone: Alone, among_copies: Sequence[ClipResult], at_most: float
) -> Alone:
    """Raise the rounding to what clips among copies of themselves show."""
    if not alone.results[0].continuous.is_floating_point():
        return alone
    shown = 4 * compare_all(among_copies, alone.results, math.inf).relative
    return Alone(alone.results, max(alone.rounding, min(shown, at_most)))


def whole_clips(extractor: Extractor[Params], clips: Clips, device: Device) -> list[Measured]:
    """Measure an extractor that takes no rows: each clip alone, all at once, and in two
    batches in the opposite order.

    Such an extractor promises the same bits, so none may differ."""

    def compute(groups: Sequence[Sequence[int]]) -> _Timed:
        batches: list[_Batch] = [[(number, clips[number]) for number in group] for group in groups]
        return _compute_batches(
            extractor, batches, sum(len(clip.waveform) for clip in clips), device
        )

    every = range(len(clips))
    results, alone_speed = compute([[number] for number in every])
    together, _ = compute([every])
    reordered, speed = compute([every[::-1][first::2] for first in range(min(2, len(clips)))])
    alone = Alone(results, 0.0)
    trial = Measured(extractor.batching, "fp32", is_declared=True)
    single = Measured("single", "fp32", is_declared=True, times_real_time=alone_speed)
    return [single, _measured(trial, together, reordered, alone, alone, speed)]


def _measured(
    trial: Measured,
    first: list[ClipResult],
    second: list[ClipResult],
    alone: Alone,
    reference: Alone,
    speed: float,
) -> Measured:
    """Compare what clips gave in a trial with one set of neighbours, and with another,
    with each clip alone."""
    total = compare_all([*first, *second], reference.results, reference.rounding)
    by_batching = compare_all([*first, *second], alone.results, alone.rounding)
    is_repeatable = all(
        torch.equal(a.features, b.features) for a, b in zip(first, second, strict=True)
    )
    return replace(
        trial,
        differing=total.differing / total.values,
        tied=(total.differing - total.mismatched) / total.values,
        mismatch=total.mismatched / total.values,
        disturbed=by_batching.disturbed / by_batching.frames,
        relative=total.relative,
        absolute=total.absolute,
        first=by_batching.first,
        last=by_batching.last,
        repeatable=None if trial.policy == "single" else is_repeatable,
        times_real_time=speed,
    )


def _compute_rows(
    extractor: RowExtractor[Params], clips: Clips, device: Device, seed: int | None
) -> _Timed:
    """Compute each clip in its batch; `seed` is that of `_row_batches`."""
    pieces = (piece for clip in clips for piece in extractor.pieces(len(clip.waveform)))
    lengths = {extractor.padded_length(piece.num_samples) for piece in pieces}

    def compute(_: int, alone: bool) -> _Timed:
        return _compute_batches(
            extractor, *_row_batches(extractor, clips, device, seed), device, alone
        )

    return until_it_fits(compute, extractor, lengths, device)


def _compute_batches(
    extractor: Extractor[Params],
    batches: Sequence[_Batch],
    num_samples: int,
    device: Device,
    alone: bool = False,
) -> _Timed:
    """Compute batches, with so many samples for the speed: as many at once as in
    extraction, or `alone`, one by one."""

    def compute_batch(batch: _Batch) -> dict[int, ClipResult]:
        with device.slot(alone):
            results = extract_results(extractor, [clip for _, clip in batch], device)
            return {
                number: result.cpu()
                for (number, _), result in zip(batch, results, strict=True)
                if number >= 0
            }

    with ThreadPoolExecutor(device.slots) as pool:
        # once more, since each new thread makes plans for its convolutions
        if device.is_cuda:
            list(pool.map(compute_batch, batches))
        started = perf_counter()
        results = {
            number: result
            for found in pool.map(compute_batch, batches)
            for number, result in found.items()
        }
        seconds = perf_counter() - started
    return [
        results[number] for number in sorted(results)
    ], num_samples / extractor.spec.sample_rate / seconds


def _row_batches(
    extractor: RowExtractor[Params], clips: Clips, device: Device, seed: int | None
) -> tuple[list[_Batch], int]:
    """A batch for each clip, of the shape that follows from its length; and how many
    samples count for the speed.

    With a seed, cuts of other clips fill the batch, in any order: of lengths that may
    share a batch with the clip, by the extractor's chosen batching. All rows of a padded
    batch count for the speed, since any corpus fills them: there are few padded lengths.
    Of a batch of equal lengths, as many rows count as clips of the sample have this
    length."""
    same_length = Counter(len(clip.waveform) for clip in clips)
    batches, num_counted = [], 0
    for number, clip in enumerate(clips):
        rows = 1 if seed is None else _clips_in_batch(extractor, len(clip.waveform), device)
        rng = np.random.default_rng((seed or 0, number))
        batch = [(-1, _neighbour(extractor, clips, number, rng)) for _ in range(rows - 1)]
        batch.insert(int(rng.integers(rows)), (number, clip))
        batches.append(batch)
        if extractor.chosen_batching == "equal_length":
            num_counted += min(rows, same_length[len(clip.waveform)]) * len(clip.waveform)
        else:
            num_counted += sum(len(member.waveform) for _, member in batch)
    return batches, num_counted


def _clips_in_batch(extractor: RowExtractor[Params], num_samples: int, device: Device) -> int:
    """How many clips of a length fill a batch; for clips in chunks, how many fill one of
    the longest chunks."""
    pieces = extractor.pieces(num_samples)
    longest = extractor.padded_length(max(piece.num_samples for piece in pieces))
    return math.ceil(extractor.rows(longest, device.torch_device) / len(pieces))


def _neighbour(
    extractor: RowExtractor[Params], clips: Clips, number: int, rng: np.random.Generator
) -> SampledClip:
    """A cut of a clip other than `number`, repeated if it is too short, that may share a
    batch with `number`: of a length near its own whose padded length is the same; of its
    own if a few draws do not give one."""
    own = len(clips[number].waveform)
    padded = extractor.padded_length(own)
    drawn = rng.integers(max(1, own * 7 // 8), padded + 1, _DRAWS).tolist()
    fitting = (
        length
        for length in drawn
        if extractor.padded_length(length) == padded and extractor.num_frames(length)
    )
    num_samples = next(fitting, own)
    others = [other for other in range(len(clips)) if other != number] or [number]
    clip = clips[int(rng.choice(others))]
    first = int(rng.integers(len(clip.waveform)))
    return SampledClip(
        f"{clip.id} from {first}", np.resize(np.roll(clip.waveform, -first), num_samples)
    )
