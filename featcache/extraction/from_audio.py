"""Extracts a batch of utterances from audio, for all versions that are filled together.

Each file is decoded once, part by part, and made into waveforms once for each way of
doing that. The worker thread that decodes a batch also extracts it, except for extractors
that take rows: their rows are handed out (`PendingRows`), to be computed together with
rows of other batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from featcache.audio.content_hash import ContentHashes
from featcache.audio.decode import Cut, FileIdentity, decode
from featcache.audio.members import copy_of
from featcache.audio.remote import Fetched
from featcache.audio.resample import error_if_too_long, to_waveform, why_silent
from featcache.audio.waveform import WaveformMaker
from featcache.errors import AudioError, Reason
from featcache.extraction.features import (
    Extracted,
    Waveform,
    WorkerTimes,
    compute_clips,
    errors_of,
    is_out_of_memory,
)
from featcache.extraction.padded_rows import PendingRows, compute_now
from featcache.extraction.version_plan import BuiltConfig
from featcache.extractors.base import fault
from featcache.extractors.rows import RowExtractor
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioLocation, CopiedSource, locate
from featcache.manifest.segments import Utterance

_SMALLEST = 8
"""The last batches of a task are up to so many times smaller than the others, so that all
workers end together."""

SMALL_BYTES = 64 << 20
"""Decoded audio that a worker may hold without reserving it."""

_LARGE_BYTES = 2 << 30
"""Bytes of large recordings that all workers may hold together."""

Fetch = Callable[[CopiedSource], Fetched]
"""Gives a copy of what is not a file of this machine."""

_DECODED_FROM_START = frozenset(
    {".mp3", ".ogg", ".opus", ".m4a", ".aac", ".mp4", ".webm", ".amr", ".wma"}
)


class AudioExtractor:
    """Extracts batches from audio for some configs. Its calls come from several threads.

    `root` is what paths are relative to."""

    def __init__(
        self, root: AudioLocation, configs: Sequence[BuiltConfig], fetched: Fetch = copy_of
    ) -> None:
        self._root = root
        self._configs = configs
        self._device = configs[0].device
        self._memory = AudioMemory(4 * max(config.sample_rate for config in configs))
        # The longest recording whose fastest copy is no longer than one of the configs
        # allows.
        limits = [
            config.max_seconds and config.max_seconds * config.waveform_maker.fastest
            for config in configs
        ]
        max_seconds = None if None in limits else max(limit for limit in limits if limit)
        self._decode = partial(
            decode, max_seconds=max_seconds, hashes=ContentHashes(), fetched=fetched
        )

    def __call__(
        self, batch: Sequence[Utterance], times: WorkerTimes
    ) -> Iterator[list[Extracted | PendingRows]]:
        """Extract a batch for every config, or hand out the rows that are to be computed
        for it.

        Yields:
            For one part of the batch after the other, the results of all configs in their
            order. A part holds about `device.batch_seconds`, however long the batch's
            files are. Parts with a large recording are computed here, with their rows, so
            that no more of them are held than `AudioMemory` allows.
        """
        with self._memory.lease() as reserve:
            decoding = decode_all(batch, self._root, partial(self._decode, reserve=reserve))
            for part in parts(decoding, self._device.batch_seconds, times):
                yield from self._extract_part(part, times)
                del part  # before the next one is decoded

    def _extract_part(
        self, part: Sequence[Decoded], times: WorkerTimes
    ) -> Iterator[list[Extracted | PendingRows]]:
        """The results for a part; clip by clip if the clips do not fit into memory
        together."""
        is_large = any(decoded.num_bytes >= SMALL_BYTES for decoded in part)
        try:
            makers = {config.waveform_maker for config in self._configs}
            waveforms = {maker: make_waveforms(maker, part, times) for maker in makers}
            results: list[Extracted | PendingRows] = []
            for config in self._configs:
                result = self._extract(config, waveforms[config.waveform_maker], times)
                results.append(compute_now(result, self._device, times) if is_large else result)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            del waveforms
            yield results
            return
        if len(part) > 1:  # the rows of each can still be computed with those of others
            for decoded in part:
                yield from self._extract_part([decoded], times)
        else:
            yield [self.extract_alone(config, part[0], times) for config in self._configs]

    def extract_alone(self, config: BuiltConfig, decoded: Decoded, times: WorkerTimes) -> Extracted:
        """Extract one clip, as a run does whose batch holds nothing else; it fails if
        there is not enough memory."""
        try:
            waveforms = make_waveforms(config.waveform_maker, [decoded], times)
            return compute_now(self._extract(config, waveforms, times), self._device, times)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        too_large = AudioError(
            Reason.OUT_OF_MEMORY, "extracting it takes more memory than there is"
        )
        return Extracted(config.spec, self._root).fail(decoded.utterance, too_large)

    def _extract(
        self, config: BuiltConfig, part: Sequence[_Resampled], times: WorkerTimes
    ) -> Extracted | PendingRows:
        """Extract a part of a batch for a config, or cut it into rows."""
        extracted, copies = Extracted(config.spec, self._root), config.waveform_maker.copies
        clips: list[tuple[Item, Waveform]] = []
        for decoded, waveform in part:
            try:
                item, clip, silent = _item_of(config, decoded, waveform)
            except AudioError as error:
                # whose frames hold waveforms
                extracted.fail(decoded.utterance, error.with_traceback(None))
                continue
            clips.append((item, clip))
            # which is clean, and stands for the utterance
            is_first = copies.copy_of(item.id) == copies[0]
            if is_first and (silent or item.sample_rate != config.sample_rate):
                extracted.remarks[item.id.removesuffix(copies[0].suffix)] = item.sample_rate, silent
        if isinstance(config.extractor, RowExtractor):
            pending = PendingRows(config.extractor, extracted, clips)
            # Without rows it is complete: nobody would compute a last one, and finish it.
            return pending.extracted() if pending.is_complete else pending
        started = perf_counter()
        waveforms = {item.id: waveform for item, waveform in clips}
        computed = compute_clips(config.extractor, waveforms, config.spec, self._device)
        extracted.seconds = perf_counter() - started
        times["extract"] += extracted.seconds
        return extracted.take((item for item, _ in clips), computed)


def _item_of(
    config: BuiltConfig, decoded: Decoded, waveform: Waveform | AudioError
) -> tuple[Item, Waveform, str]:
    """What a shard keeps of an utterance, its waveform at the config's rate, and why it
    is silent, empty if it is not. Raises AudioError if it cannot be extracted."""
    if isinstance(waveform, AudioError):
        raise waveform
    samples, source = decoded.content()
    speed = config.waveform_maker.speed(decoded.utterance.id)
    if too_long := error_if_too_long(len(samples), source.sample_rate * speed, config.max_seconds):
        raise too_long
    with errors_of(config.extractor, [decoded.utterance.id]):
        num_frames = config.extractor.num_frames(len(waveform))
        if not hasattr(num_frames, "__index__"):
            raise fault(config.extractor, f"num_frames returned {num_frames!r}: no whole number")
        if num_frames <= 0:
            too_few = (
                f"{len(waveform)} samples at {config.sample_rate} Hz are too few for one frame"
            )
            raise AudioError(Reason.TOO_SHORT, too_few)
    item = Item(**decoded.utterance.row(), num_samples=len(waveform), **asdict(source))
    return item, waveform, why_silent(samples, waveform)


class AudioMemory:
    """Limits the decoded audio that all workers hold. Small recordings are not counted.

    A recording of more than `SMALL_BYTES` waits until there is room for it, or no other
    such recording is held. Of a waveform, a second takes `bytes_per_second`."""

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[Callable[[int, float], None]]:
        """Yield one worker's `reserve(num_bytes, seconds)`, which gives back what it got
        last, and waits for as many bytes, and those of a waveform of so many seconds."""
        held = 0

        def reserve(num_bytes: int, seconds: float) -> None:
            nonlocal held
            needed = num_bytes + int(seconds * self._bytes_per_second)
            wanted = needed if needed > SMALL_BYTES else 0
            if held or wanted:
                with self._changed:
                    self._used -= held
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda: not wanted or not self._used or self._used + wanted <= _LARGE_BYTES
                    )
                    self._used += wanted
                    held = wanted

        try:
            yield reserve
        finally:
            reserve(0, 0.0)


_Audio = tuple[NDArray[np.float32], FileIdentity] | AudioError
"""Samples `[num_samples, channels]` at the file's rate, and what the file was; or why it
could not be decoded."""


@dataclass(frozen=True)
class Decoded:
    """An utterance after decoding."""

    utterance: Utterance
    audio: _Audio

    def content(self) -> tuple[NDArray[np.float32], FileIdentity]:
        """The samples, and what the file was. Raises AudioError if it could not be
        decoded."""
        if isinstance(self.audio, AudioError):
            raise self.audio
        return self.audio

    @property
    def num_bytes(self) -> int:
        """The bytes of the samples."""
        return 0 if isinstance(self.audio, AudioError) else self.audio[0].nbytes


def batches(
    utterances: Sequence[Utterance],
    seconds: Sequence[float],
    batch_seconds: float,
    apart: Set[str] = frozenset(),
) -> Iterator[slice]:
    """Cut a task into batches of about `batch_seconds`, in order; they become smaller
    towards its end.

    Copies of an utterance stay together, and so do rows that cut the same file if it can
    only be decoded from its start. Each of those whose ids are in `apart` is a batch of
    its own."""
    first, filled, left = 0, 0.0, sum(seconds)
    for i, (previous, utterance) in enumerate(pairwise(utterances), 1):
        filled += seconds[i - 1]
        is_full = filled >= min(batch_seconds, max(left, batch_seconds) / _SMALLEST)
        if (
            previous.id in apart
            or utterance.id in apart
            or (is_full and not _share_decoding(previous, utterance))
        ):
            yield slice(first, i)
            left -= filled
            first, filled = i, 0.0
    yield slice(first, len(utterances))


def _share_decoding(previous: Utterance, utterance: Utterance) -> bool:
    """Whether something would be decoded twice if these neighbours were in different
    batches."""
    if previous.path != utterance.path:
        return False
    return (
        _segment(previous) == _segment(utterance)
        or Path(utterance.path).suffix.lower() in _DECODED_FROM_START
    )


def decode_all(
    utterances: Sequence[Utterance],
    root: AudioLocation,
    decode_file: Callable[..., Iterator[_Audio]] = decode,
) -> Iterator[Decoded]:
    """Decode utterances one by one, in order. Neighbours that cut the same file share its
    decoder.

    Neighbours that cut the same segment, being copies of one utterance, share the
    samples. `decode_file` is `featcache.audio.decode.decode`, with options of its own."""
    for path, group in groupby(utterances, key=lambda utterance: utterance.path):
        copies = [(segment, list(rows)) for segment, rows in groupby(group, key=_segment)]
        decoding = decode_file(locate(root, path), [segment for segment, _ in copies])
        for (_, rows), result in zip(copies, decoding, strict=True):
            yield from (Decoded(row, result) for row in rows)
            del result  # not held while the next one is decoded


def _segment(utterance: Utterance) -> Cut:
    return Cut(utterance.start, utterance.duration)


def parts(
    decoding: Iterator[Decoded], part_seconds: float, times: WorkerTimes
) -> Iterator[list[Decoded]]:
    """Split what is decoded into parts of `part_seconds`, or of `SMALL_BYTES`."""
    part: list[Decoded] = []
    seconds, num_bytes = 0.0, 0
    while True:
        started = perf_counter()
        decoded = next(decoding, None)
        times["decode"] += perf_counter() - started
        if decoded is None:
            break
        part.append(decoded)
        num_bytes += decoded.num_bytes
        if not isinstance(decoded.audio, AudioError):
            seconds += len(decoded.audio[0]) / decoded.audio[1].sample_rate
        decoded = None  # what is yielded may take gigabytes: nothing here holds on to it
        if seconds >= part_seconds or num_bytes >= SMALL_BYTES:
            full, part, seconds, num_bytes = part, [], 0.0, 0
            yield full
            del full
    if part:
        yield part


_Resampled = tuple[Decoded, Waveform | AudioError]
"""A decoded utterance, and its mono waveform at a config's rate, of any length; or what
was wrong."""


def make_waveforms(
    waveform_maker: WaveformMaker, part: Sequence[Decoded], times: WorkerTimes
) -> list[_Resampled]:
    """The waveforms of a part of a batch."""
    started = perf_counter()
    made: list[_Resampled] = []

    def source_of(decoded: Decoded) -> tuple[int, int | None, float]:
        return (
            id(decoded.audio),
            decoded.utterance.channel,
            waveform_maker.speed(decoded.utterance.id),
        )

    # Copies of an utterance that differ only in noise are neighbours, and resampled once.
    for (_, channel, speed), group in groupby(part, key=source_of):
        copies = [*group]
        try:
            samples, source = copies[0].content()
            clean = to_waveform(
                samples, source.sample_rate, waveform_maker.audio, channel, speed=speed
            )
        except AudioError as error:
            # whose frames hold waveforms
            made += [(copy, error.with_traceback(None)) for copy in copies]
        else:
            made += [(copy, waveform_maker.with_noise(clean, copy.utterance.id)) for copy in copies]
    times["resample"] += perf_counter() - started
    return made
