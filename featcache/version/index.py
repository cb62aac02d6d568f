"""The index of a version: the table of the items that count, and where they are. It
follows from the shards.

Of the items of an id, that of the highest generation counts; of several of one
generation, the first, in the order of the shards. No clock, no record of runs and no list
of what replaces what is asked. An index is a group like a shard, named after the shards
that it is of, so that one that is there is right; and it is extended by what is new,
since the highest of some generations is the highest of their highest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from itertools import accumulate
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheError, StoreError
from featcache.format.documents import Count, Hash, decoder_of
from featcache.format.group import NAME_DIGITS, Group, GroupInfo, Table, rise
from featcache.format.shard import Shard
from featcache.storage.base import in_parallel, tidying
from featcache.strings import Strings, hash_of
from featcache.version.version import Version

_OF_ITEMS = ("row_hash", "generation", "shard", "item", "first_frame", "num_frames")
"""The columns that move with their items; the others are made anew when these are
complete."""

COLUMNS = dict.fromkeys(["id_offset", *_OF_ITEMS, "sorted_id_hash", "by_id_hash"], "uint64")
"""The columns of an index, and their dtypes; docs/format.md says what they hold."""

_KEPT = 3
"""Indexes that stay, besides those of tags: training may still have an older one mapped."""


class ShardSummary(msgspec.Struct, frozen=True, array_like=True):
    """What an index says of a shard, so that nobody has to ask it."""

    name: Hash
    row: Count
    """The manifest row of its first item."""
    items: Count
    """All of its items, also those that do not count."""
    frames: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds of audio of all of them."""
    manifest: Hash
    """The name of the wanted set that it was made for."""
    made_by: Count
    """The number of its maker in the index's list."""


class Maker(msgspec.Struct, frozen=True):
    """What shards say of how they were made, as far as an index knows it."""

    run: str = ""
    batching: str | None = None
    """How padded rows were put together."""
    mismatch: float | None = None
    """The share of codes that this may have changed, if a probe said so."""


class IndexInfo(GroupInfo, kw_only=True, frozen=True):
    """What the document of an index says."""

    shards: Annotated[list[ShardSummary], msgspec.Meta(max_length=1 << 18)]
    """The shards, in the order of the version: of their rows, then of their names."""
    makers: Annotated[list[Maker], msgspec.Meta(max_length=1 << 18)]
    complete: Annotated[dict[Hash, Count], msgspec.Meta(max_length=1 << 16)] = msgspec.field(
        default_factory=dict
    )
    """The wanted sets that lacked nothing when it was written: their names, and the
    checksums of their rows."""


