"""Where copies of shards lie: in a folder, on a disk or in /dev/shm, for all processes of
the machine; or in memory.

    <folder>/featcache/
      lock                        held for a moment by whoever adds or removes something
      <version>.<place>/          named after the version's folder, and a hash of where that
                                  is: two caches of one config have nothing in common
        users                     held, shared, by every process that reads these copies
        <shard>                   the file of the shard's features, whole; held, shared, by
                                  those who will read it soon
        <shard>.read              how much all processes together have read of it: 8 bytes,
                                  changed under its lock
        <shard>.part              one that is being written: held by the process that writes it

A shard's name says what is in it, so a copy stays right for ever. All locks end with
their processes: a part that nobody holds was left by a process that was killed, and is
removed. A link in there is not featcache's: nothing is read, written or removed through
it.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import math
import os
import re
import stat
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from featcache.storage.files import Lock, is_held, locked, map_file
from featcache.version.version import Version

_SHARED = Path("/dev/shm")

_VERSION = re.compile(r".+-[0-9a-f]{12}\.[0-9a-f]{8}")
_COPY = re.compile(r"[0-9a-f]{16}(\.part)?")
_LOCK, _PART, _READ = "lock", ".part", ".read"
_LEFT_FREE = 0.1
"""The part of the disk that stays free if no limit is given."""

_TOUCH_SECONDS = 1.0
"""How often a copy that is in use is marked as such."""

_ended: list[tuple[Path, Path]] = []
"""The folders with copies in memory that this process has ended with."""

changing = threading.RLock()
"""Held for a moment by threads that change what a process knows of copies, and while it
forks."""

os.register_at_fork(
    before=changing.acquire, after_in_parent=changing.release, after_in_child=changing.release
)


class CopyRefused(Enum):
    """Why a copy is not made."""

    UNDER_WAY = "somebody is making it, or has just made it"
    FULL = "there is no room but what is in use"


def memory(version: Version, limit: int, idle_seconds: float | None) -> Place:
    """The place of a version's copies in memory: one that all processes share, unless the
    machine has less memory for files than `limit`, as in many containers, or somebody
    else has made a folder of this user's name there."""
    folder = _SHARED / f"featcache-{os.getuid()}"
    with suppress(OSError):
        shared = os.statvfs(_SHARED)
        if shared.f_blocks * shared.f_frsize >= limit:
            folder.mkdir(mode=0o700, exist_ok=True)
            status = folder.lstat()
            if (
                stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.getuid()
                and not status.st_mode & 0o022
            ):
                return Disk(folder, version, limit, idle_seconds, is_memory=True)
    return _PrivateMemory(limit, idle_seconds)


