"""Some items of a shard, bit for bit, as a shard of their own: what repair and prune keep of one before it goes."""

from __future__ import annotations

from collections.abc import Sequence

from featcache.errors import DamagedError
from featcache.format.shard import Shard
from featcache.format.writing import ShardBuilder
from featcache.version.version import Version

__all__ = ["rewrite"]


def rewrite(version: Version, shard: Shard, numbers: Sequence[int]) -> str:
    """Publish some items of a shard, whose numbers rise, with all that is known of them; returns the name of the shard
    that has them. If it is the same one, its files are written again.

    Raises:
        DamagedError: One of these items, or the table, is not what was written.
        StoreError: It cannot be written. Nothing has been removed.
    """
    shard.check_table()
    builder = ShardBuilder(shard.spec)
    sides = {side.name: shard.side(side.name) for side in shard.spec.side}
    sound = shard.sound_items(numbers)
    for number, item in zip(numbers, shard.items(numbers), strict=True):
        found, features = next(sound, (None, None))
        if found != number or features is None:
            raise DamagedError(f"{shard}: damaged: the features of {item.id}", version.path)
        entries = {name: side.item(number) for name, side in sides.items()}
        builder.append([item], features, [len(features)], {name: (own, [len(own)]) for name, own in entries.items()})
    info = shard.info
    name, files = builder.files(
        fingerprint=info.fingerprint, row=info.row, manifest=info.manifest, made_by=info.made_by, where=version.path
    )
    if name == shard.name:
        for path, data in files.items():
            version.store.put(f"{shard.key}/{path}", data)
    else:
        version.store.publish(files, f"shards/{name}")
    return name
