"""Extracts a batch of utterances from audio, for all versions that are filled together.

Each file is decoded once, part by part, and made into waveforms once for each maker. The
worker thread that decodes a batch also extracts it, except for rows (`PendingRows`),
which are computed together with rows of other batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio.blocks import Collector, Joined
from featcache.audio.content_hash import ContentHashes
from featcache.audio.decode import Cut, FileIdentity, decode
from featcache.audio.members import copy_of
from featcache.audio.remote import Fetched, Wait
from featcache.audio.resample import WaveformBuilder, error_if_too_long, peak_of, why_silent
from featcache.audio.waveform import WaveformMaker
from featcache.errors import AudioError, Reason
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import (
    Extracted,
    Waveform,
    WorkerTimes,
    compute_clips,
    errors_of,
    is_out_of_memory,
)
from featcache.extraction.padded_rows import Part, PendingRows, compute_now
from featcache.extractors.faults import fault
from featcache.format.shard import Item
from featcache.manifest.audio_locations import AudioLocation, CopiedSource, locate
from featcache.manifest.segments import Utterance

_SMALLEST = 8
"""The last batches of a task are up to so many times smaller, so that all workers end
together."""

SMALL_BYTES = 64 << 20
"""Bytes of waveforms that a worker may hold without reserving them."""

_LARGE_BYTES = 2 << 30
"""Bytes of large waveforms that all workers may hold together."""

_SAMPLE_BYTES = 4  # of a waveform
_MOST_BYTES = 8 << 30
"""A clip whose waveform would take more fails: at 16 kHz, after 37 hours."""

Fetch = Callable[[CopiedSource], Fetched]
"""Returns a copy of audio that is not a file of this machine."""

_DECODED_FROM_START = frozenset(
    {".mp3", ".ogg", ".opus", ".m4a", ".aac", ".mp4", ".webm", ".amr", ".wma"}
)


class AudioExtractor:
    """Extracts batches from audio for some configs. Safe to use from several threads.

    Args:
        root: The root of relative paths.
        wait: Called now and then while a long file is read; it may raise to give up.
    """

    def __init__(
        self,
        root: AudioLocation,
        configs: Sequence[BuiltConfig],
        fetched: Fetch = copy_of,
        wait: Wait = lambda _: None,
    ) -> None:
        self._root, self._configs = root, configs
        makers = {config.waveform_maker: config.sample_rate for config in configs}
        self._makers = [*makers]
        by_pass: dict[object, list[int]] = {}
        for number, config in enumerate(configs):
            by_pass.setdefault(config.model_pass(), []).append(number)
        self._sharing = [*by_pass.values()]
        """The numbers of the configs whose versions share a model's pass."""
        self._hashes = ContentHashes(wait)
        self._memory = AudioMemory(
            sum(rate * maker.seconds_per_second for maker, rate in makers.items()) * _SAMPLE_BYTES
        )
        most_seconds = _MOST_BYTES / _SAMPLE_BYTES / max(makers.values())
        limits = [config.max_seconds * config.waveform_maker.fastest for config in configs]
        max_seconds = min(max(limits), most_seconds)
        self._decode = partial(decode, max_seconds=max_seconds, fetched=fetched, wait=wait)

    def __call__(self, batch: Sequence[Utterance], times: WorkerTimes) -> Iterator[Part]:
        """Extract a batch for every config, or hand out its rows. Yields the results of all
        configs, for one part of the batch after the other. The rows of a large recording
        are computed here, so that `AudioMemory` limits them."""
        with self._memory.lease() as reserve:
            decoding = self.decode(batch, times, reserve=reserve, hashes=self._hashes)
            for part in parts(decoding, self._configs[0].device.batch_seconds, times):
                yield from self._extract_part(part)
                del part  # before the next one is decoded

    def decode(
        self, utterances: Sequence[Utterance], times: WorkerTimes, **options: Any
    ) -> Iterator[Decoded]:
        """Decode utterances in order into waveforms; with options of
        `audio.decode.decode`."""

        def collect(copies: Sequence[Utterance], rate: int, num_samples: int) -> Waveforms:
            return Waveforms(self._makers, copies, rate, num_samples, times)

        return decode_all(utterances, self._root, partial(self._decode, **options), collect)

    def decoded(self, utterance: Utterance, samples: NDArray[np.float32], rate: int) -> Decoded:
        """Return samples `[num_samples, channels]` in memory as `decode` returns a
        file's."""
        times = WorkerTimes(float)
        waveforms = Waveforms(self._makers, [utterance], rate, len(samples), times)
        if len(samples):
            waveforms.add(samples)
        return Decoded(utterance, (waveforms.finish(), FileIdentity(0, 0, rate)))

    def _extract_part(self, part: Sequence[Decoded]) -> Iterator[Part]:
        """Extract a part; clip by clip if memory runs out."""
        is_large = any(decoded.num_bytes >= SMALL_BYTES for decoded in part)
        try:
            by_number: dict[int, Extracted | PendingRows] = {}
            for numbers in self._sharing:
                results = self._extract([self._configs[number] for number in numbers], part)
                if is_large:
                    results = [*compute_now(results)]
                by_number.update(zip(numbers, results, strict=True))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        else:
            yield [by_number[number] for number in range(len(self._configs))]
            return
        if len(part) > 1:  # the rows of each can still be computed with those of others
            for decoded in part:
                yield from self._extract_part([decoded])
        else:
            yield [self.extract_alone(config, part[0]) for config in self._configs]

    def extract_alone(self, config: BuiltConfig, decoded: Decoded) -> Extracted:
        """Extract one clip as a batch of its own; it fails if memory runs out."""
        try:
            return compute_now(self._extract([config], [decoded]))[0]
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        message = "extracting it takes more memory than there is"
        failed = Extracted.of(config, self._root)
        return failed.fail(decoded.utterance, AudioError(Reason.OUT_OF_MEMORY, message))

    def _extract(self, configs: Sequence[BuiltConfig], part: Sequence[Decoded]) -> Part:
        """Extract a part for configs that share a model's pass."""
        results: Part = []
        leader = None
        for config in configs:
            result = self._extract_version(config, part, leader)
            results.append(result)
            if isinstance(result, PendingRows):
                leader = leader or result
        return results

    def _extract_version(
        self, config: BuiltConfig, part: Sequence[Decoded], leader: PendingRows | None
    ) -> Extracted | PendingRows:
        extracted = Extracted.of(config, self._root)
        copies = config.waveform_maker.copies
        clips: list[tuple[Item, Waveform]] = []
        for decoded in part:
            try:
                item, waveform, silent = _clip_of(config, decoded)
            except AudioError as error:
                # The traceback's frames hold waveforms.
                extracted.fail(decoded.utterance, error.with_traceback(None))
                continue
            clips.append((item, waveform))
            if not silent and item.sample_rate == config.sample_rate:
                continue
            # The first copy is clean, and stands for the utterance.
            if copies.copy_of(item.id) == copies[0]:
                utterance_id = item.id.removesuffix(copies[0].suffix)
                extracted.remarks[utterance_id] = item.sample_rate, silent
        if config.extractor.takes_rows:
            pending = PendingRows(config, extracted, clips, leader)
            # Without rows, no thread would compute a last one, and finish it.
            return pending.extracted() if pending.is_complete else pending
        started = perf_counter()
        waveforms = {item.id: waveform for item, waveform in clips}
        computed = compute_clips(config, waveforms)
        extracted.seconds = perf_counter() - started
        return extracted.take((item for item, _ in clips), computed)


