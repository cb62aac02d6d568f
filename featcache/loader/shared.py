"""Arrays that spawned processes share: they map one anonymous file, and copy nothing."""

from __future__ import annotations

import mmap
import operator
import os
import pickle
import weakref
from collections.abc import Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any

_ALIGNED = 64


def is_spawning() -> bool:
    """Return True while a value is pickled for a process that is being spawned."""
    return get_spawning_popen() is not None


class InSharedMemory:
    """A value whose pickle brings no array. A spawned process gets a descriptor of the
    file that holds all arrays, and maps it, read-only.

    Args:
        value: The value, which is pickled now.
        parts: What the value is made of, for `holds`.
    """

    def __init__(self, value: object, parts: Sequence[object] = ()) -> None:
        self._parts = [*parts]
        buffers: list[pickle.PickleBuffer] = []
        self._pickle = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        arrays = [buffer.raw() for buffer in buffers]
        self._sizes = [array.nbytes for array in arrays]
        self._file = os.memfd_create("featcache")
        weakref.finalize(self, os.close, self._file)
        with open(self._file, "wb", closefd=False) as file:
            for array in arrays:
                file.write(array)
                file.write(bytes(-array.nbytes % _ALIGNED))

    def holds(self, parts: Sequence[object]) -> bool:
        """Return True if the value was made of these very parts."""
        if len(parts) != len(self._parts):
            return False
        return all(map(operator.is_, parts, self._parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return _mapped, (DupFd(self._file), self._sizes, self._pickle)


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
    return pickle.loads(pickled, buffers=buffers)
