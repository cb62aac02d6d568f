"""The chunk of an array, read from where it lies and not mapped: what the disk refuses becomes an error.

If a mapped file lies on a bad sector, or is truncated while it is mapped, the kernel ends the process by SIGBUS. A
`pread` fails, or comes back short.
"""

from __future__ import annotations

import errno
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location
from featcache.storage.store import store_of
from featcache.storage.stream import open_stream
from featcache.store import zarr3
from featcache.store.checksums import crc32c

_BLOCK_BYTES = 4 << 20
_CHECKED_BYTES = 1 << 20

_NOT_DAMAGE = {
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
"""Errors of the process or the network: the same file may be read another time, or by somebody else."""


def reading_error(error: OSError, path: Location, version: Location | None = None) -> StoreError:
    """The error to raise if a file of a cache, by default `path`, cannot be read.

    It is a DamagedError, which names the remedy for `version`, unless the fault is that of this process or the network.
    """
    what = f"cannot be read: {error.strerror or error}"
    where = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else path
    return (
        StoreError(f"{where}: {what}")
        if error.errno in _NOT_DAMAGE
        else DamagedError(f"{where}: damaged: {what}", version)
    )


def checked_blocks(chunk: Location, num_bytes: int, version: Location | None = None) -> Iterator[memoryview]:
    """The bytes of a chunk's whole file, in blocks that have memory of their own. Once the last has come, all of them
    match the checksum at their end.

    Raises:
        DamagedError: They do not, or cannot be read; it names the remedy for `version`.
        StoreError: The file may not be opened, or the network fails.
    """

    @contextmanager
    def reading() -> Iterator[None]:
        try:
            yield
        except OSError as error:  # of what is read: those of what is written are the caller's
            raise reading_error(error, chunk, version) from error

    crc, left = 0, num_bytes
    with reading():
        stream = open_stream(chunk, num_bytes)
    with stream as file:
        while left:
            block = np.empty(min(left, _CHECKED_BYTES), np.uint8)
            with reading():
                count = file.readinto(block.data) or 0
            if not count:
                break
            crc, left = crc32c(block[:count], crc), left - count
            if not left and crc != zarr3.RESIDUE:
                break
            yield block[:count].data
    if left or crc != zarr3.RESIDUE:
        raise DamagedError(f"{chunk}: damaged: its checksum does not match", version)


class Chunk(ABC):
    """The chunk of an array of some shape and dtype, little endian. Safe to use from several threads.

    Args:
        path: Its file.
        shape, dtype: The array's shape, and its dtype, little endian.
        version: The place of the version, which messages name as what is to be repaired.
        checksum: The checksum at the end of its file, as far as it is needed.

    Raises:
        DamagedError: From every method: the file ends too early, or the disk cannot read it.
        StoreError: The file may not be opened, or the network fails.
    """

    def __init__(
        self, path: Location, shape: tuple[int, ...], dtype: np.dtype[Any], version: Location | None, checksum: int = 0
    ) -> None:
        self.path = path
        self.shape = shape
        self.dtype = dtype
        self._frame_bytes = math.prod(shape[1:]) * dtype.itemsize
        self.version = version
        self.checksum = checksum

    @property
    def num_bytes(self) -> int:
        """The bytes of all entries."""
        return self.shape[0] * self._frame_bytes

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Entries of the array, from `first` on: `[count, ...]`."""
        entries: NDArray[Any] = np.empty((count, *self.shape[1:]), self.dtype)
        self.read_into(entries, first)
        return entries

    def read_ranges(self, firsts: Sequence[int], counts: Sequence[int]) -> list[NDArray[Any]]:
        """Several stretches of entries, `counts` of each from `firsts` on; from an object store, fetched together."""
        return [self.read(first, count) for first, count in zip(firsts, counts, strict=True)]

    def take(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Entries of the array by their numbers, which rise: `[numbers, ...]`."""
        entries: NDArray[Any] = np.empty((len(numbers), *self.shape[1:]), self.dtype)
        at, most = 0, max(1, _BLOCK_BYTES // max(1, self._frame_bytes))
        while at < len(numbers):
            first = int(numbers[at])
            end = int(np.searchsorted(numbers, first + most))
            block = self.read(first, int(numbers[end - 1]) + 1 - first)
            entries[at:end] = block[numbers[at:end] - first]
            at = end
        return entries

    @abstractmethod
    def read_into(self, out: NDArray[Any], first: int) -> None:
        """Fill a C-contiguous array with entries, from `first` on."""

    def _ends_before(self, frame: int) -> DamagedError:
        return DamagedError(f"{self.path}: damaged: it ends before frame {frame}", self.version)


def open_chunk(
    path: Location, shape: tuple[int, ...], dtype: np.dtype[Any], version: Location | None, checksum: int = 0
) -> Chunk:
    """The chunk of an array, by its file; see `Chunk`."""
    kind = ChunkFile if isinstance(path, Path) else ChunkObject
    return kind(path, shape, dtype, version, checksum)


class ChunkFile(Chunk):
    """The open chunk file of an array."""

    def __init__(
        self, path: Any, shape: tuple[int, ...], dtype: np.dtype[Any], version: Location | None, checksum: int = 0
    ) -> None:
        self._descriptor = -1
        super().__init__(path, shape, dtype, version, checksum)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise reading_error(error, path, version) from error

    def __del__(self, close: Any = os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)

    def read_into(self, out: NDArray[Any], first: int) -> None:
        """Fill a C-contiguous array with entries, from `first` on."""
        view, at = out.reshape(-1).view(np.uint8).data, first * self._frame_bytes
        while len(view):
            try:
                count = os.preadv(self._descriptor, [view], at)
            except OSError as error:
                raise reading_error(error, self.path, self.version) from error
            if not count:
                raise self._ends_before(first + len(out))
            view, at = view[count:], at + count


class ChunkObject(Chunk):
    """The chunk of an array in an object store."""

    def read_into(self, out: NDArray[Any], first: int) -> None:
        """Fill a C-contiguous array with entries, from `first` on."""
        (entries,) = self.read_ranges([first], [len(out)])
        out[...] = entries

    def check_ends(self, firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Refuse stretches of entries beyond the end, by a DamagedError: memory is asked for by what there is."""
        last = max((first + count for first, count in zip(firsts, counts, strict=True)), default=0)
        if last > self.shape[0]:
            raise self._ends_before(last)

    def read_ranges(self, firsts: Sequence[int], counts: Sequence[int]) -> list[NDArray[Any]]:
        """Several stretches of entries, `counts` of each from `firsts` on, fetched side by side; read-only."""
        self.check_ends(firsts, counts)
        starts = [first * self._frame_bytes for first in firsts]
        sizes = [count * self._frame_bytes for count in counts]
        place = self.path
        try:
            found = store_of(place).get_ranges(place, starts, sizes)
        except OSError as error:
            raise reading_error(error, place, self.version) from error
        if [part.nbytes for part in found] != sizes:
            raise self._ends_before(max(map(sum, zip(firsts, counts, strict=True))))
        return [np.frombuffer(part, self.dtype).reshape(-1, *self.shape[1:]) for part in found]
