"""Reads cold batches in parallel: all reads of a batch are requested before the first is waited for.

Requests cost a little even if everything is in memory, so they are made only while the disk is being read.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from featcache.store.zarr3 import will_need

__all__ = ["Readahead"]

_WARM = 16
"""Batches in a row that read nothing from disk, after which it is not asked any more."""


class Readahead:
    """Asks for what batches are about to read, as long as that comes from a disk."""

    def __init__(self) -> None:
        self._patience = _WARM

    @contextmanager
    def over(self, arrays: Iterable[NDArray[Any]]) -> Iterator[None]:
        """Ask for some mapped arrays, and watch whether reading them, which is done within, takes the disk."""
        before = _disk_reads()
        if self._patience:
            for array in arrays:
                will_need(array)
        yield
        if _disk_reads() != before:
            self._patience = _WARM
        elif self._patience:
            self._patience -= 1


def _disk_reads() -> int:
    """A count that grows with what this thread reads from disks; some file systems count blocks, all count faults."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_inblock + usage.ru_majflt
