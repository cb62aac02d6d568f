"""Where an utterance's features came from: its row, its file, its shard, and the run and the libraries that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from featcache.format.shard import Item
from featcache.storage.base import in_parallel
from featcache.strings import hash_of
from featcache.version.index import Index, open_index
from featcache.version.join import missing_error
from featcache.version.ledger import standing_failures
from featcache.version.records import began, read_run
from featcache.version.version import Version


@dataclass(frozen=True)
class Origin:
    """Where the features of an utterance came from."""

    shard: str
    """The name of the shard that holds them."""
    item: Item
    """What they were extracted from."""
    run: str
    """The name of the run that extracted them; empty if the shard does not say."""
    asked: dict[str, Any]
    """What the run was to do, with its manifest; empty if there is no record of it."""
    made_by: dict[str, Any]
    """The libraries and the device that made them, by name, as the shard has it."""
    superseded: list[str]
    """The names of the shards that hold older items of the utterance, which these features have superseded."""

    def document(self) -> dict[str, Any]:
        """All of it, for JSON: `audio_seconds` is left to who knows the sample rate."""
        started = began(self.run)
        kept = self.item.document()
        kept["source_rate"] = kept.pop("sample_rate")
        return {
            "shard": self.shard,
            **kept,
            "run": self.run or None,
            "run_began": None if started is None else started.isoformat(timespec="seconds"),
            **{name: self.asked.get(name) for name in ("manifest", "root", "host")},
            "from": self.asked.get("from"),
            "made_by": {name: value for name, value in self.made_by.items() if name != "run"},
            "superseded": self.superseded,
        }


def origin_of(version: Version, utterance: str) -> Origin:
    """Where the features of an utterance came from.

    Raises:
        MissingItemError: The version does not hold it; says whether it failed.
        DamagedError: Its shard is not what was written.
    """
    index = open_index(version)
    position = index.find_one(utterance)
    if position < 0:
        raise missing_error(version, index, standing_failures(version, index), [utterance], 1)
    place = index.place(position)
    shard = version.shard(place.shard)
    (item,) = shard.items([place.item])
    record = read_run(version.store, shard.run) if shard.run else None
    return Origin(
        shard=shard.name,
        item=item,
        run=shard.run,
        asked={} if record is None else record.asked,
        made_by=shard.info.made_by,
        superseded=_superseded(version, index, item),
    )


def _superseded(version: Version, index: Index, item: Item) -> list[str]:
    """The shards of older items, from the latest to the earliest, as far as they are still there."""
    if item.generation == 1:
        return []
    id_hash = np.uint64(hash_of(item.id))

    def generation(name: str) -> int:
        table = version.shard(name).table
        return int(table["generation"][table["id_hash"] == id_hash].max(initial=0))

    generations = dict(zip(index.shards, in_parallel(generation, index.shards), strict=True))
    older = [name for name, own in generations.items() if 0 < own < item.generation]
    return sorted(older, key=lambda name: -generations[name])
