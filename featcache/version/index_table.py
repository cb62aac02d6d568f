"""The index of a version: the table of the items that count, and where they are. It follows from the shards.

Of the items of an id, that of the highest generation counts; of several of one generation, the first, in the order of
the shards. No clock, no record of runs and no list of what replaces what is asked. An index is a group like a shard,
named after the shards that it is of, so that one that is there is right; and it is extended by what is new, since the
highest of some generations is the highest of their highest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError
from featcache.format.documents import Count, Hash
from featcache.format.group import NAME_DIGITS, Group, GroupInfo, Table, rise
from featcache.strings import Strings, hash_of
from featcache.version.version import Version

COLUMNS = {
    "id_offset": "uint64",
    "row_hash": "uint64",
    "generation": "uint64",
    "shard": "uint64",
    "item": "uint64",
    "first_frame": "uint64",
    "num_frames": "uint64",
    "sorted_id_hash": "uint64",
    "by_id_hash": "uint64",
}
"""The columns of an index; docs/format.md says what they hold."""


@dataclass(frozen=True)
class Place:
    """Where an item is, and what it was extracted from."""

    shard: str
    item: int
    """The number of the item in the shard."""
    row_hash: int
    """The hash of its row; see `SegmentColumns.hashes`."""


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
    complete: Annotated[dict[Hash, Count], msgspec.Meta(max_length=1 << 16)] = msgspec.field(default_factory=dict)
    """The wanted sets that lacked nothing when it was written: their names, and the checksums of their rows."""


class Index:
    """The items of some shards of a version that count, in the order of the version: of its shards, then of the items.

    `shard`, `item`, `first_frame`, `num_frames`, `generation` and `row_hash` are columns, integers `[items]`."""

    def __init__(
        self,
        shards: Sequence[ShardSummary],
        makers: Sequence[Maker],
        table: Table,
        complete: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.summaries = shards
        self.makers = makers
        self.shards = [shard.name for shard in shards]
        """The names of the shards; `shard` are places in this list."""
        self.complete = complete
        """The wanted sets that it is known to lack nothing of: their names, and the checksums of their rows."""
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
        """The first position of a shard's items, and the one behind the last; the shard is a place in `shards`."""
        begin, end = np.searchsorted(self.shard, (shard, shard + 1)).tolist()
        return begin, end

    def place(self, position: int) -> Place:
        """Where the item at a position is, and what it was extracted from."""
        return Place(self.shards[self.shard[position]], int(self.item[position]), int(self.row_hash[position]))

    def find_hashes(self, hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The positions of the items whose ids have these hashes, int64 `[n]`; -1 where there is none."""
        if not len(self):
            return np.full(len(hashes), -1)
        if len(hashes) == len(self) and np.array_equal(hashes[self.by_hash], self.id_hash):
            return np.arange(len(self))  # the manifest's rows as they were extracted, without a search
        at = np.minimum(np.searchsorted(self.id_hash, hashes), len(self) - 1)
        return np.where(self.id_hash[at] == hashes, self.by_hash[at], -1)

    def find(self, ids: Strings, hashes: NDArray[np.uint64] | None = None) -> NDArray[np.int64]:
        """The position of each id, int64 `[n]`; -1 for those that are not there. `hashes` are theirs, if known."""
        if ids == self.ids:
            return np.arange(len(self))  # the manifest's rows as they were extracted, without a search
        positions = self.find_hashes(ids.hashes() if hashes is None else hashes)
        there = np.flatnonzero(positions >= 0)
        same = ids.equal_at(there, self.ids, positions[there])
        positions[there[~same]] = -1
        return positions

    def find_one(self, id: str) -> int:  # noqa: A002
        """The position of an id, -1 if it is not there; for a single id, faster than `find`."""
        wanted = np.uint64(hash_of(id))
        at = int(np.searchsorted(self.id_hash, wanted))
        if at < len(self) and self.id_hash[at] == wanted and self.ids[position := int(self.by_hash[at])] == id:
            return position
        return -1


def index_name(version: Version, names: Iterable[str]) -> str:
    """The name of the index of these shards. Theirs say what is in them."""
    text = "\n".join([version.info.fingerprint, *sorted(names)])
    return hashlib.sha256(text.encode()).hexdigest()[:NAME_DIGITS]


def load_index(version: Version, names: Sequence[str]) -> Index | None:
    """The index of these shards that is kept, every byte of which has been compared with its checksum; None if there is
    none, or anything is wrong with it. Raises StoreError if the store cannot be reached, which is no reason to read all
    shards."""
    try:
        index = read_index(version, index_name(version, names))
    except (FileNotFoundError, DamagedError):
        return None
    return index if {*index.shards} == {*names} else None


def read_index(version: Version, name: str) -> Index:
    """The index of this name. Raises FileNotFoundError if there is none; DamagedError if it is not what was written, or
    leads out of its lists."""
    group = Group(version.store, f"index/{name}", version.info.fingerprint, IndexInfo, COLUMNS)
    info, table = group.info, group.table
    index = Index(info.shards, info.makers, table, info.complete)
    items, shards = len(index), len(index.shards)
    leads_out = items and (
        index.shard.max() >= shards
        or index.shard.min() < 0
        or index.by_hash.max() >= items
        or index.by_hash.min() < 0
        or index.first_frame.min() < 0
        or index.num_frames.min() < 1
        or max(index.first_frame.max(), index.num_frames.max()) > 1 << 48
    )
    makers = max((shard.made_by for shard in info.shards), default=-1)
    if leads_out or makers >= len(info.makers) or not rise(table.offsets("id"), 0, table.text.size):
        raise DamagedError(f"{group}: damaged: it leads out of its lists")
    return index
