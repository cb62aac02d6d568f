"""How fast training reads: shuffled batches of padded fbank features, from featcache and from what others use.

    pip install '.[extract,bench]'
    python scripts/bench/load.py [--utterances 3000] [--seconds 1] [--rounds 4] [--json]

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

Seen on 2 shared cores, Python 3.11, torch 2.11, numpy 2.4, in one run: the limit 42,500 utterances/s (8.6 GB/s) with
one buffer and 36,100 with three; featcache.DataLoader 41,000/s, 0.96 of the first and 1.14 of the second. That is
5.9 × one .npy each, 31 × zarr-python, 33 × Lhotse, and of HF datasets 17 × (Array2D, numpy), 12 × (Array2D, torch),
7.2 × (Array2D, numpy float16) and 2.7 × (flat list). In torch's DataLoader 0.80 of the limit, with 2 workers 0.10.
Opening 10^6 utterances took 10 ms. With --seconds 1 a batch is 1 MB, and what is done in Python for each counts: of
the limit, cache.batch 0.95, featcache.DataLoader 0.53, since threads hand each batch over, and in torch's 0.68.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from corpus import KINDS
from featcache.store.shard_writer import ShardWriter
from torch.utils.data import DataLoader

import featcache
from featcache.format.shard import Item
from featcache.manifest import Utterance
from featcache.quantize import quantize, stored_spec
from featcache.spec import QUANTIZATION, FeatureSpec
from featcache.version.info import VersionInfo
from featcache.version.version import Version

BINS, BATCH, PEERS_HOLD = 80, 64, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utterances", type=int, default=3000)
    parser.add_argument("--seconds", type=float, help="of each utterance; by default as LibriSpeech's")
    parser.add_argument("--open", type=int, default=1_000_000, help="utterances of the version that is opened")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), arguments)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    utterances = make_features(arguments.utterances, arguments.seconds)
    make_version(folder / "features", utterances)
    make_version(folder / "quantized", utterances, quantized=True)
    np.concatenate(utterances).tofile(folder / "flat.bin")
    cache = featcache.open(folder / "features")
    batches = shuffled(len(utterances), 80)
    added = memory_of_a_worker(cache, batches)

    few = shuffled(min(PEERS_HOLD, len(utterances)), 20)
    runs = ours(cache, folder / "flat.bin", batches)
    runs[BATCH_QUANTIZED] = partial(map, featcache.open(folder / "quantized").batch, batches)
    for name, peer in make_peers(folder, utterances[:PEERS_HOLD]).items():
        for workers in (0, 2):
            runs[f"{name}, {workers} workers"] = partial(load, peer, few, peer.collate, workers)
    speed = dict.fromkeys(runs, 0.0)
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            for _ in range(1 if name.endswith("workers") else 3):
                speed[name] = max(speed[name], steady_speed(run()))

    return {
        "utterances": len(utterances),
        "bytes": int(cache.lengths.sum()) * BINS * 2,
        "utterances_per_second": speed,
        "worker_adds_bytes": added,
        "open": measure_open(folder / "large", arguments.open),
    }


def show(result: dict) -> None:
    speed = result["utterances_per_second"]
    print(f"{result['utterances']:,} utterances, {result['bytes'] / 1e6:,.0f} MB; {os.cpu_count()} cores")
    print(f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}\n")
    print(f"{'':40}{'utterances/s':>14}{'GB/s':>8}{'of the limit':>14}")
    num_bytes = result["bytes"] / result["utterances"]
    for name in OURS:
        print(f"{name:40}{speed[name]:14,.0f}{speed[name] * num_bytes / 1e9:8.2f}{speed[name] / speed[LIMIT]:14.2f}")
    print(f"\n{'':40}{'utterances/s':>14}{'GB/s':>8}{'featcache':>14}")
    for name in PEERS:
        found = {workers: speed.get(f"{name}, {workers} workers", 0.0) for workers in (0, 2)}
        workers = max(found, key=found.__getitem__)
        if value := found[workers]:
            times = f"{speed[LOADER] / value:.1f} ×"
            print(f"{f'{name}, {workers} workers':40}{value:14,.0f}{value * num_bytes / 1e9:8.2f}{times:>14}")
    opened = result["open"]
    print(f"\nopening {opened['utterances']:,} utterances: {opened['seconds'] * 1e3:.1f} ms")
    print(f"… the first time, when the index is built: {opened['first_seconds'] * 1e3:,.0f} ms")
    for method, added in result["worker_adds_bytes"].items():
        print(f"memory of its own that a {method} worker has, all batches read: {added / 1e6:.1f} MB")


# What is read


def make_features(count: int, mean_seconds: float | None = None) -> list[np.ndarray]:
    """Arrays float16 [frames, 80] that are about as smooth as log mel energies."""
    random = np.random.default_rng(0)
    noise = random.standard_normal((20_000, BINS), np.float32)
    pool = np.cumsum(noise, 0)
    pool = ((pool[50:] - pool[:-50]) / 5 + 8).astype(np.float16)
    seconds = KINDS["long"].lengths(random)
    if mean_seconds is not None:
        seconds = iter(mean_seconds * random.uniform(0.9, 1.1, count))
    cuts = ((int(next(seconds) * 100) - 2, int(random.integers(len(pool)))) for _ in range(count))
    return [np.take(pool, np.arange(start, start + length), axis=0, mode="wrap") for length, start in cuts]


def make_version(
    cache: Path, utterances: list[np.ndarray], items_per_shard: int = 500, quantized: bool = False
) -> Version:
    first = utterances[0]
    spec = FeatureSpec(first.shape[1:], first.dtype.name, 100.0, 400, 16000, "made up")
    if quantized:
        spec = stored_spec(spec, "uint8")
    version = Version.create(cache, VersionInfo("made-up", "ab" * 32, {"name": "made-up"}, spec, {}))
    for row in range(0, len(utterances), items_per_shard):
        shard = utterances[row : row + items_per_shard]
        items = [
            Item.of(Utterance(id=f"speaker{n % 997:03}-{n:08}", path=f"{n}.wav"), len(array) * 160 + 240, (0, 0, 16000))
            for n, array in enumerate(shard, row)
        ]
        stored, lengths, side = np.concatenate(shard), [len(array) for array in shard], {}
        if quantized:
            levels, parameters = quantize(torch.from_numpy(stored), lengths)
            stored, side = levels.numpy(), {QUANTIZATION: (parameters.numpy(), [1] * len(shard))}
        writer = ShardWriter(version.work_folder("made-up"), spec)
        writer.append(items, stored, lengths, side)
        writer.commit(version.path / "shards", sample_rate=16000, row=row, supersedes={}, made_by={})
    return version


def shuffled(count: int, batches: int) -> list[list[int]]:
    """Batches of rows; every row as often as any other."""
    random = np.random.default_rng(1)
    rows = np.concatenate([random.permutation(count) for _ in range(-(-batches * BATCH // count))])
    return rows[: batches * BATCH].reshape(batches, BATCH).tolist()


# Who reads

LIMIT_NEW, LIMIT, LIMIT_THREE = "numpy memmap, new arrays", "numpy memmap, one buffer", "numpy memmap, three buffers"
BATCH_NEW, BATCH_CHECKED, BATCH_REUSED = "cache.batch", "cache.batch, check=True", "cache.batch, reused buffer"
BATCH_QUANTIZED = "cache.batch, uint8 to float32"
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


def make_peers(folder: Path, utterances: list[np.ndarray]) -> dict:
    peers = {}
    for name, make in PEERS.items():
        try:
            peers[name] = make(folder, utterances)
        except ImportError as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    return peers


# How it is measured


def load(dataset, batches: list[list[int]], collate: Callable, workers: int) -> Iterable:
    return DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers)


def steady_speed(batches: Iterable) -> float:
    """Utterances per second from the first batch on: workers are then running."""
    batches = iter(batches)
    next(batches)
    start = perf_counter()
    count = sum(len(batch["ids"] if isinstance(batch, dict) else batch[0]) for batch in batches)
    return count / (perf_counter() - start)


def memory_of_a_worker(cache: featcache.Cache, batches: list[list[int]]) -> dict[str, int]:
    """Bytes that reading adds to what a worker alone has: to one forked from here, and to one that unpickles the cache.

    Not the features: mapped files are the page cache's, though `top` counts what a process has seen of them.
    """
    pickled = pickle.dumps(cache)
    return {
        "forked": in_a_fork(lambda: cache, batches),
        "spawned": in_a_fork(lambda: pickle.loads(pickled), batches),
    }


def in_a_fork(get: Callable[[], featcache.Cache], batches: list[list[int]]) -> int:
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        room = torch.from_numpy(np.ones(BATCH * 4000 * BINS, np.float16))  # torch's threads do not survive a fork
        before = private_bytes()
        cache = get()
        for rows in batches:
            cache.batch(rows, out=room)
        os.write(writer, str(private_bytes() - before).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    added = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    return added


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


def measure_open(folder: Path, count: int) -> dict:
    frames = np.zeros((2, 8), np.uint16)
    make_version(folder, [frames] * count, items_per_shard=50_000)
    seconds = []
    for _ in range(6):
        start = perf_counter()
        featcache.open(folder)
        seconds.append(perf_counter() - start)
    return {"utterances": count, "seconds": min(seconds), "first_seconds": seconds[0]}


if __name__ == "__main__":
    main()