def _clip_of(config: BuiltConfig, decoded: Decoded) -> tuple[Item, Waveform, str]:
    """Return an utterance's item and waveform, and why it is silent, else an empty string."""
    if isinstance(decoded.audio, AudioError):
        raise decoded.audio
    made, source = decoded.audio
    utterance, maker = decoded.utterance, config.waveform_maker
    waveform = made.of(maker, utterance)
    rate = source.sample_rate * maker.speed(utterance.id)
    too_long = error_if_too_long(made.num_samples, rate, config.max_seconds)
    if too_long is not None:
        raise too_long
    with errors_of(config, [utterance.id]):
        num_frames = config.extractor.num_frames(len(waveform))
        if not hasattr(num_frames, "__index__"):
            raise fault(config.extractor, f"num_frames returned {num_frames!r}: no whole number")
        if num_frames <= 0:
            raise AudioError(
                Reason.TOO_SHORT,
                f"{len(waveform)} samples at {config.sample_rate} Hz are too few for one frame",
            )
    item = Item(**utterance.row(), num_samples=len(waveform), **source._asdict())
    return item, waveform, why_silent(made.loudest, waveform)


class AudioMemory:
    """Limits the waveforms that all workers hold. A clip of more than `SMALL_BYTES` waits
    until there is room for it, or no other such clip is held."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def lease(self) -> Iterator[Callable[[float], None]]:
        """Yield one worker's `reserve(seconds)`, which gives back its last room, and waits
        for new."""
        held = 0

        def reserve(seconds: float) -> None:
            nonlocal held
            needed = int(seconds * self._bytes_per_second)
            if needed <= SMALL_BYTES:
                needed = 0
            if not held and not needed:
                return

            def is_room() -> bool:
                return not needed or not self._used or self._used + needed <= _LARGE_BYTES

            with self._changed:
                self._used -= held
                self._changed.notify_all()
                self._changed.wait_for(is_room)
                self._used += needed
                held = needed

        try:
            yield reserve
        finally:
            reserve(0.0)


class Waveforms:
    """The waveforms of a segment, made while it is decoded: one for each maker, speed and
    channel of an utterance's copies. Adds the seconds that this takes to `times`."""

    def __init__(
        self,
        makers: Sequence[WaveformMaker],
        copies: Sequence[Utterance],
        rate: int,
        num_samples: int,
        times: WorkerTimes,
    ) -> None:
        self._times = times
        self._made: dict[_Way, WaveformBuilder | Waveform | AudioError] = {}
        self._noisy: dict[tuple[WaveformMaker, str], Waveform] = {}
        self.num_samples = 0
        """Samples of each channel."""
        self.loudest = 0.0
        """The peak of all samples."""
        self.num_bytes = 0
        """The bytes of the finished waveforms, without noise."""
        for copy in copies:
            for maker in makers:
                way = maker, maker.speed(copy.id), copy.channel
                if way not in self._made:
                    try:
                        self._made[way] = maker.builder(rate, way[1], way[2], num_samples)
                    except AudioError as error:
                        self._made[way] = error

    def add(self, samples: NDArray[np.float32]) -> None:
        """Add a block of samples, `[num_samples, channels]`."""
        started = perf_counter()
        self.num_samples += len(samples)
        self.loudest = max(self.loudest, peak_of(samples))
        for way, builder in self._made.items():
            if isinstance(builder, WaveformBuilder):
                try:
                    builder.add(samples)
                except AudioError as error:
                    # The traceback's frames hold samples.
                    self._made[way] = error.with_traceback(None)
        self._times["resample"] += perf_counter() - started

    def finish(self) -> Waveforms:
        """Finish the waveforms."""
        started = perf_counter()
        for way, builder in self._made.items():
            if isinstance(builder, WaveformBuilder):
                waveform = self._made[way] = builder.finish()
                self.num_bytes += waveform.nbytes
        self._times["resample"] += perf_counter() - started
        return self

    def of(self, maker: WaveformMaker, utterance: Utterance) -> Waveform:
        """Return a copy's waveform, with its noise, which is added once for all configs.
        Raises AudioError if the waveform cannot be made."""
        copy = maker.copies.copy_of(utterance.id)
        clean = self._made[maker, copy.speed, utterance.channel]
        if isinstance(clean, AudioError):
            raise clean
        assert isinstance(clean, np.ndarray)  # it is finished
        if copy.snr is None:
            return clean
        key = maker, utterance.id
        if key not in self._noisy:
            started = perf_counter()
            self._noisy[key] = maker.with_noise(clean, utterance.id)
            self._times["resample"] += perf_counter() - started
        return self._noisy[key]


