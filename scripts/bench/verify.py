"""Measure how fast `verify` is, compared with reading the same bytes and computing their
CRC-32C, on one core.

    python scripts/bench/verify.py [--megabytes 1000] [--threads 2] [--rounds 5] [--json]

Two caches: of items like fbank of LibriSpeech (float16, 80 bins, 12.3 s: 200 kB), and of
short ones (0.3 s: 5 kB). The comparison reads each chunk file of features into one
buffer, a megabyte at a time, and takes the checksum of the whole: once over every byte.
verify does that, and checks offsets, ids, durations, metadata and the index, with --values
also each value for NaN and infinity. The files are in the page cache. A second line of the
comparison reads into memory that begins at a page, in the same pieces, as verify does:
the kernel copies faster there. In each round all take turns; the table has the median of
the rounds, and ratios are medians of the ratios within a round."""

import argparse
import mmap
from pathlib import Path

import numpy as np
from crc32c import crc32c
from harness import Table, options, present, remark, take_turns, temporary_folder
from made_up import BINS, make_features, make_version

from featcache.care.verify import verify
from featcache.version.indexing import open_index
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


def measure(name: str, folder: Path, asked: argparse.Namespace) -> tuple[Table, str]:
    """The figures of a cache of items of this kind, made in a folder, and a remark."""
    mean_seconds = CACHES[name]
    frame_bytes = 2 * BINS
    arrays = make_features(
        round(asked.megabytes * 1e6 / frame_bytes / 100 / (mean_seconds or 12.3)), mean_seconds
    )
    num_bytes = sum(array.nbytes for array in arrays)
    version = make_version(folder, arrays, round(SHARD_BYTES * len(arrays) / num_bytes))
    open_index(version)  # which extraction keeps, too
    block = np.empty(BLOCK_BYTES, np.uint8)
    at_page = np.frombuffer(
        mmap.mmap(-1, BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
    )
    runs = {
        LIMIT: lambda: read_and_sum(version, block),
        "the same, at a page": lambda: read_and_sum(version, at_page),
        "verify, 1 thread": lambda: verify(version),
        f"verify, {asked.threads} threads": lambda: verify(version, threads=asked.threads),
        "verify --values, 1 thread": lambda: verify(version, values=True),
        "verify --no-data, 1 thread": lambda: verify(version, data=False),
    }
    if problems := verify(version).problems:  # and everything is in the page cache now
        raise SystemExit(f"a cache that was just made has {problems[0]}")
    turns = take_turns(runs, asked.rounds)
    about = (
        f"{len(arrays):,} {name} items of {num_bytes / len(arrays) / 1e3:,.0f} kB, "
        f"{num_bytes / 1e6:,.0f} MB in"
    )
    table = Table(
        f"{about} {len(version.shard_names())} shards",
        {
            **dict.fromkeys(("seconds", "best", "CPU s"), "{:.3f}"),
            "GB/s": "{:.2f}",
            "of reading": "{:.2f}",
        },
    )
    for run in runs:
        seconds, ratio = turns.median(run), turns.ratio(LIMIT, run)
        table.add(
            run,
            seconds,
            turns.best(run),
            turns.median(run, "cpu_seconds"),
            num_bytes / seconds / 1e9,
            ratio,
        )
    return table, remark(turns.others)


def main() -> None:
    asked = options(
        __doc__,
        megabytes=(1000.0, "of features in each cache"),
        folder=(Path, "to make them in, on the disk to be measured"),
        threads=2,
        rounds=5,
    )
    parts = []
    for name in CACHES:
        with temporary_folder(asked.folder) as folder:
            parts += measure(name, folder, asked)
    present(asked, *parts)


if __name__ == "__main__":
    main()
