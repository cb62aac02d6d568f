"""The other tracks of a version: another rate of a codec's codes, or the scales that
belong to them."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.shards import Shards
from featcache.version.index import Index
from featcache.version.join import by_shard
from featcache.version.version import Version


class TrackShards(Shards):
    """The arrays of one track in a version's shards."""

    def __init__(self, version: Version, index: Index, name: str, check: bool) -> None:
        super().__init__(version, _index_of_track(version, index, name), check=check)
        self._name = name
        self._compared: set[int] = set()
        """The numbers of the shards whose arrays were compared with their checksums."""

    def _open(self, number: int) -> NDArray[Any]:
        return self._open_side(self._name, self._shard(number), check=False).entries

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        out[...] = frames

    def load_checked(self, position: int, frames: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Copy an utterance's entries, after comparing the shard's array with its checksum."""
        number = int(self.index.shard[position])
        if number not in self._compared:
            self._open_side(self._name, self._shard(number), check=True)
            self._compared.add(number)
        loaded = out[: len(frames)]
        loaded[...] = frames
        return loaded


def _index_of_track(version: Version, index: Index, name: str) -> Index:
    """Return the index with the places of a track's entries."""
    of_track = copy(index)
    of_track.first_frame, of_track.num_frames = np.zeros((2, len(index)), np.int64)
    for positions, shard, items in by_shard(version, index, np.arange(len(index))):
        offsets = shard.table.offsets(f"side_{name}")
        of_track.first_frame[positions] = offsets[items]
        of_track.num_frames[positions] = offsets[items + 1] - offsets[items]
    return of_track
