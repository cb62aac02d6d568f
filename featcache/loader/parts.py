"""The parts of an opened corpus, and columns over all of them: a part is opened when something of it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.loader.cache import Cache
from featcache.loader.tiers import Tiers
from featcache.storage.location import Location
from featcache.store.corpus import PartVersion
from featcache.store.documents import parse_object, read_bytes
from featcache.store.version import Version
from featcache.strings import Strings

__all__ = ["OpenPart", "Parts", "PartsColumn", "PartsIds"]


@dataclass(frozen=True)
class OpenPart:
    """A part of a corpus, as it was when the corpus was opened."""

    name: str
    """The name of the part."""
    path: Location
    """The folder of its version."""
    known: PartVersion
    """What is known of the version: it is read with the shards that it had then."""


class Parts:
    """The parts of a corpus by number, and the positions that they have in it. Safe to use from several threads.

    Args:
        parts: The parts, in their order.
        fingerprint: That of the version that all of them hold.
        check, tiers: As for `Cache`; `tiers.ram` is for all parts together.
    """

    def __init__(self, parts: Sequence[OpenPart], fingerprint: str, check: bool, tiers: Tiers | None) -> None:
        self.opened = parts
        self.starts = np.cumsum([0, *(part.known.utterances for part in parts)])
        """The position of each part's first utterance, and the end of the last, int64 `[parts + 1]`."""
        self.shard_starts = np.cumsum([0, *(part.known.shards for part in parts)])
        """The number of each part's first shard among those of all parts, likewise."""
        self._fingerprint, self._check, self._tiers = fingerprint, check, tiers
        self._caches: dict[int, Cache] = {}

    def __len__(self) -> int:
        return len(self.opened)

    def cache(self, number: int) -> Cache:
        """The version of a part, opened now if it was not.

        Raises:
            StoreError: It has changed since the corpus was opened, so that its positions are others.
            DamagedError: It is damaged.
        """
        if number not in self._caches:
            self._caches.setdefault(number, self._open(number))  # or another thread's
        return self._caches[number]

    def locate(self, position: int) -> tuple[int, int]:
        """The number of the part that has a position, and the position in it."""
        number = int(np.searchsorted(self.starts, position, "right")) - 1
        return number, position - int(self.starts[number])

    def split(self, positions: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """For each part that has some of the positions: its number, which these are, and the positions in the part."""
        numbers = np.searchsorted(self.starts, positions, "right") - 1
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            yield number, at, positions[at] - self.starts[number]

    def _open(self, number: int) -> Cache:
        part, tiers = self.opened[number], self._tiers
        version = Version.open(part.path)
        if version.info.fingerprint != self._fingerprint:
            raise StoreError(f"{part.path}: has another fingerprint than the version of the same name in other parts")
        names = part.known.shards_of(version)
        if names is None:
            names = _shards_then(version, part.known.index)
        else:
            version.take_for_whole(names)  # they were when the index was built
        if tiers is not None and tiers.ram is not None:
            share = part.known.utterances / max(1, int(self.starts[-1]))
            tiers = replace(tiers, ram=max(1, int(tiers.ram * share)))
        cache = Cache(version, check=self._check, shards=names, tiers=tiers)
        if len(cache) != part.known.utterances or len(cache.index.shards) != part.known.shards:
            raise StoreError(
                f"{part.path}: is not what corpus.json says: `featcache index` of the corpus records it anew"
            )
        return cache


def _shards_then(version: Version, index: str) -> list[str]:
    """The names of the shards of an older index, which is kept for a while."""
    path = version.path / "index" / index / "index.json"
    try:
        return [str(name) for name in parse_object(read_bytes(path), path)["shards"]]
    except (OSError, StoreError, KeyError, TypeError) as error:
        raise StoreError(f"{version.path}: has changed since the corpus was opened: open it again") from error


class PartsColumn(NDArrayOperatorsMixin):
    """A number for each utterance of a corpus, indexed and compared as an array is: of those that are looked at, their
    parts are read.

    Args:
        parts: The parts.
        dtype: The dtype of the numbers.
        values: The numbers of the utterances of a part, by its number.
        limit: What none of the numbers is more than.
    """

    def __init__(
        self, parts: Parts, dtype: type[np.generic], values: Callable[[int], NDArray[Any]], limit: int = 2**62
    ) -> None:
        self.parts, self.dtype, self.of_part, self._limit = parts, np.dtype(dtype), values, limit
        self.shape = (int(parts.starts[-1]),)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: Any) -> Any:
        chosen = _positions(at, len(self))
        positions = np.asarray(chosen)
        values = np.empty(positions.size, self.dtype)
        for number, where, inside in self.parts.split(positions.ravel()):
            values[where] = self.of_part(number)[inside]
        return values.reshape(positions.shape)[... if isinstance(chosen, np.ndarray) else ()]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        arrays = (np.asarray(each) if isinstance(each, PartsColumn) else each for each in inputs)
        return getattr(ufunc, method)(*arrays, **settings)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        numbers = range(len(self.parts))
        whole = np.concatenate([np.empty(0, self.dtype), *(self.of_part(number) for number in numbers)])
        return whole.astype(self.dtype if dtype is None else dtype, copy=False)

    def at_most(self, limit: int) -> PartsColumn:
        """The numbers, none of which is more than a limit."""
        return PartsColumn(self.parts, self.dtype.type, lambda number: np.minimum(self.of_part(number), limit), limit)

    @property
    def most(self) -> int:
        """Of lengths, the largest, by what is known of the parts."""
        return min(self._limit, max((part.known.longest for part in self.parts.opened), default=0))

    def digest(self) -> str:
        """Tells the utterances of a corpus, their order and the limit from others."""
        known = [f"{part.name}/{part.known.index}/{part.known.utterances}" for part in self.parts.opened]
        return hashlib.sha256("\n".join([*known, str(self._limit)]).encode()).hexdigest()


def _positions(at: Any, count: int) -> Any:
    """The positions that an index of numpy's chooses of so many; those of a batch without an array of all."""
    positions = np.asarray(at) if isinstance(at, int | np.integer | np.ndarray) else None
    if positions is None or positions.dtype.kind not in "iu":
        return np.arange(count)[at]
    if positions.size and not -count <= positions.min() <= positions.max() < count:
        raise IndexError(f"index {positions.max()} is out of bounds: there are {count}")
    return positions.astype(np.int64) % max(1, count)


class PartsIds(Sequence[str]):
    """The ids of all utterances, as `Strings`: of those that are looked at, their parts are read."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return int(self.parts.starts[-1])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return self.texts(np.arange(*at.indices(len(self))))
        number, inside = self.parts.locate(range(len(self))[at])
        return self.parts.cache(number).ids[inside]

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self.parts)):
            yield from self.parts.cache(number).ids

    def __contains__(self, id_: object) -> bool:
        caches = map(self.parts.cache, range(len(self.parts)))
        return isinstance(id_, str) and any(id_ in cache for cache in caches)

    def texts(self, positions: NDArray[Any]) -> list[str]:
        """The ids at some positions."""
        found = [""] * len(positions)
        for number, where, inside in self.parts.split(positions):
            for at, text in zip(where.tolist(), self.parts.cache(number).ids.texts(inside), strict=True):
                found[at] = text
        return found

    def take(self, positions: NDArray[Any]) -> Strings:
        """The ids at some positions, in flat arrays."""
        return Strings.of(self.texts(positions))
