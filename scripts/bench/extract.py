"""Measure extraction end to end, and compare it with each of its stages alone, and with
Lhotse.

    pip install '.[extract,bench]'
    python scripts/bench/extract.py [--hours 1.4] [--threads 2] [--rounds 5] [--json]
    python scripts/bench/extract.py --kind short --hours 0.36
                        3,000 short clips, that are resampled too
    python scripts/bench/extract.py --no-peers --form mp3
                        the same as MP3; or opus, wav, or in a tar or parquet

A stage by itself goes over the whole corpus on one core: decoding all files; resampling,
where the corpus has another rate; fbank of all waveforms, in the batches that a run
makes; writing all features as one shard, flushed to disk. The ideal is the sum of these,
divided by the threads. In each round stages, library, command and Lhotse take turns; the
table has the median of the rounds, and ratios are medians of the ratios within a round.
The files are in the page cache. The CPU column is what the whole run cost, all threads
together.

Lhotse is asked for the same 80 mel bins through `compute_and_store_features`, with as
many jobs, into the fastest of its storages, a .npy each. `started` leaves out the time
that jobs take to import it. The library runs in a process that has imported everything:
by default with forked processes where they pay, then with threads alone, which share one
interpreter. `as processes` are as many processes of one thread that were started apart,
with a part of the manifest each.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread

import numpy as np
from corpus import FORMS, KINDS, make_corpus, packed
from harness import (
    KEPT,
    Table,
    Timed,
    Turns,
    options,
    present,
    remark,
    temporary_folder,
    timed,
    undisturbed,
)

import featcache
from featcache.audio.resample import to_waveform
from featcache.config import Config, load_config
from featcache.device import Device
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import compute_clips
from featcache.extraction.from_audio import batches, decode_all
from featcache.format.shard import Item
from featcache.format.writing import ShardBuilder
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest
from featcache.storage.opening import open_store

OURS, THREADS, IDEAL = "featcache, library", "the same, in threads", "the ideal"
PEER = Path(__file__).with_name("peer_lhotse.py")


def stages(manifest: Manifest, config: Config, folder: Path) -> dict[str, Timed]:
    """What each stage takes, over the whole corpus by itself; holds all waveforms, 230 MB
    for an hour."""
    device = Device("cpu", 1)
    built = BuiltConfig(config, device)
    spec = built.computed_spec
    utterances = [manifest[row] for row in range(len(manifest))]
    parts = [
        utterances[cut]
        for cut in batches(utterances, manifest.duration.tolist(), device.batch_seconds)
    ]
    waveforms: list[list[np.ndarray]] = []
    computed = []

    def resample() -> None:
        for clips in decoded:
            waveforms.append(
                [
                    to_waveform(clip.audio[0], clip.audio[1].sample_rate, config.audio)
                    for clip in clips
                ]
            )

    def compute() -> None:
        for part, clips in zip(parts, waveforms, strict=True):
            ids = (row.id for row in part)
            computed.append(compute_clips(built, dict(zip(ids, clips, strict=True))))

    def write() -> None:
        builder = ShardBuilder(spec)
        for part, found in zip(parts, computed, strict=True):
            for row, clip in zip(part, found, strict=True):
                item = Item(
                    id=row.id, path=row.path, num_samples=1, size=1, mtime_ns=1, sample_rate=1
                )
                builder.append(item, clip.features)
        name, files = builder.files(
            fingerprint="ab" * 32, row=0, manifest="0" * 16, made_by={}, where=""
        )
        open_store(folder).publish(files, f"shards/{name}")

    spent = {
        "decode": timed(lambda: [None for part in parts for _ in decode_all(part, manifest.root)])
    }
    decoded = [list(decode_all(part, manifest.root)) for part in parts]
    spent |= {"resample": timed(resample), "fbank": timed(compute), "write": timed(write)}
    if all(
        clip.audio[1].sample_rate == config.audio.sample_rate for clips in decoded for clip in clips
    ):
        del spent["resample"]
    shutil.rmtree(folder)
    return spent


def measure(path: Path, asked: argparse.Namespace) -> tuple[Table, str]:
    """The figures of all rounds over the corpus whose manifest is `path`."""
    manifest, config = read_manifest(path), load_config("fbank80")
    taken: dict[str, list[Timed]] = {}
    context = get_context("spawn")
    with (
        temporary_folder(asked.folder) as folder,
        ProcessPoolExecutor(1, mp_context=context) as warm,
        ProcessPoolExecutor(asked.threads, mp_context=context) as pool,
    ):
        run_warm = partial(_in, warm, path, folder / "library", asked.threads)
        run_warm()  # imports everything
        runs: dict[str, Callable[[], Timed]] = {
            OURS: run_warm,
            THREADS: partial(run_warm, "in threads"),
            "as processes, started": lambda: _processes(
                pool, path, folder / "parts", asked.threads
            ),
            "featcache, command": lambda: command(path, folder / "command", asked.threads),
        }
        # whose rate Lhotse would have to change
        if not asked.no_peers and asked.kind != "short":
            for how in ([], ["started"]):
                run = partial(_lhotse, path, asked.threads, *how)
                runs[", ".join(["Lhotse", f"{asked.threads} jobs", *how])] = run
        for number in range(asked.rounds):
            print(f"round {number + 1} of {asked.rounds}", file=sys.stderr)
            alone = stages(manifest, config, folder / "stages")
            ideal = {IDEAL: Timed(sum(stage.seconds for stage in alone.values()) / asked.threads)}
            for name, one in (
                alone | ideal | {name: undisturbed(run) for name, run in runs.items()}
            ).items():
                taken.setdefault(name, []).append(one)
    audio, turns = float(manifest.duration.sum()), Turns(taken)
    figures = {"seconds": "{:.3f}", "best": "{:.3f}", "CPU s/h": "{:.2f}", "× real time": "{:,.0f}"}
    table = Table(
        f"{audio / 3600:.2f} h in {len(manifest):,} files; {asked.threads} threads; 80 "
        "mel bins, float16",
        {**figures, "of ideal": "{:.2f}", "library is": "{:.2f} ×"},
    )
    for name in taken:
        compared = (
            (turns.ratio(IDEAL, name), turns.ratio(name, OURS)) if name in runs else (None, None)
        )
        seconds, cpu_seconds = turns.median(name), turns.best(name, "cpu_seconds")
        table.add(
            name,
            seconds,
            turns.best(name),
            cpu_seconds * 3600 / audio or None,
            audio / seconds,
            *compared,
        )
    return table, remark(turns.others)


def _in(pool: ProcessPoolExecutor, *arguments: object) -> Timed:
    return pool.submit(library, *arguments).result()


def library(path: Path, cache: Path, threads: int, how: str = "") -> Timed:
    """What `featcache.extract` takes in this process, which may fork others. Call it in a
    process with no other thread, or `in threads`, where it finds one."""
    manifest, config = read_manifest(path), load_config("fbank80")
    options, is_over = featcache.Options("cpu", threads), Event()
    other = Thread(target=is_over.wait)
    if how == "in threads":
        other.start()  # nothing is forked beside other threads
    taken = timed(lambda: featcache.extract(manifest, config, cache, options))
    if other.is_alive():
        is_over.set()
        other.join()
    shutil.rmtree(cache)
    return taken


def _processes(pool: ProcessPoolExecutor, path: Path, cache: Path, count: int) -> Timed:
    """What the slowest of so many processes takes, which have started, and extract a part
    each with one thread."""
    parts = [f"{number}/{count}" for number in range(count)]
    taken = list(pool.map(_part, [path] * count, [cache / part[0] for part in parts], parts))
    shutil.rmtree(cache)
    return Timed(max(one.seconds for one in taken), sum(one.cpu_seconds for one in taken))


def _part(path: Path, cache: Path, part: str) -> Timed:
    manifest, config, options = (
        read_manifest(path),
        load_config("fbank80"),
        featcache.Options("cpu", 1, partition=part),
    )
    return timed(lambda: featcache.extract(manifest, config, cache, options), patience=0)


def command(path: Path, cache: Path, threads: int) -> Timed:
    """What the whole command takes."""
    words = [
        sys.executable,
        "-m",
        "featcache",
        "extract",
        str(path),
        "-o",
        str(cache),
        "--device",
        "cpu",
    ]
    taken = timed(
        lambda: subprocess.run([*words, "--threads", str(threads)], check=True, capture_output=True)
    )
    shutil.rmtree(cache)
    return taken


def _lhotse(path: Path, jobs: int, *options: str) -> Timed:
    """What `peer_lhotse.py` says that it took: without what it takes to import it."""
    command, said = [sys.executable, str(PEER), str(path), str(jobs), *options], []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    taken = timed(
        lambda: said.append(
            subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        )
    )
    return Timed(json.loads(said[0].stdout)["seconds"], others=taken.others)


def main() -> None:
    asked = options(
        __doc__,
        folder=KEPT,
        kind=("long", f"of corpus: {' or '.join(sorted(KINDS))}"),
        hours=1.4,
        threads=2,
        rounds=5,
        no_peers=(False, "leave Lhotse out, which may not be installed"),
        form=("", f"of the files: {', '.join(FORMS)}; by default FLAC, or WAV if they are short"),
    )
    path = make_corpus(asked.folder, asked.kind, asked.hours)
    present(asked, *measure(packed(path, asked.form) if asked.form else path, asked))


if __name__ == "__main__":
    main()
