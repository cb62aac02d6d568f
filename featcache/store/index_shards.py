"""What an index says of its shards besides their items: for those who ask, and so that the next index of a version in
an object store reads only the shards that have been added since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from featcache.storage.location import ObjectPath
from featcache.storage.objects import read_ahead
from featcache.store.fields import MOST, Check, fields, listed, number, optional, text, whole
from featcache.store.shard import ShardInfo
from featcache.store.shard_items import ShardItems
from featcache.strings import Strings

if TYPE_CHECKING:
    from featcache.store.index import Index
    from featcache.store.version import Version

MOST_DESCRIBED = 200_000
"""The most shards that an index on disk describes, since its document has at most 32 MiB."""

_KINDS: dict[str, Check] = {
    "items": whole(1),
    "frames": whole(),
    "seconds": number(0),
    "row": whole(),
    "supersedes": whole(),
    "batching": optional(text()),
    "mismatch": optional(number(0, 1)),
}
_DESCRIBED = fields({name: listed(check, MOST) for name, check in _KINDS.items()})


def describe(shards: Iterable[ShardInfo]) -> dict[str, list[Any]]:
    """What an index keeps of its shards, as `describe_shards` returns it."""
    shards = list(shards)
    return {
        **{key: [getattr(info, key) for info in shards] for key in ("items", "frames", "seconds", "row")},
        "supersedes": [sum(map(len, info.supersedes.values())) for info in shards],
        **{key: [info.made_by.get(key) for info in shards] for key in ("batching", "mismatch")},
    }


def describe_shards(index: Index, version: Version) -> dict[str, list[Any]]:
    """What there is to say of the shards of an index, a list of each, `[shards]`: their `items`, whether they count or
    not, `frames` and `seconds`; the manifest's `row` of the first item; how many items each `supersedes`; and the
    `batching` that made it, with its `mismatch` when it was probed. They are read in a
    folder, where a shard may have been exchanged for one of the same name, and if the index does not say it.

    Raises:
        DamagedError: A shard is not what was written.
    """
    if isinstance(version.path, ObjectPath) and (described := _checked(index)) is not None:
        return described
    shards = [version.shard(name) for name in index.shards]
    with read_ahead(location for shard in shards for location in shard.files(())):
        return describe(shard.info for shard in shards)


def _checked(index: Index) -> dict[str, list[Any]] | None:
    """What the index says of its shards; None if it says nothing, or is odd, and sealed all the same."""
    with suppress(ValueError):
        described: dict[str, list[Any]] = _DESCRIBED(index.described)
        if {len(values) for values in described.values()} == {len(index.shards)}:
            return described
    return None


def items_in(index: Index, version: Version) -> Iterator[ShardItems]:
    """The items of those shards of an index of which it has them all, as if they had been read; without those that
    supersede items of others. The version is in an object store, where a shard of the same name is the same.
    """
    if (described := _checked(index)) is None:
        return
    id_hash = np.empty_like(index.id_hash)
    id_hash[index.by_hash] = index.id_hash
    ends = np.cumsum(np.bincount(index.shard, minlength=len(index.shards))).tolist()
    for at, (name, run, first, end) in enumerate(zip(index.shards, index.runs, [0, *ends[:-1]], ends, strict=True)):
        known = {key: values[at] for key, values in described.items()}
        if known["items"] != end - first or known["supersedes"]:
            continue
        counts = {key: known[key] for key in ("items", "frames", "seconds", "row")}
        made_by = {"run": run, "batching": known["batching"], "mismatch": known["mismatch"]}
        shard, own = version.shard(name), slice(first, end)
        shard.take_info(ShardInfo(**counts, digest="", made_by=made_by))
        ids = Strings(index.ids.blob, index.ids.offsets[first : end + 1])
        offsets = np.append(index.first_frame[own], known["frames"])
        yield ShardItems(shard, ids, id_hash[own], index.row_hash[own], offsets)
