"""Marks of what a run has in flight. They outlive the process, for the run after a crash:

    <marks>/<run>/    held by a lock while the run lives
      in_flight.<n>   what worker n works on: one line of JSON, overwritten in place
      crash.txt       what the interpreter wrote when a fatal signal ended the process; else empty

`<marks>` is `Store.marks_folder`, on the run's machine. One `pwrite` writes a mark before
the work begins, another clears it, and nothing flushes it: it must survive the process, not
the machine. A run that ends by itself removes its marks.

Utterances are suspects, to be extracted apart, if they were in flight when a fatal signal
ended a run, or when two runs were killed: one `kill -9` or lost node says nothing about
them. Once an utterance of the version has crashed, one killed run is enough."""

from __future__ import annotations

import faulthandler
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from featcache.errors import Reason, StoreError
from featcache.format.documents import decoder_of
from featcache.manifest.strings import Strings
from featcache.storage.base import Store
from featcache.storage.files import hold_folder, is_held
from featcache.storage.opening import open_store
from featcache.version.index import Index
from featcache.version.ledger import Failure, read_failures
from featcache.version.version import Version
from featcache.version.wanted import find_missing, read_all_wanted

_MARK = "in_flight."
_CRASH = "crash.txt"
_AT_MOST_BYTES = 64 << 20
_FATAL_APART = 2
"""After so many runs that died while an utterance was extracted apart, it is not tried
again."""


class InFlight:
    """The marks of one run, as a context manager, which removes them at its end, except
    after a MemoryError. `runs` are the versions that the run fills, with its name in each.
    Raises StoreError if the marks cannot be written."""

    def __init__(self, runs: Sequence[tuple[Version, str]], workers: int) -> None:
        self._folders = [version.store.marks_folder / run for version, run in runs]
        self._names = [f"{_MARK}{worker}" for worker in range(workers)]
        self._is_kept = False

    def __enter__(self) -> InFlight:
        with ExitStack() as opened:
            try:
                for folder in self._folders:
                    opened.enter_context(hold_folder(folder))
                opened.callback(self._forget)
                self._files = [
                    [opened.enter_context(FileIO(folder / name, "w")) for folder in self._folders]
                    for name in self._names
                ]
                if not faulthandler.is_enabled():  # else somebody else uses it
                    crash = FileIO(self._folders[0] / _CRASH, "w")
                    faulthandler.enable(opened.enter_context(crash))
                    opened.callback(faulthandler.disable)
            except OSError as error:
                self._forget()  # also a folder that could not be opened
                what = f"{error.filename}: cannot be written: {error.strerror}"
                raise StoreError(what) from error
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._is_kept = self._is_kept or isinstance(error, MemoryError)
        self._opened.close()

    def _forget(self) -> None:
        if not self._is_kept:
            for folder in self._folders:
                remove_marks(folder)

    def keep(self, reason: str) -> None:
        """Keep the marks when the block ends, since the process is unfit to go on."""
        self._is_kept = True
        with suppress(OSError):
            (self._folders[0] / _CRASH).write_text(reason, encoding="utf-8", errors="replace")

    @contextmanager
    def working_on(self, worker: int, ids: Iterable[str], apart: bool = False) -> Iterator[None]:
        """Mark what a worker works on within a `with` block."""
        self._write(worker, json.dumps({"ids": list(ids), "apart": apart}).encode() + b"\n")
        yield
        # after an error, `__exit__` decides what happens to the mark
        self._write(worker, b"\n")

    def _write(self, worker: int, line: bytes) -> None:
        # a disk that refuses marks also refuses shards, which is reported
        with suppress(OSError):
            for file in self._files[worker]:
                os.pwrite(file.fileno(), line, 0)


@dataclass(frozen=True)
class Suspects:
    """The ids of utterances that may have crashed earlier runs."""

    ids: frozenset[str] = frozenset()
    """To be extracted apart."""
    fatal: frozenset[str] = frozenset()
    """Not to be extracted: they have ended runs even apart."""

    def __or__(self, other: Suspects) -> Suspects:
        return Suspects(self.ids | other.ids, self.fatal | other.fatal)


