"""Runs over parts of a manifest, as the jobs of an array are: each records which rows it is to extract.

Such a run knows nothing of the other parts: it takes no claims, reads only the shards that may hold items of its own
rows, and records neither how many items the version holds nor what it lacks besides. What is missing follows from all
of these records together: a part that no run has extracted to its end, or of which there is no run at all.

A part is rows of one table: the digest says which. So parts of different sizes can be put together, and those of a
manifest that has become longer are told from those before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from featcache.manifest import Manifest
from featcache.store.index import Index, build_index, extend_index, latest_index, load_index
from featcache.store.runs import RunRecord, ShardEvent, read_run, run_names
from featcache.store.version import Version


@dataclass(frozen=True)
class Part:
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
    """The number of the part, from 0."""
    count: int = 1
    """How many parts there are."""

    @classmethod
    def of(cls, run: RunRecord) -> Part | None:
        """The part of a manifest that a run was to extract; None if it was another kind of run."""
        document = run.asked.get("part")
        return None if document is None else cls(**document)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def document(self) -> dict[str, Any]:
        """As a run's record has it."""
        return asdict(self)

    def is_apart_from(self, other: Part) -> bool:
        """Whether both are of the same manifest and have no row in common."""
        return self.digest == other.digest and (self.end <= other.first or other.end <= self.first)

    def is_within(self, other: Part) -> bool:
        """Whether the other part has all of its rows."""
        return self.digest == other.digest and other.first <= self.first and self.end <= other.end


def parts_of(runs: Iterable[RunRecord]) -> dict[str, Part]:
    """The part of a manifest that each run adds to, by the run's name: its own, or that of the run that it works for;
    other kinds of runs are left out.
    """
    runs = list(runs)
    own = {run.name: part for run in runs if (part := Part.of(run)) is not None}
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
class LackingParts:
    """Parts of a manifest that no run is known to have extracted to the end."""

    parts: list[str]
    """Which: `3/8`."""
    missing: int
    """The most utterances that may be missing."""
    runs: list[RunRecord]
    """The runs that have not come to their ends."""


def lacking_parts(runs: Sequence[RunRecord], done_by: Callable[[RunRecord], int]) -> LackingParts | None:
    """What the latest array of jobs over a manifest has not extracted; None if nothing.

    Args:
        runs: All runs over the manifest, in their order.
        done_by: How many utterances a run has extracted, or recorded as failed.
    """
    newest = next((part for run in reversed(runs) if (part := Part.of(run)) is not None), None)
    if newest is None:
        return None
    found = [(run, part) for run in runs if (part := _rows_of(run)) is not None and part.digest == newest.digest]
    ended = [(at, part) for at, (run, part) in enumerate(found) if has_ended_well(run)]
    latest = {(part.first, part.end): at for at, (run, part) in enumerate(found) if Part.of(run) is not None}
    done, pending = [part for _, part in ended], list[tuple[RunRecord, Part, int]]()
    for at in latest.values():
        run, part = found[at]
        if not has_ended_well(run) and _rows_outside([part], [other for when, other in ended if when > at]):
            lacking = run.asked.get("new", 0) + run.asked.get("replaced", 0) - done_by(run)
            if lacking > 0:
                pending.append((run, part, lacking))
            else:
                done.append(part)
    whole = Part(newest.digest, 0, newest.rows, newest.rows)
    outside = _rows_outside([whole], done)
    if not outside:
        return None
    never = _rows_outside([whole], [*done, *(part for _, part, _ in pending)])
    names = {str(part) for _, part, _ in pending}
    if never:
        known = {str(part) for _, part in found}
        names |= {f"{number}/{newest.count}" for number in range(newest.count)} - known
    missing = min(outside, never + sum(lacking for _, _, lacking in pending))
    return LackingParts(sorted(names, key=_by_number), missing, [run for run, _, _ in pending])


def are_made_up_for(runs: Sequence[RunRecord]) -> bool:
    """Whether some runs, all over one manifest, are together one over the whole of it that has ended well."""
    parts = [part for run in runs if has_ended_well(run) and (part := Part.of(run)) is not None]
    return any(not _rows_outside([Part(one.digest, 0, one.rows, one.rows)], parts) for one in parts)


def _rows_of(run: RunRecord) -> Part | None:
    """The rows that a run was to extract, if that is known: a part, or the whole of a manifest."""
    if (part := Part.of(run)) is not None:
        return part
    digest, rows = run.asked.get("digest"), run.asked.get("utterances")
    if isinstance(digest, str) and isinstance(rows, int) and not run.asked.get("only"):
        return Part(digest, 0, rows, rows)
    return None


def _rows_outside(parts: Iterable[Part], others: Iterable[Part]) -> int:
    """How many rows some parts have that others have not; all of one manifest, as far as they count."""
    outside = 0
    others = list(others)
    for part in parts:
        at = part.first
        for other in sorted((o for o in others if o.digest == part.digest), key=lambda other: other.first):
            outside += max(0, min(other.first, part.end) - at)
            at = max(at, other.end)
        outside += max(0, part.end - at)
    return outside


def _by_number(name: str) -> tuple[int, int]:
    number, _, count = name.partition("/")
    return int(count), int(number)


def index_of_part(version: Version, part: Part) -> Index:
    """An index of all shards that may hold items of a part's rows. Its items are in no particular order.

    What runs over other parts of the same manifest have recorded is left out: a thousand jobs that begin at different
    times need not each read what the others have made.

    Raises:
        DamagedError: A shard's metadata or columns are damaged.
    """
    return version.reading(lambda: _index_of_part(version, part))


def _index_of_part(version: Version, part: Part) -> Index:
    names = version.shard_names()
    if (index := load_index(version, names)) is not None:
        return index
    runs = _runs(version)
    parts = parts_of(runs)
    elsewhere = {
        event.shard
        for run in runs
        if run.name in parts and parts[run.name].is_apart_from(part)
        for event in run.events()
    }
    known = latest_index(version, names)
    shards = {*names} - elsewhere - {*(() if known is None else known.shards)}
    new = build_index(map(version.shard, sorted(shards)))
    return new if known is None else extend_index(version, known, new)


def shards_to_make_up_for_in(version: Version, part: Part) -> list[ShardEvent]:
    """The shards of a part that are lost when a run over it begins, which makes up for them if it ends well."""
    runs = _runs(version)
    parts = parts_of(runs)
    latest = max((run.name for run in runs), default="")
    until: dict[str, str] = {}
    recorded: dict[str, str] = {}
    for run in runs:
        other = parts.get(run.name)
        for event in run.events():
            if event.until is not None:
                until[event.shard] = max(event.until, until.get(event.shard, ""))
            elif other is not None and other.is_within(part):
                recorded[event.shard] = run.name
    gone = [name for name, run in recorded.items() if run > until.get(name, "") and not version.has_shard(name)]
    return [ShardEvent(name, 0, latest) for name in gone]


def is_done(version: Version, part: Part) -> bool:
    """Whether runs that have ended well have recorded all rows of a part."""
    done = [rows for run in _runs(version) if has_ended_well(run) and (rows := _rows_of(run)) is not None]
    return not _rows_outside([part], done) and (part.first < part.end or part in done)


def _runs(version: Version) -> list[RunRecord]:
    return [run for name in run_names(version) if (run := read_run(version, name)) is not None]
