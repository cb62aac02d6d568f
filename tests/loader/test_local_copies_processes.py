"""Copies of shards by several processes: each made once, killed at any instant, before and after a fork."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from forking import fork, forked, join, wait_until
from local_copies import (
    SHARDS,
    assert_copies_are_whole,
    copies_in,
    in_another_process,
    mapped,
    parts_in,
    paused,
    read_all,
    settle,
    settled,
    shards,
    wait_until_idle,
)
from make_cache import make_version
from processes import MOST_SECONDS

import featcache
from featcache.format.shard import Shard
from featcache.loader import local_copies, places
from featcache.storage import directory

INSTANTS = ["after posix_fallocate", "after write", "before fsync", "before rename", "after rename"]


def stop_at(instant, reached):
    """Have this process's copying stand still at some instant of the second shard."""
    when, _, name = instant.partition(" ")
    owner = Path if name == "rename" else os
    begun, write, make, real = [], os.write, places.Disk.make, getattr(owner, name)

    def stand_if_second():
        if len(begun) == 2 and threading.current_thread().name == "featcache-copies":
            write(reached, b".")
            while True:
                time.sleep(60)

    def standing(*arguments):
        if when == "before":
            stand_if_second()
        result = real(*arguments)
        stand_if_second()
        return result

    places.Disk.make = lambda *arguments: begun.append(arguments) or make(*arguments)
    setattr(owner, name, standing)


@pytest.mark.parametrize("instant", INSTANTS)
def test_killed_in_the_middle_of_a_copy_it_leaves_nothing_that_is_taken_for_one(
    slow_folder, version, expected, disk, instant, monkeypatch
):
    monkeypatch.setattr(directory, "_BLOCK_BYTES", 1000)
    whole = instant == "after rename"

    def train(reached):
        stop_at(instant, reached)
        cache = featcache.open(slow_folder, copy_to=disk)
        cache.batch(range(len(cache)))
        return cache

    with in_another_process(train):
        assert len(parts_in(disk)) == (not whole)
    assert len(parts_in(disk)) == (not whole)
    assert len(copies_in(disk)) == 1 + whole
    assert_copies_are_whole(version, disk)
    cache = settled(slow_folder, copy_to=disk)
    assert parts_in(disk) == []
    assert len(copies_in(disk)) == SHARDS
    assert read_all(cache, expected)


def test_killed_at_random_moments_again_and_again(slow_folder, version, expected, disk, monkeypatch):
    monkeypatch.setattr(directory, "_BLOCK_BYTES", 1000)
    chance = np.random.default_rng(3)

    def train():
        cache = featcache.open(slow_folder, copy_to=disk)
        while True:
            assert read_all(cache, expected)

    for number in range(12):
        before = len(copies_in(disk))
        pids = [fork(train) for _ in range(2)]
        if number % 2:  # else it may be that none ever gets to a copy
            wait_until(lambda: len(copies_in(disk)) > before)  # noqa: B023
        time.sleep(chance.uniform(0.001, 0.03))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert join(pid) == -signal.SIGKILL
        assert_copies_are_whole(version, disk)
        if len(copies_in(disk)) == SHARDS:
            shutil.rmtree(disk)
    settled(slow_folder, copy_to=disk)
    assert parts_in(disk) == []
    assert len(copies_in(disk)) == SHARDS


def test_several_at_once_copy_each_shard_once_and_all_use_it(tmp_path, disk, monkeypatch):
    version = make_version(tmp_path, *shards(count=12))
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    monkeypatch.setattr(local_copies, "_WAIT_SECONDS", 0.02)

    def train():
        rename = Path.rename

        def slow(path, target):
            time.sleep(0.01)
            rename(path, target)
            if path.suffix == ".part":
                os.write(log, f"{target.name}\n".encode())

        Path.rename = slow
        cache = featcache.open(version.path, copy_to=disk)
        for row in np.random.default_rng(os.getpid()).permutation(len(cache)).tolist():
            cache[row]
        wait_until_idle()
        cache[0]  # from now on, the copies are read
        assert len(mapped(disk)) == 12
        assert mapped(version.path) == set()
        assert read_all(cache, featcache.open(version.path).values())

    pids = [fork(train) for _ in range(4)]
    assert [join(pid) for pid in pids] == [0, 0, 0, 0]
    done = (tmp_path / "log").read_text().split()
    assert sorted(done) == sorted(copies_in(disk)) == version.shard_names()
    os.close(log)


def test_a_forked_child_copies_only_when_it_reads_and_then_what_its_parent_had_asked_for(
    slow_folder, disk, monkeypatch
):
    monkeypatch.setattr(local_copies, "_WAIT_SECONDS", 0.02)
    blocks = Shard.feature_blocks
    begun, go = paused(monkeypatch)
    cache = featcache.open(slow_folder, copy_to=disk)
    cache.batch(range(len(cache)))
    assert begun.wait(MOST_SECONDS)

    def worker():
        Shard.feature_blocks = blocks
        assert threading.active_count() == 1
        time.sleep(0.05)
        assert len(copies_in(disk)) == 0
        cache[0]
        wait_until(lambda: len(copies_in(disk)) == SHARDS - 1)  # the parent is at one of them

    with forked(worker):
        pass
    go.set()
    settle(cache)
    assert len(copies_in(disk)) == SHARDS


def test_a_child_does_not_keep_its_dead_parents_copy_from_being_made_again(slow_folder, disk, tmp_path):
    def parent(reached):
        stop_at("after write", reached)
        cache = featcache.open(slow_folder, copy_to=disk)
        cache.batch(range(len(cache)))
        wait_until(lambda: parts_in(disk) and len(copies_in(disk)) == 1)
        child = fork(signal.pause)
        (tmp_path / "child").write_text(str(child))
        os.write(reached, b"!")
        return cache

    with in_another_process(parent, b"!"):
        pass
    child = int((tmp_path / "child").read_text())
    try:
        assert len(parts_in(disk)) == 1
        settled(slow_folder, copy_to=disk)
        assert parts_in(disk) == []
        assert len(copies_in(disk)) == SHARDS
    finally:
        os.kill(child, signal.SIGKILL)
