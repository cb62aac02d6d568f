"""The folder of local copies: shards' features on a local disk or in /dev/shm, shared by all processes of the machine.

    <folder>/featcache/
      lock                        held for a moment by whoever adds or removes something
      <version>.<place>/          named after the version's folder, and a hash of where that is: two caches of one
                                  config have nothing in common
        users                     held, shared, by every process that reads these copies
        <shard>                   the file of the shard's features, whole; held, shared, by those who will read it soon
        <shard>.read              how much all processes together have read of it: 8 bytes, changed under its lock
        <shard>.part              one that is being written: held by the process that writes it

A shard's name says what is in it, so a copy stays right for ever. All locks end with their processes: a part that
nobody holds was left by a process that was killed, and is removed. A link in there is not featcache's: nothing is read,
written or removed through it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.loader.local_copies import CopyRefused
from featcache.storage.location import Location
from featcache.storage.locks import Lock, is_held, locked
from featcache.storage.maps import map_file

__all__ = ["LocalDisk", "PartialCopy"]

_VERSION = re.compile(r".+-[0-9a-f]{12}\.[0-9a-f]{8}")
_COPY = re.compile(r"[0-9a-f]{16}(\.part)?")
_PART, _READ = ".part", ".read"
_LEFT_FREE = 0.1
"""The part of the disk that stays free if no limit is given."""


class LocalDisk:
    """The copies of one version, as a `Place`. While a process, or a child that it has forked, has them open, none is
    removed.

    Args:
        folder: A folder on a disk of this machine, or in its memory; made if it is missing.
        limit: The limit of everything that featcache has in the folder, in bytes; by default, all but a tenth of the
            disk. What is beyond it, and not in use, is removed at once.
        version: The name of the version's folder, as it was made.
        path: Where the version is.
        idle_seconds: Copies of the version go too, to make room, which nobody holds and nobody has read for so long,
            though they are in use; None if none of them may.
        is_memory: Whether the folder is in memory: then copies that no process has open do not stay there.

    Raises:
        OSError: From every method: the disk is full, broken, read-only, or without locks.
    """

    def __init__(
        self,
        folder: Path,
        limit: int | None,
        version: str,
        path: Location,
        *,
        idle_seconds: float | None = None,
        is_memory: bool = False,
    ) -> None:
        where = os.fsencode(path.resolve()) if isinstance(path, Path) else str(path).encode()
        place = hashlib.sha256(where).hexdigest()[:8]
        self._root = folder / "featcache"
        self._home = self._root / f"{version}.{place}"
        self._limit = limit
        self._idle_seconds = idle_seconds
        self._root.mkdir(parents=True, exist_ok=True)
        with self.alone():
            files = self._survey()
            for home in [home for home in files if is_memory and not _is_used(home / "users")]:
                del files[home]
                _remove(home)
            self._make_room(files, 0)
            if self._home.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(self._home))
            self._home.mkdir(exist_ok=True)
            # Memory is given back when the process ends, whatever children still have mapped of it.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            self._users = Lock(self._home / "users", flags, is_inherited=not is_memory)
            self._users.take(shared=True)
        if is_memory:
            weakref.finalize(self, _end, self._users, self._root, self._home, os.getpid())

    def path(self, name: str) -> Path:
        """As `Place.path`."""
        return self._home / name

    def find(self, name: str, num_bytes: int) -> NDArray[np.uint8] | None:
        """As `Place.find`: memory-mapped."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                return None
            with suppress(PermissionError):  # another user's
                os.utime(descriptor)
            return map_file(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def has(self, name: str) -> bool:
        """As `Place.has`."""
        return self.path(name).exists()

    def touch(self, name: str) -> bool:
        """As `Place.touch`."""
        try:
            os.utime(self.path(name))
        except FileNotFoundError:
            return False
        except PermissionError:  # another user's
            pass
        return True

    def hold(self, name: str) -> Callable[[], None] | None:
        """As `Place.hold`."""
        with self.alone():
            try:
                lock = Lock(self.path(name), os.O_RDONLY | os.O_NOFOLLOW)
            except FileNotFoundError:
                return None
            lock.take(wait=True, shared=True)
            return lock.release

    def count(self, name: str, amount: int, whole: int) -> bool:
        """As `Place.count`."""
        try:
            lock = Lock(self.path(name + _READ), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            lock.take(wait=True)
            amount += int.from_bytes(os.pread(lock.descriptor, 8, 0), "little")
            os.pwrite(lock.descriptor, (amount if amount < whole else 0).to_bytes(8, "little"), 0)
            lock.release()
        except OSError:  # another user's, or gone, or the disk is full: the copy goes when nobody reads it any more
            return False
        return amount >= whole

    def let_go(self, name: str) -> None:
        """As `Place.let_go`."""
        long_ago = time.time_ns() - int(((self._idle_seconds or 0) + 1) * 1e9)
        with suppress(OSError):  # another user's, or gone
            os.utime(self.path(name), ns=(long_ago, long_ago))

    def is_under_way(self, name: str) -> bool:
        """As `Place.is_under_way`."""
        try:
            return is_held(self._part(name))
        except FileNotFoundError:
            return False

    def make(self, name: str, num_bytes: int, blocks: Callable[[], Iterable[memoryview]]) -> CopyRefused | None:
        """As `Place.make`."""
        part = self.begin(name, num_bytes)
        if isinstance(part, CopyRefused):
            return part
        part.fill(blocks())
        return None

    def begin(self, name: str, num_bytes: int) -> PartialCopy | CopyRefused:
        """Make room for a copy, and be the one that writes it."""
        with self.alone():
            files = self._survey()
            part = self._part(name)
            if part.exists() or self.find(name, num_bytes) is not None:
                return CopyRefused.UNDER_WAY
            if not self._make_room(files, num_bytes):
                return CopyRefused.FULL
            return PartialCopy(self, part, self.path(name), num_bytes)

    def _part(self, name: str) -> Path:
        return self._home / f"{name}{_PART}"

    def alone(self) -> AbstractContextManager[None]:
        """The context in which nobody else adds or removes anything here."""
        return locked(self._root / "lock")

    def _survey(self) -> dict[Path, list[_File]]:
        """The files of each version's copies. Parts that killed processes have left are removed."""
        with os.scandir(self._root) as homes:
            own = [home for home in homes if _VERSION.fullmatch(home.name) and home.is_dir(follow_symlinks=False)]
            paths = [Path(home.path) for home in own]
        return {path: list(_survey_version(path)) for path in paths}

    def _make_room(self, files: dict[Path, list[_File]], num_bytes: int) -> bool:
        """Remove copies that nobody uses, the least recently used first, until there is room; none if that is too few.

        Raises:
            OSError: The limit would allow it, but the disk has less.
        """
        disk = os.statvfs(self._root)
        free = disk.f_bavail * disk.f_frsize
        if self._limit is None:
            room = free - int(_LEFT_FREE * disk.f_blocks * disk.f_frsize)
        else:
            room = min(free, self._limit - sum(file.num_bytes for copies in files.values() for file in copies))
        idle = [file for home, copies in files.items() if not _is_used(home / "users") for file in copies]
        if self._idle_seconds is not None and _is_used(self._home / "users"):
            before = time.time_ns() - int(self._idle_seconds * 1e9)
            own = files.get(self._home, [])
            idle += [file for file in own if file.used_ns < before and not file.path.suffix and not _is_used(file.path)]
        if room + sum(file.num_bytes for file in idle) < num_bytes:
            if self._limit is not None and room == free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._root))
            return False
        for file in sorted(idle, key=lambda file: file.used_ns):
            if room >= num_bytes:
                break
            file.path.unlink()
            file.path.with_suffix(_READ).unlink(missing_ok=True)
            room += file.num_bytes
        return True


