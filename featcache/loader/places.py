"""The places of local copies: a folder on a disk, or in memory: in /dev/shm. All processes
of the machine share it.

    <folder>/featcache/
      lock                   held for a moment by a process that adds or removes a file
      <version>.<place>/     the version's folder, and a hash of its path: two caches of one
                             config share no copies
        users                locked, shared, by every process that reads these copies
        <shard>              the file of the shard's features, whole; locked, shared, by
                             processes that will read it soon
        <shard>.read         how many of its frames all processes together have read: 8 bytes,
                             changed under its lock
        <shard>.part         an unfinished copy, locked by the process that writes it

A shard's name is a hash of its content, so a copy stays right for ever. All locks end with
their processes: an unlocked part was left by a killed process, and is removed. featcache
reads, writes and removes nothing through links in a folder."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.storage.files import Lock, is_held, locked, map_file
from featcache.version.version import Version

_SHARED = Path("/dev/shm")

_VERSION = re.compile(r".+-[0-9a-f]{12}\.[0-9a-f]{8}")
_COPY = re.compile(r"[0-9a-f]{16}(\.part)?")
_LOCK, _PART, _READ = "lock", ".part", ".read"
_LEFT_FREE = 0.1
"""The share of the disk that stays free without a limit."""

_IDLE_SECONDS = 60.0
"""The time without a read after which a copy from an object store may make room."""

_TOUCH_SECONDS = 1.0
"""The time between two marks on a copy in use."""

_ended: list[tuple[Path, Path]] = []
"""The folders in memory whose copies this process no longer uses."""

changing = threading.RLock()
"""The lock of what a process knows of copies; held while it forks."""

os.register_at_fork(
    before=changing.acquire, after_in_parent=changing.release, after_in_child=changing.release
)


class CopyRefused(Enum):
    """The reason why a copy is not made."""

    UNDER_WAY = "somebody is making it, or has just made it"
    FULL = "all room is in use"


def memory_folder(limit: int) -> Path:
    """Return this user's folder in memory, which has room for `limit` bytes. Raises
    ArgumentError if it has not, as in many containers, or is another user's."""
    folder = _SHARED / f"featcache-{os.getuid()}"
    try:
        shared = os.statvfs(_SHARED)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ArgumentError(f"ram: {folder}: {error.strerror}: give copy_to=") from error
    num_bytes = shared.f_blocks * shared.f_frsize
    if num_bytes < limit:
        raise ArgumentError(
            f"ram is {limit:,} bytes, but {_SHARED} has {num_bytes:,}: give less, or copy_to=; "
            "or start the container with a larger --shm-size"
        )
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o022
    if not is_private or status.st_uid != os.getuid():
        raise ArgumentError(f"ram: {folder} is not this user's alone: remove it, or give copy_to=")
    return folder


class LocalCopy:
    """A copy that this process has mapped: `data`, uint8 `[bytes]`, of the file at `path`."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.data, self.path = data, path
        self._touched = time.monotonic()

    def exists(self) -> bool:
        """Tell whether the copy has not been removed."""
        return os.path.exists(self.path)

    def use(self) -> bool:
        """Mark the copy as the last to remove. Tells whether it still exists."""
        now = time.monotonic()
        if now - self._touched <= _TOUCH_SECONDS:
            return True
        self._mark(None)
        if not self.exists():
            return False
        self._touched = now
        return True

    def let_go(self) -> None:
        """Mark the copy as the first to remove, until it is used again."""
        self._touched = -_TOUCH_SECONDS
        self._mark((0, 0))

    def count(self, num_frames: int, whole: int) -> None:
        """Count frames that were read; let go of the copy once all processes together have
        read the `whole`."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        # Another user's copy, or one on a full disk, goes when it is idle.
        with suppress(OSError), Lock(self.path.with_suffix(_READ), flags) as lock:
            lock.take(wait=True)
            num_frames += int.from_bytes(os.pread(lock.descriptor, 8, 0), "little")
            if num_frames >= whole:
                num_frames = 0
                self.let_go()
            os.pwrite(lock.descriptor, num_frames.to_bytes(8, "little"), 0)

    def hold(self) -> Callable[[], None] | None:
        """Pin the copy. Returns a function that unpins it; None if it is gone."""
        with locked(self.path.parents[1] / _LOCK), suppress(FileNotFoundError):
            lock = Lock(self.path, os.O_RDONLY | os.O_NOFOLLOW)
            lock.take(wait=True, shared=True)
            return lock.release
        return None

    def _mark(self, times: tuple[int, int] | None) -> None:
        # Another user's copy, or one on a read-only disk, can still be read.
        with suppress(OSError):
            os.utime(self.path, times)


