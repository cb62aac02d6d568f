"""An opened corpus: the versions of its parts as one sequence. A part is opened when something of it is first read.

How many utterances each part has, and how long the longest is, `corpus.json` says; so a hundred parts are opened in a
moment, and take no memory until they are looked at. A position counts through all parts, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, StoreError, listing
from featcache.loader.buffers import Buffers, Readahead
from featcache.loader.cache import Cache
from featcache.loader.display import facts_of
from featcache.loader.parts import OpenPart, Parts, PartsColumn, PartsIds
from featcache.loader.tiers import Tiers
from featcache.storage.location import Location
from featcache.store.index import Index
from featcache.store.ledger import Failure, latest_failures
from featcache.store.version import Version
from featcache.store.version_info import VersionInfo
from featcache.strings import Strings

if TYPE_CHECKING:
    from featcache.loader.object_shards import ToFetch

__all__ = ["Corpus"]


class _Index:
    """Where utterances are, as far as a `Cache` and a dataset need it; see `featcache.store.index.Index`."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.ids = PartsIds(parts)
        self.num_frames = PartsColumn(parts, np.int64, lambda number: parts.cache(number).index.num_frames)
        self.shard = PartsColumn(parts, np.uint32, self._shards_of)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, ids: Strings | PartsIds) -> NDArray[np.int64]:
        """The position of each id, int64 `[n]`, in the first part that has it; -1 for those that are nowhere.

        The ids of another corpus are looked for in the parts of the same names.
        """
        if isinstance(ids, PartsIds):
            return self._find_by_part(ids)
        positions = np.full(len(ids), -1, np.int64)
        for number, start in enumerate(self.parts.starts[:-1].tolist()):
            left = np.flatnonzero(positions < 0)
            if not len(left):
                break
            found = self.parts.cache(number).index.find(ids.take(left))
            positions[left] = np.where(found < 0, -1, found + start)
        return positions

    def find_one(self, id_: str) -> int:
        """The position of an id in the first part that has it, -1 if none has."""
        for number, start in enumerate(self.parts.starts[:-1].tolist()):
            if (position := self.parts.cache(number).index.find_one(id_)) >= 0:
                return int(start) + position
        return -1

    def _find_by_part(self, ids: PartsIds) -> NDArray[np.int64]:
        numbers = {part.name: number for number, part in enumerate(self.parts.opened)}
        found = [np.empty(0, np.int64)]
        for other, part in enumerate(ids.parts.opened):
            wanted = ids.parts.cache(other).ids
            if (number := numbers.get(part.name)) is None:
                found.append(np.full(len(wanted), -1, np.int64))
                continue
            inside = self.parts.cache(number).index.find(wanted)
            found.append(np.where(inside < 0, -1, inside + self.parts.starts[number]))
        return np.concatenate(found)

    def _shards_of(self, number: int) -> NDArray[np.uint32]:
        return self.parts.cache(number).index.shard + np.uint32(self.parts.shard_starts[number])


class _Readers:
    """Reads from the parts that have the utterances: what `Shards` does, by positions in the corpus."""

    def __init__(self, parts: Parts, are_mapped: bool) -> None:
        self._parts = parts
        self._readahead = Readahead() if are_mapped else None

    def utterance(self, position: int) -> NDArray[Any]:
        """As `Shards.utterance`; the others likewise."""
        cache, inside = self._at(position)
        return cache._reader.utterance(inside)

    def load(self, position: int, out: NDArray[Any]) -> NDArray[Any]:
        """All frames of an utterance, read at once."""
        cache, inside = self._at(position)
        return cache._reader.load(inside, out)

    def frames(
        self, positions: NDArray[np.int64], firsts: NDArray[np.int64] | None, counts: NDArray[np.int64]
    ) -> list[NDArray[Any]]:
        """Some frames of several utterances."""
        found: list[Any] = [None] * len(positions)
        for number, where, inside in self._parts.split(positions):
            begins = None if firsts is None else firsts[where]
            frames = self._parts.cache(number)._reader.frames(inside, begins, counts[where])
            for at, one in zip(where.tolist(), frames, strict=True):
                found[at] = one
        return found

    @contextmanager
    def requesting(self, positions: NDArray[np.int64]) -> Iterator[None]:
        """The context to load these utterances in."""
        with ExitStack() as requested:
            for number, _, inside in self._parts.split(positions):
                requested.enter_context(self._parts.cache(number)._reader.requesting(inside))
            yield

    def to_fetch(self, positions: NDArray[np.int64]) -> dict[ToFetch, int]:
        """The shards that are copied before these utterances are read, of all parts."""
        wanted: dict[ToFetch, int] = {}
        for number, _, inside in self._parts.split(positions):
            wanted |= self._parts.cache(number)._reader.to_fetch(inside)
        return wanted

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """The context to read such arrays in."""
        return nullcontext() if self._readahead is None else self._readahead.over(arrays)

    def verify(self, position: int, frames: NDArray[Any]) -> None:
        """Compare all frames of an utterance with their checksum."""
        cache, inside = self._at(position)
        cache._shards.verify(inside, frames)

    def quantization(self, position: int) -> NDArray[np.float32]:
        """Scale and offset of an utterance."""
        cache, inside = self._at(position)
        return cache._shards.quantization(inside)

    def side(self, name: str, position: int) -> NDArray[Any]:
        """An utterance's entries of a side array."""
        cache, inside = self._at(position)
        return cache._shards.side(name, inside)

    def range(self, shard: int, first: int, count: int) -> NDArray[Any]:
        """Frames of a shard, by its number among those of all parts."""
        number = int(np.searchsorted(self._parts.shard_starts, shard, "right")) - 1
        return self._parts.cache(number)._shards.range(shard - int(self._parts.shard_starts[number]), first, count)

    def _at(self, position: int) -> tuple[Cache, int]:
        number, inside = self._parts.locate(position)
        return self._parts.cache(number), inside


