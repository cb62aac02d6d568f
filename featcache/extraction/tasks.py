"""The shards still to make, from what a manifest wants and a version lacks.

The manifest is cut, by its rows alone, into ranges of about a shard each. A range without
any extracted row is one task, so an interrupted run goes on with the same shards. The
missing rows of partly extracted ranges are gathered into tasks of a shard's size."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ManifestError
from featcache.manifest.segments import Utterance
from featcache.manifest.strings import are_distinct
from featcache.manifest.utterances import Manifest
from featcache.version.index import Index
from featcache.version.join import RowStatus
from featcache.version.wanted import Wanted

_Seconds = NDArray[np.float64]
"""The duration of each row, `[rows]`."""

MAX_ITEMS = 100_000
"""The most utterances in a shard. A megabyte holds many short clips."""

SHARD_HOURS = 1.0
"""The most audio in a shard, about: a kill costs each process the shard it was making."""

SHARDS_TO_SHARE = 32
"""The shards, about, of a manifest of a few hours, so that several processes share it."""

LEAST_WORK, WORK_OF_CLIP = 900.0, 2.0
"""The work in such a shard, about, in seconds of audio: to commit it takes as long as 20.
Opening and starting on a clip takes as long as two."""

EVENLY = 4
"""If there are more of such shards, their number is a multiple of this one: two or four
processes then end together."""

FEWEST_SHARDS = 256
"""If rows have more than so many times `SHARD_HOURS`, a shard may hold this part of their
audio."""


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to make: small and picklable."""

    row: int
    """The number of its first row in the whole manifest. No other task has it."""
    utterances: tuple[Utterance, ...]
    seconds: tuple[float, ...]
    """Seconds of audio of each utterance, known or estimated."""
    generations: tuple[int, ...]
    manifest: str


def seconds_that_fill(num_bytes: float, bytes_per_second: float) -> float:
    """Return the seconds of audio whose features take so many bytes; infinite if seconds take
    none, as those of vectors."""
    return num_bytes / bytes_per_second if bytes_per_second else math.inf


def want(
    manifest: str,
    rows: NDArray[np.uint64],
    index: Index,
    before: Sequence[Wanted],
    again: ArrayLike = (),
    are_known: bool = False,
) -> Wanted:
    """Give each row of a manifest a generation. Raises ManifestError if two ids have the same
    hash.

    A row that is known in the same form keeps its generation. A changed row gets the next
    one, and so do rows that are to be extracted `again`, by their numbers. An unknown row gets
    a higher one than all that were forgotten.

    Args:
        manifest: The name of the manifest's wanted set.
        rows: The hashes of its rows' ids, and of the rows, and numbers that the generations
            replace: uint64 `[3, rows]`.
        before: The wanted sets that the version keeps.
        are_known: True if all ids are known to have different hashes.
    """
    id_hash, row_hash, highest = rows
    if not (are_known or are_distinct(id_hash)):
        raise ManifestError(f"{manifest}: two ids have the same hash: rename one of them")
    forgotten = max((earlier.forgotten for earlier in before), default=0)
    wanted = Wanted(manifest, rows, forgotten=forgotten)
    highest[:] = 0
    is_changed = np.zeros(len(wanted), bool)

    def compare(positions: NDArray[np.int64], hashes: Any, generations: Any) -> None:
        """Compare the rows with a record. The highest generation counts."""
        recorded = np.where(positions < 0, np.uint64(0), generations[positions])
        is_other = (positions >= 0) & (hashes[positions] != row_hash)
        is_changed[recorded > highest] = False
        is_changed[is_other & (recorded >= highest)] = True
        np.maximum(highest, recorded, out=highest)

    if len(index):
        positions = index.find_hashes(id_hash)
        compare(positions, index.row_hash, index.generation)
    for earlier in before:
        if np.array_equal(earlier.rows[:2], rows[:2]):  # as other partitions have kept it
            is_changed[earlier.rows[2] > highest] = False
            np.maximum(highest, earlier.rows[2], out=highest)
        elif len(earlier) and (earlier.name == wanted.name or wanted.contains(earlier)):
            compare(earlier.find(id_hash), earlier.rows[1], earlier.rows[2])
    is_unknown = highest == 0
    highest += is_changed
    highest[is_unknown] = forgotten + 1
    numbers = np.asarray(again, np.int64)
    if len(numbers) and len(index):
        held = positions[numbers]
        following = np.where(held < 0, np.uint64(1), index.generation[held] + np.uint64(1))
        highest[numbers] = np.maximum(highest[numbers], following)
    return wanted


def shard_ranges(seconds: _Seconds, seconds_per_shard: float) -> NDArray[np.int64]:
    """Number the range that each row is in, int64 `[rows]`, by the rows' durations only. A
    range ends at `SHARD_HOURS`, or at a part of all audio if that is more, if
    `seconds_per_shard` has not ended it."""
    # `fsum` gives the same bits on every machine.
    total = math.fsum(np.minimum(seconds, seconds_per_shard).data)
    seconds_per_range = min(seconds_per_shard, max(SHARD_HOURS * 3600, total / FEWEST_SHARDS))
    work = seconds + WORK_OF_CLIP
    all_work, work_per_range = math.fsum(work.data), LEAST_WORK
    if all_work > EVENLY * LEAST_WORK:
        num_shards = math.ceil(all_work / LEAST_WORK / EVENLY) * EVENLY
        work_per_range = all_work / min(num_shards, SHARDS_TO_SHARE)
    # A row fills no more than one shard.
    weight = np.maximum(seconds / seconds_per_range, work / work_per_range)
    weight = np.clip(weight, 1 / MAX_ITEMS, 1)
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
    """Yield the shards to make, as far as possible in the manifest's order. `first_row` is
    the number of the first of the rows in the whole manifest, which is `wanted`. `seconds`
    of the rows decide only which shard a row is in."""
    missing = np.flatnonzero(rows.missing)
    ranges = shard_ranges(seconds, seconds_per_shard)
    is_gathered = np.isin(ranges[missing], ranges[rows.present])
    whole, gathered = missing[~is_gathered], missing[is_gathered]
    for group, shard in (
        (whole, ranges[whole]),
        (gathered, shard_ranges(seconds[gathered], seconds_per_shard)),
    ):
        for members in np.split(group, np.flatnonzero(np.diff(shard)) + 1):
            if not len(members):
                continue
            yield ShardTask(
                row=first_row + int(members[0]),
                utterances=tuple(manifest.utterances(members)),
                seconds=tuple(seconds[members].tolist()),
                generations=tuple(wanted.rows[2, first_row + members].tolist()),
                manifest=wanted.name,
            )
