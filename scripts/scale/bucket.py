"""What a bucket is asked for: by shards that are uploaded, an index of very many, one shard more, opening and `info`.

    python scripts/scale/bucket.py [--shards 2000] [--latency 0 50]

The store is moto's S3 on loopback, behind a proxy that counts requests and holds each back for the latency in ms; both
share the cores with what is measured. Shards are uploaded as a run uploads them, of a few tiny items each.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from time import perf_counter, process_time

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "bench"), str(HERE.parents[1] / "tests" / "helpers")]

import numpy as np  # noqa: E402
from harness import columns, options, present  # noqa: E402
from made_up import add_shard, make_version  # noqa: E402
from object_stores import BUCKET, s3_server  # noqa: E402

import featcache  # noqa: E402
from featcache.cli import main as featcache_command  # noqa: E402
from featcache.storage.base import in_parallel  # noqa: E402
from featcache.storage.location import parse_location  # noqa: E402
from featcache.version.index import keep_index  # noqa: E402

ITEMS = 4
FEATURES = [np.zeros((2, 8), np.uint16)] * ITEMS


def main() -> None:
    asked = options(__doc__, shards=2000, latency=[0.0, 50.0])
    with s3_server() as proxy:
        os.environ |= proxy.environment
        proxy.empty()
        present(measure(proxy, asked.shards, asked.latency), lambda rows: columns(*rows), asked)


def measure(proxy, shards: int, latencies: list[float]) -> list[list[str]]:
    url = f"s3://{BUCKET}/cache"
    version = make_version(parse_location("cache", url), FEATURES)
    rows = [["", "ms", "seconds", "CPU s", "requests"]]

    def step(what: str, function, latency: float = 0.0, each: int = 1) -> None:
        proxy.requests.clear()
        proxy.seconds = latency / 1000
        start, cpu = perf_counter(), process_time()
        function()
        taken = [f"{perf_counter() - start:.1f}", f"{process_time() - cpu:.1f}"]
        proxy.seconds = 0.0
        counts = ", ".join(f"{count / each:g} {method}" for method, count in sorted(Counter(proxy.requests).items()))
        rows.append([what, f"{latency:g}", *taken, counts])
        print("  ".join(rows[-1]), file=sys.stderr)

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
    return rows


if __name__ == "__main__":
    main()
