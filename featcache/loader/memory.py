"""Copies of shards in memory: in /dev/shm, shared by all processes of the machine, or in this process's own."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.loader.local_copies import CopyRefused

__all__ = ["PrivateMemory", "shared_memory"]

_SHARED = Path("/dev/shm")

_lock = threading.RLock()  # held for a moment, and while the process forks
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def shared_memory(num_bytes: int) -> Path | None:
    """This user's folder in memory; None if there is less memory for files than that, as in many containers, or if
    somebody else has made a folder of its name.
    """
    folder = _SHARED / f"featcache-{os.getuid()}"
    with suppress(OSError):
        memory = os.statvfs(_SHARED)
        if memory.f_blocks * memory.f_frsize >= num_bytes:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
                return folder
    return None


@dataclass
class _Kept:
    array: NDArray[np.uint8]
    used: float
    """When it was used last; `-inf` if it may go."""
    num_read: int = 0
    num_holders: int = 0


class PrivateMemory:
    """Copies in this process's own memory, as a `Place`. A forked child begins with those of its parent.

    Args:
        limit: The limit of all of them, in bytes.
        idle_seconds: Those go, to make room, that nobody holds and nobody has read for so long; None if none may.
    """

    def __init__(self, limit: int, idle_seconds: float | None = None) -> None:
        self._limit, self._idle_seconds = limit, idle_seconds
        self._kept: dict[str, _Kept] = {}
        self._num_bytes = 0

    def find(self, name: str, num_bytes: int) -> NDArray[np.uint8] | None:
        """As `Place.find`."""
        with _lock:
            return self._kept[name].array if self.touch(name) else None

    def path(self, name: str) -> None:
        """There are no files."""

    def is_under_way(self, name: str) -> bool:
        """Other processes have no part in it, and the caller makes one copy of a shard at a time."""
        return False

    def make(self, name: str, num_bytes: int, blocks: Callable[[], Iterable[memoryview]]) -> CopyRefused | None:
        """As `Place.make`."""
        with _lock:
            if not self._make_room(num_bytes):
                return CopyRefused.FULL
            self._num_bytes += num_bytes
        try:
            array, at = np.empty(num_bytes, np.uint8), 0
            for block in blocks():
                array[at : at + len(block)] = block
                at += len(block)
        except BaseException:
            with _lock:
                self._num_bytes -= num_bytes
            raise
        array.flags.writeable = False
        with _lock:
            self._kept[name] = _Kept(array, time.monotonic())
        return None

    def _make_room(self, num_bytes: int) -> bool:
        before = -np.inf if self._idle_seconds is None else time.monotonic() - self._idle_seconds
        idle = [name for name, kept in self._kept.items() if not kept.num_holders and kept.used < before]
        idle.sort(key=lambda name: self._kept[name].used)
        room = self._limit - self._num_bytes
        if room + sum(len(self._kept[name].array) for name in idle) < num_bytes:
            return False
        while self._limit - self._num_bytes < num_bytes:
            self._num_bytes -= len(self._kept.pop(idle.pop(0)).array)
        return True

    def has(self, name: str) -> bool:
        """As `Place.has`."""
        return name in self._kept

    def touch(self, name: str) -> bool:
        """As `Place.touch`."""
        with _lock:
            if name in self._kept:
                self._kept[name].used = time.monotonic()
            return name in self._kept

    def count(self, name: str, amount: int, whole: int) -> bool:
        """As `Place.count`."""
        with _lock:
            if (kept := self._kept.get(name)) is None:
                return False
            kept.num_read = 0 if (is_whole := kept.num_read + amount >= whole) else kept.num_read + amount
            return is_whole

    def let_go(self, name: str) -> None:
        """As `Place.let_go`."""
        with _lock:
            if name in self._kept:
                self._kept[name].used = -np.inf

    def hold(self, name: str) -> Callable[[], None] | None:
        """As `Place.hold`."""
        with _lock:
            if (kept := self._kept.get(name)) is None:
                return None
            kept.num_holders += 1

        def release() -> None:
            with _lock:
                kept.num_holders -= 1

        return release
