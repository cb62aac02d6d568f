"""Where an utterance's features came from: its row, its file, its shard, and the run and the libraries that made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from featcache.store.index import open_index
from featcache.store.join import missing_error
from featcache.store.ledger import standing_failures
from featcache.store.records import Record
from featcache.store.run_records import began, request_of
from featcache.store.shard import Item
from featcache.store.version import Version


@dataclass(frozen=True)
class Origin:
    """Where the features of an utterance came from."""

    shard: str
    """The name of the shard that holds them."""
    item: Item
    """What they were extracted from."""
    run: str
    """The name of the run that extracted them; empty if the shard does not say."""
    asked: Record
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
        about_itself = ("run", "fingerprint", "attempt")
        return {
            "shard": self.shard,
            **kept,
            "run": self.run or None,
            "run_began": None if started is None else started.isoformat(timespec="seconds"),
            **{name: self.asked.get(name) for name in ("manifest", "root", "host")},
            "from": self.asked.get("from"),
            "made_by": {name: value for name, value in self.made_by.items() if name not in about_itself},
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
    return Origin(
        shard=shard.name,
        item=item,
        run=shard.run,
        asked=request_of(version, shard.run) if shard.run else {},
        made_by=shard.info.made_by,
        superseded=_superseded(version, shard.name, utterance),
    )


def _superseded(version: Version, shard: str, utterance: str) -> list[str]:
    """The shards of older items, from the latest to the earliest, as far as they are still there."""
    pending, found = [shard], dict[str, None]()
    while pending:
        for name, numbers in version.shard(pending.pop()).info.supersedes.items():
            if name in found or not version.has_shard(name):
                continue
            older = version.shard(name)
            if any(older.ids[number] == utterance for number in numbers if number < len(older.ids)):
                found[name] = None
                pending.append(name)
    return list(found)
