"""Measures how batching and precision change the values of some utterances, and the speed:
every batching, at every precision, compared with each utterance alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain
from time import perf_counter
from typing import Any

import numpy as np
import torch
from msgspec import structs

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
from featcache.extraction.batching import precision_of
from featcache.extraction.features import until_it_fits
from featcache.extractors import Extractor, Params
from featcache.extractors.base import BATCHINGS, declared_batchings
from featcache.manifest.copies import expand
from featcache.manifest.label_files import template_of
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest, rows_at_even_steps
from featcache.spec import FeatureSpec
from featcache.version.records import library_versions

_LONGEST_SECONDS = 30.0
"""Longer utterances are cut to this length, or to three chunks if these are longer."""

_MOST_HEADERS = 256
"""The number of headers to read if the manifest does not give all durations."""

_NEAR = 4096
"""The number of first rows among which rows of one container are sampled."""

_SEED = 0

_ROUNDING = {"fp32": ROUNDING, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""The least change of a frame by rounding, relative to its norm; below fp32, half a unit
in the last place."""

_LARGEST_ROUNDING = 1e-3
"""The largest change of a frame by rounding in fp32. Larger differences among copies of a
clip are errors."""

_DRAWS = 20

_Timed = tuple[list[ClipResult], float]
"""The results of the sample's clips, in their order; and seconds of audio per second."""


@dataclass(frozen=True)
class Measured:
    """A measurement of one batching at one precision: see docs/json.md. Shares are of
    codes, or for float features of frames."""

    policy: str
    """`single`, `equal_length` or `padded`; if the extractor takes no rows, `single` or
    its own `batching`."""
    precision: str
    is_declared: bool
    error: str | None = None
    differing: float = 0.0
    tied: float = 0.0
    mismatch: float = 0.0
    disturbed: float = 0.0
    """The share of frames that differ by more than rounding from the frames of each
    utterance alone at the same precision; for codes without latents, of frames in which a
    code differs."""
    relative: float = 0.0
    absolute: float = 0.0
    first: int = 0
    last: int = 0
    repeatable: bool | None = None
    """True if every bit stayed the same with other neighbours; None for utterances alone."""
    times_real_time: float = 0.0


