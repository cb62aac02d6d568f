"""Copies of shards on a local disk: made while the originals are read, and read as soon as they are whole."""

import gc
import pickle
import threading

import numpy as np
import pytest
from forking import wait_until
from local_copies import (
    SHARDS,
    chunk,
    copies_in,
    copying_threads,
    disk_of,
    mapped,
    parts_in,
    paused,
    read_all,
    settle,
    shards,
    wait_until_idle,
)
from make_cache import make_version
from processes import MOST_SECONDS, open_files

import featcache
from featcache.format.shard import Shard
from featcache.loader import places
from featcache.loader.places import CopyRefused
from featcache.storage import files

NAME = "0123456789abcdef"


@pytest.fixture
def version(slow_folder):
    return make_version(slow_folder, *shards())


class TestCopying:
    def test_what_is_read_is_copied_and_read_from_the_copy_as_soon_as_it_is_whole(self, slow_folder, version, disk):
        expected = [array.copy() for array in featcache.open(slow_folder).values()]
        cache = featcache.open(slow_folder, copy_to=disk)
        assert not disk.exists()  # nothing is copied before it is asked for
        assert read_all(cache, expected)
        settle(cache)
        there = copies_in(disk)
        assert sorted(there) == version.shard_names()
        for name, path in there.items():
            original = chunk(version, name).read_bytes()
            assert path.read_bytes() == original
        assert mapped(disk) == set(map(str, there.values()))
        assert mapped(slow_folder) == set()
        assert read_all(cache, expected)
        batch, lengths = cache.batch(range(len(cache)), check=True)
        assert all(np.array_equal(row[:n], array) for row, n, array in zip(batch, lengths, expected, strict=True))

    def test_only_the_shards_that_are_read_are_copied(self, slow_folder, version, disk):
        cache = featcache.open(slow_folder, copy_to=disk)
        cache.batch([0, 1])
        wait_until(lambda: copies_in(disk))
        wait_until_idle()
        assert {*copies_in(disk)} == {cache.index.shards[0]}

    def test_the_thread_ends_when_nothing_is_to_be_done_and_no_descriptor_is_left(self, slow_folder, version, disk):
        for _ in range(3):
            cache = featcache.open(slow_folder, copy_to=disk)
            settle(cache)
        assert copying_threads() == []
        del cache
        gc.collect()
        assert open_files(slow_folder) == open_files(disk) == []

    def test_copies_that_are_there_are_used(self, slow_folder, version, disk):
        settle(featcache.open(slow_folder, copy_to=disk))
        inodes = {path.stat().st_ino for path in copies_in(disk).values()}
        for name in version.shard_names():  # an original that nobody looks into any more
            data = bytearray(chunk(version, name).read_bytes())
            data[:-4] = bytes(len(data) - 4)
            chunk(version, name).write_bytes(data)
        cache = featcache.open(slow_folder, copy_to=disk)
        settle(cache)
        assert {path.stat().st_ino for path in copies_in(disk).values()} == inodes
        assert all(array.any() for array in cache.values())

    def test_caches_that_differ_in_nothing_but_their_values_do_not_mix(self, tmp_path, disk):
        features = shards()
        others = [{name: array + 1 for name, array in features[0].items()}, *features[1:]]
        versions = [
            make_version(tmp_path / folder, *given)
            for folder, given in zip("abc", (features, features, others), strict=True)
        ]
        assert len({version.path.name for version in versions}) == 1
        assert versions[0].shard_names() == versions[1].shard_names()
        caches = [featcache.open(version.path, copy_to=disk) for version in versions]
        for cache in caches:
            settle(cache)
        assert len(copies_in(disk)) == SHARDS + 1
        for cache in caches:
            assert read_all(cache, featcache.open(cache.version.path).values())

    def test_several_caches_have_one_thread(self, tmp_path, disk, monkeypatch):
        folders = [tmp_path / str(number) for number in range(3)]
        for number, folder in enumerate(folders):
            make_version(folder, *shards(number), params={"number": number})
        threads, go, blocks = set(), threading.Event(), Shard.feature_blocks

        def watched(shard, *copy):
            threads.add(threading.current_thread())
            go.wait(MOST_SECONDS)
            return blocks(shard, *copy)

        monkeypatch.setattr(Shard, "feature_blocks", watched)
        caches = [featcache.open(folder, copy_to=disk) for folder in folders]
        for cache in caches:
            for row in range(len(cache)):
                cache[row]
        go.set()
        for cache in caches:
            settle(cache)
        assert len(threads) == 1
        assert all(thread.daemon for thread in threads)
        assert len(copies_in(disk)) == 3 * SHARDS

    def test_a_cache_that_is_gone_is_not_kept_for_its_copies(self, slow_folder, version, disk, monkeypatch):
        begun, go = paused(monkeypatch)
        cache = featcache.open(slow_folder, copy_to=disk)
        for row in range(len(cache)):
            cache[row]
        assert begun.wait(MOST_SECONDS)
        del cache
        go.set()
        wait_until_idle()
        assert len(copies_in(disk)) == 1

    def test_pickled_it_copies_there_too(self, slow_folder, version, disk):
        cache = pickle.loads(pickle.dumps(featcache.open(slow_folder, copy_to=disk)))
        settle(cache)
        assert len(copies_in(disk)) == SHARDS

    def test_relative_folders_stay_where_they_were(self, slow_folder, version, disk, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        cache = featcache.open(slow_folder, copy_to="copies")
        monkeypatch.chdir("/")
        settle(cache)
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
        assert other.find(NAME, 10).tobytes() == b"0123456789"
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

    def test_what_is_being_written_counts_and_what_was_given_up_does_not(self, disk):
        own = disk_of(disk, 100)

        def blocks():
            assert own.make(NAME[::-1], 60, list) is CopyRefused.FULL
            raise OSError("given up")

        with pytest.raises(OSError, match="given up"):
            own.make(NAME, 60, blocks)
        assert parts_in(disk) == []
        assert own.make(NAME[::-1], 60, lambda: [memoryview(bytes(60))]) is None
