"""Copies of shards within a limit: what nobody uses goes, and nothing that somebody uses."""

import os
import re
import signal

import pytest
from forking import fork, join, wait_for_word, wait_until
from local_copies import SHARDS, chunk, copies_in, mapped, parts_in, read_all, settle, shards, told, wait_until_idle
from make_cache import make_version

import featcache
from featcache.loader import places


@pytest.fixture
def version(slow_folder):
    return make_version(slow_folder, *shards())


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
        read_end, write_end = os.pipe()

        def use():
            cache = featcache.open(old.path, copy_to=disk)
            cache[0]
            wait_until_idle()
            os.write(write_end, b".")
            signal.pause()

        user = fork(use)
        wait_for_word(read_end)
        settle(featcache.open(new.path, copy_to=disk, copy_limit=self.held(disk)))
        assert copies_in(disk) == before
        os.kill(user, signal.SIGKILL)
        assert join(user) == -signal.SIGKILL
        settle(featcache.open(new.path, copy_to=disk, copy_limit=self.held(disk)))
        assert new.shard_names()[0] in {*copies_in(disk)}
        os.close(read_end)
        os.close(write_end)

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
