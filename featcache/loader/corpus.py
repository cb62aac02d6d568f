"""An opened corpus: the versions of its parts as one sequence. A position counts through
all parts, in the order of their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, StoreError, counted, did_you_mean, listing
from featcache.format.shard import Shard
from featcache.loader.cache import Cache
from featcache.manifest.strings import Strings, hash_of
from featcache.spec import Ints
from featcache.storage.base import in_parallel
from featcache.storage.location import Location
from featcache.storage.opening import open_store
from featcache.version.corpus import gone_parts, read_parts
from featcache.version.index import Index, index_name
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, standing_failures
from featcache.version.selection import version_names
from featcache.version.version import Version
from featcache.version.wanted import find_lacking

if TYPE_CHECKING:
    from featcache.loader.places import PlaceOf

_FEW = 4096
"""The most positions that are looked up one by one; for more, whole columns are joined."""


@dataclass(frozen=True)
class _Part:
    """A part of a corpus, as it was when the corpus was opened."""

    name: str
    version: Version
    index: Index
    start: int = 0
    """The position of its first utterance in the corpus."""


class Corpus(Cache):
    """The utterances of a corpus, one part after the other, as they were when it was opened.

    It is used as a `Cache` is. An utterance also has a position within its part:
    `corpus["train-07", 3]` is the fourth utterance of that part, and `corpus["train-07",
    "utt-1"]` the utterance of that id. An id alone is looked up in the first part that has
    it. `corpus.part("train-07")` is a `Cache`, and a track of a corpus is a corpus.

    `lengths` is made at the first look, 8 bytes for each utterance. All other columns stay
    mapped, and processes share them."""

    index: _JoinedIndex

    def __init__(
        self,
        path: Location,
        parts: Sequence[_Part],
        check: bool = False,
        places: Sequence[PlaceOf] = (),
        track_of: tuple[Cache, str] | None = None,
    ) -> None:
        self._path = path
        first = parts[0].version
        version = _VersionOfParts(open_store(path / first.path.name), first.info)
        index = _JoinedIndex(parts)
        super().__init__(version, check=check, index=index, places=places, track_of=track_of)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._track_of is not None:
            return Corpus.track, self._track_of
        parts = [(part.name, part.version, part.index.shards) for part in self.index.parts]
        return _reopen, (self._path, parts, self.check, self._places)

    def _facts(self) -> list[str]:
        return [f"{len(self.parts):,} parts", *super()._facts()]

    @property
    def parts(self) -> list[str]:
        """The names of the parts, in their order."""
        return [part.name for part in self.index.parts]

    def part(self, name: str) -> Cache:
        """Open the version of a part, or the same track of it. Raises StoreError if there is no
        such part."""
        part = self.part_of(name)
        cache = Cache(part.version, check=self.check, index=part.index, places=self._places)
        return cache.track(self.track_name)

    def _open_track(self, name: str) -> Cache:
        return Corpus(self._path, self.index.parts, self.check, track_of=(self, name))

    def locate(self, position: int) -> tuple[str, int]:
        """Return the name of the part that has a position, and the position in it."""
        ((number, inside),) = self.index.places(np.array([self.position(position)]))
        return self.index.parts[number].name, inside

    @cached_property
    def failures(self) -> dict[str, Failure]:
        """The failures of all parts."""
        failures: dict[str, Failure] = {}
        for part in self.index.parts:
            failures.update(standing_failures(part.version, part.index))
        return failures

    def identity(self) -> tuple[list[Strings], NDArray[np.uint64]]:
        """Return the ids, in parts, and hashes of their sources and parts' names."""
        parts = self.index.parts
        hashes = [part.index.row_hash ^ np.uint64(hash_of(part.name)) for part in parts]
        return [part.index.ids for part in parts], np.concatenate(hashes)

    def part_of(self, name: str) -> _Part:
        """Return the part of a name, as it was opened. Raises StoreError if there is none."""
        if name not in self.index.by_name:
            meant = did_you_mean(name, self.parts)
            raise StoreError(
                f"{self._path}: there is no part {name!r}{meant}; there are {listing(self.parts)}"
            )
        return self.index.by_name[name]

    def position(self, key: Any) -> int:
        """Return a position, as in a cache; or by a part's name, and an id or position in it."""
        if not isinstance(key, tuple):
            return super().position(key)
        if len(key) != 2 or not isinstance(key[0], str):
            raise ArgumentError(f"{key!r}: give the name of a part, and an id or a position in it")
        part = self.part_of(key[0])
        return part.start + Cache(part.version, index=part.index).position(key[1])


