"""Measure rows of whole utterances for `load.py --packed`, from featcache and from what
others use, in tokens a second.

Codes of 8 codebooks, uint16, at 12.5, 25 and 50 frames a second, of utterances with lengths
like LibriSpeech's, in batches of 8 rows of 8,192 tokens. All is in the page cache. Every line
is the best of the rounds, in which all take turns; a round is an epoch from its start, for which
featcache packs a whole window. CPU time is that of all threads of the process: it hardly depends
on what else the machine does. Where batches are long, threads of featcache gather them while it
packs: that shows by the clock, on idle cores.

memmap                   a plain loop copies the very rows of featcache from one numpy memmap,
                         and drops the documents
memmap, with documents   and makes the same batch as featcache does: tensors of features,
                         document_ids, positions, cu_seqlens, lengths and rows, and ids
featcache.PackedLoader   draws, packs and gathers
packing alone            draws and packs, and reads no frames
TRL                      packs a Dataset of lists by best fit, and reads it; of one codebook
Lhotse, sampling alone   DynamicCutSampler draws cuts of as many tokens, shuffled, into batches
                         that hold a batch's tokens once they are padded; it reads no frames

The rows of the memmap are known beforehand: packing costs it nothing. Before the first round,
its batches are compared with featcache's."""

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from corpus import KINDS
from harness import Table, available, present, temporary_folder
from make_cache import made_cache

import featcache

TOKENS, ROWS, CODEBOOKS = 8192, 8, 8
UTTERANCES = 20_000
"""So many that an epoch has hundreds of batches, and most windows are whole."""


def features_of(count: int, rate: float) -> dict[str, np.ndarray]:
    """Codes `[frames, codebooks]` by id."""
    random = np.random.default_rng(0)
    pool = random.integers(0, 1024, (40 * int(rate) + 5000, CODEBOOKS)).astype(np.uint16)
    seconds = islice(KINDS["long"].lengths(random), count)
    lengths = [int(duration * rate) for duration in seconds]
    firsts = random.integers(0, 5000, count).tolist()
    return {
        f"utterance-{number:06d}": pool[first : first + length]
        for number, (first, length) in enumerate(zip(firsts, lengths, strict=True))
    }


class Gathered:
    """The batches that a loader yields, from one memmap. Their memory is used again after
    three batches."""

    def __init__(self, path: Path, loader: featcache.PackedLoader) -> None:
        (dataset,) = loader.mixture.sources.values()
        frames = [dataset.cache[number] for number in range(len(dataset))]
        np.save(path, np.concatenate(frames))
        self.frames = np.asarray(np.load(path, mmap_mode="r"))
        self.begins = np.cumsum(dataset.lengths) - np.asarray(dataset.lengths)
        self.ids = [*dataset.ids]
        self.batches = [
            (batch.documents.rows, batch.documents.counts[0], batch.row_of)
            for batch in loader.batch_sampler
        ]
        self.rooms = [
            (
                np.empty((ROWS, TOKENS, CODEBOOKS), np.uint16),
                np.empty((ROWS, TOKENS), np.int32),
                np.empty((ROWS, TOKENS), np.int32),
            )
            for _ in range(3)
        ]

    def read(self, has_documents: bool) -> Iterator[dict[str, Any]]:
        for number, (rows, counts, row_of) in enumerate(self.batches):
            features, ids, positions = self.rooms[number % 3]
            if has_documents:
                ids.fill(-1)
                positions.fill(0)
            ends, bounds = [0] * ROWS, []
            columns = (column.tolist() for column in (self.begins[rows], counts, row_of))
            for document, (first, count, row) in enumerate(zip(*columns, strict=True)):
                begin, end = ends[row], ends[row] + count
                features[row, begin:end] = self.frames[first : first + count]
                ends[row] = end
                if has_documents:
                    ids[row, begin:end] = document
                    positions[row, begin:end] = np.arange(count)
                    bounds.append(row * TOKENS + end)
            for row, end in enumerate(ends):
                features[row, end:] = 0
            batch: dict[str, Any] = {"features": torch.from_numpy(features)}
            if has_documents:
                every = np.unique([0, *bounds, *range(0, ROWS * TOKENS + 1, TOKENS)])
                batch |= {
                    "document_ids": torch.from_numpy(ids),
                    "positions": torch.from_numpy(positions),
                    "cu_seqlens": torch.from_numpy(every.astype(np.int32)),
                    "max_seqlen": int(np.diff(every).max()),
                    "lengths": torch.from_numpy(counts),
                    "rows": torch.from_numpy(row_of),
                    "ids": [self.ids[row] for row in rows.tolist()],
                }
            yield batch

    def check(self, loader: featcache.PackedLoader) -> None:
        """Exit if the loader's batches differ."""
        for own, other in zip(self.read(True), loader, strict=True):
            for name, value in own.items():
                is_equal = value == other[name]
                if not (is_equal.all() if isinstance(value, torch.Tensor) else is_equal):
                    raise SystemExit(f"the batches of the memmap have other {name}")


