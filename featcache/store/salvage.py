"""The plan for each damaged shard: which of its items are kept, and which must be extracted again.

A shard of another version is in the place of one of this version, which is lost; or it is one too many. If the index on
disk is of these shards' names, it knows this version's items of that shard. If not, the names of the items that the
other version's shard holds are all there is to go by: a shard's name follows from its items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from featcache.errors import DamagedError
from featcache.spec import FeatureSpec
from featcache.store.index import Index, build_index, load_index
from featcache.store.remains import Remains
from featcache.store.shard import Shard
from featcache.store.version import Version
from featcache.strings import Strings


@dataclass(frozen=True)
class Salvage:
    """What of a damaged shard is sound. Items that are not current, being replaced by others, are in neither part.

    Attributes:
        shard: the damaged shard.
        kept: numbers of the sound items, rising; there are none where the shard is no `Remains`.
        again: ids of the others, to be extracted again; None where nothing tells which they were.
        was_held: whether the version is known to have held these; not where only another version's shard names them.
    """

    shard: Shard
    kept: list[int]
    again: Strings | None
    was_held: bool = True


def find_sound(version: Version, damaged: Sequence[str], stopped: Callable[[], bool] = lambda: False) -> list[Salvage]:
    """Hold every item of the damaged shards against its own checksum.

    Args:
        version: whose.
        damaged: the shards' names; those that are not there any more are left out.
        stopped: once it says so, no more are read, and the answer is empty.

    Raises:
        DamagedError: a shard is damaged that is not among them.
    """
    names = version.shard_names()
    opened = {name: _open(version.shard(name), version.info.spec) for name in damaged if name in names}
    index = load_index(version, names)
    if index is None:
        index = build_index(_readable(version, names, opened))
    found = []
    for name, (shard, faulty) in opened.items():
        if stopped():
            return []
        found.append(_sort(shard, faulty, index, name))
    return found


def _open(shard: Shard, spec: FeatureSpec) -> tuple[Shard, set[str]]:
    """A shard as `Remains`, where all but its features is whole, and the ids of items to be left out all the same."""
    remains = Remains(shard.folder, shard.fingerprint, spec)
    try:
        return remains, remains.check()
    except (DamagedError, OSError):
        return shard, set()


def _readable(version: Version, names: Sequence[str], opened: Mapping[str, tuple[Shard, set[str]]]) -> list[Shard]:
    shards = [opened[name][0] if name in opened else version.shard(name) for name in names]
    return [shard for shard in shards if shard.name not in opened or isinstance(shard, Remains)]


def _sort(shard: Shard, faulty: set[str], index: Index, name: str) -> Salvage:
    """Which of a shard's current items are sound."""
    if name not in index.shards:
        return _unknown(shard, index)
    inside = np.flatnonzero(index.shard == index.shards.index(name))
    ids = index.ids.take(inside)
    if not isinstance(shard, Remains):
        return Salvage(shard, [], ids)
    numbers = index.item[inside].tolist()
    candidates = sorted(number for number, id_ in zip(numbers, ids, strict=True) if id_ not in faulty)
    kept = [number for number, _ in shard.sound_items(candidates)]
    return Salvage(shard, kept, ids.take(np.flatnonzero(~np.isin(numbers, kept))))


def _unknown(shard: Shard, index: Index) -> Salvage:
    """A shard that is not in the index, and of which nothing can be kept: what it holds goes by what it says itself."""
    other = Shard(shard.folder, None)
    try:
        ids = other.ids
        if shard.stated_version in (None, shard.fingerprint):
            return Salvage(shard, [], ids)
        # If it supersedes items, so did the shard that it has replaced: what the index has of these ids is outdated.
        again = ids if other.info.supersedes else ids.take(np.flatnonzero(index.find(ids) < 0))
        return Salvage(shard, [], again, was_held=False)
    except (DamagedError, OSError):
        return Salvage(shard, [], None)