@dataclass(frozen=True)
class Chunks:
    """The changes by chunks: each utterance in chunks, compared with the whole one, in
    fp32."""

    exact: bool
    """True if the overlap covers the model's receptive field, so that nothing may change."""
    utterances: int = 0
    """The number of utterances longer than a chunk. If it is 0, nothing was measured."""
    differing: float = 0.0
    mismatch: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Probe:
    """The result of a probe: see docs/json.md."""

    config: str
    fingerprint: str
    extractor: str
    declared: str
    precision: str
    device: str
    threads: int
    date: str
    made_by: dict[str, str]
    utterances: int
    skipped: list[str]
    shortest: float
    longest: float
    seconds: float
    frames: int
    spec: FeatureSpec
    rounding: dict[str, float]
    """The largest change of a frame by rounding; empty if no bit may differ."""
    measured: list[Measured]
    chunks: Chunks | None

    @property
    def fastest(self) -> Measured | None:
        """The fastest declared batching at any precision, without mismatched or disturbed
        values."""
        clean = [
            trial
            for trial in self.measured
            if trial.is_declared and not (trial.error or trial.mismatch or trial.disturbed)
        ]
        return max(clean, key=lambda trial: trial.times_real_time, default=None)

    def document(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        fastest = self.fastest and asdict(self.fastest)
        return {**asdict(self), "spec": self.spec.document(), "fastest": fastest}


def probe(
    config: Config,
    manifest: Manifest,
    device: Device,
    count: int,
    report: Callable[[str], object] = lambda what: None,
) -> Probe:
    """Measure what batching and precision do to a config's values, with `count` of the
    manifest's utterances. `report` gets the name of each precision before it is measured.
    Raises ConfigError if the extractor cannot be built; ManifestError if none of the
    sampled utterances can be extracted."""
    if template_of(config.resolved()) is not None:
        raise ConfigError(f"{config.name}: {config.extractor} reads no audio: nothing to probe")
    device.configure_torch()
    extractor = config.build(device.torch_device)
    clips, skipped = _sample(config, extractor, manifest, count)
    measured: list[Measured] = []
    rounding: dict[str, float] = {}
    chunks = None
    if not extractor.takes_rows:
        measured = _measure_whole_clips(extractor, clips, device)
    else:
        reference: Alone | None = None
        for params in _precisions(config, device):
            precision = precision_of(params)
            report(precision)
            # The weights of two precisions at most are loaded at a time.
            extractor = replace(config, params=params).build(device.torch_device)
            trials, alone = try_batchings(extractor, clips, device, precision, reference)
            measured += trials
            rounding[precision] = alone.rounding
            reference = reference or alone
        if getattr(config.params, "chunk", None) and reference:
            report("whole utterances")
            chunks = _measure_chunks(config, extractor, clips, device, reference)
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


def _precisions(config: Config, device: Device) -> list[Params]:
    if "precision" not in type(config.params).model_fields:
        return [config.params]
    precisions = ["fp32", "bf16", "fp16"]
    if device.is_cuda:
        precisions.insert(1, "tf32")
    return [config.params.model_copy(update={"precision": precision}) for precision in precisions]


def _sample(
    config: Config, extractor: Extractor[Params], manifest: Manifest, count: int
) -> tuple[list[SampledClip], list[str]]:
    longest = _LONGEST_SECONDS
    chunk = getattr(config.params, "chunk", None)
    if chunk:
        longest = max(longest, 3 * chunk.seconds)
    longest = min(filter(None, [longest, config.audio.max_seconds, extractor.max_seconds]))
    max_samples = int(longest * config.audio.sample_rate)
    clips: list[SampledClip] = []
    faults: list[str] = []
    waveform_maker = WaveformMaker.of(config.audio, config.augment)
    rows = expand(manifest.clips(), waveform_maker.copies)
    for utterance in utterances_by_length(rows, count):
        longest_cut = longest * waveform_maker.speed(utterance.id)
        if longest_cut < _seconds(manifest, utterance) < math.inf:
            utterance = structs.replace(utterance, duration=longest_cut)
        try:
            waveform = decode_waveform(utterance, manifest.root, waveform_maker)[:max_samples]
            if not extractor.num_frames(len(waveform)):
                what = f"{len(waveform)} samples are too few for one frame"
                raise AudioError(Reason.TOO_SHORT, what)
            if extractor.takes_rows:
                extractor.pieces(len(waveform))  # raises if it is too long
        except AudioError as error:
            faults.append(f"{utterance.id}: {error.reason}: {error}")
        else:
            clips.append(SampledClip(utterance.id, waveform))
    if not clips:
        what = "none of the utterances that were tried can be extracted"
        raise ManifestError(f"{manifest.source}: {what}: {faults[0]}")
    return clips, faults


def utterances_by_length(manifest: Manifest, count: int) -> list[Utterance]:
    """Sample utterances at even steps in the order of their lengths. If the manifest lacks
    durations, the headers of some files are read. Of containers that must be copied, only
    the first is used."""
    first_rows = np.arange(min(len(manifest), _NEAR))
    in_first_container = rows_of_first_copy(manifest, first_rows)
    if len(in_first_container):
        manifest = manifest.take(in_first_container)
    rows = np.arange(len(manifest))
    seconds = manifest.duration
    if np.isnan(seconds).any():
        rows = np.random.default_rng(_SEED).permutation(rows)[: max(_MOST_HEADERS, count)]
        seconds = np.array(
            each_at_once(lambda row: _seconds(manifest, manifest[row]), rows.tolist())
        )
    order = rows[np.argsort(seconds, kind="stable")]
    steps = rows_at_even_steps(len(order), count)
    return [manifest[row] for row in order[steps].tolist()]


def _seconds(manifest: Manifest, utterance: Utterance) -> float:
    """Return the length of an utterance, by its row or its file's header; else infinity."""
    if utterance.duration is not None:
        return utterance.duration
    in_file = probe_seconds(manifest.resolve(utterance.path))
    if in_file is None:
        return math.inf
    return in_file - (utterance.start or 0.0)


@dataclass(frozen=True)
class Alone:
    """The results of clips that were computed alone, at one precision."""

    results: list[ClipResult]
    rounding: float


def try_batchings(
    extractor: Extractor[Params],
    clips: Clips,
    device: Device,
    precision: str,
    reference: Alone | None,
) -> tuple[list[Measured], Alone]:
    """Measure the batchings that an extractor declares; in fp32, all. `reference` holds the
    results alone in fp32; it is None if this precision is fp32. Returns also the results of
    the clips alone."""
    declared = declared_batchings(extractor)
    measured: list[Measured] = []
    alone = Alone([], _ROUNDING[precision])
    for batching in declared if reference else BATCHINGS:
        trial = Measured(batching, precision, is_declared=batching in declared)
        extractor.chosen_batching = batching
        try:
            seed = None if batching == "equal_length" else 1
            first, _ = _compute_rows(extractor, clips, device, seed)
            second, speed = _compute_rows(extractor, clips, device, 2)
            if batching == "single":
                alone = Alone(first, alone.rounding)
            elif batching == "equal_length" and first[0].continuous.is_floating_point():
                # Clips are among copies of themselves, which changes them by rounding alone.
                rounding = 4 * compare_all(first, alone.results, math.inf).relative
                if not reference:
                    rounding = min(rounding, _LARGEST_ROUNDING)
                alone = Alone(alone.results, max(alone.rounding, rounding))
            result = _measure(trial, first, second, alone, reference or alone, speed)
            if not math.isfinite(result.relative):
                raise ExtractorError(f"values at {precision} are NaN or infinite")
            measured.append(result)
        # no device can do everything at every precision
        except (RuntimeError, FeatcacheError) as error:
            if trial.is_declared and not reference:
                raise
            measured.append(replace(trial, error=str(error).partition("\n")[0]))
            if batching == "single":
                break  # there is nothing to compare the others with
    return measured, alone


def _measure(
    trial: Measured,
    first: list[ClipResult],
    second: list[ClipResult],
    alone: Alone,
    reference: Alone,
    speed: float,
) -> Measured:
    """Compare the results of a trial, with two sets of neighbours, with each clip alone."""
    results = [*first, *second]
    total = compare_all(results, reference.results, reference.rounding)
    by_batching = compare_all(results, alone.results, alone.rounding)
    repeatable = None
    if trial.policy != "single":
        pairs = zip(first, second, strict=True)
        repeatable = all(torch.equal(a.features, b.features) for a, b in pairs)
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
        repeatable=repeatable,
        times_real_time=speed,
    )


