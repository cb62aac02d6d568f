"""A version's shards in an object store, as training reads them: by ranges of bytes, or from copies on a local disk."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.shards import Shards
from featcache.storage.objects import in_parallel
from featcache.store.chunk_file import Chunk, ChunkObject
from featcache.store.index import Index
from featcache.store.version import Version

if TYPE_CHECKING:
    from featcache.loader.local_copies import LocalCopies

__all__ = ["ObjectShards", "ToFetch", "open_shards"]


def open_shards(version: Version, index: Index, *, check: bool = False) -> Shards:
    """A version's shards, read from where they lie."""
    kind = Shards if isinstance(version.path, Path) else ObjectShards
    return kind(version, index, check=check)


@dataclass(frozen=True)
class ToFetch:
    """A shard that is to be copied from an object store."""

    shards: ObjectShards
    """The shards of its version."""
    number: int
    """Its number in the index."""

    @property
    def num_bytes(self) -> int:
        """The bytes of its features, as far as the index tells."""
        return int(self.shards.sizes[self.number])

    @property
    def copies(self) -> LocalCopies:
        """Makes its copy."""
        assert self.shards._copies is not None
        return self.shards._copies

    def hold(self) -> Callable[[], None] | None:
        """Copy it, and keep the copy until the function is called that is returned; see `LocalCopies.hold`."""
        return self.copies.hold(self.number, self.shards._chunk(self.number))


class ObjectShards(Shards):
    """The frames and side arrays of a version's utterances in an object store. Safe to use from several threads.

    What a batch takes of a shard is asked for at once, neighbours in one request, and of all its shards side by side.
    Nothing of features is kept in memory.

    Args:
        version, index, check: As for `Shards`.
        copies: Copies whole shards before they are read; None to read ranges.
    """

    def __init__(
        self, version: Version, index: Index, *, check: bool = False, copies: LocalCopies | None = None
    ) -> None:
        super().__init__(version, index, check=check, copies=copies)
        self._chunks: dict[int, ChunkObject] = {}
        self._batch = threading.local()

    def range(self, shard: int, first: int, count: int) -> NDArray[Any]:
        """Frames of a shard of one utterance after the other: `[count, *item_shape]`."""
        return np.array(self._slices([shard], [first], [count])[0])

    def load(self, position: int, out: NDArray[Any]) -> NDArray[Any]:
        """All frames of an utterance, copied into the beginning of `out`: a view of that."""
        frames = getattr(self._batch, "frames", {}).get(position)
        if frames is None:
            frames = self.utterance(position)
        out[: len(frames)] = frames
        return out[: len(frames)]

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """The context to read such arrays in: they are in memory, or copied from the store just now."""
        return nullcontext()

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of the features of each shard, as far as the index tells; int64 `[shards]`."""
        frames = np.zeros(len(self.index.shards), np.int64)
        ends = np.asarray(self.index.first_frame) + np.asarray(self.index.num_frames)
        np.maximum.at(frames, np.asarray(self.index.shard), ends)
        return frames * self.version.info.spec.bytes_per_frame

    @contextmanager
    def requesting(self, positions: NDArray[np.int64]) -> Iterator[None]:
        """The context to load these utterances in: they are fetched together."""
        frames = self.frames(positions, None, self.index.num_frames[positions])
        self._batch.frames = dict(zip(positions.tolist(), frames, strict=True))
        try:
            yield
        finally:
            self._batch.frames = {}

    def to_fetch(self, positions: NDArray[np.int64]) -> dict[ToFetch, int]:
        """The shards that are copied to read these utterances, in the order of these, each with how many there are."""
        if self._copies is None:
            return {}
        numbers, firsts, counts = np.unique(self.index.shard[positions], return_index=True, return_counts=True)
        order = np.argsort(firsts)
        return {
            ToFetch(self, number): count
            for number, count in zip(numbers[order].tolist(), counts[order].tolist(), strict=True)
        }

    def _slices(self, shards: list[int], firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        rows: dict[int, list[int]] = defaultdict(list)
        for row, number in enumerate(shards):
            rows[number].append(row)

        def of_shard(number: int) -> list[NDArray[Any]]:
            wanted = [firsts[row] for row in rows[number]], [counts[row] for row in rows[number]]
            return self._of_shard(number, *wanted)

        slices: dict[int, NDArray[Any]] = {}
        for number, found in zip(rows, in_parallel(of_shard, list(rows)), strict=True):
            slices.update(zip(rows[number], found, strict=True))
        return [slices[row] for row in range(len(shards))]

    def _of_shard(self, number: int, firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        chunk = self._chunk(number)
        chunk.check_ends(firsts, counts)
        copy = None if self._copies is None else self._copies.features(number, chunk, sum(counts))
        if copy is None:
            self._copied.pop(number, None)
            return chunk.read_ranges(firsts, counts)
        self._copied[number] = copy
        return [copy.features[first : first + count] for first, count in zip(firsts, counts, strict=True)]

    def _chunk(self, number: int) -> ChunkObject:
        chunk = self._chunks.get(number)
        if chunk is None:
            shard = self._shard(number)
            opened: Chunk = shard.open_features()
            assert isinstance(opened, ChunkObject)
            self._check_form(shard, opened.shape, opened.dtype)
            chunk = self._chunks.setdefault(number, opened)
        return chunk
