"""Versions on a slow disk, copies of them on a local one, and what this process has
mapped of both."""

import os
import re
import signal
import threading
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from forking import fork, join, wait_for_word, wait_until
from make_cache import make_features
from processes import MOST_SECONDS

import featcache
from featcache.errors import FeatcacheWarning
from featcache.format.shard import Shard
from featcache.loader import places

SHARDS = 4


def shards(seed=0, count=SHARDS):
    return [make_features(6, prefix=f"shard{n}", seed=seed + n) for n in range(count)]


def chunk(version, name):
    return version.shard(name).folder / "features" / "c" / "0" / "0"


def copies_in(disk):
    return {path.name: path for path in disk.glob("featcache/*/????????????????")}


def held(disk):
    """The bytes of all copies."""
    found = 0
    for path in copies_in(disk).values():
        with suppress(FileNotFoundError):  # it has made room just now
            found += path.stat().st_size
    return found


def sizes(cache):
    """The bytes that a copy of each shard takes, the smallest first."""
    return sorted(path.stat().st_size for path in cache.glob("*/shards/*/features/c/0/0"))


def assert_copies_are_whole(version, disk):
    """Whatever there is of a version's copies is what the original is."""
    for name, path in copies_in(disk).items():
        assert path.read_bytes() == chunk(version, name).read_bytes()


def parts_in(disk):
    return list(disk.glob("featcache/*/*.part"))


def mapped(folder):
    """The files of features below a folder that this process has mapped, or copies of
    them."""
    lines = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    paths = {line[5] for line in lines if line[5:] and line[5].startswith(f"{folder}/")}
    return {path for path in paths if "/items/c/" not in path and "/text/c/" not in path}


def copying_threads():
    return [thread for thread in threading.enumerate() if thread.name == "featcache-copies"]


def wait_until_idle():
    """Wait until nothing more is copied in this process, and the thread that did so is
    gone."""
    wait_until(lambda: not copying_threads())


def settle(cache):
    """Read all of a cache, wait until nothing more is copied, and read the copies from
    now on."""
    for row in range(len(cache)):
        cache[row]
    wait_until(lambda: not cache._shards.is_at_work)
    wait_until_idle()
    if not cache._shards._warnings:  # of which the next read warns
        cache[0]


def settled(folder, **options):
    """A cache that has been opened so, all of whose copies have been made and are read."""
    cache = featcache.open(folder, **options)
    settle(cache)
    return cache


def disk_of(folder, limit=None, is_remote=False, is_memory=False):
    """The place in a folder for the copies of a version that is nowhere."""
    return places.Place(version_nowhere(folder, is_remote), folder, limit, is_memory)


def version_nowhere(path, is_remote=True):
    """A version in an object store, whose copies may make room while they are in use; or
    in a folder."""
    path = f"memory://{path}" if is_remote else path
    return SimpleNamespace(path=path, info=SimpleNamespace(folder_name="fbank80-0123456789ab"))


def paused(monkeypatch):
    """Have copies wait, once begun, until they are told to go on: the two events."""
    begun, go, blocks = threading.Event(), threading.Event(), Shard.feature_blocks

    def waiting(shard, *copy):
        begun.set()
        go.wait(MOST_SECONDS)
        return blocks(shard, *copy)

    monkeypatch.setattr(Shard, "feature_blocks", waiting)
    return begun, go


@contextmanager
def in_another_process(use, word=b"."):
    """A process that keeps what `use` returns, once this has written the word into the
    pipe that it is given, and that is killed at the end of the block."""
    read_end, write_end = os.pipe()

    def child():
        kept = use(write_end)
        signal.pause()
        del kept

    pid = fork(child)
    try:
        wait_for_word(read_end, word)
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        assert join(pid) == -signal.SIGKILL
        os.close(read_end)
        os.close(write_end)


def read_with_one_warning(cache, expected, match):
    """Have all be copied and read: it is what was expected, and the user is told once, in
    one line."""
    with told() as messages:
        settle(cache)
        for _ in range(3):
            assert read_all(cache, expected)
    (message,) = messages
    assert "\n" not in message
    assert re.search(match, message)


@contextmanager
def told():
    """Fills a list with what the user is warned of, each time it happens; others'
    warnings are none of its business."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        messages = []
        yield messages
    messages += [str(warning.message) for warning in caught if warning.category is FeatcacheWarning]


def read_all(cache, expected):
    return all(map(np.array_equal, cache.values(), expected))
