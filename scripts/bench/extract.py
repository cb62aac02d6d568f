"""Extraction end to end, beside what its stages cost by themselves, and beside Lhotse.

    pip install '.[extract,bench]'
    python scripts/bench/extract.py [--hours 1.4] [--threads 2] [--rounds 5] [--json]
    python scripts/bench/extract.py --kind short          many short clips, that are resampled too
    python scripts/bench/extract.py --no-peers --form mp3 the same corpus as MP3: opus, wav, or in a tar or parquet

A stage by itself goes over the whole corpus on one core: decoding all files; resampling, where the corpus has
another rate; fbank of all waveforms, in the batches that a run makes; writing all features as one shard, flushed
to disk. The ideal is the sum of these, divided by the threads. In each round stages, library, command and Lhotse
take turns; the table has the median of the rounds, and ratios are medians of the ratios within a round. The files
are in the page cache. The CPU column is what the whole run cost, all threads together.

Lhotse is asked for the same 80 mel bins through `compute_and_store_features`, with as many jobs, and with one,
into the fastest of its storages here. `started` leaves out the time that its jobs take to import it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from corpus import FORMS, KINDS, make_corpus, packed
from harness import KEPT, Timed, columns, median, options, present, remark, timed, undisturbed

from featcache.audio.resample import to_waveform
from featcache.config import Config, load_config
from featcache.device import Device
from featcache.engines.local import run_locally
from featcache.extraction.extraction import run_extraction
from featcache.extraction.features import compute_clips
from featcache.extraction.from_audio import batches, decode_all
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.format.shard import Item
from featcache.format.writing import ShardBuilder
from featcache.manifest import Manifest, Utterance, read_manifest
from featcache.quantize import stored_spec
from featcache.storage.base import open_store

PEER = Path(__file__).with_name("peer_lhotse.py")


class Stages:
    """The stages of a run, each over the whole corpus by itself.

    Args:
        manifest: The corpus's manifest.
        config: The config of the features.
        folder: The folder to write in.
    """

    def __init__(self, manifest: Manifest, config: Config, folder: Path) -> None:
        self._manifest = manifest
        self._config = config
        self._folder = folder
        self._device = Device("cpu", 1)
        self._device.configure_torch()
        self._extractor = config.build(self._device.torch_device)
        self._spec = stored_spec(self._extractor.spec, config.dtype)
        utterances = [manifest[row] for row in range(len(manifest))]
        self._batches = list(batches(utterances, manifest.duration.tolist(), self._device.batch_seconds))

    def run(self) -> dict[str, Timed]:
        """Each stage's time; holds all waveforms, 230 MB for an hour."""
        rate = self._config.audio.sample_rate
        spent = {"decode": timed(lambda: [None for batch in self._batches for _ in decode_all(batch, self._root)])}
        decoded = [list(decode_all(batch, self._root)) for batch in self._batches]
        waveforms: list[list[np.ndarray]] = []

        def resample() -> None:
            for batch in decoded:
                waveforms.append(
                    [to_waveform(clip.samples, clip.source.sample_rate, self._config.audio) for clip in batch]
                )

        resampling = timed(resample)
        if any(clip.source.sample_rate != rate for batch in decoded for clip in batch):
            spent["resample"] = resampling
        features: list[tuple[np.ndarray, list[int]]] = []
        spent["fbank"] = timed(lambda: features.extend(map(self._compute, self._batches, waveforms)))
        spent["write"] = timed(lambda: self._write(features))
        shutil.rmtree(self._folder)
        return spent

    @property
    def _root(self) -> Path:
        return self._manifest.root

    def _compute(self, batch: Sequence[Utterance], waveforms: Sequence[np.ndarray]) -> tuple[np.ndarray, list[int]]:
        ids = [utterance.id for utterance in batch]
        found = compute_clips(self._extractor, ids, waveforms, self._spec, self._device)
        return found.features, found.num_frames

    def _write(self, features: Sequence[tuple[np.ndarray, list[int]]]) -> None:
        builder = ShardBuilder(self._spec)
        for batch, (frames, num_frames) in zip(self._batches, features, strict=True):
            items = [Item(id=row.id, path=row.path, num_samples=1, size=1, mtime_ns=1, sample_rate=1) for row in batch]
            builder.append(items, frames, num_frames)
        name, files = builder.files(fingerprint="ab" * 32, row=0, manifest="0" * 16, made_by={}, where="")
        open_store(self._folder).publish(files, f"shards/{name}")


def measure(path: Path, asked: argparse.Namespace) -> dict:
    """All rounds over the corpus whose manifest is `path`."""
    manifest, config = read_manifest(path), load_config("fbank80")
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        stages = Stages(manifest, config, folder / "stages")
        runs: dict[str, Callable[[], Timed]] = {
            "featcache, library": lambda: _library(manifest, config, folder / "library", asked.threads),
            "featcache, command": lambda: _command(path, folder / "command", asked.threads),
        }
        runs |= _lhotse_runs(path, asked)
        rounds = []
        for number in range(asked.rounds):
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
            rounds.append((stages.run(), {name: undisturbed(run) for name, run in runs.items()}))
    return _result(manifest, rounds, asked)


def _library(manifest: Manifest, config: Config, cache: Path, threads: int) -> Timed:
    taken = timed(
        lambda: run_extraction(plan_extraction(manifest, [config], cache, Options("cpu", threads)), run_locally)
    )
    shutil.rmtree(cache)
    return taken


