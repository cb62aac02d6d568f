"""Copies of shards in an object store on a local disk: a shard is copied whole before anything of it is read.

So each byte is fetched once, however many processes of the machine read it, in whatever order, as long as the copy
stays. When the disk is at its limit, the copies go that nobody holds (see `ahead.py`) and nobody has read for a while,
and those of which the processes together have read as many frames as there are: of an epoch that takes shards one
after the other, those that it is done with. So no more is ever copied than is then read, besides what is on the disk.
If all are in use, ranges are read from the store instead: to copy a shard again and again for single utterances would
fetch far more.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from featcache.errors import FeatcacheWarning
from featcache.loader.local_copies import Copies
from featcache.loader.local_disk import CopyRefused, LocalDisk
from featcache.store.chunk_file import ChunkObject
from featcache.store.locks import Lock
from featcache.store.version import Version

__all__ = ["FetchedCopies"]


_IDLE_SECONDS = 60.0
"""How long nobody has read a copy that may make room for another."""

_COPIES_AT_ONCE = 8
"""Shards that a process fetches side by side: each takes some blocks of memory, and a batch may need dozens."""

_MOST_HELD = 128
"""Copies that a process holds at a time: each takes a file descriptor. Others are safe for `_IDLE_SECONDS`."""

_TOUCH_SECONDS = 1.0
_POLL_SECONDS = 0.05


class _OfProcess:
    """What a process has open. A forked child begins anew: a thread of its parent may have held a lock."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self.copies: dict[int, _Copy] = {}
        self.held = 0
        self.fetching = threading.Semaphore(_COPIES_AT_ONCE)


class _Copy:
    """A copy that this process has mapped."""

    def __init__(self, disk: LocalDisk, path: Path, features: NDArray[Any]) -> None:
        self.path = path
        self.features = features
        self._disk = disk
        self._touched = time.monotonic()
        self.is_held = False
        """Whether this process holds it, and says itself when it may go."""

    def is_there(self) -> bool:
        """Whether nobody has removed it; and it is in use, which others see."""
        now = time.monotonic()
        if now - self._touched > _TOUCH_SECONDS:
            try:
                os.utime(self.path)
            except FileNotFoundError:
                return False
            except PermissionError:  # another user's
                pass
            self._touched = now
        return True

    def count(self, num_frames: int) -> None:
        """Count frames that are read. Once all processes have read as many as there are, the copy may go, until it is
        read again.
        """
        if not self.is_held and self._disk.count(self.path.name, num_frames, len(self.features)):
            self._touched = -_TOUCH_SECONDS
            self._disk.let_go(self.path.name)


class FetchedCopies(Copies):
    """Copies the shards of a version in an object store to a local disk. Safe to use from several threads.

    Args:
        version, shards, folder, limit: As for `Copies`.
    """

    def __init__(self, version: Version, shards: Sequence[str], folder: Path, limit: int | None) -> None:
        super().__init__(version, shards, folder, limit, idle_seconds=_IDLE_SECONDS)
        self._state = _OfProcess()
        self._broken = ""  # what is wrong with the disk

    def features(self, number: int, chunk: ChunkObject, num_frames: int) -> tuple[Path, NDArray[Any]] | None:
        """The copy of a shard's features, by its number in the index, to read so many frames of it, and its file. It is
        made now if there is none; None if there is no room for it.

        Raises:
            DamagedError: The shard is not what was written.
            StoreError: It cannot be fetched.
        """
        copy = self._opened(number, chunk)
        if copy is None:  # told here, and not by threads in which a warning would be lost
            if self._broken:
                self._warn(OSError, self._broken)
            else:
                self._warn(CopyRefused, self._no_room(chunk, "parts of shards are"))
            return None
        copy.count(num_frames)
        return copy.path, copy.features

    def hold(self, number: int, chunk: ChunkObject) -> Callable[[], None] | None:
        """Fetch a shard, and keep its copy until the function is called that is returned; None if there is no room.

        Raises: as `features`.
        """
        copy = self._opened(number, chunk)
        if copy is None:
            return None
        state, lock = self._state, None
        with state.lock:
            if state.held < _MOST_HELD and (lock := self._open_disk().hold(copy.path.name)) is not None:
                state.held += 1
            copy.is_held = True
        return partial(self._let_go, state, number, copy.path.name, lock)

    def _let_go(self, state: _OfProcess, number: int, name: str, lock: Lock | None) -> None:
        with state.lock:
            state.copies.pop(number, None)
            if lock is not None:
                state.held -= 1
                lock.release()
        self._open_disk().let_go(name)

    def _opened(self, number: int, chunk: ChunkObject) -> _Copy | None:
        """The copy of a shard, which is made if there is none; None if there is no room, or the disk is broken."""
        if self._broken:
            return None
        if self._state.pid != os.getpid():
            self._state = _OfProcess()
        state = self._state
        with state.lock:
            lock = state.locks[number]
        with lock:
            copy = state.copies.get(number)
            if copy is None or not copy.is_there():
                with state.lock:
                    state.copies.pop(number, None)
                try:
                    copy = self._find_or_make(state, number, chunk)
                except OSError as error:
                    reason = f"{error.filename or self.folder}: {error.strerror}"
                    self._broken = f"{reason}: no more shards are copied to {self.folder}"
                    return None
                if copy is not None:
                    with state.lock:
                        state.copies[number] = copy
            return copy

    def _find_or_make(self, state: _OfProcess, number: int, chunk: ChunkObject) -> _Copy | None:
        with state.lock:
            disk = self._open_disk()
            # Of what others have removed, the disk has the room back once it is not mapped any more.
            state.copies = {at: copy for at, copy in state.copies.items() if copy.path.exists()}
        while True:
            with state.fetching:
                made = self._copy(number, chunk)
            if not isinstance(made, CopyRefused):
                return _Copy(disk, *made[1:])
            if made is CopyRefused.FULL:
                return None
            time.sleep(_POLL_SECONDS)

    def _warn(self, kind: type, message: str) -> None:
        if kind not in self._warned_of:
            self._warned_of.add(kind)
            warnings.warn(message, FeatcacheWarning, stacklevel=2)
