"""What caching above the page cache gives: cold batches, hits in memory, copies; and whether memory stays in its limit.

    pip install .
    python scripts/bench/tiers.py [--utterances 3000] [--folder FOLDER]

Batches of 64 shuffled utterances of 16 kB a second, as in `load.py`, best of the rounds, in which all take turns.
Cold means that no byte of the features is in the page cache before each round, on the disk that holds the folder;
"without asking ahead" is what the kernel's own readahead makes of it. Memory is what this process has to itself
(RssAnon) after utterances of 5 kB to 1 MB have come and gone a million times, by one thread and by eight, held in Ram
and in plain numpy arrays that malloc keeps.

Seen on 2 shared and busy cores and a virtual disk, Python 3.11, torch 2.11, numpy 2.4, utterances/s: mapped 45,300, all
hits in memory 51,900, copies in /dev/shm 43,300; cold 7,100, without asking ahead 1,340. Ram takes 1.00 of its limit
with one thread and 1.01 with eight, plain arrays 1.17 and 2.47.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from load import BATCH, BINS, make_features, make_version, shuffled
from open import anonymous_bytes, forget, in_child

import featcache
from featcache.loader.buffers import Readahead
from featcache.loader.memory import Ram

LIMIT = 500_000_000
SMALL, LARGE = 5_000, 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--evictions", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="on the disk that is to be cold")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, tempfile.TemporaryDirectory(dir="/dev/shm") as near:
        make_version(Path(name), make_features(arguments.utterances))
        in_child(measure_warm, Path(name), Path(near), arguments.rounds)
        in_child(measure_cold, Path(name), arguments.rounds)
    for threads in (1, 8):
        for how in ("Ram", "malloc"):
            in_child(measure_memory, how, threads, arguments.evictions)


# Speed


def measure_warm(folder: Path, near: Path, rounds: int) -> None:
    caches = {
        "mapped": featcache.open(folder),
        "ram, all hits": featcache.open(folder, ram="8GB"),
        "copies in /dev/shm": featcache.open(folder, copy_to=near),
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


# Memory


class Malloc:
    """The same without an arena: arrays of their own, their bytes counted."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held, self.lock = limit, 0, threading.Lock()
        self.arrays: OrderedDict[int, np.ndarray] = OrderedDict()

    def get(self, number: int) -> np.ndarray | None:
        with self.lock:
            array = self.arrays.get(number)
            if array is not None:
                self.arrays.move_to_end(number)
            return array

    def keep(self, number: int, array: np.ndarray) -> None:
        array = array.copy()
        with self.lock:
            if number not in self.arrays:
                self.held += array.nbytes
            self.arrays[number] = array
            while self.held > self.limit:
                self.held -= self.arrays.popitem(last=False)[1].nbytes


def measure_memory(how: str, num_threads: int, evictions: int) -> None:
    count = int(2 * LIMIT * np.log(LARGE / SMALL) / (LARGE - SMALL))  # about twice what fits
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(SMALL), np.log(LARGE), count)).astype(int)
    source = np.ones(LARGE, np.uint8)
    before = anonymous_bytes()
    kept = Ram(LIMIT, count, int(sizes.sum())) if how == "Ram" else Malloc(LIMIT)

    def work(seed: int) -> None:
        left, random = evictions // num_threads, np.random.default_rng(seed)
        while left > 0:
            for number in random.integers(0, count, 1000).tolist():
                if kept.get(number) is None:
                    kept.keep(number, source[: sizes[number]])
                    left -= 1

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    taken = (anonymous_bytes() - before) / LIMIT
    print(f"{how}, {num_threads} threads: {taken:.2f} of the limit of {LIMIT / 1e6:,.0f} MB", flush=True)


if __name__ == "__main__":
    main()
