"""One batch of utterances, from files to stored features: decode, resample, extract, cast, check.

A batch belongs to one shard task and feeds every target: each file is decoded once, each distinct audio policy
applied once. The worker thread that decodes a batch extracts it at once, but for targets whose extractor takes
rows: what is to become a row is handed out (`Pending`), to be computed together with rows of other batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio import Segment, Source, decode, is_too_long, to_waveform
from featcache.config import AudioPolicy, Config
from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, Reason, listing
from featcache.extractors import Clip, Extractor, Params
from featcache.extractors.frames import FrameExtractor
from featcache.extractors.rows import Piece, RowExtractor
from featcache.finite import all_finite
from featcache.manifest import Utterance
from featcache.memory import SMALL_BYTES, AudioMemory
from featcache.store.runs import Failure
from featcache.store.shard import Item
from featcache.store.version import Version

_SMALLEST = 8
"""How many times smaller than the others a task's last batches are, so that all workers end at about one time."""

_DECODED_FROM_START = frozenset({".mp3", ".ogg", ".opus"})


def longest(*limits: float | None) -> float | None:
    """The seconds that a clip may last under several limits, None being none."""
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True)
class Target:
    """A version to fill, and what fills it."""

    config: Config
    extractor: Extractor[Params]
    version: Version

    @property
    def max_seconds(self) -> float | None:
        """The longest clip that the config allows, and the extractor."""
        return longest(self.config.audio.max_seconds, self.extractor.max_seconds)


@dataclass(frozen=True)
class Decoded:
    """An utterance's samples, float32 `[num_samples, channels]` at the source's rate, or why there are none."""

    utterance: Utterance
    samples: NDArray[np.float32] | None
    source: Source | None
    error: AudioError | None


