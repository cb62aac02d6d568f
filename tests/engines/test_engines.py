"""A run that cannot write says so in a line, and lets go of everything: no lock, open
file or thread of it stays."""

import errno
import itertools
import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cache_contents import WORK, being_written, chunk_files, items
from corpora import speech
from extractions import run_to_its_end
from processes import open_files

import featcache
from featcache.config import load_config
from featcache.engines import local
from featcache.engines.delivery import OpenShard
from featcache.engines.local import run_locally
from featcache.errors import StoreError
from featcache.extraction.extraction import run_extraction
from featcache.extraction.options import Options
from featcache.extraction.plan import ExtractionPlan, plan_extraction
from featcache.format.writing import ShardBuilder
from featcache.manifest.read import read_manifest
from featcache.storage.directory import Directory

OURS = re.compile(r"featcache[-_](\d+|commit.*|sync.*)")
"""Names of threads that extract; one that copies shards for another test is none of them."""


@pytest.fixture(params=[1, 3])
def plan(request, plain, scratch):
    """Plans a run of two versions in many shards."""

    def plan() -> ExtractionPlan:
        configs = [load_config(name) for name in ("fbank80", "mfcc13")]
        return plan_extraction(
            read_manifest(plain.manifest()), configs, scratch, Options("cpu", request.param, 0.02)
        )

    return plan


def assert_nothing_is_held(cache: Path) -> None:
    """No open file, nothing half written, and no thread."""
    assert being_written(cache) == []
    # nor what is removed by now
    assert [path for path in open_files(cache) if WORK in Path(path).parts] == []
    assert [thread.name for thread in threading.enumerate() if OURS.fullmatch(thread.name)] == []


def assert_all_is_done(plan: ExtractionPlan) -> None:
    """By a run that does not wait for what an earlier one holds."""
    summary = run_to_its_end(plan)
    assert [one.present + one.extracted for one in summary.versions] == [len(plan.manifest)] * 2
    assert_nothing_is_held(plan.cache)


FULL = StoreError("a file: cannot be written: No space left on device")


@pytest.mark.parametrize(
    ("owner", "method", "call", "error"),
    [
        (Directory, "put", 1, FULL),  # of a version's documents
        (ShardBuilder, "append", 2, FULL),
        (Directory, "publish", 1, FULL),
        (Directory, "publish", 2, FULL),  # the first shard of the second version
        # the last worker, or who commits
        (threading.Thread, "start", None, RuntimeError("can't start new thread")),
    ],
)
def test_a_run_that_cannot_write_or_start_its_threads_lets_go_of_its_shards(
    plan, scratch, monkeypatch, owner, method, call, error
):
    extraction, calls, real = plan(), itertools.count(1), getattr(owner, method)

    def failing(*args, **options):
        if next(calls) == (call or extraction.device.workers):
            raise error
        return real(*args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, method, failing)
        with pytest.raises(type(error), match=str(error)):
            run_extraction(extraction, run_locally)
        assert_nothing_is_held(scratch)
    assert_all_is_done(plan())


def test_when_a_second_interrupt_has_ended_a_run_it_commits_nothing_more(
    plan, scratch, monkeypatch
):
    join, publish, is_published = threading.Thread.join, Directory.publish, threading.Event()

    def interrupted(thread, timeout=None):
        if not isinstance(thread, threading.Thread) or re.fullmatch(r"featcache_\d+", thread.name):
            is_published.wait(60)
            raise KeyboardInterrupt
        join(thread, timeout)

    def published(*args):
        is_published.set()
        publish(*args)

    monkeypatch.setattr(Directory, "publish", published)
    with monkeypatch.context() as patched:
        patched.setattr(local, "wait", interrupted)
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_extraction(plan(), run_locally)
        ours = [thread for thread in threading.enumerate() if OURS.fullmatch(thread.name)]
        assert [thread.name for thread in ours if "commit" in thread.name] == []
    for worker in ours:
        worker.join()
    assert_nothing_is_held(scratch)
    assert_all_is_done(plan())


# As users see it


def assert_one_line(finished, *words: str) -> None:
    """It failed, and says so in one line that holds the words."""
    (line,) = finished.with_code(1).err.splitlines()
    assert all(word in line for word in words), line


def test_a_full_disk_is_one_clear_line_and_harms_nothing(cli, plain, scratch):
    """Really refused by the kernel: a limit on the size of files, which a longer
    utterance's shard exceeds."""
    corpus = plain.copy(scratch / "corpus")
    corpus.record("long", "long.wav", speech(5.0), duration=5.0)
    job = ("extract", corpus.manifest(), "--shard-size", "0.01", "--threads", 1, "-o")
    assert_one_line(
        cli(*job, scratch / "c", limits={"FSIZE": 30_000}),
        "cannot be written",
        "File too large",
        "run again",
    )
    assert len(items(scratch / "c")) > 3
    assert cli(*job, scratch / "c").code == 0
    assert cli(*job, scratch / "fresh").code == 0
    assert chunk_files(scratch / "c") == chunk_files(scratch / "fresh")


def test_a_cache_without_permission_is_one_clear_line(cli, plain, scratch):
    """Neither to make it, nor to add to it; what is in it can be read."""
    cache = scratch / "closed" / "c"
    three = ("extract", plain.manifest(plain.rows[:3], "three.csv"), "-o")
    cli(*three, cache)
    folders = [path for path in (scratch / "closed").rglob("*") if path.is_dir()]
    for folder in [scratch / "closed", *folders]:
        folder.chmod(0o555)
    for output in (cache, scratch / "closed" / "new"):
        refused = cli("extract", plain.manifest(), "-o", output, powerless=True)
        assert_one_line(refused, "cannot be written", "Permission denied", str(output))
    (scratch / "file").write_text("")  # where a folder should be
    assert_one_line(cli(*three, scratch / "file" / "c"), "cannot be written", "Not a directory")
    for name in ("index", "work"):  # which a copy may lack
        shutil.rmtree(next(cache.glob(f"*/{name}")))
    assert cli("verify", cache, powerless=True).code == 0
    assert "3 utterances" in cli("info", cache, powerless=True).out
    assert "nothing to do" in cli(*three, cache, powerless=True).out
    for folder in [scratch / "closed", *folders]:
        with suppress(FileNotFoundError):
            folder.chmod(0o755)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room or mend the disk, and run again"),
        (errno.EMFILE, "allow more open files, with ulimit -n, and run again"),
    ],
)
def test_a_shard_that_cannot_be_written_says_what_to_do(
    plain, scratch, monkeypatch, number, remedy
):
    def commit(self):
        error = OSError(number, os.strerror(number))
        raise StoreError(f"cannot be written: {error.strerror}") from error

    monkeypatch.setattr(OpenShard, "commit", commit)
    with pytest.raises(StoreError, match=remedy):
        featcache.extract(plain.manifest(), "fbank80", scratch / "c", Options("cpu", 1))
