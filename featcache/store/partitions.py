"""Runs over partitions of a manifest, as the jobs of an array are: each records which rows it is to extract.

Such a run knows nothing of the others: it takes no claims, reads only the shards that may hold items of its own rows,
and records neither how many items the version holds nor what it lacks besides. What is missing follows from all
of these records together: a partition that no run has extracted to its end, or of which there is no run at all.

A partition is rows of one table: the digest says which. So those of different sizes can be put together, and those of a
manifest that has become longer are told from those before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from featcache.manifest import Manifest
from featcache.store.index import Index, build_index, latest_index, load_index
from featcache.store.run_records import RunRecord, ShardEvent, not_missed_until, read_runs
from featcache.store.version import Version
from featcache.strings import Strings


@dataclass(frozen=True)
class PartitionRows:
    """Some rows of a manifest, one after another."""

    digest: str
    """Tells the manifest: `digest_of_rows`."""
    first: int
    """The first row."""
    end: int
    """The row behind the last one."""
    rows: int
    """How many rows the manifest has."""
    number: int = 0
    """The number of the partition, from 0."""
    count: int = 1
    """How many partitions there are."""

    @classmethod
    def of(cls, run: RunRecord) -> PartitionRows | None:
        """The partition of a manifest that a run was to extract; None if it was another kind of run."""
        document = run.asked.get("part")
        return None if document is None else cls(**document)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def document(self) -> dict[str, Any]:
        """As a run's record has it."""
        return asdict(self)

    def is_apart_from(self, other: PartitionRows) -> bool:
        """Whether both are of the same manifest and have no row in common."""
        return self.digest == other.digest and (self.end <= other.first or other.end <= self.first)

    def is_within(self, other: PartitionRows) -> bool:
        """Whether the other partition has all of its rows."""
        return self.digest == other.digest and other.first <= self.first and self.end <= other.end


def partitions_of(runs: Iterable[RunRecord]) -> dict[str, PartitionRows]:
    """The partition of a manifest that each run adds to, by the run's name: its own, or that of the run it works for;
    other kinds of runs are left out.
    """
    runs = list(runs)
    own = {run.name: partition for run in runs if (partition := PartitionRows.of(run)) is not None}
    return own | {run.name: own[of] for run in runs if (of := run.asked.get("part_of")) in own}


def digest_of_rows(manifest: Manifest) -> str:
    """A hash of a manifest's rows, in their order: 16 hex digits."""
    digest = hashlib.sha256(manifest.ids.hashes().tobytes())
    digest.update(manifest.row_hashes().tobytes())
    return digest.hexdigest()[:16]


def has_ended_well(run: RunRecord) -> bool:
    """Whether a run has come to its end, and was not stopped."""
    return run.outcome is not None and not run.outcome.get("interrupted")


@dataclass(frozen=True)
class LackingPartitions:
    """Partitions of a manifest that no run is known to have extracted to the end."""

    partitions: list[str]
    """Which: `3/8`."""
    missing: int
    """The most utterances that may be missing."""
    runs: list[RunRecord]
    """The runs that have not come to their ends."""


def lacking_partitions(runs: Sequence[RunRecord], done_by: Callable[[RunRecord], int]) -> LackingPartitions | None:
    """What the latest array of jobs over a manifest has not extracted; None if nothing.

    `runs` are all runs over the manifest, in their order; `done_by` says how many utterances one of them has extracted,
    or recorded as failed.
    """
    newest = next((partition for run in reversed(runs) if (partition := PartitionRows.of(run)) is not None), None)
    if newest is None:
        return None
    found = [(run, own) for run in runs if (own := _rows_of(run)) is not None and own.digest == newest.digest]
    ended = [(at, partition) for at, (run, partition) in enumerate(found) if has_ended_well(run)]
    latest = {(own.first, own.end): at for at, (run, own) in enumerate(found) if PartitionRows.of(run) is not None}
    done, pending = [partition for _, partition in ended], list[tuple[RunRecord, PartitionRows, int]]()
    for at in latest.values():
        run, partition = found[at]
        if not has_ended_well(run) and _rows_outside([partition], [other for when, other in ended if when > at]):
            lacking = run.asked.get("new", 0) + run.asked.get("replaced", 0) - done_by(run)
            if lacking > 0:
                pending.append((run, partition, lacking))
            else:
                done.append(partition)
    whole = PartitionRows(newest.digest, 0, newest.rows, newest.rows)
    outside = _rows_outside([whole], done)
    if not outside:
        return None
    never = _rows_outside([whole], [*done, *(partition for _, partition, _ in pending)])
    names = {str(partition) for _, partition, _ in pending}
    if never:
        known = {str(partition) for _, partition in found}
        names |= {f"{number}/{newest.count}" for number in range(newest.count)} - known
    missing = min(outside, never + sum(lacking for _, _, lacking in pending))
    return LackingPartitions(sorted(names, key=_by_number), missing, [run for run, _, _ in pending])


