"""Opening the index of a version: the one that is kept, see `index_table.py`, or one that is built, of the tables of
shards and an older index; and which indexes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheError, StoreError
from featcache.format.documents import decoder_of
from featcache.format.shard import Shard
from featcache.format.table import Table
from featcache.format.writing import group_files
from featcache.storage.base import in_parallel
from featcache.strings import Strings
from featcache.version.index_table import (
    COLUMNS,
    Index,
    Maker,
    Place,
    ShardSummary,
    index_name,
    load_index,
    read_index,
)
from featcache.version.version import Version
from featcache.version.wanted import read_all_wanted

__all__ = [
    "COLUMNS",
    "Index",
    "Place",
    "ShardSummary",
    "build_index",
    "forget_indexes",
    "index_name",
    "index_of",
    "keep_index",
    "load_index",
    "open_index",
]

_KEPT = 3
"""Indexes that stay, besides those of tags: training may still have an older one mapped."""


def open_index(version: Version, names: Sequence[str] | None = None, *, keep: bool = True) -> Index:
    """The index of these shards, by default of all that are there: the one that is kept, or one that is built, and with
    `keep` written if that is possible.

    Raises:
        DamagedError: It must be built, and a shard's document or table is damaged.
        ShardGoneError: Likewise, and a shard of these names is gone.
    """
    if names is None:
        return version.reading(lambda: open_index(version, version.shard_names(), keep=keep))
    if (index := load_index(version, names)) is not None:
        return index
    index = build_index(version, names)
    if keep:
        with suppress(OSError, FeatcacheError):  # a full disk, a cache that cannot be written, or no zarr to write it
            write_index(index, version)
            return load_index(version, names) or index
    return index


def keep_index(version: Version) -> tuple[Index, bool]:
    """The index of all shards of a version, which is on disk; and whether it had to be built.

    Raises:
        DamagedError: A shard's document or table is damaged.
        StoreError: It cannot be kept.
        MissingDependencyError: zarr-python is not installed.
    """
    names = version.shard_names()
    if (index := load_index(version, names)) is not None:
        return index, False
    index = open_index(version, keep=False)
    write_index(index, version)
    return index, True


def build_index(version: Version, names: Sequence[str]) -> Index:
    """The index of these shards, built from the largest one that is kept of some of them, and the other shards.

    Raises:
        DamagedError: A shard's document or table is damaged.
        ShardGoneError: A shard is gone.
    """
    older = _largest_kept(version, names)
    others = sorted({*names}.difference([] if older is None else older.shards))
    parts = in_parallel(lambda name: _Part.of(version.shard(name)), others)
    return index_of(parts, older)


def _largest_kept(version: Version, names: Sequence[str]) -> Index | None:
    """Of the indexes that are kept of some of these shards and no others, that of the most."""
    some, largest = {*names}, None
    for name in version.store.names("index"):
        with suppress(FileNotFoundError, DamagedError):
            index = read_index(version, name)
            if some.issuperset(index.shards) and (largest is None or len(index.shards) > len(largest.shards)):
                largest = index
    return largest


@dataclass
class _Part:
    """Items that an index is built of."""

    shards: list[tuple[ShardSummary, Maker]]
    columns: dict[str, NDArray[Any]]
    """`id_hash`, and those of an index that are not of its order; `shard` are places in `shards`."""
    ids: Strings

    @classmethod
    def of(cls, shard: Shard) -> _Part:
        """The items of a shard, whose table is checked; nothing stays mapped."""
        shard.check_table()
        info, table = shard.info, shard.table
        frames = table.offsets("frame")
        columns = {name: table[name].copy() for name in ("id_hash", "row_hash", "generation")}
        columns["shard"] = np.zeros(len(table), np.uint64)
        columns["item"] = np.arange(len(table), dtype=np.uint64)
        columns["first_frame"] = frames[:-1].astype(np.uint64)
        columns["num_frames"] = np.diff(frames).astype(np.uint64)
        summary = ShardSummary(shard.name, info.row, info.items, info.frames, info.seconds, info.manifest, 0)
        known = {key: info.made_by[key] for key in Maker.__struct_fields__ if key in info.made_by}
        maker: Maker = decoder_of(Maker).decode(msgspec.json.encode(known))
        offsets = table.offsets("id").copy()
        return cls([(summary, maker)], columns, Strings(table.text[: offsets[-1]].copy(), offsets))

    @classmethod
    def of_index(cls, index: Index) -> _Part:
        """The items of an older index."""
        table = index.table
        columns = {name: table[name] for name in COLUMNS if name not in ("id_offset", "sorted_id_hash", "by_id_hash")}
        columns["id_hash"] = np.empty(len(index), np.uint64)
        columns["id_hash"][index.by_hash] = index.id_hash
        return cls([(shard, index.makers[shard.made_by]) for shard in index.summaries], columns, index.ids)


def index_of(parts: Sequence[_Part], older: Index | None = None) -> Index:
    """The index of the items of some shards, and of an older index."""
    parts = [*parts, *([] if older is None else [_Part.of_index(older)])]
    parts.sort(key=lambda part: [(shard.row, shard.name) for shard, _ in part.shards[:1]])  # so that few items move
    shards = [shard for part in parts for shard in part.shards]
    order = sorted(range(len(shards)), key=lambda number: (shards[number][0].row, shards[number][0].name))
    rank = np.empty(len(order), np.uint64)
    rank[order] = np.arange(len(order), dtype=np.uint64)
    makers = {maker: number for number, maker in enumerate(dict.fromkeys(shards[number][1] for number in order))}
    summaries = [msgspec.structs.replace(shards[number][0], made_by=makers[shards[number][1]]) for number in order]
    if not parts:
        return Index(
            [], [], Table.of({name: [0] if name == "id_offset" else [] for name in COLUMNS}, COLUMNS, _NO_TEXT)
        )
    begins = accumulate((len(part.shards) for part in parts), initial=0)
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns}
    columns["shard"] = rank[
        np.concatenate([part.columns["shard"] + np.uint64(begin) for part, begin in zip(parts, begins, strict=False)])
    ]
    ids = Strings.concatenate([part.ids for part in parts])
    if (columns["shard"][1:] < columns["shard"][:-1]).any():
        in_order = np.argsort(columns["shard"], kind="stable")
        columns, ids = {name: column[in_order] for name, column in columns.items()}, ids.take(in_order)
    id_hash = columns.pop("id_hash")
    by_id = np.argsort(id_hash, kind="stable")
    is_first = np.concatenate(([True], id_hash[by_id[1:]] != id_hash[by_id[:-1]]))
    if not is_first.all():  # the first of each id in this order counts
        by_id = np.lexsort((~columns["generation"], id_hash))
        _refuse_collisions(ids, by_id, np.flatnonzero(~is_first))
        counts = np.zeros(len(ids), bool)
        counts[by_id[is_first]] = True
        columns, ids, id_hash = (
            {name: column[counts] for name, column in columns.items()},
            ids.take(np.flatnonzero(counts)),
            id_hash[counts],
        )
        by_id = (np.cumsum(counts) - 1)[by_id[is_first]]
    columns |= {"by_id_hash": by_id, "sorted_id_hash": id_hash[by_id]}
    columns["id_offset"] = ids.offsets
    return Index(summaries, [*makers], Table.of(columns, COLUMNS, ids.blob))


def _refuse_collisions(ids: Strings, order: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    """Raise StoreError if neighbours in this order, of which the later ones have these numbers, are not of one id."""
    other = np.flatnonzero(~ids.equal_at(order[numbers], ids, order[numbers - 1]))
    if len(other):
        one, two = (ids[int(order[numbers[other[0]] - back])] for back in (0, 1))
        raise StoreError(f"the ids {one!r} and {two!r} have the same hash: rename one of them, and extract it again")


_NO_TEXT = np.empty(0, np.uint8)


def write_index(index: Index, version: Version) -> None:
    """Keep an index, in place of a damaged one, and forget those that are older than the last few.

    Raises:
        StoreError: It cannot be written.
        MissingDependencyError: zarr-python is not installed.
    """
    store, name = version.store, index_name(version, index.shards)
    document = {
        "fingerprint": version.info.fingerprint,
        "shards": msgspec.to_builtins(index.summaries),
        "makers": msgspec.to_builtins(index.makers),
        "complete": {one.name: one.checksum for one in read_all_wanted(version) if not one.lacks(index).any()},
    }
    _, files = group_files(document, index.table, {}, f"{version.path}/index/{name}")
    store.remove(f"index/{name}")
    store.publish(files, f"index/{name}")
    forget_indexes(version, name)


def forget_indexes(version: Version, latest: str) -> None:
    """Remove the indexes that neither are of a tag nor among the largest."""
    from featcache.version.tags import tagged_shards

    of_tags = {index_name(version, names) for names in tagged_shards(version).values()}
    sizes = dict[str, int]()
    for name in version.store.names("index"):
        if name not in of_tags and name != latest:
            try:
                sizes[name] = len(read_index(version, name).shards)
            except (FileNotFoundError, DamagedError):
                sizes[name] = -1
    for name in sorted(sizes, key=lambda name: sizes[name])[: 1 - _KEPT]:
        version.store.remove(f"index/{name}")
