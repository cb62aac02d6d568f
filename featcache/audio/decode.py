"""One audio file -> the segments cut from it, as float32 samples at the file's own rate.

Integers are scaled to [-1, 1), floats stay as they are. A problem with a segment is an
`AudioError`, and never stops the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import repeat
from typing import Any, NamedTuple

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

_SAMPLES_PER_BYTE = 64  # speech is never compressed so far


class FileIdentity(NamedTuple):
    """The state of an audio file when it was decoded: another size or time is a change."""

    size: int
    """In bytes."""
    mtime_ns: int
    """The time of the last change, in nanoseconds since the epoch."""
    sample_rate: int
    """In Hz."""
    content_hash: int = UNKNOWN_HASH
    """XXH3-64 of the file's bytes, if they were hashed."""
    decoder: int = 0
    """`formats.FFMPEG`, or 0."""


class Cut(NamedTuple):
    """A segment of a file, in seconds: by default, all of it."""

    start: float | None = None
    duration: float | None = None


def decode(
    location: AudioSource | str,
    segments: Sequence[Cut],
    *,
    max_seconds: float | None = None,
    reserve: Callable[[float], None] | None = None,
    hashes: ContentHashes | None = None,
    fetched: Callable[[CopiedSource], Fetched] = copy_of,
    collect: Callable[[int, int, int], Collector] = lambda _, __, expected: Joined(expected),
    wait: Wait = lambda _: None,
) -> Iterator[tuple[Any, FileIdentity] | AudioError]:
    """Cut segments out of one file, which stays open until the iterator is exhausted or
    closed.

    A segment is, bit for bit, a part of the decoded file. It begins at the sample nearest
    to its start, and has the nearest number of samples to its duration. Files are seeked if
    they can be (`Header.can_seek`), else decoded once, up to the last sample that is
    needed. In a damaged file, the segments before the damage are good and the others fail.

    Args:
        segments: The segments, in any order. They may overlap.
        max_seconds: Longer segments fail, before they are decoded if possible.
        reserve: Called before anything is decoded, with the seconds of the longest
            segment, or 0 if the header does not tell; it may wait for room.
        hashes: Hashes the file before it is decoded; None for no hash.
        fetched: Gives a copy of audio that is not a file of this machine.
        collect: Starts a segment's collector, by the segment's number, the file's rate, and
            the approximate number of samples, or 0. By default, samples are joined.
        wait: Called now and then while a segment is decoded; it may raise to give up.

    Yields for each segment, in the order given, the collector's result (by default, float32
    `[num_samples, channels]` at the file's rate) and the identity of the file; or an
    AudioError. A fault of the whole file is yielded for each segment.
    """
    try:
        recording = Recording(location, fetched)
    except AudioError as error:
        yield from repeat(error, len(segments))
        return
    with closing(recording):
        header = recording.header
        rate = header.sample_rate
        count = header.num_samples
        spans = [span_of(recording, count, segment, max_seconds) for segment in segments]
        good = {n: span for n, span in enumerate(spans) if not isinstance(span, AudioError)}
        if reserve is not None:
            lengths = (stop - first for first, stop in good.values() if stop != UNKNOWN)
            reserve(max(lengths, default=0) / rate)
        content_hash = UNKNOWN_HASH
        if hashes is not None and good:
            content_hash = recording.content_hash(hashes)
        identity = FileIdentity(*recording.stamp, rate, content_hash, header.decoder)

        def begin(number: int) -> Segment:
            first, stop = good[number]
            # a header may promise any number
            believable = _SAMPLES_PER_BYTE * recording.stamp.size
            is_known = count != UNKNOWN and stop - first <= believable
            collector = collect(number, rate, stop - first if is_known else 0)
            most_samples = math.inf if max_seconds is None else max_seconds * rate
            return Segment(collector, header.is_float, most_samples, wait)

        cuts = recording.cut(good, begin)
        for number, (segment, span) in enumerate(zip(segments, spans, strict=True)):
            if isinstance(span, AudioError):
                yield span
                continue
            try:
                decoded = next(cuts)
                fault = _fault(recording, decoded, span, segment, max_seconds)
                result: Any = fault or (decoded.collector.finish(), identity)
                del decoded
            except MemoryError:
                seconds = (span[1] - span[0]) / rate
                length = "" if span[1] == UNKNOWN else f": {seconds:,.0f} s at {rate} Hz"
                what = f"decoding it takes more memory than there is{length}"
                result = AudioError(Reason.OUT_OF_MEMORY, what)
                recording.restart()
                cuts = recording.cut({n: good[n] for n in good if n > number}, begin)
            yield result
            del result  # not held while the next ones are decoded


