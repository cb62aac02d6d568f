"""How fast training reads: shuffled batches of padded fbank features, from featcache and from what others use.

    pip install '.[extract,bench]'
    python scripts/bench/load.py [--utterances 3000] [--seconds 1] [--rounds 4] [--folder FOLDER] [--json]

The utterances are 16 kB a second, float16 [frames, 80], with the lengths of LibriSpeech's (12.3 s on average), or with
--seconds of so many, to a tenth. The same ones quantised are in another version, for the line that says uint8.
Everything is in the page cache. Every line makes batches of 64 in one shuffled order, as a padded tensor
[64, frames, 80] and lengths [64], and is the best of the rounds, in which all take turns. The limit is a plain
loop that copies rows of one numpy memmap into a padded array that is there already: into always the same one, which
stays in the processor's cache, and into three in turn, as many as a loader has that works while training does. Also
shown is the loop that makes a new array each time.

The peers go through torch's DataLoader with 0 and with 2 workers, the start of the workers not counted, and the
better is shown; the last column is how many times as fast featcache.DataLoader is. They hold the first 1,000
utterances only, which does them no harm, and their batches are padded by the same plain loop, as torch's
pad_sequence is slower. For Hugging Face datasets, Array2D is what its documentation has for matrices, and
with_format converts to float32 unless told otherwise. A flat list, told so and reshaped by hand, is its fastest:
a slice of a memory map.

Seen on 2 shared cores, Python 3.11, torch 2.11, numpy 2.4, in one run: the limit 48,800 utterances/s (9.8 GB/s) with
one buffer and 34,200 with three; featcache.DataLoader 41,200/s, 0.84 of the first and 1.21 of the second. That is
7.5 × one .npy each, 36 × zarr-python, 35 × Lhotse, and of HF datasets 21 × (Array2D, numpy), 14 × (Array2D, torch),
9.1 × (Array2D, numpy float16) and 2.9 × (flat list). In torch's DataLoader 0.59 of the limit, with 2 workers 0.08.
With --seconds 1 a batch is 1 MB, and what is done in Python for each counts: of
the limit, cache.batch 0.77, featcache.DataLoader 0.45, since threads hand each batch over, and in torch's 0.54.

Cold means that no byte of the features is in the page cache before each round, on the disk that holds --folder;
"without asking ahead" is what the kernel's own readahead makes of it. On another day, on a virtual disk: mapped 45,300,
copies in memory (ram=) 43,300; cold 7,100, without asking ahead 1,340.
"""

from __future__ import annotations

import argparse
import math
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from harness import available, columns, forget, in_child, options, present, private_bytes
from made_up import BINS, make_features, make_version
from torch.utils.data import DataLoader

import featcache
from featcache.storage.files import Readahead

BATCH, PEERS_HOLD = 64, 1000


def main() -> None:
    asked = options(
        __doc__,
        utterances=3000,
        seconds=(float, "of each utterance; by default as LibriSpeech's"),
        rounds=4,
        folder=(Path, "on the disk that is to be cold"),
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        present(measure(Path(name), asked), show, asked)


def measure(folder: Path, asked: argparse.Namespace) -> dict:
    utterances = make_features(asked.utterances, asked.seconds)
    make_version(folder / "features", utterances)
    make_version(folder / "quantized", utterances, quantized=True)
    np.concatenate(utterances).tofile(folder / "flat.bin")
    speeds = in_child(cold_speeds, folder / "features", asked.rounds)
    cache = featcache.open(folder / "features")
    batches = shuffled(len(utterances), 80)
    added = memory_of_a_worker(cache, batches)

    few = shuffled(min(PEERS_HOLD, len(utterances)), 20)
    runs = ours(cache, folder / "flat.bin", batches)
    runs[BATCH_QUANTIZED] = partial(map, featcache.open(folder / "quantized").batch, batches)
    runs[BATCH_COPIES] = partial(map, copies_in_memory(folder / "features").batch, batches)
    for name, peer in available(PEERS, folder, utterances[:PEERS_HOLD]).items():
        for workers in (0, 2):
            runs[f"{name}, {workers} workers"] = partial(load, peer, few, peer.collate, workers)
    speeds |= best_speeds(runs, asked.rounds)
    return {
        "utterances": len(utterances),
        "bytes": int(cache.lengths.sum()) * BINS * 2,
        "utterances_per_second": speeds,
        "worker_adds_bytes": added,
    }


def show(result: dict) -> str:
    speed = result["utterances_per_second"]
    num_bytes = result["bytes"] / result["utterances"]

    def line(name: str, value: float, compared: str) -> tuple[str, ...]:
        return name, f"{value:,.0f}", f"{value * num_bytes / 1e9:.2f}", compared

    lines = [line(name, speed[name], f"{speed[name] / speed[LIMIT]:.2f} of it") for name in OURS]
    for name in PEERS:
        found = {workers: speed.get(f"{name}, {workers} workers", 0.0) for workers in (0, 2)}
        workers = max(found, key=found.__getitem__)
        if value := found[workers]:
            lines.append(line(f"{name}, {workers} workers", value, f"1 / {speed[LOADER] / value:.1f}"))
    versions = f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}"
    return "\n".join(
        [
            f"{result['utterances']:,} utterances, {result['bytes'] / 1e6:,.0f} MB; {os.cpu_count()} cores; {versions}",
            columns(["", "utterances/s", "GB/s", "the limit, or featcache"], *lines),
            *(
                f"memory of its own that a {method} worker has, all batches read: {added / 1e6:.1f} MB"
                for method, added in result["worker_adds_bytes"].items()
            ),
        ]
    )


