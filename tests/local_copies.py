"""Versions on a slow disk, copies of them on a local one, and what this process has mapped of both."""

from pathlib import Path

import numpy as np
from forked import wait_until
from make_cache import make_features

import featcache
from featcache.loader import copying

SHARDS = 4


def shards(seed=0, count=SHARDS):
    return [make_features(6, prefix=f"shard{n}", seed=seed + n) for n in range(count)]


def chunk(version, name):
    return version.shard(name).folder / "features" / "c" / "0" / "0"


def copies_in(disk):
    return {path.name: path for path in disk.glob("featcache/*/????????????-????????")}


def parts_in(disk):
    return list(disk.glob("featcache/*/*.part"))


def mapped(folder):
    """The files below a folder that this process has mapped."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {line[5] for line in lines if line[5:] and line[5].startswith(f"{folder}/") and "/index/" not in line[5]}


def settle(cache):
    """Read all of a cache, and wait until nothing more is copied."""
    for row in range(len(cache)):
        cache[row]
    wait_until(lambda: not cache._shards._copier.is_at_work)
    wait_until(lambda: copying._thread is None)


def read_all(cache, expected):
    return all(map(np.array_equal, cache, expected))


def settle_two(folder, disk):
    """Have the first two shards copied."""
    cache = featcache.open(folder, copy_to=disk)
    cache.batch([0, 7])
    wait_until(lambda: len(copies_in(disk)) == 2)
    wait_until(lambda: copying._thread is None)
