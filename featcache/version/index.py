"""The index of a version: a table of the current items, and where they lie. It is a group
like a shard, named after its shards: so an index of the right name is right."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import numpy as np

from featcache.errors import DamagedError
from featcache.format.documents import Count, Hash, NotNegative
from featcache.format.group import NAME_DIGITS, Group, GroupInfo, Table, rise
from featcache.manifest.strings import Hashes, Strings, hash_of
from featcache.spec import Ints
from featcache.version.version import Version

ITEM_COLUMNS = ("row_hash", "generation", "shard", "item", "first_frame", "num_frames")
"""The columns about an item by itself."""

COLUMNS = dict.fromkeys(["id_offset", *ITEM_COLUMNS, "sorted_id_hash", "by_id_hash"], "uint64")
"""The columns of an index, and their dtypes; see docs/format.md."""


class ShardSummary(msgspec.Struct, frozen=True, array_like=True):
    """The facts about a shard that an index keeps; see `ShardInfo`."""

    name: Hash
    row: Count
    items: Count
    """All of its items, also those that are not current."""
    frames: Count
    seconds: NotNegative
    """Seconds of audio of all items."""
    manifest: Hash
    made_by: Count
    """The number of its maker in the index's list."""


class Maker(msgspec.Struct, frozen=True):
    """The way in which shards were made, as far as an index keeps it."""

    run: str = ""
    batching: str | None = None
    """The way in which padded rows were batched."""
    mismatch: float | None = None
    """The share of codes that batching may have changed, if a probe found one."""


class IndexInfo(GroupInfo, kw_only=True, frozen=True):
    """The document of an index."""

    shards: Annotated[list[ShardSummary], msgspec.Meta(max_length=1 << 18)]
    """The shards in the version's order: by row, then by name."""
    makers: Annotated[list[Maker], msgspec.Meta(max_length=1 << 18)]
    complete: Annotated[dict[Hash, Count], msgspec.Meta(max_length=1 << 16)] = msgspec.field(
        default_factory=dict
    )
    """The names of the wanted sets that lacked nothing when it was written, and the
    checksums of their rows."""


class Index:
    """The current items of some shards of a version, in the order of the shards, then of
    their items. `shard`, `item`, `first_frame`, `num_frames`, `generation` and `row_hash`
    are columns, integers `[items]`."""

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
        """See `IndexInfo`."""
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
        """The positions of these ids."""

    def __len__(self) -> int:
        return len(self.table)

    def span(self, shard: int) -> tuple[int, int]:
        """Return the first position of the items of shard `shard`, and the one behind the
        last."""
        begin, end = np.searchsorted(self.shard, (shard, shard + 1)).tolist()
        return begin, end

    def place(self, position: int) -> tuple[str, int]:
        """Return the name of an item's shard, and its number in the shard."""
        return self.shards[int(self.shard[position])], int(self.item[position])

    def find_hashes(self, hashes: Hashes) -> Ints:
        """Return the positions of the ids with these hashes, int64 `[n]`; else -1."""
        return positions_of(hashes, self.id_hash, self.by_hash)

    def find(self, ids: Strings, hashes: Hashes | None = None) -> Ints:
        """Return the position of each id, int64 `[n]`; else -1. `hashes` are the ids', if
        known."""
        if ids == self.ids:  # the manifest's rows as they were extracted
            return np.arange(len(self))
        if hashes is None:
            hashes = ids.hashes()
        positions = self.find_hashes(hashes)
        numbers = np.flatnonzero(positions >= 0)
        is_same = ids.equal_at(numbers, self.ids, positions[numbers])
        positions[numbers[~is_same]] = -1
        return positions

    def find_one(self, id_: str) -> int:
        """Return the position of an id, -1 if no item has it; faster than `find`."""
        id_hash = np.uint64(hash_of(id_))
        place = int(np.searchsorted(self.id_hash, id_hash))
        if place == len(self) or self.id_hash[place] != id_hash:
            return -1
        position = int(self.by_hash[place])
        return position if self.ids[position] == id_ else -1


def positions_of(hashes: Hashes, known: Hashes, positions: Ints) -> Ints:
    """Return the position of each hash among `known` ones, which are sorted; else -1."""
    if not len(known):
        return np.full(len(hashes), -1)
    if len(hashes) == len(known) and np.array_equal(hashes[positions], known):
        return np.arange(len(known))  # one after the other, without a search
    places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
    return np.where(known[places] == hashes, positions[places], -1)


def index_name(version: Version, names: Iterable[str]) -> str:
    """Return the name of the index of these shards."""
    text = "\n".join([version.info.fingerprint, *sorted(names)])
    return hashlib.sha256(text.encode()).hexdigest()[:NAME_DIGITS]


def load_index(version: Version, names: Sequence[str]) -> Index | None:
    """Load the kept index of these shards; see `read_index`."""
    return read_index(version, index_name(version, names))


def read_index(version: Version, name: str) -> Index | None:
    """Read the index of this name. Returns None if it is missing, damaged, of other shards,
    or leads out of its lists. Raises StoreError if the store cannot be reached, which is no
    reason to read all shards."""
    try:
        group = Group(version.store, f"index/{name}", version.info.fingerprint, IndexInfo, COLUMNS)
        info: IndexInfo = group.info
        table = group.table
    except (FileNotFoundError, DamagedError):
        return None
    index = Index(info.shards, info.makers, table, info.complete)
    most = {
        "shard": len(index.shards) - 1,
        "by_id_hash": len(index) - 1,
        "first_frame": 1 << 48,
        "num_frames": 1 << 48,
    }
    is_right = index_name(version, index.shards) == name
    is_right &= all(shard.made_by < len(info.makers) for shard in info.shards)
    is_right &= rise(table.offsets("id"), 0, table.text.size)
    if len(index):
        is_right &= bool(table["num_frames"].min() >= version.info.spec.axis.fewest)
        is_right &= all(table[name].max() <= limit for name, limit in most.items())
    return index if is_right else None
