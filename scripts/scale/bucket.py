"""Count the requests to a bucket: of uploaded shards, of an index of very many shards,
of one more shard, of opening and of `info`.

    python scripts/scale/bucket.py [--shards 2000] [--latency 0 50]

The store is an S3 server on loopback that holds everything in memory, counts requests,
and holds each back for the latency in ms; it shares the cores with what is measured.
Shards are uploaded as a run uploads them, of a few tiny items each."""

import os
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import perf_counter, process_time

import numpy as np

import featcache
from featcache.cli import main as featcache_command
from featcache.storage.base import in_parallel
from featcache.storage.location import parse_location
from featcache.version.indexing import keep_index

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from harness import Table, options, present
from made_up import add_shard, make_version
from s3_in_memory import s3_in_memory

ITEMS = 4
FEATURES = [np.zeros((2, 8), np.uint16)] * ITEMS


def main() -> None:
    asked = options(__doc__, shards=2000, latency=[0.0, 50.0])
    with s3_in_memory() as server:
        os.environ |= server.environment
        present(asked, measure(server, asked.shards, asked.latency))


def measure(server, shards: int, latencies: list[float]) -> Table:
    url = "s3://speech/cache"
    version = make_version(parse_location("cache", url), FEATURES)
    table = Table("what, at a latency", {"seconds": "{:.1f}", "CPU s": "{:.1f}", "requests": "{}"})

    def step(what: str, function, latency: float = 0.0, each: int = 1) -> None:
        server.requests(latency / 1000)
        start, cpu = perf_counter(), process_time()
        function()
        taken = perf_counter() - start, process_time() - cpu
        counts = ", ".join(
            f"{count / each:g} {method}" for method, count in sorted(server.requests().items())
        )
        table.add(f"{what}, {latency:g} ms", *taken, counts)

    def upload(numbers: range) -> None:
        in_parallel(lambda number: add_shard(version, FEATURES, number * ITEMS), numbers, 16)

    step("a shard", lambda: upload(range(1, 2)))
    step(f"each of {shards} shards", lambda: upload(range(2, shards)), each=shards - 2)
    count = shards
    for latency in latencies:
        version.store.remove("index")
        step(f"an index of {count} shards", lambda: keep_index(version), latency)
        step("the same again", lambda: keep_index(version), latency)
        upload(range(count, count + 1))
        count += 1
        step("an index of one shard more", lambda: keep_index(version), latency)
        step("open", lambda: featcache.open(url), latency)
        with redirect_stdout(StringIO()):
            step("info", lambda: featcache_command(["info", url], standalone_mode=False), latency)
    return table


if __name__ == "__main__":
    main()