def trl(features: dict[str, np.ndarray]) -> Callable[[], Iterable[object]]:
    """TRL's packer over the first codebook."""
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    lists = [array[:, 0] for array in features.values()]
    dataset = datasets.Dataset.from_dict({"input_ids": lists})

    def read() -> Iterable[object]:
        packed = pack_dataset(dataset, TOKENS, "bfd").with_format("numpy")
        return packed.iter(ROWS)

    return read


def lhotse(features: dict[str, np.ndarray]) -> Callable[[], Iterable[object]]:
    """Lhotse's sampler over cuts of text, which have as many tokens."""
    from lhotse import CutSet
    from lhotse.cut.text import TextExample
    from lhotse.dataset.sampling import DynamicCutSampler
    from lhotse.dataset.sampling.base import TokenConstraint

    examples = []
    for id_, array in features.items():
        examples.append(TextExample(id_, tokens=array[:, 0]))
    cuts = CutSet(examples)

    def read() -> Iterable[object]:
        limit = TokenConstraint(max_tokens=TOKENS * ROWS)
        return DynamicCutSampler(cuts, constraint=limit, shuffle=True, world_size=1, rank=0)

    return read


def best(
    readers: dict[str, Callable[[], Iterable[object]]], rounds: int
) -> dict[str, tuple[float, float]]:
    """The CPU seconds, and those by the clock, that each takes in the best of the rounds."""
    seconds = dict.fromkeys(readers, (float("inf"), float("inf")))
    gc.freeze()  # the peers' many objects would slow down the others' garbage collection
    for _ in range(rounds):
        for name, read in readers.items():
            starts = process_time(), perf_counter()
            for _ in read():
                pass
            ends = process_time(), perf_counter()
            taken = zip(seconds[name], starts, ends, strict=True)
            seconds[name] = tuple(min(least, end - start) for least, start, end in taken)
    return seconds


def measure(asked: argparse.Namespace) -> None:
    """Measure at each rate, and print tables."""
    tables = []
    for rate in (12.5, 25, 50):
        features = features_of(asked.utterances or UTTERANCES, rate)
        with temporary_folder(asked.folder) as folder:
            items = list(features.items())
            shards = [dict(items[first : first + 1000]) for first in range(0, len(items), 1000)]
            cache = made_cache(folder / "features", *shards, frame_rate=rate)
            dataset = featcache.FeatureDataset(cache)

            def loader(dataset: featcache.FeatureDataset = dataset) -> featcache.PackedLoader:
                return featcache.PackedLoader(dataset, tokens=TOKENS, rows=ROWS, overflow="error")

            gathered = Gathered(folder / "frames.npy", loader())
            gathered.check(loader())
            readers: dict[str, Callable[[], Iterable[object]]] = {
                "memmap": partial(gathered.read, False),
                "memmap, with documents": partial(gathered.read, True),
                "featcache.PackedLoader": loader,
                "featcache, packing alone": lambda loader=loader: loader().batch_sampler,
                **available({"TRL": trl, "Lhotse, sampling alone": lhotse}, features),
            }
            num_tokens = int(dataset.lengths.sum())
            full = num_tokens / (len(gathered.batches) * ROWS * TOKENS)
            seconds = best(readers, asked.rounds)
        columns = {}
        for time in ("of CPU time", "by the clock"):
            columns[f"million tokens/s {time}"] = "{:.1f}"
            columns[f"featcache is, {time}"] = "{:.2f} times as fast"
        table = Table(f"{rate:g} frames/s, rows {full:.1%} full", columns)
        own = seconds["featcache.PackedLoader"]
        for name, taken in seconds.items():
            pairs = zip(taken, own, strict=True)
            table.add(name, *chain(*((num_tokens / t / 1e6, t / o) for t, o in pairs)))
        tables.append(table)
    present(asked, *tables)
