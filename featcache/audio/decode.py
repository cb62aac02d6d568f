"""One audio file -> the segments cut from it, as float32 samples at the file's own rate.

Samples are scaled as libsndfile does: integers to [-1, 1), floats as they are. Any
problem with a segment is an `AudioError` with its `Reason`, and never stops the
others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from featcache.audio.blocks import Collector, Joined, Segment
from featcache.audio.content_hash import UNKNOWN_HASH, ContentHashes
from featcache.audio.formats import UNKNOWN, Header
from featcache.audio.members import beginning_of, copy_of
from featcache.audio.recording import END_TOLERANCE_SECONDS, Recording, Span
from featcache.audio.remote import Fetched, Wait
from featcache.audio.resample import error_if_too_long
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import AudioSource, Command, CopiedSource, Url
from featcache.manifest.utterances import nearest_sample

_SAMPLES_PER_BYTE = 64  # more than speech is ever compressed to


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What an audio file was when it was decoded: another size or time says that it has
    changed since."""

    size: int
    """The size of the file, in bytes."""
    mtime_ns: int
    """When the file was last modified, in nanoseconds since the epoch."""
    sample_rate: int
    """The sample rate of the file, in Hz."""
    content_hash: int = UNKNOWN_HASH
    """XXH3-64 of the file's bytes, if it was asked for."""
    decoder: int = 0
    """`formats.FFMPEG`, or 0."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What to cut from a file: by default, all of it."""

    start: float | None = None
    """Where the segment starts, in seconds from the beginning of the file; None for the
    beginning."""
    duration: float | None = None
    """How long the segment is, in seconds; None for the rest of the file."""


def decode(
    location: AudioSource | str,
    segments: Sequence[Cut],
    *,
    max_seconds: float | None = None,
    reserve: Callable[[float], None] | None = None,
    hashes: ContentHashes | None = None,
    fetched: Callable[[CopiedSource], Fetched] = copy_of,
    collect: Callable[[int, int, int], Collector] = lambda _number, _rate, expected: Joined(
        expected
    ),
    wait: Wait = lambda _: None,
) -> Iterator[tuple[Any, FileIdentity] | AudioError]:
    """Cut segments out of one file, which stays open until the iterator is exhausted or
    closed.

    A segment is, bit for bit, what decoding the whole file and cutting gives: as many
    samples as are nearest to its duration, from the one nearest to its start on
    (`nearest_sample`). In WAV, FLAC and similar files, each segment is reached by
    seeking. Other files (MP3, Ogg) are decoded once, up to the last sample that is needed;
    segments that are not given in the order of the file then wait in memory for their
    turn.

    In a truncated or damaged file, the segments before the damage are good and the others
    fail.

    Args:
        segments: The segments, in any order. They may overlap.
        max_seconds: Longer segments fail: before they are decoded, if the header tells
            how long they are.
        reserve: Called before anything is decoded, with the seconds of the longest
            segment, so that the caller can wait for room: 0 if the header does not tell.
        hashes: Hashes the file before it is decoded, so that the decoder finds it in
            memory; None to leave that out.
        fetched: Gives a copy of what is not a file of this machine.
        collect: Starts what takes the samples of a segment, block by block, by the number
            of the segment, the file's rate, and about how many samples will come, 0 if
            that is not known. By default, they are joined.
        wait: Called now and then while a segment is decoded; it may raise to give up.

    Yields, for each segment, in the order given, what its collector made, by default its
    samples, float32 `[num_samples, channels]` at the file's rate, with the identity of the
    file; or what is wrong, for each segment if it is a fault of the whole file.
    """
    try:
        recording = Recording(location, fetched)
    except AudioError as fault:
        yield from repeat(fault, len(segments))
        return
    with closing(recording):
        header, rate = recording.header, recording.header.sample_rate
        spans = [
            span_of(recording, header.num_samples, segment, max_seconds) for segment in segments
        ]
        good = [number for number, span in enumerate(spans) if not isinstance(span, AudioError)]
        good_spans = [span for span in spans if not isinstance(span, AudioError)]
        if reserve is not None:
            lengths = (stop - first for first, stop in good_spans if stop != UNKNOWN)
            reserve(max(lengths, default=0) / rate)
        content_hash = (
            recording.content_hash(hashes) if hashes is not None and good else UNKNOWN_HASH
        )
        identity = FileIdentity(*recording.stamp, rate, content_hash, header.decoder)

        def begin(place: int) -> Segment:
            first, stop = good_spans[place]
            # a header may promise any number
            believable = _SAMPLES_PER_BYTE * recording.stamp.size
            is_known = header.num_samples != UNKNOWN and stop - first <= believable
            collector = collect(good[place], rate, stop - first if is_known else 0)
            most_samples = math.inf if max_seconds is None else max_seconds * rate
            return Segment(collector, header.is_float, most_samples, wait)

        def cut_from(place: int) -> Iterator[Segment]:
            return recording.cut(good_spans[place:], lambda number: begin(place + number))

        cuts, done = cut_from(0), 0
        for segment, span in zip(segments, spans, strict=True):
            if isinstance(span, AudioError):
                yield span
                continue
            done += 1
            try:
                decoded = next(cuts)
                result = _fault(recording, decoded, span, segment, max_seconds) or (
                    decoded.collector.finish(),
                    identity,
                )
                del decoded
            except MemoryError:
                seconds = (span[1] - span[0]) / rate
                length = "" if span[1] == UNKNOWN else f": {seconds:,.0f} s at {rate} Hz"
                what = f"decoding it takes more memory than there is{length}"
                result = AudioError(Reason.OUT_OF_MEMORY, what)
                recording.start_over()
                cuts = cut_from(done)
            yield result
            del result  # not held while the next ones are decoded


