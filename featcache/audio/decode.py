"""One file -> the utterances cut from it -> mono float32 waveforms at the extractor's rate.

`decode` opens a file once and cuts segments out of it; `to_waveform` takes a channel and resamples. They are separate
because several extractors may need the same samples at different rates.

Samples are scaled as libsndfile does: integers to [-1, 1), floats as they are. Any problem with an utterance is an
`AudioError` with its `Reason`, and never stops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from featcache.audio.recording import END_TOLERANCE_SECONDS, UNKNOWN, Recording, Span
from featcache.errors import AudioError, MissingDependencyError, Reason
from featcache.spec import all_finite

if TYPE_CHECKING:
    from featcache.audio.policy import AudioPolicy


@dataclass(frozen=True, slots=True)
class Source:
    """The identity of a file when it was decoded.

    Attributes:
        size: in bytes.
        mtime_ns: when it was last modified, in nanoseconds since the epoch.
        sample_rate: in Hz, as in the file.
    """

    size: int
    mtime_ns: int
    sample_rate: int


@dataclass(frozen=True, slots=True)
class Cut:
    """What to cut from a file: by default, all of it.

    Attributes:
        start: seconds from the beginning of the file; None for the beginning.
        duration: seconds; None for the rest of the file.
    """

    start: float | None = None
    duration: float | None = None


def decode(
    path: str | Path,
    segments: Sequence[Cut],
    *,
    max_seconds: float | None = None,
    reserve: Callable[[int, float], None] | None = None,
) -> Iterator[tuple[NDArray[np.float32], Source] | AudioError]:
    """Cut segments out of one file, which stays open until the iterator is exhausted or closed.

    A segment is bit for bit what decoding the whole file and cutting gives: samples round(start * rate) up to
    round(start * rate) + round(duration * rate). WAV, FLAC and their like are seeked, so that only the segment at
    hand is held. The others (MP3, Ogg) are decoded once, up to the last sample that is needed; there, segments
    that are not asked for in the order of the file are held until they are due.

    Of a truncated or damaged file, the segments before the damage are good and the others fail.

    Args:
        path: the file.
        segments: in any order; they may overlap.
        max_seconds: longer ones fail, before they are decoded where the header tells.
        reserve: called with the bytes that the longest segment will take, and its seconds, before any is decoded, so
            that the caller can wait for room; 0 where the header does not tell.

    Yields:
        For each segment, in the order given, its samples, float32 `[num_samples, channels]` at the file's rate,
        with the identity of the file; or what is wrong. What is wrong with the file is so for each segment.
    """
    try:
        recording = Recording(path)
    except AudioError as fault:
        yield from repeat(fault, len(segments))
        return
    with closing(recording):
        source = Source(recording.size, recording.mtime_ns, recording.sample_rate)
        spans = [_span(recording, recording.num_samples, segment, max_seconds) for segment in segments]
        good = [span for span in spans if not isinstance(span, AudioError)]
        if reserve is not None:
            longest = max((stop - first for first, stop in good if stop != UNKNOWN), default=0)
            num_bytes = longest * recording.num_channels * np.dtype(np.float32).itemsize
            reserve(num_bytes, longest / recording.sample_rate)
        cuts = recording.cut(good)
        for number, (segment, span) in enumerate(zip(segments, spans, strict=True)):
            if isinstance(span, AudioError):
                yield span
                continue
            try:
                samples = next(cuts)
            except MemoryError:
                yield AudioError(
                    Reason.OUT_OF_MEMORY, f"decoding it takes more memory than there is{_size(recording, span)}"
                )
                yield from decode(path, segments[number + 1 :], max_seconds=max_seconds, reserve=reserve)
                return
            yield _fault(recording, samples, span, segment, max_seconds) or (samples, source)
            del samples  # not held while the next ones are decoded


def to_waveform(
    samples: NDArray[np.float32],
    source_rate: int,
    policy: AudioPolicy,
    channel: int | None = None,
    *,
    speed: float = 1.0,
) -> NDArray[np.float32]:
    """Turn decoded samples into the waveform that an extractor takes.

    A mix is the sum of channels 0, 1, … in float32, divided by their number. soxr resamples it, to
    floor(num_samples * rate / source_rate + 0.5) samples, and gives the same bits in any thread.

    Another speed is the same step from another rate: the recording is taken for one of source_rate * speed Hz, so that
    it lasts 1 / speed as long, and pitch and formants go with it (sox's `speed`; Ko et al., Audio augmentation for
    speech recognition, Interspeech 2015).

    Args:
        samples: float32 `[num_samples, channels]`, C-contiguous.
        source_rate: theirs, in Hz.
        policy: the config's `audio` section.
        channel: the utterance's own, from 0; None for the policy's.
        speed: how many times as fast the waveform is to be; of no more than six digits.

    Returns:
        float32 `[num_samples]` at `policy.sample_rate`, contiguous; it may share the memory of `samples`.

    Raises:
        AudioError: RATE_REFUSED, TOO_LONG or NO_SUCH_CHANNEL.
        MissingDependencyError: the rates differ, or the speed is not 1, and soxr is not installed.
    """
    if source_rate < policy.min_source_rate:
        raise AudioError(
            Reason.RATE_REFUSED,
            f"sampled at {source_rate} Hz, by its header: below {policy.min_source_rate} Hz (audio.min_source_rate)",
        )
    if source_rate != policy.sample_rate and policy.resample == "forbid":
        wanted = f"the config wants {policy.sample_rate} Hz and forbids resampling"
        raise AudioError(Reason.RATE_REFUSED, f"sampled at {source_rate} Hz; {wanted}")
    if too_long := is_too_long(len(samples), source_rate * speed, policy.max_seconds):
        raise too_long
    mono = _mono(samples, policy.channel if channel is None else channel)
    rates = source_rate, policy.sample_rate
    if speed != 1:
        rates = (Fraction(f"{speed:g}") * source_rate / policy.sample_rate).as_integer_ratio()
    if rates[0] == rates[1]:
        return mono
    try:
        import soxr
    except ImportError as error:
        raise MissingDependencyError("soxr", "resampling") from error
    quality = policy.resample.removeprefix("soxr_").upper()
    resampled: NDArray[np.float32] = soxr.resample(mono, *rates, quality)
    return resampled


def probe_seconds(path: str | Path) -> float | None:
    """How many seconds a file holds, by its header; None where it cannot be read, or its header does not say."""
    try:
        with closing(Recording(path)) as recording:
            known = recording.num_samples != UNKNOWN
            return recording.num_samples / recording.sample_rate if known else None
    except AudioError:
        return None


def probe_rate(path: str | Path) -> int | None:
    """The sample rate of a file in Hz, by its header; None where it cannot be read."""
    try:
        with closing(Recording(path)) as recording:
            return recording.sample_rate
    except AudioError:
        return None


def _span(recording: Recording, held: int, segment: Cut, max_seconds: float | None) -> Span | AudioError:
    """Where a segment lies in a recording that holds `held` samples, or why it does not."""
    rate = recording.sample_rate
    first = round((segment.start or 0.0) * rate)
    stop = held if segment.duration is None else first + round(segment.duration * rate)
    if recording.shortfall and (segment.duration is None or stop > held):
        return AudioError(Reason.TRUNCATED, recording.shortfall)
    if held == 0:
        return AudioError(Reason.EMPTY, f"its {recording.size:,} bytes hold no samples, according to its header")
    if not 0 <= first < held or stop > held + round(END_TOLERANCE_SECONDS * rate):
        end = "the end" if segment.duration is None else f"{stop / rate:.3f} s"
        asked = f"the segment goes from {first / rate:.3f} s to {end}"
        return AudioError(Reason.SEGMENT_OUTSIDE, f"{asked}, but the file holds {held / rate:.3f} s")
    if stop <= first:
        return AudioError(Reason.EMPTY, f"{segment.duration} s hold no samples at {rate} Hz")
    stop = min(stop, held)
    if stop == UNKNOWN and max_seconds is not None:
        return first, first + int(max_seconds * rate) + 1  # enough to see that it is too long
    return is_too_long(stop - first, rate, max_seconds) or (first, stop)


def _size(recording: Recording, span: Span) -> str:
    """How long a span of a recording is, for the end of a message; nothing where the header does not say."""
    first, stop = span
    if stop == UNKNOWN:
        return ""
    return f": {(stop - first) / recording.sample_rate:,.0f} s at {recording.sample_rate} Hz"


def _fault(
    recording: Recording, samples: NDArray[np.float32], span: Span, segment: Cut, max_seconds: float | None
) -> AudioError | None:
    """What is wrong with the samples that were cut for a span; None where nothing is."""
    first, stop = span
    rate = recording.sample_rate
    if recording.has_changed():
        return AudioError(Reason.FILE_UNREADABLE, "the file changed while it was read")
    if len(samples) < stop - first:
        if recording.damage:
            return recording.damage
        held = recording.position
        if recording.num_samples != UNKNOWN:
            promised = f"its header promises {recording.num_samples / rate:.3f} s"
            return AudioError(Reason.TRUNCATED, f"{promised}, but the file holds {held / rate:.3f} s")
        refitted = _span(recording, held, segment, max_seconds)
        if isinstance(refitted, AudioError):
            return refitted
    if recording.is_float and not all_finite(samples):
        at = first + int(np.isfinite(samples).all(axis=1).argmin())
        return AudioError(Reason.NON_FINITE_AUDIO, f"holds NaN or infinity at {at / rate:.3f} s")
    return is_too_long(len(samples), rate, max_seconds)


def is_too_long(num_samples: int, rate: float, max_seconds: float | None) -> AudioError | None:
    """The error that so many samples are, where they last longer than `max_seconds`."""
    if max_seconds is None or num_samples <= max_seconds * rate:
        return None
    lasts = f"lasts {num_samples / rate:.3f} s or more at {rate:g} Hz, but may last at most {max_seconds:g} s"
    return AudioError(Reason.TOO_LONG, f"{lasts}: see audio.max_seconds, params.chunk and params.pad_to_seconds")


def _mono(samples: NDArray[np.float32], channel: Literal["mix", "first"] | int) -> NDArray[np.float32]:
    num_channels = samples.shape[1]
    if channel == "mix" and num_channels > 1:
        mixed = samples[:, 0] + samples[:, 1]
        for other in range(2, num_channels):
            mixed += samples[:, other]
        mixed /= num_channels
        return mixed
    index = channel if isinstance(channel, int) else 0
    if not 0 <= index < num_channels:
        there = f"the file has {num_channels}, counted from 0"
        raise AudioError(Reason.NO_SUCH_CHANNEL, f"there is no channel {index}: {there}")
    return np.ascontiguousarray(samples[:, index])