class _CopyOnDisk:
    """A copy that this process has mapped: `data`, uint8 `[bytes]`, of the file at `path`."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.data, self.path = data, path
        self._touched = time.monotonic()

    def exists(self) -> bool:
        """Whether nobody has removed it."""
        return os.path.exists(self.path)

    def use(self) -> bool:
        """Have it be the last to be removed, which others see; False if it is gone."""
        now = time.monotonic()
        if now - self._touched > _TOUCH_SECONDS:
            self._mark(None)
            if not self.exists():
                return False
            self._touched = now
        return True

    def let_go(self) -> None:
        """Have it be the first to be removed, unless somebody holds it, until it is used
        again."""
        self._touched = -_TOUCH_SECONDS
        self._mark((0, 0))

    def count(self, num_frames: int, whole: int) -> None:
        """Count frames that are read. Once all processes have read as many as there are,
        it is let go of."""
        try:
            with Lock(self.path.with_suffix(_READ), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as lock:
                lock.take(wait=True)
                num_frames += int.from_bytes(os.pread(lock.descriptor, 8, 0), "little")
                os.pwrite(
                    lock.descriptor,
                    (num_frames if num_frames < whole else 0).to_bytes(8, "little"),
                    0,
                )
        except (
            OSError
        ):  # another user's, or gone, or the disk is full: it goes when nobody reads it any more
            return
        if num_frames >= whole:
            self.let_go()

    def hold(self) -> Callable[[], None] | None:
        """Keep it from being removed until the function is called that is returned; None
        if it is gone."""
        with locked(self.path.parents[1] / _LOCK), suppress(FileNotFoundError):
            lock = Lock(self.path, os.O_RDONLY | os.O_NOFOLLOW)
            lock.take(wait=True, shared=True)
            return lock.release
        return None

    def _mark(self, times: tuple[int, int] | None) -> None:
        # another user's, or the disk is read-only by now: it is read all the same
        with suppress(OSError):
            os.utime(self.path, times)


class Disk:
    """The copies of a version, by their names, in a folder on a disk of this machine; or
    in memory, where copies that no process has open do not stay. It is opened at the
    first look, since it may be slow, or hang.

    While a process, or a child that it has forked, has copies open, none of them is
    removed but those that are idle. What is beyond the limit, and not in use, is removed
    at once.

    Args:
        folder, version: Where copies lie, and of what.
        limit: The limit of everything in the folder, in bytes; None for all but a tenth
            of the disk.
        idle_seconds: Copies that are in use go too, to make room, which nobody holds and
            nobody has read for so long; None if none of them may.
        is_memory: Whether the folder is in memory.

    Raises:
        OSError: From every method: the disk is full, broken, read-only, or lacks locks.
    """

    def __init__(
        self,
        folder: Path,
        version: Version,
        limit: int | None,
        idle_seconds: float | None,
        is_memory: bool = False,
    ) -> None:
        self.where, self.setting = ("memory", "ram") if is_memory else (str(folder), "copy_limit")
        self.limit, self._idle_seconds = limit, idle_seconds
        path = version.path
        place = os.fsencode(path.resolve()) if isinstance(path, Path) else str(path).encode()
        self._root = folder / "featcache"
        self._home = (
            self._root / f"{version.info.folder_name}.{hashlib.sha256(place).hexdigest()[:8]}"
        )
        self._is_memory, self._is_broken = is_memory, False
        self._users: Lock | None = None

    def _open(self) -> None:
        if self._users is not None:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        with self._alone():
            for home in self._homes() if self._is_memory else ():
                if not _is_used(home / "users"):
                    _remove(home)
            self._make_room(0)
            if self._home.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self._home))
            self._home.mkdir(exist_ok=True)
            # Memory is given back when the process ends, whatever children still have
            # mapped of it.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            users = Lock(self._home / "users", flags, is_inherited=not self._is_memory)
            users.take(shared=True)
            self._users = users
        if self._is_memory:
            weakref.finalize(self, _end, users, self._root, self._home, os.getpid())

    def find(self, name: str, num_bytes: int) -> LocalCopy | None:
        """The copy of that name and size, which is now the last to be removed; None if
        there is none."""
        if self._is_broken:
            return None
        try:
            self._open()
        except OSError:
            self._is_broken = True  # nobody waits for it again
            raise
        path = self._home / name
        with suppress(FileNotFoundError), Lock(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            if os.fstat(file.descriptor).st_size == num_bytes:
                with suppress(PermissionError):  # another user's
                    os.utime(file.descriptor)
                return _CopyOnDisk(map_file(file.descriptor, num_bytes), path)
        return None

    def make(
        self, name: str, num_bytes: int, blocks: Callable[[], Iterable[memoryview]]
    ) -> CopyRefused | None:
        """Make a copy of these blocks, which appears whole or not at all. Raises what
        they raise."""
        self._open()
        part = self._home / f"{name}{_PART}"
        with self._alone():
            if _is_used(part) or self.find(name, num_bytes) is not None:
                return CopyRefused.UNDER_WAY
            if not self._make_room(num_bytes):
                return CopyRefused.FULL
            lock = Lock(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            lock.take(wait=True)
            os.truncate(lock.descriptor, num_bytes)  # it counts towards the limit from now on
        try:
            # rather than find the disk full at the end
            os.posix_fallocate(lock.descriptor, 0, num_bytes)
            for block in blocks():
                while len(block):  # one write may take less than it was given
                    block = block[os.write(lock.descriptor, block) :]
            os.fsync(lock.descriptor)
            with self._alone():
                part.rename(self._home / name)
        except BaseException:
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
        finally:
            lock.release()
        return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The context in which nobody else adds or removes anything here."""
        with locked(self._root / _LOCK):
            yield
        _give_back()

    def _homes(self) -> list[Path]:
        """The folders of the versions that have copies."""
        named = (path for path in self._root.iterdir() if _VERSION.fullmatch(path.name))
        return [path for path in named if stat.S_ISDIR(path.lstat().st_mode)]

    def _make_room(self, num_bytes: int) -> bool:
        """Remove copies that nobody uses until there is room; none if that is too few.
        Raises OSError if the limit would allow it, but the disk has less."""
        files = {home: [*_survey(home)] for home in self._homes()}
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if self.limit is None:
            room = free - int(_LEFT_FREE * disk.f_blocks * disk.f_frsize)
        else:
            room = min(
                free,
                self.limit - sum(file.num_bytes for copies in files.values() for file in copies),
            )
        idle: list[_File] = []
        for home, copies in files.items():
            if not _is_used(home / "users"):
                idle += copies
            elif home == self._home and self._idle_seconds is not None:
                before = time.time_ns() - int(self._idle_seconds * 1e9)
                idle += [copy for copy in copies if copy.used < before and not _is_used(copy.path)]
        to_remove = _least_recent(idle, num_bytes - room)
        if to_remove is None:
            if self.limit is not None and room == free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._root))
            return False
        for file in to_remove:
            file.path.unlink()
            file.path.with_suffix(_READ).unlink(missing_ok=True)
        return True


