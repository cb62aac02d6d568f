"""Memory maps of files.

They are made by the system call itself. Python's `mmap` keeps a duplicate of the file's descriptor while the map
lives (3.13 is the first that can do without), so a cache of some thousand shards would meet `ulimit -n`. The system
call needs the descriptor only while it runs.

Source: POSIX.1-2017, mmap: a map keeps its own reference to the file, which closing it does not remove.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WARM_BATCHES = 16
"""After so many batches in a row that read nothing from disk, the kernel is not asked to read ahead any more."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, num_bytes: int) -> NDArray[np.uint8]:
    """The first bytes of an open file, memory-mapped and read-only; uint8 `[num_bytes]`.

    The file may be closed at once. It stays mapped while the array, or a view of it, lives. Raises OSError if the file
    is empty, or the process has too many maps (vm.max_map_count)."""
    address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return np.asarray(_Map(address, num_bytes))


def will_need(array: NDArray[Any]) -> None:
    """Have the kernel begin to read an array's part of a mapped file, without waiting for it.

    Copying from cold maps one after another waits for the disk whenever the kernel's own readahead falls short. If all
    are asked for beforehand, they are read side by side. Arrays that are not mapped, or in memory already, are left
    alone."""
    if array.nbytes:
        address = array.__array_interface__["data"][0]
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(start, address + array.nbytes - start, mmap.MADV_WILLNEED)


class Readahead:
    """Requests all reads of a batch before the first is waited for, while batches come from a disk.

    A disk does several at once. Requests cost a little even if everything is in memory, hence only "while"."""

    def __init__(self) -> None:
        self._patience = _WARM_BATCHES

    @contextmanager
    def over(self, arrays: Iterable[NDArray[Any]]) -> Iterator[None]:
        """Request mapped arrays, and watch whether reading them, which is done within, takes the disk."""
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
    """A count that grows with what this thread reads from disks; some file systems count blocks, all count faults."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt


class _Map:
    """Mapped memory. The arrays over it keep it alive, and it is unmapped after the last one."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self._range = address, num_bytes
        is_readonly = True
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, is_readonly),
        }

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        munmap(*self._range)
