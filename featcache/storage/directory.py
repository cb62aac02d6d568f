"""A store in a folder of this machine, or of a file system that others mount too.

A file or folder is written in `work/`, flushed to disk, and renamed; the rename is flushed
as well. So neither a kill nor a power cut leaves half of it, and a reader that sees the
name sees everything.

A link inside a stranger's cache may lead anywhere. So nothing is written through a link,
and nothing that a link leads to is removed. The store's own folder may be a link: users
put it on another disk.

Each writer has a folder in `work/`, `<boot>-<random>/`, and holds a lock on it. The kernel
ends the lock with the process: so a folder that nobody holds is a leftover. Locks say
nothing of other machines and earlier boots: their folders are leftovers once nothing in
them has changed for a day. A removal renames first, to `work/removed-<random>`, and a
whole store to `.removed-<random>` beside it: so it disappears as a whole."""

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
from featcache.storage.base import DAY_SECONDS, MARK, Buffer, Store, checked_key
from featcache.storage.files import (
    Lock,
    enter_cached,
    flush,
    hold_folder,
    make_folder,
    map_file,
    write_through,
)

_BLOCK_BYTES = 1 << 20
"""The bytes of a block. Fewer take more calls; more leave a core's own cache."""
_SAID_BYTES = 1000

_WRITTEN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{16}")
_REMOVED = re.compile(r"removed-[0-9a-f]{16}")
_DESTROYED = re.compile(r"\.removed-[0-9a-f]{12}")

_NO_FOLDER = "not a folder: move it away, and run the same command again"

_NO_FILE = (errno.ENXIO, errno.ENODEV, errno.ELOOP)
"""The errors of opening a socket, a device that is not there, and links in a circle."""

_NOT_DAMAGE = {
    errno.EACCES,
    errno.EPERM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EINTR,
    errno.EAGAIN,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENAMETOOLONG,
}
"""Errors of the process, the network or a name: the file itself may be undamaged."""


