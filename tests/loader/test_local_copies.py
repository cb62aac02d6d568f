"""Copies of shards on a local disk: made while originals are read, by one process or
several, within a limit."""

import errno
import fcntl
import gc
import os
import pickle
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from damage import flip, refusing
from forking import fork, join, run_forked, wait_until
from local_copies import (
    SHARDS,
    assert_copies_are_whole,
    chunk,
    copies_in,
    copying_threads,
    disk_of,
    held,
    in_another_process,
    mapped,
    parts_in,
    paused,
    read_all,
    read_with_one_warning,
    settle,
    settled,
    shards,
    sizes,
    wait_until_idle,
)
from make_cache import make_version
from processes import MOST_SECONDS, open_files

import featcache
from featcache.errors import DamagedError
from featcache.format.shard import Shard
from featcache.loader import local_copies, places
from featcache.loader.local_copies import ObjectShards
from featcache.loader.places import CopyRefused
from featcache.storage import directory, files

NAME = "0123456789abcdef"


class TestCopying:
    def test_what_is_read_is_copied_and_read_from_the_copy_once_it_is_whole(
        self, slow_folder, version, expected, disk
    ):
        cache = featcache.open(slow_folder, copy_to=disk)
        assert not disk.exists()  # nothing is copied before it is asked for
        assert read_all(cache, expected)
        settle(cache)
        there = copies_in(disk)
        assert sorted(there) == version.shard_names()
        assert_copies_are_whole(version, disk)
        assert mapped(disk) == set(map(str, there.values()))
        assert mapped(slow_folder) == set()
        assert read_all(cache, expected)
        batch, lengths = cache.batch(range(len(cache)), check=True)
        assert all(
            np.array_equal(row[:n], array)
            for row, n, array in zip(batch, lengths, expected, strict=True)
        )

    def test_only_the_shards_that_are_read_are_copied(self, slow_folder, disk):
        cache = featcache.open(slow_folder, copy_to=disk)
        cache.batch([0, 1])
        wait_until(lambda: copies_in(disk))
        wait_until_idle()
        assert {*copies_in(disk)} == {cache.index.shards[0]}

    def test_the_thread_ends_when_nothing_is_to_be_done_and_no_descriptor_is_left(
        self, slow_folder, disk
    ):
        for _ in range(3):
            cache = settled(slow_folder, copy_to=disk)
        assert copying_threads() == []
        del cache
        gc.collect()
        assert open_files(slow_folder) == open_files(disk) == []

    def test_copies_that_are_there_are_used(self, slow_folder, version, disk):
        settled(slow_folder, copy_to=disk)
        inodes = {path.stat().st_ino for path in copies_in(disk).values()}
        for name in version.shard_names():  # an original that nobody looks into any more
            data = bytearray(chunk(version, name).read_bytes())
            data[:-4] = bytes(len(data) - 4)
            chunk(version, name).write_bytes(data)
        cache = settled(slow_folder, copy_to=disk)
        assert {path.stat().st_ino for path in copies_in(disk).values()} == inodes
        assert all(array.any() for array in cache.values())

    def test_caches_that_differ_in_nothing_but_their_values_do_not_mix(self, tmp_path, disk):
        features = shards()
        others = [{name: array + 1 for name, array in features[0].items()}, *features[1:]]
        of_folders = zip("abc", (features, features, others), strict=True)
        versions = [make_version(tmp_path / folder, *given) for folder, given in of_folders]
        assert len({version.path.name for version in versions}) == 1
        assert versions[0].shard_names() == versions[1].shard_names()
        caches = [settled(version.path, copy_to=disk) for version in versions]
        assert len(copies_in(disk)) == SHARDS + 1
        for cache in caches:
            assert read_all(cache, featcache.open(cache.version.path).values())

    def test_several_caches_have_one_thread(self, tmp_path, disk, monkeypatch):
        begun, go = paused(monkeypatch)
        caches = []
        for number in range(3):
            version = make_version(
                tmp_path / str(number), *shards(number), params={"number": number}
            )
            caches.append(featcache.open(version.path, copy_to=disk))
            caches[-1].batch(range(len(caches[-1])))
        assert begun.wait(MOST_SECONDS)
        (thread,) = copying_threads()
        assert thread.daemon
        go.set()
        for cache in caches:
            settle(cache)
        assert len(copies_in(disk)) == 3 * SHARDS

    def test_a_cache_that_is_gone_is_not_kept_for_its_copies(self, slow_folder, disk, monkeypatch):
        begun, go = paused(monkeypatch)
        cache = featcache.open(slow_folder, copy_to=disk)
        cache.batch(range(len(cache)))
        assert begun.wait(MOST_SECONDS)
        del cache
        go.set()
        wait_until_idle()
        assert len(copies_in(disk)) == 1

    @pytest.mark.parametrize(
        "sent", [lambda cache: cache, lambda cache: pickle.loads(pickle.dumps(cache))]
    )
    def test_relative_folders_stay_where_they_were(
        self, slow_folder, expected, monkeypatch, tmp_path, sent
    ):
        monkeypatch.chdir(tmp_path)
        cache = featcache.open(slow_folder.relative_to(tmp_path), copy_to="copies")
        monkeypatch.chdir("/")
        settle(cache := sent(cache))
        assert read_all(cache, expected)
        assert len(copies_in(tmp_path / "copies")) == SHARDS


