"""Copies shards to a local disk in the background; a shard is read from there as soon as its copy is complete.

One thread per process makes the copies for all its caches, one after another, in the order in which shards were first
read. It ends when there is nothing to do. Threads do not survive a fork: a child starts its own when it reads.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheWarning, StoreError
from featcache.loader.local_disk import LocalDisk, NotNow, PartialCopy
from featcache.store import zarr3
from featcache.store.version import Version

__all__ = ["Copier"]

_BLOCK_BYTES = 4 << 20
_RESIDUE = 0x48674BC7
"""CRC-32C of any bytes that are followed by their own CRC-32C, little endian: a chunk's whole file."""

_PATIENCE = 0.5
"""Seconds to wait where all that is wanted is being copied by other processes."""


class Copier:
    """Has the shards that a cache reads copied, and puts the copies in the place of the originals.

    Args:
        version: whose shards.
        features: the maps of shards that have been opened, by number; a copy replaces the original here.
        shards: the shards' names, by number.
        folder: to copy to.
        limit: bytes of all copies there; see `LocalDisk`.

    Attributes:
        folder, limit: as given.
        has_news: whether `attend` is to be called before the next read.
    """

    def __init__(
        self, version: Version, features: dict[int, NDArray[Any]], shards: list[str], folder: Path, limit: int | None
    ) -> None:
        self.folder = folder
        self.limit = limit
        self.has_news = False
        self._version = version
        self._features = features
        self._shards = shards
        self._wanted: dict[int, None] = {}  # numbers, in the order they were asked for
        self._disk: LocalDisk | None = None  # opened by the thread: a disk may be slow, or hang
        self._places: dict[int, Path] = {}
        self._names: dict[int, str] = {}
        self._may_copy = True
        self._has_given_up = False
        self._news: list[str] = []
        self._told: set[type] = set()
        with _lock:
            _copiers.add(self)

    def want(self, number: int) -> None:
        """Ask for a copy of a shard, which has just been opened."""
        if self._features[number].nbytes and not self._has_given_up:
            with _lock:
                self._wanted[number] = None
                _wake()

    def attend(self) -> None:
        """Warn of what went wrong in the background; in a forked child, go on with what its parent had asked for."""
        with _lock:
            self.has_news = False
            news, self._news = self._news, []
            if self.is_at_work:
                _wake()
        for message in news:
            warnings.warn(message, FeatcacheWarning, stacklevel=2)

    def place(self, number: int) -> Path | None:
        """The file of the copy that a shard is read from; None for an original."""
        return self._places.get(number)

    @property
    def is_at_work(self) -> bool:
        """Whether there are shards still to be copied."""
        return bool(self._wanted) and not self._has_given_up

    def take_turn(self) -> bool:
        """Copy one of the wanted shards; False where others are copying all of them just now."""
        for number in list(self._wanted):
            try:
                is_done = self._settle(number)
            except StoreError as error:
                self._tell(type(error), f"{error}; it is not copied, but read in place")
                is_done = True
            except OSError as error:
                self._tell_of_the_end(error, f"{error.filename or self.folder}: {error.strerror}")
                self._has_given_up = self._disk is None or not self._may_copy
                self._may_copy = False
                is_done = self._has_given_up  # else once more: somebody may have copied it
            except Exception as error:  # noqa: BLE001 - in a thread that nobody waits for, nobody would hear of it
                self._tell_of_the_end(error, f"{type(error).__name__}: {error}")
                is_done = self._has_given_up = True
            if is_done:
                with _lock:
                    self._wanted.pop(number, None)
                return True
        return False

    def _settle(self, number: int) -> bool:
        """Use a shard's copy, making it where there is none; False where somebody else is making it."""
        if self._disk is None:
            version = self._version
            self._disk = LocalDisk(self.folder, self.limit, version.info.folder_name, version.path)
        disk, original, source = self._disk, self._features[number], self._source(number)
        num_bytes = original.nbytes + zarr3.CHECKSUM_BYTES
        if number not in self._names:
            self._names[number] = f"{self._shards[number]}-{_checksum(source, num_bytes):08x}"
        name = self._names[number]
        copy = disk.find(name, num_bytes)
        if copy is None and disk.is_under_way(name):
            return False
        if copy is None and self._may_copy:
            part = disk.begin(name, num_bytes)
            if part is NotNow.UNDER_WAY:
                return False
            if isinstance(part, PartialCopy):
                _copy(source, num_bytes, part)
                copy = disk.find(name, num_bytes)
            else:
                self._may_copy = False  # but what is there, or what others copy, is used
                if not self._places:
                    unless = (
                        "raised" if self.limit is not None else "given: without one, a tenth of the disk stays free"
                    )
                    self._tell(
                        NotNow,
                        f"{self.folder}: has no room for a shard of {num_bytes:,} bytes besides what is in use: shards "
                        f"are not copied, but read from {self._version.path}, unless copy_limit is {unless}",
                    )
        if copy is not None:
            self._places[number] = disk.path(name)
            self._features[number] = copy[: original.nbytes].view(original.dtype).reshape(original.shape)
        return True

    def _source(self, number: int) -> Path:
        folder = self._version.shard(self._shards[number]).folder
        return zarr3.chunk_path(folder / "features", self._features[number].ndim)

    def _tell_of_the_end(self, error: Exception, reason: str) -> None:
        self._tell(
            type(error),
            f"{reason}: no more shards are copied to {self.folder}; the others are read from {self._version.path}",
        )

    def _tell(self, kind: type, message: str) -> None:
        """Have the user warned, once of each kind of trouble; not here: where warnings are errors, it would be lost."""
        with _lock:
            if kind not in self._told:
                self._told.add(kind)
                self._news.append(message)
                self.has_news = True