def find_suspects(
    version: Version,
    failures: Mapping[str, Failure],
    living: Set[str] = frozenset(),
    dead: Set[str] = frozenset(),
) -> Suspects:
    """Find the utterances that dead runs had in flight, and those that crashed before, by
    the latest `failures`. Locks tell which other runs live than those in `living` and
    `dead`."""
    suspects = {id_ for id_, failure in failures.items() if failure.reason == Reason.CRASHED}
    has_crashed = bool(suspects)
    killed, apart = set[str](), Counter[str]()
    for run in _dead_runs(version, living, dead):
        marks = [*_marks(run)]
        ids = {id_ for mark in marks for id_ in mark.ids}
        suspects |= ids if has_crashed or _was_fatal(run) else ids & killed
        killed |= ids
        apart.update({id_ for mark in marks if mark.apart for id_ in mark.ids})
    fatal = frozenset(id_ for id_, count in apart.items() if count >= _FATAL_APART)
    return Suspects(frozenset(suspects), fatal)


def forget_suspects(version: Version, index: Index) -> None:
    """Remove the marks of dead runs that had nothing in flight which is still missing."""
    dead = _dead_runs(version)
    if not dead:  # else 10^7 rows would be read for nothing
        return
    missing = find_missing([*read_all_wanted(version)], index, read_failures(version))
    lacking = [wanted.rows[0, numbers] for wanted, numbers, _ in missing]
    for run in dead:
        in_flight = Strings.of({id_ for mark in _marks(run) for id_ in mark.ids}).hashes()
        if not any(np.isin(in_flight, hashes).any() for hashes in lacking):
            remove_marks(run)


def in_progress(store: Store) -> list[str]:
    """List the ids of the utterances that runs on this machine extract now."""
    living = filter(_is_running, _runs(store))
    return [id_ for run in living for mark in _marks(run) for id_ in mark.ids]


def _dead_runs(
    version: Version, living: Set[str] = frozenset(), dead: Set[str] = frozenset()
) -> list[Path]:
    return [
        run
        for run in _runs(version.store)
        if run.name in dead or not (run.name in living or _is_running(run))
    ]


def _runs(store: Store) -> list[Path]:
    """List the folders of marks, sorted; none in a cache that nobody may write."""
    try:
        paths = store.marks_folder.iterdir()
    except StoreError:  # there are no marks, and none can be made
        return []
    return sorted(path for path in paths if path.is_dir() and not path.is_symlink())


def _is_running(run: Path) -> bool:
    """Tell whether a run holds the lock of its folder; without locks, whether it is empty."""
    with suppress(FileNotFoundError):  # it has ended by itself meanwhile
        try:
            return is_held(run)
        except OSError:
            return next(run.iterdir(), None) is None
    return True


class _Mark(msgspec.Struct):
    ids: Annotated[list[str], msgspec.Meta(max_length=1 << 20)]
    apart: bool


def _marks(run: Path) -> Iterator[_Mark]:
    with suppress(FileNotFoundError):  # another run has removed them meanwhile
        for path in sorted(run.glob(f"{_MARK}*")):
            # it is cleared, or not ours
            with suppress(OSError, ValueError, StoreError):
                line = open_store(run).read(path.name, _AT_MOST_BYTES).partition(b"\n")[0]
                yield decoder_of(_Mark).decode(line)


def _was_fatal(run: Path) -> bool:
    with suppress(OSError):
        return (run / _CRASH).stat().st_size > 0
    return False


def remove_marks(run: Path) -> None:
    """Remove a run's marks, by its folder."""
    with suppress(OSError):  # on a disk that is read-only now, they stay
        for path in (*run.glob(f"{_MARK}*"), run / _CRASH):
            path.unlink(missing_ok=True)
        run.rmdir()
