"""Shards of made-up items, for tests of the store."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from featcache.care.verify import examine_shard
from featcache.format.shard import Item, Shard
from featcache.format.writing import ShardBuilder
from featcache.spec import FeatureSpec, Track
from featcache.storage.location import ObjectPath
from featcache.version.version import Version, VersionInfo
from featcache.version.wanted import Wanted, name_of

MANIFEST = name_of("made up")
"""The name of the wanted set of everything that is made here."""

SPEC = FeatureSpec((2,), "float32", 100.0, 160, 16000, "anything")
INFO = VersionInfo(
    name="mine",
    fingerprint="0123456789abcdef" * 4,
    config={"name": "mine"},
    spec=SPEC,
    made_by={"featcache": "0"},
)
SIDE = (
    Track("scales", (), "float32", "loudness"),
    Track("marks", (2,), "uint16", "where from and where to"),
)
SIDED = structs.replace(INFO, spec=replace(SPEC, side=SIDE))
DTYPES = ["float32", "float16", "uint8", "uint16", "uint32", "int64"]


def item(id_: str, frames: int = 3, **columns) -> Item:
    """An item of a clip that gives so many frames."""
    values = {"path": f"{id_}.wav", "num_samples": frames * 160}
    return Item(id=id_, **{**values, "size": 1, "mtime_ns": 2, "sample_rate": 16000, **columns})


def create(cache: Path | ObjectPath, info: VersionInfo = INFO) -> Version:
    """An empty version in a cache, or in an object store."""
    version = Version.create(cache / info.folder_name, info)
    # else all that is made here would be gone or missing
    Wanted("made up", np.zeros((3, 0), np.uint64)).save(version)
    return version


def write(version: Version, items: list[Item], values=None, *, side=None, **origin: Any) -> Shard:
    """Publish a shard, as `publish`; item `i` of it is all `i`, unless values `[frames,
    2]` are given."""
    counts = [item.num_samples // 160 for item in items]
    if values is None:
        values = np.repeat(np.arange(len(items), dtype=np.float32), counts)[:, None] * np.ones(
            (1, 2), np.float32
        )
    builder = ShardBuilder(version.info.spec)
    features = np.split(np.ascontiguousarray(values, version.dtype), np.cumsum(counts)[:-1])
    for one, frames, entries in zip(items, features, side or [{}] * len(items), strict=True):
        builder.append(one, frames, entries)
    return publish(version, builder, **origin)


def publish(
    version: Version, builder: ShardBuilder, row: int = 0, run: str = "", manifest: str = MANIFEST
) -> Shard:
    """Publish what has been put together."""
    made_by = {"run": run} if run else {}
    origin = {
        "fingerprint": version.info.fingerprint,
        "row": row,
        "manifest": manifest,
        "made_by": made_by,
    }
    name, files = builder.files(**origin, where=version.path)
    version.store.publish(files, f"shards/{name}")
    return version.shard(name)


def problems(version: Version, name: str, *, values: bool = False) -> list[str]:
    """The kinds of what `examine_shard` finds in a shard."""
    return [problem.kind for problem in examine_shard(version, name, data=True, values=values)[1]]
