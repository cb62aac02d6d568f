"""What each run did, and the failure ledger: every utterance that could not be extracted, and why.

    runs/<UTC time>-<4 hex>/
      run.json          the request and, once the run has ended, the outcome
      failures.jsonl    a `Failure` on each line
      shards.jsonl      a `ShardEvent` on each line: what it has committed, and what it has taken away

While it is running, a run holds a lock on its folder, if the file system has locks. A run's name sorts after those of
all runs that were there when it began, whatever the clock says. So the order of names is an order in time, and nothing
else is: times in records are for people.

The latest record of an utterance counts. Records reach the disk before the shard that lacks the utterances, so that a
kill in between loses none. A shard's record follows the shard: what is recorded was there.

A failure stands as long as nothing has made up for it: its utterance is in no shard; or there is an item of it, but
still the older one, of another row or another file, that the failed extraction was to replace.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path

from featcache.errors import DamagedError, StoreError
from featcache.manifest import Utterance
from featcache.storage.location import Location
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.store import documents
from featcache.store import fields as checks
from featcache.store.fields import any_text, mapped, number, optional, text, whole
from featcache.store.files import sync
from featcache.store.index import Index, Place
from featcache.store.locks import Lock, is_held
from featcache.store.records import (
    Lines,
    LinesWriter,
    Record,
    read_document,
    read_lines,
    sealed_document,
    write_document,
)
from featcache.store.tags import TaggedVersion
from featcache.store.version import Version
from featcache.strings import Strings

_TIME = "%Y%m%dT%H%M%S.%f"
_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-[0-9a-f]{4}")


@dataclass(frozen=True, slots=True)
class ReplacedItem:
    """The item that a failed extraction was to replace; it stays. Repair may move it to another shard."""

    run: str
    """The name of the run that extracted it; empty if its shard does not say."""
    row_hash: str
    """The hash of the row that it was extracted from, as 16 hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure(Utterance):
    """An utterance that could not be extracted."""

    reason: str
    """Why: one of `featcache.errors.Reason`."""
    message: str
    """What was seen, for a person."""
    size: int | None = None
    """The size of the audio file in bytes when it was tried; None if there was no file."""
    mtime_ns: int | None = None
    """When the audio file was last modified, in nanoseconds since 1970; None if there was no file."""
    replaces: ReplacedItem | None = None
    """The item of this id that stays in the version nevertheless; None if there was none."""


_MESSAGE = 10_000
"""The longest message that is kept of a failure, in characters."""

WITHDRAWN = "withdrawn"
"""The reason of a record that takes back the earlier ones of its utterance, which is no longer wanted."""

MOST_PARTITIONS = 1_000_000
"""The most partitions that a manifest may be extracted in."""

_SECONDS = optional(number(0))
_FAILURE = checks.fields(
    {"id": text(), "path": text(), "reason": text(), "message": any_text(1 << 20)},
    or_not={
        "start": _SECONDS,
        "duration": _SECONDS,
        "channel": optional(whole(0, 2**31 - 1)),
        "size": optional(whole()),
        "mtime_ns": optional(whole(-(2**63), 2**63 - 1)),
        "replaces": optional(checks.fields({"run": text(), "row_hash": text()})),
    },
)
_ANYTHING: checks.Check = lambda value: value  # noqa: E731
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
    others=_ANYTHING,
)
_OUTCOME = checks.fields(
    {}, or_not={"extracted": _COUNT, "items": _COUNT, "lines": mapped(text(), whole())}, others=_ANYTHING
)
_RUN = checks.fields({}, or_not={"asked": _ASKED, "outcome": optional(_OUTCOME)}, others=_ANYTHING)
"""The record of a run, as far as anybody goes by it."""

