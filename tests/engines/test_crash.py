"""Kills, interrupts, full disks, two runs at once: what was committed is good, and the next run does the rest."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import soundfile
from cache_contents import check, chunk_files, only_version, shard_folders
from corpora import speech
from pausing import wait_at

from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import StoreError
from featcache.extraction.extraction import run_extraction
from featcache.extraction.plan import Options, plan_extraction
from featcache.manifest import read_manifest

ONE_EACH = "0.0003"
"""MB: a shard size that gives each of the plain utterances a shard of its own, with `odd_extractors`."""


def assert_clean(cache: Path) -> int:
    """Nothing is damaged or lost in a cache that may not even exist, whatever is missing; returns how many shards
    there are.
    """
    try:
        version = only_version(cache)
    except (StoreError, ValueError):
        assert not list(cache.glob("[!.]*/zarr.json"))
        return 0
    report = check(cache)
    problems = [problem for problem in report.problems if problem.kind != "unfinished"]
    assert all("it holds nothing, and nothing says what it is to hold" in problem.message for problem in problems)
    assert report.repeated == 0
    return len(version.shard_names())


# Kills


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed_it_ends_as_if_it_had_not_been(
    cli, plain, gate, gated_config, scratch, kills
):
    """Again and again `kill -9`: every state in between verifies clean, and the last one is that of an unharmed run."""
    rows = plain.rows[:8]
    job = ("extract", plain.manifest(rows, "eight.csv"), "-c", gated_config, "--shard-size", ONE_EACH, "--threads", 1)
    assert cli(*job, "-o", scratch / "whole").code == 0
    whole = chunk_files(scratch / "whole")
    chance, cache, there = random.Random(20), scratch / "killed", 0
    for _ in range(kills):
        # It makes so many shards, and no more; the kill comes when some of them are there, or a little later.
        more = chance.randint(0, 2)
        some = there + chance.randint(0, more)
        gate.write_text(str(more))
        running = cli.start(*job, "-o", cache)
        running.wait_until(lambda: len(shard_folders(cache)) >= some)  # noqa: B023
        time.sleep(chance.uniform(0, 0.1))
        running.send(signal.SIGKILL)
        assert running.wait().code == -signal.SIGKILL
        before, there = there, assert_clean(cache)
        assert some <= there <= before + more
        if there > len(rows) - 3:
            gate.unlink()
            assert cli(*job, "-o", cache).code == 0
            assert chunk_files(cache) == whole
            shutil.rmtree(cache)
            there = 0


# Interrupts


def test_a_second_interrupt_stops_at_once(cli, plain, gate, gated_config, scratch):
    """Nobody waits for an extractor that takes its time: this one never ends. At once too if both signals come before
    anything was said, the second while the first is being handled.
    """
    gate.write_text("0")
    for attempt in range(6):
        running = cli.start("extract", plain.manifest(), "-c", gated_config, "-o", scratch / "c")
        wait_at(gate, running)
        running.send(signal.SIGINT)
        if attempt == 0:
            running.wait_until(lambda: "interrupted" in running.err())  # noqa: B023
        running.send(signal.SIGTERM)  # two of a kind may be delivered as one
        assert running.wait().code == 130
        assert assert_clean(scratch / "c") == 0
        shutil.rmtree(scratch / "c")


# Disks


def assert_one_line(finished, *words: str) -> None:
    """It failed, and says so in one line that holds the words."""
    assert finished.code == 1
    (line,) = finished.err.splitlines()
    assert all(word in line for word in words), line


def test_a_full_disk_is_one_clear_line_and_harms_nothing(cli, plain, scratch):
    """Really refused by the kernel: a limit on the size of files, which a longer utterance's shard exceeds."""
    corpus = plain.copy(scratch / "corpus")
    soundfile.write(corpus.folder / "long.wav", speech(5.0), 16000)
    corpus.add("long", "long.wav", duration=5.0)
    job = ("extract", corpus.manifest(), "-o", scratch / "c", "--shard-size", "0.01", "--threads", 1)
    assert_one_line(cli(*job, limits={"FSIZE": 30_000}), "cannot be written", "File too large", "same command again")
    assert assert_clean(scratch / "c") > 3
    assert cli(*job).code == 0
    assert cli(*job, "-o", scratch / "fresh").code == 0
    assert chunk_files(scratch / "c") == chunk_files(scratch / "fresh")


@pytest.mark.parametrize("broken", ["fsync", "replace", "rename"])
def test_a_disk_that_breaks_ends_the_run_and_names_the_version(plain, scratch, monkeypatch, broken):
    """An error of the device in the thread that commits reaches the caller, as a StoreError."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    extraction = plan_extraction(read_manifest(plain.manifest()), [load_config("fbank80")], scratch, Options("cpu", 2))
    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(StoreError, match="Input/output error"):
        run_extraction(extraction, run_locally)


def test_a_cache_without_permission_is_one_clear_line(cli, plain, scratch):
    """Neither to make it, nor to add to it; what is in it can be read."""
    cache = scratch / "closed" / "c"
    cli("extract", plain.manifest(plain.rows[:3], "three.csv"), "-o", cache)
    folders = [path for path in (scratch / "closed").rglob("*") if path.is_dir()]
    for folder in [scratch / "closed", *folders]:
        folder.chmod(0o555)
    for output in (cache, scratch / "closed" / "new"):
        refused = cli("extract", plain.manifest(), "-o", output, powerless=True)
        assert_one_line(refused, "cannot be written", "Permission denied", str(output))
    (scratch / "file").write_text("")  # where a folder should be
    assert_one_line(
        cli("extract", plain.manifest(), "-o", scratch / "file" / "c"), "cannot be written", "Not a directory"
    )
    shutil.rmtree(next(cache.glob("*/index")))
    assert cli("verify", cache, powerless=True).code == 0
    assert "3 utterances" in cli("info", cache, powerless=True).out
    assert (
        "nothing to do" in cli("extract", plain.manifest(plain.rows[:3], "three.csv"), "-o", cache, powerless=True).out
    )
    for folder in [scratch / "closed", *folders]:
        with suppress(FileNotFoundError):
            folder.chmod(0o755)
