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

import mmap
import tempfile
from pathlib import Path

import numpy as np
from crc32c import crc32c
from harness import columns, options, present, remark, take_turns
from made_up import BINS, make_features, make_version

from featcache.care.verify import verify
from featcache.version.version import Version

CACHES = {"fbank-like": None, "short": 0.34}
"""The mean seconds of the items of each cache; those of LibriSpeech."""
SHARD_BYTES = 128e6
BLOCK_BYTES = 1 << 20
LIMIT = "read and crc32c, 1 thread"


def read_and_sum(version: Version, block: np.ndarray) -> None:
    """What verify is held against: read and crc32c, one thread, nothing else."""
    for name in version.shard_names():
        crc = 0
        with (version.path / "shards" / name / "features/c/0/0").open("rb", buffering=0) as file:
            while got := file.readinto(block.data):
                crc = crc32c(block[:got], crc)


def measure(megabytes: float, mean_seconds: float | None, folder: Path, threads: int, rounds: int) -> dict:
    frame_bytes = 2 * BINS
    arrays = make_features(round(megabytes * 1e6 / frame_bytes / 100 / (mean_seconds or 12.3)), mean_seconds)
    num_bytes = sum(array.nbytes for array in arrays)
    version = make_version(folder, arrays, round(SHARD_BYTES * len(arrays) / num_bytes))
    block = np.empty(BLOCK_BYTES, np.uint8)
    at_page = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    runs = {
        LIMIT: lambda: read_and_sum(version, block),
        "the same, at a page": lambda: read_and_sum(version, at_page),
        "verify, 1 thread": lambda: verify(version),
        f"verify, {threads} threads": lambda: verify(version, threads=threads),
        "verify --no-data, 1 thread": lambda: verify(version, data=False),
    }
    if problems := verify(version).problems:  # and everything is in the page cache now
        raise SystemExit(f"a cache that was just made has {problems[0]}")
    turns = take_turns(runs, rounds)
    return {
        "items": len(arrays),
        "bytes": num_bytes,
        "shards": len(version.shard_names()),
        "others": turns.others,
        "runs": {
            name: {
                "seconds": turns.median(name),
                "best_seconds": turns.best(name),
                "cpu_seconds": turns.median(name, "cpu_seconds"),
                "of_limit": turns.ratio(LIMIT, name),
            }
            for name in runs
        },
    }


def show(results: dict[str, dict]) -> str:
    parts = []
    for name, result in results.items():
        size, each = result["bytes"], result["bytes"] / result["items"] / 1e3
        about = f"{result['items']:,} {name} items of {each:,.0f} kB, {size / 1e6:,.0f} MB in {result['shards']} shards"
        rows = [
            (run, *(f"{took[key]:.3f}" for key in ("seconds", "best_seconds", "cpu_seconds")),
             f"{size / took['seconds'] / 1e9:.2f}", f"{took['of_limit']:.2f}")
            for run, took in result["runs"].items()
        ]  # fmt: skip
        parts += [about, columns(["", "seconds", "best", "CPU s", "GB/s", "of reading"], *rows)]
        parts.append(remark(result["others"]))
    return "\n".join(parts)


def main() -> None:
    asked = options(
        __doc__,
        megabytes=(1000.0, "of features in each cache"),
        folder=(Path, "to make them in, on the disk to be measured"),
        threads=2,
        rounds=5,
    )
    results = {}
    for name, mean_seconds in CACHES.items():
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            results[name] = measure(asked.megabytes, mean_seconds, Path(folder), asked.threads, asked.rounds)
    present(results, show, asked)


if __name__ == "__main__":
    main()
