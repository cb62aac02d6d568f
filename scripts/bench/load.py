"""Measure how fast training reads shuffled batches of padded fbank features, from
featcache and from what others use.

    pip install '.[extract,bench]'
    python scripts/bench/load.py [--utterances 3000] [--seconds 1] [--rounds 4]
                                 [--folder FOLDER] [--json]
    python scripts/bench/load.py --packed [--utterances 20000] [--rounds 4]
                                 packed rows instead: see packed.py

The utterances are 16 kB a second, float16 [frames, 80], with the lengths of LibriSpeech's
(12.3 s on average), or with --seconds of so many, to a tenth. The same ones quantised are
in another version, for the line that says uint8. Everything is in the page cache. Every
line makes batches of 64 in one shuffled order, as a padded tensor [64, frames, 80] and
lengths [64], and is the best of the rounds, in which all take turns. The limit is a plain
loop that copies rows of one numpy memmap into a padded array that is there already: into
always the same one, which stays in the processor's cache, and into three in turn, as many
as a loader has that works while training does.

The peers go through torch's DataLoader with 0 and with 2 workers, the start of the
workers not counted; the last column is how many times as fast featcache.DataLoader is.
They hold the first 1,000 utterances only, which does them no harm, and their batches are
padded by the same plain loop, as torch's pad_sequence is slower. For Hugging Face
datasets, Array2D is what its documentation has for matrices, and with_format converts to
float32 unless told otherwise. A flat list, told so and reshaped by hand, is its fastest:
a slice of a memory map.

Cold means that no byte of the features is in the page cache before each round, on the
disk that holds --folder; "without asking ahead" is what the kernel's own readahead makes
of it."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from harness import (
    Table,
    available,
    best_speeds,
    forget,
    in_child,
    options,
    present,
    temporary_folder,
)
from made_up import BINS, make_features, make_version
from packed import measure as measure_packed
from torch.utils.data import DataLoader

import featcache
from featcache.storage.files import Readahead

BATCH, PEERS_HOLD = 64, 1000
LIMIT, LOADER = "numpy memmap, one buffer", "featcache.DataLoader"

Reads = dict[str, Callable[[], Iterable[int]]]
"""What reads, by what it is; it gives how many utterances each batch has."""


def main() -> None:
    asked = options(
        __doc__,
        utterances=(int, "3,000 by default; 20,000 for packed rows, which are longer"),
        seconds=(float, "of each utterance; by default as LibriSpeech's"),
        rounds=6,
        folder=(Path, "on the disk that is to be cold"),
        packed=(False, "rows of whole utterances instead: see packed.py"),
    )
    torch.set_num_threads(1)
    if asked.packed:
        measure_packed(asked)
        return
    utterances = make_features(asked.utterances or 3000, asked.seconds)
    with temporary_folder(asked.folder) as folder:
        speeds = measure(folder, utterances, asked.rounds)
    num_bytes = sum(array.nbytes for array in utterances)
    versions = f"torch {torch.__version__}, numpy {np.__version__}, Python {sys.version.split()[0]}"
    table = Table(
        f"{len(utterances):,} utterances, {num_bytes / 1e6:,.0f} MB; {os.cpu_count()} "
        f"cores; {versions}",
        {
            "utterances/s": "{:,.0f}",
            "GB/s": "{:.2f}",
            "of the limit": "{:.2f}",
            "featcache is": "{:.1f} ×",
        },
    )
    for name, speed in speeds.items():
        gigabytes = speed * num_bytes / len(utterances) / 1e9
        table.add(name, speed, gigabytes, speed / speeds[LIMIT], speeds[LOADER] / speed)
    present(asked, table)


def measure(folder: Path, utterances: list[np.ndarray], rounds: int) -> dict[str, float]:
    """Utterances per second of everyone."""
    make_version(folder / "features", utterances)
    make_version(folder / "quantized", utterances, quantized=True)
    np.concatenate(utterances).tofile(folder / "flat.bin")
    cold = in_child(cold_speeds, folder / "features", rounds)
    batches, few = shuffled(len(utterances), 80), shuffled(min(PEERS_HOLD, len(utterances)), 20)
    reads = ours(folder, batches)
    for name, peer in available(PEERS, folder, utterances[:PEERS_HOLD]).items():
        for workers in (0, 2):
            reads[f"{name}, {workers} workers"] = partial(load, peer, few, peer.collate, workers)
    return best_speeds(reads, rounds) | cold


def sizes(batches: Iterable) -> Iterator[int]:
    """How many utterances each batch has."""
    return (len(batch["ids"] if isinstance(batch, dict) else batch[0]) for batch in batches)


def shuffled(count: int, batches: int) -> list[list[int]]:
    """Batches of rows; every row as often as any other."""
    random = np.random.default_rng(1)
    rows = np.concatenate([random.permutation(count) for _ in range(-(-batches * BATCH // count))])
    return rows[: batches * BATCH].reshape(batches, BATCH).tolist()


# Who reads


def ours(folder: Path, batches: list[list[int]]) -> Reads:
    """featcache, and the limit."""
    cache, quantized = featcache.open(folder / "features"), featcache.open(folder / "quantized")
    dataset = featcache.FeatureDataset(cache)
    frames = np.asarray(np.memmap(folder / "flat.bin", np.float16, "r")).reshape(-1, BINS)
    ends = np.cumsum(cache.lengths)
    starts = ends - cache.lengths
    num_values = BATCH * int(cache.lengths.max()) * BINS
    rooms = [torch.from_numpy(np.ones(num_values, np.float16)) for _ in range(3)]

    def gather(rows: list[int], room: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        places = zip(starts[rows].tolist(), ends[rows].tolist(), strict=True)
        return pad([frames[start:end] for start, end in places], room.numpy())

    loader = featcache.DataLoader(dataset, batches)
    to_float = featcache.DataLoader(dataset, batches, dtype=torch.float32)
    return {
        LIMIT: lambda: sizes(gather(rows, rooms[0]) for rows in batches),
        "numpy memmap, three buffers": lambda: sizes(map(gather, batches, cycle(rooms))),
        LOADER: lambda: sizes(loader),
        "featcache.DataLoader, to float32": lambda: sizes(to_float),
        "featcache in torch's, 0 workers": partial(load, dataset, batches, dataset.collate, 0),
        "featcache in torch's, 2 workers": partial(load, dataset, batches, dataset.collate, 2),
        "cache.batch, reused buffer": lambda: sizes(
            cache.batch(rows, out=rooms[0]) for rows in batches
        ),
        "cache.batch": lambda: sizes(map(cache.batch, batches)),
        "cache.batch, uint8 to float32": lambda: sizes(map(quantized.batch, batches)),
    }


class NoReadahead(Readahead):
    def over(self, arrays: object) -> nullcontext[None]:
        return nullcontext()


def cold_speeds(folder: Path, rounds: int) -> dict[str, float]:
    """Of batches whose features are on the disk alone: in a process of its own, as what
    it maps stays in memory."""

    def cold(ask: bool) -> Iterable[int]:
        forget(folder.glob("*/shards/*/features/c/0/0"))
        cache = featcache.open(folder)
        if not ask:
            cache._shards._readahead = NoReadahead()
        return sizes(map(cache.batch, shuffled(len(cache), 10)))

    names = {"cache.batch, cold": True, "cache.batch, cold, without asking ahead": False}
    return best_speeds({name: partial(cold, ask) for name, ask in names.items()}, rounds)


# Peers


def load(dataset, batches: list[list[int]], collate: Callable, workers: int) -> Iterator[int]:
    """Through torch's DataLoader."""
    return sizes(
        DataLoader(dataset, batch_sampler=batches, collate_fn=collate, num_workers=workers)
    )


def pad(
    arrays: list[np.ndarray], room: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain loop."""
    counts = [len(array) for array in arrays]
    shape = len(arrays), max(counts), BINS
    padded = (
        np.empty(shape, arrays[0].dtype)
        if room is None
        else room[: math.prod(shape)].reshape(shape)
    )
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


class HuggingFace:
    """Hugging Face datasets, saved to disk and mapped from there, formatted as they are
    asked to be."""

    def __init__(
        self, folder: Path, utterances: list[np.ndarray], column, how: str, **options
    ) -> None:
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
    "Lhotse LilcomChunky": Lhotse,
    "HF, Array2D, numpy": partial(HuggingFace, column=matrices, how="numpy"),
    "HF, Array2D, torch": partial(HuggingFace, column=matrices, how="torch"),
    "HF, Array2D, numpy float16": partial(
        HuggingFace, column=matrices, how="numpy", dtype=np.float16
    ),
    "HF, flat list, numpy float16": partial(
        HuggingFace, column=flat_lists, how="numpy", dtype=np.float16
    ),
}


if __name__ == "__main__":
    main()
