"""What the runs of a version have recorded, by their names; see `featcache.store.runs` for the files."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location
from featcache.storage.store import store_of
from featcache.store import fields as checks
from featcache.store.fields import any_text, anything, mapped, optional, text, whole
from featcache.store.locks import is_held
from featcache.store.records import Lines, Record, read_document, read_lines
from featcache.store.version import Version

_TIME = "%Y%m%dT%H%M%S.%f"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{4}")

ManifestKey = tuple[str, str]
"""A manifest, and the folder that its paths are relative to."""

MOST_PARTITIONS = 1_000_000
"""The most partitions that a manifest may be extracted in."""

_PATH = optional(any_text(1 << 16, "[^\0]*"))
_COUNT = optional(whole())
_PARTITION = dict.fromkeys(("first", "end", "rows", "number"), whole()) | {"count": whole(1, MOST_PARTITIONS)}
_ASKED = checks.fields(
    {},
    or_not={
        "part": optional(checks.fields({"digest": text(), **_PARTITION})),
        "digest": optional(text()),
        "part_of": optional(text()),
        "root": _PATH,
        "manifest": _PATH,
        **dict.fromkeys(("utterances", "new", "replaced", "held", "others", "failed"), _COUNT),
    },
    others=anything,
)
_OUTCOME = checks.fields(
    {}, or_not={"extracted": _COUNT, "items": _COUNT, "lines": mapped(text(), whole())}, others=anything
)
_RUN = checks.fields({}, or_not={"asked": _ASKED, "outcome": optional(_OUTCOME)}, others=anything)
"""The record of a run, as far as anybody goes by it."""

_EVENT = checks.fields(
    {"shard": text(), "items": whole()},
    or_not={"until": text(), "pruned": whole(), "made_by": text()},
    others=anything,
)


@dataclass(frozen=True, slots=True)
class ShardEvent:
    """A shard that a run has committed; or, with `until`, that is not to be missed."""

    shard: str
    """The shard's name."""
    items: int
    """The number of its items; of a shard that is gone, 0."""
    _: KW_ONLY
    until: str | None = None
    """None for a shard that was there. Otherwise, what this run and those up to the one of this name have recorded of
    the shard does not count: repair or prune takes it away, or a whole run over its manifest has made up for it."""
    entry: str | None = None
    """The name of its entry in `commits/`, if it was committed to an object store."""
    pruned: int | None = None
    """The number of utterances that nobody wants any more and that go with the shard; they count once it is gone."""
    made_by: str | None = None
    """The run that had made them; of a shard that prune has written again, the run that had made its items."""


def run_names(version: Version) -> list[str]:
    """The names of the version's runs, the earliest first."""
    return names_of_runs(version.path)


def names_of_runs(path: Location) -> list[str]:
    """The names of the runs of the version at a place, the earliest first."""
    runs = path / "runs"
    try:
        return sorted(filter(is_run_name, store_of(runs).names(runs)))
    except OSError:
        return []  # a copy of a version may have come without them


def record_files(version: Version, runs: Iterable[str]) -> Iterator[Location]:
    """The files of some runs, by their names, which need not be there: for `featcache.storage.objects.read_ahead`."""
    for run in runs:
        for name in ("run.json", "failures.jsonl", "shards.jsonl"):
            yield version.path / "runs" / run / name


def is_run_name(name: str) -> bool:
    """Whether it is a name that a run may have."""
    return bool(_NAME.fullmatch(name))


