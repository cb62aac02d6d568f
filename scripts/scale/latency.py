"""Training from an object store that is far away, and extraction into it, beside a local disk: bytes and seconds.

    python scripts/scale/latency.py [--latency 50] [--manifest MANIFEST --root ROOT]

The store is moto's, on loopback, behind a proxy that holds back each request for the latency; both share the cores with
what is measured, and copy slowly, as a store would not. So the ceiling is measured too: the same bytes by 16 parallel
requests, and nothing else. Training reads made-up features of five times the limit of its local disk, in windows of
shards, twice: with many small shards and with few large ones, by threads and by two worker processes; and without
copies, in any order. Extraction takes turns: into a folder, and into the store.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter

from torch.utils.data import DataLoader

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "bench"), str(HERE.parents[1] / "tests" / "helpers")]

from harness import options  # noqa: E402
from made_up import make_features, make_version  # noqa: E402
from object_stores import BUCKET, s3_server  # noqa: E402

import featcache  # noqa: E402
from featcache.care.copying import copy_version  # noqa: E402
from featcache.storage.location import parse_location  # noqa: E402
from featcache.version.selection import select_version  # noqa: E402
from featcache.version.version import Version  # noqa: E402

PARTS_OF_DATA = 5
"""How many times the limit of the local disk the data is."""


def main() -> None:
    arguments = options(__doc__, latency=(50.0, "milliseconds"), manifest=(Path, "for extraction"), root=Path, rounds=2)
    with s3_server() as proxy, tempfile.TemporaryDirectory() as name:
        os.environ |= proxy.environment
        proxy.empty()
        for shards, megabytes, window in ((40, 2, 3), (10, 16, 1)):
            measure_training(proxy, Path(name, f"{shards}"), arguments.latency / 1000, shards, megabytes, window)
        if arguments.manifest:
            measure_extraction(proxy, Path(name), arguments)


def measure_training(proxy, folder: Path, latency: float, shards: int, megabytes: int, window: int) -> None:
    features = make_features(round(shards * megabytes * 1e6 / (4 * 16_000)), mean_seconds=4)
    version = make_version(folder / "far", features, items_per_shard=-(-len(features) // shards))
    num_bytes = sum(array.nbytes for array in features)
    far = f"s3://{BUCKET}/{shards}"
    copy_version(version, parse_location("to", far))
    far = f"{far}/{version.path.name}"
    local = epoch(featcache.DataLoader, featcache.open(version.path), 0, window)
    print(f"{num_bytes / 1e6:,.0f} MB in {shards} shards, windows of {window}", end="; ")
    print(f"from a local disk {len(features) / local:,.0f} utt/s")
    proxy.seconds = latency

    def measure(what: str, loader, cache: featcache.Cache, number: int, window: int | None = None) -> None:
        least = ceiling(Version.open(parse_location("to", far)))  # each time: others use the machine too
        proxy.requests.clear()
        proxy.sent_by_path.clear()
        seconds = epoch(loader, cache, number, window)
        chunks = proxy.sent_of("/features/c/0/0") / num_bytes
        others = sum(proxy.sent_by_path.values()) / num_bytes - chunks
        print(f"  {what}: features {chunks:.3f} × the data, others {others:.3f} ×", end="; ")
        print(f"{sum(proxy.requests.values())} requests; {len(features) / seconds:,.0f} utt/s", end=", ")
        print(f"{least / seconds:.2f} of the ceiling of {num_bytes / 1e6 / least:,.0f} MB/s", end=", ")
        print(f"{local / seconds:.3f} of the local disk's")

    limit = num_bytes // PARTS_OF_DATA + 1000 * shards
    for what, loader in (("threads", featcache.DataLoader), ("2 workers", two_workers)):
        cache = featcache.open(far, copy_to=folder / what, copy_limit=limit)
        for number in (0, 1):
            measure(f"{what}, epoch {number}", loader, cache, number, window)
    for number, prefetch in enumerate((2, 8)):
        loader = partial(featcache.DataLoader, prefetch=prefetch)
        measure(f"no copies, prefetch={prefetch}", loader, featcache.open(far), number)
    proxy.seconds = 0


def ceiling(version: Version) -> float:
    """The seconds that it takes to fetch the features of all shards by parallel requests of 8 MB."""
    files = [(version.store.open(key, size), size) for key, size in version.store.walk("shards") if "features/c" in key]
    blocks = [(file, at, min(8 << 20, size - at)) for file, size in files for at in range(0, size, 8 << 20)]
    start = perf_counter()
    with ThreadPoolExecutor(16) as threads:
        for _ in threads.map(lambda block: block[0].read_ranges([block[1]], [block[2]]), blocks):
            pass
    return perf_counter() - start


def two_workers(dataset: featcache.FeatureDataset, sampler: featcache.BucketBatchSampler) -> DataLoader:
    return DataLoader(dataset, batch_sampler=sampler, num_workers=2, collate_fn=dataset.collate)


def epoch(loader, cache: featcache.Cache, number: int, window: int | None) -> float:
    """The seconds of an epoch in windows of so many shards, or of all."""
    dataset = featcache.FeatureDataset(cache)
    shards = None if window is None else dataset.shards
    sampler = featcache.BucketBatchSampler(
        dataset.lengths, max_frames=12_800, seed=1, shards=shards, shards_in_memory=window
    )
    sampler.set_epoch(number)
    start = perf_counter()
    count = sum(len(batch["ids"]) for batch in loader(dataset, sampler))
    assert count == len(cache)
    return perf_counter() - start


def measure_extraction(proxy, folder: Path, arguments: argparse.Namespace) -> None:
    for number in range(arguments.rounds):
        for name, to in (("folder", folder / f"e{number}"), ("store", f"s3://{BUCKET}/e{number}")):
            proxy.reset()
            proxy.seconds = arguments.latency / 1000
            command = [sys.executable, "-m", "featcache", "extract", arguments.manifest, "--shard-size", "8"]
            start = perf_counter()
            subprocess.run(
                [*map(str, command), "-o", str(to), "--root", str(arguments.root)],
                env=dict(os.environ),
                check=True,
                capture_output=True,
            )
            seconds = perf_counter() - start
            proxy.seconds = 0
            count = len(select_version(parse_location("to", to)).shard_names())
            print(f"extraction into a {name}: {seconds:.1f} s, {count} shards, {dict(proxy.requests)}")


if __name__ == "__main__":
    main()
