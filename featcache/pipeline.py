"""One batch of utterances, from files to stored features: decode, resample, extract, cast, check.

A batch belongs to one shard task, is processed by one worker thread from end to end, and feeds every
target: each file is decoded once, each distinct audio policy applied once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.audio import Segment, Source, decode, to_waveform
from featcache.config import AudioPolicy, Config
from featcache.device import Device
from featcache.errors import AudioError, ExtractorError, Reason, listing
from featcache.extractors import Clip, Extractor, Params
from featcache.finite import all_finite
from featcache.manifest import Utterance
from featcache.memory import SMALL_BYTES, AudioMemory
from featcache.store.runs import Failure
from featcache.store.shard import Item
from featcache.store.version import Version

_SMALLEST = 8
"""How many times smaller than the others a task's last batches are, so that all workers end at about one time."""

_DECODED_FROM_START = frozenset({".mp3", ".ogg", ".opus"})


@dataclass(frozen=True)
class Target:
    """A version to fill, and what fills it."""

    config: Config
    extractor: Extractor[Params]
    version: Version


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
    """

    items: list[Item]
    num_frames: list[int]
    features: NDArray[Any]
    failures: list[Failure]


@dataclass
class Spent:
    """What one worker did so far, and the seconds that each stage took it.

    Attributes:
        decode: reading and decoding files.
        waveform: mixing down and resampling.
        extract: computing features, with their way to the device and back.
        resampled: utterances whose source had another rate.
    """

    decode: float = 0.0
    waveform: float = 0.0
    extract: float = 0.0
    resampled: int = 0


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
    batch: Sequence[Utterance],
    root: Path,
    targets: Sequence[Target],
    device: Device,
    memory: AudioMemory,
    spent: Spent,
) -> Iterator[list[Extracted]]:
    """Extract a batch for every target.

    Yields the targets' results, in the targets' order, for one part of the batch after the other: a part
    holds about `device.batch_seconds`, however much the batch's files hold.
    """
    limits = [target.config.audio.max_seconds for target in targets]
    max_seconds = None if None in limits else max(limit for limit in limits if limit)
    with memory.lease() as reserve:
        for part in _parts(decode_all(batch, root, max_seconds, reserve), device.batch_seconds, spent):
            waveforms = _Waveforms(part, spent)
            yield [_extract(target, waveforms, root, device, spent) for target in targets]
            del part, waveforms  # before the next part is decoded


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
        clips = [Clip(*one) for one in zip(ids, device.upload(waveforms), strict=True)]
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
            errors[i] = AudioError(Reason.NON_FINITE_FEATURES, f"features are NaN or infinite as {dtype}")
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

    def under(self, policy: AudioPolicy) -> list[NDArray[np.float32] | AudioError]:
        """A mono waveform at the policy's rate, or what was wrong, for each decoded utterance."""
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
        self._spent.resampled += decoded.source.sample_rate != policy.sample_rate
        return waveform


def _extract(target: Target, waveforms: _Waveforms, root: Path, device: Device, spent: Spent) -> Extracted:
    items: list[Item] = []
    clips: list[NDArray[np.float32]] = []
    utterances: list[Utterance] = []
    failures: list[Failure] = []
    for decoded, waveform in zip(waveforms.part, waveforms.under(target.config.audio), strict=True):
        if not isinstance(waveform, AudioError) and not target.extractor.num_frames(len(waveform)):
            waveform = AudioError(
                Reason.TOO_SHORT,
                f"{len(waveform)} samples at {target.config.audio.sample_rate} Hz are too few for one frame",
            )
        if isinstance(waveform, AudioError):
            failures.append(failure_of(decoded.utterance, root, waveform))
        else:
            items.append(_item(decoded, len(waveform)))
            clips.append(waveform)
            utterances.append(decoded.utterance)
    started = perf_counter()
    features, num_frames, errors = compute(
        target.extractor, [item.id for item in items], clips, target.config.dtype, device
    )
    spent.extract += perf_counter() - started
    failures += [failure_of(row, root, error) for row, error in zip(utterances, errors, strict=True) if error]
    return Extracted(
        items=[item for item, error in zip(items, errors, strict=True) if not error],
        num_frames=[count for count in num_frames if count],
        features=features,
        failures=failures,
    )


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
