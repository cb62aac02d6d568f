"""What each run did, and the failure ledger: every utterance that could not be extracted, and why.

    runs/<UTC time>-<4 hex>/
      run.json          the request and, once the run has ended, the outcome
      failures.jsonl    a `Failure` on each line

While it is running, a run holds a lock on its folder, if the file system has locks.

The latest record of an utterance counts. Records reach the disk before the shard that lacks the utterances, so that a
kill in between loses none.

A failure stands as long as nothing has made up for it: its utterance is in no shard; or there is an item of it, but
still the older one, of another row or another file, that the failed extraction was to replace.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from featcache.errors import DamagedError, StoreError
from featcache.manifest import Utterance
from featcache.store import fields as checks
from featcache.store.documents import parse_object, read_lines, read_object
from featcache.store.fields import any_text, number, optional, text, whole
from featcache.store.files import refuse_links, write_file
from featcache.store.index import Index, Place
from featcache.store.locks import Lock, is_held
from featcache.store.version import Version
from featcache.strings import Strings


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
_PATH = any_text(1 << 16, "[^\0]*")
_ASKED = checks.fields({}, or_not={"root": _PATH, "manifest": _PATH}, others=lambda value: value)
"""What a run was asked to do, as far as paths are made of it."""


class Run:
    """One run's folder in a version, with a record of what it is asked to do.

    Raises:
        StoreError: From every method, if it cannot be written.
    """

    def __init__(self, version: Version, asked: dict[str, Any]) -> None:
        started = datetime.now(UTC)
        self.id = f"{started:%Y%m%dT%H%M%S.%f}Z-{secrets.token_hex(2)}"
        refuse_links(version.path, "runs")
        self.folder = version.path / "runs" / self.id
        self._version = version
        self._record: dict[str, Any] = {"started": started.isoformat(), "asked": asked}
        try:
            self.folder.mkdir()
            self._lock = Lock(self.folder, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from error
        with suppress(OSError):  # no locks on this file system
            self._lock.take()
        self._write()

    def fail(self, failures: Iterable[Failure], replaces: Mapping[str, Place] = {}) -> None:
        """Add failures to the ledger, and flush it to disk; `replaces` has the items that were to be replaced, by id.

        Raises:
            DamagedError: The shard of such an item is not what was written.
        """
        lines = "".join(
            json.dumps(_record(failure), ensure_ascii=False) + "\n"
            for failure in self._with_replaced(failures, replaces)
        )
        if not lines:
            return
        path = self.folder / "failures.jsonl"
        try:
            with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{path}: cannot be written: {error.strerror}") from error

    def finish(self, outcome: dict[str, Any]) -> None:
        """Record the outcome of the run, which has ended."""
        self._record |= {"finished": datetime.now(UTC).isoformat(), "outcome": outcome}
        self._write()
        self._lock.release()

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
        text = json.dumps(self._record, indent=2, ensure_ascii=False)
        # A path may hold bytes that are not UTF-8: as JSON's escapes they come back as they were.
        write_file(self.folder / "run.json", text.encode(errors="backslashreplace"))


def is_running(version: Version, run: str) -> bool:
    """Whether a run, by its name, is still running; False if its file system has no locks, or none between machines."""
    try:
        return is_held(version.path / "runs" / run, alone=True)
    except OSError:
        return False


def failures_of(version: Version, run: str) -> Iterator[Failure]:
    """What a run, by its name, has recorded in the ledger, in order; there may be nothing."""
    path = version.path / "runs" / run / "failures.jsonl"
    with suppress(FileNotFoundError):
        for line in read_lines(path):
            with suppress(DamagedError, ValueError):  # torn by a kill: its utterance is in no shard, and is tried again
                yield _failure_of(parse_object(line, path))


def latest_failures(version: Version) -> dict[str, Failure]:
    """The latest record of every utterance that ever failed, by id; some may have been extracted since."""
    return {failure.id: failure for run in runs_with_failures(version) for failure in failures_of(version, run)}


def standing_failures(version: Version, index: Index) -> dict[str, Failure]:
    """The failures that stand, by id: of utterances that have no item, or still the one that was to be replaced."""
    failures = latest_failures(version)
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
    ledgers = (version.path / "runs" / run / "failures.jsonl" for run in runs_with_failures(version))
    if not any(b'"replaces"' in line for ledger in ledgers for line in read_lines(ledger)):
        return {}
    standing = standing_failures(version, index)
    there = index.find(Strings.of(standing)) >= 0
    return {failure.id: failure for failure, is_there in zip(standing.values(), there, strict=True) if is_there}


def runs_with_failures(version: Version) -> list[str]:
    """The names of the runs that have recorded failures, the earliest first."""
    return sorted(path.parent.name for path in (version.path / "runs").glob("*/failures.jsonl"))


def _record(failure: Failure) -> dict[str, Any]:
    """A line of the ledger, without `replaces` if it is None, as in ledgers that were written before that key."""
    record = failure.document()
    if len(failure.message) > _MESSAGE:  # an extractor's error may hold anything
        record["message"] = f"{failure.message[:_MESSAGE]} …"
    if failure.replaces is None:
        del record["replaces"]
    return record


def _failure_of(record: dict[str, Any]) -> Failure:
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
    runs = (path.parent.name for path in (version.path / "runs").glob("*/run.json"))
    return {str(request_of(version, run).get("root")) for run in runs}


def request_of(version: Version, run: str) -> dict[str, Any]:
    """What a run was to do, by its name; empty if there is no record of it."""
    try:
        return dict(_ASKED(read_object(version.path / "runs" / run / "run.json").get("asked")))
    except (OSError, DamagedError, ValueError):
        return {}
