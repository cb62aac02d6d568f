"""An opened corpus: the versions of its parts as one sequence. A position counts through
all parts, by their names.

The parts' indexes are mapped when the corpus is opened, and stay apart: a position is
looked up in its part's index."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, FeatcacheWarning, StoreError, counted, listing
from featcache.format.shard import Shard
from featcache.loader.cache import Cache
from featcache.storage.base import in_parallel, open_store
from featcache.storage.location import Location
from featcache.strings import Strings, hash_of
from featcache.version.corpus import gone_parts, read_parts
from featcache.version.index import Index, index_name
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, standing_failures
from featcache.version.selection import version_names
from featcache.version.version import Version
from featcache.version.wanted import find_lacking

if TYPE_CHECKING:
    from featcache.loader.local_copies import Tiers

_FEW = 4096
"""Of so many positions, each is looked up by itself; for more, the columns of all parts
are joined for a moment."""


@dataclass(frozen=True)
class _Part:
    """A part of a corpus, as it was when the corpus was opened."""

    name: str
    version: Version
    index: Index
    start: int = 0
    """The position of its first utterance in the corpus."""


class Corpus(Cache):
    """The utterances of a corpus: those of all its parts, one part after the other, as
    they were when it was opened.

    It is used as a `Cache` is. An utterance also has a position within its part:
    `corpus["train-07", 3]` is the fourth one of that part, and `corpus["train-07",
    "utt-1"]` the one of that id. An id alone is that of the first part that has it.
    `corpus.part("train-07")` is a `Cache`.

    `lengths` is made at the first look, 8 bytes for each utterance; all else stays
    mapped, and is shared by processes. A corpus pickled into another process has the same
    utterances in the same order.

    Args:
        path: The folder of the corpus, or its URL.
        parts: The parts, in their order: at least one.
        check, tiers: As for `Cache`.
    """

    def __init__(
        self,
        path: Location,
        parts: Sequence[_Part],
        check: bool = False,
        tiers: Tiers | None = None,
    ) -> None:
        self._path, self._joined = path, _JoinedIndex(parts)
        first = parts[0].version
        version = _VersionOfParts(open_store(path / first.path.name), first.info)
        super().__init__(version, check=check, index=cast(Index, self._joined), tiers=tiers)

    def __reduce__(self) -> tuple[Any, ...]:
        parts = [(part.name, part.version, part.index.shards) for part in self._joined.parts]
        return _reopen, (self._path, parts, self.check, self._tiers)

    def _facts(self) -> list[str]:
        return [f"{len(self.parts):,} parts", *super()._facts()]

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in their order."""
        return [part.name for part in self._joined.parts]

    def part(self, name: str) -> Cache:
        """The version of one part, by the part's name. Raises StoreError if there is no
        such part."""
        part = self.part_of(name)
        return Cache(part.version, check=self.check, index=part.index, tiers=self._tiers)

    def locate(self, position: int) -> tuple[str, int]:
        """The name of the part that has a position, and the position in it."""
        ((number, inside),) = self._joined.places(np.array([self.position(position)]))
        return self._joined.parts[number].name, inside

    @cached_property
    def _failures(self) -> dict[str, Failure]:
        of_parts = (standing_failures(part.version, part.index) for part in self._joined.parts)
        return {id_: failure for of_part in of_parts for id_, failure in of_part.items()}

    def identity(self) -> tuple[list[Strings], NDArray[np.uint64]]:
        """As in a cache; the names of the parts count too."""
        parts = self._joined.parts
        hashes = [part.index.row_hash ^ np.uint64(hash_of(part.name)) for part in parts]
        return [part.index.ids for part in parts], np.concatenate(hashes)

    def part_of(self, name: str) -> _Part:
        """The part of a name, as it was opened; a StoreError if there is none."""
        if name not in self._joined.by_name:
            raise StoreError(
                f"{self._path}: there is no part {name!r}; there are {listing(self.parts)}"
            )
        return self._joined.by_name[name]

    def position(self, key: Any) -> int:
        """As in a cache; or by the name of a part, and an id or a position in it."""
        if not isinstance(key, tuple):
            return super().position(key)
        if len(key) != 2 or not isinstance(key[0], str):
            raise ArgumentError(f"{key!r}: give the name of a part, and an id or a position in it")
        return self.part_of(key[0]).start + self.part(key[0]).position(key[1])


