"""Hot utterances in this process's memory, within a limit.

They lie in one block of a fixed size, see `Arena`. `malloc` has no such limit: arrays of 5 kB to 1 MB, freed in random
order by eight threads, kept 2.4 times the memory that they had at any time, and by one thread 1.2 times.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.loader.shards import Shards, cut

if TYPE_CHECKING:
    from featcache.loader.object_shards import ToFetch

__all__ = ["GRAIN", "Arena", "HotUtterances", "Ram"]

GRAIN = 256
"""Blocks of an arena are multiples of so many bytes: no hole is too small for anything."""

_OVERHEAD = 512
"""Bytes that keeping an array takes besides its values."""

# One lock for all caches, since nobody holds it for long; held while a process forks, or the child might never get it.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class HotUtterances:
    """Reads utterances as the shards do, and keeps them in this process's memory, `limit` bytes with all overhead.

    Raises:
        ArgumentError: The machine has less memory.
    """

    def __init__(self, shards: Shards, limit: int) -> None:
        index, version = shards.index, shards.version
        num_bytes = (
            int(np.asarray(index.num_frames).sum()) * math.prod(version.info.spec.item_shape) * version.dtype.itemsize
        )
        self._shards = shards
        self._item_shape, self._dtype = version.info.spec.item_shape, version.dtype
        self._ram = Ram(limit, len(index), num_bytes)

    def utterance(self, position: int) -> NDArray[Any]:
        """As `Shards.utterance`."""
        length = int(self._shards.index.num_frames[position])
        return self.load(position, np.empty((length, *self._item_shape), self._dtype))

    def load(self, position: int, out: NDArray[Any]) -> NDArray[Any]:
        """As `Shards.load`, but that what is in memory is not copied into `out`; read-only."""
        kept = self._ram.get(position)
        if kept is None:
            kept = self._ram.keep(position, self._shards.load(position, out))
            kept.flags.writeable = False
        return kept

    def frames(
        self, positions: NDArray[np.int64], firsts: NDArray[np.int64] | None, counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """As `Shards.frames`; of utterances that are not in memory yet, all frames are read."""
        with self.requesting(positions):
            return cut([self.utterance(position) for position in positions.tolist()], firsts, counts)

    def requesting(self, positions: NDArray[np.int64]) -> AbstractContextManager[None]:
        """As `Shards.requesting`, for those that are not in memory."""
        missing = [position for position in positions.tolist() if self._ram.get(position) is None]
        return self._shards.requesting(np.array(missing, np.int64)) if missing else nullcontext()

    def to_fetch(self, positions: NDArray[np.int64]) -> dict[ToFetch, int]:
        """None: what is in memory need not be fetched, and the rest is when it is read."""
        return {}

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """As `Shards.read_ahead`; these arrays are in memory."""
        return nullcontext()


class Ram:
    """Arrays by number, within a limit: the least recently used are evicted first. Safe to use from several threads.

    A forked child starts with its parent's arrays, and from then on keeps its own.

    Args:
        limit: Bytes of memory, all included.
        num_arrays: The number of arrays that there are to choose from.
        num_bytes: Their bytes, all together.

    Raises:
        ArgumentError: The machine has less memory.
    """

    def __init__(self, limit: int, num_arrays: int, num_bytes: int) -> None:
        self._arrays: OrderedDict[int, NDArray[Any]] = OrderedDict()  # the least recently used one first
        share = num_bytes / max(1, num_bytes + num_arrays * _OVERHEAD)
        try:
            self._arena = Arena(min(int(limit * share), num_bytes + num_arrays * GRAIN))
        except MemoryError as error:
            raise ArgumentError(f"ram is {limit:,} bytes: more than this machine has") from error

    def __len__(self) -> int:
        return len(self._arrays)

    def get(self, number: int) -> NDArray[Any] | None:
        """The array of that number, read-only, which is now the last to be evicted; None if it is not kept."""
        with _lock:
            array = self._arrays.get(number)
            if array is not None:
                self._arrays.move_to_end(number)
            return array

    def keep(self, number: int, array: NDArray[Any]) -> NDArray[Any]:
        """Keep a copy of an array, and evict others to make room.

        Returns:
            The copy, read-only, which stays valid after it was evicted; or the array itself, if it is larger than all
            the room, or all the others are in use.
        """
        if array.nbytes > self._arena.num_bytes:
            return array
        with _lock:
            while (block := self._arena.take(array.nbytes)) is None:
                if not self._arrays:
                    return array
                self._arrays.popitem(last=False)
        copy = block.copy_of(array)
        with _lock:
            self._arrays[number] = copy
            self._arrays.move_to_end(number)
        return copy


class Arena:
    """One block of memory, handed out in smaller ones: its size is fixed, whatever their sizes and lifetimes.

    A block is taken from the smallest hole that is large enough, and becomes a hole again when the last array over it
    is gone; adjacent holes are merged. Source: best fit with coalescing, Knuth, TAOCP 1, section 2.5.

    Its methods are for one thread at a time, which `Ram`'s lock sees to; arrays may go out of use in any.

    Args:
        num_bytes: The size; memory is used only as it is first written to.

    Attributes:
        num_bytes: The size of the largest block that there can be: as given, rounded down to whole grains.

    Raises:
        MemoryError: The machine has less in all.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):  # which Linux would promise
            raise MemoryError
        self.num_bytes = num_bytes // GRAIN * GRAIN
        self.memory = np.empty(self.num_bytes, np.uint8)
        self.returned: deque[tuple[int, int]] = deque()  # start and size of blocks that are gone
        self._holes: list[tuple[int, int]] = []  # size and start, sorted
        self._size_from: dict[int, int] = {}  # start of a hole -> its size
        self._start_to: dict[int, int] = {}  # end of a hole -> its start
        self._add(0, self.num_bytes)

    def take(self, num_bytes: int) -> Block | None:
        """A block of this size; None if no hole is large enough now."""
        while self.returned:
            self._give_back(*self.returned.popleft())
        size = max(1, -(-num_bytes // GRAIN)) * GRAIN
        at = bisect_left(self._holes, (size, 0))
        if at == len(self._holes):
            return None
        hole_size, start = self._holes[at]
        self._remove(start)
        self._add(start + size, hole_size - size)
        return Block(self, start, size)

    def _give_back(self, start: int, size: int) -> None:
        end = start + size
        if end in self._size_from:
            end += self._remove(end)
        if start in self._start_to:
            start = self._start_to[start]
            self._remove(start)
        self._add(start, end - start)

    def _add(self, start: int, size: int) -> None:
        if size:
            insort(self._holes, (size, start))
            self._size_from[start] = size
            self._start_to[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._size_from.pop(start)
        del self._start_to[start + size]
        del self._holes[bisect_left(self._holes, (size, start))]
        return size


class Block:
    """A block of an arena; the arrays over it keep it alive, and it is a hole after the last one."""

    __slots__ = ("_arena", "_size", "_start")

    def __init__(self, arena: Arena, start: int, size: int) -> None:
        self._arena = arena
        self._start = start
        self._size = size

    @property
    def __array_interface__(self) -> dict[str, Any]:
        is_readonly = True
        address = self._arena.memory.__array_interface__["data"][0] + self._start
        return {"version": 3, "shape": (self._size,), "typestr": "|u1", "data": (address, is_readonly)}

    def __del__(self) -> None:
        self._arena.returned.append((self._start, self._size))

    def copy_of(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of an array that fits into the block; read-only."""
        room = self._arena.memory[self._start : self._start + array.nbytes]
        room.view(array.dtype).reshape(array.shape)[...] = array
        return np.asarray(self)[: array.nbytes].view(array.dtype).reshape(array.shape)