def began(run: str) -> datetime | None:
    """When a run, by its name, began, as its machine's clock had it; None if there is no such time."""
    try:
        return datetime.strptime(run.partition("Z")[0], _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None


def name_after(earlier: Iterable[str], now: datetime) -> str:
    """A fresh name that sorts after others.

    Raises:
        StoreError: There is no later time.
    """
    for name in sorted(earlier, reverse=True):
        if (latest := began(name)) is not None:  # else of a 32nd, or so: no run's name
            try:
                now = max(now, latest + timedelta(microseconds=1))
            except OverflowError as error:
                raise StoreError(f"runs/{name}: no run can be later than this: remove this folder") from error
            break
    return f"{now:{_TIME}}Z-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class RunRecord:
    """What a run has recorded."""

    name: str
    """The run's name."""
    folder: Location
    """The run's folder."""
    asked: Record
    """What it was to do; empty if that is not known."""
    outcome: Record | None
    """What came of it; None if it has not ended."""
    is_known: bool
    """Whether there is a record of what it was to do."""
    fault: str | None
    """What is wrong with `run.json`; None if nothing is, or if repair has noted that its content is lost."""
    is_sealed: bool
    """Whether its ledger is sealed, as far as that is known."""

    @property
    def manifest(self) -> ManifestKey:
        """The manifest that it was given."""
        return str(self.asked.get("manifest")), str(self.asked.get("root"))

    @cached_property
    def failures(self) -> Lines:
        """The lines of its ledger."""
        return read_lines(self.folder / "failures.jsonl", self.is_sealed)

    @cached_property
    def shards(self) -> Lines:
        """The lines about shards."""
        return read_lines(self.folder / "shards.jsonl", sealed=True)

    def lines(self, kind: str) -> Lines:
        """Its lines of a kind: `failures` or `shards`."""
        return {"failures": self.failures, "shards": self.shards}[kind]

    def lost(self, kind: str) -> int:
        """How many of its lines, `failures` or `shards`, have been lost, as far as that can be seen: they are damaged,
        or the run has ended and said how many there were.
        """
        lines = self.lines(kind)
        told = None if self.outcome is None else self.outcome.get("lines")
        number = told.get(kind) if isinstance(told, dict) else None
        if not isinstance(number, int):
            return len(lines.damaged)
        return max(number - len(lines.records), len(lines.damaged) + len(lines.torn))

    def events(self) -> Iterator[ShardEvent]:
        """What it has recorded of shards."""
        for record in self.shards.records:
            with suppress(ValueError):  # sealed, and odd all the same
                event = _EVENT(record)
                known = {name: event.get(name) for name in ("until", "pruned", "made_by")}
                yield ShardEvent(event["shard"], event["items"], **known)


def read_run(version: Version, name: str) -> RunRecord | None:
    """What a run, by its name, has recorded; None if there is nothing."""
    folder = version.path / "runs" / name
    path = folder / "run.json"
    document: Record = {"lost": True}
    fault: str | None = None
    try:
        document = _RUN(read_document(path))
    except FileNotFoundError:
        if not any(store_of(folder).exists(folder / f"{kind}.jsonl") for kind in ("failures", "shards")):
            return None
        fault = f"{path}: damaged: the file is missing"
    except ValueError as error:
        fault = f"{path}: damaged: not the record of a run: {error}"
    except DamagedError as error:
        fault = error.what
    return RunRecord(
        name,
        folder,
        asked=document.get("asked", {}),
        outcome=document.get("outcome") if document.get("finished") else None,
        is_known=not document.get("lost"),
        fault=fault,
        is_sealed="sealed" in document,
    )


def read_runs(version: Version, names: Iterable[str] | None = None) -> list[RunRecord]:
    """What runs, by their names, have recorded; by default all of the version's, the earliest first."""
    names = run_names(version) if names is None else names
    return [run for name in names if (run := read_run(version, name)) is not None]


def not_missed_until(runs: Iterable[RunRecord]) -> dict[str, str]:
    """The latest `ShardEvent.until` that runs have recorded of each shard that has one."""
    until: dict[str, str] = {}
    for event in (event for run in runs for event in run.events()):
        if event.until is not None:
            until[event.shard] = max(event.until, until.get(event.shard, ""))
    return until


def is_running(version: Version, run: str) -> bool:
    """Whether a run, by its name, is still running; False if its file system has no locks, or none between machines."""
    try:  # of a version in an object store, only this machine's runs can be seen
        return is_held(version.desk / "runs" / run, alone=True)
    except OSError:
        return False


def manifest_roots(version: Version) -> set[str]:
    """The folders that the paths in the manifests of the version's runs were relative to."""
    return {str(request_of(version, run).get("root")) for run in run_names(version)}


def request_of(version: Version, run: str) -> Record:
    """What a run was to do, by its name; empty if there is no record of it."""
    record = read_run(version, run)
    return {} if record is None else record.asked
