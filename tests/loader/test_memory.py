"""Copies of shards in memory, which all processes share, before copies on a disk and the
cache."""

import errno
import gc
import os
import pickle
import threading
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from damage import refusing
from forking import run_forked
from local_copies import (
    chunk,
    copies_in,
    disk_of,
    in_another_process,
    mapped,
    parts_in,
    read_all,
    read_with_one_warning,
    settle,
    settled,
    sizes,
    told,
)

import featcache
from featcache.errors import ArgumentError
from featcache.format.shard import Shard
from featcache.loader import places
from featcache.loader.local_copies import parse_size
from featcache.loader.places import CopyRefused


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            *[("4GB", 4 * 10**9), ("4G", 4 * 10**9), ("1.5 kB", 1500), ("8 b", 8)],
            *[("512MiB", 512 << 20), ("2Gi", 2 << 30), (" 3 gib ", 3 << 30), ("2tib", 2 << 40)],
            *[("7", 7), ("1e9", 10**9), (123, 123), (4e9, 4 * 10**9), (np.int64(5), 5)],
        ],
    )
    def test_sizes(self, text, expected):
        assert parse_size("ram", text) == expected

    @pytest.mark.parametrize(
        ("value", "what"),
        [
            *(
                (value, "give a size like .4GB.")
                for value in ("", "many", "4X", "4 GB!", "-1GB", "GB", "٤GB", b"4")
            ),
            *((value, "give a size like .4GB.") for value in (True, None, np.inf, np.nan)),
            *((value, "at least one byte") for value in (0, -5, "0", "0GB", "0.1B")),
        ],
    )
    def test_what_is_no_size_is_refused_in_one_line(self, value, what):
        with pytest.raises(ArgumentError, match=f"ram is .*{what}") as caught:
            parse_size("ram", value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("options", "what"),
        [
            ({"copy_to": ""}, "copy_to is '': give a folder"),
            ({"copy_limit": "1GB"}, "copy_limit is '1GB', but nothing is copied"),
            ({"ram": "x"}, "ram is 'x'"),
            ({"ram": 1 << 60}, "more than this machine has"),
        ],
    )
    def test_what_cannot_be_is_refused_before_a_cache_is_looked_for(self, options, what):
        with pytest.raises(ArgumentError, match=what):
            featcache.open("nowhere", **options)


@pytest.fixture
def shared(scratch, monkeypatch):
    """This user's folder in memory."""
    monkeypatch.setattr(places, "_SHARED", scratch)
    return scratch / f"featcache-{os.getuid()}"


@pytest.fixture(params=["disk", "memory"])
def place(request, disk):
    """Room for 100 bytes of copies, of which idle ones go."""
    return disk_of(disk, 100, True, is_memory=request.param == "memory")


def name_of(number):
    return f"{number:016x}"


def make(place, number, size):
    name = name_of(number)
    return place.make(name, size, lambda: [memoryview(bytes([number]) * size)]) or place.find(
        name, size
    )


class TestPlaces:
    """What holds wherever copies lie."""

    def test_a_copy_is_there_whole_or_not_at_all(self, place):
        def broken():
            yield memoryview(b"0123")
            assert make(place, 2, 60) is CopyRefused.FULL
            raise OSError("no more")

        assert place.find(name_of(1), 60) is None
        with pytest.raises(OSError, match="no more"):
            place.make(name_of(1), 60, broken)
        assert place.find(name_of(1), 60) is None
        assert make(place, 1, 60).exists()  # what was begun takes no room
        assert place.find(name_of(1), 60).data.tobytes() == bytes([1]) * 60
        assert not place.find(name_of(1), 60).data.flags.writeable
        assert make(place, 2, 60) is CopyRefused.FULL

    def test_what_is_let_go_of_makes_room_unless_somebody_holds_it(self, place):
        copy = make(place, 1, 60)
        release = copy.hold()
        copy.let_go()
        assert make(place, 2, 60) is CopyRefused.FULL
        release()
        assert make(place, 2, 60).exists()
        assert not copy.use()
        assert place.find(name_of(2), 60).use()
        assert copy.hold() is None

    def test_what_is_touched_again_stays(self, place):
        one, two = make(place, 1, 40), make(place, 2, 40)
        one.let_go()
        two.let_go()
        one.use()
        assert make(place, 3, 60).exists()
        assert place.find(name_of(2), 40) is None
        assert place.find(name_of(1), 40) is not None

    def test_a_disk_that_takes_no_marks_any_more_is_read_all_the_same(self, place, monkeypatch):
        copy = make(place, 1, 60)
        monkeypatch.setattr(os, "utime", refusing(errno.EROFS))
        copy.let_go()
        assert copy.use()

    def test_what_is_read_is_counted_until_it_is_the_whole(self, place):
        copy = make(place, 1, 60)
        copy.let_go = Mock()
        assert [copy.count(4, 10) or copy.let_go.call_count for _ in range(5)] == [0, 0, 1, 1, 1]

    def test_memory_that_is_given_back_under_the_lock_waits_for_nothing(
        self, tmp_path, monkeypatch
    ):
        """The garbage collector may find a place while another one makes room."""
        ended, going_on = disk_of(tmp_path / "a", is_memory=True), disk_of(tmp_path, is_memory=True)
        ended._root, ended._home = going_on._root, going_on._root / "mfcc13-0123456789ab.01234567"
        ended._open()
        places_of, home = [ended], ended._home
        del ended
        survey = places._survey

        def collect_and_survey(folder):
            places_of.clear()
            gc.collect()
            return survey(folder)

        monkeypatch.setattr(places, "_survey", collect_and_survey)
        opening = threading.Thread(target=going_on._open, daemon=True)
        opening.start()
        opening.join(20)
        assert not opening.is_alive()
        assert not home.exists()


