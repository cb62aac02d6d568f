"""The items of shards: what an index of a version needs of each, in the version's order, and which are there twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.manifest import SegmentColumns
from featcache.storage.objects import in_parallel
from featcache.store.commits import committed_columns
from featcache.store.shard import Shard
from featcache.strings import Strings


@dataclass(frozen=True, eq=False)
class ShardItems:
    """The items of one shard, as an index needs them."""

    shard: Shard
    """The shard. Nothing more is read of it than its attributes."""
    ids: Strings
    """The items' ids, `[items]`."""
    id_hash: NDArray[np.uint64]
    """FNV-1a hashes of the ids, uint64 `[items]`."""
    row_hash: NDArray[np.uint64]
    """The hash of the row that each item was extracted from, uint64 `[items]`; see `SegmentColumns.hashes`."""
    offsets: NDArray[np.int64]
    """Where each item's frames begin, and the last one's end, int64 `[items + 1]`."""

    @classmethod
    def of(cls, shard: Shard, ids: Strings, rows: SegmentColumns, offsets: NDArray[np.int64]) -> ShardItems:
        """The items that a shard's columns describe."""
        return cls(shard, ids, ids.hashes(), rows.hashes(), offsets)

    @classmethod
    def read(cls, shard: Shard, entry: str = "") -> ShardItems:
        """Read a shard's items; `entry` is the name of its entry, if it is known to be there.

        Raises:
            DamagedError: The shard's metadata or columns are damaged.
        """
        if (known := committed_columns(shard, entry)) is not None:
            return cls(shard, known.ids, known.ids.hashes(), known.row_hash, known.offsets)
        ids = shard.ids  # first: if there are as many as the shard says, memory for that many is no more than theirs
        rows = SegmentColumns.of_arrays(shard.paths, shard.column("segments"), shard.column("channels"))
        return cls.of(shard, ids, rows, shard.offsets)


def read_items(shards: Iterable[Shard]) -> Iterable[ShardItems]:
    """The items of some shards, which of an object store are fetched side by side."""
    shards = list(shards)
    are_near = all(isinstance(shard.folder, Path) for shard in shards)
    return map(ShardItems.read, shards) if are_near else in_parallel(ShardItems.read, shards)


@dataclass(frozen=True)
class DuplicateItem:
    """An utterance that two shards hold, neither of which supersedes the other's."""

    id: str
    """The utterance's id."""
    shards: tuple[str, str]
    """The names of both shards; the item of the second one counts."""
    same_row: bool
    """Whether both were extracted from the same row. Then they are equal, and cost nothing but space."""


def find_duplicates(shards: Iterable[ShardItems]) -> list[DuplicateItem]:
    """The utterances that are in the shards more than once."""
    items = AllItems(shards)
    shard = np.repeat([shard.name for shard in items.shards], items.counts)
    return [
        DuplicateItem(
            items.ids[later],
            (str(shard[earlier]), str(shard[later])),
            bool(items.row_hash[earlier] == items.row_hash[later]),
        )
        for earlier, later in items.duplicates()
    ]


class AllItems:
    """All items of some shards, in the version's order, whether they count or not."""

    def __init__(self, of_shards: Iterable[ShardItems]) -> None:
        self.of_shards = sorted(of_shards, key=lambda one: (one.shard.info.row, one.shard.name))
        self.shards = [one.shard for one in self.of_shards]
        self.ids = Strings.concatenate([one.ids for one in self.of_shards])
        self.counts = np.array([shard.info.items for shard in self.shards], np.int64)
        starts = np.cumsum(self.counts) - self.counts
        self.item = np.arange(self.counts.sum()) - np.repeat(starts, self.counts)
        self.id_hash = joined_columns([one.id_hash for one in self.of_shards], np.uint64)
        self.by_hash = np.argsort(self.id_hash, kind="stable")
        self.row_hash = joined_columns([one.row_hash for one in self.of_shards], np.uint64)
        self.superseded = np.zeros(len(self.ids), bool)
        number_of = {shard.name: number for number, shard in enumerate(self.shards)}
        for shard in self.shards:
            for other, numbers in shard.info.supersedes.items():
                if (at := number_of.get(other)) is not None:
                    items = np.array(numbers, np.int64)
                    self.superseded[starts[at] + items[items < self.counts[at]]] = True

    def duplicates(self) -> list[tuple[int, int]]:
        """Pairs of items that have the same id and are not superseded: an earlier one and the next, by position, in the
        order in time of the runs that wrote them.
        """
        order = self.by_hash if not self.superseded.any() else self.by_hash[~self.superseded[self.by_hash]]
        hashes = self.id_hash[order]
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        if not len(same):
            return []
        pairs, last = [], dict[str, int]()
        shard = np.repeat(np.arange(len(self.shards)), self.counts)
        run = [shard.run for shard in self.shards]  # the order of their names is an order in time
        for position in sorted({*order[same].tolist(), *order[same + 1].tolist()}, key=lambda at: (run[shard[at]], at)):
            if (earlier := last.get(self.ids[position])) is not None:
                pairs.append((earlier, position))
            last[self.ids[position]] = position
        return pairs


def joined_columns(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """The columns of all shards, one behind the other."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)
