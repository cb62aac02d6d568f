"""One track of a version, read as a cache of its own: another rate of a codec's codes, or the
scales that belong to them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.loader.cache import Cache
from featcache.loader.shards import Shards
from featcache.spec import FeatureSpec
from featcache.version.index import Index
from featcache.version.version import Version


class TrackCache(Cache):
    """The utterances of a cache, with the entries of one of its tracks besides the main one.

    Everything that a `Cache` does, it does with these entries: items, batches, spans of
    seconds, datasets and loaders. With `check`, the track's array of a whole shard is
    compared with its checksum, once.

    Args:
        cache: The opened cache.
        name: The track's name, one of `cache.spec.tracks`.

    Raises:
        ArgumentError: There is no such track.
    """

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache, self._name = cache, name
        self._spec = FeatureSpec.of(cache.spec.sample_rate, cache.spec.track(name))
        index = _TrackIndex(cache, name)
        super().__init__(cache.version, check=cache.check, index=cast(Index, index))
        self._shards = _TrackShards(cache.version, self.index, name, check=cache.check)

    def __reduce__(self) -> tuple[Any, ...]:
        return TrackCache, (self._cache, self._name)

    @property
    def spec(self) -> FeatureSpec:
        """The description of the track's entries."""
        return self._spec

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """The dtype of the entries, on disk and when they are read."""
        return np.dtype(self._spec.dtype)


class _TrackIndex:
    """The index of a cache, with the places of a track's entries instead of frames."""

    def __init__(self, cache: Cache, name: str) -> None:
        index = cache.index
        self.ids, self.shards, self.shard, self.item = (
            index.ids,
            index.shards,
            index.shard,
            index.item,
        )
        self.find, self.find_one = index.find, index.find_one
        shard_of, item_of = np.asarray(index.shard), np.asarray(index.item)
        self.first_frame = np.zeros(len(index), np.int64)
        self.num_frames = np.zeros(len(index), np.int64)
        for number in np.unique(shard_of).tolist():
            positions = np.flatnonzero(shard_of == number)
            offsets = cache.version.shard(index.shards[number]).table.offsets(f"side_{name}")
            items = item_of[positions]
            self.first_frame[positions] = offsets[items]
            self.num_frames[positions] = offsets[items + 1] - offsets[items]

    def __len__(self) -> int:
        return len(self.ids)


class _TrackShards(Shards):
    """The shards of a version, of which one track is read."""

    def __init__(self, version: Version, index: Index, name: str, check: bool) -> None:
        super().__init__(version, index, check=check)
        self._name = name
        self._compared: set[int] = set()
        """The numbers of the shards whose arrays have been compared with their checksums."""

    def _open(self, number: int) -> NDArray[Any]:
        return self._open_side(self._name, self._shard(number), check=False).entries

    def load_checked(self, position: int, frames: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Copy an utterance's entries to the beginning of `out`, from an array of the shard
        that has been compared with its checksum."""
        number = int(self.index.shard[position])
        if number not in self._compared:
            self._open_side(self._name, self._shard(number), check=True)
            self._compared.add(number)
        loaded = out[: len(frames)]
        loaded[...] = frames
        return loaded