class TestFolder:
    def test_a_part_belongs_to_one_and_is_data_to_nobody(self, disk):
        own, other = disk_of(disk, 1000), disk_of(disk, 1000)

        def blocks():
            assert other.make(NAME, 10, list) is CopyRefused.UNDER_WAY
            assert other.find(NAME, 10) is None
            yield memoryview(b"0123456789")

        assert own.make(NAME, 10, blocks) is None
        assert other.make(NAME, 10, list) is CopyRefused.UNDER_WAY  # just made
        assert other.find(NAME, 10).data.tobytes() == b"0123456789"
        assert other.find(NAME, 9) is None

    def test_a_part_that_is_given_up_while_another_process_looks_at_it(self, disk, monkeypatch):
        own, other = disk_of(disk, 1000), disk_of(disk, 1000)

        def is_held(path):
            if path.suffix == ".part":
                path.unlink()
            return files.is_held(path)

        def blocks():
            monkeypatch.setattr(places, "is_held", is_held)
            assert other.make(NAME[::-1], 10, lambda: [memoryview(bytes(10))]) is None
            raise OSError("given up")

        with pytest.raises(OSError, match="given up"):
            own.make(NAME, 10, blocks)


class TestLimit:
    def test_copying_stops_at_the_limit_and_nothing_in_use_goes(self, slow_folder, expected, disk):
        limit = sum(sizes(slow_folder)) - 1
        cache = settled(slow_folder, copy_to=disk, copy_limit=limit)
        there = copies_in(disk)
        assert 0 < len(there) < SHARDS
        assert held(disk) <= limit
        settled(slow_folder, copy_to=disk, copy_limit=limit)
        assert copies_in(disk) == there
        assert mapped(disk) == set(map(str, there.values()))
        assert read_all(cache, expected)

    def test_what_nobody_uses_goes_first_the_least_recently_used_before_the_others(
        self, slow_folder, other, disk
    ):
        settled(slow_folder, copy_to=disk)
        by_age = list(copies_in(disk).values())
        for age, path in enumerate(reversed(by_age)):
            os.utime(path, (1000 - age, 1000 - age))
        limit = held(disk)
        settled(other.path, copy_to=disk, copy_limit=limit)
        assert held(disk) <= limit
        assert other.shard_names()[0] in copies_in(disk)
        gone = [not path.exists() for path in reversed(by_age)]
        assert any(gone)
        assert gone == sorted(gone)  # the oldest ones, and no more of them than needed
        assert held(disk) + max(sizes(slow_folder)) > limit

    @pytest.mark.filterwarnings("ignore:.*has no room for a shard")
    def test_a_lower_limit_than_before_holds_at_once(self, slow_folder, disk):
        settled(slow_folder, copy_to=disk)
        limit = sum(sizes(slow_folder)[:2])
        settled(slow_folder, copy_to=disk, copy_limit=limit)
        assert 0 < held(disk) <= limit

    def test_reading_a_copy_makes_it_the_last_to_go(self, slow_folder, disk):
        settled(slow_folder, copy_to=disk)
        for path in copies_in(disk).values():
            os.utime(path, (1000, 1000))
        cache = featcache.open(slow_folder, copy_to=disk)
        cache[0]
        first = copies_in(disk)[cache.index.shards[0]]
        wait_until(lambda: first.stat().st_mtime > 1000)
        wait_until_idle()
        assert sum(path.stat().st_mtime > 1000 for path in copies_in(disk).values()) == 1

    def test_what_another_process_uses_stays(self, slow_folder, other, disk):
        settled(slow_folder, copy_to=disk)
        before = copies_in(disk)

        def use(is_open):
            cache = featcache.open(slow_folder, copy_to=disk)
            cache[0]
            wait_until_idle()
            os.write(is_open, b".")
            return cache

        with in_another_process(use):
            settled(other.path, copy_to=disk, copy_limit=held(disk))
            assert copies_in(disk) == before
        settled(other.path, copy_to=disk, copy_limit=held(disk))
        assert other.shard_names()[0] in copies_in(disk)

    def test_other_files_in_the_folder_are_left_alone_and_do_not_count(
        self, slow_folder, version, disk
    ):
        files = [
            disk / "mine",
            disk / "featcache" / "mine",
            disk / "featcache" / version.path.name / "mine",
        ]
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(10**6))
        (disk / "featcache" / "folder").mkdir()
        settled(slow_folder, copy_to=disk, copy_limit=sum(sizes(slow_folder)))
        assert len(copies_in(disk)) == SHARDS
        assert all(file.stat().st_size == 10**6 for file in files)

    def test_without_a_limit_a_tenth_of_the_disk_stays_free(self, slow_folder, disk, monkeypatch):
        def statvfs(path):
            size = max(sizes(slow_folder)) + 4
            blocks = 100 * size
            free = (
                11 * size
                + 2 * size
                - held(disk)
                - sum(path.stat().st_size for path in parts_in(disk))
            )
            return os.statvfs_result((1, 1, blocks, free, free, 0, 0, 0, 0, 255))

        monkeypatch.setattr(places.os, "statvfs", statvfs)
        settled(slow_folder, copy_to=disk)
        assert 2 <= len(copies_in(disk)) <= SHARDS
        assert held(disk) <= 3 * (max(sizes(slow_folder)) + 4)