def probe(location: AudioSource | str) -> Header | None:
    """Read the header of a file; None if it cannot be read. At a URL, no more is fetched."""
    with suppress(AudioError), closing(Recording(location, beginning_of)) as recording:
        return recording.header
    return None


def probe_seconds(location: AudioSource | str) -> float | None:
    """Return the length of a file in seconds, by its header; None if it does not say it, as
    for MP3 and Ogg at a URL. No command is run."""
    if isinstance(location, Command):
        return None
    header = probe(location)
    if header is None or header.num_samples == UNKNOWN:
        return None
    if isinstance(location, Url) and not header.can_seek:
        return None
    return header.num_samples / header.sample_rate


def span_of(
    recording: Recording, num_samples: int, segment: Cut, max_seconds: float | None
) -> Span | AudioError:
    """Find a segment in a recording of `num_samples` samples, or say what is wrong."""
    header = recording.header
    rate, shortfall = header.sample_rate, header.shortfall
    first = nearest_sample(segment.start or 0.0, rate)
    stop = num_samples
    if segment.duration is not None:
        stop = first + nearest_sample(segment.duration, rate)
    if header.begins and (segment.start or segment.duration is not None):
        return AudioError(
            Reason.SEGMENT_OUTSIDE,
            f"its timestamps begin at {header.begins:.3f} s, from where some players count: "
            "`ffmpeg -i FILE -c copy NEW` makes them begin at 0",
        )
    if shortfall and (segment.duration is None or stop > num_samples):
        return AudioError(Reason.TRUNCATED, shortfall)
    if num_samples == 0:
        what = f"its {recording.stamp.size:,} bytes hold no samples, according to its header"
        return AudioError(Reason.EMPTY, what)
    if not 0 <= first < num_samples or stop > num_samples + round(END_TOLERANCE_SECONDS * rate):
        end = "the end" if segment.duration is None else f"{stop / rate:.3f} s"
        what = f"the segment goes from {first / rate:.3f} s to {end}"
        held = f"the file holds {num_samples / rate:.3f} s"
        return AudioError(Reason.SEGMENT_OUTSIDE, f"{what}, but {held}")
    if stop <= first:
        return AudioError(Reason.EMPTY, f"{segment.duration} s hold no samples at {rate} Hz")
    stop = min(stop, num_samples)
    if stop == UNKNOWN and max_seconds is not None:
        return first, first + int(max_seconds * rate) + 1  # enough to see that it is too long
    return error_if_too_long(stop - first, rate, max_seconds) or (first, stop)


def _fault(
    recording: Recording, decoded: Segment, span: Span, segment: Cut, max_seconds: float | None
) -> AudioError | None:
    first, stop = span
    rate, num_samples = recording.header.sample_rate, recording.header.num_samples
    if recording.has_changed():
        return AudioError(Reason.FILE_UNREADABLE, "the file changed while it was read")
    if decoded.num_samples < stop - first:
        if recording.damage:
            return recording.damage
        if num_samples != UNKNOWN:
            held = recording.position / rate
            what = f"its header promises {num_samples / rate:.3f} s, and it holds {held:.3f} s"
            return AudioError(Reason.TRUNCATED, what)
        # now that the length is known
        refitted = span_of(recording, recording.position, segment, max_seconds)
        if isinstance(refitted, AudioError):
            return refitted
    if decoded.not_finite is not None:
        seconds = (first + decoded.not_finite) / rate
        return AudioError(Reason.NON_FINITE_AUDIO, f"holds NaN or infinity at {seconds:.3f} s")
    return error_if_too_long(decoded.num_samples, rate, max_seconds)
