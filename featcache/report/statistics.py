"""Numbers of each utterance that versions give: the named values of vectors, its pitch, its
share of speech. One shard is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.cache import Cache
from featcache.media.pictures import CERTAIN
from featcache.spec import FeatureSpec, Ints, as_values
from featcache.stats.pieces import parts_of, stretches

Floats = NDArray[np.float32]

_MOST_NAMES = 16


def _below_zero(values: Floats) -> Floats:
    return -values


Badness = Callable[[Floats], Floats]

RULES: dict[str, list[tuple[str, Badness]]] = {
    "clipped": [("most clipped", np.positive)],
    "level": [("quietest", np.negative)],
    "dc": [("largest DC", np.abs)],
    "silence": [("most silence", np.positive)],
    "silent_start": [("longest silent start", np.positive)],
    "silent_end": [("longest silent end", np.positive)],
    "bandwidth": [("narrowest band", np.negative)],
    "ovrl": [("worst overall", np.negative)],
    "sig": [("worst speech", np.negative)],
    "bak": [("worst background", np.negative)],
    "p808": [("worst P.808", np.negative)],
    "pitch": [("lowest pitch", np.negative), ("highest pitch", np.positive)],
    "voiced": [("least voiced", np.negative)],
    "speech": [("least speech", np.negative)],
    "voice": [("nearer to another speaker", _below_zero)],
}
"""The rules of outliers by the statistic: the name of a rule, and how bad a value is."""


@dataclass(frozen=True)
class Statistics:
    """Numbers of each utterance of a version."""

    cache: Cache
    seconds: Floats
    """The durations of the utterances."""
    units: dict[str, str]
    """The unit of each statistic, by its name."""
    columns: dict[str, Floats]
    """The values of each statistic, `[utterances]`; NaN if an utterance has none."""

    def worst(self, count: int) -> Iterator[tuple[str, list[int]]]:
        """Yield each rule with the positions of the worst utterances by it."""
        for name, column in self.columns.items():
            for rule, badness in RULES.get(name, ()):
                bad = badness(column)
                is_bad = np.isfinite(bad) & ((bad > 0) | (badness is np.negative))
                order = np.argsort(-bad, kind="stable")
                yield rule, order[is_bad[order]][:count].tolist()

    def of(self, position: int) -> dict[str, float]:
        """Return the statistics of an utterance by their names."""
        return {name: float(column[position]) for name, column in self.columns.items()}


def units_of(spec: FeatureSpec) -> dict[str, str]:
    """Return the names and units of the statistics that a version's utterances have; empty
    for most versions."""
    if spec.is_quantized:
        return {}
    if spec.is_pitch:
        return {"pitch": "Hz", "voiced": "share of frames"}
    if spec.is_curve:
        return {"speech": "share of frames"}
    return dict(islice(spec.named_units.items(), _MOST_NAMES))


def read_statistics(cache: Cache, seconds: Floats) -> Statistics | None:
    """Read a version's statistics; None if it has none. Raises StoreError if it is
    damaged."""
    spec, units = cache.spec, units_of(cache.spec)
    if not (units and len(cache)):
        return None
    blocks: list[Floats] = []
    for frames, lengths in read_blocks(cache):
        numbers = np.repeat(np.arange(len(lengths)), lengths)
        if spec.is_pitch:
            block = _pitch(frames, numbers, lengths)
        elif spec.is_curve:
            if frames.min(initial=0) < 0 or frames.max(initial=0) > 1:
                return None  # no probabilities
            speech = np.bincount(numbers, frames[:, 0] >= CERTAIN, len(lengths))
            block = (speech / lengths)[:, None]
        else:
            block = frames[:, : len(units)]
        blocks.append(block.astype(np.float32))
    columns = dict(zip(units, np.concatenate(blocks).T, strict=True))
    return Statistics(cache, seconds, units, columns)


def read_blocks(cache: Cache) -> Iterator[tuple[NDArray[Any], Ints]]:
    """Yield the frames `[frames, values]` of each shard's utterances, in the order of their
    positions, and the numbers of frames of these."""
    for part in parts_of(cache):
        index = part.index
        for shard in range(len(index.shards)):
            span = slice(*index.span(shard))
            firsts, lengths = index.first_frame[span], index.num_frames[span].astype(np.int64)
            if not len(firsts):
                continue
            begin = int(firsts.min())
            stored = part.shard_frames(shard, begin, int((firsts + lengths).max()) - begin)
            frames = stored[stretches(firsts - begin, lengths)]
            yield as_values(frames, cache.spec.dtype).reshape(len(frames), -1), lengths


def _pitch(frames: NDArray[Any], numbers: Ints, lengths: Ints) -> NDArray[np.float64]:
    """Compute the median pitch of voiced frames and their share, `[utterances, 2]`."""
    is_voiced = frames[:, 1] >= CERTAIN
    pitch, owners = frames[is_voiced, 0], numbers[is_voiced]
    counts = np.bincount(owners, minlength=len(lengths))
    ordered = pitch[np.lexsort((pitch, owners))].astype(np.float64)
    starts, has_any = counts.cumsum() - counts, counts > 0
    lower, upper = starts + (counts - 1) // 2, starts + counts // 2
    medians = np.full(len(lengths), np.nan)
    medians[has_any] = (ordered[lower[has_any]] + ordered[upper[has_any]]) / 2
    return np.stack([medians, counts / lengths], axis=1)