class Directory(Store):
    """The store in a folder, which need not exist."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def read(self, key: str, at_most: int) -> bytes:
        file = self.open(key)
        base.require_at_most(file.num_bytes, at_most, file.path)
        return file.read_ranges([0], [file.num_bytes])[0].tobytes()

    def open(self, key: str, num_bytes: int | None = None) -> _File:
        # a string: a path of pathlib takes as long to make as the file to open
        return _File(f"{self.location}/{checked_key(key)}", num_bytes)

    def blocks(self, key: str, num_bytes: int) -> Iterator[memoryview]:
        file, mapped = self.open(key, num_bytes), np.empty(0, np.uint8)
        with suppress(OSError):  # an empty file, no room, or a file system without maps
            mapped = map_file(file.descriptor, num_bytes)
        return file.blocks(mapped)

    def map(
        self, key: str, num_bytes: int, passed: Callable[[memoryview], object] | None = None
    ) -> NDArray[np.uint8]:
        file = self.open(key, num_bytes)
        if not num_bytes:
            return np.empty(0, np.uint8)
        with _reading(file.path):
            mapped = map_file(file.descriptor, num_bytes)
        if passed is not None:
            for block in file.blocks(mapped):
                passed(block)
        return mapped

    def exists(self, key: str) -> bool:
        path = self._place(key)
        with _reading(path), suppress(FileNotFoundError):
            try:
                with os.scandir(path) as entries:
                    return not key or next(entries, None) is not None
            except NotADirectoryError:
                return os.path.lexists(path)
            except OSError as error:
                if error.errno != errno.ELOOP:  # a link that leads nowhere
                    raise
        return False

    def names(self, folder: str) -> list[str]:
        path = self._place(folder)
        try:
            return sorted(name for name in os.listdir(path) if not name.startswith("."))
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            if not folder:
                raise StoreError(f"{path}: is a file, not a cache folder") from error
            raise DamagedError(f"{path}: damaged: {_NO_FOLDER}") from error
        except OSError as error:
            raise _reading_error(error, path) from error

    def walk(self, folder: str = "") -> Iterator[tuple[str, int]]:

        def fail(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):  # it was removed meanwhile
                raise _reading_error(error, error.filename) from error

        for parent, _, names in os.walk(self._place(folder), onerror=fail):
            below = os.path.relpath(parent, self.location)
            for name in names:
                with suppress(FileNotFoundError):
                    yield os.path.normpath(f"{below}/{name}"), os.lstat(f"{parent}/{name}").st_size

    def put(self, key: str, data: Buffer) -> None:
        with self._writing(key) as (target, beside):
            write_through({beside: data})
            try:
                os.replace(beside, target)
            except IsADirectoryError:  # damage: nobody makes a folder here
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
                        raise StoreError(
                            f"{target / path}: has {num_bytes} of the {len(data)} bytes that "
                            "were written: run the same command again"
                        )
                self._rename(beside, target)
            flush(target.parent)  # also if another writer was first, and has not done so yet

    def _rename(self, folder: Path, target: Path) -> None:
        try:
            os.rename(folder, target)
        except OSError:
            if (target / MARK).is_file():
                return
            if not os.path.lexists(target):
                raise
            self._remove(target)  # it was whole once
            os.rename(folder, target)

    def remove(self, key: str) -> None:
        path = self._place(checked_key(key))
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
        _refuse_link(path, "remove that folder, and the link")
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
            if path.is_dir():  # featcache makes none
                path.rmdir()
            lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
            is_ours = lock.is_granted()
            content = b"" if is_ours else os.pread(lock.descriptor, _SAID_BYTES, 0)
        with lock:
            if not is_ours:
                holder = "".join(filter(str.isprintable, content.decode(errors="replace")))
                raise LockedError(f"{self.location}: is in use by {holder or 'another run'}")
            with suppress(OSError):  # on a full disk, the last holder's words stay
                os.ftruncate(lock.descriptor, 0)
                os.pwrite(lock.descriptor, who.encode(errors="replace"), 0)
            yield

    def sweep(self, *, remove: bool = True) -> list[str]:
        """See `Store`. Only names that this file gives are leftovers."""
        work, left = self.location / "work", list[str]()
        with suppress(OSError):
            beside = Path(os.path.abspath(self.location)).parent
            left += [f"../{name}" for name in _removed(beside, _DESTROYED, remove)]
        with _writing_to(work), suppress(FileNotFoundError, NotADirectoryError):
            _refuse_link(work)
            left += [f"work/{name}" for name in _removed(work, _REMOVED, remove)]
            written = sorted(filter(_WRITTEN.fullmatch, os.listdir(work)))
            if not written:
                return left
            # if the folder cannot be written, nothing is known of leftovers
            with suppress(OSError), in_work(work) as own:
                dead = [name for name in written if _is_left(work / name, own, remove)]
                left += [f"work/{name}" for name in dead]
        return left

    @property
    def marks_folder(self) -> Path:
        with _writing_to(self.location / "work" / "desk"):
            return self._folder("work/desk")

    def _folder(self, key: str) -> Path:
        """Make a folder to write in, if it is missing. Refuses links on the way."""
        path = self.location
        make_folder(path)
        for part in filter(None, key.split("/")):
            path /= part
            _refuse_link(path)
            make_folder(path)
            if not path.is_dir():  # it may be the only copy of something
                raise StoreError(f"{path}: cannot be written: {_NO_FOLDER}")
        return path

    @contextmanager
    def _writing(self, key: str) -> Iterator[tuple[Path, Path]]:
        """Yield where a file or folder is to appear, and where to write it first."""
        parent, _, name = checked_key(key).rpartition("/")
        with _writing_to(self._place(key)):
            target = self._folder(parent) / name
            with in_work(self._folder("work")) as own:
                yield target, own / name


class _File:
    """An `Opened` regular file; links are followed."""

    def __init__(self, path: str, num_bytes: int | None = None) -> None:
        self.path = path
        self.descriptor = -1
        with _reading(path):
            # with O_NONBLOCK, opening a pipe does not wait
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            self.descriptor = os.open(path, flags)
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
                what = f"damaged: it ends before byte {start + len(out):,}"
                raise DamagedError(f"{self.path}: {what}")
            out, start = out[count:], start + count

    def read_ranges(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        base.require_within(starts, sizes, self.num_bytes, self.path)
        ranges = [np.empty(size, np.uint8).data for size in sizes]
        for start, part in zip(starts, ranges, strict=True):
            self.read_into(part, start)
        return ranges

    def blocks(self, mapped: NDArray[np.uint8]) -> Iterator[memoryview]:
        """Yield the whole file, which may be mapped, in blocks, each valid until the next.

        What the page cache has is not copied, which takes half the time. The rest is read:
        if the disk fails, that is an error, and no SIGBUS."""
        buffer = np.empty(min(self.num_bytes, _BLOCK_BYTES), np.uint8).data
        for start in range(0, self.num_bytes, _BLOCK_BYTES):
            part = mapped[start : start + _BLOCK_BYTES]
            block = part.data
            if not (len(part) and enter_cached(part)):
                block = buffer[: self.num_bytes - start]
                self.read_into(block, start)
            yield block


def _reading_error(error: OSError, path: str | Path) -> StoreError:
    if error.errno in _NO_FILE:
        return DamagedError(f"{path}: damaged: not a regular file")
    what = f"cannot be read: {error.strerror or error}"
    if error.errno in _NOT_DAMAGE:
        return StoreError(f"{path}: {what}")
    return DamagedError(f"{path}: damaged: {what}")


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


@contextmanager
def _reading(path: str | Path) -> Iterator[None]:
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
    write_through(paths)
    for each, _, _ in os.walk(folder):
        flush(Path(each))


def _refuse_link(
    path: Path, remedy: str = "put a folder in its place (the version's whole folder may be a link)"
) -> None:
    if path.is_symlink():
        raise StoreError(f"{path}: is a symbolic link to {os.readlink(path)}: {remedy}")


@contextmanager
def in_work(work: Path) -> Iterator[Path]:
    """Make a folder to write in, hold its lock meanwhile, and remove it in the end."""
    path = work / f"{_boot()}-{secrets.token_hex(8)}"
    with hold_folder(path):
        try:
            yield path
        finally:
            _discard(path)


def remove_folder(path: Path, work: Path) -> None:
    """Remove a folder so that a power cut does not bring it back."""
    aside = work / f"removed-{secrets.token_hex(8)}"
    path.rename(aside)
    flush(path.parent)
    flush(work)
    _discard(aside)


def _removed(folder: Path, names: re.Pattern[str], remove: bool) -> list[str]:
    """List what an interrupted removal has left in a folder, by its names. With `remove`,
    remove it."""
    left = sorted(filter(names.fullmatch, os.listdir(folder)))
    if remove:
        for name in left:
            _discard(folder / name)
    return left


def _is_left(path: Path, own: Path, remove: bool) -> bool:
    """Tell whether the writer of a folder is dead. With `remove`, remove the folder then.
    `own` is a new folder whose lock this process holds."""
    with suppress(OSError), Lock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as lock:
        # a file system that grants every lock also grants one that is held
        if path.name.startswith(_boot()) and not Lock(own, os.O_RDONLY).is_granted():
            is_left = lock.take()
        else:  # by the clock of the file system, which is the same for all
            is_left = own.stat().st_mtime - _last_change(path) > DAY_SECONDS
        if is_left and remove:
            remove_folder(path, path.parent)  # while nobody else can hold it
        return is_left
    return False  # it is gone, or not ours to remove


def _last_change(folder: Path) -> float:
    return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))


def _discard(folder: Path) -> None:
    # rmtree follows no link, neither inside nor the folder itself
    shutil.rmtree(folder, ignore_errors=True)


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return secrets.token_hex(4)  # no other process has this one
