"""How fast `verify` is, beside reading the same bytes and taking their CRC-32C, on one core.

    python scripts/bench/verify.py [--megabytes 1000] [--threads 2] [--rounds 5] [--json]

Two caches: of items like fbank of LibriSpeech (float16, 80 bins, 12.3 s: 200 kB), and of short ones (0.3 s: 5 kB).
The comparison reads each chunk file of features into one buffer, a megabyte at a time, and takes the checksum of
the whole: once over every byte. verify does that, and finds each item's checksum, values that are not finite,
offsets, ids, durations, and metadata. The files are in the page cache. A second line of the comparison reads into
memory that begins at a page, in the same pieces, as verify does: the kernel copies faster there. In each round
all take turns; the table has the median of the rounds, and ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from clock import CORES, Timed, median, remark, timed, undisturbed
from corpus import KINDS
from crc32c import crc32c
from featcache.store.zarr3 import chunk_path
from load import BINS, make_version

from featcache.care.verify import verify
from featcache.version.version import Version

FRAME_BYTES = 2 * BINS
SHARD_BYTES = 128e6
BLOCK_BYTES = 1 << 20


def fbank_like(num_bytes: float) -> Iterator[np.ndarray]:
    """Items of LibriSpeech's lengths."""
    lengths = KINDS["long"].lengths(np.random.default_rng(0))
    return _items((int(100 * seconds) for seconds in lengths), num_bytes)


def short(num_bytes: float) -> Iterator[np.ndarray]:
    """Items of 32 frames, 5 kB."""
    while num_bytes > 0:
        yield from _items(iter([32] * 1000), min(num_bytes, 1000 * 32 * FRAME_BYTES))
        num_bytes -= 1000 * 32 * FRAME_BYTES


def _items(lengths: Iterator[int], num_bytes: float) -> Iterator[np.ndarray]:
    """Cuts of some noise, of the lengths given, until there are that many bytes."""
    random = np.random.default_rng(1)
    pool = random.normal(8, 3, (20_000, BINS)).astype(np.float16)
    for length in lengths:
        if num_bytes <= 0:
            return
        start = int(random.integers(len(pool) - length))
        yield pool[start : start + length]
        num_bytes -= length * FRAME_BYTES


def read_and_sum(version: Version, block: np.ndarray) -> None:
    """What verify is held against: read and crc32c, one thread, nothing else."""
    for name in version.shard_names():
        crc = 0
        with chunk_path(version.path / "shards" / name / "features", 2).open("rb", buffering=0) as file:
            while got := file.readinto(block.data):
                crc = crc32c(block[:got], crc)


def measure(items: Iterator[np.ndarray], folder: Path, threads: int, rounds: int) -> dict:
    arrays = list(items)
    num_bytes = sum(array.nbytes for array in arrays)
    version = make_version(folder, arrays, round(SHARD_BYTES * len(arrays) / num_bytes))
    block = np.empty(BLOCK_BYTES, np.uint8)
    at_page = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    runs: dict[str, Callable[[], object]] = {
        "read and crc32c, 1 thread": lambda: read_and_sum(version, block),
        "the same, at a page": lambda: read_and_sum(version, at_page),
        "verify, 1 thread": lambda: verify(version),
        f"verify, {threads} threads": lambda: verify(version, threads=threads),
        "verify --no-data, 1 thread": lambda: verify(version, data=False),
    }
    if problems := verify(version).problems:  # and everything is in the page cache now
        raise SystemExit(f"a cache that was just made has {problems[0]}")
    taken: list[dict[str, Timed]] = [
        {name: undisturbed(partial(timed, run)) for name, run in runs.items()} for _ in range(rounds)
    ]
    limit = next(iter(runs))
    return {
        "items": len(arrays),
        "bytes": num_bytes,
        "shards": len(version.shard_names()),
        "others": max(timed_run.others for each in taken for timed_run in each.values()),
        "runs": {
            name: {
                "seconds": median([each[name].seconds for each in taken]),
                "best_seconds": min(each[name].seconds for each in taken),
                "cpu_seconds": median([each[name].cpu_seconds for each in taken]),
                "of_limit": median([each[limit].seconds / each[name].seconds for each in taken]),
            }
            for name in runs
        },
    }


def show(name: str, result: dict) -> None:
    each = result["bytes"] / result["items"] / 1e3
    print(
        f"\n{result['items']:,} {name} items of {each:,.0f} kB, {result['bytes'] / 1e6:,.0f} MB in "
        f"{result['shards']} shards"
    )
    print(f"{'':30}{'seconds':>9}{'best':>9}{'CPU s':>9}{'GB/s':>8}{'of reading':>12}")
    for run, line in result["runs"].items():
        speed = result["bytes"] / line["seconds"] / 1e9
        times = "".join(f"{line[key]:9.3f}" for key in ("seconds", "best_seconds", "cpu_seconds"))
        print(f"{run:30}{times}{speed:8.2f}{line['of_limit']:12.2f}")
    print(remark(result["others"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000, help="of features in each cache")
    parser.add_argument("--folder", type=Path, help="to make them in, on the disk to be measured")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = {}
    for name, make in (("fbank-like", fbank_like), ("short", short)):
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            results[name] = measure(make(asked.megabytes * 1e6), Path(folder), asked.threads, asked.rounds)
    if asked.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{CORES} cores; Python {sys.version.split()[0]} on {platform.machine()}; median of {asked.rounds} rounds")
    for name, result in results.items():
        show(name, result)


if __name__ == "__main__":
    main()
