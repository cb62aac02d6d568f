"""Hot utterances in this process's memory, within a limit: the least recently used are evicted first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import Any

from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.loader.arena import GRAIN, Arena

__all__ = ["Ram"]

_OVERHEAD = 512
"""Bytes that keeping an array takes beside its values."""

# One for all, as no one holds it for long; nobody else may hold it while a process forks, or the child never gets it.
_lock = threading.RLock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Ram:
    """Arrays by number, at most so many bytes of them; safe to use from several threads.

    A forked child goes on with what its parent had, and from then on keeps its own.

    Args:
        limit: bytes, all included.
        num_arrays: that there are to choose from.
        num_bytes: of all of them.

    Raises:
        ArgumentError: the machine has not so much memory.
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
        """The array of that number, read-only, which is now the last to go; None where it is not kept."""
        with _lock:
            array = self._arrays.get(number)
            if array is not None:
                self._arrays.move_to_end(number)
            return array

    def keep(self, number: int, array: NDArray[Any]) -> NDArray[Any]:
        """Keep a copy of an array, and let go of others for it.

        Returns:
            The copy, read-only, which is valid also after it was let go; or the array itself, where it is larger than
            there is room, or all the others are in use.
        """
        if array.nbytes > self._arena.num_bytes:
            return array
        with _lock:
            while (piece := self._arena.take(array.nbytes)) is None:
                if not self._arrays:
                    return array
                self._arrays.popitem(last=False)
        copy = piece.holding(array)
        with _lock:
            self._arrays[number] = copy
            self._arrays.move_to_end(number)
        return copy
