"""Kills, interrupts, full disks, two runs at once: what was committed is good, and the next run does the rest."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import soundfile
from cache_contents import being_written, check, chunk_files, items, only_version, shard_folders
from corpora import Corpus, speech
from extractions import extract_here
from pausing import interrupt

from featcache.config import load_config
from featcache.device import BATCH_SECONDS
from featcache.engines.local import run_locally
from featcache.errors import StoreError
from featcache.extraction.extraction import run_extraction
from featcache.extraction.plan import Options, plan_extraction
from featcache.manifest import read_manifest
from featcache.store import files, zarr3

ONE_EACH = "0.0003"
"""MB: a shard size that gives each of the plain utterances a shard of its own, with `odd_extractors`."""


@pytest.fixture(scope="module")
def job(plain, slow_config) -> tuple:
    """An extraction that takes a quarter of a second and makes a shard of each utterance."""
    return ("extract", plain.manifest(), "-c", slow_config, "--shard-size", ONE_EACH, "--threads", 2)


@pytest.fixture(scope="module")
def uninterrupted(cli, job, plain, tmp_path_factory) -> dict[str, bytes]:
    """The chunk files that a run makes which nothing happens to."""
    cache = tmp_path_factory.mktemp("uninterrupted")
    assert cli(*job, "-o", cache).code == 0
    chunks = chunk_files(cache)
    assert len(chunks) == len(plain.rows)
    return chunks


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
    assert all("it holds nothing, and has no record of a run" in problem.message for problem in problems)
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


def test_everything_is_flushed_before_it_becomes_visible(plain, tmp_path, monkeypatch):
    """A power cut is not a kill: a shard's files and folders are on disk before its rename, and that right after."""
    flushed, renamed = [], []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor):
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recorded_rename(self, target):
        contents = {str(path) for path in (self, *self.rglob("*"))}
        renamed.append((Path(target), contents - set(flushed), len(flushed)))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    manifest = read_manifest(plain.manifest(plain.rows[:4], "four.csv"))
    extract_here(manifest, [load_config("fbank80")], tmp_path, Options("cpu", 1, shard_megabytes=0.01))
    shards = [(path, missing, at) for path, missing, at in renamed if path.parent.name == "shards"]
    assert len(shards) > 2
    for path, missing, at in renamed:
        assert missing == set(), path
        if path.parent.name == "shards":
            assert str(path.parent) in flushed[at:]


# Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_commits_what_is_whole_and_exits_with_130(
    cli, gate, gated_config, uninterrupted, plain, scratch, number
):
    """What it says is there is there; the same command again does the rest."""
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, "--shard-size", ONE_EACH, "--threads", 1)
    gate.write_text("2")
    running = cli.start(*job, "--json")
    running.wait_until(lambda: len(shard_folders(scratch)) == 2)
    finished = interrupt(running, gate, number)
    assert finished.code == 130, finished.err
    there = assert_clean(scratch)
    assert there == 3  # with the one that was being extracted
    summary = finished.json()
    assert summary["interrupted"]
    assert summary["versions"][0]["extracted"] == there
    resumed = cli(*job, "--json")
    assert (resumed.code, resumed.json()["versions"][0]["extracted"]) == (0, len(plain.rows) - there)
    assert chunk_files(scratch) == uninterrupted


def test_a_second_interrupt_stops_at_once(cli, plain, gate, gated_config, scratch):
    """Nobody waits for an extractor that takes its time: this one never ends."""
    gate.write_text("0")
    running = cli.start("extract", plain.manifest(), "-c", gated_config, "-o", scratch)
    running.wait_until(lambda: being_written(scratch))
    running.send(signal.SIGINT)
    running.wait_until(lambda: "interrupted" in running.err())
    running.send(signal.SIGINT)
    assert running.wait().code == 130
    assert assert_clean(scratch) == 0


