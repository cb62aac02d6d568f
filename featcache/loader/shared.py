"""Arrays that spawned processes share: they map one anonymous file, and copy nothing."""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

_ALIGNED = 64


def is_spawning() -> bool:
    """Return True while a value is pickled for a process that is being spawned."""
    return get_spawning_popen() is not None


class InSharedMemory:
    """A value whose pickle brings no array: a spawned process gets a descriptor of the
    file that holds all of them, and maps it, read-only. Linux only."""

    def __init__(self, value: object) -> None:
        buffers: list[pickle.PickleBuffer] = []
        self._pickle = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        self._sizes = [array.nbytes for array in arrays]
        self._file = os.memfd_create("featcache")
        with open(self._file, "wb", closefd=False) as file:
            for array in arrays:
                file.write(array)
                file.write(bytes(-array.nbytes % _ALIGNED))

    def __del__(self) -> None:
        os.close(self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (DupFd(self._file), self._sizes, self._pickle)  # type: ignore[no-untyped-call]


def _mapped(descriptor: Any, sizes: Sequence[int], pickled: bytes) -> object:
    """Return the value, over arrays in the file."""
    file = descriptor.detach()
    try:
        length = os.fstat(file).st_size
        view = memoryview(mmap.mmap(file, length, access=mmap.ACCESS_READ) if length else b"")
    finally:
        os.close(file)
    buffers, begin = [], 0
    for size in sizes:
        buffers.append(view[begin : begin + size])
        begin += size + -size % _ALIGNED
    return pickle.loads(pickled, buffers=buffers)  # noqa: S301 (comes from the parent process)
