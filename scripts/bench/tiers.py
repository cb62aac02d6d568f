"""What caching above the page cache gives: cold batches, and copies of shards in memory.

    pip install .
    python scripts/bench/tiers.py [--utterances 3000] [--folder FOLDER]

Batches of 64 shuffled utterances of 16 kB a second, as in `load.py`, best of the rounds, in which all take turns.
Cold means that no byte of the features is in the page cache before each round, on the disk that holds the folder;
"without asking ahead" is what the kernel's own readahead makes of it.

Seen on 2 shared and busy cores and a virtual disk, Python 3.11, torch 2.11, numpy 2.4, utterances/s: mapped 45,300,
copies in memory 43,300; cold 7,100, without asking ahead 1,340.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from load import BATCH, BINS, make_features, make_version, shuffled
from open import forget, in_child

import featcache
from featcache.loader.buffers import Readahead


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be cold")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        make_version(Path(name), make_features(arguments.utterances))
        in_child(measure_warm, Path(name), arguments.rounds)
        in_child(measure_cold, Path(name), arguments.rounds)


def measure_warm(folder: Path, rounds: int) -> None:
    caches = {
        "mapped": featcache.open(folder),
        "copies in memory, ram=": featcache.open(folder, ram="8GB"),
    }
    batches = shuffled(len(caches["mapped"]), 40)
    for cache in caches.values():
        speed(cache, batches)
    while any(thread.name == "featcache-copies" for thread in threading.enumerate()):
        time.sleep(0.1)
    best = dict.fromkeys(caches, 0.0)
    for _ in range(rounds):
        for name, cache in caches.items():
            best[name] = max(best[name], speed(cache, batches))
    show(best)


def measure_cold(folder: Path, rounds: int) -> None:
    best = dict.fromkeys(("cold", "cold, without asking ahead"), 0.0)
    batches = shuffled(len(featcache.open(folder)), 10)
    for _ in range(rounds):
        for name in best:
            forget(folder.glob("*/shards/*/features/c/0/0"))
            cache = featcache.open(folder)  # what a process has mapped stays in memory, so each has its own
            if "without" in name:
                cache._shards._readahead = NoReadahead()
            best[name] = max(best[name], speed(cache, batches))
            del cache
    show(best)


class NoReadahead(Readahead):
    def over(self, arrays: object) -> nullcontext[None]:
        return nullcontext()


def speed(cache: featcache.Cache, batches: list[list[int]]) -> float:
    """Utterances a second, into one buffer."""
    room = torch.from_numpy(np.ones(BATCH * int(cache.lengths.max()) * BINS, np.float16))
    start = perf_counter()
    for rows in batches:
        cache.batch(rows, out=room)
    return len(batches) * BATCH / (perf_counter() - start)


def show(speeds: dict[str, float]) -> None:
    for name, value in speeds.items():
        print(f"{name:40}{value:12,.0f} utterances/s", flush=True)


if __name__ == "__main__":
    main()
