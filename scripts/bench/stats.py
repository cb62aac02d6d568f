"""How fast `featcache stats` goes over a version, beside reading its bytes and nothing more.

    pip install .
    python scripts/bench/stats.py CACHE[/VERSION] [--threads 1 2] [--rounds 5]

Reading is a copy of all features, a megabyte at a time, by one thread. What is on the disk is read once before: both
then come from the page cache. In each round all take turns; rates are medians of the rounds.

Seen on one of 2 shared cores, Python 3.11, numpy 2.4, 302 MB of 80 dimensions: 0.68 GB/s of float16 and 1.44 GB/s of
float32, 340 and 360 million values a second, where reading has 6.6 and 7.4 GB/s. Arithmetic in float64 decides.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from clock import median, remark, timed

from featcache.loader.cache import Cache
from featcache.stats import moments
from featcache.version.selection import select_version

COPIED = 1 << 20


def read(cache: Cache) -> None:
    room = np.empty(COPIED, np.uint8)
    for name in cache.index.shards:
        data = cache.version.shard(name).features.reshape(-1).view(np.uint8)
        for first in range(0, len(data), COPIED):
            part = data[first : first + COPIED]
            room[: len(part)] = part


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cache = Cache(select_version(arguments.path))
    runs = {"reading": lambda: read(cache)}
    runs |= {
        f"stats, {count} threads": lambda count=count: moments(cache, threads=count) for count in arguments.threads
    }
    read(cache)
    taken = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            taken[name].append(timed(run))
    values = int(cache.lengths.sum()) * int(np.prod(cache.spec.item_shape))
    num_bytes = values * cache.version.dtype.itemsize
    print(f"{cache.version.path.name}: {num_bytes / 1e6:,.0f} MB, {values / 1e6:,.0f} million values")
    for name, times in taken.items():
        seconds = median([run.seconds for run in times])
        print(f"{name:20}{num_bytes / seconds / 1e9:8.2f} GB/s{values / seconds / 1e6:10,.0f} million values/s")
    if disturbed := remark(max(run.others for times in taken.values() for run in times)):
        print(disturbed)


if __name__ == "__main__":
    main()