_EVENT = checks.fields(
    {"shard": text(), "items": whole()},
    or_not={"until": text(), "pruned": whole(), "made_by": text()},
    others=_ANYTHING,
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
    """The run that had made them."""


class Run:
    """One run's folder in a version, with a record of what it is asked to do. All of it is on disk once this returns.

    `id` is its name. `folder` is its folder on this machine, which is locked, and takes the marks of what is in flight.
    The records are in it too, unless the version is in an object store.

    Args:
        version: The version.
        asked: What the run is to do, for `request_of`.
        after: Names of runs that were there earlier, besides those in the version's folder.

    Raises:
        StoreError: From every method, if it cannot be written.
    """

    def __init__(self, version: Version, asked: Record, after: Iterable[str] = ()) -> None:
        started = datetime.now(UTC)
        self._version = version
        self._record: Record = {"started": started.isoformat(), "asked": asked}
        earlier = [*run_names(version), *filter(is_run_name, after)]
        while not self._begin(_name_after(earlier, started)):
            pass
        self._lines = {kind: LinesWriter(self._location / f"{kind}.jsonl") for kind in ("failures", "shards")}

    def _begin(self, name: str) -> bool:
        """Make the run's folder, with its record; False if in an object store another run has taken this name."""
        self.id = name
        self.folder = self._version.desk / "runs" / name
        self._location = self._version.path / "runs" / name
        try:
            self._version.place_on_desk("runs")
            self.folder.mkdir()
            self._lock = Lock(self.folder, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from error
        with suppress(OSError):  # no locks on this file system
            self._lock.take()
        if not isinstance(self._location, Path):
            record = self._location / "run.json"
            return store_of(record).put_if_absent(record, sealed_document(self._record))
        self._write()
        try:
            sync(self.folder.parent)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from error
        return True

    @property
    def asked(self) -> Record:
        """What the run is to do."""
        return dict(self._record["asked"])

    def fail(self, failures: Iterable[Failure], replaces: Mapping[str, Place] = {}) -> None:
        """Add failures to the ledger, and flush it to disk; `replaces` has the items that were to be replaced, by id.

        Raises:
            DamagedError: The shard of such an item is not what was written.
        """
        if found := [*map(_record, self._with_replaced(failures, replaces))]:
            self._lines["failures"].append(found)

    def record_shards(self, events: Iterable[ShardEvent], *, are_there: bool = False) -> None:
        """Record shards, which are there, or are about to be taken away; and flush the record to disk. In an object
        store, a record of shards that are there may be written later: without it, they are there all the same.
        """
        records = [{key: value for key, value in asdict(event).items() if value is not None} for event in events]
        if records:
            self._lines["shards"].append(records, may_be_lost=are_there)

    def finish(self, outcome: Record) -> None:
        """Record the outcome of the run, which has ended."""
        for lines in self._lines.values():
            lines.flush()
        counts = {kind: lines.count for kind, lines in self._lines.items()}
        self._record |= {"finished": datetime.now(UTC).isoformat(), "outcome": {**outcome, "lines": counts}}
        self._write()
        self._lock.release()
        if not isinstance(self._location, Path):
            with suppress(OSError):  # it holds marks
                self.folder.rmdir()

    def _with_replaced(self, failures: Iterable[Failure], replaces: Mapping[str, Place]) -> Iterator[Failure]:
        """The failures, each with the item that stays in the version nevertheless."""
        run_of: dict[str, str] = {}
        for failure in failures:
            if (place := replaces.get(failure.id)) is not None:
                if place.shard not in run_of:
                    run_of[place.shard] = extracted_by(self._version, place.shard)
                failure = replace(failure, replaces=ReplacedItem(run_of[place.shard], _hex(place.row_hash)))
            yield failure

    def _write(self) -> None:
        write_document(self._location / "run.json", self._record)


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


def _name_after(earlier: Iterable[str], now: datetime) -> str:
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
    try:
        document = _RUN(read_document(path))
        asked, outcome = document.get("asked", {}), document.get("outcome") if document.get("finished") else None
    except ValueError as error:
        fault = f"{path}: damaged: not the record of a run: {error}"
        return RunRecord(name, folder, {}, None, False, fault, False)
    except FileNotFoundError:
        if not any(_is_there(folder / f"{kind}.jsonl") for kind in ("failures", "shards")):
            return None
        return RunRecord(name, folder, {}, None, False, f"{path}: damaged: the file is missing", False)
    except DamagedError as error:
        return RunRecord(name, folder, {}, None, False, error.what, False)
    return RunRecord(name, folder, asked, outcome, not document.get("lost"), None, "sealed" in document)


def _is_there(location: Location) -> bool:
    return store_of(location).exists(location)


def is_running(version: Version, run: str) -> bool:
    """Whether a run, by its name, is still running; False if its file system has no locks, or none between machines."""
    try:  # of a version in an object store, only this machine's runs can be seen
        return is_held(version.desk / "runs" / run, alone=True)
    except OSError:
        return False


def failures_of(version: Version, run: str) -> Iterator[Failure]:
    """What a run, by its name, has recorded in the ledger, in order; there may be nothing.

    What is damaged is passed over: its utterance counts as missing, and will be tried again.
    """
    record = read_run(version, run)
    for line in () if record is None else record.failures.records:
        with suppress(ValueError):
            yield _failure_of(line)


def latest_failures(version: Version) -> dict[str, Failure]:
    """The latest record of every utterance that ever failed, by id; some may have been extracted since."""
    runs = runs_with_failures(version)
    with read_ahead(record_files(version, runs)):
        latest = {failure.id: failure for run in runs for failure in failures_of(version, run)}
    return {id_: failure for id_, failure in latest.items() if failure.reason != WITHDRAWN}


def standing_failures(version: Version, index: Index) -> dict[str, Failure]:
    """The failures that stand, by id: of utterances that have no item, or still the one that was to be replaced. Of a
    tag, there are none: what runs have tried is no part of it.
    """
    failures = {} if isinstance(version, TaggedVersion) else latest_failures(version)
    run_of: dict[str, str | None] = {}

    def is_at(position: int, replaced: ReplacedItem | None) -> bool:
        place = index.place(position)
        if replaced is None or replaced.row_hash != _hex(place.row_hash):
            return False
        if place.shard not in run_of:
            try:
                run_of[place.shard] = extracted_by(version, place.shard)
            except DamagedError:  # until it is repaired, nothing tells whether the failure still stands
                run_of[place.shard] = None
        return run_of[place.shard] in (replaced.run, None)

    positions = index.find(Strings.of(failures)).tolist()
    return {
        failure.id: failure
        for failure, position in zip(failures.values(), positions, strict=True)
        if position < 0 or is_at(position, failure.replaces)
    }


def outdated_items(version: Version, index: Index) -> dict[str, Failure]:
    """The failures that stand of utterances that have an item, by id: the item is older than what was asked for last.

    If no failure has left an item in place, this reads the ledger's bytes and nothing else.
    """
    runs = runs_with_failures(version)
    ledgers = (version.path / "runs" / run / "failures.jsonl" for run in runs)
    with read_ahead(record_files(version, runs)):
        if not any(b'"replaces"' in line for ledger in ledgers for line in documents.read_lines(ledger)):
            return {}
    standing = standing_failures(version, index)
    there = index.find(Strings.of(standing)) >= 0
    return {failure.id: failure for failure, is_there in zip(standing.values(), there, strict=True) if is_there}


def runs_with_failures(version: Version) -> list[str]:
    """The names of the runs that have recorded failures, the earliest first."""
    runs = version.path / "runs"
    if isinstance(runs, Path):
        return sorted(path.parent.name for path in runs.glob("*/failures.jsonl"))
    return sorted(name.partition("/")[0] for name, _ in store_of(runs).walk(runs) if name.endswith("/failures.jsonl"))


def _record(failure: Failure) -> Record:
    """A line of the ledger, without `replaces` if it is None, as in ledgers that were written before that key."""
    record = failure.document()
    if len(failure.message) > _MESSAGE:  # an extractor's error may hold anything
        record["message"] = f"{failure.message[:_MESSAGE]} …"
    if failure.replaces is None:
        del record["replaces"]
    return record


def _failure_of(record: Record) -> Failure:
    """The failure that a line of the ledger records; ValueError if it records none. Unknown keys are newer ones."""
    known = _FAILURE({field.name: record[field.name] for field in fields(Failure) if field.name in record})
    replaced = known.get("replaces")
    return Failure(**{**known, "replaces": None if replaced is None else ReplacedItem(**replaced)})


def extracted_by(version: Version, shard: str) -> str:
    """The name of the run that extracted a shard's items, which repair keeps; empty if the shard does not say."""
    return str(version.shard(shard).info.made_by.get("run", ""))


def _hex(row_hash: int) -> str:
    return f"{row_hash:016x}"


def manifest_roots(version: Version) -> set[str]:
    """The folders that the paths in the manifests of the version's runs were relative to."""
    return {str(request_of(version, run).get("root")) for run in run_names(version)}


def request_of(version: Version, run: str) -> Record:
    """What a run was to do, by its name; empty if there is no record of it."""
    try:
        return dict(_RUN(read_document(version.path / "runs" / run / "run.json")).get("asked", {}))
    except (FileNotFoundError, DamagedError, ValueError):
        return {}
