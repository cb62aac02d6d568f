"""Two runs on two machines whose locks are their own: each is granted every lock, as on NFS with `local_lock`."""

from __future__ import annotations

import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cache_contents import items, only_version
from processes import POLL_SECONDS, Running

SHARD = "0.02"
"""MB: a shard size that gives the corpus a few shards."""


@pytest.fixture(scope="module")
def start(cli, corpus):
    """Starts an extraction of the corpus on a machine of that name."""

    def started(cache: Path, node: str) -> Running:
        command = ("extract", corpus.manifest(), "-o", cache, "--threads", "1", "--shard-size", SHARD)
        return cli.start(node, *command, entry="machines:run")

    return started


def wait_for_work(run: Running, cache: Path) -> None:
    """Until the run writes a shard."""
    while run.poll() is None:
        with suppress(OSError):  # what has a temporary name is renamed meanwhile
            if list(cache.glob("[!.]*/work/*/features/c")):
                return
        time.sleep(POLL_SECONDS)


@pytest.mark.parametrize("trials", [1, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("nodes", [("one", "two"), ("one", "one")])
def test_neither_removes_what_the_other_writes(cli, start, corpus, scratch, truth, trials, nodes):
    """Both end well, whenever the second begins, and nothing is damaged; so do two on one machine without locks."""
    draw = random.Random(0)
    for trial in range(trials):
        cache = scratch / str(trial)
        first = start(cache, nodes[0])
        if trial == 0 or draw.random() < 0.7:
            wait_for_work(first, cache)
        second = start(cache, nodes[1])
        for run in (first, second):
            ended = run.wait()
            assert ended.code == 0, ended.err
        verified = cli("verify", cache)
        assert verified.code == 0, verified.out
        assert items(cache).keys() == truth.keys()
        assert list((only_version(cache).path / "work").iterdir()) == []
        shutil.rmtree(cache)


def test_what_a_killed_run_left_on_another_machine_stays_for_a_day(start, scratch):
    """A run cannot see whether that machine's process is alive; one on the machine itself can."""
    cache = scratch / "cache"
    first = start(cache, "one")
    wait_for_work(first, cache)
    first.send(signal.SIGKILL)
    first.wait()
    work = only_version(cache).path / "work"
    (left,) = (path for path in work.iterdir() if path.is_dir())
    for node, stays in (("two", True), ("one", False)):
        assert start(cache, node).wait().code == 0
        assert left.exists() == stays