def _command(path: Path, cache: Path, threads: int) -> Timed:
    command = [sys.executable, "-m", "featcache", "extract", str(path), "-o", str(cache), "--device", "cpu"]
    taken = timed(lambda: subprocess.run([*command, "--threads", str(threads)], check=True, capture_output=True))
    shutil.rmtree(cache)
    return taken


def _lhotse_runs(path: Path, asked: argparse.Namespace) -> dict[str, Callable[[], Timed]]:
    """Lhotse with the fastest of its storages: none where it is not installed, or not wanted."""
    if asked.no_peers:
        return {}
    storages = _lhotse(path)
    if storages is None:
        print("Lhotse is left out: it cannot be imported here", file=sys.stderr)
        return {}
    print(f"the fastest of Lhotse's {', '.join(storages)}?", file=sys.stderr)
    options = ["--jobs", str(asked.threads), "--started", "--storage"]
    best = min(storages, key=lambda storage: _lhotse(path, *options, storage)["seconds"])

    def run(*options: str) -> Timed:
        inside: list[float] = []
        taken = timed(lambda: inside.append(_lhotse(path, "--storage", best, *options)["seconds"]))
        return replace(taken, seconds=inside[0], cpu_seconds=math.nan)  # without what it takes to import it

    jobs = f"{asked.threads} jobs"
    return {
        f"Lhotse, {jobs}, {best}": lambda: run("--jobs", str(asked.threads)),
        f"Lhotse, {jobs}, {best}, started": lambda: run("--jobs", str(asked.threads), "--started"),
        f"Lhotse, 1 job, {best}": lambda: run("--jobs", "1"),
    }


def _lhotse(path: Path, *options: str) -> dict | list[str] | None:
    """What `peer_lhotse.py` prints; None where it cannot run."""
    command = [sys.executable, str(PEER), str(path), *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(done.stdout) if done.returncode == 0 else None


def _result(manifest: Manifest, rounds: list[tuple[dict[str, Timed], dict[str, Timed]]], asked: object) -> dict:
    audio = float(manifest.duration.sum())
    ideals = [sum(stage.seconds for stage in stages.values()) / asked.threads for stages, _ in rounds]

    def line(taken: list[Timed]) -> dict[str, float]:
        seconds = median([run.seconds for run in taken])
        return {
            "seconds": seconds,
            "best_seconds": min(run.seconds for run in taken),
            "cpu_seconds_an_hour": min(run.cpu_seconds for run in taken) * 3600 / audio,
            "times_real_time": audio / seconds,
        }

    runs = {}
    for name in rounds[0][1]:
        taken = [its[name] for _, its in rounds]
        ours = [its["featcache, library"].seconds for _, its in rounds]
        runs[name] = line(taken) | {
            "of_ideal": median([ideal / run.seconds for ideal, run in zip(ideals, taken, strict=True)]),
            "library_is_times": median([run.seconds / own for own, run in zip(ours, taken, strict=True)]),
        }
    return {
        "audio_seconds": audio,
        "files": len(manifest),
        "threads": asked.threads,
        "rounds": len(rounds),
        "others": max(taken.others for both in rounds for part in both for taken in part.values()),
        "stages": {name: line([stages[name] for stages, _ in rounds]) for name in rounds[0][0]},
        "ideal": {"seconds": median(ideals), "times_real_time": audio / median(ideals)},
        "runs": runs,
    }


def show(result: dict) -> str:
    def row(name: str, line: dict[str, float]) -> list[str]:
        cpu = line.get("cpu_seconds_an_hour", math.nan)
        cells = [f"{line['seconds']:.3f}", f"{line.get('best_seconds', math.nan):.3f}", f"{cpu:.2f}"]
        cells.append(f"{line['times_real_time']:,.0f}")
        return [name, *("" if cell == "nan" else cell for cell in cells)]

    head = ["seconds", "best", "CPU s/h", "× real time"]
    stages = [row(name, line) for name, line in result["stages"].items()]
    runs = [
        [*row(name, line), f"{line['of_ideal']:.2f}", f"{line['library_is_times']:.2f} ×"]
        for name, line in result["runs"].items()
    ]
    ideal = f"the ideal, {result['threads']} cores"
    return "\n".join(
        [
            f"{result['audio_seconds'] / 3600:.2f} h in {result['files']:,} files; 80 mel bins, float16; median of "
            f"{result['rounds']} rounds",
            columns(["one core, one stage", *head], *stages, row(ideal, result["ideal"])),
            columns(["end to end", *head, "of ideal", "library is"], *runs),
            remark(result["others"]),
        ]
    )


def main() -> None:
    asked = options(
        __doc__,
        folder=KEPT,
        kind=("long", f"of corpus: {' or '.join(sorted(KINDS))}"),
        hours=(1.4, "of a long corpus"),
        count=(3000, "files of a short corpus"),
        threads=2,
        rounds=5,
        no_peers=(False, "leave Lhotse out"),
        form=("", f"of the files: {', '.join(FORMS)}; by default FLAC, or WAV if they are short"),
    )
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = make_corpus(asked.folder, asked.kind, hours=asked.hours, count=asked.count)
    present(measure(packed(path, asked.form) if asked.form else path, asked), show, asked)


if __name__ == "__main__":
    main()