def _reopen(
    path: Location, parts: list[tuple[str, Version, list[str]]], check: bool, tiers: Tiers | None
) -> Corpus:
    opened = [
        _Part(name, version, open_index(replace(version, shards=shards)))
        for name, version, shards in parts
    ]
    return Corpus(path, opened, check=check, tiers=tiers)


class _VersionOfParts(Version):
    """The versions of all parts as one, whose shards are called after their parts:
    `train-07/<shard>`.

    There is no folder at its path, which is for messages, and for the name of its local
    copies."""

    def shard(self, name: str) -> Shard:
        part, _, shard = name.rpartition("/")
        store = open_store(self.path.parent / part / self.path.name)
        return Shard(store, shard, self.info.fingerprint, self.info.spec)


class _JoinedIndex:
    """The indexes of all parts as one: where utterances are; see
    `featcache.version.index.Index`."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        indexes = [part.index for part in parts]
        self.starts = np.cumsum([0, *map(len, indexes)])
        """The position of each part's first utterance, and the end of the last, int64
        `[parts + 1]`."""
        self.parts = [
            replace(part, start=start)
            for part, start in zip(parts, self.starts.tolist(), strict=False)
        ]
        self.by_name = {part.name: part for part in self.parts}
        self.shards = [f"{part.name}/{shard}" for part in parts for shard in part.index.shards]
        self.ids = _JoinedIds(self)
        first_shards = [0, *accumulate(len(index.shards) for index in indexes[:-1])]
        self.shard = _JoinedColumn(self, [index.shard for index in indexes], first_shards)
        self.item = _JoinedColumn(self, [index.item for index in indexes])
        self.first_frame = _JoinedColumn(self, [index.first_frame for index in indexes])
        self.num_frames = _JoinedColumn(self, [index.num_frames for index in indexes])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def places(self, positions: NDArray[np.integer[Any]]) -> Iterator[tuple[int, int]]:
        """For each position, the number of its part, and the position in that."""
        numbers = np.searchsorted(self.starts, positions, "right") - 1
        return zip(numbers.tolist(), (positions - self.starts[numbers]).tolist(), strict=True)

    def find(self, ids: Strings | _JoinedIds) -> NDArray[np.int64]:
        """The position of each id, int64 `[n]`, in the first part that has it; -1 for
        those that are nowhere.

        The ids of another corpus are looked for in the parts of the same names."""
        if isinstance(ids, _JoinedIds):
            return np.concatenate(
                [self._find_in(part.name, part.index.ids) for part in ids.joined.parts]
            )
        positions = np.full(len(ids), -1, np.int64)
        for name in self.by_name:
            missing = np.flatnonzero(positions < 0)
            if not len(missing):
                break
            positions[missing] = self._find_in(name, ids.take(missing))
        return positions

    def find_one(self, id_: str) -> int:
        """The position of an id in the first part that has it, -1 if none has."""
        for part in self.parts:
            if (position := part.index.find_one(id_)) >= 0:
                return part.start + position
        return -1

    def _find_in(self, name: str, ids: Strings) -> NDArray[np.int64]:
        """The position of each id in a part; -1 if that lacks it, or there is no such
        part."""
        if (part := self.by_name.get(name)) is None:
            return np.full(len(ids), -1, np.int64)
        inside = part.index.find(ids)
        return np.where(inside < 0, -1, inside + part.start)


class _JoinedColumn:
    """A column over all parts, as an array: only what is asked for is read. Each part's
    numbers may get an offset."""

    def __init__(
        self, index: _JoinedIndex, columns: list[NDArray[np.int64]], added: Sequence[int] = ()
    ) -> None:
        self._index, self._columns = index, columns
        self._added = added or [0] * len(columns)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, at: Any) -> Any:
        positions = np.asarray(at if isinstance(at, int | np.integer | np.ndarray) else None)
        are_few = positions.dtype.kind in "iu" and positions.ndim <= 1 and positions.size <= _FEW
        if not are_few or not 0 <= positions.min(initial=0) <= positions.max(initial=0) < len(self):
            return np.asarray(self)[at]
        places = self._index.places(np.atleast_1d(positions).astype(np.int64))
        values = [self._columns[number][inside] + self._added[number] for number, inside in places]
        return np.array(values, np.int64).reshape(positions.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        parts = [column + more for column, more in zip(self._columns, self._added, strict=True)]
        return np.asarray(np.concatenate(parts), dtype)


class _JoinedIds(Sequence[str]):
    """The ids of all utterances, used as `Strings` are."""

    def __init__(self, joined: _JoinedIndex) -> None:
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined)

    def __getitem__(self, at: Any) -> Any:
        positions = (
            np.arange(len(self))[at] if isinstance(at, slice) else np.array([range(len(self))[at]])
        )
        texts = self.texts(positions)
        return texts if isinstance(at, slice) else texts[0]

    def __iter__(self) -> Iterator[str]:
        for part in self.joined.parts:
            yield from part.index.ids

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and self.joined.find_one(id_) >= 0

    def texts(self, positions: NDArray[Any]) -> list[str]:
        """The ids at some positions."""
        return [
            self.joined.parts[number].index.ids[inside]
            for number, inside in self.joined.places(positions)
        ]

    def take(self, positions: NDArray[Any]) -> Strings:
        """The ids at some positions, in flat arrays."""
        return Strings.of(self.texts(positions))


def open_parts(
    corpus: Location, name: str | None, config: tuple[str, str] | None, strict: bool
) -> list[_Part]:
    """Open the version that the parts of a corpus hold: of this name (its own or its
    folder's), or made by the config of this name and fingerprint. Parts that lack it are
    left out, which is said. Raises StoreError if there is no such version, or there are
    several; with `strict`, also if something is unfinished."""
    known = {part.name: part for part in read_parts(corpus)}
    threads = 1 if isinstance(corpus, Path) else 64
    folders = in_parallel(lambda part: version_names(corpus / part), [*known], threads)
    names = dict(zip(known, folders, strict=True))
    in_first = {
        folder: corpus / part / folder for part in reversed(names) for folder in names[part]
    }
    first = _select(corpus, in_first, name, config)
    folder = first.path.name
    lacking = [part for part, folders in names.items() if folder not in folders]
    gone = gone_parts(corpus, known.values())
    messages = [*gone.values()]
    if new := [part for part in lacking if part not in gone]:
        have = counted(len(new), "part has", "parts have")
        messages.append(f"{corpus}: {have} no {folder}, not extracted yet: {listing(new)}")

    def open_part(part: str) -> tuple[_Part, list[str]]:
        path, before = corpus / part / folder, known[part].versions.get(folder)
        version = Version.open(path)
        if version.info.fingerprint != first.info.fingerprint:
            raise StoreError(
                f"{path}: has another fingerprint than the version of the same name in other parts"
            )
        index = open_index(version)
        still_holds = (
            before is not None and not strict and index_name(version, index.shards) == before.index
        )
        unfinished = (
            [] if still_holds else [f"{path}: {run}" for run in find_lacking(version, index)]
        )
        return _Part(part, version, index), unfinished

    opened = in_parallel(open_part, [part for part in known if part not in lacking], threads)
    for message in [*messages, *(message for _, unfinished in opened for message in unfinished)]:
        if strict:
            raise StoreError(message)
        warnings.warn(message, FeatcacheWarning, stacklevel=3)
    return [part for part, _ in opened]


def _select(
    corpus: Location, paths: dict[str, Location], name: str | None, config: tuple[str, str] | None
) -> Version:
    """The version of that name, or of that config, among those that the parts hold, which
    lie at `paths`, by the names of their folders. StoreError if there is none, or there
    are several."""
    fingerprint = None if config is None else config[1]
    versions = [*map(Version.open, paths.values())]
    named = [
        version for version in versions if name in (None, version.path.name, version.info.name)
    ]
    fitting = [version for version in named if fingerprint in (None, version.info.fingerprint)]
    if len(fitting) == 1:
        return fitting[0]
    if not paths:
        raise StoreError(f"{corpus}: no part holds a version yet: `featcache extract` creates them")
    if fitting:
        names = listing(version.path.name for version in fitting)
        raise StoreError(
            f"{corpus}: its parts hold {len(fitting)} versions: {names}; give the name of one"
        )
    wanted = f"called {name!r}" if config is None else f"{config[0]}-{config[1][:12]}"
    raise StoreError(
        f"{corpus}: no part holds a version {wanted}; they hold {listing(sorted(paths))}"
    )
