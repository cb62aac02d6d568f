"""A version's shards as training reads them: mapped, or read from their files."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError, listing
from featcache.format.shard import Frames, Shard, SideArray
from featcache.spec import LABELS, QUANTIZATION, Ints
from featcache.storage.files import Readahead
from featcache.version.index import Index
from featcache.version.version import Version

if TYPE_CHECKING:
    from featcache.loader.places import LocalCopy

_FILES_OPEN = 128
"""The most open files of shards, unless an eighth of the process's limit is less."""


@dataclass(frozen=True)
class Spans:
    """Some frames of some utterances of a version."""

    positions: Ints
    """The positions of the utterances."""
    firsts: Ints
    """The first frame of each."""
    counts: Ints
    """The number of frames of each."""


class Shards:
    """The frames and side arrays of a version's utterances, in mapped shards. Safe to use
    from several threads.

    If the disk fails while mapped frames are used, the kernel ends the process by SIGBUS.
    `load_checked` and `range` read from the file, and raise an error. Every method that
    reads raises DamagedError if the shard is damaged, and StoreError if it cannot be read.
    With `check`, side arrays are compared with their checksums."""

    def __init__(self, version: Version, index: Index, *, check: bool = False) -> None:
        self.version, self.index, self._check = version, index, check
        # All by the shard's number in the index.
        self._opened: dict[int, Shard] = {}
        self._features: dict[int, NDArray[Any]] = {}
        self._checksums: dict[int, NDArray[np.uint64]] = {}
        self._sides: dict[tuple[str, int], SideArray] = {}
        self._files: dict[int, Frames] = {}
        self._copied: dict[int, LocalCopy] = {}
        self._most_files = max(
            1, min(_FILES_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        )
        self._readahead = Readahead()

    def utterance(self, position: int) -> NDArray[Any]:
        """Map all frames of an utterance, `[frames, *item_shape]`, read-only."""
        shard, first = self._place(position)
        return self._slices([shard], [first], [first + int(self.index.num_frames[position])])[0]

    def _place(self, position: int) -> tuple[int, int]:
        """Return the number of an utterance's shard, and its first frame there."""
        return int(self.index.shard[position]), int(self.index.first_frame[position])

    def frames(self, spans: Spans) -> list[NDArray[Any]]:
        """Map some frames of several utterances, read-only."""
        shards = self.index.shard[spans.positions].tolist()
        firsts = self.index.first_frame[spans.positions] + spans.firsts
        return self._slices(shards, firsts.tolist(), (firsts + spans.counts).tolist())

    def range(self, shard: int, first: int, count: int) -> NDArray[Any]:
        """Read frames of a shard from its file: `[count, *item_shape]`."""
        (frames,) = self._slices([shard], [first], [first + count])
        loaded = np.empty_like(frames)
        self._read_into(loaded, shard, first, frames)
        return loaded

    def load_checked(self, position: int, frames: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
        """Read all frames of an utterance, mapped as `frames`, from the file into the
        beginning of `out`, and compare them with their checksum; once for each shard, also
        its scales and offsets, or labels. Returns the view."""
        shard, first = self._place(position)
        loaded = out[: len(frames)]
        self._read_into(loaded, shard, first, frames)
        if crc32c(loaded) != self._checksum(position, shard):
            raise self._not_as_written(shard, self.index.ids[position])
        return loaded

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """Return the context to read arrays in: from a disk, all are requested before the
        first is read."""
        return self._readahead.over(arrays)

    def side(self, name: str, position: int) -> NDArray[Any]:
        """Return an utterance's entries of a side array, `[entries, *item_shape]`."""
        number = int(self.index.shard[position])
        side = self._sides.get((name, number))
        if side is None:
            side = self._open_side(name, self._shard(number), self._check)
            self._sides[name, number] = side
        return side.item(self._item(position, len(side.offsets) - 1))

    def quantization(self, position: int) -> NDArray[np.float32]:
        """Return scale and offset of an utterance, float32 `[2, *item_shape]`."""
        entries = self.side(QUANTIZATION, position)
        if len(entries) != 1:
            shard = self._shard(int(self.index.shard[position]))
            raise DamagedError(
                f"{shard.folder}: damaged: not one scale and offset for each item",
                shard.store.location,
            )
        scale_and_offset: NDArray[np.float32] = entries[0]
        return scale_and_offset

    def _checksum(self, position: int, number: int) -> int:
        checksums = self._checksums.get(number)
        if checksums is None:
            shard = self._shard(number)
            for side in self.version.info.spec.side:
                if side.name in (QUANTIZATION, LABELS):  # which belong to the values
                    opened = self._open_side(side.name, shard, check=True)
                    self._sides[side.name, number] = opened
            checksums = self._checksums[number] = shard.table["item_crc32c"]
        return int(checksums[self._item(position, len(checksums))])

    def _not_as_written(self, number: int, id_: str) -> DamagedError:
        copy, shard = self._copied.get(number), self._shard(number)
        where = shard.folder if copy is None else copy.path
        what = f"{id_}: damaged: its features in {where} are not what was written"
        if copy is not None:
            return DamagedError(f"{what}; remove this copy")
        return DamagedError(what, shard.store.location)

    def _item(self, position: int, count: int) -> int:
        """Return the number of an utterance's item in its shard, which holds `count`."""
        item = int(self.index.item[position])
        if item >= count:
            shard = self._shard(int(self.index.shard[position]))
            folder = shard.store.location / "index"
            raise DamagedError(
                f"{folder}: damaged: shard {shard.name} has no item {item}: remove this folder"
            )
        return item

    def _slices(self, shards: list[int], firsts: list[int], ends: list[int]) -> list[NDArray[Any]]:
        """Map frames of some shards, each from its first to its end."""
        features = {number: self._map(number) for number in {*shards}}
        places = zip(shards, firsts, ends, strict=True)
        slices = [features[number][first:end] for number, first, end in places]
        if sum(map(len, slices)) < sum(ends) - sum(firsts):
            pairs = zip(shards, ends, strict=True)
            number, end = next(pair for pair in pairs if pair[1] > len(features[pair[0]]))
            shard = self._shard(number)
            raise DamagedError(
                f"{shard.folder}: damaged: it ends before frame {end}", shard.store.location
            )
        return slices

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        """Read frames of a shard from `first` on, mapped as `frames`, from its file."""
        self._file(number).read_into(out, first)

    def _file(self, number: int) -> Frames:
        file = self._files.get(number)
        if file is None:
            file = self._open_file(number)
            if len(self._files) >= self._most_files:
                # Another thread may have removed it.
                with suppress(KeyError, RuntimeError, StopIteration):
                    del self._files[next(iter(self._files))]
            self._files[number] = file
        return file

    def _open_file(self, number: int) -> Frames:
        return self._shard(number).open_features()

    def _shard(self, number: int) -> Shard:
        shard = self._opened.get(number)
        if shard is None:
            shard = self._opened[number] = self.version.shard(self.index.shards[number])
        return shard

    def _map(self, number: int) -> NDArray[Any]:
        features = self._features.get(number)
        if features is None:
            # Another thread may have opened it first.
            features = self._features.setdefault(number, self._open(number))
        return features

    def _open(self, number: int) -> NDArray[Any]:
        return self._shard(number).features

    def _open_side(self, name: str, shard: Shard, check: bool) -> SideArray:
        names = [spec.name for spec in self.version.info.spec.side]
        if name not in names:
            raise StoreError(
                f"{self.version.path}: has no side array {name!r}; it has "
                f"{listing(names) or 'none'}"
            )
        return shard.side(name, check=check)