def probe(location: AudioSource | str) -> Header | None:
    """What the header of a file says; None if it cannot be read. Of a file at a URL, only
    the header is fetched."""
    with suppress(AudioError), closing(Recording(location, beginning_of)) as recording:
        return recording.header
    return None


def probe_seconds(location: AudioSource | str) -> float | None:
    """The length of a file in seconds, by its header; None if the file cannot be read or
    its header does not say. Of MP3 and Ogg at a URL, the length is unknown. No command is
    run."""
    header = None if isinstance(location, Command) else probe(location)
    if (
        header is None
        or header.num_samples == UNKNOWN
        or (isinstance(location, Url) and not header.can_seek)
    ):
        return None
    return header.num_samples / header.sample_rate


def span_of(
    recording: Recording, num_samples: int, segment: Cut, max_seconds: float | None
) -> Span | AudioError:
    """Where a segment lies in a recording of `num_samples` samples, or what is wrong with
    it."""
    rate, shortfall = recording.header.sample_rate, recording.header.shortfall
    first = nearest_sample(segment.start or 0.0, rate)
    stop = (
        num_samples if segment.duration is None else first + nearest_sample(segment.duration, rate)
    )
    is_segment = bool(segment.start) or segment.duration is not None
    if is_segment and (begins := recording.header.begins):
        return AudioError(
            Reason.SEGMENT_OUTSIDE,
            f"its timestamps begin at {begins:.3f} s, from where some players count, and others "
            "from 0: `ffmpeg -i FILE -c copy NEW` makes them begin at 0",
        )
    if shortfall and (segment.duration is None or stop > num_samples):
        return AudioError(Reason.TRUNCATED, shortfall)
    if num_samples == 0:
        return AudioError(
            Reason.EMPTY,
            f"its {recording.stamp.size:,} bytes hold no samples, according to its header",
        )
    if not 0 <= first < num_samples or stop > num_samples + round(END_TOLERANCE_SECONDS * rate):
        end = "the end" if segment.duration is None else f"{stop / rate:.3f} s"
        asked = f"the segment goes from {first / rate:.3f} s to {end}"
        return AudioError(
            Reason.SEGMENT_OUTSIDE, f"{asked}, but the file holds {num_samples / rate:.3f} s"
        )
    if stop <= first:
        return AudioError(Reason.EMPTY, f"{segment.duration} s hold no samples at {rate} Hz")
    stop = min(stop, num_samples)
    if stop == UNKNOWN and max_seconds is not None:
        return first, first + int(max_seconds * rate) + 1  # enough to see that it is too long
    return error_if_too_long(stop - first, rate, max_seconds) or (first, stop)


def _fault(
    recording: Recording, decoded: Segment, span: Span, segment: Cut, max_seconds: float | None
) -> AudioError | None:
    """Say what is wrong with the samples that were cut for a span; None if nothing is."""
    first, stop = span
    rate, num_samples = recording.header.sample_rate, recording.header.num_samples
    if recording.has_changed():
        return AudioError(Reason.FILE_UNREADABLE, "the file changed while it was read")
    if decoded.num_samples < stop - first:
        if recording.damage:
            return recording.damage
        if num_samples != UNKNOWN:
            promised, held = num_samples / rate, recording.position / rate
            return AudioError(
                Reason.TRUNCATED, f"its header promises {promised:.3f} s, and it holds {held:.3f} s"
            )
        # now that the length is known
        refitted = span_of(recording, recording.position, segment, max_seconds)
        if isinstance(refitted, AudioError):
            return refitted
    if decoded.not_finite is not None:
        at = first + decoded.not_finite
        return AudioError(Reason.NON_FINITE_AUDIO, f"holds NaN or infinity at {at / rate:.3f} s")
    return error_if_too_long(decoded.num_samples, rate, max_seconds)