@dataclass(frozen=True)
class Extracted:
    """What one target got from a part of a batch.

    Attributes:
        items: what was extracted.
        num_frames: of each item.
        features: `[sum(num_frames), *item_shape]` of the stored dtype.
        failures: what could not be.
        side: for each side array, the entries of all items one after the other, and how many each has.
    """

    items: list[Item]
    num_frames: list[int]
    features: NDArray[Any]
    failures: list[Failure]
    side: dict[str, tuple[NDArray[Any], list[int]]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Row:
    """A piece of a clip, to be computed in a batch of rows.

    Attributes:
        pending: whose it is.
        clip: the number of its clip there.
        number: of the piece in its clip.
        piece: what of the row's frames counts.
        waveform: float32 `[piece.num_samples]`.
        padded_length: samples of the row.
    """

    pending: Pending
    clip: int
    number: int
    piece: Piece
    waveform: NDArray[np.float32]
    padded_length: int


@dataclass(frozen=True)
class RowResult:
    """What one row gave: features `[frames, *item_shape]` of the stored dtype, and the entries of side arrays."""

    features: NDArray[Any]
    side: dict[str, NDArray[Any]]


class Pending:
    """What one target gets from a part of a batch, while its rows are being computed.

    Not thread-safe: whoever computes rows has to see to it that `done` is called by one thread at a time.

    Attributes:
        target: whose extractor takes rows.
        rows: to be computed.
    """

    def __init__(
        self,
        target: Target,
        items: list[Item],
        clips: Sequence[NDArray[np.float32]],
        failures: list[Failure],
        fail: Callable[[int, AudioError], Failure],
    ) -> None:
        extractor = row_extractor(target)
        assert extractor is not None
        self.target = target
        self.rows: list[Row] = []
        self._items = items
        self._failures = failures
        self._fail = fail
        self._errors: dict[int, AudioError] = {}
        self._results: list[list[RowResult | None]] = []
        for clip, waveform in enumerate(clips):
            try:
                pieces = extractor.pieces(len(waveform))
            except AudioError as error:
                self._errors[clip] = error
                pieces = []
            self._results.append([None] * len(pieces))
            for number, piece in enumerate(pieces):
                part = waveform[piece.start : piece.start + piece.num_samples]
                self.rows.append(Row(self, clip, number, piece, part, extractor.padded_length(len(part))))
        self._left = len(self.rows)

    @property
    def is_complete(self) -> bool:
        """Whether all rows are computed."""
        return not self._left

    def id_of(self, row: Row) -> str:
        """The utterance's id."""
        return self._items[row.clip].id

    def done(self, row: Row, result: RowResult | AudioError) -> None:
        """Take what a row gave, or why it gave nothing."""
        self._left -= 1
        if isinstance(result, AudioError):
            self._errors.setdefault(row.clip, result)
        else:
            self._results[row.clip][row.number] = result
        if self.is_complete:
            self.rows = []  # and with them the waveforms

    def extracted(self) -> Extracted:
        """All of it, in the order of the clips, once it is complete."""
        kept: list[tuple[Item, list[RowResult]]] = []
        failures = list(self._failures)
        dtype = self.target.config.dtype
        for clip, (item, results) in enumerate(zip(self._items, self._results, strict=True)):
            found = [result for result in results if result is not None]
            error = self._errors.get(clip)
            if error is None and not all(all_finite(result.features) for result in found):
                error = _non_finite(dtype)
            if error is None:
                kept.append((item, found))
            else:
                failures.append(self._fail(clip, error))
        spec = self.target.extractor.spec
        features = [result.features for _, found in kept for result in found]
        side = {}
        for array in spec.side:
            entries = [result.side[array.name] for _, found in kept for result in found]
            side[array.name] = (
                np.concatenate(entries) if entries else np.empty((0, *array.item_shape), array.dtype),
                [sum(len(result.side[array.name]) for result in found) for _, found in kept],
            )
        return Extracted(
            items=[item for item, _ in kept],
            num_frames=[sum(len(result.features) for result in found) for _, found in kept],
            features=np.concatenate(features) if features else np.empty((0, *spec.item_shape), dtype),
            failures=failures,
            side=side,
        )


@dataclass
class Spent:
    """What one worker did so far, and the seconds that each stage took it.

    Attributes:
        decode: reading and decoding files.
        waveform: mixing down and resampling.
        extract: computing features, with their way to the device and back, by the version's name.
        resampled: utterances whose source had another rate.
    """

    decode: float = 0.0
    waveform: float = 0.0
    extract: dict[str, float] = field(default_factory=dict)
    resampled: int = 0

    @contextmanager
    def extracting(self, target: Target) -> Iterator[None]:
        """Count the time that a version's features take."""
        started = perf_counter()
        try:
            yield
        finally:
            name = target.config.name
            self.extract[name] = self.extract.get(name, 0.0) + perf_counter() - started


def batches(
    utterances: Sequence[Utterance], seconds: Sequence[float], batch_seconds: float
) -> Iterator[Sequence[Utterance]]:
    """Cut a task, whose utterances last `seconds` each, into batches of about `batch_seconds`, in order.

    They become smaller towards its end. Rows that cut the same file stay together where it can only be decoded
    from its start.
    """
    first, filled, left = 0, 0.0, sum(seconds)
    for i, utterance in enumerate(utterances):
        if filled >= min(batch_seconds, max(left, batch_seconds) / _SMALLEST) and not (
            utterance.path == utterances[i - 1].path and Path(utterance.path).suffix.lower() in _DECODED_FROM_START
        ):
            yield utterances[first:i]
            left -= filled
            first, filled = i, 0.0
        filled += seconds[i]
    yield utterances[first:]


def process(
    root: Path,
    targets: Sequence[Target],
    device: Device,
    memory: AudioMemory,
    batch: Sequence[Utterance],
    spent: Spent,
) -> Iterator[list[Extracted | Pending]]:
    """Extract a batch for every target, or hand out the rows that are to be computed for it.

    Yields the targets' results, in the targets' order, for one part of the batch after the other: a part
    holds about `device.batch_seconds`, however much the batch's files hold. Parts with a long recording are computed
    here, rows and all, so that no more of them is held than `memory` allows.
    """
    limits = [target.max_seconds for target in targets]
    max_seconds = None if None in limits else max(limit for limit in limits if limit)
    with memory.lease() as reserve:
        for part in _parts(decode_all(batch, root, max_seconds, reserve), device.batch_seconds, spent):
            waveforms = _Waveforms(part, spent)
            is_large = any(one.samples is not None and one.samples.nbytes >= SMALL_BYTES for one in part)
            yield [_extract(target, waveforms, root, device, spent, is_large) for target in targets]
            del part, waveforms  # before the next part is decoded


def row_extractor(target: Target) -> RowExtractor[Params] | None:
    """The target's extractor, if it takes rows."""
    return target.extractor if isinstance(target.extractor, RowExtractor) else None


def compute_rows(rows: Sequence[Row], device: Device) -> list[RowResult | AudioError]:
    """Compute rows of one target and one padded length; what each gave, in their order.

    Where a batch does not fit on the device, this and all later ones become smaller; a single row is tried again with
    nothing beside it.
    """
    target, length = rows[0].pending.target, rows[0].padded_length
    extractor = row_extractor(target)
    assert extractor is not None
    results: list[RowResult | AudioError] = []
    alone = False
    while len(results) < len(rows):
        count = extractor.rows(length, device.torch_device)
        batch = rows[len(results) : len(results) + count]
        try:
            results += _compute_batch(batch, count, extractor, target.config.dtype, device, alone)
            continue
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
        # What the batch held is free by now, as the exception is.
        torch.cuda.empty_cache()
        if extractor.shrink(count, length, device.torch_device):
            continue
        if not alone:
            alone = True
        else:
            seconds = length / extractor.spec.sample_rate
            message = f"{seconds:.0f} s do not fit on {device.label} at once: params.chunk of the config would cut them"
            results += [AudioError(Reason.TOO_LONG, message)] * len(batch)
    return results


def _compute_batch(
    rows: Sequence[Row], count: int, extractor: RowExtractor[Params], dtype: str, device: Device, alone: bool
) -> list[RowResult | AudioError]:
    """Compute rows of one padded length in a batch of `count`; one by one where a clip cannot be extracted."""
    try:
        with device.slot(alone):
            waveforms = [row.waveform for row in rows]
            encoded = extractor.run(*device.upload_rows(waveforms, count, rows[0].padded_length))
            stored = encoded.features[: len(rows)].to(getattr(torch, dtype)).contiguous()
            features = device.download(stored)
            side = {name: device.download(array[: len(rows)].contiguous()) for name, array in encoded.side.items()}
    except AudioError as error:
        if len(rows) == 1:
            return [error]
        return [one for row in rows for one in _compute_batch([row], count, extractor, dtype, device, alone)]
    except Exception as error:
        ids = listing(row.pending.id_of(row) for row in rows)
        error.add_note(f"featcache: while {type(extractor).__name__} extracted {ids}")
        raise
    return [
        _cut(extractor, row, features[i], {name: array[i] for name, array in side.items()})
        for i, row in enumerate(rows)
    ]


def decode_all(
    utterances: Sequence[Utterance],
    root: Path,
    max_seconds: float | None = None,
    reserve: Callable[[int], None] | None = None,
) -> Iterator[Decoded]:
    """Decode utterances one by one, in order; neighbours that cut the same file share its decoder.

    `max_seconds` and `reserve` are `featcache.audio.decode`'s.
    """
    for path, group in groupby(utterances, key=lambda utterance: utterance.path):
        rows = list(group)
        segments = [Segment(row.start, row.duration) for row in rows]
        for row, result in zip(
            rows, decode(root / path, segments, max_seconds=max_seconds, reserve=reserve), strict=True
        ):
            if isinstance(result, AudioError):
                yield Decoded(row, None, None, result)
            else:
                yield Decoded(row, *result, None)


def compute(
    extractor: Extractor[Params],
    ids: Sequence[str],
    waveforms: Sequence[NDArray[np.float32]],
    dtype: str,
    device: Device,
) -> tuple[NDArray[Any], list[int], list[AudioError | None]]:
    """Extract the features of some waveforms, each long enough for a frame, and cast them to `dtype`.

    Returns the features `[frames, *item_shape]` of those that could be, one after the other, how many
    frames each waveform has there, and what was wrong with those that have none.

    Raises:
        ExtractorError: the extractor returned other frames than its `num_frames` says.
    """
    with device.slot():
        align = not isinstance(extractor, FrameExtractor)  # which copies frames, wherever they lie
        clips = [Clip(*one) for one in zip(ids, device.upload(waveforms, align), strict=True)]
        outcomes = _call(extractor, clips)
        features = [outcome for outcome in outcomes if not isinstance(outcome, AudioError)]
        if not features:
            shape = (0, *extractor.spec.item_shape)
            return (
                np.empty(shape, dtype),
                [0] * len(clips),
                [o for o in outcomes if isinstance(o, AudioError)],
            )
        stored = device.download(torch.cat(features).to(getattr(torch, dtype)))
    num_frames = [0 if isinstance(outcome, AudioError) else len(outcome) for outcome in outcomes]
    errors = [outcome if isinstance(outcome, AudioError) else None for outcome in outcomes]
    if all_finite(stored):
        return stored, num_frames, errors
    kept = []
    for i, item in enumerate(np.split(stored, np.cumsum(num_frames)[:-1])):
        if all_finite(item):
            kept.append(item)
        else:
            errors[i] = _non_finite(dtype)
            num_frames[i] = 0
    return np.concatenate(kept) if kept else stored[:0], num_frames, errors


def failure_of(utterance: Utterance, root: Path, error: AudioError) -> Failure:
    """The ledger's record of an utterance that failed."""
    size: int | None
    mtime_ns: int | None
    try:
        stat = os.stat(root / utterance.path)
        size, mtime_ns = stat.st_size, stat.st_mtime_ns
    except (OSError, ValueError):
        size, mtime_ns = None, None
    return Failure(
        id=utterance.id,
        path=utterance.path,
        start=utterance.start,
        duration=utterance.duration,
        channel=utterance.channel,
        reason=error.reason.value,
        message=str(error),
        size=size,
        mtime_ns=mtime_ns,
    )


def _parts(decoding: Iterator[Decoded], full_at: float, spent: Spent) -> Iterator[list[Decoded]]:
    """Decode until a part holds `full_at` seconds, time and again."""
    part: list[Decoded] = []
    seconds, num_bytes = 0.0, 0
    while True:
        started = perf_counter()
        decoded = next(decoding, None)
        spent.decode += perf_counter() - started
        if decoded is None:
            break
        part.append(decoded)
        if decoded.samples is not None and decoded.source is not None:
            seconds += len(decoded.samples) / decoded.source.sample_rate
            num_bytes += decoded.samples.nbytes
        decoded = None  # what is yielded may take gigabytes: nothing here holds on to it
        if seconds >= full_at or num_bytes >= SMALL_BYTES:
            full, part, seconds, num_bytes = part, [], 0.0, 0
            yield full
            del full
    if part:
        yield part


class _Waveforms:
    """The waveforms of a part of a batch, made once for each distinct audio policy."""

    def __init__(self, part: Sequence[Decoded], spent: Spent) -> None:
        self.part = part
        self._spent = spent
        self._made: dict[AudioPolicy, list[NDArray[np.float32] | AudioError]] = {}
        self._resampled: set[str] = set()

    def under(self, policy: AudioPolicy) -> list[NDArray[np.float32] | AudioError]:
        """A mono waveform at the policy's rate, or what was wrong, for each decoded utterance; of any length."""
        policy = policy.model_copy(update={"max_seconds": None})
        if policy not in self._made:
            started = perf_counter()
            self._made[policy] = [self._make(decoded, policy) for decoded in self.part]
            self._spent.waveform += perf_counter() - started
        return self._made[policy]

    def _make(self, decoded: Decoded, policy: AudioPolicy) -> NDArray[np.float32] | AudioError:
        if decoded.samples is None or decoded.source is None:
            assert decoded.error is not None
            return decoded.error
        try:
            waveform = to_waveform(decoded.samples, decoded.source.sample_rate, policy, decoded.utterance.channel)
        except AudioError as error:
            return error
        id_ = decoded.utterance.id
        if decoded.source.sample_rate != policy.sample_rate and id_ not in self._resampled:
            self._resampled.add(id_)
            self._spent.resampled += 1
        return waveform


def _extract(
    target: Target, waveforms: _Waveforms, root: Path, device: Device, spent: Spent, at_once: bool
) -> Extracted | Pending:
    items: list[Item] = []
    clips: list[NDArray[np.float32]] = []
    utterances: list[Utterance] = []
    failures: list[Failure] = []
    for decoded, waveform in zip(waveforms.part, waveforms.under(target.config.audio), strict=True):
        refused = waveform if isinstance(waveform, AudioError) else _refusal(target, decoded, len(waveform))
        if refused or isinstance(waveform, AudioError):
            assert refused is not None
            failures.append(failure_of(decoded.utterance, root, refused))
        else:
            items.append(_item(decoded, len(waveform)))
            clips.append(waveform)
            utterances.append(decoded.utterance)
    if row_extractor(target):
        pending = Pending(target, items, clips, failures, lambda clip, error: failure_of(utterances[clip], root, error))
        if at_once:
            with spent.extracting(target):
                _complete(pending, device)
        return pending.extracted() if pending.is_complete else pending
    with spent.extracting(target):
        features, num_frames, errors = compute(
            target.extractor, [item.id for item in items], clips, target.config.dtype, device
        )
    failures += [failure_of(row, root, error) for row, error in zip(utterances, errors, strict=True) if error]
    return Extracted(
        items=[item for item, error in zip(items, errors, strict=True) if not error],
        num_frames=[count for count in num_frames if count],
        features=features,
        failures=failures,
    )


def _refusal(target: Target, decoded: Decoded, num_samples: int) -> AudioError | None:
    """Why a clip of `num_samples`, at the config's rate, is not for this target."""
    assert decoded.samples is not None
    assert decoded.source is not None
    if too_long := is_too_long(len(decoded.samples), decoded.source.sample_rate, target.max_seconds):
        return too_long
    if target.extractor.num_frames(num_samples):
        return None
    rate = target.config.audio.sample_rate
    return AudioError(Reason.TOO_SHORT, f"{num_samples} samples at {rate} Hz are too few for one frame")


def _complete(pending: Pending, device: Device) -> None:
    """Compute all rows of a part by themselves."""
    extractor = row_extractor(pending.target)
    assert extractor is not None
    by_length: dict[int, list[Row]] = {}
    for row in pending.rows:
        by_length.setdefault(row.padded_length, []).append(row)
    for length, rows in by_length.items():
        while rows:
            count = extractor.rows(length, device.torch_device)
            batch, rows = rows[:count], rows[count:]
            for row, result in zip(batch, compute_rows(batch, device), strict=True):
                pending.done(row, result)


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device's memory has run out: torch says so, and its libraries in words of their own."""
    return isinstance(error, torch.OutOfMemoryError) or "_STATUS_ALLOC_FAILED" in str(error)


def _cut(extractor: RowExtractor[Params], row: Row, features: NDArray[Any], side: dict[str, NDArray[Any]]) -> RowResult:
    """What counts of a padded row's features `[F, …]`, as a copy where the rest would be held for it."""
    first, last = row.piece.skip, row.piece.skip + row.piece.num_frames
    if len(features) < last:
        raise ExtractorError(
            f"{type(extractor).__name__} returned {len(features)} frames for a row of {len(row.waveform)} samples; "
            f"its num_frames says {last}"
        )
    return RowResult(features[first:last].copy(), {name: array.copy() for name, array in side.items()})


def _non_finite(dtype: str) -> AudioError:
    return AudioError(Reason.NON_FINITE_FEATURES, f"features are NaN or infinite as {dtype}")


def _call(extractor: Extractor[Params], clips: Sequence[Clip]) -> list[torch.Tensor | AudioError]:
    """Extract, and find out which clip it was where one cannot be."""
    if not clips:
        return []
    try:
        features = extractor.extract(clips)
    except AudioError as error:
        return [error] if len(clips) == 1 else [_call(extractor, [clip])[0] for clip in clips]
    except Exception as error:
        error.add_note(f"featcache: while {type(extractor).__name__} extracted {listing(clip.id for clip in clips)}")
        raise
    expected = [extractor.num_frames(len(clip.waveform)) for clip in clips]
    if (found := [len(one) for one in features]) != expected:
        raise ExtractorError(
            f"{type(extractor).__name__} returned {found} frames for clips of "
            f"{[len(clip.waveform) for clip in clips]} samples; its num_frames says {expected}"
        )
    return [*features]


def _item(decoded: Decoded, num_samples: int) -> Item:
    assert decoded.source is not None
    row, source = decoded.utterance, decoded.source
    return Item(
        id=row.id,
        path=row.path,
        start=row.start,
        duration=row.duration,
        channel=row.channel,
        num_samples=num_samples,
        size=source.size,
        mtime_ns=source.mtime_ns,
        sample_rate=source.sample_rate,
    )
