"""Measure how fast other toolkits read features through featcache's adapters, and from
their own storages.

    pip install '.[extract,test,bench]'
    python scripts/bench/adapters.py [--utterances 1000] [--rounds 4] [--json]

The utterances are those of `load.py`: fbank features, float16 [frames, 80], 12.3 s on
average, all in the page cache. Every line is the best of the rounds, in which all take
turns, with one thread and no workers.

* Lhotse: `cut.load_features()` of every cut, in shuffled order; the same of 2 s from the
  middle of each; and batches of 64 from K2SpeechRecognitionDataset. Its own storages are
  LilcomChunkyWriter's, lossily compressed, and NumpyFilesWriter's, a file of float32 for
  each.
* SpeechBrain: batches of 64 from make_dataloader over a DynamicItemDataset: the features
  gathered by `Collate`, read item by item and padded by PaddedBatch, and, as it has them
  itself, loaded from the files of a CachedDynamicItem.
* Hugging Face: shuffled rows, formatted as torch tensors: a column of ids that is read
  from the cache, and a copy as Array2D.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Table, available, best_speeds, options, present, temporary_folder
from made_up import make_features, make_version

import featcache

BATCH = 64

Reads = dict[str, Callable[[], Iterable[int]]]
"""By what they are: an iterable of how many utterances each step has read. The first one
is ours."""


def main() -> None:
    asked = options(__doc__, utterances=1000, rounds=4)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables = []
    with temporary_folder() as folder:
        make_version(folder / "features", make_features(asked.utterances))
        dataset = featcache.FeatureDataset(featcache.open(folder / "features"))
        order = np.random.default_rng(0).permutation(len(dataset)).tolist()
        makers = {make.__name__: make for make in (lhotse, speechbrain, huggingface)}
        for kinds in available(makers, folder, dataset, order).values():
            for title, reads in kinds.items():
                tables.append(Table(title, {"utterances/s": "{:,.0f}", "featcache": "{:.1f} ×"}))
                speeds = best_speeds(reads, asked.rounds)
                for what, speed in speeds.items():
                    tables[-1].add(what, speed, speeds[next(iter(speeds))] / speed)
    present(asked, *tables)


# What a tool reads, by kinds


def lhotse(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> dict[str, Reads]:
    """Of the same cuts, with features in different places."""
    from lhotse import CutSet, LilcomChunkyWriter, NumpyFilesWriter
    from lhotse.dataset import K2SpeechRecognitionDataset

    from featcache.adapters.lhotse import cuts

    reader, in_order = K2SpeechRecognitionDataset(), cuts(dataset).to_eager()
    cut_sets = {"featcache": CutSet.from_cuts(in_order[row] for row in order)}
    for name, writer_type in (
        ("LilcomChunkyReader", LilcomChunkyWriter),
        ("NumpyFilesReader", NumpyFilesWriter),
    ):
        with writer_type(folder / name) as writer:
            cut_sets[name] = cut_sets["featcache"].copy_feats(writer).to_eager()
    kinds: dict[str, Reads] = {"lhotse cuts": {}, "lhotse parts": {}, "lhotse batches": {}}
    for name, all_cuts in cut_sets.items():
        for cut in all_cuts:
            cut.supervisions[0].text = ""
        long = [cut for cut in all_cuts if cut.duration > 2]
        parts = [cut.truncate(offset=round(cut.duration / 2 - 1, 2), duration=2) for cut in long]
        batches = [
            CutSet.from_cuts(all_cuts[at : at + BATCH]) for at in range(0, len(all_cuts), BATCH)
        ]
        kinds["lhotse cuts"][name] = partial(load_each, all_cuts)
        kinds["lhotse parts"][name] = partial(load_each, parts)
        kinds["lhotse batches"][name] = lambda batches=batches: (
            len(reader[batch]["inputs"]) for batch in batches
        )
    return kinds


def load_each(cuts: Iterable) -> Iterable[int]:
    return (bool(len(cut.load_features())) for cut in cuts)


def speechbrain(
    folder: Path, dataset: featcache.FeatureDataset, order: list[int]
) -> dict[str, Reads]:
    from speechbrain.dataio.dataloader import make_dataloader
    from speechbrain.utils.data_pipeline import CachedDynamicItem

    from featcache.adapters.speechbrain import Collate, to_dynamic_item_dataset

    batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]

    def load(keys: list[str], **options) -> Callable[[], Iterable[int]]:
        rows = to_dynamic_item_dataset(dataset)
        (reader,) = rows.pipeline.dynamic_items
        rows.add_dynamic_item(CachedDynamicItem(folder / "saved", ["id"], reader.func, ["saved"]))
        rows.set_output_keys(keys)
        loader = make_dataloader(rows, batch_sampler=batches, **options)
        return lambda: (len(batch) for batch in loader)

    sum(load(["id", "saved"])())
    reads = {
        "Collate": load(["id"], collate_fn=Collate(dataset)),
        "item by item": load(["id", "feats"]),
        "CachedDynamicItem": load(["id", "saved"]),
    }
    return {"speechbrain batches": reads}


def huggingface(
    folder: Path, dataset: featcache.FeatureDataset, order: list[int]
) -> dict[str, Reads]:
    import datasets

    from featcache.adapters.huggingface import to_hf

    datasets.disable_progress_bars()
    made = {
        "CachedFeatures": to_hf(dataset),
        "Array2D": to_hf(dataset, copy=True, cache_dir=str(folder / "copy")),
    }
    formatted = {name: rows.with_format("torch") for name, rows in made.items()}
    reads = {
        name: lambda rows=rows: (bool(len(rows[row]["features"])) for row in order)
        for name, rows in formatted.items()
    }
    return {"huggingface rows": reads}


if __name__ == "__main__":
    main()
