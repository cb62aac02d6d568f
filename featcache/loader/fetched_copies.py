"""Copies of shards in an object store on a local disk: a shard is copied whole before anything of it is read.

So each byte is fetched once, however many processes of the machine read it, in whatever order, as long as the copy
stays. When the disk is at its limit, the copies go that nobody has read for a while, and those of which this process
has read as many frames as there are: of an epoch that takes shards one after the other, those that it is done with. So
no more is ever copied than is then read, besides what is on the disk. If all are in use, ranges are read from the store
instead: to copy a shard again and again for single utterances would fetch far more.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheWarning
from featcache.loader.local_disk import CopyRefused, LocalDisk, PartialCopy
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.chunk_file import ChunkObject, checked_blocks
from featcache.store.version import Version

__all__ = ["FetchedCopies"]


_IDLE_SECONDS = 60.0
"""How long nobody has read a copy that may make room for another."""

_COPIES_AT_ONCE = 4
"""Shards that a process fetches side by side: each takes some blocks of memory, and a batch may need dozens."""

_TOUCH_SECONDS = 1.0
_POLL_SECONDS = 0.05


class _OfProcess:
    """What a process has open. A forked child begins anew: a thread of its parent may have held a lock."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.locks: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self.copies: dict[int, _Copy] = {}
        self.names: dict[int, str] = {}
        self.fetching = threading.Semaphore(_COPIES_AT_ONCE)
        self.disk: LocalDisk | None = None


class _Copy:
    """A copy that this process has mapped."""

    def __init__(self, path: Path, features: NDArray[Any]) -> None:
        self.path = path
        self.features = features
        self._touched = time.monotonic()
        self._left = len(features)  # frames, until as many have been read as there are

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
        """Count frames that are read. Once they are as many as there are, the copy looks as if nobody had read it for a
        while, until it is read again.
        """
        self._left -= num_frames
        if self._left <= 0:
            self._left, self._touched = len(self.features), -_TOUCH_SECONDS
            long_ago = time.time_ns() - int((_IDLE_SECONDS + 1) * 1e9)
            with suppress(OSError):  # another user's, or gone
                os.utime(self.path, ns=(long_ago, long_ago))


class FetchedCopies:
    """Copies the shards of a version in an object store to a local disk. Safe to use from several threads.

    Args:
        version: The version to copy from.
        shards: The shards' names, by their numbers in the index.
        folder, limit: Where to copy to, and the limit of all copies there in bytes; see `LocalDisk`.
    """

    def __init__(self, version: Version, shards: Sequence[str], folder: Path, limit: int | None) -> None:
        self.folder = folder
        self.limit = limit
        self._version = version
        self._shards = shards
        self._state = _OfProcess()
        self._is_broken = False
        self._warned_of: set[str] = set()

    def features(self, number: int, chunk: ChunkObject, num_frames: int) -> tuple[Path, NDArray[Any]] | None:
        """The copy of a shard's features, by its number in the index, to read so many frames of it, and its file. It is
        made now if there is none; None if there is no room for it.

        Raises:
            DamagedError: The shard is not what was written.
            StoreError: It cannot be fetched.
        """
        if self._is_broken:
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
                    self._is_broken = True
                    reason = f"{error.filename or self.folder}: {error.strerror}"
                    self._warn("broken", f"{reason}: no more shards are copied to {self.folder}")
                    return None
                if copy is None:
                    return None
                with state.lock:
                    state.copies[number] = copy
            copy.count(num_frames)
            return copy.path, copy.features

    def _find_or_make(self, state: _OfProcess, number: int, chunk: ChunkObject) -> _Copy | None:
        with state.lock:
            if state.disk is None:
                version = self._version
                state.disk = LocalDisk(
                    self.folder, self.limit, version.info.folder_name, version.path, idle_seconds=_IDLE_SECONDS
                )
            # Of what others have removed, the disk has the room back once it is not mapped any more.
            state.copies = {at: copy for at, copy in state.copies.items() if copy.path.exists()}
        disk, num_bytes = state.disk, chunk.num_bytes + zarr3.CHECKSUM_BYTES
        if number not in state.names:
            state.names[number] = f"{self._shards[number]}-{_checksum(chunk, num_bytes):08x}"
        name = state.names[number]
        while (found := disk.find(name, num_bytes)) is None:
            part = disk.begin(name, num_bytes)
            if isinstance(part, PartialCopy):
                with state.fetching:
                    _fetch(chunk, num_bytes, part)
            elif part is CopyRefused.UNDER_WAY:
                time.sleep(_POLL_SECONDS)
            else:
                unless = "raised" if self.limit is not None else "given: without one, a tenth of the disk stays free"
                self._warn(
                    "full",
                    f"{self.folder}: has no room for a shard of {num_bytes:,} bytes besides what is in use: parts of "
                    f"shards are read from {self._version.path}, unless copy_limit is {unless}",
                )
                return None
        features = found[: chunk.num_bytes].view(chunk.dtype).reshape(chunk.shape)
        return _Copy(disk.path(name), features)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned_of:
            self._warned_of.add(kind)
            warnings.warn(message, FeatcacheWarning, stacklevel=2)


def _fetch(chunk: ChunkObject, num_bytes: int, part: PartialCopy) -> None:
    """Copy a chunk's file.

    Raises:
        DamagedError: It is not what was written.
        StoreError: It cannot be fetched.
        OSError: The copy cannot be written.
    """
    try:
        part.reserve()
        for block in checked_blocks(chunk.path, num_bytes, chunk.version):
            part.write(block)
        part.commit()
    except BaseException:
        part.discard()
        raise


def _checksum(chunk: ChunkObject, num_bytes: int) -> int:
    """The checksum at the end of a chunk's file."""
    at = num_bytes - zarr3.CHECKSUM_BYTES
    try:
        (end,) = store_of(chunk.path).get_ranges(chunk.path, [at], [zarr3.CHECKSUM_BYTES])
    except FileNotFoundError as error:
        raise DamagedError(f"{chunk.path}: damaged: the file is missing", chunk.version) from error
    return int.from_bytes(end, "little")
