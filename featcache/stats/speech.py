"""Segments of speech, from the probability of speech in each frame.

The rule is that of Silero VAD's `get_speech_timestamps`, release 6.2.3, sample by sample
(https://github.com/snakers4/silero-vad, `utils_vad.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.loader.cache import Cache
from featcache.manifest.copies import copies_of
from featcache.version.join import by_shard

_LEAST_PAUSE = 0.098
"""The shortest pause, in seconds, at which speech that is too long may be cut."""

Span = tuple[int, int]
"""The first sample of a segment, and the sample behind its last."""


@dataclass(frozen=True)
class SpeechRule:
    """The thresholds and durations that decide what a segment of speech is."""

    threshold: float = 0.5
    """Speech begins at a frame of this probability or more. It ends where the probability
    is more than 0.15 lower, for `min_silence`."""
    min_speech: float = 0.25
    """Shorter segments, in seconds, are left out."""
    min_silence: float = 0.1
    """Shorter pauses, in seconds, do not end a segment."""
    pad: float = 0.03
    """Seconds that are added at both ends. Neighbours share a pause that is too short."""
    max_speech: float = math.inf
    """Longer segments, in seconds, are cut: at the longest pause, if there is one."""


@dataclass(frozen=True)
class SpeechSegment:
    """A segment of speech as a row of a manifest: of the file that an utterance is of."""

    utterance: str
    number: int
    """The number of the segment in its utterance, from 1."""
    path: str
    start: float
    """Seconds from the beginning of the file."""
    duration: float
    """Seconds."""
    channel: int | None

    def row(self) -> dict[str, Any]:
        """Return the row, by column."""
        return {
            "id": f"{self.utterance}-{self.number}",
            "path": self.path,
            "start": self.start,
            "duration": self.duration,
            "channel": self.channel,
            "utterance": self.utterance,
        }


def speech_spans(
    probabilities: Sequence[float], num_samples: int, hop: int, rate: int, rule: SpeechRule
) -> list[Span]:
    """Find the segments of a clip of `num_samples` samples at `rate` Hz, from the
    probabilities of its frames of `hop` samples."""
    pad, min_speech = rate * rule.pad, rate * rule.min_speech
    longest = rate * rule.max_speech - hop - 2 * pad
    leaving = max(rule.threshold - 0.15, 0.01)
    spans: list[Span] = []
    start = silence = None
    pauses: list[tuple[int, int]] = []
    for number, probability in enumerate(probabilities):
        now = number * hop
        if probability >= rule.threshold:
            if silence is not None and now - silence > rate * _LEAST_PAUSE:
                pauses.append((silence, now - silence))
            silence = None
            if start is None:
                start = now
                continue
        if start is None:
            continue
        if now - start > longest:
            if not pauses:
                spans.append((start, now))
                start = silence = None
                continue
            pause, duration = max(pauses, key=lambda pause: pause[1])
            spans.append((start, pause))
            start, silence, pauses = pause + duration, None, []
        if probability < leaving:
            if silence is None:
                silence = now
            if now - silence >= rate * rule.min_silence:
                if silence - start > min_speech:
                    spans.append((start, silence))
                start, silence, pauses = None, None, []
    if start is not None and num_samples - start > min_speech:
        spans.append((start, num_samples))
    return _padded(spans, num_samples, pad)


def _padded(spans: Sequence[Span], num_samples: int, pad: float) -> list[Span]:
    """Add `pad` samples to both ends of each segment, or half of the pause between two."""
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    for number, end in enumerate(ends):
        if number == 0:
            starts[0] = int(max(0, starts[0] - pad))
        if number == len(ends) - 1:
            ends[number] = int(min(num_samples, end + pad))
            break
        pause = starts[number + 1] - end
        if pause < 2 * pad:
            ends[number] += pause // 2
            starts[number + 1] -= pause // 2
        else:
            ends[number] = int(min(num_samples, end + pad))
            starts[number + 1] = int(max(0, starts[number + 1] - pad))
    return [*zip(starts, ends, strict=True)]


def find_speech(
    cache: Cache, rule: SpeechRule, report: Callable[[int], object] = lambda count: None
) -> Iterator[SpeechSegment]:
    """Yield the segments of speech of all utterances of a version, shard by shard; `report`
    is called with the utterances of each shard.

    Raises ArgumentError if the version holds no probabilities, or copies at other speeds;
    DamagedError if it is damaged."""
    version, spec = cache.version, cache.spec
    hop = spec.sample_rate / (spec.axis.per_second() or math.inf)
    if spec.item_shape != (1,) or spec.dtype[:5] != "float" or not hop.is_integer() or not hop:
        what = f"holds {spec.main.shape_text()}, {spec.units}"
        raise ArgumentError(f"{version.path}: {what}, and no probabilities, as vad-silero does")
    if not copies_of(cache.config).are_plain:
        raise ArgumentError(f"{version.path}: holds copies, whose times are not the file's")
    positions = np.arange(len(cache))
    for inside, shard, numbers in by_shard(version, cache.index, positions):
        items = shard.items(numbers.tolist())
        for position, item in zip(positions[inside].tolist(), items, strict=True):
            probabilities: NDArray[Any] = cache[position][:, 0]
            if probabilities.min() < 0 or probabilities.max() > 1:
                what = f"{item.id}: values from {probabilities.min():g} to {probabilities.max():g}"
                raise ArgumentError(f"{version.path}: {what} are no probabilities")
            spans = speech_spans(
                probabilities.tolist(), item.num_samples, int(hop), spec.sample_rate, rule
            )
            for number, (start, end) in enumerate(spans, 1):
                yield SpeechSegment(
                    item.id,
                    number,
                    item.path,
                    round((item.start or 0) + start / spec.sample_rate, 7),
                    round((end - start) / spec.sample_rate, 7),
                    item.channel,
                )
        report(len(numbers))