def _copy(source: Path, num_bytes: int, part: PartialCopy) -> None:
    """Copy a chunk's file.

    Raises:
        StoreError: it cannot be read, or is not what was written.
        OSError: the copy cannot be written.
    """
    try:
        part.reserve()
        crc = 0
        for data in _blocks(source, num_bytes):
            crc = zarr3.crc32c(np.frombuffer(data, np.uint8), crc)
            part.write(data)
        if crc != _RESIDUE:
            raise DamagedError(f"{source}: damaged: its checksum does not match")
        part.commit()
    except BaseException:
        part.discard()
        raise


def _blocks(path: Path, num_bytes: int) -> Iterator[memoryview]:
    """A file's bytes, in the same memory again and again."""
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
    """An original, open; what goes wrong with it is a StoreError, and so told from what goes wrong with the copy."""
    try:
        with path.open("rb", buffering=0) as file:
            yield file.fileno()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


_lock = threading.RLock()
_copiers: weakref.WeakSet[Copier] = weakref.WeakSet()
_thread: threading.Thread | None = None


def _wake() -> None:
    """Start the thread, where there is none; under the lock."""
    global _thread
    if _thread is None:
        thread = threading.Thread(target=_work, name="featcache-copies", daemon=True)
        with suppress(RuntimeError):  # no more threads, or the interpreter is ending: the originals do
            thread.start()
            _thread = thread


def _work() -> None:
    """What the thread does: a shard of each cache in turn, until nothing is wanted."""
    while copiers := _at_work():
        has_done = [copier.take_turn() for copier in copiers]
        del copiers  # a cache that nobody has any more is not kept for this
        if not any(has_done):
            time.sleep(_PATIENCE)


def _at_work() -> list[Copier]:
    """The caches that want copies; where there are none, the thread ends."""
    global _thread
    with _lock:
        copiers = [copier for copier in _copiers if copier.is_at_work]
        if not copiers:
            _thread = None
        return copiers


def _in_child() -> None:
    global _thread
    _thread = None
    for copier in _copiers:
        copier.has_news = True
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)
