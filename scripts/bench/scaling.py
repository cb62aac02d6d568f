"""Measure how extraction on a CPU scales with its workers, also beyond the cores of the
machine.

    python scripts/bench/scaling.py [--hours 3] [--workers 2 4 8 16] [--rounds 5] [--json]

For each number of workers, over FLAC like LibriSpeech: the whole command, and the library
in a process that has imported everything. Both are compared with two threads of one
process. Beyond the cores, more workers cannot be faster; a coordinator, a lock or a queue
that binds would make them slower.

The coordinator's column is the CPU time of the process that deals out the work, beyond
what it takes to plan, as a share of all CPU time. In each round all take turns; the table
has the median and the best of the rounds, and ratios are medians of the ratios within a
round."""

import argparse
import resource
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Event, Thread

from corpus import make_corpus
from harness import (
    KEPT,
    Table,
    Timed,
    options,
    present,
    remark,
    take_turns,
    temporary_folder,
    timed,
)

import featcache
from featcache.config import load_config
from featcache.manifest.read import read_manifest

_IN_THREADS = """
import runpy, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
runpy.run_module("featcache", run_name="__main__")
"""
"""The command in a process that has another thread, and so forks none."""


def command(path: Path, cache: Path, workers: int, in_threads: bool) -> Timed:
    """What the whole command takes."""
    start = ["-c", _IN_THREADS] if in_threads else ["-m", "featcache"]
    words = ["extract", path, "-o", cache, "--device", "cpu", "--threads", workers]
    call = [sys.executable, *start, *map(str, words)]
    taken = timed(lambda: subprocess.run(call, check=True, capture_output=True))
    shutil.rmtree(cache)
    return taken


def library(path: Path, cache: Path, workers: int, in_threads: bool) -> tuple[Timed, float]:
    """What `featcache.extract` takes in this process, which has no other thread; and the
    share of the CPU time that this process used itself, beyond a dry run's."""
    manifest, config = read_manifest(path), load_config("fbank80")
    is_over = Event()
    other = Thread(target=is_over.wait)
    if in_threads:
        other.start()

    def extract(dry_run: bool) -> None:
        asked = featcache.Options("cpu", workers, dry_run=dry_run)
        featcache.extract(manifest, config, cache, asked)

    before = _own_seconds()
    extract(True)
    planning = _own_seconds() - before
    before = _own_seconds()
    taken = timed(partial(extract, False))
    own = _own_seconds() - before - planning
    is_over.set()
    if in_threads:
        other.join()
    shutil.rmtree(cache)
    return taken, max(0.0, own) / taken.cpu_seconds


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(path: Path, asked: argparse.Namespace) -> tuple[Table, str]:
    """The figures of all rounds."""
    shares: dict[str, list[float]] = {}
    cases = {"2 threads": (2, True)}
    cases |= {f"{count} workers": (count, False) for count in asked.workers}
    with (
        temporary_folder(asked.folder) as folder,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as warm,
    ):

        def run_library(name: str) -> Timed:
            taken, share = warm.submit(library, path, folder / "library", *cases[name]).result()
            shares.setdefault(name, []).append(share)
            return taken

        run_library("2 threads")  # imports everything
        shares.clear()
        runs = {}
        for name, case in cases.items():
            runs[f"{name}, command"] = partial(command, path, folder / "command", *case)
            runs[name] = partial(run_library, name)
        turns = take_turns(runs, asked.rounds)
    audio = float(read_manifest(path).duration.sum())
    table = Table(
        f"{audio / 3600:.2f} h of FLAC, fbank80",
        {
            "command s": "{:.2f}",
            "best": "{:.2f}",
            "of 2 threads'": "{:.2f}",
            "library s": "{:.2f}",
            "best ": "{:.2f}",
            "× real time": "{:,.0f}",
            "of 2 threads' ": "{:.2f}",
            "coordinator": "{:.1%}",
        },
    )
    for name in cases:
        whole = f"{name}, command"
        table.add(
            name,
            turns.median(whole),
            turns.best(whole),
            turns.ratio(whole, "2 threads, command"),
            turns.median(name),
            turns.best(name),
            audio / turns.median(name),
            turns.ratio(name, "2 threads"),
            None if name == "2 threads" else median(shares[name]),
        )
    return table, remark(turns.others)


def main() -> None:
    asked = options(__doc__, folder=KEPT, hours=3.0, workers=[2, 4, 8, 16], rounds=5)
    present(asked, *measure(make_corpus(asked.folder, "long", asked.hours), asked))


if __name__ == "__main__":
    main()
