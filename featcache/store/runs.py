"""What each run did, and the failure ledger: every utterance that is in no shard, and why.

    runs/<UTC time>-<4 hex>/
      run.json          the request and, once the run has ended, the outcome
      failures.jsonl    one `Failure` a line

While it is running, a run holds a lock on its folder, if the file system has locks.

The latest record of an utterance counts. Records reach the disk before the shard that lacks the
utterances, so that a kill in between loses none.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from featcache.errors import StoreError
from featcache.store import zarr3
from featcache.store.own_folders import refuse_links
from featcache.store.version import Version


@dataclass(frozen=True, slots=True)
class Failure:
    """An utterance that could not be extracted.

    Attributes:
        id: the utterance's.
        path: as the manifest had it; so are start and duration (seconds) and channel.
        reason: a `featcache.errors.Reason`.
        message: what was seen.
        size: of the audio file in bytes, when it was tried; None where there was no file.
        mtime_ns: of the audio file, likewise.
    """

    id: str
    path: str
    start: float | None
    duration: float | None
    channel: int | None
    reason: str
    message: str
    size: int | None
    mtime_ns: int | None


class Run:
    """One run's folder in a version.

    Raises:
        StoreError: from every method, where it cannot be written.
    """

    def __init__(self, version: Version, asked: dict[str, Any]) -> None:
        started = datetime.now(UTC)
        self.id = f"{started:%Y%m%dT%H%M%S.%f}Z-{secrets.token_hex(2)}"
        refuse_links(version.path, "runs")
        self.folder = version.path / "runs" / self.id
        self._record: dict[str, Any] = {"started": started.isoformat(), "asked": asked}
        self._descriptor = -1
        try:
            self.folder.mkdir()
            self._descriptor = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{self.folder}: cannot be written: {error.strerror}") from error
        with suppress(OSError):  # no locks on this file system
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._write()

    def __del__(self) -> None:
        self._end()

    def fail(self, failures: Iterable[Failure]) -> None:
        """Add failures to the ledger, and flush it to disk."""
        lines = "".join(json.dumps(asdict(failure), ensure_ascii=False) + "\n" for failure in failures)
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
        """Record what came of the run."""
        self._record |= {"finished": datetime.now(UTC).isoformat(), "outcome": outcome}
        self._write()
        self._end()

    def _end(self, close: Callable[[int], None] = os.close) -> None:  # a default: `os` may be gone at the exit
        if self._descriptor >= 0:
            close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        text = json.dumps(self._record, indent=2, ensure_ascii=False)
        # A path may hold bytes that are not UTF-8; as an escape of JSON's they come back as they were.
        zarr3.write_file(self.folder / "run.json", text.encode(errors="backslashreplace"))


def is_going_on(version: Version, run: str) -> bool:
    """Whether a run, by its name, is still alive; False where its file system has no locks, or not between machines."""
    try:
        descriptor = os.open(version.path / "runs" / run, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def failures_of(version: Version, run: str) -> Iterator[Failure]:
    """What a run, by its name, has recorded in the ledger, in that order; there may be nothing."""
    try:
        text = (version.path / "runs" / run / "failures.jsonl").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.split("\n"):
        try:
            yield Failure(**json.loads(line))
        except (ValueError, TypeError):
            continue  # torn by a kill: its utterance is in no shard, and tried again


def latest_failures(version: Version) -> dict[str, Failure]:
    """The latest record of every utterance that ever failed, by id; some may have been extracted since."""
    runs = sorted(path.parent.name for path in (version.path / "runs").glob("*/failures.jsonl"))
    return {failure.id: failure for run in runs for failure in failures_of(version, run)}


def roots(version: Version) -> set[str]:
    """The folders that the manifests of the version's runs were relative to."""
    runs = (path.parent.name for path in (version.path / "runs").glob("*/run.json"))
    return {str(asked_of(version, run).get("root")) for run in runs}


def asked_of(version: Version, run: str) -> dict[str, Any]:
    """What a run was asked to do, by its name; empty where there is no record of it."""
    try:
        asked: dict[str, Any] = json.loads((version.path / "runs" / run / "run.json").read_text(encoding="utf-8"))[
            "asked"
        ]
    except (OSError, ValueError, KeyError):
        return {}
    return asked
