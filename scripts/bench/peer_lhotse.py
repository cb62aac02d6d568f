"""Run Lhotse's `compute_and_store_features` over a manifest, for `extract.py`, which
compares featcache with it.

    python scripts/bench/peer_lhotse.py MANIFEST JOBS [started]

Prints a JSON object: seconds, of this one call. `started` hands it a pool of processes
that have imported Lhotse already; otherwise it starts them, as it does when called by a
user. A process of its own and a small module, since those processes import it anew."""

import csv
import json
import multiprocessing
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lhotse
    from lhotse.features.io import NumpyFilesWriter  # the fastest of its storages


def extract(manifest: Path, jobs: int, started: bool) -> float:
    """Seconds of extracting 80 mel bins from a manifest's files."""
    with manifest.open() as rows:
        recordings = lhotse.RecordingSet.from_recordings(
            lhotse.Recording.from_file(manifest.parent / row["path"], row["id"])
            for row in csv.DictReader(rows)
        )
    cuts = lhotse.CutSet.from_manifests(recordings=recordings).to_eager()
    fbank = lhotse.Fbank(lhotse.FbankConfig(num_filters=80))
    pool = (
        ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"))
        if started and jobs > 1
        else None
    )
    with tempfile.TemporaryDirectory() as folder:
        begin = perf_counter()
        cuts.compute_and_store_features(
            fbank,
            Path(folder, "features"),
            jobs,
            storage_type=NumpyFilesWriter,
            executor=pool,
            progress_bar=False,
        )
        return perf_counter() - begin


if __name__ == "__main__":
    torch.set_num_threads(1)
    manifest, jobs, *started = sys.argv[1:]
    print(json.dumps({"seconds": extract(Path(manifest), int(jobs), bool(started))}))