def _end(users: Lock, root: Path, home: Path, process: int) -> None:
    """Give memory back, unless other processes use the copies."""
    users.release()
    if os.getpid() == process:  # a forked child may end before its parent
        with suppress(OSError), locked(root / "lock"):
            if not _is_used(home / "users"):
                _remove(home)


def _remove(home: Path) -> None:
    with os.scandir(home) as entries:
        for entry in entries:
            if entry.name == "users" or _COPY.fullmatch(entry.name.removesuffix(_READ)):
                os.unlink(entry.path)
    home.rmdir()


@dataclass(frozen=True)
class _File:
    path: Path
    num_bytes: int
    used_ns: int


def _survey_version(home: Path) -> Iterator[_File]:
    with os.scandir(home) as entries:
        for entry in entries:
            path = Path(entry.path)
            if not _COPY.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):  # whoever discards a part removes it without the lock
                if path.suffix and not _is_used(path):
                    path.unlink()
                    continue
                stat = entry.stat()
                yield _File(path, stat.st_size, stat.st_mtime_ns)


class PartialCopy:
    """A copy that is being written; nobody reads it before `commit`.

    Raises:
        OSError: From every method but `discard`: the disk is full or broken.
    """

    def __init__(self, disk: LocalDisk, path: Path, final_path: Path, num_bytes: int) -> None:
        self._disk = disk
        self._path = path
        self._final_path = final_path
        self._num_bytes = num_bytes
        self._lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            self._lock.take(wait=True)
            os.truncate(self._lock.descriptor, num_bytes)  # it counts towards the limit from now on
        except OSError:
            self.discard()
            raise

    def reserve(self) -> None:
        """Take all the room on the disk now, rather than find it full at the end."""
        os.posix_fallocate(self._lock.descriptor, 0, self._num_bytes)

    def write(self, data: memoryview) -> None:
        """Add bytes."""
        while len(data):  # one write may take less than it was given
            data = data[os.write(self._lock.descriptor, data) :]

    def fill(self, blocks: Iterable[memoryview]) -> None:
        """Write all blocks, and commit; if they raise an error, discard what was written, and raise it."""
        try:
            self.reserve()
            for block in blocks:
                self.write(block)
            self.commit()
        except BaseException:
            self.discard()
            raise

    def commit(self) -> None:
        """Flush it to disk, and give it its name."""
        os.fsync(self._lock.descriptor)
        with self._disk.alone():
            self._path.rename(self._final_path)
        self._lock.release()

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._lock.release()


def _is_used(path: Path) -> bool:
    """Whether a process holds the lock of a version's `users`, of a copy or a part. Nobody can take it meanwhile."""
    try:
        return is_held(path)
    except FileNotFoundError:
        return False
    except PermissionError:  # another user's
        return True