def _reopen(path: Location, parts: list[tuple[str, Version, list[str]]], *options: Any) -> Corpus:
    opened = [
        _Part(name, version, open_index(replace(version, shards=shards)))
        for name, version, shards in parts
    ]
    return Corpus(path, opened, *options)


class _VersionOfParts(Version):
    """The versions of all parts as one, with shards called `train-07/<shard>`. Its path is
    only a name, for messages and local copies."""

    def shard(self, name: str) -> Shard:
        part, _, shard = name.rpartition("/")
        store = open_store(self.path.parent / part / self.path.name)
        return Shard(store, shard, self.info.fingerprint, self.info.spec)


class _JoinedIndex(Index):
    """The indexes of all parts as one, without what nobody asks a corpus: their tables.

    The parts' indexes are mapped, and stay apart: a position is looked up in its part's."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        indexes = [part.index for part in parts]
        self.starts = np.cumsum([0, *map(len, indexes)])
        """The position of each part's first utterance, and the end of the last part, int64
        `[parts + 1]`."""
        starts = self.starts[:-1].tolist()
        self.parts = [replace(part, start=at) for part, at in zip(parts, starts, strict=True)]
        self.by_name = {part.name: part for part in self.parts}
        self.shards = [f"{part.name}/{shard}" for part in parts for shard in part.index.shards]
        self.ids: Any = _JoinedIds(self)
        first_shards = [0, *accumulate(len(index.shards) for index in indexes[:-1])]
        self.shard: Any = _JoinedColumn(self, "shard", first_shards)
        self.item: Any = _JoinedColumn(self, "item")
        self.first_frame: Any = _JoinedColumn(self, "first_frame")
        self.num_frames: Any = _JoinedColumn(self, "num_frames")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def places(self, positions: NDArray[np.integer[Any]]) -> Iterator[tuple[int, int]]:
        """Yield, for each position, the number of its part, and the position in that."""
        numbers = np.searchsorted(self.starts, positions, "right") - 1
        return zip(numbers.tolist(), (positions - self.starts[numbers]).tolist(), strict=True)

    def find(self, ids: Any, hashes: object = None) -> Ints:
        """Return the position of each id in the first part that has it, or -1; for the ids of
        another corpus, in the parts of the same names."""
        if isinstance(ids, _JoinedIds):
            parts = ids.joined.parts
            return np.concatenate([self._find_in(part.name, part.index.ids) for part in parts])
        positions = np.full(len(ids), -1, np.int64)
        for name in self.by_name:
            missing = np.flatnonzero(positions < 0)
            if not len(missing):
                break
            positions[missing] = self._find_in(name, ids.take(missing))
        return positions

    def find_one(self, id: str) -> int:  # noqa: A002
        """Return the position of an id in the first part that has it, or -1."""
        for part in self.parts:
            position = part.index.find_one(id)
            if position >= 0:
                return part.start + position
        return -1

    def _find_in(self, name: str, ids: Strings) -> Ints:
        """Return the position of each id in a part, or -1."""
        part = self.by_name.get(name)
        if part is None:
            return np.full(len(ids), -1, np.int64)
        inside = part.index.find(ids)
        return np.where(inside < 0, -1, inside + part.start)


class _JoinedColumn:
    """A column over all parts, used as an array. Each part's numbers get an offset."""

    def __init__(
        self, index: _JoinedIndex, name: str, offsets: Sequence[int] | None = None
    ) -> None:
        self._index, self._offsets = index, offsets or [0] * len(index.parts)
        self._columns = [getattr(part.index, name) for part in index.parts]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, key: Any) -> Any:
        is_positions = isinstance(key, int | np.integer | np.ndarray)
        positions = np.asarray(key if is_positions else None)
        are_few = positions.dtype.kind in "iu" and positions.ndim <= 1 and positions.size <= _FEW
        if not are_few or not 0 <= positions.min(initial=0) <= positions.max(initial=0) < len(self):
            return np.asarray(self)[key]
        places = self._index.places(np.atleast_1d(positions).astype(np.int64))
        values = [self._columns[part][inside] + self._offsets[part] for part, inside in places]
        return np.array(values, np.int64).reshape(positions.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        pairs = zip(self._columns, self._offsets, strict=True)
        return np.asarray(np.concatenate([column + offset for column, offset in pairs]), dtype)


class _JoinedIds(Sequence[str]):
    """The ids of all utterances, used as `Strings`."""

    def __init__(self, joined: _JoinedIndex) -> None:
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.texts(np.arange(len(self))[key])
        return self.texts(np.array([range(len(self))[key]]))[0]

    def __iter__(self) -> Iterator[str]:
        for part in self.joined.parts:
            yield from part.index.ids

    def __contains__(self, id_: object) -> bool:
        return isinstance(id_, str) and self.joined.find_one(id_) >= 0

    def texts(self, positions: NDArray[Any]) -> list[str]:
        """List the ids at some positions."""
        parts = self.joined.parts
        return [parts[number].index.ids[inside] for number, inside in self.joined.places(positions)]

    def beginning_with(self, text: str, most: int) -> list[str]:
        """List at most so many ids of each part that begin with a text."""
        parts = (part.index.ids for part in self.joined.parts)
        return [id_ for ids in parts for id_ in ids.beginning_with(text, most)]

    def take(self, positions: NDArray[Any]) -> Strings:
        """Return the ids at some positions, in flat arrays."""
        return Strings.of(self.texts(positions))


def open_parts(
    corpus: Location, name: str | None, config: tuple[str, str] | None, strict: bool
) -> tuple[list[_Part], list[str]]:
    """Open a version in the parts of a corpus: by its name or its folder's, or by the name
    and fingerprint of a config. Returns also messages about unfinished parts; unless
    `strict`, of parts that have changed since they were recorded. Raises StoreError if
    there is no such version, or several."""
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
    new = [part for part in lacking if part not in gone]
    if new:
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
        opened = _Part(part, version, index)
        is_known = before is not None and before.index == index_name(version, index.shards)
        if is_known and not strict:
            return opened, []
        return opened, [f"{path}: {run}" for run in find_lacking(version, index)]

    opened = in_parallel(open_part, [part for part in known if part not in lacking], threads)
    for _, unfinished in opened:
        messages += unfinished
    return [part for part, _ in opened], messages


def _select(
    corpus: Location, paths: dict[str, Location], name: str | None, config: tuple[str, str] | None
) -> Version:
    """Select one of the parts' versions, at `paths` by the names of their folders."""
    fingerprint = None if config is None else config[1]
    versions = [*map(Version.open, paths.values())]
    fitting = [
        version
        for version in versions
        if name in (None, version.path.name, version.info.name)
        and fingerprint in (None, version.info.fingerprint)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if not paths:
        raise StoreError(f"{corpus}: no part holds a version yet: `featcache extract` creates them")
    if fitting:
        names = listing(version.path.name for version in fitting)
        raise StoreError(
            f"{corpus}: its parts hold {len(fitting)} versions: {names}; give the name of one"
        )
    wanted = f"called {name!r}{did_you_mean(str(name), paths)}"
    if config is not None:
        wanted = f"{config[0]}-{config[1][:12]}"
    raise StoreError(
        f"{corpus}: no part holds a version {wanted}; they hold {listing(sorted(paths))}"
    )
