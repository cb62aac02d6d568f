"""Building an index from shards, and keeping it.

The item of an id with the highest generation is current; of several, the first in the order
of the shards. So an older index can be extended by new shards."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np

from featcache.errors import DamagedError, FeatcacheError, StoreError
from featcache.format.documents import decoder_of
from featcache.format.group import Group, Table
from featcache.format.shard import Shard
from featcache.manifest.strings import Strings
from featcache.spec import Ints
from featcache.storage.base import in_parallel, tidying
from featcache.version.index import (
    COLUMNS,
    ITEM_COLUMNS,
    Index,
    IndexInfo,
    Maker,
    ShardSummary,
    index_name,
    load_index,
    read_index,
)
from featcache.version.tags import read_tag, tag_names
from featcache.version.version import Version
from featcache.version.wanted import read_all_wanted

_KEPT = 3
"""The indexes that stay, besides those of tags, for readers that have mapped them."""


def open_index(version: Version, *, keep: bool = True) -> Index:
    """Load the index of a version's shards, or build it; with `keep`, write a new one if
    possible. Raises ShardGoneError if a shard of a tag is gone."""
    index = load_index(version, version.shard_names())
    return make_index(version, keep=keep) if index is None else index


def make_index(version: Version, *, keep: bool = True) -> Index:
    """Build the index that `open_index` cannot load, with its option and errors."""
    index = version.reading(lambda: build_index(version))
    if keep:
        # a full disk, or a read-only cache
        with suppress(OSError, FeatcacheError):
            write_index(index, version)
            return load_index(version, index.shards) or index
    return index


def keep_index(version: Version) -> tuple[Index, bool]:
    """Load the index of a version's shards, or build and write it. Returns it, and whether
    it was built."""
    index = load_index(version, version.shard_names())
    if index is not None:
        return index, False
    index = version.reading(lambda: build_index(version))
    write_index(index, version)
    return index, True


def build_index(version: Version) -> Index:
    """Build the index of a version's shards, from the largest kept one and the other shards.
    Raises ShardGoneError if a shard is gone."""
    names = {*version.shard_names()}
    largest = reversed(_by_size(version, names))
    indexes = (read_index(version, name) for name, size in largest if size)
    older = next(filter(None, indexes), _NO_ITEMS)
    return index_of(in_parallel(version.shard, sorted(names.difference(older.shards))), older)


def _by_size(version: Version, shards: Set[str]) -> list[tuple[str, int]]:
    """List the kept indexes with the number of their shards, the smallest first; 0 for a
    damaged one, or one of other `shards`."""
    sizes = dict.fromkeys(version.store.names("index"), 0)
    fingerprint = version.info.fingerprint
    for name in sizes:
        with suppress(FileNotFoundError, DamagedError):
            group = Group(version.store, f"index/{name}", fingerprint, IndexInfo, COLUMNS)
            names = {shard.name for shard in group.info.shards}
            sizes[name] = len(names) if names <= shards else 0
    return sorted(sizes.items(), key=lambda pair: pair[1])


def write_index(index: Index, version: Version) -> None:
    """Write or replace an index, and remove all but the largest others."""
    # most readers need no writing
    from featcache.format.writing import group_files

    store, name = version.store, index_name(version, index.shards)
    wanted = (
        wanted_set for wanted_set in read_all_wanted(version) if not wanted_set.lacks(index).any()
    )
    complete = {wanted_set.name: wanted_set.checksum for wanted_set in wanted}
    lists = {"shards": index.summaries, "makers": index.makers, "complete": complete}
    document = {"fingerprint": version.info.fingerprint, **msgspec.to_builtins(lists)}
    _, files = group_files(document, index.table, {}, 0, f"{version.path}/index/{name}")
    if store.exists(f"index/{name}"):  # then it is damaged
        store.remove(f"index/{name}")
    store.publish(files, f"index/{name}")
    if version.shards is None:  # a version as it was once has no later index
        forget_indexes(version, index)


def forget_indexes(version: Version, latest: Index) -> None:
    """Remove the indexes that neither belong to a tag nor are among the largest."""
    staying = {index_name(version, latest.shards)}
    for tag in tag_names(version):
        with suppress(StoreError):
            staying.add(index_name(version, read_tag(version, tag).shards))
    others = [name for name, _ in _by_size(version, {*latest.shards}) if name not in staying]
    with tidying(version.path):
        for name in others[: 1 - _KEPT]:
            version.store.remove(f"index/{name}")


_NO_ITEMS = Index(
    [],
    [],
    Table(np.zeros((len(COLUMNS), 1), np.uint64), np.empty(0, np.uint8), COLUMNS.items()),
    {},
)


def index_of(new: Sequence[Shard], older: Index = _NO_ITEMS, *, are_checked: bool = False) -> Index:
    """Build the index of some shards and an older index, after checking tables that are not
    `are_checked`. Raises StoreError if two ids have the same hash."""
    # in the version's order, so that few items move
    new = sorted(new, key=lambda shard: (shard.info.row, shard.name))
    summaries, makers = _summaries(new, older)
    names = [shard.name for shard in summaries]
    table, ids = _gather(new, older, names, are_checked)
    shard = table["shard"]
    if (shard[1:] < shard[:-1]).any():
        order = np.argsort(shard, kind="stable")
        ids = ids.take(order)
        for column in table.matrix[:, :-1]:  # a copy of the matrix would take more memory
            column[:] = column[order]
    matrix = table.matrix
    hashes = table["sorted_id_hash"]  # sorted in the end
    by_id = np.argsort(hashes, kind="stable")
    sorted_hashes = hashes[by_id]
    repeats = np.flatnonzero(sorted_hashes[1:] == sorted_hashes[:-1]) + 1
    if len(repeats):
        by_id = _current(table, ids, repeats)
        is_current = np.zeros(len(table), bool)
        is_current[by_id] = True
        matrix = np.compress(np.append(is_current, True), matrix, axis=1)
        ids = ids.take(np.flatnonzero(is_current))
        by_id = (np.cumsum(is_current) - 1)[by_id]
    table = Table(matrix, ids.blob, COLUMNS.items())
    table.offsets("id")[:] = ids.offsets
    table["by_id_hash"][:] = by_id
    table["sorted_id_hash"][:] = table["sorted_id_hash"][by_id]
    return Index(summaries, makers, table, {})


def _summaries(new: Sequence[Shard], older: Index) -> tuple[list[ShardSummary], list[Maker]]:
    pairs = [(shard, older.makers[shard.made_by]) for shard in older.summaries]
    pairs += map(_summary_of, new)
    pairs.sort(key=lambda pair: (pair[0].row, pair[0].name))
    makers = [*dict.fromkeys(maker for _, maker in pairs)]
    numbers = {maker: number for number, maker in enumerate(makers)}
    summaries = [msgspec.structs.replace(shard, made_by=numbers[maker]) for shard, maker in pairs]
    return summaries, makers


def _summary_of(shard: Shard) -> tuple[ShardSummary, Maker]:
    info, maker = shard.info, Maker()
    # another writer's `made_by` may hold anything
    with suppress(msgspec.ValidationError):
        maker = decoder_of(Maker).decode(msgspec.json.encode(info.made_by))
    facts = (info.row, info.items, info.frames, info.seconds, info.manifest)
    return ShardSummary(shard.name, *facts, made_by=0), maker


def _gather(
    new: Sequence[Shard], older: Index, names: Sequence[str], are_checked: bool
) -> tuple[Table, Strings]:
    """Return a table of all items, with the hashes of their ids, and the ids."""
    places = {name: place for place, name in enumerate(names)}
    begins = [*accumulate((shard.info.items for shard in new), initial=len(older))]
    matrix = np.zeros((len(COLUMNS), begins[-1] + 1), np.uint64)
    items = Table(matrix, older.table.text, COLUMNS.items())
    for name in ITEM_COLUMNS:
        items[name][: len(older)] = older.table[name]
    older_places = np.array([places[name] for name in older.shards], np.uint64)
    items["shard"][: len(older)] = older_places[older.shard]
    items["sorted_id_hash"][older.by_hash] = older.id_hash

    def add(number: int) -> Strings:
        shard, place = new[number], slice(begins[number], begins[number + 1])
        if not are_checked:
            shard.check_table()
        table, first_frames = shard.table, shard.table.offsets("frame")
        values: dict[str, Any] = {
            "sorted_id_hash": table["id_hash"],
            "row_hash": table["row_hash"],
            "generation": table["generation"],
            "shard": places[shard.name],
            "item": np.arange(len(table)),
            "first_frame": first_frames[:-1],
            "num_frames": np.diff(first_frames),
        }
        for name, column in values.items():
            items[name][place] = column
        offsets = table.offsets("id").copy()
        ids = Strings(table.text[: offsets[-1]].copy(), offsets)
        shard.unmap_table()
        return ids

    return items, Strings.concatenate([older.ids, *in_parallel(add, range(len(new)))])


def _current(items: Table, ids: Strings, repeats: Ints) -> Ints:
    """Return the number of the current item of each id, sorted by the hash of the id. At
    `repeats` of the sorted hashes, the hash before is the same."""
    # of each id, the current item first
    by_id = np.lexsort((~items["generation"], items["sorted_id_hash"]))
    differing = np.flatnonzero(~ids.equal_at(by_id[repeats], ids, by_id[repeats - 1]))
    if len(differing):
        place = repeats[differing[0]]
        raise StoreError(
            f"the ids {ids[int(by_id[place])]!r} and {ids[int(by_id[place - 1])]!r} have the "
            "same hash: rename one of them, and extract it again"
        )
    return np.delete(by_id, repeats)
