"""Measure how fast `featcache stats` goes over a version, compared with only reading its
bytes.

    pip install .
    python scripts/bench/stats.py CACHE[/VERSION] [--threads 1 2] [--rounds 5]

Reading is a copy of all features, a megabyte at a time, by one thread. What is on the
disk is read once before: both then come from the page cache. In each round all take
turns; rates are medians of the rounds."""

import numpy as np
from harness import Table, options, present, remark, take_turns

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
    runs |= {
        f"stats, {count} threads": lambda count=count: moments(cache, threads=count)
        for count in asked.threads
    }
    read(cache)
    turns = take_turns(runs, asked.rounds)
    values = int(cache.lengths.sum()) * int(np.prod(cache.spec.item_shape))
    gigabytes = values * cache.version.dtype.itemsize / 1e9
    table = Table(
        f"{cache.version.path.name}: {gigabytes * 1e3:,.0f} MB",
        {"GB/s": "{:.2f}", "million values/s": "{:,.0f}"},
    )
    for name in runs:
        seconds = turns.median(name)
        table.add(name, gigabytes / seconds, values / seconds / 1e6)
    present(asked, table, remark(turns.others))


if __name__ == "__main__":
    main()
