"""Whether a version holds everything that its runs were to add, and every shard that they added, by their records.

No record says "in progress", which could be wrong after a kill. A run records what it is about to add, each shard once
it is there, and at its end that it has ended. The order of runs is that of their names; no clock is asked.

**What is missing.** Of the rows of a manifest, each is in the version, in the ledger, or missing. So what is missing
now is what was missing when a run was planned, less what has been added and what has failed since:

    missing = new - (items - held - beside) - (failed now - failed then)

where `beside` are items that runs over other manifests have added since. (Rows that they share with this one count as
missing; running it again finds them.) A run over the whole manifest that has ended well makes up for all earlier ones
over it, and the last run over the whole manifest was to add all that was missing. So only that run and those after it
are looked at.

The jobs of an array are runs over partitions of a manifest, of which `featcache.store.partitions` says what is missing.
All of them together are a run over the whole.

What `featcache prune` has taken away of these, because nobody wanted it any more, counts as if it were there: each of
its records of shards says how many utterances went with the shard.

**What is lost.** A shard that a run has recorded is there, or is superseded by others that are there, or a record says
that repair took it away, or that a whole run over the same manifest has made up for it. Otherwise it is lost.

**What is unknown.** A run's record is on disk before its first shard. If a shard names a run without a record, that has
been removed: what the run was to add beyond this shard is not known, until a run finds all of the shard's items in its
own manifest and records it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from featcache.errors import DamagedError, counted, listing
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.store.findings import DamagedRecord, Finding, LostShards, Unfinished, Unrecorded
from featcache.store.index import Index
from featcache.store.ledger import failures_of, standing_failures
from featcache.store.made_items import MadeItems
from featcache.store.partitions import PartitionRows, are_made_up_for, has_ended_well, lacking_partitions
from featcache.store.run_records import (
    ManifestKey,
    RunRecord,
    ShardEvent,
    is_run_name,
    is_running,
    not_missed_until,
    read_runs,
    record_files,
    run_names,
)
from featcache.store.tags import TaggedVersion
from featcache.store.version import Version
from featcache.strings import Strings

_LATEST = 64
"""The number of runs that are looked at, unless all are to be. Few versions have more, and one made by a thousand jobs
is to open as fast."""


def find_unfinished(version: Version, index: Index, *, all_runs: bool = False) -> list[Finding]:
    """What a version is not known to hold of what its runs were to add, and what it has lost. A tag is what it is.

    Reads three small files for each run, and what more there is only if something is wrong. Only the latest runs are
    looked at; with `all_runs`, all, however many there are, and it tells if there are no records at all.
    """
    if isinstance(version, TaggedVersion) or not (all_runs or _has_records(version)):
        return []
    with read_ahead(record_files(version, run_names(version)[-_LATEST if not all_runs else None :])):
        if not _Records(version, index, None if all_runs else _LATEST).findings():
            return []
    # A repair may have taken shards away just now. It records that before, so that a second look, beyond what has been
    # read ahead, sees it.
    lost = {shard for finding in _Records(version, index, None).lost() for shard in finding.shards}
    found = _Records(version, index, None).findings()
    return [finding for finding in found if not isinstance(finding, LostShards) or lost.intersection(finding.shards)]


def held_before(version: Version, index: Index, manifest: ManifestKey, missing: Strings) -> dict[str, int]:
    """What a run over a manifest records, when it begins, besides how many items there are.

    The index is what the run was planned with, and `missing` are the ids of the rows that it is to add.
    """
    records = _Records(version, index, None)
    failed = Strings.of(records.failed(records.over(manifest))[1])
    is_new = np.isin(failed.hashes(), missing.hashes())
    return {"others": records.made.beside(manifest), "failed": int((~is_new).sum())}


def unrecorded_shards(version: Version, index: Index, present: Strings) -> list[ShardEvent]:
    """The shards that no run has recorded and all of whose items are in a manifest; a run over it is to record them.

    `present` are the ids of the manifest's rows of which there are items.
    """
    recorded = _Records(version, index, None).recorded
    unknown = [name for name in index.shards if name not in recorded]
    if not unknown:
        return []
    is_present = np.zeros(len(index), bool)
    is_present[index.find(present)] = True
    lacking = np.bincount(index.shard[~is_present], minlength=len(index.shards))
    of = dict(zip(index.shards, lacking.tolist(), strict=True))
    return [ShardEvent(name, version.shard(name).info.items) for name in unknown if not of[name]]


def shards_to_make_up_for(version: Version, index: Index, manifest: ManifestKey) -> list[ShardEvent]:
    """The shards that are lost when a run over a whole manifest begins, which makes up for them if it ends well.

    The index is what the run was planned with.
    """
    records = _Records(version, index, None)
    latest = max((run.name for run in records.runs), default="")
    return [ShardEvent(shard, 0, until=latest) for shard in records.lost_by_manifest().get(manifest, ())]


class _Records:
    """What the latest runs of a version have recorded, or all if `latest` is None, held against what it holds."""

    def __init__(self, version: Version, index: Index, latest: int | None) -> None:
        self._version = version
        self._index = index
        names = run_names(version)
        earlier, late = (names[:-latest], names[-latest:]) if latest else ([], names)
        self.runs = read_runs(version, late)
        # The latest may all be of the workers of one run, which has begun before them.
        begun_by = {run.asked.get("part_of") for run in self.runs}
        self.runs = read_runs(version, [name for name in earlier if name in begun_by]) + self.runs
        self.made = MadeItems(version, index, self.runs)

    def findings(self) -> list[Finding]:
        """Why the version may not be whole."""
        lost = self.lost()
        return [*self.damaged(), *self.unrecorded(), *self.missing(), *self.lacking_partitions(), *lost] or list(
            self.fewer()
        )

    def over(self, manifest: ManifestKey) -> list[RunRecord]:
        """The runs over a manifest."""
        return [run for run in self.runs if run.is_known and run.manifest == manifest]

    @cached_property
    def recorded(self) -> set[str]:
        """The shards that runs have recorded of which is known what they were to do."""
        return {event.shard for run in self.runs if run.is_known for event in run.events() if event.until is None}

    def missing(self) -> Iterator[Unfinished]:
        """What is missing of each manifest."""
        by_manifest: dict[ManifestKey, list[RunRecord]] = defaultdict(list)
        for run in self.runs:
            if all(isinstance(run.asked.get(key), int) for key in ("utterances", "new", "held")):
                by_manifest[run.manifest].append(run)
        for manifest, runs in reversed(by_manifest.items()):
            last_whole = max((at for at, run in enumerate(runs) if _is_whole(run)), default=0)
            open_runs = [at for at in range(last_whole, len(runs)) if not has_ended_well(runs[at])]
            open_runs = [at for at in open_runs if not are_made_up_for(self._after(runs[at]))]
            lacking = [(self._missing_of(runs[at], runs[at:]), runs[at]) for at in open_runs]
            if not lacking:
                continue
            missing, run = max(lacking, key=lambda pair: pair[0])
            if missing > 0:
                failed = len(self.failed(runs)[0])
                going_on = any(is_running(self._version, runs[at].name) for at in open_runs)
                yield Unfinished(manifest[0], run.asked["utterances"], missing, failed, going_on)

    def lacking_partitions(self) -> Iterator[Unfinished]:
        """What is missing of each manifest that jobs of an array were to extract, since the last run over all of it."""
        by_manifest: dict[ManifestKey, list[RunRecord]] = defaultdict(list)
        for run in self.runs:
            if run.is_known:
                by_manifest[run.manifest].append(run)
        for manifest, runs in by_manifest.items():
            last_whole = max((at for at, run in enumerate(runs) if _is_whole(run)), default=-1)
            if not any(PartitionRows.of(run) for run in runs[last_whole + 1 :]):
                continue
            if (lacking := lacking_partitions(runs, self._done_by)) is not None:
                going_on = any(is_running(self._version, run.name) for run in lacking.runs)
                failed, rows = len(self.failed(runs)[0]), runs[-1].asked.get("utterances", 0)
                partitions = tuple(lacking.partitions)
                yield Unfinished(manifest[0], rows, lacking.missing, failed, going_on, partitions=partitions)

    def _done_by(self, run: RunRecord) -> int:
        """How many utterances a run has extracted, or recorded as failed, so that it still counts."""
        return self.made.counts_since(run.name)[run.name] + len(self.failed([run])[0])

    def _after(self, run: RunRecord) -> list[RunRecord]:
        """The later runs over the same manifest."""
        return [other for other in self.over(run.manifest) if other.name > run.name]

    def _missing_of(self, run: RunRecord, since: Sequence[RunRecord]) -> int:
        """How many utterances are missing of those that a run was to add; `since` are it and later ones over its
        manifest.
        """
        asked, manifest = run.asked, run.manifest
        items = self.made.counts_since(run.name)
        missing = asked["new"] - (items.total() - asked["held"])
        if isinstance(asked.get("others"), int) and isinstance(asked.get("failed"), int):
            beside = self.made.beside(manifest, items) - asked["others"]
            # Some of those may have been replaced by this run: then there are fewer, and others are new.
            beside += min(asked["others"], asked.get("replaced", 0))
            failed = len(self.failed(self.over(manifest))[1]) - asked["failed"] if missing + beside > 0 else 0
        else:  # the record of an earlier featcache
            beside = self.made.beside(manifest, items, after=run.name)
            failed = len(self.failed(since)[1]) if missing + beside > 0 else 0
        return int(missing + max(0, beside) - failed)

    def failed(self, runs: Iterable[RunRecord]) -> tuple[set[str], set[str]]:
        """The ids in the ledgers of some runs whose failure stands, and those of them that have no item."""
        ids = {failure.id for run in runs for failure in failures_of(self._version, run.name)}
        ids = {id_ for id_ in ids if id_ in self._standing}
        found = self._index.find(Strings.of(ids))
        return ids, {id_ for id_, position in zip(ids, found.tolist(), strict=True) if position < 0}

    @cached_property
    def _standing(self) -> Container[str]:
        return standing_failures(self._version, self._index)

    def lost(self) -> list[LostShards]:
        """The shards that are lost."""
        return [
            LostShards(manifest[0], sorted(shards), sum(shards.values()))
            for manifest, shards in self.lost_by_manifest().items()
        ]

    def lost_by_manifest(self) -> dict[ManifestKey, dict[str, int]]:
        """The shards that are lost, and how many items each held, by the manifest of the run that recorded them."""
        until, present = not_missed_until(self.runs), {*self._index.shards}
        lost: dict[ManifestKey, dict[str, int]] = defaultdict(dict)
        for run in self.runs:
            for event in run.events():
                if event.until is not None or event.shard in present or run.name <= until.get(event.shard, ""):
                    continue
                if not self._version.has_shard(event.shard):
                    manifest = self.made.manifest_of(event.made_by) if event.made_by else None
                    lost[manifest or run.manifest][event.shard] = event.items
        superseded = self._superseded() if lost else {}
        for shards in lost.values():
            for shard in [shard for shard, items in shards.items() if len(superseded.get(shard, ())) >= items]:
                del shards[shard]
        return {manifest: shards for manifest, shards in lost.items() if shards}

    def _superseded(self) -> dict[str, set[int]]:
        """The items that shards which are there supersede, by the shard that held them."""
        superseded: dict[str, set[int]] = defaultdict(set)
        for name in self._index.shards:
            with suppress(DamagedError, OSError):
                for shard, items in self._version.shard(name).info.supersedes.items():
                    superseded[shard].update(items)
        return superseded

    def unrecorded(self) -> Iterator[Unrecorded]:
        """What runs without a record have extracted, and runs whose record is lost, or that there is nothing at all; at
        most one finding.
        """
        if not self.runs and not self._index.shards:
            yield Unrecorded([], [], 0, is_copy=False)
        runs = {run for run in self.made.counts if is_run_name(run) and self.made.manifest_of(run) is None}
        runs |= {run.name for run in self.runs if not run.is_known}
        if not runs:
            return
        recorded = _Records(self._version, self._index, None).recorded
        shards = {
            shard: run
            for shard, run in zip(self._index.shards, self._index.runs, strict=True)
            if run in runs and shard not in recorded
        }
        # One that has added nothing which is there: a later run over a whole manifest makes up for it.
        latest = max((run.name for run in self.runs if _is_whole(run) and has_ended_well(run)), default="")
        runs = {run for run in runs if run in shards.values() or (run not in self.made.counts and run > latest)}
        if runs:
            at = [self._index.shards.index(shard) for shard in shards]
            utterances, is_copy = int(np.isin(self._index.shard, at).sum()), not _has_records(self._version)
            yield Unrecorded(sorted(runs), sorted(shards), utterances, is_copy)

    def damaged(self) -> Iterator[DamagedRecord]:
        """Records that are damaged in a way that lets a version seem to be whole."""
        for run in self.runs:
            if run.fault is not None:
                cost = "what the run was to add is not known; `featcache repair` removes it"
                yield DamagedRecord(run.name, f"{run.fault}: {cost}")
            if lost := run.lost("failures"):
                lines = counted(lost, "record is", "records are")
                cost = "these utterances count as missing; `featcache repair` removes the lines, `extract` tries again"
                where = f" (line {listing(map(str, run.failures.damaged))})" if run.failures.damaged else ""
                yield DamagedRecord(run.name, f"{run.folder / 'failures.jsonl'}: damaged: {lines} lost{where}: {cost}")

    def fewer(self) -> Iterator[Unfinished]:
        """What is missing of what was there once, by the number of items; at most one finding."""
        ended = {run.manifest: at for at, run in enumerate(self.runs) if _is_whole(run) and has_ended_well(run)}
        counts = [
            (_items_at_end(run) - self.made.num_pruned_since(run.name), -at, run)
            for at, run in enumerate(self.runs)
            if isinstance(run.asked.get("held"), int) and at >= ended.get(run.manifest, 0)
        ]
        items, at, run = max(counts, default=(0, 0, None), key=lambda count: count[:2])
        if run is None or items <= len(self._index):
            return
        # Some may have failed since: in a repair, for example, when audio was gone.
        failed, without_item = self.failed(self.runs[1 - at :])
        missing = items - len(self._index) - len(without_item)
        if missing > 0:
            yield Unfinished(run.manifest[0], items, missing, len(failed), False, were_there=True)


def _has_records(version: Version) -> bool:
    runs = version.path / "runs"
    return runs.is_dir() if isinstance(runs, Path) else store_of(runs).exists(runs)


def _is_whole(run: RunRecord) -> bool:
    """Whether it was to extract all of its manifest."""
    return not run.asked.get("only") and isinstance(run.asked.get("new"), int) and PartitionRows.of(run) is None


def _items_at_end(run: RunRecord) -> int:
    """The number of items in the version when the run last saw it."""
    count = (run.outcome or {}).get("items", run.asked["held"])
    return count if isinstance(count, int) else 0