class Place:
    """The copies of a version, in a folder on a disk of this machine, or in memory, where
    unused copies do not stay. The folder, which may be slow, is opened at the first look.

    While a process, or a child that it has forked, has copies open, only idle copies of a
    version in an object store are removed. Unused copies beyond the `limit` are removed at
    once: the bytes of all copies in the folder; None for all but a tenth of the disk.

    Every method raises OSError if the disk is full, broken, read-only, or lacks locks."""

    def __init__(
        self, version: Version, folder: Path, limit: int | None, is_memory: bool = False
    ) -> None:
        self.where = "memory" if is_memory else str(folder)
        self.setting = "ram" if is_memory else "copy_limit"
        self.limit = limit
        self._idle_seconds = math.inf if isinstance(version.path, Path) else _IDLE_SECONDS
        path = version.path.resolve() if isinstance(version.path, Path) else version.path
        digest = hashlib.sha256(os.fsencode(str(path))).hexdigest()[:8]
        self._root = folder / "featcache"
        self._home = self._root / f"{version.info.folder_name}.{digest}"
        self._is_memory, self._is_broken = is_memory, False
        self._users: Lock | None = None

    def _open(self) -> None:
        if self._users is not None:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        with self._alone():
            if self._is_memory:
                for home in self._homes():
                    _remove_unless_used(home)
            self._make_room(0)
            if self._home.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self._home))
            self._home.mkdir(exist_ok=True)
            # Memory is given back when the process ends, even if children have mapped it.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            users = Lock(self._home / "users", flags, is_inherited=not self._is_memory)
            users.take(shared=True)
            self._users = users
        if self._is_memory:
            weakref.finalize(self, _end, users, self._root, self._home, os.getpid())

    def find(self, name: str, num_bytes: int) -> LocalCopy | None:
        """Return the copy of this name and size, if there is one, and mark it as the last to
        remove."""
        if self._is_broken:
            return None
        try:
            self._open()
        except OSError:
            self._is_broken = True  # so that no later read waits for it
            raise
        path = self._home / name
        with suppress(FileNotFoundError), Lock(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
            if os.fstat(file.descriptor).st_size == num_bytes:
                with suppress(PermissionError):  # another user's
                    os.utime(file.descriptor)
                return LocalCopy(map_file(file.descriptor, num_bytes), path)
        return None

    def make(
        self, name: str, num_bytes: int, blocks: Callable[[], Iterable[memoryview]]
    ) -> CopyRefused | None:
        """Make a copy of these blocks, which appears whole or not at all."""
        self._open()
        part = self._home / f"{name}{_PART}"
        with self._alone():
            if _is_used(part) or self.find(name, num_bytes) is not None:
                return CopyRefused.UNDER_WAY
            if not self._make_room(num_bytes):
                return CopyRefused.FULL
            lock = Lock(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            lock.take(wait=True)
            os.truncate(lock.descriptor, num_bytes)  # counted towards the limit now
        try:
            os.posix_fallocate(lock.descriptor, 0, num_bytes)  # which fails on a full disk
            for block in blocks():
                while len(block):  # one write may take a part
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
        """Let no other process add or remove files in a block."""
        with locked(self._root / _LOCK):
            yield
        _give_back()

    def _homes(self) -> list[Path]:
        """List the folders of the versions that have copies."""
        named = (path for path in self._root.iterdir() if _VERSION.fullmatch(path.name))
        return [path for path in named if stat.S_ISDIR(path.lstat().st_mode)]

    def _make_room(self, num_bytes: int) -> bool:
        """Remove unused copies until there is room. Returns False, and removes none, if they
        are too few. Raises OSError if the disk has less room than the limit."""
        files = {home: [*_survey(home)] for home in self._homes()}
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if self.limit is None:
            room = free - int(_LEFT_FREE * disk.f_blocks * disk.f_frsize)
        else:
            used = sum(file.num_bytes for copies in files.values() for file in copies)
            room = min(free, self.limit - used)
        idle: list[_File] = []
        for home, copies in files.items():
            if not _is_used(home / "users"):
                idle += copies
            elif home == self._home:
                before = time.time_ns() - self._idle_seconds * 1e9
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


def _least_recent(idle: Iterable[_File], num_bytes: int) -> list[_File] | None:
    """List the least recently used copies that make enough room; None if all are too few."""
    to_remove = []
    for copy in sorted(idle, key=lambda copy: copy.used):
        if num_bytes <= 0:
            break
        to_remove.append(copy)
        num_bytes -= copy.num_bytes
    return to_remove if num_bytes <= 0 else None


def _end(users: Lock, root: Path, home: Path, process: int) -> None:
    """Give memory back, unless other processes use the copies. The garbage collector calls
    this at any moment, so it waits for no lock."""
    users.release()
    if os.getpid() == process:  # a forked child may end before its parent
        _ended.append((root, home))
        _give_back()


def _give_back(wait: bool = False) -> None:
    """Remove the copies in memory that this process no longer uses; those whose lock
    another process holds, at the next call, unless this is to `wait`."""
    for root, home in [*_ended]:
        with suppress(OSError, ValueError), Lock(root / _LOCK) as lock:
            if lock.take(wait=wait):
                _ended.remove((root, home))
                _remove_unless_used(home)


atexit.register(_give_back, wait=True)


def _remove_unless_used(home: Path) -> None:
    if _is_used(home / "users"):
        return
    for path in home.iterdir():
        if path.name == "users" or _COPY.fullmatch(path.name.removesuffix(_READ)):
            path.unlink()
    home.rmdir()


def _survey(home: Path) -> Iterator[_File]:
    """Yield a version's copies, and remove the parts left by killed processes."""
    for path in home.iterdir():
        # A process that discards a part removes it without the lock.
        with suppress(FileNotFoundError):
            status = path.lstat()
            if not (_COPY.fullmatch(path.name) and stat.S_ISREG(status.st_mode)):
                continue
            if path.suffix and not _is_used(path):
                path.unlink()
            else:
                yield _File(path, status.st_size, status.st_mtime_ns)


def _is_used(path: Path) -> bool:
    """Tell whether a process holds the lock of a file."""
    try:
        return is_held(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's
        return True


PlaceOf = Callable[[Version], Place]
"""A function that returns the place for the copies of a version."""
