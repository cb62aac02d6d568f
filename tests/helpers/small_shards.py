"""Shards of made-up items, for tests of the store."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from featcache.spec import FeatureSpec, SideSpec
from featcache.store.check import check_shard
from featcache.store.shard import Item, Shard
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version
from featcache.store.version_info import VersionInfo

SPEC = FeatureSpec((2,), "float32", 100.0, 160, 16000, "anything")
INFO = VersionInfo("mine", "0123456789abcdef" * 4, {"name": "mine"}, SPEC, {"featcache": "0"})
SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")
SIDED = replace(INFO, spec=replace(SPEC, side=SIDE))
DTYPES = ["float32", "float16", "uint8", "uint16", "uint32", "int64"]


def item(id_: str, frames: int = 3, **columns) -> Item:
    """An item of a clip that gives so many frames."""
    values = {"path": f"{id_}.wav", "num_samples": frames * 160}
    return Item(id=id_, **{**values, "size": 1, "mtime_ns": 2, "sample_rate": 16000, **columns})


def write(
    version: Version,
    items: list[Item],
    values=None,
    *,
    row: int = 0,
    supersedes=None,
    run: str = "",
    side=None,
    says_version: bool = True,
) -> Shard:
    """Commit a shard; item `i` of it is all `i`, unless values `[frames, 2]` are given."""
    counts = [item.num_samples // 160 for item in items]
    if values is None:
        values = np.repeat(np.arange(len(items), dtype=np.float32), counts)[:, None] * np.ones((1, 2), np.float32)
    spec = version.info.spec
    writer = ShardWriter(version.work_folder("shard"), spec)
    writer.append(items, np.ascontiguousarray(values, version.dtype), counts, side or {})
    made_by = {"run": run} | ({"fingerprint": version.info.fingerprint} if says_version else {})
    name = writer.commit(
        version.path / "shards", sample_rate=16000, row=row, supersedes=supersedes or {}, made_by=made_by
    )
    return version.shard(name)


def problems(version: Version, shard: Shard) -> list[str]:
    """The kinds of what `check_shard` finds."""
    return [problem.kind for problem in check_shard(shard, version.info.spec)]


IN_ANOTHER_PROCESS = """
import sys, time
from pathlib import Path
from featcache.store.locks import Claim
from featcache.store.version import Version
from small_shards import INFO
{}
"""


def elsewhere(code: str, *args) -> subprocess.Popen:
    """Run code in another process, which prints a line when it is ready and ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-c", IN_ANOTHER_PROCESS.format(code), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