class Corpus(Cache):
    """The utterances of a corpus: those of all its parts, one part after the other, as they were when it was opened.

    It is used as a `Cache` is. An utterance also has a position within its part: `corpus["train-07", 3]` is the fourth
    one of that part, and `corpus["train-07", "utt-1"]` the one of that id. An id alone is that of the first part that
    has it, for which parts are opened one after another until it is found. `corpus.part("train-07")` is a `Cache`.

    Lengths and ids are arrays of which only those parts are read that are looked at; `numpy.asarray(corpus.lengths)` is
    one of all parts. A corpus pickled into another process has the same utterances in the same order.

    Args:
        path: The folder of the corpus, or its URL.
        info: What the version is, of which each part has one.
        parts: The parts that have it, in their order: at least one.
        check, tiers: As for `Cache`.
    """

    def __init__(
        self,
        path: Location,
        info: VersionInfo,
        parts: Sequence[OpenPart],
        *,
        check: bool = False,
        tiers: Tiers | None = None,
    ) -> None:
        self.version = Version(path / parts[0].path.name, info)  # for messages: there is no such folder
        self.check = check
        self._path, self._tiers = path, tiers
        self._parts = Parts(parts, info.fingerprint, check, tiers)
        self.index = cast(Index, _Index(self._parts))  # as far as reading needs one
        are_mapped = isinstance(path, Path) and (tiers is None or tiers.ram is None)
        self._reader = self._shards = _Readers(self._parts, are_mapped)
        self._buffers = Buffers()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._path, self.version.info, self._parts.opened, self.check, self._tiers)

    def __getitem__(self, key: Any) -> NDArray[Any]:
        return self.item(key)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of frames of each utterance, as an array of which only those parts are read that are looked at."""
        return self.index.num_frames

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in their order."""
        return [part.name for part in self._parts.opened]

    def part(self, name: str) -> Cache:
        """The version of one part, by the part's name.

        Raises:
            StoreError: There is no such part, or it has changed since the corpus was opened.
        """
        return self._parts.cache(self._number(name))

    def start_of(self, name: str) -> int:
        """The position of a part's first utterance, by the part's name."""
        return int(self._parts.starts[self._number(name)])

    def locate(self, position: int) -> tuple[str, int]:
        """The name of the part that has a position, and the position in it."""
        number, inside = self._parts.locate(self._position(position))
        return self._parts.opened[number].name, inside

    def _facts(self) -> dict[str, str]:
        frames = sum(part.known.frames for part in self._parts.opened)
        return {"parts": f"{len(self._parts):,}"} | facts_of(self.spec, self.version.dtype, len(self), frames)

    @cached_property
    def _failures(self) -> dict[str, Failure]:
        found: dict[str, Failure] = {}
        for number in range(len(self._parts)):
            found |= latest_failures(self._parts.cache(number).version)
        return found

    def _number(self, name: str) -> int:
        if name not in self.parts:
            raise StoreError(f"{self._path}: there is no part {name!r}; there are {listing(self.parts)}")
        return self.parts.index(name)

    def _position(self, key: Any) -> int:
        if not isinstance(key, tuple):
            return super()._position(key)
        if len(key) != 2 or not isinstance(key[0], str):
            raise ArgumentError(f"{key!r}: give the name of a part, and an id or a position in it")
        number = self._number(key[0])
        return int(self._parts.starts[number]) + self._parts.cache(number)._position(key[1])


def _reopen(path: Location, info: VersionInfo, parts: Sequence[OpenPart], check: bool, tiers: Tiers | None) -> Corpus:
    return Corpus(path, info, parts, check=check, tiers=tiers)
