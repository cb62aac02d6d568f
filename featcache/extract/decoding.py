"""Decodes a batch of utterances, part by part, into waveforms, once for each distinct way of making them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from featcache.audio.decode import Cut, FileIdentity, decode
from featcache.audio.waveform import WaveformMaker
from featcache.errors import AudioError, Reason
from featcache.extract.memory import SMALL_BYTES
from featcache.extract.target import Spent
from featcache.manifest import Utterance
from featcache.store.runs import Failure
from featcache.store.shard import Item

_SMALLEST = 8
"""How many times smaller than the others a task's last batches are, so that all workers end at about one time."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DECODED_FROM_START = frozenset({".mp3", ".ogg", ".opus"})


@dataclass(frozen=True)
class Decoded:
    """An utterance's samples, float32 `[num_samples, channels]` at the source's rate, or why there are none."""

    utterance: Utterance
    samples: NDArray[np.float32] | None
    source: FileIdentity | None
    error: AudioError | None

    @property
    def is_large(self) -> bool:
        """Whether it takes more than a worker may hold without asking."""
        return self.samples is not None and self.samples.nbytes >= SMALL_BYTES

    def item(self, num_samples: int) -> Item:
        """What a shard keeps of it, as a waveform of that many samples."""
        assert self.source is not None
        source = self.source
        return Item.of(self.utterance, num_samples, (source.size, source.mtime_ns, source.sample_rate))


def batches(
    utterances: Sequence[Utterance], seconds: Sequence[float], batch_seconds: float
) -> Iterator[Sequence[Utterance]]:
    """Cut a task, whose utterances last `seconds` each, into batches of about `batch_seconds`, in order.

    They become smaller towards its end. Copies of an utterance stay together, and rows that cut the same file where it
    can only be decoded from its start.
    """
    first, filled, left = 0, 0.0, sum(seconds)
    for i, utterance in enumerate(utterances):
        is_full = filled >= min(batch_seconds, max(left, batch_seconds) / _SMALLEST)
        if is_full and not _decoded_together(utterances[i - 1], utterance):
            yield utterances[first:i]
            left -= filled
            first, filled = i, 0.0
        filled += seconds[i]
    yield utterances[first:]


def _decoded_together(one: Utterance, other: Utterance) -> bool:
    """Whether decoding two neighbours apart is to decode something twice."""
    if one.path != other.path:
        return False
    return _segment(one) == _segment(other) or Path(one.path).suffix.lower() in _DECODED_FROM_START


def decode_all(
    utterances: Sequence[Utterance],
    root: Path,
    max_seconds: float | None = None,
    reserve: Callable[[int, float], None] | None = None,
) -> Iterator[Decoded]:
    """Decode utterances one by one, in order; neighbours that cut the same file share its decoder.

    Neighbours that cut the same from it, being copies of one utterance, share the samples.

    `max_seconds` and `reserve` are `featcache.audio.decode.decode`'s.
    """
    for path, group in groupby(utterances, key=lambda utterance: utterance.path):
        copies = [(segment, list(rows)) for segment, rows in groupby(group, key=_segment)]
        segments = [segment for segment, _ in copies]
        decoding = decode(root / path, segments, max_seconds=max_seconds, reserve=reserve)
        for (_, rows), result in zip(copies, decoding, strict=True):
            if isinstance(result, AudioError):
                yield from (Decoded(row, None, None, result) for row in rows)
            else:
                yield from (Decoded(row, *result, None) for row in rows)
            del result  # not held while the next one is decoded


def _segment(utterance: Utterance) -> Cut:
    return Cut(utterance.start, utterance.duration)


def parts(decoding: Iterator[Decoded], full_at: float, spent: Spent) -> Iterator[list[Decoded]]:
    """What is decoded, in parts that hold `full_at` seconds each, or `SMALL_BYTES`."""
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


class Waveforms:
    """The waveforms of a part of a batch, made once for each distinct way of making them."""

    def __init__(self, part: Sequence[Decoded], spent: Spent) -> None:
        self.part = part
        self._spent = spent
        self._made: dict[WaveformMaker, list[NDArray[np.float32] | AudioError]] = {}

    def under(self, waveform_maker: WaveformMaker) -> list[NDArray[np.float32] | AudioError]:
        """A mono waveform at the config's rate, or what was wrong, for each decoded utterance; of any length."""
        if waveform_maker not in self._made:
            started = perf_counter()
            made: list[NDArray[np.float32] | AudioError] = []
            previous: tuple[object, ...] = ()
            clean: NDArray[np.float32] | AudioError | None = None
            for decoded in self.part:
                # Copies of an utterance that differ in noise alone are beside each other, and resampled once.
                speed = waveform_maker.speed(decoded.utterance.id)
                this = id(decoded.samples), decoded.utterance.channel, speed
                if decoded.samples is None or this != previous or clean is None:
                    previous, clean = this, self._at_speed(decoded, waveform_maker)
                made.append(
                    clean if isinstance(clean, AudioError) else waveform_maker.with_noise(clean, decoded.utterance.id)
                )
            self._made[waveform_maker] = made
            self._spent.waveform += perf_counter() - started
        return self._made[waveform_maker]

    def _at_speed(self, decoded: Decoded, waveform_maker: WaveformMaker) -> NDArray[np.float32] | AudioError:
        if decoded.samples is None or decoded.source is None:
            assert decoded.error is not None
            return decoded.error
        row, rate = decoded.utterance, decoded.source.sample_rate
        try:
            return waveform_maker.at_speed(decoded.samples, rate, row.id, row.channel)
        except AudioError as error:
            return error


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
        **utterance.row(),
        reason=error.reason.value,
        message=str(error) + (where(utterance.path, root) if error.reason == Reason.FILE_MISSING else ""),
        size=size,
        mtime_ns=mtime_ns,
    )


def where(path: str, root: Path) -> str:
    """What to say of a path at which there is no file, behind it: where it was looked for, or why it cannot be one."""
    if _URL.match(path):
        return ": URLs are not read, only files"
    if path.startswith("~"):
        return ": ~ stands for no folder in a manifest"
    return "" if os.path.isabs(path) else f": {root / path}"