def test_two_interrupts_at_once_stop_at_once(cli, plain, gate, gated_config, scratch):
    """Both keys hit before anything was said: the second signal comes while the first is being handled."""
    gate.write_text("0")
    for _ in range(10):
        running = cli.start("extract", plain.manifest(), "-c", gated_config, "-o", scratch / "c")
        running.wait_until(lambda: being_written(scratch / "c", "*.????????"))
        for number in (signal.SIGINT, signal.SIGTERM):  # two of a kind may be delivered as one
            running.send(number)
        assert running.wait().code == 130
        shutil.rmtree(scratch / "c")


def test_an_interrupt_before_the_first_shard_is_not_called_nothing_to_do(cli, plain, gate, gated_config, scratch):
    """The summary of a run that got nowhere says so."""
    rows = [{**row, "path": "00.wav", "duration": 0.4} for row in plain.rows]
    job = ("extract", plain.manifest(rows, "same.csv"), "-c", gated_config, "-o", scratch, "--shard-size", "0.0001")
    gate.write_text("0")
    running = cli.start(*job, "--threads", 1)
    running.wait_until(lambda: being_written(scratch))
    finished = interrupt(running, gate)
    assert finished.code == 130
    assert "nothing to do" not in finished.out


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


@pytest.mark.parametrize(("module", "broken"), [(files, "sync"), (zarr3, "write_array")])
def test_a_disk_that_breaks_ends_the_run_and_names_the_version(plain, scratch, monkeypatch, module, broken):
    """An error of the device in the thread that commits reaches the caller, as a StoreError."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    extraction = plan_extraction(read_manifest(plain.manifest()), [load_config("fbank80")], scratch, Options("cpu", 2))
    monkeypatch.setattr(module, broken, fail)
    with pytest.raises(StoreError, match="Input/output error"):
        run_extraction(extraction, run_locally)


def breaks_off(at: int):
    """A `ChunkWriter.append` that leaves off in the middle of its call number `at`, and works before and after."""
    write, calls = zarr3.ChunkWriter.append, itertools.count(1)

    def append(writer, data):
        if next(calls) != at:
            return write(writer, data)
        write(writer, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return append


@pytest.mark.parametrize("at", range(2, 12))
def test_nothing_follows_what_is_half_written(plain, scratch, monkeypatch, at):
    """A write that breaks off in the middle of a shard ends it, whatever other threads still hold for it."""
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.3)
    monkeypatch.setattr(zarr3.ChunkWriter, "append", breaks_off(at))
    extraction = plan_extraction(read_manifest(plain.manifest()), [load_config("fbank80")], scratch, Options("cpu", 4))
    with pytest.raises(StoreError, match="No space left"):
        run_extraction(extraction, run_locally)
    assert not list(scratch.glob("*/shards/*/"))


def test_a_cache_that_cannot_be_made_is_one_clear_line(cli, plain, scratch):
    """A file lies where its folder should."""
    (scratch / "file").write_text("")
    assert_one_line(
        cli("extract", plain.manifest(), "-o", scratch / "file" / "c"), "cannot be written", "Not a directory"
    )


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
    shutil.rmtree(next(cache.glob("*/index")))
    assert cli("verify", cache, powerless=True).code == 0
    assert "3 utterances" in cli("info", cache, powerless=True).out
    assert (
        "nothing to do" in cli("extract", plain.manifest(plain.rows[:3], "three.csv"), "-o", cache, powerless=True).out
    )
    for folder in [scratch / "closed", *folders]:
        with suppress(FileNotFoundError):
            folder.chmod(0o755)


def test_a_manifest_that_is_not_there_is_one_clear_line(cli, scratch):
    """Exit 2, and no cache is made."""
    finished = cli("extract", scratch / "gone.csv", "-o", scratch / "c")
    assert finished.code == 2
    (line,) = finished.err.splitlines()
    assert "gone.csv: cannot be read: No such file or directory" in line
    assert not (scratch / "c").exists()


# Several runs at once


def run_together(cli, *jobs: tuple) -> list:
    """Start commands at the same time, and wait for them."""
    running = [cli.start(*job) for job in jobs]
    return [one.wait() for one in running]


@pytest.mark.parametrize("sizes", [(ONE_EACH,) * 3, (ONE_EACH, "0.0008", "0.002")], ids=["same", "different"])
def test_runs_at_once_into_one_version_lose_nothing(cli, plain, slow_config, uninterrupted, scratch, sizes):
    """Three start from nothing; in the end each utterance is there, once or alike, and everything verifies."""
    job = ("extract", plain.manifest(), "-c", slow_config, "-o", scratch, "--threads", 1)
    for finished in run_together(cli, *[(*job, "--shard-size", size) for size in sizes]):
        assert finished.code == 0, finished.err
    report = check(scratch, manifest=read_manifest(plain.manifest()))
    assert (report.problems, report.utterances, report.surplus) == ([], len(plain.rows), 0)
    if len(set(sizes)) == 1:
        assert chunk_files(scratch) == uninterrupted
        assert report.repeated == 0
    assert "nothing to do" in cli(*job).out


def test_runs_at_once_of_manifests_that_overlap_lose_nothing(cli, plain, slow_config, scratch):
    """Each brings what the others do not have."""
    parts = [plain.rows[:8], plain.rows[4:], plain.rows[2:10][::-1]]
    manifests = [plain.manifest(rows, f"part-{i}.csv") for i, rows in enumerate(parts)]
    options = ("-c", slow_config, "-o", scratch, "--shard-size", "0.0008", "--threads", 1)
    for finished in run_together(cli, *[("extract", manifest, *options) for manifest in manifests]):
        assert finished.code == 0, finished.err
    report = check(scratch, manifest=read_manifest(plain.manifest()))
    assert (report.problems, report.utterances) == ([], len(plain.rows))


def test_a_run_that_begins_late_does_nothing_twice(plain, scratch):
    """Planned before another run did all of it, with shards of another size, and begun after that."""
    manifest = read_manifest(plain.manifest())
    early, late = (
        plan_extraction(manifest, [load_config("fbank80")], scratch, Options("cpu", 1, shard_megabytes=size))
        for size in (0.02, 0.03)
    )
    assert run_extraction(early, run_locally).versions[0].extracted == len(plain.rows)
    summary = run_extraction(late, run_locally)
    assert (summary.versions[0].extracted, summary.elsewhere) == (0, len(plain.rows))
    assert check(scratch).repeated == 0


def test_a_run_takes_over_what_a_killed_one_had_begun(cli, plain, gate, gated_config, uninterrupted, scratch):
    """Claims die with their process: who waits for a shard gets to make it."""
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, "--threads", 1, "--shard-size", ONE_EACH)
    gate.write_text("2")
    first, second = cli.start(*job), cli.start(*job)
    entered = [gate.with_name(f"{gate.name}.{running.pid}") for running in (first, second)]
    first.wait_until(lambda: [path.stat().st_size for path in entered] == [3, 3])  # each has begun a third shard
    first.send(signal.SIGKILL)
    assert first.wait().code == -signal.SIGKILL
    gate.unlink()
    assert second.wait().code == 0
    assert chunk_files(scratch) == uninterrupted


def test_a_run_may_fail_what_another_extracts(cli, scratch):
    """Two runs of which one sees a single file: what the other extracts is there, and in no ledger."""
    corpus = Corpus(scratch / "corpus")
    corpus.folder.mkdir()
    for i in range(6):
        soundfile.write(corpus.folder / f"{i}.wav", speech(0.3, seed=i), 16000)
        corpus.add(f"utt-{i}", f"{i}.wav")
    shutil.copy2(corpus.folder / "0.wav", scratch)
    job = ("extract", corpus.manifest(), "-o", scratch / "c", "--shard-size", "0.01")
    codes = {finished.code for finished in run_together(cli, job, (*job, "--root", scratch))}
    assert codes <= {0, 3}
    assert cli(*job).code == 0
    assert len(items(scratch / "c")) == 6
    report = check(scratch / "c", manifest=read_manifest(corpus.manifest()))
    assert (report.problems, report.failed) == ([], 0)
