"""A run that fails lets go of everything: the next in the same process finds no claim, open file or thread of it."""

from __future__ import annotations

import errno
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from cache_contents import WORK, being_written
from damage import flip
from extractions import run_to_its_end

from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import DamagedError, StoreError
from featcache.extraction.extraction import run_extraction
from featcache.extraction.plan import ExtractionPlan, Options, plan_extraction
from featcache.manifest import read_manifest
from featcache.store.locks import Claim
from featcache.store.selection import select_versions
from featcache.store.shard_writer import ShardWriter
from featcache.store.zarr3 import ChunkWriter

CONFIGS = "fbank80", "mfcc13"
OURS = re.compile(r"featcache-(\d+|commit.*|sync.*)")
"""Names of threads that extract; one that copies shards for another test is none of them."""

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(params=[1, 3])
def plan(request, plain, scratch):
    """Plans a run of two versions in many shards; `only` so many rows of the manifest, where that is given."""

    def plan(only: int | None = None) -> ExtractionPlan:
        manifest = plain.manifest() if only is None else plain.manifest(plain.rows[:only], f"{only}.csv")
        configs = [load_config(name) for name in CONFIGS]
        return plan_extraction(read_manifest(manifest), configs, scratch, Options("cpu", request.param, 0.02))

    return plan


def failing(call: int, real, error: Exception):
    """A method that raises an error at one call, counted from 1, and then does what it should."""
    calls = iter(range(1, 1_000_000))

    def method(*args, **options):
        if next(calls) == call:
            raise error
        return real(*args, **options)

    return method


def open_in_work(cache: Path) -> list[str]:
    """Files that this process has open in the `work/` of a version, also those that are removed by now."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # what lists them is open too
            found.append(os.readlink(descriptor))
    return [path for path in found if path.startswith(str(cache)) and WORK in Path(path).parts]


def assert_nothing_is_held(cache: Path) -> None:
    """No claim, no open file, nothing half written, and no thread."""
    assert being_written(cache) == []
    assert open_in_work(cache) == []
    assert [thread.name for thread in threading.enumerate() if OURS.fullmatch(thread.name)] == []


def assert_all_is_done(plan: ExtractionPlan) -> None:
    """By a run that does not wait for what an earlier one holds."""
    summary = run_to_its_end(plan)
    assert [one.present + one.extracted for one in summary.versions] == [len(plan.manifest)] * len(CONFIGS)
    assert_nothing_is_held(plan.cache)


@pytest.mark.parametrize(
    ("owner", "method", "call"),
    [
        (ChunkWriter, "__init__", 1),
        (ChunkWriter, "__init__", 2),  # the first shard's writer in the second version
        (Claim, "take", 4),  # the claim on the second shard in the second version
        (ShardWriter, "append", 2),
        (ShardWriter, "commit", 2),
    ],
)
def test_a_run_that_cannot_write_lets_go_of_its_shards(plan, scratch, monkeypatch, owner, method, call):
    """Wherever the disk is full: at a claim, as a shard is begun in one version or the other, later."""
    with monkeypatch.context() as patched:
        patched.setattr(owner, method, failing(call, getattr(owner, method), NO_SPACE))
        with pytest.raises(StoreError, match=r"cannot be written: No space left.*run the same command again"):
            run_extraction(plan(), run_locally)
        assert_nothing_is_held(scratch)
    assert_all_is_done(plan())


def test_a_damaged_shard_of_another_run_holds_no_claim(plan, scratch):
    """It is met between the claim on a task and its first byte, where a run looks at what others have added."""
    run_extraction(plan(only=2), run_locally)
    (version,) = select_versions(scratch, CONFIGS[0])
    before, late = version.shard_names(), plan()
    run_extraction(plan(only=4), run_locally)
    added = version.shard(next(name for name in version.shard_names() if name not in before)).folder / "paths"
    flip(added / "c" / "0", 0)
    with pytest.raises(DamagedError, match=rf"^{added}: damaged: .*; `featcache repair {version.path} "):
        run_extraction(late, run_locally)
    assert_nothing_is_held(scratch)
    flip(added / "c" / "0", 0)
    assert_all_is_done(plan())


def test_a_thread_that_does_not_start_ends_the_run(plan, scratch, monkeypatch):
    """With the error that says so, after the threads that had started."""
    extraction, start = plan(), threading.Thread.start

    def start_all_but_the_last(thread):
        if thread.name == f"featcache-{extraction.device.workers - 1}":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_all_but_the_last)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            run_extraction(extraction, run_locally)
        assert_nothing_is_held(scratch)
    assert_all_is_done(plan())
