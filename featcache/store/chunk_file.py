"""The chunk of an array, read from its file and not mapped: what the disk refuses becomes an error.

If a mapped file lies on a bad sector, or is truncated while it is mapped, the kernel ends the process by SIGBUS. A
`pread` fails, or comes back short.
"""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError

_BLOCK_BYTES = 4 << 20

_NOT_DAMAGE = {
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
}
"""Errors of the process or the network: the same file may be read another time, or by somebody else."""


def reading_error(error: OSError, path: Path, version: Path | None = None) -> StoreError:
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


class ChunkFile:
    """The open chunk file of an array. Safe to use from several threads.

    Args:
        path: The file.
        shape, dtype: The array's shape, and its dtype, little endian.
        version: The folder of the version, which messages name as what is to be repaired.

    Raises:
        DamagedError: From every method: the file ends too early, or the disk cannot read it.
        StoreError: The file may not be opened, or the network fails.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], version: Path | None) -> None:
        self._descriptor = -1
        self.path = path
        self._item_shape = shape[1:]
        self._dtype = dtype
        self._frame_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._version = version
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise reading_error(error, path, version) from error

    def __del__(self, close: Any = os.close) -> None:
        if self._descriptor >= 0:
            close(self._descriptor)

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Entries of the array, from `first` on: `[count, ...]`."""
        entries: NDArray[Any] = np.empty((count, *self._item_shape), self._dtype)
        self.read_into(entries, first)
        return entries

    def take(self, numbers: NDArray[np.int64]) -> NDArray[Any]:
        """Entries of the array by their numbers, which rise: `[numbers, ...]`."""
        entries: NDArray[Any] = np.empty((len(numbers), *self._item_shape), self._dtype)
        at, most = 0, max(1, _BLOCK_BYTES // max(1, self._frame_bytes))
        while at < len(numbers):
            first = int(numbers[at])
            end = int(np.searchsorted(numbers, first + most))
            block = self.read(first, int(numbers[end - 1]) + 1 - first)
            entries[at:end] = block[numbers[at:end] - first]
            at = end
        return entries

    def read_into(self, out: NDArray[Any], first: int) -> None:
        """Fill a C-contiguous array with entries, from `first` on."""
        view, at = out.reshape(-1).view(np.uint8).data, first * self._frame_bytes
        while len(view):
            try:
                count = os.preadv(self._descriptor, [view], at)
            except OSError as error:
                raise reading_error(error, self.path, self._version) from error
            if not count:
                end = first + len(out)
                raise DamagedError(f"{self.path}: damaged: it ends before frame {end}", self._version)
            view, at = view[count:], at + count
