"""Copies of shards on a local disk, made in the background: a shard is read from there once its copy is complete.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheWarning, StoreError
from featcache.loader.local_disk import CopyRefused, LocalDisk, PartialCopy
from featcache.storage.location import folder_of
from featcache.store import zarr3
from featcache.store.checksums import crc32c
from featcache.store.version import Version

__all__ = ["LocalCopies", "LocalCopy"]

_BLOCK_BYTES = 4 << 20

_WAIT_SECONDS = 0.5
"""How long to wait if other processes are copying all that is wanted."""

_lock = threading.RLock()  # held for a moment, and while the process forks
_caches: weakref.WeakSet[LocalCopies] = weakref.WeakSet()
_thread: threading.Thread | None = None


LocalCopy = tuple[int, Path, NDArray[Any]]
"""A complete copy of a shard: the shard's number in the index, the copy's file, and the features in it, mapped."""


class LocalCopies:
    """Has the shards that a cache reads copied to a local disk. Safe to use from several threads.

    Args:
        version: The version to copy from.
        shards: The shards' names, by their numbers in the index.
        folder, limit: Where to copy to, and the limit of all copies there in bytes; see `LocalDisk`.
    """

    def __init__(self, version: Version, shards: Sequence[str], folder: Path, limit: int | None) -> None:
        self.folder = folder
        self.limit = limit
        self.has_news = False
        """Whether `collect` is to be called before the next read."""
        self._version = version
        self._shards = shards
        self._wanted: dict[int, NDArray[Any]] = {}  # the originals by number, in the order they were asked for
        self._finished: list[LocalCopy] = []
        self._warnings: list[str] = []
        self._warned_of: set[type] = set()
        # All below is the thread's alone.
        self._disk: LocalDisk | None = None  # opened by the thread, since a disk may be slow, or hang
        self._names: dict[int, str] = {}
        self._has_copies = False
        self._may_copy = True
        self._has_given_up = False
        with _lock:
            _caches.add(self)

    def want(self, number: int, original: NDArray[Any]) -> None:
        """Ask for a copy of a shard, whose features have just been mapped."""
        if original.nbytes and not self._has_given_up:
            with _lock:
                self._wanted[number] = original
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
        for number, original in list(self._wanted.items()):
            try:
                is_done = self._copy(number, original)
            except StoreError as error:
                self._warn(type(error), f"{error}; it is not copied, but read in place")
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

    def _copy(self, number: int, original: NDArray[Any]) -> bool:
        """Find or make a shard's copy, if there is room; False if somebody else is making it."""
        if self._disk is None:
            version = self._version
            self._disk = LocalDisk(self.folder, self.limit, version.info.folder_name, version.folder)
        disk, num_bytes = self._disk, original.nbytes + zarr3.CHECKSUM_BYTES
        source = zarr3.chunk_path(
            folder_of(self._version.shard(self._shards[number]).folder) / "features", original.ndim
        )
        if number not in self._names:
            self._names[number] = f"{self._shards[number]}-{_checksum(source, num_bytes):08x}"
        name = self._names[number]
        copy = disk.find(name, num_bytes)
        if copy is None and disk.is_under_way(name):
            return False
        if copy is None and self._may_copy:
            part = disk.begin(name, num_bytes)
            if part is CopyRefused.UNDER_WAY:
                return False
            if isinstance(part, PartialCopy):
                _copy(source, num_bytes, part)
                copy = disk.find(name, num_bytes)
            else:
                self._may_copy = False  # but what is there, or what others copy, is used
                if not self._has_copies:
                    self._warn_of_no_room(num_bytes)
        if copy is not None:
            self._has_copies = True
            features = copy[: original.nbytes].view(original.dtype).reshape(original.shape)
            with _lock:
                self._finished.append((number, disk.path(name), features))
                self.has_news = True
        return True

    def _warn_of_no_room(self, num_bytes: int) -> None:
        unless = "raised" if self.limit is not None else "given: without one, a tenth of the disk stays free"
        self._warn(
            CopyRefused,
            f"{self.folder}: has no room for a shard of {num_bytes:,} bytes besides what is in use: shards "
            f"are not copied, but read from {self._version.path}, unless copy_limit is {unless}",
        )

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


def _copy(source: Path, num_bytes: int, part: PartialCopy) -> None:
    """Copy a chunk's file.

    Raises:
        StoreError: It cannot be read, or is not what was written.
        OSError: The copy cannot be written.
    """
    try:
        part.reserve()
        crc = 0
        for data in _blocks(source, num_bytes):
            crc = crc32c(np.frombuffer(data, np.uint8), crc)
            part.write(data)
        if crc != zarr3.RESIDUE:
            raise DamagedError(f"{source}: damaged: its checksum does not match")
        part.commit()
    except BaseException:
        part.discard()
        raise


def _blocks(path: Path, num_bytes: int) -> Iterator[memoryview]:
    """A file's bytes, each block in the memory of the one before."""
    block = memoryview(bytearray(min(_BLOCK_BYTES, num_bytes)))
    with _reading(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        at = 0
        while at < num_bytes:
            count = os.preadv(descriptor, [block[: num_bytes - at]], at)
            if not count:
                raise DamagedError(f"{path}: damaged: it ends before byte {num_bytes}")
            yield block[:count]
            at += count


def _checksum(path: Path, num_bytes: int) -> int:
    """The checksum at the end of a chunk's file."""
    with _reading(path) as descriptor:
        return int.from_bytes(os.pread(descriptor, zarr3.CHECKSUM_BYTES, num_bytes - zarr3.CHECKSUM_BYTES), "little")


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    """An original, open; its errors become StoreError, which tells them from errors of the copy."""
    try:
        with path.open("rb", buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


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
