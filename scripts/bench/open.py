"""What opening ten million utterances takes: seconds, and memory that no other process shares.

    pip install .
    python scripts/bench/open.py [--utterances 10000000] [--folder FOLDER]

A version of so many tiny utterances is made first, which takes some minutes and 0.2 kB each; with --folder it is kept
there, and used again the next time. Memory is Private_Dirty of /proc/self/smaps_rollup, what a step leaves; and the
most on the way is RssAnon, as a thread sees it every few milliseconds. Mapped files are in neither: they are the page
cache's, and all processes share them. Cold means that the index is not in the page cache.

Seen on 2 shared cores and a virtual disk that reads 2.4 GB/s, Python 3.11, torch 2.11, numpy 2.4, for 10^7 utterances
with an index of 910 MB: opening takes 0.15 s and no memory to speak of; FeatureDataset(cache) 23 ms; BucketBatchSampler
0.02 s and 80 MB on the way; its first batch 0.3 s, 180 MB on the way and 80 MB that stay; 500 random batches add 4 MB
to a forked worker and 11 MB to a spawned one. Building the index took 14 s and 2.6 GB.
"""

import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from harness import forget, in_child, options, private_bytes
from made_up import make_version

import featcache

BATCH, BATCHES = 64, 500
ITEMS_PER_SHARD = 50_000
PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    asked = options(__doc__, utterances=10_000_000, folder=(Path, "where to keep the version"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = asked.folder or Path(name)
        if not list(folder.glob("*/zarr.json")):
            in_child(make, folder, asked.utterances)
        in_child(measure, folder)


def make(folder: Path, count: int) -> None:
    with step("make the version"):
        make_version(folder, [np.zeros((2, 8), np.uint16)] * count, ITEMS_PER_SHARD)


def measure(folder: Path) -> None:
    if not list(folder.glob("*/index/*")):
        with step("open, the first time: the index is built"):
            featcache.open(folder)
    featcache.open(folder)  # imports
    forget(folder.glob("*/index/*/*"))
    with step("open, cold"):
        featcache.open(folder)
    with step("open"):
        cache = featcache.open(folder)
    with step(f"{BATCHES} random batches"):
        read(cache)
    with step("FeatureDataset(cache)"):
        dataset = featcache.FeatureDataset(cache)
    with step("BucketBatchSampler"):
        sampler = featcache.BucketBatchSampler(dataset.lengths, max_frames=BATCH * 2)
    with step("its first batch"):
        batches = iter(sampler)
        next(batches)
    del batches, sampler
    in_child(work, lambda: dataset, "forked")
    worker = multiprocessing.get_context("spawn").Process(target=work_spawned, args=(dataset,))
    worker.start()
    worker.join()


def work(get: Callable[[], featcache.FeatureDataset], how: str) -> None:
    with step(f"{BATCHES} random batches in a {how} worker"):
        read(get().cache)


def work_spawned(dataset: featcache.FeatureDataset) -> None:
    """In a new process: what it took to unpickle the dataset is behind us, and so done again."""
    data = pickle.dumps(dataset)
    del dataset
    torch.set_num_threads(1)
    work(lambda: pickle.loads(data), "spawned")


def read(cache: featcache.Cache) -> None:
    rows = np.random.default_rng(0).integers(0, len(cache), (BATCHES, BATCH))
    for batch in rows:
        cache.batch(batch)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Say what is done within, how long it took, what memory it left, and the most on the way."""
    before, before_anonymous, done = private_bytes(), anonymous_bytes(), threading.Event()
    most = before_anonymous

    def watch() -> None:
        nonlocal most
        while not done.wait(0.004):
            most = max(most, anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = perf_counter()
    yield
    seconds = perf_counter() - start
    done.set()
    watcher.join()
    left = private_bytes() - before
    most = max(most - before_anonymous, left)
    print(f"{name:46}{seconds:9.3f} s{left / 1e6:9.1f} MB{most / 1e6:9.1f} MB at most", flush=True)


def anonymous_bytes() -> int:
    """Cheap enough to be asked for all the time."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * PAGE


if __name__ == "__main__":
    main()
