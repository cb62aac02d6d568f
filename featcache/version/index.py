"""Opening the index of a version: the one that is kept, see `index_table.py`, or one that is built, of the tables of
shards and an older index; and which indexes are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, FeatcacheError, StoreError
from featcache.format.documents import decoder_of
from featcache.format.group import Table
from featcache.format.shard import Shard
from featcache.format.writing import group_files
from featcache.storage.base import in_parallel
from featcache.strings import Strings
from featcache.version.index_table import COLUMNS, Index, Maker, ShardSummary, index_name, load_index, read_index
from featcache.version.version import Version
from featcache.version.wanted import read_all_wanted

_KEPT = 3
"""Indexes that stay, besides those of tags: training may still have an older one mapped."""

_NO_TEXT = np.empty(0, np.uint8)
_OF_ORDER = ("id_offset", "sorted_id_hash", "by_id_hash")
"""The columns that are made anew when others are complete."""


def open_index(version: Version, names: Sequence[str] | None = None, *, keep: bool = True) -> Index:
    """The index of these shards, by default of all that are there: the one that is kept, or one that is built, and with
    `keep` written if that is possible. Raises DamagedError if it must be built, and a shard's document or table is
    damaged; ShardGoneError if a shard of these names is gone."""
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
    """The index of these shards, built from the largest one that is kept of some of them, and the other shards. Raises
    DamagedError if a shard's document or table is damaged; ShardGoneError if a shard is gone."""
    older = _largest_kept(version, names)
    others = sorted({*names}.difference([] if older is None else older.shards))
    return index_of(in_parallel(version.shard, others), older)


def _largest_kept(version: Version, names: Sequence[str]) -> Index | None:
    """Of the indexes that are kept of some of these shards and no others, that of the most."""
    some, largest = {*names}, None
    for name in version.store.names("index"):
        with suppress(FileNotFoundError, DamagedError):
            index = read_index(version, name)
            if some.issuperset(index.shards) and (largest is None or len(index.shards) > len(largest.shards)):
                largest = index
    return largest


def index_of(new: Sequence[Shard], older: Index | None = None) -> Index:
    """The index of the items of some shards, whose tables are checked, and of an older index. Nothing stays mapped."""
    new = sorted(new, key=lambda shard: (shard.info.row, shard.name))  # so that few items move
    if older is None:
        older = Index([], [], Table(np.zeros((len(COLUMNS), 1), np.uint64), _NO_TEXT, [*COLUMNS.items()]))
    known = [(shard, older.makers[shard.made_by]) for shard in older.summaries]
    summaries, makers, rank = _in_order([*known, *map(_summary_of, new)])
    begins = [*accumulate((shard.info.items for shard in new), initial=len(older))]
    matrix = np.zeros((len(COLUMNS), begins[-1] + 1), np.uint64)
    columns = {name: row[:-1] for name, row in zip(COLUMNS, matrix, strict=True) if name not in _OF_ORDER}
    id_hash = np.empty(begins[-1], np.uint64)
    id_hash[older.by_hash] = older.id_hash
    for name, column in columns.items():
        column[: len(older)] = older.table[name]
    columns["shard"][: len(older)] = rank[older.shard]

    def fill(number: int) -> Strings:
        """Write the items of a shard to their places; their ids."""
        shard, place = new[number], slice(begins[number], begins[number + 1])
        shard.check_table()
        table, frames = shard.table, shard.table.offsets("frame")
        id_hash[place] = table["id_hash"]
        for name in ("row_hash", "generation"):
            columns[name][place] = table[name]
        columns["shard"][place] = rank[len(known) + number]
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
    is_first = np.concatenate((np.ones(min(1, len(ids)), bool), id_hash[by_id[1:]] != id_hash[by_id[:-1]]))
    if not is_first.all():  # the first of each id in this order counts
        by_id = np.lexsort((~columns["generation"], id_hash))
        _refuse_collisions(ids, by_id, np.flatnonzero(~is_first))
        counts = np.zeros(len(ids), bool)
        counts[by_id[is_first]] = True
        ids, id_hash = ids.take(np.flatnonzero(counts)), id_hash[counts]
        matrix = np.compress(np.append(counts, True), matrix, axis=1)
        by_id = (np.cumsum(counts) - 1)[by_id[is_first]]
    table = Table(matrix, ids.blob, [*COLUMNS.items()])
    table.offsets("id")[:] = ids.offsets
    table["by_id_hash"][:], table["sorted_id_hash"][:] = by_id, id_hash[by_id]
    return Index(summaries, makers, table)


def _summary_of(shard: Shard) -> tuple[ShardSummary, Maker]:
    """What an index says of a shard, but for the number of its maker; and its maker."""
    info = shard.info
    known = {key: info.made_by[key] for key in Maker.__struct_fields__ if key in info.made_by}
    maker: Maker = decoder_of(Maker).decode(msgspec.json.encode(known))
    return ShardSummary(shard.name, info.row, info.items, info.frames, info.seconds, info.manifest, 0), maker


def _in_order(
    shards: Sequence[tuple[ShardSummary, Maker]],
) -> tuple[list[ShardSummary], list[Maker], NDArray[np.uint64]]:
    """Shards in the order of the version, their makers, and the place of each in that order, uint64 `[shards]`."""
    order = sorted(range(len(shards)), key=lambda number: (shards[number][0].row, shards[number][0].name))
    rank = np.empty(len(order), np.uint64)
    rank[order] = np.arange(len(order), dtype=np.uint64)
    makers = {maker: number for number, maker in enumerate(dict.fromkeys(shards[number][1] for number in order))}
    summaries = [msgspec.structs.replace(shards[number][0], made_by=makers[shards[number][1]]) for number in order]
    return summaries, [*makers], rank


def _refuse_collisions(ids: Strings, order: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
    """Raise StoreError if neighbours in this order, of which the later ones have these numbers, are not of one id."""
    other = np.flatnonzero(~ids.equal_at(order[numbers], ids, order[numbers - 1]))
    if len(other):
        one, two = (ids[int(order[numbers[other[0]] - back])] for back in (0, 1))
        raise StoreError(f"the ids {one!r} and {two!r} have the same hash: rename one of them, and extract it again")


def write_index(index: Index, version: Version) -> None:
    """Keep an index, in place of a damaged one, and forget those that are older than the last few. Raises StoreError if
    it cannot be written; MissingDependencyError if zarr-python is not installed."""
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
