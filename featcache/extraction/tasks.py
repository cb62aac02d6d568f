"""The manifest minus what the version holds is the shards still to make. Pure: nothing here reads audio or writes.

The manifest is partitioned once, by its rows alone, into ranges of about a shard each. A range without any
extracted row is one task, whatever happened to the others: so a run that was killed and resumed makes exactly
the shards of an uninterrupted run. The missing rows of partly extracted ranges (retried failures, changed
rows, a grown manifest, an interrupted run) are gathered into tasks of a shard's size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.manifest import Manifest, Utterance
from featcache.version.index import Index
from featcache.version.join import RowKeys, join
from featcache.version.ledger import Failure
from featcache.version.wanted import Wanted

MAX_ITEMS = 100_000
"""The most utterances in a shard. A megabyte holds many short clips."""

SHARD_HOURS = 4.0
"""The most audio in a shard, about, however small its features are: a kill costs each process the shard it was making.
"""

FEWEST_SHARDS = 256
"""Where rows have more than so many times `SHARD_HOURS`, a shard may hold this part of their audio instead."""


@dataclass(frozen=True)
class RowStatus:
    """What a version holds and lacks of a manifest; each array is `[rows]`."""

    present: NDArray[np.bool_]
    """The version holds the row's features. If the row's file has changed since, and has failed, it does not."""
    failed: NDArray[np.bool_]
    """The row failed in an earlier run and is not tried again."""
    replaces: NDArray[np.int64]
    """The position in the index of the item of the same id that was made from another row (another path, start,
    duration or channel) or another file; -1 if there is none."""
    wanted: NDArray[np.bool_]
    """The row may be extracted by this run."""

    @property
    def missing(self) -> NDArray[np.bool_]:
        """The rows to extract, bool `[rows]`."""
        return self.wanted & ~self.present & ~self.failed


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to make: small, picklable, and done by any process that has the manifest's root and the configs."""

    name: str
    """A hash of the utterances."""
    row: int
    """The manifest row of the first utterance."""
    utterances: tuple[Utterance, ...]
    """The utterances to extract, in the manifest's order."""
    seconds: tuple[float, ...]
    """Seconds of audio of each utterance, known or estimated."""
    generations: tuple[int, ...]
    """Of which generation each utterance's item, or its failure, is to be."""
    manifest: str
    """The name of the wanted set of the manifest."""


def compare(
    manifest: Manifest,
    index: Index,
    failures: Mapping[str, Failure],
    is_unchanged: Callable[[Failure], bool] = lambda _: True,
) -> RowStatus:
    """Compare the rows of a manifest that a version should hold with what it holds, and its standing failures, by id.

    `is_unchanged` says whether the file of a failed utterance is still the one that failed; else it is tried again.
    """
    joined = join(index, RowKeys.of(manifest), failures)
    present = (joined.positions >= 0) & ~joined.is_changed
    failed = np.zeros(len(manifest), bool)
    for row, failure in joined.failures.items():
        failed[row] = is_unchanged(failure)
    return RowStatus(present, failed, np.where(present, -1, joined.positions), np.ones(len(manifest), bool))


def shard_ranges(seconds: NDArray[np.float64], seconds_per_shard: float) -> NDArray[np.int64]:
    """The number of the range that each row is in, int64 `[rows]`; it depends on the rows' durations only.

    Args:
        seconds: The durations of the rows.
        seconds_per_shard: How much audio fills a shard, about. A range ends before it at `SHARD_HOURS`, or at a part of
            all audio if that is more: so shards of codes are not tiny, and a kill costs little of the whole.
    """
    in_all = math.fsum(np.minimum(seconds, seconds_per_shard).tolist())  # the same bits on every machine
    seconds_per_range = min(seconds_per_shard, max(SHARD_HOURS * 3600, in_all / FEWEST_SHARDS))
    weight = np.clip(seconds / seconds_per_range, 1 / MAX_ITEMS, 1)  # at most 1: a row fills no more than one shard
    begins = np.zeros(len(weight))
    np.cumsum(weight[:-1], out=begins[1:])
    ranges: NDArray[np.int64] = np.floor(begins).astype(np.int64)
    return ranges


def shard_tasks(
    manifest: Manifest,
    status: RowStatus,
    wanted: Wanted,
    seconds: NDArray[np.float64],
    seconds_per_shard: float,
    first_row: int = 0,
) -> Iterator[ShardTask]:
    """The shards to make, as far as possible in the manifest's order.

    A run that was killed and goes on makes the same shards, as far as it can: rows are dealt to shards by all of the
    manifest's. Those that are left of a range of which some rows are there are gathered.

    Args:
        manifest, status: The rows that the version should hold, and what it lacks of them.
        wanted: What the whole manifest wants.
        seconds: The durations of the rows, known or estimated; they decide only which shard a row is in.
        seconds_per_shard: How much audio a shard holds, about.
        first_row: If the rows are a partition of a manifest, the number of their first one in the whole.
    """
    rows = np.flatnonzero(status.missing)
    if not len(rows):
        return
    ranges = shard_ranges(seconds, seconds_per_shard)
    partly_there = np.zeros(int(ranges[-1]) + 1, bool)
    partly_there[ranges[status.present]] = True
    partly = partly_there[ranges[rows]]
    whole, gathered = rows[~partly], rows[partly]
    for group, shard in ((whole, ranges[whole]), (gathered, shard_ranges(seconds[gathered], seconds_per_shard))):
        for members in np.split(group, np.flatnonzero(np.diff(shard)) + 1):
            if len(members):
                yield _task(manifest, wanted, seconds, members, first_row)


def _task(
    manifest: Manifest, wanted: Wanted, seconds: NDArray[np.float64], rows: NDArray[np.int64], first_row: int
) -> ShardTask:
    utterances = tuple(manifest[row] for row in rows.tolist())
    name = hashlib.sha256("\n".join(map(repr, utterances)).encode()).hexdigest()[:12]
    generations = tuple(wanted.rows[2, first_row + rows].tolist())
    return ShardTask(
        name, first_row + int(rows[0]), utterances, tuple(seconds[rows].tolist()), generations, wanted.name
    )
