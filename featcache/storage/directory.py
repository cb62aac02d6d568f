"""A store in a folder of this machine, or of a file system that others mount too.

What is to appear is written in a folder of its own in `work/`, flushed to disk, and
renamed; the rename is flushed as well. So neither a kill nor a power cut leaves half of
it, and a reader that sees the name sees everything.

A link inside a cache may lead anywhere, and a cache may be a stranger's. So nothing is
written through a link, and nothing that a link leads to is removed. The store's own
folder may be a link: users put it on another disk.

In `work/` is what is being written, what is being removed, and what the dead have left of
both. Who writes has a folder of his own there, `<boot>-<random>/`, and holds a lock on
it. Whatever ends him, the kernel lets go of the lock: so what nobody holds is a leftover.
Locks of other machines, and of this one before it was started again, say nothing: what is
theirs is a leftover once nothing in it has changed for a day. What is to be removed is
renamed first, to `removed-<random>`; a whole store to `.removed-<random>` beside it. So
it disappears as a whole, and a removal never follows a folder to its place."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, LockedError, StoreError
from featcache.storage import base
from featcache.storage.base import MARK, Buffer, checked_key, in_parallel
from featcache.storage.files import Lock, flush, hold_folder, make_folder, map_file, write_through

_BLOCK_BYTES = 1 << 20
_SAID_BYTES = 1000

_DAY_SECONDS = 86400.0
_WRITTEN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{16}")
_REMOVED = re.compile(r"removed-[0-9a-f]{16}")
_DESTROYED = re.compile(r"\.removed-[0-9a-f]{12}")

_FLUSHES = 8
"""Files that are flushed side by side: a disk flushes many together in little more time
than one."""

_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.ELOOP)
"""What opening says of a socket, of a device that is not there, and of links in a circle."""

_NOT_DAMAGE = {
    *(
        errno.EACCES,
        errno.EPERM,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EINTR,
        errno.EAGAIN,
    ),
    *(
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    ),
    errno.ENAMETOOLONG,
}
"""Errors of the process, the network or a name: the same file may be read another time,
or by somebody else."""


class Directory:
    """The store in a folder, which need not exist; see `featcache.storage.base.Store`."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def read(self, key: str, at_most: int) -> bytes:
        file = _File(self._path(key))
        base.require_at_most(file.num_bytes, at_most, file.path)
        return file.read_ranges([0], [file.num_bytes])[0].tobytes()

    def open(self, key: str, num_bytes: int | None) -> _File:
        return _File(self._path(key), num_bytes)

    def blocks(self, key: str, num_bytes: int) -> Iterator[memoryview]:
        return _File(self._path(key), num_bytes).blocks()

    def map(
        self, key: str, num_bytes: int, passed: Callable[[memoryview], object] | None = None
    ) -> NDArray[np.uint8]:
        file = _File(self._path(key), num_bytes)
        if passed is not None:
            for block in file.blocks():
                passed(block)
        with _reading(file.path):
            return map_file(file.descriptor, num_bytes) if num_bytes else np.empty(0, np.uint8)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        with _reading(path), suppress(FileNotFoundError):
            try:
                with os.scandir(path) as entries:
                    return not key or next(entries, None) is not None
            except NotADirectoryError:
                return os.path.lexists(path)
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link that leads nowhere, as others do
                    raise
        return False

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        try:
            return sorted(name for name in os.listdir(path) if not name.startswith("."))
        except FileNotFoundError:
            return []
        except OSError as error:
            if isinstance(error, NotADirectoryError) and not folder:
                raise StoreError(f"{path}: is a file, not a cache folder") from error
            raise _reading_error(error, path) from error

    def walk(self, folder: str = "") -> Iterator[tuple[str, int]]:

        def fail(error: OSError) -> None:
            # which has been taken away in the meantime
            if not isinstance(error, FileNotFoundError):
                raise _reading_error(error, self.location) from error

        for parent, _, names in os.walk(self._path(folder), onerror=fail):
            below = os.path.relpath(parent, self.location)
            for name in names:
                with suppress(FileNotFoundError):
                    yield os.path.normpath(f"{below}/{name}"), os.lstat(f"{parent}/{name}").st_size

    def put(self, key: str, data: Buffer) -> None:
        with self._writing(key) as (target, beside):
            write_through(beside, data)
            try:
                os.replace(beside, target)
            except IsADirectoryError:  # which is damage: no folder is made where a file belongs
                self._remove(target)
                os.replace(beside, target)
            flush(target.parent)

    def publish(self, files: Mapping[str, Buffer], folder: str) -> None:
        with self._writing(folder) as (target, beside):
            if not (target / MARK).is_file():
                _write_folder(beside, files)
                for path, data in files.items():
                    num_bytes = _size_of(beside / path)
                    if num_bytes != len(data):
                        what = (
                            f"has {num_bytes} of the {len(data)} bytes that were written: "
                            "removed, or cut off since"
                        )
                        raise StoreError(f"{target / path}: {what}: run the same command again")
                self._place(beside, target)
            # also if another writer was first, who may not have come to that
            flush(target.parent)

    def _place(self, folder: Path, target: Path) -> None:
        try:
            os.rename(folder, target)
        except OSError:
            if (target / MARK).is_file():
                return
            if not os.path.lexists(target):
                raise
            self._remove(target)  # it was there whole once
            os.rename(folder, target)

    def remove(self, key: str) -> None:
        path = self._path(checked_key(key))
        with _writing_to(path, "removed"), suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)
            self._folder(key.rpartition("/")[0])
            self._remove(path)

    def _remove(self, path: Path) -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            remove_folder(path, self._folder("work"))
        else:
            path.unlink()
            flush(path.parent)

    def destroy(self) -> None:
        path = Path(os.path.abspath(self.location))
        if path.is_symlink():
            raise StoreError(
                f"{path}: is a symbolic link to {os.readlink(path)}: remove that folder, "
                "and the link"
            )
        with _writing_to(path, "removed"):
            _removed(path.parent, _DESTROYED, remove=True)
            hidden = path.with_name(f".removed-{secrets.token_hex(6)}")
            path.rename(hidden)
            flush(path.parent)
            with suppress(FileNotFoundError):  # a sweep beside it removes the rest
                shutil.rmtree(hidden)

    @contextmanager
    def lock(self, who: str) -> Iterator[None]:
        path = self.location / "lock"
        with _writing_to(path):
            self._folder("")
            _refuse_link(path)
            if path.is_dir():  # which nobody here has made
                path.rmdir()
            lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            is_ours = lock.is_granted()
            content = b"" if is_ours else os.pread(lock.descriptor, _SAID_BYTES, 0)
        with lock:
            if not is_ours:
                holder = (
                    "".join(filter(str.isprintable, content.decode(errors="replace")))
                    or "another run"
                )
                raise LockedError(f"{self.location}: is in use by {holder}")
            with suppress(OSError):  # on a full disk, what the last holder said stays
                os.ftruncate(lock.descriptor, 0)
                os.pwrite(lock.descriptor, who.encode(errors="replace"), 0)
            yield

    def sweep(self, *, remove: bool = True) -> list[str]:
        """See `Store`: leftovers are names that are given here, and no others."""
        work, left = self.location / "work", list[str]()
        with suppress(OSError):
            beside = Path(os.path.abspath(self.location)).parent
            left += [f"../{name}" for name in _removed(beside, _DESTROYED, remove)]
        with _writing_to(work), suppress(FileNotFoundError, NotADirectoryError):
            _refuse_link(work)
            left += [f"work/{name}" for name in _removed(work, _REMOVED, remove)]
            written = sorted(filter(_WRITTEN.fullmatch, os.listdir(work)))
            if written:
                # a folder that cannot be written tells nothing of its leftovers
                with suppress(OSError), in_work(work) as own:
                    dead = [name for name in written if _is_left(work / name, own, remove)]
                    left += [f"work/{name}" for name in dead]
        return left

    @property
    def marks_folder(self) -> Path:
        with _writing_to(self.location / "work" / "desk"):
            return self._folder("work/desk")

    def _path(self, key: str) -> Path:
        return self.location / checked_key(key) if key else self.location

    def _folder(self, key: str) -> Path:
        """A folder to write in; it is made if it is missing, and none on the way is a
        link."""
        path = self.location
        make_folder(path)
        for part in filter(None, key.split("/")):
            path /= part
            _refuse_link(path)
            make_folder(path)
        return path

    @contextmanager
    def _writing(self, key: str) -> Iterator[tuple[Path, Path]]:
        """The context to write a file or folder in: where it is to appear, and where it
        is written first."""
        parent, _, name = checked_key(key).rpartition("/")
        with _writing_to(self._path(key)):
            target = self._folder(parent) / name
            with in_work(self._folder("work")) as own:
                yield target, own / name