_Way = tuple[WaveformMaker, float, int | None]
"""A way to make a waveform: the maker, the speed, and the channel."""

_Audio = tuple[Any, FileIdentity] | AudioError
"""The waveforms of a segment (or the result of another `collect`) and the file's identity;
or the error of decoding."""


@dataclass(frozen=True)
class Decoded:
    """An utterance after decoding."""

    utterance: Utterance
    audio: _Audio

    @property
    def num_bytes(self) -> int:
        """The bytes of the waveforms."""
        return 0 if isinstance(self.audio, AudioError) else self.audio[0].num_bytes


def batches(
    utterances: Sequence[Utterance],
    seconds: Sequence[float],
    batch_seconds: float,
    apart: Set[str] = frozenset(),
) -> Iterator[slice]:
    """Cut a task into batches of about `batch_seconds`, in order; they become smaller
    towards its end. Copies of an utterance stay together, and so do rows of a file that can
    only be decoded from its start. Each utterance in `apart` is a batch of its own."""
    first, filled, left = 0, 0.0, sum(seconds)
    for i, (previous, utterance) in enumerate(pairwise(utterances), 1):
        filled += seconds[i - 1]
        is_full = filled >= min(batch_seconds, max(left, batch_seconds) / _SMALLEST)
        may_cut = is_full and not _share_decoding(previous, utterance)
        if may_cut or previous.id in apart or utterance.id in apart:
            yield slice(first, i)
            left -= filled
            first, filled = i, 0.0
    yield slice(first, len(utterances))


