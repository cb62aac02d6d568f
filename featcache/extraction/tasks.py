"""What a manifest wants, without what the version holds, is the shards still to make.
Nothing is read or written.

The manifest is partitioned once, by its rows alone, into ranges of about a shard each. A
range without any extracted row is one task, whatever happened to the others: so a run
that was killed and resumed makes exactly the shards of an uninterrupted run. The missing
rows of partly extracted ranges (retried failures, changed rows, a grown manifest, an
interrupted run) are gathered into tasks of a shard's size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ManifestError
from featcache.manifest.segments import Utterance
from featcache.manifest.utterances import Manifest
from featcache.strings import are_distinct
from featcache.version.index import Index
from featcache.version.join import RowStatus
from featcache.version.wanted import Wanted

_Seconds = NDArray[np.float64]
"""The duration of each row, `[rows]`."""

MAX_ITEMS = 100_000
"""The most utterances in a shard. A megabyte holds many short clips."""

SHARD_HOURS = 1.0
"""The most audio in a shard, about, however small its features are: a kill costs each
process the shard it was making, devices share the work shard by shard, and while the last
one is written there is nothing else left to do."""

FEWEST_SHARDS = 256
"""Where rows have more than so many times `SHARD_HOURS`, a shard may hold this part of
their audio instead."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to make: small, picklable, and done by any process that has the
    manifest's root and the configs."""

    name: str
    """A hash of the utterances."""
    row: int
    """The manifest row of the first utterance."""
    utterances: tuple[Utterance, ...]
    seconds: tuple[float, ...]
    """Seconds of audio of each utterance, known or estimated."""
    generations: tuple[int, ...]
    """Of which generation each utterance's item, or its failure, is to be."""
    manifest: str
    """The name of the wanted set of the manifest."""


def want(
    manifest: str,
    keys: Sequence[NDArray[np.uint64]],
    index: Index,
    before: Sequence[Wanted],
    again: ArrayLike = (),
) -> Wanted:
    """What a run over a manifest wants. Raises ManifestError if two ids have the same hash.

    A row that is there in the same form keeps its generation, another one of its id gets
    the next; so do those that are to be extracted `again`, by their numbers, because
    their audio has changed, for example. A row of which nothing is known gets a higher one
    than all that were forgotten.

    Args:
        manifest: What tells the manifest from others.
        keys: The hashes of its rows' ids, and of the rows, each uint64 `[rows]`.
        before: The wanted sets that are kept.
        again: The numbers of rows that are to be extracted although they are there.
    """
    id_hash, row_hash = keys
    if not are_distinct(id_hash):
        raise ManifestError(f"{manifest}: two ids have the same hash: rename one of them")
    forgotten = max((one.forgotten for one in before), default=0)
    rows = np.stack([id_hash, row_hash, np.zeros_like(id_hash)])
    mine = Wanted(manifest, rows, forgotten=forgotten)
    generation = mine.rows[2]
    highest, is_same = np.zeros(len(mine), np.uint64), np.ones(len(mine), bool)
    of_index = index.find_hashes(id_hash)
    held = [(of_index, index.row_hash, index.generation)] if len(index) else []
    others = (
        other
        for other in before
        if len(other) and (other.name == mine.name or mine.contains(other))
    )
    wanted_before = ((other.find(id_hash), other.rows[1], other.rows[2]) for other in others)
    for at, row_hashes, generations in chain(held, wanted_before):
        theirs = generations[at]
        theirs[at < 0] = 0
        same = row_hashes[at] == row_hash
        is_same = np.where(theirs > highest, same, is_same & (same | (theirs < highest) | (at < 0)))
        np.maximum(highest, theirs, out=highest)
    generation[:] = np.where(highest, highest + ~is_same, np.uint64(forgotten + 1))
    numbers = np.asarray(again, np.int64)
    if len(numbers) and len(index):
        at = of_index[numbers]
        next_ones = np.where(at < 0, np.uint64(1), index.generation[at] + np.uint64(1))
        generation[numbers] = np.maximum(generation[numbers], next_ones)
    return mine


def shard_ranges(seconds: _Seconds, seconds_per_shard: float) -> NDArray[np.int64]:
    """The number of the range that each row is in, int64 `[rows]`; it depends on the
    rows' durations only.

    Args:
        seconds_per_shard: How much audio fills a shard, about. A range ends before it at
            `SHARD_HOURS`, or at a part of all audio if that is more: so shards of codes
            are not tiny, and a kill costs little of the whole.
    """
    # the same bits on every machine
    in_all = math.fsum(np.minimum(seconds, seconds_per_shard).tolist())
    seconds_per_range = min(seconds_per_shard, max(SHARD_HOURS * 3600, in_all / FEWEST_SHARDS))
    # at most 1: a row fills no more than one shard
    weight = np.clip(seconds / seconds_per_range, 1 / MAX_ITEMS, 1)
    begins = np.zeros(len(weight))
    np.cumsum(weight[:-1], out=begins[1:])
    return begins.astype(np.int64)  # rounded down


def shard_tasks(
    manifest: Manifest,
    rows: RowStatus,
    wanted: Wanted,
    seconds: _Seconds,
    seconds_per_shard: float,
    first_row: int = 0,
) -> Iterator[ShardTask]:
    """The shards to make, as far as possible in the manifest's order.

    Args:
        manifest, rows: The rows that the version should hold, and what it lacks of them.
        wanted: What the whole manifest wants.
        seconds: The durations of the rows, known or estimated; they decide only which
            shard a row is in.
        seconds_per_shard: How much audio a shard holds, about.
        first_row: If the rows are a partition of a manifest, the number of their first
            one in the whole.
    """
    missing = np.flatnonzero(rows.missing)
    ranges = shard_ranges(seconds, seconds_per_shard)
    partly = np.isin(ranges[missing], ranges[rows.present])
    whole, gathered = missing[~partly], missing[partly]
    for group, shard in (
        (whole, ranges[whole]),
        (gathered, shard_ranges(seconds[gathered], seconds_per_shard)),
    ):
        for members in np.split(group, np.flatnonzero(np.diff(shard)) + 1):
            if len(members):
                utterances = tuple(manifest[row] for row in members.tolist())
                name = hashlib.sha256("\n".join(map(repr, utterances)).encode()).hexdigest()[:12]
                generations = tuple(wanted.rows[2, first_row + members].tolist())
                lengths = tuple(seconds[members].tolist())
                yield ShardTask(
                    name, first_row + int(members[0]), utterances, lengths, generations, wanted.name
                )
