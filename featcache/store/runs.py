"""A run of a version, while it records what it does.

    runs/<UTC time>-<4 hex>/
      run.json          the request and, once the run has ended, the outcome
      failures.jsonl    a `Failure` on each line
      shards.jsonl      a `ShardEvent` on each line: what it has committed, and what it has taken away

While it is running, a run holds a lock on its folder, if the file system has locks. A run's name sorts after those of
all runs that were there when it began, whatever the clock says. So the order of names is an order in time, and nothing
else is: times in records are for people.

Failures reach the disk before the shard that lacks their utterances, so that a kill in between loses none. A shard's
record follows the shard: what is recorded was there.

The ledger is read by `featcache.store.ledger`, everything else by `featcache.store.run_records`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from featcache.errors import StoreError
from featcache.storage.store import store_of
from featcache.store.files import sync
from featcache.store.index import Place
from featcache.store.ledger import Failure, ledger_lines
from featcache.store.locks import Lock
from featcache.store.records import LinesWriter, Record, sealed_document, write_document
from featcache.store.run_records import ShardEvent, is_run_name, name_after, run_names
from featcache.store.version import Version


class Run:
    """One run's folder in a version, with a record of what it is asked to do. All of it is on disk once this returns.

    `id` is its name, which sorts after those of all runs that are there, and after the names in `after`. `folder` is
    its folder on this machine, which is locked, and takes the marks of what is in flight. The records are in it too,
    unless the version is in an object store.

    Raises:
        StoreError: From every method, if it cannot be written.
    """

    def __init__(self, version: Version, asked: Record, after: Iterable[str] = ()) -> None:
        started = datetime.now(UTC)
        self._version = version
        self._record: Record = {"started": started.isoformat(), "asked": asked}
        earlier = [*run_names(version), *filter(is_run_name, after)]
        while not self._begin(name_after(earlier, started)):
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
        if found := ledger_lines(self._version, failures, replaces):
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

    def withdraw(self) -> None:
        """Take back the record of a run that does nothing after all, in a folder; if that fails, it has not ended."""
        with suppress(OSError):
            (self.folder / "run.json").unlink()
            self.folder.rmdir()
        self._lock.release()

    def _write(self) -> None:
        write_document(self._location / "run.json", self._record)