class TestCache:
    @pytest.mark.parametrize("check", [False, True])
    def test_all_is_read_from_memory(self, slow_folder, version, expected, shared, check):
        cache = settled(slow_folder, ram="1GB", check=check)
        assert mapped(slow_folder) == set()
        for name in version.shard_names():  # nobody looks there any more
            chunk(version, name).write_bytes(b"")
        assert read_all(cache, expected)
        assert not cache[0].flags.writeable
        batch, lengths = cache.batch(range(len(cache)))
        rows = (row[:length] for row, length in zip(batch, lengths.tolist(), strict=True))
        assert all(map(np.array_equal, rows, expected))
        assert np.array_equal(cache.shard_frames(0, 0, 3), expected[0][:3])

    def test_processes_share_it_and_give_it_back(self, slow_folder, shared):
        cache = settled(slow_folder, ram="1GB")
        inodes = {path.stat().st_ino for path in copies_in(shared).values()}
        other = pickle.loads(pickle.dumps(cache))
        assert [place.limit for place in other._shards.places] == [10**9]
        settle(other)
        assert {path.stat().st_ino for path in copies_in(shared).values()} == inodes
        assert read_all(other, cache.values())
        del cache
        gc.collect()
        assert len(copies_in(shared)) == 4  # the other one reads them
        del other
        gc.collect()
        assert list(shared.glob("featcache/*-*")) == []

    def test_what_a_killed_process_has_left_is_given_back_by_the_next_one(
        self, slow_folder, other, shared
    ):
        def train(has_copied):
            cache = settled(slow_folder, ram="1GB")
            os.write(has_copied, b".")
            return cache

        with in_another_process(train):
            pass
        assert len(copies_in(shared)) == 4
        cache = settled(other.path, ram="1GB")
        assert {*copies_in(shared)} == set(other.shard_names())
        del cache

    def test_memory_comes_first_then_the_disk_then_the_cache(
        self, slow_folder, expected, shared, disk, monkeypatch
    ):
        ram = sum(sizes(slow_folder)) - 1
        cache = featcache.open(slow_folder, ram=ram, copy_to=disk)
        with told() as messages:
            settle(cache)
        assert messages == []
        in_memory = copies_in(shared)
        assert 0 < len(in_memory) < 4 == len(copies_in(disk))
        on_disk = {str(path) for name, path in copies_in(disk).items() if name not in in_memory}
        assert mapped(disk) == on_disk
        assert mapped(shared) == {str(path) for path in in_memory.values()}
        del cache
        gc.collect()
        sources, blocks = [], Shard.feature_blocks
        monkeypatch.setattr(
            Shard,
            "feature_blocks",
            lambda shard, *copy: sources.append(*copy) or blocks(shard, *copy),
        )
        cache = settled(slow_folder, ram=ram, copy_to=disk)
        assert {path.parents[2] for path in sources} == {disk}  # from which memory is filled
        assert read_all(cache, expected)
        assert parts_in(disk) == parts_in(shared) == []

    def test_memory_that_somebody_else_may_write_is_refused(self, slow_folder, shared):
        shared.mkdir()
        shared.chmod(0o777)
        with pytest.raises(ArgumentError, match=r"ram: .* is not this user's alone: remove it"):
            featcache.open(slow_folder, ram="1GB")
        assert list(shared.iterdir()) == []

    def test_a_container_with_too_little_memory_for_files_is_told(
        self, slow_folder, shared, monkeypatch
    ):
        monkeypatch.setattr(places.os, "statvfs", lambda _: Mock(f_blocks=16, f_frsize=4096))
        message = (
            "ram is 100,000,000 bytes, but .* has 65,536: give less, or copy_to=; .*--shm-size"
        )
        with pytest.raises(ArgumentError, match=message):
            featcache.open(slow_folder, ram="100MB")

    def test_without_memory_for_files_another_place_is_named(self, slow_folder, monkeypatch):
        monkeypatch.setattr(places, "_SHARED", Path("/nowhere"))
        with pytest.raises(ArgumentError, match=r"ram: /nowhere/.*: No such file.*give copy_to="):
            featcache.open(slow_folder, ram="1GB")

    def test_a_forked_child_reads_what_its_parent_has_copied(self, slow_folder, expected, shared):
        cache = featcache.open(slow_folder, ram="1GB")
        cache.batch([0, 7])

        def read():
            settle(cache)
            assert read_all(cache, expected)

        run_forked(read)
        read()

    def test_too_little_for_a_shard_is_told(self, slow_folder, expected, shared):
        cache = featcache.open(slow_folder, ram=600)
        read_with_one_warning(
            cache, expected, "memory: has no room for a shard .* unless ram is raised$"
        )
