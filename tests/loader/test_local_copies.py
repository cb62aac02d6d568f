"""Copies of shards on a local disk: made while the originals are read, read once they are whole, within a limit."""

import gc
import os
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from forking import wait_until
from local_copies import (
    SHARDS,
    chunk,
    copies_in,
    copying_threads,
    disk_of,
    in_another_process,
    mapped,
    parts_in,
    paused,
    read_all,
    settle,
    shards,
    told,
    wait_until_idle,
)
from make_cache import make_version
from processes import MOST_SECONDS, open_files

import featcache
from featcache.format.shard import Shard
from featcache.loader import places
from featcache.loader.local_copies import LocalCopies
from featcache.loader.places import CopyRefused
from featcache.storage import files

NAME = "0123456789abcdef"


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


class TestLimit:
    def sizes(self, version):
        return [chunk(version, name).stat().st_size for name in version.shard_names()]

    def held(self, disk):
        return sum(path.stat().st_size for path in copies_in(disk).values())

    def test_copying_stops_at_the_limit_and_nothing_in_use_goes(self, slow_folder, version, disk):
        limit = sum(self.sizes(version)) - 1
        cache = featcache.open(slow_folder, copy_to=disk, copy_limit=limit)
        settle(cache)
        there = copies_in(disk)
        assert 0 < len(there) < SHARDS
        assert self.held(disk) <= limit
        other = featcache.open(slow_folder, copy_to=disk, copy_limit=limit)
        settle(other)
        assert copies_in(disk) == there
        assert mapped(disk) == set(map(str, there.values()))
        assert read_all(cache, featcache.open(slow_folder).values())

    def test_a_limit_below_one_shard_is_told_once(self, slow_folder, version, disk):
        cache = featcache.open(slow_folder, copy_to=disk, copy_limit=10)
        with told() as messages:
            settle(cache)
            assert read_all(cache, featcache.open(slow_folder).values())
        (message,) = messages
        assert re.search(r"no room for a shard of .* bytes .* unless copy_limit is raised", message)
        assert not copies_in(disk)

    def test_what_nobody_uses_goes_first_the_least_recently_used_before_the_others(self, tmp_path, disk):
        old = make_version(tmp_path / "old", *shards(), params={"n": 1})
        new = make_version(tmp_path / "new", *shards(9, 1), params={"n": 2})
        settle(featcache.open(old.path, copy_to=disk))
        by_age = list(copies_in(disk).values())
        for age, path in enumerate(reversed(by_age)):
            os.utime(path, (1000 - age, 1000 - age))
        limit = self.held(disk)
        cache = featcache.open(new.path, copy_to=disk, copy_limit=limit)
        settle(cache)
        left = copies_in(disk)
        assert self.held(disk) <= limit
        assert new.shard_names()[0] in {*left}
        gone = [not path.exists() for path in reversed(by_age)]
        assert any(gone)
        assert gone == sorted(gone)  # the oldest ones, and no more of them than needed
        assert self.held(disk) + max(self.sizes(old)) > limit

    def test_copies_of_another_cache_of_the_same_config_go_like_any_others(self, tmp_path, disk):
        old, new = (make_version(tmp_path / name, *shards(seed)) for name, seed in (("old", 0), ("new", 9)))
        assert old.path.name == new.path.name
        settle(featcache.open(old.path, copy_to=disk))
        settle(featcache.open(new.path, copy_to=disk, copy_limit=sum(self.sizes(new))))
        assert sorted(copies_in(disk)) == new.shard_names()

    @pytest.mark.filterwarnings("ignore:.*has no room for a shard")
    def test_a_lower_limit_than_before_holds_at_once(self, slow_folder, version, disk):
        settle(featcache.open(slow_folder, copy_to=disk))
        limit = sum(self.sizes(version)[:2])
        settle(featcache.open(slow_folder, copy_to=disk, copy_limit=limit))
        assert 0 < self.held(disk) <= limit

    def test_reading_a_copy_makes_it_the_last_to_go(self, slow_folder, version, disk):
        settle(featcache.open(slow_folder, copy_to=disk))
        for path in copies_in(disk).values():
            os.utime(path, (1000, 1000))
        cache = featcache.open(slow_folder, copy_to=disk)
        cache[0]
        first = next(path for name, path in copies_in(disk).items() if name == cache.index.shards[0])
        wait_until(lambda: first.stat().st_mtime > 1000)
        wait_until_idle()
        assert sum(path.stat().st_mtime > 1000 for path in copies_in(disk).values()) == 1

    def test_what_another_process_uses_stays(self, tmp_path, disk):
        old = make_version(tmp_path / "old", *shards(), params={"n": 1})
        new = make_version(tmp_path / "new", *shards(9, 1), params={"n": 2})
        settle(featcache.open(old.path, copy_to=disk))
        before = copies_in(disk)

        def use(is_open):
            cache = featcache.open(old.path, copy_to=disk)
            cache[0]
            wait_until_idle()
            os.write(is_open, b".")
            return cache

        with in_another_process(use):
            settle(featcache.open(new.path, copy_to=disk, copy_limit=self.held(disk)))
            assert copies_in(disk) == before
        settle(featcache.open(new.path, copy_to=disk, copy_limit=self.held(disk)))
        assert new.shard_names()[0] in {*copies_in(disk)}

    def test_other_files_in_the_folder_are_left_alone_and_do_not_count(self, tmp_path, slow_folder, version, disk):
        others = [disk / "mine", disk / "featcache" / "mine", disk / "featcache" / version.path.name / "mine"]
        for other in others:
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_bytes(bytes(10**6))
        (disk / "featcache" / "folder").mkdir()
        settle(featcache.open(slow_folder, copy_to=disk, copy_limit=sum(self.sizes(version))))
        assert len(copies_in(disk)) == SHARDS
        assert all(other.stat().st_size == 10**6 for other in others)

    def test_without_a_limit_a_tenth_of_the_disk_stays_free(self, slow_folder, version, disk, monkeypatch):
        def statvfs(path):
            size = max(self.sizes(version)) + 4
            blocks = 100 * size
            free = 11 * size + 2 * size - self.held(disk) - sum(path.stat().st_size for path in parts_in(disk))
            return os.statvfs_result((1, 1, blocks, free, free, 0, 0, 0, 0, 255))

        monkeypatch.setattr(places.os, "statvfs", statvfs)
        settle(featcache.open(slow_folder, copy_to=disk))
        assert 2 <= len(copies_in(disk)) <= SHARDS
        assert self.held(disk) <= 3 * (max(self.sizes(version)) + 4)


BYTES = 4096


@pytest.fixture
def fast_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_that_copy_different_shards_do_not_meet(tmp_path, fast_switches):
    shard = SimpleNamespace(feature_blocks=lambda copy: [memoryview(bytes(BYTES))])
    version = SimpleNamespace(path="memory://b/v", shard=lambda name: shard)
    chunk = SimpleNamespace(num_bytes=BYTES - 4, dtype=np.dtype(np.uint8), shape=(BYTES - 4,))
    copies = LocalCopies(version, [f"{number:016x}" for number in range(80)], [disk_of(tmp_path)])
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: copies.features(number, chunk, 1), range(80)))
    assert len({copy.path for copy in found}) == 80