def test_threads_that_copy_different_shards_do_not_meet(tmp_path, request):
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-5)
    shard = SimpleNamespace(feature_blocks=lambda copy: [memoryview(bytes(4096))])
    version = SimpleNamespace(path="memory://b/v", shard=lambda name: shard)
    chunk = SimpleNamespace(num_bytes=4092, dtype=np.dtype(np.uint8), shape=(4092,))
    index = SimpleNamespace(shards=[f"{number:016x}" for number in range(80)])
    shards = ObjectShards(version, index, False, [disk_of(tmp_path)])
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: shards._copy_of(number, chunk), range(80)))
    assert len({copy.path for copy in found}) == 80


# Trouble: whatever happens, what is read is right, and the user is told once


@pytest.fixture
def read(slow_folder, disk):
    """Reads all while it is copied, of which the user is told; gives the cache."""

    def read(match, copy_to=disk, **options):
        expected = [array.copy() for array in featcache.open(slow_folder).values()]
        cache = featcache.open(slow_folder, copy_to=copy_to, **options)
        read_with_one_warning(cache, expected, match)
        assert not parts_in(disk)
        return cache

    return read


def test_an_original_that_is_damaged_is_not_copied(read, version, disk):
    spoilt = version.shard_names()[1:3]
    for name in spoilt:
        flip(chunk(version, name), 100)
    read("damaged: its checksum does not match; it is not copied")
    assert {*copies_in(disk)} == {*version.shard_names()} - {*spoilt}


def test_an_original_that_cannot_be_read_is_not_copied(read, disk, bad_sector):
    bad_sector(lambda path: path.endswith("/features/c/0/0"))
    read("cannot be read: Input/output error; it is not copied")
    assert not copies_in(disk)


def test_trouble_that_nobody_thought_of(read, slow_folder, disk, monkeypatch):
    def blocks(*_):
        yield memoryview(b"")
        raise MemoryError("no room for a block")

    with monkeypatch.context() as patched:
        patched.setattr(Shard, "feature_blocks", blocks)
        read("MemoryError: no room for a block: no more shards are copied")
    settled(slow_folder, copy_to=disk)  # by another cache, in the same process
    assert len(copies_in(disk)) == SHARDS


@pytest.mark.parametrize("call", ["posix_fallocate", "write", "fsync"])
def test_a_full_disk(read, slow_folder, disk, monkeypatch, call):
    cache = featcache.open(slow_folder, copy_to=disk)
    cache.batch([0, 7])
    wait_until(lambda: len(copies_in(disk)) == 2)
    wait_until_idle()
    before = copies_in(disk)
    real = getattr(os, call)

    def full(descriptor, *arguments):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(disk)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *arguments)

    monkeypatch.setattr(places.os, call, full)
    cache = read("No space left on device: no more shards are copied")
    assert copies_in(disk) == before
    assert mapped(disk) == set(map(str, before.values()))  # what is there is used
    assert len(cache) == 6 * SHARDS