def _measure_whole_clips(
    extractor: Extractor[Params], clips: Clips, device: Device
) -> list[Measured]:
    """Measure an extractor that takes no rows, which promises the same bits: each clip
    alone, all at once, and in two batches in the opposite order."""
    num_samples = sum(len(clip.waveform) for clip in clips)

    def compute(*batches: Clips) -> _Timed:
        return _compute_batches(extractor, clips, batches, num_samples, device)

    results, alone_speed = compute(*([clip] for clip in clips))
    together, _ = compute(clips)
    halves = [clips[::-2], clips[-2::-2]]
    reordered, speed = compute(*(half for half in halves if half))
    alone = Alone(results, 0.0)
    trial = Measured(extractor.batching, "fp32", is_declared=True)
    single = Measured("single", "fp32", is_declared=True, times_real_time=alone_speed)
    return [single, _measure(trial, together, reordered, alone, alone, speed)]


def _measure_chunks(
    config: Config, in_chunks: Extractor[Params], clips: Clips, device: Device, reference: Alone
) -> Chunks:
    exact = in_chunks.chunks_are_exact
    numbers = [
        number for number, clip in enumerate(clips) if len(in_chunks.pieces(len(clip.waveform))) > 1
    ]
    if not numbers:
        return Chunks(exact)
    params = config.params.model_copy(update={"precision": "fp32", "chunk": None})
    whole = replace(config, params=params).build(device.torch_device)
    whole.chosen_batching = "single"
    values, _ = _compute_rows(whole, [clips[number] for number in numbers], device, None)
    expected = [reference.results[number] for number in numbers]
    total = compare_all(values, expected, reference.rounding)
    differing, mismatch = total.differing / total.values, total.mismatched / total.values
    return Chunks(exact, len(numbers), differing, mismatch, total.relative)


