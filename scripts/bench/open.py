"""Measure what opening ten million utterances needs: seconds, and memory that no other
process shares.

    pip install .
    python scripts/bench/open.py [--utterances 10000000] [--folder FOLDER] [--json]

A version of so many tiny utterances is made first, which takes some minutes and 0.2 kB
each; with --folder it is kept there, and used again the next time. Memory is
Private_Dirty of /proc/self/smaps_rollup, what a step leaves; and the most on the way is
RssAnon, as a thread sees it every few milliseconds. Mapped files are in neither: they are
the page cache's, and all processes share them. Cold means that the index is not in the
page cache."""

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from harness import (
    Table,
    forget,
    in_child,
    options,
    present,
    private_bytes,
    status_bytes,
    temporary_folder,
)
from made_up import make_version

import featcache

BATCH, BATCHES = 64, 500
ITEMS_PER_SHARD = 50_000

Steps = dict[str, tuple[float, float, float]]
"""What each step took: seconds, the MB that it left, and the most on the way."""


def main() -> None:
    asked = options(__doc__, utterances=10_000_000, folder=(Path, "where to keep the version"))
    torch.set_num_threads(1)
    with temporary_folder() as temporary:
        folder = asked.folder or temporary
        steps: Steps = {}
        if not list(folder.glob("*/zarr.json")):
            steps |= in_child(make, folder, asked.utterances)
        steps |= in_child(measure, folder)
    table = Table(
        "step", {"seconds": "{:.3f}", **dict.fromkeys(("MB left", "MB at most"), "{:.1f}")}
    )
    for step, figures in steps.items():
        table.add(step, *figures)
    present(asked, table)


def make(folder: Path, count: int) -> Steps:
    steps: Steps = {}
    with watched(steps, "make the version"):
        make_version(folder, [np.zeros((2, 8), np.uint16)] * count, ITEMS_PER_SHARD)
    return steps


def measure(folder: Path) -> Steps:
    steps: Steps = {}
    if not list(folder.glob("*/index/*")):
        with watched(steps, "open, the first time: the index is built"):
            featcache.open(folder)
    featcache.open(folder)  # imports
    forget(folder.glob("*/index/*/*"))
    with watched(steps, "open, cold"):
        featcache.open(folder)
    with watched(steps, "open"):
        cache = featcache.open(folder)
    with watched(steps, f"{BATCHES} random batches"):
        read(cache)
    with watched(steps, "FeatureDataset(cache)"):
        dataset = featcache.FeatureDataset(cache)
    with watched(steps, "BucketBatchSampler"):
        sampler = featcache.BucketBatchSampler(dataset.lengths, max_frames=BATCH * 2)
    with watched(steps, "its first batch"):
        batches = iter(sampler)
        next(batches)
    del batches, sampler
    steps |= in_child(work, lambda: dataset, "forked")
    with ProcessPoolExecutor(1, get_context("spawn")) as spawned:
        return steps | spawned.submit(work_unpickled, pickle.dumps(dataset)).result()


def work(get: Callable[[], featcache.FeatureDataset], how: str) -> Steps:
    steps: Steps = {}
    with watched(steps, f"{BATCHES} random batches in a {how} worker"):
        read(get().cache)
    return steps


def work_unpickled(pickled: bytes) -> Steps:
    torch.set_num_threads(1)
    return work(lambda: pickle.loads(pickled), "spawned")


def read(cache: featcache.Cache) -> None:
    rows = np.random.default_rng(0).integers(0, len(cache), (BATCHES, BATCH))
    for batch in rows:
        cache.batch(batch)


@contextmanager
def watched(steps: Steps, name: str) -> Iterator[None]:
    """Add what is done within to the steps."""
    left, anonymous, done = private_bytes(), status_bytes("RssAnon"), threading.Event()
    most = anonymous

    def watch() -> None:
        nonlocal most
        while not done.wait(0.004):
            most = max(most, status_bytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = perf_counter()
    yield
    seconds = perf_counter() - start
    done.set()
    watcher.join()
    left = private_bytes() - left
    steps[name] = seconds, left / 1e6, max(most - anonymous, left) / 1e6


if __name__ == "__main__":
    main()
