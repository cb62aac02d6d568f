"""How fast other toolkits read features through featcache's adapters, and through what they have themselves.

    pip install '.[extract,test,bench]'
    python scripts/bench/adapters.py [--utterances 1000] [--rounds 4] [--json]

The utterances are those of `load.py`: fbank features, float16 [frames, 80], 12.3 s on average, all in the page
cache. Every line is the best of the rounds, in which all take turns, with one thread and no workers.

* Lhotse: `cut.load_features()` of every cut, in shuffled order; the same of 2 s from the middle of each; and batches of
  64 from K2SpeechRecognitionDataset. Its own storages are LilcomChunkyWriter's, lossily compressed, and
  NumpyFilesWriter's, a file of float32 for each.
* SpeechBrain: batches of 64 from make_dataloader over a DynamicItemDataset: the features gathered by `Collate`, read
  item by item and padded by PaddedBatch, and, as it has them itself, loaded from the files of a CachedDynamicItem.
* Hugging Face: shuffled rows, formatted as torch tensors: a column of ids that is read from the cache, and a copy as
  Array2D.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import Table, available, best_speeds, options, present
from made_up import make_features, make_version

import featcache

BATCH = 64

Reads = dict[str, Callable[[], Iterable[int]]]
"""By what they are: an iterable of how many utterances each step has read. The first one is ours."""


def main() -> None:
    asked = options(__doc__, utterances=1000, rounds=4)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tables = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_version(folder / "features", make_features(asked.utterances))
        dataset = featcache.FeatureDataset(featcache.open(folder / "features"))
        order = np.random.default_rng(0).permutation(len(dataset)).tolist()
        kinds = (lhotse_cuts, lhotse_parts, lhotse_batches, speechbrain_batches, huggingface_rows)
        makers = {make.__name__.replace("_", " "): make for make in kinds}
        for title, reads in available(makers, folder, dataset, order).items():
            tables.append(Table(title, {"utterances/s": "{:,.0f}", "featcache": "{:.1f} ×"}))
            speeds = best_speeds(reads, asked.rounds)
            for what, speed in speeds.items():
                tables[-1].add(what, speed, speeds[next(iter(speeds))] / speed)
    present(asked, *tables)


# Lhotse


def make_cut_sets(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> dict:
    """The same cuts, with features in different places."""
    from lhotse import CutSet, LilcomChunkyWriter, NumpyFilesWriter

    from featcache.adapters.lhotse import cuts

    ours = cuts(dataset).to_eager()
    ours = CutSet.from_cuts(ours[row] for row in order)
    made = {"featcache": ours}
    for name, writer_type in (("LilcomChunkyReader", LilcomChunkyWriter), ("NumpyFilesReader", NumpyFilesWriter)):
        manifest = folder / f"{name}.jsonl"
        if not manifest.exists():
            with writer_type(folder / name) as writer:
                ours.copy_feats(writer).to_file(manifest)
        made[name] = CutSet.from_file(manifest).to_eager()
    return made


def lhotse_cuts(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> Reads:
    return {name: partial(load_each, cuts) for name, cuts in make_cut_sets(folder, dataset, order).items()}


def lhotse_parts(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> Reads:
    made = {
        name: [cut.truncate(offset=round(cut.duration / 2 - 1, 2), duration=2) for cut in cuts if cut.duration > 2]
        for name, cuts in make_cut_sets(folder, dataset, order).items()
    }
    return {name: partial(load_each, cuts) for name, cuts in made.items()}


def load_each(cuts: Iterable) -> Iterable[int]:
    return (bool(len(cut.load_features())) for cut in cuts)


def lhotse_batches(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> Reads:
    from lhotse import CutSet
    from lhotse.dataset import K2SpeechRecognitionDataset

    reader = K2SpeechRecognitionDataset()

    reads = {}
    for name, cuts in make_cut_sets(folder, dataset, order).items():
        for cut in cuts:
            cut.supervisions[0].text = ""
        batches = [CutSet.from_cuts(cuts[at : at + BATCH]) for at in range(0, len(cuts), BATCH)]
        reads[name] = lambda batches=batches: (len(reader[batch]["inputs"]) for batch in batches)
    return reads


# SpeechBrain


def speechbrain_batches(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> Reads:
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
    return {
        "Collate": load(["id"], collate_fn=Collate(dataset)),
        "item by item": load(["id", "feats"]),
        "CachedDynamicItem": load(["id", "saved"]),
    }


# Hugging Face


def huggingface_rows(folder: Path, dataset: featcache.FeatureDataset, order: list[int]) -> Reads:
    import datasets

    from featcache.adapters.huggingface import to_hf

    datasets.disable_progress_bars()
    made = {"CachedFeatures": to_hf(dataset), "Array2D": to_hf(dataset, copy=True, cache_dir=str(folder / "copy"))}
    formatted = {name: rows.with_format("torch") for name, rows in made.items()}
    return {
        name: lambda rows=rows: (bool(len(rows[row]["features"])) for row in order) for name, rows in formatted.items()
    }


if __name__ == "__main__":
    main()
