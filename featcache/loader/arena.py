"""One block of memory, handed out in pieces: its size is fixed, whatever the pieces' sizes and lifetimes.

`malloc` has no such limit. Arrays of 5 kB to 1 MB, freed in random order by eight threads, kept 2.4 times the
memory that they had at any time, and by one thread 1.2 times.

A piece is taken from the smallest hole that is large enough, and becomes a hole again when the last array over it is
gone; adjacent holes are merged. Source: best fit with coalescing, Knuth, TAOCP 1, section 2.5.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["GRAIN", "Arena"]

GRAIN = 256
"""Bytes that pieces are multiples of: no hole is too small for anything."""


class Arena:
    """Memory for arrays. Its methods are for one thread at a time, which `Ram`'s lock sees to; arrays may go out of use
    in any.

    Args:
        num_bytes: that there are; they take memory as they are first written to.

    Attributes:
        num_bytes: of the largest piece that there can be: as given, rounded down to whole grains.

    Raises:
        MemoryError: the machine has less in all.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):  # which Linux would promise
            raise MemoryError
        self.num_bytes = num_bytes // GRAIN * GRAIN
        self.memory = np.empty(self.num_bytes, np.uint8)
        self.returned: deque[tuple[int, int]] = deque()  # by pieces that are gone: start and size
        self._holes: list[tuple[int, int]] = []  # size and start, sorted
        self._size: dict[int, int] = {}  # of the hole that starts there
        self._start: dict[int, int] = {}  # of the hole that ends there
        self._add(0, self.num_bytes)

    def take(self, num_bytes: int) -> Piece | None:
        """A piece of this size; None where no hole is large enough now."""
        while self.returned:
            self._give_back(*self.returned.popleft())
        size = max(1, -(-num_bytes // GRAIN)) * GRAIN
        at = bisect_left(self._holes, (size, 0))
        if at == len(self._holes):
            return None
        whole, start = self._holes[at]
        self._remove(start)
        self._add(start + size, whole - size)
        return Piece(self, start, size)

    def _give_back(self, start: int, size: int) -> None:
        end = start + size
        if end in self._size:
            end += self._remove(end)
        if start in self._start:
            before = self._start[start]
            self._remove(before)
            start = before
        self._add(start, end - start)

    def _add(self, start: int, size: int) -> None:
        if size:
            insort(self._holes, (size, start))
            self._size[start] = size
            self._start[start + size] = start

    def _remove(self, start: int) -> int:
        size = self._size.pop(start)
        del self._start[start + size]
        del self._holes[bisect_left(self._holes, (size, start))]
        return size


class Piece:
    """A piece of an arena; the arrays over it keep it alive, and it is a hole after the last one."""

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

    def holding(self, array: NDArray[Any]) -> NDArray[Any]:
        """A copy of an array, which fits into the piece; read-only."""
        room = self._arena.memory[self._start : self._start + array.nbytes]
        room.view(array.dtype).reshape(array.shape)[...] = array
        return np.asarray(self)[: array.nbytes].view(array.dtype).reshape(array.shape)
