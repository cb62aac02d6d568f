"""Frames of utterances, from the fastest place that has them: this process's memory, or mapped shards."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.ram import Ram
from featcache.loader.readahead import Readahead
from featcache.loader.shards import Shards
from featcache.store.index import Index
from featcache.store.version import Version

__all__ = ["Reader", "cut"]


class Reader:
    """Reads the utterances of a version by their positions in its index.

    Args:
        version: whose.
        index: of its items.
        shards: that hold them.
        ram: bytes of memory for hot utterances; None keeps none.

    Raises:
        ArgumentError: the machine has not so much memory.
    """

    def __init__(self, version: Version, index: Index, shards: Shards, ram: int | None) -> None:
        self._index = index
        self._shards = shards
        self._readahead = Readahead()
        self._ram: Ram | None = None
        if ram is not None:
            num_bytes = int(index.num_frames.sum()) * math.prod(version.info.spec.item_shape) * version.dtype.itemsize
            self._ram = Ram(ram, len(index), num_bytes)

    def whole(self, position: int) -> NDArray[Any]:
        """All frames of an utterance, `[frames, *item_shape]`; read-only.

        Raises:
            DamagedError: the shard is not what was written.
        """
        if self._ram is None:
            return self._mapped(position)
        kept = self._ram.get(position)
        return self._ram.keep(position, self._mapped(position)) if kept is None else kept

    def parts(
        self, positions: NDArray[np.int64], firsts: NDArray[np.int64] | None, counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """Frames of several utterances, `counts` of each from `firsts` on, or from its beginning; read-only.

        Raises:
            DamagedError: a shard is not what was written.
        """
        if self._ram is not None:
            return cut(self._all_kept(self._ram, positions.tolist()), firsts, counts)
        begins = self._index.first_frame[positions]
        if firsts is not None:
            begins = begins + firsts
        return self._shards.parts(self._index.shard[positions].tolist(), begins.tolist(), counts.tolist())

    def reading(self, parts: list[NDArray[Any]]) -> AbstractContextManager[None]:
        """What such parts are to be read within: where they are on a disk, it is asked for all of them at once."""
        return self._readahead.over(parts) if self._ram is None else nullcontext()

    def _all_kept(self, ram: Ram, positions: list[int]) -> list[NDArray[Any]]:
        """All frames of several utterances, from memory; those that were not there are there now, if they fit."""
        kept = {position: ram.get(position) for position in positions}
        missing = {position: self._mapped(position) for position, frames in kept.items() if frames is None}
        with self._readahead.over(missing.values()):
            there = {position: ram.keep(position, frames) for position, frames in missing.items()}
        there |= {position: frames for position, frames in kept.items() if frames is not None}
        return [there[position] for position in positions]

    def _mapped(self, position: int) -> NDArray[Any]:
        index = self._index
        return self._shards.frames(
            int(index.shard[position]), int(index.first_frame[position]), int(index.num_frames[position])
        )


def cut(wholes: list[NDArray[Any]], firsts: NDArray[np.int64] | None, counts: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Of all frames of several utterances, `counts` of each from `firsts` on, or from its beginning."""
    begins = [0] * len(wholes) if firsts is None else firsts.tolist()
    return [frames[first : first + n] for frames, first, n in zip(wholes, begins, counts.tolist(), strict=True)]
