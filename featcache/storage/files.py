"""Files of this machine: written durably, locked until their process ends, and mapped
without a descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from ctypes import CDLL, c_int, c_long, c_size_t, c_void_p, get_errno
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import StoreError

_WARM_BATCHES = 16
"""After so many batches in a row that read nothing from disk, reading ahead ends."""

_ALLOCATED_BYTES = 1 << 20
"""Room for a file of so many bytes is allocated before it is written, which takes a third
less of the CPU than to allocate it meanwhile."""

_POPULATE_READ = 22
"""`MADV_POPULATE_READ`, of Linux 5.14."""

_own: weakref.WeakSet[Lock] = weakref.WeakSet()
_opening = threading.RLock()

_libc = CDLL(None, use_errno=True)
_libc.mmap.restype = c_void_p
_libc.mmap.argtypes = (c_void_p, c_size_t, c_int, c_int, c_int, c_long)
_libc.munmap.argtypes = (c_void_p, c_size_t)
_libc.madvise.argtypes = (c_void_p, c_size_t, c_int)
_libc.mincore.argtypes = (c_void_p, c_size_t, c_void_p)
_libc.fallocate.argtypes = (c_int, c_int, c_long, c_long)
_FAILED = c_void_p(-1).value


# Written


def write_through(files: Mapping[Path, bytes | bytearray | memoryview]) -> None:
    """Write files, and flush them to disk. Raises OSError.

    All are written before the first flush: a file system with a journal flushes what was
    done before together with it, so the later flushes take little."""
    with ExitStack() as stack:
        opened = [stack.enter_context(path.open("wb", buffering=0)) for path in files]
        for file, data in zip(opened, files.values(), strict=True):
            left = memoryview(data)
            if len(left) >= _ALLOCATED_BYTES:
                _libc.fallocate(file.fileno(), 0, 0, len(left))  # or `write` finds no room
            while len(left):
                left = left[file.write(left) :]
        for file in opened:
            os.fsync(file.fileno())


def write_file(path: Path, data: bytes) -> None:
    """Write or replace a file outside of a store. It appears whole or not at all, also
    after a power cut. Raises StoreError if it cannot be written; then an older file
    stays."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write_through({beside: data})
        beside.replace(path)
        flush(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):  # it is renamed, was never made, or the disk is read-only now
            beside.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and its parents, which a power cut does not undo."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            path.mkdir()
        flush(path.parent)


def flush(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Locked
#  A forked child shares its parent's descriptors, and with them its locks, which would
# outlive the parent. So a child closes them at once.


class Lock(AbstractContextManager["Lock"]):
    """An open file or folder, to be locked with `take`, until `release`, the end of a
    `with` block, the last reference or the process. `flags` are for `os.open`. Forked
    children also hold an inherited lock. Raises OSError if the file cannot be opened."""

    def __init__(self, path: Path, flags: int = os.O_RDWR, *, is_inherited: bool = False) -> None:
        self.descriptor = -1
        """-1 after `release`, and in a forked child that does not inherit the lock."""
        with _opening:
            self.descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            if not is_inherited:
                _own.add(self)

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    def take(self, *, wait: bool = False, shared: bool = False) -> bool:
        """Take the lock if nobody else holds it; with `wait`, as soon as nobody does.
        Returns whether it is taken. Raises OSError if the file system has no locks."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        if not wait:
            kind |= fcntl.LOCK_NB
        try:
            fcntl.flock(self.descriptor, kind)
        except BlockingIOError:
            return False
        return True

    def is_granted(self) -> bool:
        """Take the lock if possible, and tell whether it is held; on a file system without
        locks, always."""
        try:
            return self.take()
        except OSError:
            return True

    # defaults, since at the interpreter's exit the module's names may be gone
    def release(
        self, close: Callable[[int], None] = os.close, opening: threading.RLock = _opening
    ) -> None:
        """Close the file, which ends the lock."""
        with opening:
            if self.descriptor >= 0:
                close(self.descriptor)
                self.descriptor = -1


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it; the file is made if it is missing. Raises
    OSError if it cannot be opened, is a link, or its file system has no locks."""
    with Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW) as lock:
        lock.take(wait=True)
        yield


def is_held(path: Path) -> bool:
    """Tell whether a process holds the lock of a file or folder, by taking it for a
    moment. Raises OSError if it cannot be opened, or its file system has no locks."""
    with Lock(path, os.O_RDONLY) as lock:
        return not lock.take()


def hold_folder(path: Path) -> Lock:
    """Make a folder, and take its lock; again, if somebody has taken the folder for a
    leftover meanwhile. Raises OSError if it cannot be made or opened."""
    while True:
        path.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            lock = Lock(path, os.O_RDONLY | os.O_DIRECTORY)
            if lock.is_granted() and path.exists():
                return lock


def _close_all() -> None:
    for lock in _own:
        lock.release()
    _own.clear()
    _opening.release()


os.register_at_fork(
    before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_all
)


# Mapped
#  Before 3.13, Python's `mmap` keeps a duplicate of the file's descriptor, so some thousand
# shards would meet `ulimit -n`. A map needs none (POSIX.1-2017, mmap).


def map_file(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map the first bytes of an open file, read-only, uint8 `[num_bytes]`.

    The file may be closed at once. It stays mapped while the array or a view of it lives.
    Raises OSError if the file is empty, or the process has too many maps
    (vm.max_map_count)."""
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        error = get_errno()
        raise OSError(error, os.strerror(error))
    return np.asarray(_Map(address, num_bytes))


def will_need(array: NDArray[Any]) -> None:
    """Have the kernel begin to read an array's part of a mapped file, without waiting. If
    several arrays are requested before the first is copied, the disk reads them side by
    side. Arrays in memory are left alone."""
    if array.nbytes:
        address = array.__array_interface__["data"][0]
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(start, address + array.nbytes - start, mmap.MADV_WILLNEED)


def enter_cached(array: NDArray[np.uint8]) -> bool:
    """Enter a part of a mapped file, from a page on, into the page table, if the page cache
    has all of it: then reading it needs no disk. Returns False otherwise, and before Linux
    5.14."""
    address = array.__array_interface__["data"][0]
    pages = np.empty(-(-array.nbytes // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(address, array.nbytes, pages.ctypes.data) or not pages.all():
        return False
    return not _libc.madvise(address, array.nbytes, _POPULATE_READ)


class Readahead:
    """Requests all reads of a batch before the first, while batches come from a disk:
    requests cost a little even if everything is in memory."""

    def __init__(self) -> None:
        self._patience = _WARM_BATCHES

    @contextmanager
    def over(self, arrays: Iterable[NDArray[Any]]) -> Iterator[None]:
        """Request mapped arrays, and watch whether reading them within needs the disk."""
        before = _disk_reads()
        if self._patience:
            for array in arrays:
                will_need(array)
        yield
        if _disk_reads() != before:
            self._patience = _WARM_BATCHES
        elif self._patience:
            self._patience -= 1


def _disk_reads() -> int:
    # some file systems count blocks, all count faults
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


class _Map:
    """Mapped memory, unmapped after the last array over it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._unmap = partial(_libc.munmap, address, num_bytes)
        self.__array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, True),  # read-only
        }

    # Python would drop a KeyboardInterrupt in `__del__`, and this has no code to raise it in
    __del__ = property(attrgetter("_unmap"))