class Index:
    """The items of some shards of a version that count, in the order of the version: of
    its shards, then of the items.

    `shard`, `item`, `first_frame`, `num_frames`, `generation` and `row_hash` are columns,
    integers `[items]`."""

    def __init__(
        self,
        shards: list[ShardSummary],
        makers: list[Maker],
        table: Table,
        complete: dict[str, int],
    ) -> None:
        self.summaries = shards
        self.makers = makers
        self.shards = [shard.name for shard in shards]
        """The names of the shards; `shard` are places in this list."""
        self.complete = complete
        """The wanted sets that it is known to lack nothing of: their names, and the
        checksums of their rows."""
        self.table = table
        self.ids = table.ids
        self.shard = table["shard"].view(np.int64)
        self.item = table["item"].view(np.int64)
        self.first_frame = table["first_frame"].view(np.int64)
        self.num_frames = table["num_frames"].view(np.int64)
        self.generation = table["generation"]
        self.row_hash = table["row_hash"]
        self.id_hash = table["sorted_id_hash"]
        """The hashes of the ids, sorted."""
        self.by_hash = table["by_id_hash"].view(np.int64)
        """The positions of the items in that order."""

    def __len__(self) -> int:
        return len(self.table)

    def span(self, shard: int) -> tuple[int, int]:
        """The first position of a shard's items, and the one behind the last; the shard
        is a place in `shards`."""
        begin, end = np.searchsorted(self.shard, (shard, shard + 1)).tolist()
        return begin, end

    def place(self, position: int) -> tuple[str, int]:
        """The name of the shard that has the item at a position, and the item's number in
        it."""
        return self.shards[int(self.shard[position])], int(self.item[position])

    def find_hashes(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The positions of the items whose ids have these hashes, int64 `[n]`; -1 where
        there is none."""
        if not len(self):
            return np.full(len(hashes), -1)
        if len(hashes) == len(self) and np.array_equal(hashes[self.by_hash], self.id_hash):
            # the manifest's rows as they were extracted, without a search
            return np.arange(len(self))
        at = np.minimum(np.searchsorted(self.id_hash, hashes), len(self) - 1)
        return np.where(self.id_hash[at] == hashes, self.by_hash[at], -1)

    def find(self, ids: Strings, hashes: NDArray[np.uint64] | None = None) -> NDArray[np.int64]:
        """The position of each id, int64 `[n]`; -1 for those that are not there. `hashes`
        are theirs, if known."""
        if ids == self.ids:
            # the manifest's rows as they were extracted, without a search
            return np.arange(len(self))
        positions = self.find_hashes(ids.hashes() if hashes is None else hashes)
        there = np.flatnonzero(positions >= 0)
        same = ids.equal_at(there, self.ids, positions[there])
        positions[there[~same]] = -1
        return positions

    def find_one(self, id: str) -> int:  # noqa: A002
        """The position of an id, -1 if it is not there; for a single id, faster than
        `find`."""
        wanted = np.uint64(hash_of(id))
        at = int(np.searchsorted(self.id_hash, wanted))
        if (
            at < len(self)
            and self.id_hash[at] == wanted
            and self.ids[position := int(self.by_hash[at])] == id
        ):
            return position
        return -1


def index_name(version: Version, names: Iterable[str]) -> str:
    """The name of the index of these shards. Theirs say what is in them."""
    text = "\n".join([version.info.fingerprint, *sorted(names)])
    return hashlib.sha256(text.encode()).hexdigest()[:NAME_DIGITS]


def load_index(version: Version, names: Sequence[str]) -> Index | None:
    """The kept index of these shards, every byte of it compared with its checksum; None
    if there is none, or anything is wrong with it. Raises StoreError if the store cannot
    be reached, which is no reason to read all shards."""
    return _read_index(version, index_name(version, names))


def _read_index(version: Version, name: str) -> Index | None:
    """The index of this name; None if it is not there, not what was written, of others,
    or leads out of its lists."""
    try:
        group = Group(version.store, f"index/{name}", version.info.fingerprint, IndexInfo, COLUMNS)
        info, table = group.info, group.table
    except (FileNotFoundError, DamagedError):
        return None
    index = Index(info.shards, info.makers, table, info.complete)
    most = {
        "shard": len(index.shards) - 1,
        "by_id_hash": len(index) - 1,
        "first_frame": 1 << 48,
        "num_frames": 1 << 48,
    }
    leads_out = len(index) and (
        table["num_frames"].min() < 1 or any(table[name].max() > most[name] for name in most)
    )
    makers = max((shard.made_by for shard in info.shards), default=-1)
    if leads_out or makers >= len(info.makers) or not rise(table.offsets("id"), 0, table.text.size):
        return None
    return index if index_name(version, index.shards) == name else None


def open_index(version: Version, *, keep: bool = True) -> Index:
    """The index of a version's shards: the one that is kept, or one that is built, and
    with `keep` written if that is possible. Raises DamagedError if it must be built, and
    a shard's document or table is damaged; ShardGoneError if a shard is gone that the
    version is to have."""
    if (index := load_index(version, version.shard_names())) is not None:
        return index
    index = version.reading(lambda: build_index(version))
    if keep:
        # a full disk, a cache that cannot be written, or no zarr to write it
        with suppress(OSError, FeatcacheError):
            write_index(index, version)
            return load_index(version, index.shards) or index
    return index


def keep_index(version: Version) -> tuple[Index, bool]:
    """The index of all shards of a version, on disk, and whether it had to be built.
    Raises DamagedError if a shard's document or table is damaged; StoreError if the index
    cannot be kept; MissingDependencyError without zarr-python."""
    if (index := load_index(version, version.shard_names())) is not None:
        return index, False
    index = version.reading(lambda: build_index(version))
    write_index(index, version)
    return index, True


def build_index(version: Version) -> Index:
    """The index of a version's shards, built from the largest one that is kept of some of
    them and no others, and the other shards. Raises DamagedError if a shard's document or
    table is damaged; ShardGoneError if a shard is gone."""
    names = {*version.shard_names()}
    kept = (
        _read_index(version, name) for name, size in reversed(_by_size(version, names)) if size > 0
    )
    older = next((index for index in kept if index is not None), _NO_ITEMS)
    return index_of(in_parallel(version.shard, sorted(names.difference(older.shards))), older)


def _by_size(version: Version, shards: Set[str]) -> list[tuple[str, int]]:
    """Kept indexes, by their documents, the smallest first: of how many `shards` each is;
    0 if damaged or of others."""
    sizes = dict.fromkeys(version.store.names("index"), 0)
    for name in sizes:
        with suppress(FileNotFoundError, DamagedError):
            group = Group(
                version.store, f"index/{name}", version.info.fingerprint, IndexInfo, COLUMNS
            )
            names = {shard.name for shard in group.info.shards}
            sizes[name] = len(names) if names <= shards else 0
    return sorted(sizes.items(), key=lambda one: one[1])


_NO_ITEMS = Index(
    [],
    [],
    Table(np.zeros((len(COLUMNS), 1), np.uint64), np.empty(0, np.uint8), COLUMNS.items()),
    {},
)


def index_of(new: Sequence[Shard], older: Index = _NO_ITEMS) -> Index:
    """The index of the items of some shards, whose tables are checked, and of an older
    index. Nothing stays mapped."""
    # so that few items move
    new = sorted(new, key=lambda shard: (shard.info.row, shard.name))
    told = [(shard, older.makers[shard.made_by]) for shard in older.summaries] + [
        *map(_summary_of, new)
    ]
    told.sort(key=lambda one: (one[0].row, one[0].name))
    makers = {
        maker: number for number, maker in enumerate(dict.fromkeys(maker for _, maker in told))
    }
    summaries = [msgspec.structs.replace(shard, made_by=makers[maker]) for shard, maker in told]
    places = {shard.name: place for place, shard in enumerate(summaries)}
    begins = [*accumulate((shard.info.items for shard in new), initial=len(older))]
    matrix = np.zeros((len(COLUMNS), begins[-1] + 1), np.uint64)
    columns = {
        name: row[:-1] for name, row in zip(COLUMNS, matrix, strict=True) if name in _OF_ITEMS
    }
    id_hash = np.empty(begins[-1], np.uint64)
    id_hash[older.by_hash] = older.id_hash
    for name, column in columns.items():
        column[: len(older)] = older.table[name]
    columns["shard"][: len(older)] = np.array([places[name] for name in older.shards], np.uint64)[
        older.shard
    ]

    def fill(number: int) -> Strings:
        """Write the items of a shard to their places; their ids."""
        shard, place = new[number], slice(begins[number], begins[number + 1])
        shard.check_table()
        table, frames = shard.table, shard.table.offsets("frame")
        id_hash[place] = table["id_hash"]
        for name in ("row_hash", "generation"):
            columns[name][place] = table[name]
        columns["shard"][place] = places[shard.name]
        columns["item"][place] = np.arange(len(table))
        columns["first_frame"][place], columns["num_frames"][place] = frames[:-1], np.diff(frames)
        offsets = table.offsets("id").copy()
        ids = Strings(table.text[: offsets[-1]].copy(), offsets)
        shard.unmap_table()
        return ids

    ids = Strings.concatenate([older.ids, *in_parallel(fill, range(len(new)))])
    if (columns["shard"][1:] < columns["shard"][:-1]).any():
        in_order = np.argsort(columns["shard"], kind="stable")
        for column in (*columns.values(), id_hash):
            column[:] = column[in_order]
        ids = ids.take(in_order)
    by_id = np.argsort(id_hash, kind="stable")
    is_first = np.concatenate(
        (np.ones(min(1, len(ids)), bool), id_hash[by_id[1:]] != id_hash[by_id[:-1]])
    )
    if not is_first.all():  # the first of each id in this order counts
        by_id = np.lexsort((~columns["generation"], id_hash))
        _refuse_collisions(ids, by_id, np.flatnonzero(~is_first))
        counts = np.zeros(len(ids), bool)
        counts[by_id[is_first]] = True
        ids, id_hash = ids.take(np.flatnonzero(counts)), id_hash[counts]
        matrix = np.compress(np.append(counts, True), matrix, axis=1)
        by_id = (np.cumsum(counts) - 1)[by_id[is_first]]
    table = Table(matrix, ids.blob, COLUMNS.items())
    table.offsets("id")[:] = ids.offsets
    table["by_id_hash"][:], table["sorted_id_hash"][:] = by_id, id_hash[by_id]
    return Index(summaries, [*makers], table, {})


def _summary_of(shard: Shard) -> tuple[ShardSummary, Maker]:
    """What an index says of a shard, but for the number of its maker; and its maker."""
    info, maker = shard.info, Maker()
    # a faulty writer's, or a stranger's: nothing follows from what it says
    with suppress(msgspec.ValidationError):
        maker = decoder_of(Maker).decode(msgspec.json.encode(info.made_by))
    return ShardSummary(
        shard.name, info.row, info.items, info.frames, info.seconds, info.manifest, 0
    ), maker


def _refuse_collisions(ids: Strings, order: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    """Raise StoreError if neighbours in this order, of which the later ones have these
    numbers, are not of one id."""
    other = np.flatnonzero(~ids.equal_at(order[numbers], ids, order[numbers - 1]))
    if len(other):
        one, two = (ids[int(order[numbers[other[0]] - back])] for back in (0, 1))
        raise StoreError(
            f"the ids {one!r} and {two!r} have the same hash: rename one of them, and "
            "extract it again"
        )


def write_index(index: Index, version: Version) -> None:
    """Keep an index, in place of a damaged one, and the largest others. Raises StoreError
    if it cannot be written; MissingDependencyError if zarr-python is not installed."""
    # here, since most readers find an index that is there
    from featcache.format.writing import group_files
    from featcache.version.wanted import read_all_wanted

    store, name = version.store, index_name(version, index.shards)
    complete = {
        one.name: one.checksum for one in read_all_wanted(version) if not one.lacks(index).any()
    }
    told = msgspec.to_builtins(
        {"shards": index.summaries, "makers": index.makers, "complete": complete}
    )
    document = {"fingerprint": version.info.fingerprint, **told}
    _, files = group_files(document, index.table, {}, 0, f"{version.path}/index/{name}")
    if store.exists(f"index/{name}"):  # then it is damaged
        store.remove(f"index/{name}")
    store.publish(files, f"index/{name}")
    if version.shards is None:  # else it is no later one
        forget_indexes(version, index)


def forget_indexes(version: Version, latest: Index) -> None:
    """Remove the indexes that neither are of a tag nor among the largest: first those of
    shards that are gone."""
    from featcache.version.tags import read_tag, tag_names

    staying = {index_name(version, latest.shards)}
    for tag in tag_names(version):
        with suppress(StoreError):
            staying.add(index_name(version, read_tag(version, tag).shards))
    others = [name for name, _ in _by_size(version, {*latest.shards}) if name not in staying]
    with tidying(version.path):
        for name in others[: 1 - _KEPT]:
            version.store.remove(f"index/{name}")
