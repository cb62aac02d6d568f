"""Two runs on two machines whose locks are their own: each is granted every lock, as on NFS with `local_lock`."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cache_contents import items, only_version
from processes import POLL_SECONDS, TESTS

EVERY_LOCK_IS_GRANTED = """
import fcntl, os
fcntl.flock = lambda *_: None
here = list(os.uname())
here[1] = os.environ["NODE"]
result = os.uname_result(here)
os.uname = lambda: result
"""
SHARD = "0.02"
"""MB: a shard size that gives the corpus a few shards."""


@pytest.fixture(scope="module")
def start(corpus, tmp_path_factory):
    """Starts an extraction of the corpus on a machine of that name."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(EVERY_LOCK_IS_GRANTED)
    path = os.pathsep.join([str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])

    running: list[subprocess.Popen] = []

    def started(cache: Path, node: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "featcache", "extract", corpus.manifest(), "-o", cache]
        run = subprocess.Popen(
            [*map(str, command), "--threads", "1", "--shard-size", SHARD],
            env={**os.environ, "PYTHONPATH": path, "NODE": node},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(run)
        return run

    yield started
    for run in running:
        if run.poll() is None:  # after a test that failed
            run.kill()
            run.communicate()


def wait_for_work(run: subprocess.Popen, cache: Path) -> None:
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
            _, err = run.communicate()
            assert run.returncode == 0, err
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
    first.send_signal(signal.SIGKILL)
    first.communicate()
    work = only_version(cache).path / "work"
    (left,) = (path for path in work.iterdir() if path.is_dir())
    for node, stays in (("two", True), ("one", False)):
        run = start(cache, node)
        assert (run.communicate(), run.returncode)[1] == 0
        assert left.exists() == stays
