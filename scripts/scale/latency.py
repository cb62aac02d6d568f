"""Training from an object store that is far away, and extraction into it, beside a local disk: bytes and seconds.

    python scripts/scale/latency.py [--latency 50] [--manifest MANIFEST --root ROOT]

The store is moto's, on loopback, behind a proxy that holds back each request for the latency; both share the cores with
what is measured, and copy slowly, as a store would not. Training reads made-up features of five times the limit of its
local disk, in windows of three shards, twice. Extraction takes turns: into a folder, and into the store.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).parent
sys.path += [str(HERE.parent / "bench"), str(HERE.parents[1] / "tests" / "helpers")]

from load import make_features, make_version  # noqa: E402
from object_stores import BUCKET, s3_server  # noqa: E402

import featcache  # noqa: E402
from featcache.storage.location import parse_location  # noqa: E402
from featcache.store.copying import copy_version  # noqa: E402
from featcache.store.selection import select_version  # noqa: E402

PARTS_OF_DATA = 5
"""How many times the limit of the local disk the data is."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=1200)
    parser.add_argument("--shards", type=int, default=40)
    parser.add_argument("--latency", type=float, default=50, help="milliseconds")
    parser.add_argument("--manifest", type=Path, help="for extraction")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with s3_server() as proxy, tempfile.TemporaryDirectory() as name:
        os.environ |= proxy.environment
        proxy.empty()
        measure_training(proxy, Path(name), arguments)
        if arguments.manifest:
            measure_extraction(proxy, Path(name), arguments)


def measure_training(proxy, folder: Path, arguments: argparse.Namespace) -> None:
    features = make_features(arguments.utterances, mean_seconds=4)
    version = make_version(folder / "far", features, items_per_shard=-(-len(features) // arguments.shards))
    num_bytes = sum(array.nbytes for array in features)
    copy_version(version, parse_location("to", f"s3://{BUCKET}/far"))
    local = epoch(featcache.open(version.path), 0)
    print(
        f"{num_bytes / 1e6:,.0f} MB in {arguments.shards} shards; from a local disk {len(features) / local:,.0f} utt/s"
    )
    far = f"s3://{BUCKET}/far/{version.path.name}"
    cache = featcache.open(far, copy_to=folder / "near", copy_limit=num_bytes // PARTS_OF_DATA)
    proxy.seconds = arguments.latency / 1000
    for number in (0, 1):
        proxy.requests.clear()
        proxy.sent_by_path.clear()
        seconds = epoch(cache, number)
        chunks = proxy.sent_of("/features/c/0/0") / num_bytes
        others = sum(proxy.sent_by_path.values()) / num_bytes - chunks
        print(
            f"epoch {number}: features {chunks:.3f} × the data, others {others:.3f} ×; {proxy.requests['GET']} GETs; "
            f"{len(features) / seconds:,.0f} utt/s, {local / seconds:.3f} of the local disk's"
        )
    proxy.seconds = 0


def epoch(cache: featcache.Cache, number: int) -> float:
    """The seconds of an epoch in windows of three shards."""
    dataset = featcache.FeatureDataset(cache)
    sampler = featcache.BucketBatchSampler(
        dataset.lengths, max_frames=12_800, seed=1, shards=dataset.shards, shards_in_memory=3
    )
    sampler.set_epoch(number)
    start = perf_counter()
    count = sum(len(batch["ids"]) for batch in featcache.DataLoader(dataset, sampler))
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