def shuffled(count: int, batches: int) -> list[list[int]]:
    """Batches of rows; every row as often as any other."""
    random = np.random.default_rng(1)
    rows = np.concatenate([random.permutation(count) for _ in range(-(-batches * BATCH // count))])
    return rows[: batches * BATCH].reshape(batches, BATCH).tolist()


# Who reads

LIMIT_NEW, LIMIT, LIMIT_THREE = "numpy memmap, new arrays", "numpy memmap, one buffer", "numpy memmap, three buffers"
BATCH_NEW, BATCH_CHECKED, BATCH_REUSED = "cache.batch", "cache.batch, check=True", "cache.batch, reused buffer"
BATCH_QUANTIZED, BATCH_COPIES = "cache.batch, uint8 to float32", "cache.batch, copies in memory"
BATCH_COLD, BATCH_UNASKED = "cache.batch, cold", "cache.batch, cold, without asking ahead"
LOADER, LOADER_FLOAT = "featcache.DataLoader", "featcache.DataLoader, to float32"
LOADER_TORCH, LOADER_WORKERS = "featcache in torch's, 0 workers", "featcache in torch's, 2 workers"
OURS = (
    LIMIT,
    LIMIT_THREE,
    LIMIT_NEW,
    LOADER,
    LOADER_FLOAT,
    LOADER_TORCH,
    LOADER_WORKERS,
    BATCH_REUSED,
    BATCH_NEW,
    BATCH_CHECKED,
    BATCH_QUANTIZED,
    BATCH_COPIES,
    BATCH_COLD,
    BATCH_UNASKED,
)


def ours(cache: featcache.Cache, flat: Path, batches: list[list[int]]) -> dict[str, Callable[[], Iterable]]:
    """Runs of featcache, and of the limit."""
    dataset = featcache.FeatureDataset(cache)
    frames = np.asarray(np.memmap(flat, np.float16, "r")).reshape(-1, BINS)
    ends = np.cumsum(cache.lengths)
    starts = ends - cache.lengths
    num_values = BATCH * int(cache.lengths.max()) * BINS
    rooms = [torch.from_numpy(np.ones(num_values, np.float16)) for _ in range(3)]
    room = rooms[0]

    def gather(rows: list[int], room: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        places = zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)
        return pad([frames[start:end] for start, end in places], None if room is None else room.numpy())

    loader = featcache.DataLoader(dataset, batches)
    to_float = featcache.DataLoader(dataset, batches, dtype=torch.float32)
    return {
        LIMIT: lambda: (gather(rows, room) for rows in batches),
        LIMIT_THREE: lambda: map(gather, batches, cycle(rooms)),
        LIMIT_NEW: lambda: map(gather, batches),
        LOADER: lambda: loader,
        LOADER_FLOAT: lambda: to_float,
        LOADER_TORCH: lambda: load(dataset, batches, dataset.collate, 0),
        LOADER_WORKERS: lambda: load(dataset, batches, dataset.collate, 2),
        BATCH_REUSED: lambda: (cache.batch(rows, out=room) for rows in batches),
        BATCH_NEW: lambda: map(cache.batch, batches),
        BATCH_CHECKED: lambda: (cache.batch(rows, check=True) for rows in batches),
    }


def pad(arrays: list[np.ndarray], room: np.ndarray | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain loop."""
    counts = [len(array) for array in arrays]
    shape = len(arrays), max(counts), BINS
    padded = np.empty(shape, arrays[0].dtype) if room is None else room[: math.prod(shape)].reshape(shape)
    for row, array, count in zip(padded, arrays, counts, strict=True):
        row[:count] = array
        row[count:] = 0
    return torch.from_numpy(padded), torch.tensor(counts)


class Numpy:
    """One .npy file per utterance."""

    def __init__(self, folder: Path, utterances: list[np.ndarray]) -> None:
        self.paths = [folder / f"{number}.npy" for number in range(len(utterances))]
        for path, array in zip(self.paths, utterances, strict=True):
            np.save(path, array)

    def __getitem__(self, row: int) -> np.ndarray:
        return np.load(self.paths[row])

    def collate(self, items: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        return pad(items)


class Lhotse(Numpy):
    """Lhotse's default storage, lossily compressed; gives float32."""

    def __init__(self, folder: Path, utterances: list[np.ndarray]) -> None:
        from lhotse.features.io import LilcomChunkyReader, LilcomChunkyWriter

        with LilcomChunkyWriter(folder / "lhotse") as writer:
            self.keys = [writer.write("", array.astype(np.float32)) for array in utterances]
        self.reader = LilcomChunkyReader(writer.storage_path)

    def __getitem__(self, row: int) -> np.ndarray:
        return self.reader.read(self.keys[row])


class Zarr(Numpy):
    """zarr-python, one array per utterance, uncompressed."""

    def __init__(self, folder: Path, utterances: list[np.ndarray]) -> None:
        import zarr

        group = zarr.open_group(folder / "zarr", mode="w")
        for number, array in enumerate(utterances):
            group.create_array(str(number), data=array, chunks=array.shape, compressors=None)
        self.folder, self.group = folder / "zarr", None

    def __getitem__(self, row: int) -> np.ndarray:
        import zarr

        if self.group is None:  # opened by each worker for itself: its locks do not survive a fork
            self.group = zarr.open_group(self.folder, mode="r")
        return self.group[str(row)][:]


class HuggingFace:
    """Hugging Face datasets, saved to disk and mapped from there, formatted as they are asked to be."""

    def __init__(self, folder: Path, utterances: list[np.ndarray], column, how: str, **options) -> None:
        import datasets

        datasets.disable_progress_bars()
        folder /= f"{column.__name__}-{how}-{len(options)}"
        datasets.Dataset.from_dict(*column(utterances)).save_to_disk(folder)
        self.rows = datasets.load_from_disk(folder).with_format(how, **options)

    def __getitems__(self, rows: list[int]) -> list[dict]:
        return self.rows.__getitems__(rows)

    def collate(self, items: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        return pad([np.asarray(item["features"]).reshape(-1, BINS) for item in items])


def matrices(utterances: list[np.ndarray]) -> tuple:
    from datasets import Array2D, Features

    return {"features": utterances}, Features({"features": Array2D((None, BINS), "float16")})


def flat_lists(utterances: list[np.ndarray]) -> tuple:
    return ({"features": [array.reshape(-1) for array in utterances]},)


PEERS = {
    "one .npy per utterance": Numpy,
    "zarr-python": Zarr,
    "Lhotse LilcomChunky": Lhotse,
    "HF, Array2D, numpy": partial(HuggingFace, column=matrices, how="numpy"),
    "HF, Array2D, torch": partial(HuggingFace, column=matrices, how="torch"),
    "HF, Array2D, numpy float16": partial(HuggingFace, column=matrices, how="numpy", dtype=np.float16),
    "HF, flat list, numpy float16": partial(HuggingFace, column=flat_lists, how="numpy", dtype=np.float16),
}


# How it is measured


def load(dataset, batches: list[list[int]], collate: Callable, workers: int) -> Iterable:
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers)


def best_speeds(runs: dict[str, Callable[[], Iterable]], rounds: int) -> dict[str, float]:
    """Utterances per second from the first batch on, when workers are running: the best of rounds in turns."""

    def speed(batches: Iterable) -> float:
        batches = iter(batches)
        next(batches)
        start = perf_counter()
        count = sum(len(batch["ids"] if isinstance(batch, dict) else batch[0]) for batch in batches)
        return count / (perf_counter() - start)

    best = dict.fromkeys(runs, 0.0)
    for _ in range(rounds):
        for name, run in runs.items():
            for _ in range(1 if name.endswith("workers") else 3):
                best[name] = max(best[name], speed(run()))
    return best


def copies_in_memory(folder: Path) -> featcache.Cache:
    """A cache that has been copied into memory."""
    cache = featcache.open(folder, ram="8GB")
    for _ in cache.values():
        pass
    while any(thread.name == "featcache-copies" for thread in threading.enumerate()):
        time.sleep(0.1)
    return cache


class NoReadahead(Readahead):
    def over(self, arrays: object) -> nullcontext[None]:
        return nullcontext()


def cold_speeds(folder: Path, rounds: int) -> dict[str, float]:
    """Of batches whose features are on the disk alone: in a process of its own, as what it maps stays in memory."""

    def cold(ask: bool) -> Iterable:
        forget(folder.glob("*/shards/*/features/c/0/0"))
        cache = featcache.open(folder)
        if not ask:
            cache._shards._readahead = NoReadahead()
        return map(cache.batch, shuffled(len(cache), 10))

    return best_speeds({BATCH_COLD: partial(cold, True), BATCH_UNASKED: partial(cold, False)}, rounds)


def memory_of_a_worker(cache: featcache.Cache, batches: list[list[int]]) -> dict[str, int]:
    """Bytes that reading adds to what a worker alone has: to one forked from here, and to one that unpickles the cache.

    Not the features: mapped files are the page cache's, though `top` counts what a process has seen of them.
    """
    pickled = pickle.dumps(cache)

    def added(get: Callable[[], featcache.Cache]) -> int:
        room = torch.from_numpy(np.ones(BATCH * 4000 * BINS, np.float16))  # torch's threads do not survive a fork
        before = private_bytes()
        cache = get()
        for rows in batches:
            cache.batch(rows, out=room)
        return private_bytes() - before

    return {"forked": in_child(added, lambda: cache), "spawned": in_child(added, lambda: pickle.loads(pickled))}


if __name__ == "__main__":
    main()
