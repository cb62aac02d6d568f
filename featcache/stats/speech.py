"""Segments of speech, from the probability of speech in each frame.

The rule is that of Silero VAD's `get_speech_timestamps`, release 6.2.3, sample by sample
(https://github.com/snakers4/silero-vad, `utils_vad.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.loader.cache import Cache
from featcache.manifest.audio_locations import AudioLocation, locate
from featcache.manifest.copies import copies_of
from featcache.version.join import by_shard
from featcache.version.records import root_of

_LEAST_PAUSE = 0.098
"""The shortest pause, in seconds, at which speech that is too long may be cut."""

_LONGEST = 1e9
"""More seconds than any file has."""

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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (0 <= value < _LONGEST or (name, value) == ("max_speech", math.inf)):
                raise ArgumentError(f"{name} is {value}: give a number from 0 to {_LONGEST:g}")


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
    pauses = [start - end for (_, end), (start, _) in pairwise(spans)]
    between = [pause // 2 if pause < 2 * pad else pad for pause in pauses]
    before, after = [pad, *between], [*between, pad]
    return [
        (int(max(0, start - left)), int(min(num_samples, end + right)))
        for (start, end), left, right in zip(spans, before, after, strict=False)
    ]


def find_speech(
    cache: Cache, rule: SpeechRule
) -> tuple[list[dict[str, Any]], AudioLocation | None]:
    """Return the segments of speech of all utterances of a version, as rows of a manifest;
    and the root of their paths, None if no record of a run tells it. Where runs had several
    roots, paths are absolute.

    Raises ArgumentError if the version holds no probabilities, or copies of utterances;
    DamagedError if it is damaged."""
    version, spec = cache.version, cache.spec
    rate, where = spec.sample_rate, cache.version.path
    hop = rate / (spec.axis.exact_rate or math.inf)
    if spec.item_shape != (1,) or spec.codebook_sizes or not hop or hop % 1:
        what = f"holds {spec.main.shape_text()}, {spec.units}"
        raise ArgumentError(f"{where}: {what}: name a version of probabilities, as of vad-silero")
    if not copies_of(cache.config).are_plain:
        raise ArgumentError(f"{where}: holds copies, whose times are not the file's")
    rows: list[dict[str, Any]] = []
    root_of_row: list[AudioLocation | None] = []
    positions = np.arange(len(cache))
    for inside, shard, numbers in by_shard(version, cache.index, positions):
        items = shard.items(numbers.tolist())
        root = root_of(version, shard)
        for position, item in zip(positions[inside].tolist(), items, strict=True):
            frames: NDArray[Any] = cache[position][:, 0]
            if frames.min() < 0 or frames.max() > 1:
                what = f"{item.id} has values from {frames.min():g} to {frames.max():g}"
                raise ArgumentError(f"{where}: {what}, which are no probabilities")
            spans = speech_spans(frames.tolist(), item.num_samples, int(hop), rate, rule)
            for number, (start, end) in enumerate(spans, 1):
                row = {
                    "id": f"{item.id}-{number}",
                    "path": item.path,
                    "start": round((item.start or 0) + start / rate, 7),
                    "duration": round((end - start) / rate, 7),
                    "channel": item.channel,
                    "utterance": item.id,
                }
                rows.append(row)
                root_of_row.append(root)
    roots = {*root_of_row} - {None}
    if len(roots) < 2:
        return rows, next(iter(roots), None)
    for segment, root in zip(rows, root_of_row, strict=True):
        segment["path"] = str(locate(root or Path(), segment["path"]))
    return rows, None