@dataclass(frozen=True)
class _File:
    path: Path
    num_bytes: int
    used: float


def _least_recent(idle: Iterable[Any], num_bytes: int) -> list[Any] | None:
    """The least recently used of some copies that make so much room; None if all of them
    are too few."""
    oldest_first = sorted(idle, key=lambda copy: copy.used)
    freed = [0, *accumulate(copy.num_bytes for copy in oldest_first)]
    return oldest_first[: bisect_left(freed, num_bytes)] if freed[-1] >= num_bytes else None


def _end(users: Lock, root: Path, home: Path, process: int) -> None:
    """Give memory back, unless other processes use the copies. This may run in the middle
    of anything, as garbage is collected, so it waits for no lock."""
    users.release()
    if os.getpid() == process:  # a forked child may end before its parent
        _ended.append((root, home))
        _give_back()


def _give_back(wait: bool = False) -> None:
    """Remove the copies in memory that this process has ended with; if somebody holds the
    lock, and it is not to `wait`, the next call does it."""
    for root, home in [*_ended]:
        with suppress(OSError, ValueError), Lock(root / _LOCK) as lock:
            if lock.take(wait=wait):
                _ended.remove((root, home))
                if not _is_used(home / "users"):
                    _remove(home)


atexit.register(_give_back, wait=True)


def _remove(home: Path) -> None:
    for path in home.iterdir():
        if path.name == "users" or _COPY.fullmatch(path.name.removesuffix(_READ)):
            path.unlink()
    home.rmdir()


def _survey(home: Path) -> Iterator[_File]:
    """A version's copies. Parts that killed processes have left are removed."""
    for path in home.iterdir():
        # whoever discards a part removes it without the lock
        with suppress(FileNotFoundError):
            status = path.lstat()
            if not (_COPY.fullmatch(path.name) and stat.S_ISREG(status.st_mode)):
                continue
            if path.suffix and not _is_used(path):
                path.unlink()
            else:
                yield _File(path, status.st_size, status.st_mtime_ns)


def _is_used(path: Path) -> bool:
    """Whether a process holds the lock of a version's `users`, of a copy or a part.
    Nobody can take it meanwhile."""
    try:
        return is_held(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's
        return True


class _CopyInMemory:
    """A copy in this process's own memory, used as one on a disk is, which says what each
    method does."""

    path = None

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.data, self.num_bytes = data, len(data)
        self.used = time.monotonic()  # `-inf` if it may go
        self.num_read, self.num_holders, self.is_gone = 0, 0, False

    def exists(self) -> bool:
        return not self.is_gone

    def use(self) -> bool:
        self.used = time.monotonic()
        return not self.is_gone

    def let_go(self) -> None:
        self.used = -math.inf

    def count(self, num_frames: int, whole: int) -> None:
        with changing:
            self.num_read += num_frames
            if self.num_read >= whole:
                self.num_read = 0
                self.let_go()

    def hold(self) -> Callable[[], None] | None:
        with changing:
            self.num_holders += not self.is_gone
            return None if self.is_gone else self._release

    def _release(self) -> None:
        with changing:
            self.num_holders -= 1


LocalCopy: TypeAlias = _CopyOnDisk | _CopyInMemory


class _PrivateMemory:
    """Copies in the process's own memory, found and made as a `Disk`'s are. A forked
    child begins with its parent's."""

    def __init__(self, limit: int, idle_seconds: float | None) -> None:
        self.where, self.setting, self.limit = "memory", "ram", limit
        self._idle_seconds = math.inf if idle_seconds is None else idle_seconds
        self._kept: dict[str, _CopyInMemory] = {}
        self._room = limit

    def find(self, name: str, num_bytes: int) -> LocalCopy | None:
        with changing:
            copy = self._kept.get(name)
            return copy if copy is not None and copy.use() else None

    def make(
        self, name: str, num_bytes: int, blocks: Callable[[], Iterable[memoryview]]
    ) -> CopyRefused | None:
        with changing:
            before = time.monotonic() - self._idle_seconds
            idle = [
                copy for copy in self._kept.values() if not copy.num_holders and copy.used < before
            ]
            if (to_remove := _least_recent(idle, num_bytes - self._room)) is None:
                return CopyRefused.FULL
            for copy in to_remove:
                copy.is_gone = True
                self._room += copy.num_bytes
            self._kept = {name: copy for name, copy in self._kept.items() if not copy.is_gone}
            self._room -= num_bytes
        try:
            array, at = np.empty(num_bytes, np.uint8), 0
            for block in blocks():
                array[at : at + len(block)] = block
                at += len(block)
        except BaseException:
            with changing:
                self._room += num_bytes
            raise
        array.flags.writeable = False
        with changing:  # else whoever looks for idle ones in another thread would fail
            self._kept[name] = _CopyInMemory(array)
        return None


Place: TypeAlias = Disk | _PrivateMemory
