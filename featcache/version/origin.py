"""Where an utterance's features came from: its row, its file, its shard, and the run and the libraries that made it."""

from __future__ import annotations

from typing import Any

import numpy as np

from featcache.format.shard import Item
from featcache.storage.base import in_parallel
from featcache.strings import hash_of
from featcache.version.index import open_index
from featcache.version.index_table import Index
from featcache.version.join import missing_error
from featcache.version.ledger import standing_failures
from featcache.version.records import began, read_run
from featcache.version.version import Version


def describe_origin(version: Version, utterance: str) -> dict[str, Any]:
    """Where a version has an utterance from: its row, its file, its shard, and the run and the libraries that made it.
    Raises MissingItemError if it does not have it; says whether it failed; DamagedError if its shard is not what was
    written."""
    index = open_index(version)
    position = index.find_one(utterance)
    if position < 0:
        raise missing_error(version, index, standing_failures(version, index), [utterance], 1)
    place = index.place(position)
    shard = version.shard(place.shard)
    (item,) = shard.items([place.item])
    record = read_run(version.store, shard.run) if shard.run else None
    asked = {} if record is None else record.asked
    started = began(shard.run)
    row_and_file = item.document()
    row_and_file["source_rate"] = row_and_file.pop("sample_rate")
    return {
        "version": str(version.path),
        "shard": shard.name,
        **row_and_file,
        "run": shard.run or None,
        "run_began": None if started is None else started.isoformat(timespec="seconds"),
        **{name: asked.get(name) for name in ("manifest", "root", "host", "from")},
        "made_by": {name: value for name, value in shard.info.made_by.items() if name != "run"},
        "superseded": _superseded(version, index, item),
        "audio_seconds": item.num_samples / version.info.spec.sample_rate,
    }


def _superseded(version: Version, index: Index, item: Item) -> list[str]:
    """The shards of older items of an utterance, from the latest to the earliest, as far as they are still there."""
    if item.generation == 1:
        return []
    id_hash = np.uint64(hash_of(item.id))

    def generation(name: str) -> int:
        table = version.shard(name).table
        return int(table["generation"][table["id_hash"] == id_hash].max(initial=0))

    generations = dict(zip(index.shards, in_parallel(generation, index.shards), strict=True))
    older = [name for name, own in generations.items() if 0 < own < item.generation]
    return sorted(older, key=lambda name: -generations[name])