class _File:
    """An open regular file, or one that a link leads to; see
    `featcache.storage.base.Opened`."""

    def __init__(self, path: Path, num_bytes: int | None = None) -> None:
        self.path = path
        self.descriptor = -1
        with _reading(path):
            # With O_NONBLOCK, a pipe opens at once. To reading a regular file it makes no
            # difference.
            self.descriptor = os.open(
                path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            )
            status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{path}: damaged: not a regular file")
        self.num_bytes = status.st_size
        base.require_size(self.num_bytes, num_bytes, path)

    def __del__(self, close: Any = os.close) -> None:
        if self.descriptor >= 0:
            close(self.descriptor)

    def read_into(self, out: memoryview, start: int) -> None:
        while len(out):
            try:
                count = os.preadv(self.descriptor, [out], start)
            except OSError as error:
                raise _reading_error(error, self.path) from error
            if not count:
                raise DamagedError(
                    f"{self.path}: damaged: it ends before byte {start + len(out):,}"
                )
            out, start = out[count:], start + count

    def read_ranges(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        base.require_within(starts, sizes, self.num_bytes, self.path)
        ranges = [np.empty(size, np.uint8).data for size in sizes]
        for start, part in zip(starts, ranges, strict=True):
            self.read_into(part, start)
        return ranges

    def blocks(self) -> Iterator[memoryview]:
        """All of its bytes, in blocks that are valid until the next one."""
        buffer = np.empty(min(self.num_bytes, _BLOCK_BYTES), np.uint8).data
        for start in range(0, self.num_bytes, _BLOCK_BYTES):
            block = buffer[: self.num_bytes - start]
            self.read_into(block, start)
            yield block


def _reading_error(error: OSError, path: Path) -> StoreError:
    if error.errno in _NO_FILE:
        return DamagedError(f"{path}: damaged: not a regular file")
    what = f"cannot be read: {error.strerror or error}"
    if error.errno in _NOT_DAMAGE:
        return StoreError(f"{path}: {what}")
    return DamagedError(f"{path}: damaged: {what}")


def _size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it does not exist."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _reading_error(error, path) from error


@contextmanager
def _writing_to(path: Path, what: str = "written") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: cannot be {what}: {error.strerror or error}") from error


def _write_folder(folder: Path, files: Mapping[str, Buffer]) -> None:
    paths = {folder / checked_key(path): data for path, data in files.items()}
    for parent in {path.parent for path in paths}:
        parent.mkdir(parents=True, exist_ok=True)
    in_parallel(lambda path: write_through(path, paths[path]), [*paths], _FLUSHES)
    in_parallel(flush, [Path(parent) for parent, _, _ in os.walk(folder)], _FLUSHES)


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        remedy = "put a folder in its place (the version's whole folder may be a link)"
        raise StoreError(f"{path}: is a symbolic link to {os.readlink(path)}: {remedy}")


@contextmanager
def in_work(work: Path) -> Iterator[Path]:
    """The context to write something in: a fresh folder, which is held meanwhile, and
    removed in the end."""
    path = work / f"{_boot()}-{secrets.token_hex(8)}"
    with hold_folder(path):
        try:
            yield path
        finally:
            _discard(path)


def remove_folder(path: Path, work: Path) -> None:
    """Remove a folder, for good: also after a power cut it is gone, as far as it is seen."""
    aside = work / f"removed-{secrets.token_hex(8)}"
    path.rename(aside)
    flush(path.parent)
    flush(work)
    _discard(aside)


def _removed(folder: Path, names: re.Pattern[str], remove: bool) -> list[str]:
    """List what an interrupted removal has left in a folder, by its name. With `remove`,
    remove it."""
    left = sorted(filter(names.fullmatch, os.listdir(folder)))
    if remove:
        for name in left:
            _discard(folder / name)
    return left


def _is_left(path: Path, own: Path, remove: bool) -> bool:
    """Tell whether the writer of a folder is dead. With `remove`, remove the folder of a
    dead writer. `own` is a new folder whose lock this process holds."""
    with suppress(OSError), Lock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as lock:
        # Some file systems have no locks, or grant all: they also grant one on what is held.
        if path.name.startswith(_boot()) and not Lock(own, os.O_RDONLY).is_granted():
            is_left = lock.take()
        else:  # by the clock of the file system, which is the same for all
            is_left = own.stat().st_mtime - _last_change(path) > _DAY_SECONDS
        if is_left and remove:
            remove_folder(path, path.parent)  # while nobody else can hold it
        return is_left
    return False  # it is gone, or not ours to remove


def _last_change(folder: Path) -> float:
    """When a folder or anything in it changed last. Raises FileNotFoundError if something
    of it goes meanwhile."""
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def _discard(folder: Path) -> None:
    # which follows no link: neither one inside, nor the folder itself
    shutil.rmtree(folder, ignore_errors=True)


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return secrets.token_hex(4)  # nobody is known to be of the same boot
