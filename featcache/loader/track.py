"""The other tracks of a version: another rate of a codec's codes, or the scales that
belong to them."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.shards import Shards
from featcache.version.index import Index
from featcache.version.version import Version


def index_of_track(version: Version, index: Index, name: str) -> Index:
    """Return the index with the places of a track's entries."""
    shard_of, item_of = np.asarray(index.shard), np.asarray(index.item)
    of_track = copy(index)
    of_track.first_frame = np.zeros(len(index), np.int64)
    of_track.num_frames = np.zeros(len(index), np.int64)
    for number in np.unique(shard_of).tolist():
        positions = np.flatnonzero(shard_of == number)
        offsets = version.shard(index.shards[number]).table.offsets(f"side_{name}")
        items = item_of[positions]
        of_track.first_frame[positions] = offsets[items]
        of_track.num_frames[positions] = offsets[items + 1] - offsets[items]
    return of_track


class TrackShards(Shards):
    """The arrays of one track in a version's shards."""

    def __init__(self, version: Version, index: Index, name: str, check: bool) -> None:
        super().__init__(version, index, check=check)
        self._name = name
        self._compared: set[int] = set()
        """The numbers of the shards whose arrays were compared with their checksums."""

    def _open(self, number: int) -> NDArray[Any]:
        return self._open_side(self._name, self._shard(number), check=False).entries

    def load_checked(self, position: int, frames: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Copy an utterance's entries, after comparing the shard's array with its checksum."""
        number = int(self.index.shard[position])
        if number not in self._compared:
            self._open_side(self._name, self._shard(number), check=True)
            self._compared.add(number)
        loaded = out[: len(frames)]
        loaded[...] = frames
        return loaded