def _share_decoding(previous: Utterance, utterance: Utterance) -> bool:
    """Tell whether these neighbours in different batches would decode something twice."""
    if previous.path != utterance.path:
        return False
    if _segment(previous) == _segment(utterance):
        return True
    return Path(utterance.path).suffix.lower() in _DECODED_FROM_START


def decode_all(
    utterances: Sequence[Utterance],
    root: AudioLocation,
    decode_file: Callable[..., Iterator[_Audio]] = decode,
    collect: Callable[
        [Sequence[Utterance], int, int], Collector
    ] = lambda _copies, _rate, expected: Joined(expected),
) -> Iterator[Decoded]:
    """Decode utterances in order, neighbours of the same file by one decoder.

    `decode_file` is `featcache.audio.decode.decode`, with options. Its `collect` gets the
    copies of a segment in place of the segment's number."""
    for path, group in groupby(utterances, key=lambda utterance: utterance.path):
        copies = [(segment, list(rows)) for segment, rows in groupby(group, key=_segment)]
        rows_of = [rows for _, rows in copies]
        decoding = decode_file(
            locate(root, path),
            [segment for segment, _ in copies],
            collect=lambda number, *form, rows_of=rows_of: collect(rows_of[number], *form),
        )
        for rows, result in zip(rows_of, decoding, strict=True):
            yield from (Decoded(row, result) for row in rows)
            del result  # not held while the next one is decoded


def _segment(utterance: Utterance) -> Cut:
    return Cut(utterance.start, utterance.duration)


def parts(
    decoding: Iterator[Decoded], part_seconds: float, times: WorkerTimes
) -> Iterator[list[Decoded]]:
    """Split decoded utterances into parts of `part_seconds`, or of `SMALL_BYTES`."""
    part: list[Decoded] = []
    seconds, num_bytes = 0.0, 0
    while True:
        started, resampling = perf_counter(), times["resample"]
        decoded = next(decoding, None)
        times["decode"] += perf_counter() - started - (times["resample"] - resampling)
        if decoded is None:
            break
        part.append(decoded)
        num_bytes += decoded.num_bytes
        if not isinstance(decoded.audio, AudioError):
            waveforms, source = decoded.audio
            seconds += waveforms.num_samples / source.sample_rate
            del waveforms
        # A part may take gigabytes: nothing here holds on to it.
        del decoded
        if seconds >= part_seconds or num_bytes >= SMALL_BYTES:
            full = part
            part, seconds, num_bytes = [], 0.0, 0
            yield full
            del full
    if part:
        yield part
