"""Measure whether a run's memory grows with its manifest: 10^5 and 10^6 clips of 0.1 s,
planned, extracted, and planned again.

    python scripts/bench/memory.py [--rows 100000 1000000] [--threads 2] [--json]
    python scripts/bench/memory.py --processes 32 --rows 10000000

The clips are 64 WAV files, each named by many rows of the manifest under an id of its
own; every row is decoded and extracted by itself. Commands run in processes of their own,
whose resident memory is read 20 times a second. Peaks are beyond what `import torch`
takes; a run with nothing to do imports none.

With --processes, what ranks need is measured instead: each process opens a version of so
many utterances, reads a manifest with speaker, text and gain by `shared_in=`, and takes
three packed batches; in the end, all processes are there together. Memory is Private_Dirty
of /proc/self/smaps_rollup, beyond what the same takes over 1,000 rows; the files of the
rows and of the index, which the page cache has once, are counted once. The version is kept
in --folder."""

import argparse
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice
from multiprocessing import Barrier, Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import soundfile
from corpus import make_corpus, write_manifest
from harness import KEPT, Table, options, present, private_bytes, status_bytes, temporary_folder
from made_up import make_version

import featcache
from featcache.config import load_config
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest

FILES, SECONDS, RATE = 64, 0.1, 16000


def watch(command: list[str]) -> tuple[float, float]:
    """Run a command: its seconds, and the peak of its resident memory, in MB."""
    start, peak = perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, status_bytes("VmHWM", process.pid))
        sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return perf_counter() - start, peak / 1e6


def make_manifest(folder: Path, rows: int) -> Path:
    """A manifest of that many rows over a few short clips, under `folder`."""
    home = folder / "clips-0.1s"
    if not home.is_dir():
        speech = make_corpus(folder, "long", 0.01).parent / "audio" / "000000.flac"
        samples, _ = soundfile.read(speech, dtype="int16")
        (home / "audio").mkdir(parents=True)
        for number in range(FILES):
            start = number * 160 % (len(samples) - 1600)
            soundfile.write(
                home / "audio" / f"{number}.wav", samples[start : start + int(SECONDS * RATE)], RATE
            )
    clips = ((f"utterance-{row:08d}", f"audio/{row % FILES}.wav", SECONDS) for row in range(rows))
    return write_manifest(home / f"{rows}.csv", clips)


def measure(rows: int, asked: argparse.Namespace) -> dict[str, tuple[float, ...]]:
    """A manifest of that many rows: read, planned, extracted, and asked for again."""
    manifest = make_manifest(asked.folder, rows)
    with temporary_folder(asked.folder) as cache:
        command = [
            sys.executable,
            "-m",
            "featcache",
            "extract",
            str(manifest),
            "-o",
            str(cache),
            "--device",
            "cpu",
        ]
        command += ["--threads", str(asked.threads)]
        start = perf_counter()
        read = read_manifest(manifest, carry=False)
        reading = perf_counter() - start
        plan_extraction(read, [load_config("fbank80")], cache, Options("cpu", asked.threads))
        planning = perf_counter() - start - reading
        del read
        watched = {"extract": watch(command), "nothing to do": watch(command)}
    return {**watched, "reading": (reading,), "planning": (planning,)}


def three_batches(place: tuple[int, int], folder: Path, shared: Path) -> object:
    """Open a version, read its manifest and take three packed batches; returns what is held."""
    cache = featcache.open(folder)
    dataset = featcache.FeatureDataset(cache, folder / "rows.csv", shared_in=shared)
    number, count = place
    loader = featcache.PackedLoader(
        dataset, tokens=128, rows=8, overflow="error", rank=number, world_size=count
    )
    return loader, [*islice(loader, 3)]


def rank(
    place: tuple[int, int], few: Path, folder: Path, shared: Path, everyone: Any, result: Connection
) -> None:
    """Send the bytes that this process alone has of the rows, beyond those for a few rows."""
    three_batches(place, few, shared)
    before = private_bytes()
    held = three_batches(place, folder, shared)
    everyone.wait()
    result.send(private_bytes() - before)
    everyone.wait()
    del held


def memory_of(count: int, few: Path, folder: Path, shared: Path) -> tuple[float, float]:
    """The bytes that one process has alone, on average, and all processes together."""
    everyone, results = Barrier(count), []
    with ExitStack() as started:
        for number in range(count):
            here, there = Pipe()
            arguments = (number, count), few, folder, shared, everyone, there
            process = Process(target=rank, args=arguments)
            process.start()
            there.close()  # so that `recv` fails if the process does
            started.callback(process.join)
            results.append(here)
        alone = [result.recv() for result in results]
    files = [*shared.glob("featcache/rows/*"), *folder.glob("*/index/**/*")]
    return sum(alone) / count, sum(alone) + sum(path.stat().st_size for path in files)


def made(folder: Path, rows: int) -> Path:
    """Make a version of so many tiny utterances, and its manifest, unless they exist."""
    folder /= f"{rows}-utterances"
    if not (folder / "rows.csv").exists():
        if not [*folder.glob("*/zarr.json")]:
            make_version(folder, [np.zeros((2, 8), np.uint16)] * rows, 50_000)
        ids = enumerate(featcache.open(folder).ids)
        columns = ((id_, id_[:10], f"text of {row}", row / 2) for row, id_ in ids)
        write_manifest(folder / "rows.csv", columns, ["id", "speaker", "text", "gain"])
    return folder


def measure_ranks(asked: argparse.Namespace) -> None:
    """Measure one process and several, and print a table."""
    (rows,) = asked.rows
    few, folder = made(asked.folder, 1000), made(asked.folder, rows)
    table = Table(
        f"{rows:,} rows", {"MB alone": "{:,.1f}", "MB of all": "{:,.0f}", "of one": "{:.2f}"}
    )
    with temporary_folder(asked.folder) as shared:
        of_one = None
        for count in (1, asked.processes):
            alone, total = memory_of(count, few, folder, shared)
            of_one = of_one or total
            table.add(f"{count} processes", alone / 1e6, total / 1e6, total / of_one)
    present(asked, table)


def main() -> None:
    asked = options(
        __doc__,
        folder=KEPT,
        rows=[100_000, 1_000_000],
        threads=2,
        processes=(int, "measure so many ranks instead"),
    )
    if asked.processes is not None:
        measure_ranks(asked)
        return
    of_torch = max(
        watch([sys.executable, "-c", "import torch, time; time.sleep(0.5)"])[1] for _ in range(2)
    )
    table = Table("what", {"seconds": "{:.2f}", "MB beyond torch": "{:,.0f}"})
    for rows in asked.rows:
        for what, (seconds, *peak) in measure(rows, asked).items():
            imported = of_torch if what == "extract" else 0.0
            table.add(
                f"{rows:,} rows: {what}", seconds, *([size - imported for size in peak] or [None])
            )
    present(
        asked,
        f"{SECONDS} s clips, {asked.threads} threads; import torch takes {of_torch:,.0f} MB",
        table,
    )


if __name__ == "__main__":
    main()