def _compute_rows(
    extractor: Extractor[Params], clips: Clips, device: Device, seed: int | None
) -> _Timed:
    pieces = (piece for clip in clips for piece in extractor.pieces(len(clip.waveform)))
    lengths = {extractor.padded_length(piece.num_samples) for piece in pieces}

    def compute(_: int, alone: bool) -> _Timed:
        batches, num_samples = _row_batches(extractor, clips, device, seed)
        return _compute_batches(extractor, clips, batches, num_samples, device, alone)

    return until_it_fits(compute, extractor, lengths, device)


def _compute_batches(
    extractor: Extractor[Params],
    clips: Clips,
    batches: Sequence[Clips],
    num_samples: int,
    device: Device,
    alone: bool = False,
) -> _Timed:
    """Compute batches of `clips` and others, as many at once as in extraction, or `alone`.
    `num_samples` count for the speed."""

    def compute_batch(batch: Clips) -> list[tuple[SampledClip, ClipResult]]:
        with device.slot(alone):
            pairs = zip(batch, extract_results(extractor, batch, device), strict=True)
            return [(clip, result.cpu()) for clip, result in pairs if clip in clips]

    with ThreadPoolExecutor(device.slots) as pool:
        # once more, since each new thread makes plans for its convolutions
        if device.is_cuda:
            list(pool.map(compute_batch, batches))
        started = perf_counter()
        results = dict(chain.from_iterable(pool.map(compute_batch, batches)))
        seconds = perf_counter() - started
    speed = num_samples / extractor.spec.sample_rate / seconds
    return [results[clip] for clip in clips], speed


def _row_batches(
    extractor: Extractor[Params], clips: Clips, device: Device, seed: int | None
) -> tuple[list[Clips], int]:
    """Make a batch for each clip, of the shape that follows from its length. Returns also
    the number of samples that count for the speed.

    With a seed, cuts of other clips fill the batch. All rows of a padded batch count for
    the speed, since any corpus fills them. In a batch of equal lengths, as many rows count
    as clips of the sample have this length."""
    same_length = Counter(len(clip.waveform) for clip in clips)
    batches, num_counted = list[Clips](), 0
    for number, clip in enumerate(clips):
        num_samples, rows = len(clip.waveform), 1
        if seed is not None:  # of clips in chunks, as many as fill a batch of the longest chunks
            pieces = extractor.pieces(num_samples)
            longest = extractor.padded_length(max(piece.num_samples for piece in pieces))
            rows = math.ceil(extractor.rows(longest, device.torch_device) / len(pieces))
        rng = np.random.default_rng((seed or 0, number))
        batch = [_neighbour(extractor, clips, number, rng) for _ in range(rows - 1)]
        batch.insert(int(rng.integers(rows)), clip)
        batches.append(batch)
        if extractor.chosen_batching == "equal_length":
            num_counted += min(rows, same_length[num_samples]) * num_samples
        else:
            num_counted += sum(len(member.waveform) for member in batch)
    return batches, num_counted


def _neighbour(
    extractor: Extractor[Params], clips: Clips, number: int, rng: np.random.Generator
) -> SampledClip:
    """Cut another clip than `number`, or repeat it, to a length with the same padded
    length. If a few draws do not give such a length, take the same length."""
    same_length = len(clips[number].waveform)
    padded = extractor.padded_length(same_length)
    num_samples = same_length
    for length in rng.integers(max(1, same_length * 7 // 8), padded + 1, _DRAWS).tolist():
        if extractor.padded_length(length) == padded and extractor.num_frames(length):
            num_samples = length
            break
    others = [other for other in range(len(clips)) if other != number] or [number]
    clip = clips[int(rng.choice(others))]
    first = int(rng.integers(len(clip.waveform)))
    waveform = np.resize(np.roll(clip.waveform, -first), num_samples)
    return SampledClip(f"{clip.id} from {first}", waveform)
