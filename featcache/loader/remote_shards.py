"""A version's shards that are far from this process: read from copies nearer by, or asked of an object store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, DamagedError
from featcache.format.shard import Frames
from featcache.loader.local_copies import LocalCopies, LocalCopy, Tiers, blaming_the_copy
from featcache.loader.shards import Shards
from featcache.storage.base import in_parallel
from featcache.storage.directory import Directory
from featcache.version.index import Index
from featcache.version.version import Version


def open_shards(version: Version, index: Index, check: bool, tiers: Tiers | None) -> Shards:
    """A version's shards, with their copies.

    Raises:
        ArgumentError: The version is in an object store, and there is room for less than a shard.
    """
    copies = None if tiers is None else LocalCopies(version, index.shards, [*tiers.places(version)])
    if isinstance(version.path, Path):
        return _CopiedShards(version, index, check, copies)
    shards = ObjectShards(version, index, check, copies)
    most = int(shards.sizes.max(initial=0))
    if copies is not None and copies.room is not None and copies.room < most:
        setting = " and ".join(place.setting for place in copies.places)
        raise ArgumentError(
            f"{setting} is {copies.room:,} bytes: the largest shard of {version.path} has {most:,}, and "
            f"shards are copied whole: give more, or no {setting.replace('copy_limit', 'copy_to')}="
        )
    return shards


class _CopiedShards(Shards):
    """The shards of a version, in copies as soon as they are complete; `copies` makes them, None for none."""

    def __init__(self, version: Version, index: Index, check: bool, copies: LocalCopies | None) -> None:
        super().__init__(version, index, check=check)
        self.copies = copies
        self._copied: dict[int, LocalCopy] = {}

    def _slices(self, shards: list[int], firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        if self.copies is not None and self.copies.has_news:
            for copy in self.copies.collect():  # the thread that makes them changes nothing of this itself
                self._features[copy.number] = copy.features
                self._copied[copy.number] = copy
                self._files.pop(copy.number, None)
        return super()._slices(shards, firsts, counts)

    def _open(self, number: int) -> NDArray[Any]:
        features = super()._open(number)
        if self.copies is not None:
            self.copies.want(number)
        return features

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        copy = self._copied.get(number)
        if copy is not None and copy.path is None:  # in this process's memory
            out[...] = copy.features[first : first + len(out)]
            return
        with nullcontext() if copy is None else blaming_the_copy():
            super()._read_into(out, number, first, frames)

    def _open_file(self, number: int) -> Frames:
        copy = self._copied.get(number)
        if copy is None or copy.path is None:
            return super()._open_file(number)
        opened = Directory(copy.path.parent).open(copy.path.name, None)
        return Frames(opened, copy.features.shape, copy.features.dtype, str(copy.path), None)

    def _not_as_written(self, number: int, id_: str) -> DamagedError:
        copy = self._copied.get(number)
        if copy is None:
            return super()._not_as_written(number, id_)
        where = copy.path or "memory"
        return DamagedError(f"{id_}: damaged: its features in {where} are not what was written; remove this copy")


@dataclass(frozen=True)
class ToFetch:
    """A shard that is to be copied from an object store."""

    shards: ObjectShards
    number: int
    """Its number in the index."""
    copies: LocalCopies

    @property
    def num_bytes(self) -> int:
        """The bytes of its features, as far as the index tells."""
        return int(self.shards.sizes[self.number])

    def hold(self) -> Callable[[], None] | None:
        """Copy it, and keep the copy until the function is called that is returned; see `LocalCopies.hold`."""
        return self.copies.hold(self.number, self.shards._chunk(self.number))


class ObjectShards(_CopiedShards):
    """The frames and side arrays of a version's utterances in an object store. Safe to use from several threads.

    What a batch takes of a shard is asked for at once, neighbours in one request, and of all its shards side by side.
    Nothing of features is kept in memory.

    Args:
        version, index, check: As for `Shards`.
        copies: Copies whole shards before they are read; None to read ranges.
    """

    def __init__(self, version: Version, index: Index, check: bool, copies: LocalCopies | None) -> None:
        super().__init__(version, index, check, copies)
        self._chunks: dict[int, Frames] = {}

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

    def to_fetch(self, positions: NDArray[np.int64]) -> dict[ToFetch, int]:
        """The shards that are copied to read these utterances, in the order of these, each with how many there are."""
        if self.copies is None:
            return {}
        numbers, firsts, counts = np.unique(self.index.shard[positions], return_index=True, return_counts=True)
        order = np.argsort(firsts)
        found = zip(numbers[order].tolist(), counts[order].tolist(), strict=True)
        return {ToFetch(self, number, self.copies): count for number, count in found}

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

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        out[...] = frames

    def _of_shard(self, number: int, firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        chunk = self._chunk(number)
        chunk.require_within(firsts, counts)
        copy = None if self.copies is None else self.copies.features(number, chunk, sum(counts))
        if copy is None:
            self._copied.pop(number, None)
            return chunk.read_ranges(firsts, counts)
        self._copied[number] = copy
        return [copy.features[first : first + count] for first, count in zip(firsts, counts, strict=True)]

    def _chunk(self, number: int) -> Frames:
        chunk = self._chunks.get(number)
        if chunk is None:
            shard = self._shard(number)
            opened = shard.open_features()
            self._check_form(shard, opened.shape, opened.dtype)
            chunk = self._chunks.setdefault(number, opened)
        return chunk
