"""How fast `featcache stats` goes over a version, beside reading its bytes and nothing more.

    pip install .
    python scripts/bench/stats.py CACHE[/VERSION] [--threads 1 2] [--rounds 5]

Reading is a copy of all features, a megabyte at a time, by one thread. What is on the disk is read once before: both
then come from the page cache. In each round all take turns; rates are medians of the rounds.

Seen on one of 2 shared cores, Python 3.11, numpy 2.4, 302 MB of 80 dimensions: 0.68 GB/s of float16 and 1.44 GB/s of
float32, 340 and 360 million values a second, where reading has 6.6 and 7.4 GB/s. Arithmetic in float64 decides.
"""

from __future__ import annotations

import numpy as np
from harness import columns, options, present, remark, take_turns

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
    asked = options(__doc__, "path", threads=[1, 2], rounds=5)
    cache = Cache(select_version(asked.path))
    runs = {"reading": lambda: read(cache)}
    runs |= {f"stats, {count} threads": lambda count=count: moments(cache, threads=count) for count in asked.threads}
    read(cache)
    turns = take_turns(runs, asked.rounds)
    values = int(cache.lengths.sum()) * int(np.prod(cache.spec.item_shape))
    gigabytes = values * cache.version.dtype.itemsize / 1e9
    rows = [
        (name, f"{gigabytes / seconds:.2f}", f"{values / seconds / 1e6:,.0f}")
        for name, seconds in ((name, turns.median(name)) for name in runs)
    ]
    head = [f"{cache.version.path.name}: {gigabytes * 1e3:,.0f} MB", "GB/s", "million values/s"]
    present([head, *rows], lambda table: f"{columns(*table)}\n{remark(turns.others)}".rstrip(), asked)


if __name__ == "__main__":
    main()
