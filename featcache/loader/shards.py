"""A version's shards as the loader reads them: opened when first needed; every error names its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError, listing
from featcache.loader.copying import Copier
from featcache.loader.tiers import Tiers
from featcache.spec import QUANTIZATION
from featcache.store import zarr3
from featcache.store.index import Index
from featcache.store.shard import Shard, SideArray
from featcache.store.version import Version

__all__ = ["Shards"]


class Shards:
    """The shards of a version, by their numbers in its index.

    Args:
        version: whose.
        index: of its items.
        check: hold side arrays against their checksums.
        tiers: whether, and where, to copy shards to; they are read from there as soon as they are.
    """

    def __init__(
        self,
        version: Version,
        index: Index,
        *,
        check: bool = False,
        tiers: Tiers = Tiers(),  # noqa: B008 (it is frozen)
    ) -> None:
        self._version = version
        self._index = index
        self._check = check
        self._features: dict[int, NDArray[Any]] = {}
        self._checksums: dict[int, NDArray[np.uint32]] = {}
        self._sides: dict[tuple[str, int], SideArray] = {}
        self._copier: Copier | None = None
        if tiers.copy_to is not None:
            self._copier = Copier(version, self._features, index.shards, tiers.copy_to, tiers.copy_limit)

    def frames(self, shard: int, first: int, count: int) -> NDArray[Any]:
        """Frames of a shard, `[count, *item_shape]`; read-only, nothing is copied.

        Raises:
            DamagedError: the shard is not what was written, or ends before.
        """
        (frames,) = self.parts([shard], [first], [count])
        return frames

    def parts(self, shards: list[int], firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        """What `frames` gives, for a batch: of several shards, or of one several times.

        Raises:
            DamagedError: a shard is not what was written, or ends before.
        """
        if self._copier is not None and self._copier.has_news:
            self._copier.attend()
        maps = {shard: self._map(shard) for shard in set(shards)}
        places = zip(shards, firsts, counts, strict=True)
        parts = [maps[shard][first : first + count] for shard, first, count in places]
        if list(map(len, parts)) != counts:
            at = next(at for at, part in enumerate(parts) if len(part) != counts[at])
            name, end = self._index.shards[shards[at]], firsts[at] + counts[at]
            raise DamagedError(
                f"{self._version.path}: damaged: shard {name} ends before frame {end}", self._version.path
            )
        return parts

    def side(self, name: str, position: int) -> NDArray[Any]:
        """The entries of a side array that an item has, `[entries, *item_shape]`; read-only.

        Raises:
            StoreError: there is no such side array; names those that there are.
            DamagedError: the shard is damaged.
        """
        number = int(self._index.shard[position])
        side = self._sides.get((name, number))
        if side is None:
            side = self._sides[name, number] = self._open_side(name, self._shard(number), self._check)
        return side.item(int(self._index.item[position]))

    def parameters(self, position: int) -> NDArray[np.float32]:
        """Scale and offset of an item whose features are quantised, float32 `[2, *item_shape]`; read-only.

        Raises:
            StoreError: they are not quantised.
            DamagedError: the shard is damaged.
        """
        entries = self.side(QUANTIZATION, position)
        if len(entries) != 1:
            folder = self._shard(int(self._index.shard[position])).folder
            raise DamagedError(f"{folder}: damaged: not one scale and offset for each item", self._version.path)
        parameters: NDArray[np.float32] = entries[0]
        return parameters

    def verify(self, position: int, frames: NDArray[Any]) -> None:
        """Hold all frames of an item against its checksum; and where they are quantised, the scales and offsets of its
        shard against theirs, once.

        Raises:
            DamagedError: they are not what was written.
        """
        number = int(self._index.shard[position])
        shard = self._shard(number)
        if number not in self._checksums:
            if self._version.info.spec.is_quantized:
                self._sides[QUANTIZATION, number] = self._open_side(QUANTIZATION, shard, check=True)
            with self._reading(shard):
                self._checksums[number] = shard.column("crc32c")
        if zarr3.crc32c(frames) != self._checksums[number][self._index.item[position]]:
            copy = self._copier and self._copier.place(number)
            what = (
                f"{self._index.ids[position]}: damaged: its features in {copy or shard.folder} are not what was written"
            )
            raise DamagedError(f"{what}; remove this copy") if copy else DamagedError(what, self._version.path)

    def _shard(self, number: int) -> Shard:
        return self._version.shard(self._index.shards[number])

    def _map(self, number: int) -> NDArray[Any]:
        """A shard's features, opened when they are first needed."""
        features = self._features.get(number)
        if features is None:
            features = self._features.setdefault(number, self._open(number))  # or another thread's, or a copy by now
            if self._copier is not None:
                self._copier.want(number)
        return features

    def _open(self, number: int) -> NDArray[Any]:
        shard = self._shard(number)
        with self._reading(shard):
            features = shard.features
        if (features.shape[1:], features.dtype) != (self._version.info.spec.item_shape, self._version.dtype):
            raise DamagedError(
                f"{shard.folder}: damaged: features are {features.dtype} {list(features.shape)}", self._version.path
            )
        return features

    def _open_side(self, name: str, shard: Shard, check: bool) -> SideArray:
        specs = {spec.name: spec for spec in self._version.info.spec.side}
        if name not in specs:
            there = listing(specs) or "none"
            raise StoreError(f"{self._version.path}: has no side array {name!r}; it has {there}")
        spec = specs[name]
        with self._reading(shard):
            side = shard.side(name, check)
        if (side.entries.shape[1:], side.entries.dtype) != (spec.item_shape, np.dtype(spec.dtype)):
            found = f"{side.entries.dtype} {list(side.entries.shape)}"
            raise DamagedError(f"{shard.folder}: damaged: side array {name} is {found}", self._version.path)
        return side

    @contextmanager
    def _reading(self, shard: Shard) -> Iterator[None]:
        """Errors of the system within become featcache's."""
        try:
            yield
        except OSError as error:
            raise StoreError(f"{error.filename or shard.folder}: cannot be read: {error.strerror}") from error