def are_made_up_for(runs: Sequence[RunRecord]) -> bool:
    """Whether some runs, all over one manifest, are together one over the whole of it that has ended well."""
    partitions = [partition for run in runs if has_ended_well(run) and (partition := PartitionRows.of(run)) is not None]
    return any(not _rows_outside([PartitionRows(one.digest, 0, one.rows, one.rows)], partitions) for one in partitions)


def _rows_of(run: RunRecord) -> PartitionRows | None:
    """The rows that a run was to extract, if that is known: a partition, or the whole of a manifest."""
    if (partition := PartitionRows.of(run)) is not None:
        return partition
    digest, rows = run.asked.get("digest"), run.asked.get("utterances")
    if isinstance(digest, str) and isinstance(rows, int) and not run.asked.get("only"):
        return PartitionRows(digest, 0, rows, rows)
    return None


def _rows_outside(partitions: Iterable[PartitionRows], others: Iterable[PartitionRows]) -> int:
    """How many rows some partitions have that others have not; all of one manifest, as far as they count."""
    outside = 0
    others = list(others)
    for partition in partitions:
        at = partition.first
        for other in sorted((o for o in others if o.digest == partition.digest), key=lambda other: other.first):
            outside += max(0, min(other.first, partition.end) - at)
            at = max(at, other.end)
        outside += max(0, partition.end - at)
    return outside


def _by_number(name: str) -> tuple[int, int]:
    number, _, count = name.partition("/")
    return int(count), int(number)


def index_of_partition(version: Version, partition: PartitionRows) -> Index:
    """An index of all shards that may hold items of a partition's rows. Its items are in no particular order.

    What runs over other partitions of the same manifest have recorded is left out: a thousand jobs that begin at
    different times need not each read what the others have made.

    Raises:
        DamagedError: A shard's metadata or columns are damaged.
    """
    return version.reading(lambda: _index_of_partition(version, partition))


def _index_of_partition(version: Version, partition: PartitionRows) -> Index:
    names = version.listed_shards()
    if (index := load_index(version, names)) is not None:
        return index
    runs = read_runs(version)
    partitions = partitions_of(runs)
    elsewhere = {
        event.shard
        for run in runs
        if run.name in partitions and partitions[run.name].is_apart_from(partition)
        for event in run.events()
    }
    known = latest_index(version, names)
    shards = {*names} - elsewhere - {*(() if known is None else known.shards)}
    new = build_index(map(version.shard, version.whole(sorted(shards))))
    return new if known is None else extend_index(version, known, new)


def extend_index(version: Version, older: Index, newer: Index) -> Index:
    """An index with the items of another, of shards that were added since, behind its own; in no particular order."""
    if not len(newer):
        return older
    numbers = {name: number for number, name in enumerate(older.shards)}
    counts = np.ones(len(older), bool)
    for name in newer.shards:
        for shard, items in version.shard(name).info.supersedes.items():
            if shard in numbers:
                counts &= ~((older.shard == numbers[shard]) & np.isin(older.item, np.array(items, np.int64)))
    # What two runs that did not know of each other have extracted: the later one's counts.
    at = older.find(newer.ids)
    same = np.flatnonzero(at >= 0)
    runs_of_both = np.array(newer.runs, str)[newer.shard[same]], np.array(older.runs, str)[older.shard[at[same]]]
    is_later = runs_of_both[0] >= runs_of_both[1]
    counts[at[same[is_later]]] = False
    takes = np.ones(len(newer), bool)
    takes[same[~is_later]] = False
    parts = [(older, np.flatnonzero(counts), 0), (newer, np.flatnonzero(takes), len(older.shards))]
    ids = Strings.concatenate([index.ids.take(keep) for index, keep, _ in parts])
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(index, name)[keep] for index, keep, _ in parts])
        for name in ("item", "first_frame", "num_frames", "row_hash")
    }
    columns["shard"] = np.concatenate([index.shard[keep] + np.uint32(first) for index, keep, first in parts])
    id_hash = ids.hashes()
    by_hash = np.argsort(id_hash, kind="stable").astype(np.uint32)
    names, runs = [*older.shards, *newer.shards], [*older.runs, *newer.runs]
    return Index(names, runs, ids, **columns, id_hash=id_hash[by_hash], by_hash=by_hash)


def shards_to_make_up_for_in(version: Version, partition: PartitionRows) -> list[ShardEvent]:
    """The shards of a partition that are lost when a run over it begins, which makes up for them if it ends well."""
    runs = read_runs(version)
    partitions, until = partitions_of(runs), not_missed_until(runs)
    latest = max((run.name for run in runs), default="")
    inside = [run for run in runs if run.name in partitions and partitions[run.name].is_within(partition)]
    recorded = {event.shard: run.name for run in inside for event in run.events() if event.until is None}
    gone = [name for name, run in recorded.items() if run > until.get(name, "") and not version.has_shard(name)]
    return [ShardEvent(name, 0, until=latest) for name in gone]


def is_done(version: Version, partition: PartitionRows) -> bool:
    """Whether runs that have ended well have recorded all rows of a partition."""
    done = [rows for run in read_runs(version) if has_ended_well(run) and (rows := _rows_of(run)) is not None]
    return not _rows_outside([partition], done) and (partition.first < partition.end or partition in done)