def test_too_little_room_for_a_shard(read, disk, monkeypatch):
    """Within the limit, or on the disk."""
    read("no room for a shard of .* bytes .* unless copy_limit is raised", copy_limit=10)
    real = os.statvfs

    def statvfs(path):
        found = real(path)
        return os.statvfs_result((*found[:4], 0, *found[5:]))

    monkeypatch.setattr(places.os, "statvfs", statvfs)
    read("No space left on device", copy_limit="1TB")
    assert not copies_in(disk)


def test_a_place_that_is_no_folder(read, tmp_path):
    (tmp_path / "file").touch()
    read("Not a directory: no more shards are copied", copy_to=tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(read, disk):
    disk.mkdir(mode=0o555)
    read("Permission denied")
    assert not list(disk.iterdir())


def test_a_file_system_without_locks(read, disk, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.ENOLCK))
    read("No locks available")
    assert not copies_in(disk)


def test_a_copy_of_another_size_is_made_again(slow_folder, version, expected, disk):
    settled(slow_folder, copy_to=disk)
    next(iter(copies_in(disk).values())).write_bytes(b"x")
    cache = settled(slow_folder, copy_to=disk)
    assert_copies_are_whole(version, disk)
    assert read_all(cache, expected)


def test_a_copy_that_went_bad_is_found_by_checking(slow_folder, disk):
    settled(slow_folder, copy_to=disk)
    path = next(iter(copies_in(disk).values()))
    flip(path, 0)
    cache = settled(slow_folder, copy_to=disk)
    with pytest.raises(
        DamagedError, match=f"features in {path} are not what was written; remove this copy"
    ):
        cache.batch(range(len(cache)), check=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda cache: cache[1],
        lambda cache: cache.item(1, check=True),
        lambda cache: cache.batch([1], check=True)[0].numpy(),
        lambda cache: featcache.stats.moments(cache).mean,
    ],
)
def test_the_folder_may_go_at_any_time(slow_folder, expected, disk, read):
    cache = settled(slow_folder, copy_to=disk)
    shutil.rmtree(disk)
    assert np.array_equal(read(cache), read(featcache.open(slow_folder)))
    assert read_all(cache, expected)


def test_links_in_the_folder_of_copies_are_not_followed(slow_folder, expected, disk, tmp_path):
    """Neither to write a copy, nor to make room for one: what they lead to is not
    featcache's."""
    settled(slow_folder, copy_to=disk)
    (home,) = disk.glob("featcache/*-*")
    victim = tmp_path / "victim"
    victim.mkdir()
    for name in (*copies_in(disk), "0123456789ab-00c0ffee", "0123456789ab-11c0ffee.part"):
        (victim / name).write_bytes(b"the only copy")
    before = {path: path.read_bytes() for path in victim.iterdir()}
    shutil.rmtree(home)
    home.symlink_to(victim)
    (disk / "featcache" / "another-0123456789ab.00c0ffee").symlink_to(victim)
    cache = featcache.open(slow_folder, copy_to=disk, copy_limit=20_000)
    read_with_one_warning(
        cache, expected, f"{home}: Too many levels of symbolic links: no more shards are copied"
    )
    assert {path: path.read_bytes() for path in victim.iterdir()} == before


# Several processes: each copy is made once, by processes killed at any instant, before
# and after a fork


INSTANTS = ["after posix_fallocate", "after write", "before fsync", "before rename", "after rename"]


def stop_at(instant, reached):
    """Have this process's copying stand still at some instant of the second shard."""
    when, _, name = instant.partition(" ")
    owner = Path if name == "rename" else os
    begun, write, make, real = [], os.write, places.Place.make, getattr(owner, name)

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

    places.Place.make = lambda *arguments: begun.append(arguments) or make(*arguments)
    setattr(owner, name, standing)


@pytest.mark.parametrize("instant", INSTANTS)
def test_killed_in_a_copy_it_leaves_nothing_taken_for_one(
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


def test_a_forked_child_copies_only_when_it_reads_and_then_what_its_parent_asked_for(
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

    run_forked(worker)
    go.set()
    settle(cache)
    assert len(copies_in(disk)) == SHARDS


def test_a_child_does_not_keep_its_dead_parents_copy_from_being_made_again(
    slow_folder, disk, tmp_path
):
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
