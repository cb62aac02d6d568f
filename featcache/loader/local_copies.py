"""Copies of shards on a local disk; of those in a folder, made in the background: a shard is read from there once its
copy is complete.

One thread in each process makes the copies for all its caches, one after another, in the order in which shards were
first read. It ends when there is nothing to do. Threads do not survive a fork: a child starts its own when it reads.

What is read changes only where it is read. The thread puts a finished copy into a list, and `Shards` collects it before
its next read.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheWarning, StoreError
from featcache.loader.local_disk import CopyRefused, LocalDisk
from featcache.store import zarr3
from featcache.store.chunk_file import Chunk, checked_blocks
from featcache.store.version import Version

__all__ = ["Copies", "LocalCopies", "LocalCopy"]

_WAIT_SECONDS = 0.5
"""How long to wait if other processes are copying all that is wanted."""

_lock = threading.RLock()  # held for a moment, and while the process forks
_caches: weakref.WeakSet[LocalCopies] = weakref.WeakSet()
_thread: threading.Thread | None = None


LocalCopy = tuple[int, Path, NDArray[Any]]
"""A complete copy of a shard: the shard's number in the index, the copy's file, and the features in it, mapped."""


class Copies:
    """Copies of a version's shards on a local disk; how they are found and made is the same wherever the version is.

    Args:
        version: The version to copy from.
        shards: The shards' names, by their numbers in the index.
        folder, limit: Where to copy to, and the limit of all copies there in bytes; see `LocalDisk`.
        idle_seconds: As for `LocalDisk`.
    """

    def __init__(
        self,
        version: Version,
        shards: Sequence[str],
        folder: Path,
        limit: int | None,
        *,
        idle_seconds: float | None = None,
    ) -> None:
        self.folder = folder
        self.limit = limit
        self._version = version
        self._shards = shards
        self._idle_seconds = idle_seconds
        self._disk: LocalDisk | None = None
        self._warned_of: set[type] = set()

    def _open_disk(self) -> LocalDisk:
        """The disk, which is opened as late as possible: it may be slow, or hang."""
        if self._disk is None:
            version = self._version
            self._disk = LocalDisk(
                self.folder, self.limit, version.info.folder_name, version.path, idle_seconds=self._idle_seconds
            )
        return self._disk

    def _name(self, number: int, chunk: Chunk) -> str:
        """The name of the copy of a shard, whose features these are."""
        shard = self._shards[number].rpartition("/")[2]  # a corpus names its part before it
        return f"{shard}-{chunk.checksum:08x}"

    def _copy(self, number: int, chunk: Chunk, *, may_make: bool = True) -> LocalCopy | CopyRefused:
        """Find or make the copy of a shard, whose features these are.

        Raises:
            StoreError: They cannot be read, or are not what was written.
            OSError: The copy cannot be written.
        """
        disk, name, num_bytes = self._open_disk(), self._name(number, chunk), chunk.num_bytes + zarr3.CHECKSUM_BYTES
        while (found := disk.find(name, num_bytes)) is None:
            if not may_make:
                return CopyRefused.UNDER_WAY if disk.is_under_way(name) else CopyRefused.FULL
            part = disk.begin(name, num_bytes)
            if isinstance(part, CopyRefused):
                return part
            part.fill(checked_blocks(chunk.path, num_bytes, chunk.version))
        return number, disk.path(name), found[: chunk.num_bytes].view(chunk.dtype).reshape(chunk.shape)

    def _no_room(self, chunk: Chunk, what_is: str) -> str:
        unless = "raised" if self.limit is not None else "given: without one, a tenth of the disk stays free"
        return (
            f"{self.folder}: has no room for a shard of {chunk.num_bytes:,} bytes besides what is in use: "
            f"{what_is} read from {self._version.path}, unless copy_limit is {unless}"
        )


class LocalCopies(Copies):
    """Has the shards that a cache reads copied to a local disk. Safe to use from several threads.

    Args:
        version, shards, folder, limit: As for `Copies`.
    """

    def __init__(self, version: Version, shards: Sequence[str], folder: Path, limit: int | None) -> None:
        super().__init__(version, shards, folder, limit)
        self.has_news = False
        """Whether `collect` is to be called before the next read."""
        self._wanted: dict[int, None] = {}  # the shards' numbers, in the order they were asked for
        self._finished: list[LocalCopy] = []
        self._warnings: list[str] = []
        # All below is the thread's alone.
        self._has_copies = False
        self._may_copy = True
        self._has_given_up = False
        with _lock:
            _caches.add(self)

    def want(self, number: int) -> None:
        """Ask for a copy of a shard, whose features have just been mapped."""
        if not self._has_given_up:
            with _lock:
                self._wanted[number] = None
                _wake()

    def collect(self) -> list[LocalCopy]:
        """The copies that were finished since the last call, to be read from now on.

        Warns of what went wrong in the background; in a forked child, goes on with what its parent had asked for.
        """
        with _lock:
            self.has_news = False
            finished, self._finished = self._finished, []
            messages, self._warnings = self._warnings, []
            if self.is_at_work:
                _wake()
        for message in messages:
            warnings.warn(message, FeatcacheWarning, stacklevel=2)
        return finished

    @property
    def is_at_work(self) -> bool:
        """Whether there are shards still to be copied."""
        return bool(self._wanted) and not self._has_given_up

    def copy_next(self) -> bool:
        """Copy one of the wanted shards; False if others are copying all of them just now. For the thread."""
        for number in list(self._wanted):
            try:
                is_done = self._find_or_make(number)
            except StoreError as error:
                what = error.what if isinstance(error, DamagedError) else error
                self._warn(type(error), f"{what}; it is not copied, but read in place")
                is_done = True
            except OSError as error:
                self._warn_of_the_end(error, f"{error.filename or self.folder}: {error.strerror}")
                self._has_given_up = self._disk is None or not self._may_copy
                self._may_copy = False
                is_done = self._has_given_up  # else once more: somebody may have copied it
            except Exception as error:  # noqa: BLE001 - in a thread that nobody waits for, nobody would hear of it
                self._warn_of_the_end(error, f"{type(error).__name__}: {error}")
                is_done = self._has_given_up = True
            if is_done:
                with _lock:
                    self._wanted.pop(number, None)
                return True
        return False

    def _find_or_make(self, number: int) -> bool:
        """Find or make a shard's copy, if there is room; False if somebody else is making it."""
        self._open_disk()
        chunk = self._version.shard(self._shards[number]).open_features()
        copy = self._copy(number, chunk, may_make=self._may_copy)
        if copy is CopyRefused.UNDER_WAY:
            return False
        if isinstance(copy, CopyRefused):
            if self._may_copy and not self._has_copies:
                self._warn(CopyRefused, self._no_room(chunk, "shards are not copied, but"))
            self._may_copy = False  # but what is there, or what others copy, is used
            return True
        self._has_copies = True
        with _lock:
            self._finished.append(copy)
            self.has_news = True
        return True

    def _warn_of_the_end(self, error: Exception, reason: str) -> None:
        self._warn(
            type(error),
            f"{reason}: no more shards are copied to {self.folder}; the others are read from {self._version.path}",
        )

    def _warn(self, kind: type, message: str) -> None:
        """Have `collect` warn, once of each kind of trouble. Not here: where warnings are errors, it would be lost."""
        with _lock:
            if kind not in self._warned_of:
                self._warned_of.add(kind)
                self._warnings.append(message)
                self.has_news = True


def _wake() -> None:
    """Start the thread, if there is none; under the lock."""
    global _thread
    if _thread is None:
        thread = threading.Thread(target=_work, name="featcache-copies", daemon=True)
        with suppress(RuntimeError):  # no more threads, or the interpreter is ending: the originals will do
            thread.start()
            _thread = thread


def _work() -> None:
    """What the thread does: a shard of each cache in turn, until nothing is wanted."""
    while caches := _at_work():
        has_copied = [cache.copy_next() for cache in caches]
        del caches  # a cache that nobody has any more is not kept for this
        if not any(has_copied):
            time.sleep(_WAIT_SECONDS)


def _at_work() -> list[LocalCopies]:
    """The caches that want copies; if there are none, the thread ends."""
    global _thread
    with _lock:
        caches = [cache for cache in _caches if cache.is_at_work]
        if not caches:
            _thread = None
        return caches


def _in_child() -> None:
    global _thread
    _thread = None
    for cache in _caches:
        cache.has_news = True
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
