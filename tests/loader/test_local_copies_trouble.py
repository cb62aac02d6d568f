"""Whatever happens to copies of shards, what is read is right, and the user is told once."""

import errno
import fcntl
import os
import shutil

import pytest
from damage import flip
from local_copies import SHARDS, chunk, copies_in, mapped, parts_in, read_all, settle, settle_two, told

import featcache
from featcache.errors import DamagedError
from featcache.format.shard import Shard
from featcache.loader import places
from featcache.storage import directory


class TestTrouble:
    """Whatever happens to copies: what is read is right, and the user is told once."""

    def read_with_one_warning(self, folder, disk, match, **options):
        expected = [array.copy() for array in featcache.open(folder).values()]
        cache = featcache.open(folder, copy_to=disk, **options)
        with told() as messages:
            settle(cache)
            for _ in range(3):
                assert read_all(cache, expected)
        (message,) = messages
        assert "\n" not in message
        assert match in message
        assert not parts_in(disk)
        return cache

    def test_an_original_that_is_damaged_is_not_copied(self, slow_folder, version, disk):
        spoilt = version.shard_names()[1:3]
        for name in spoilt:
            flip(chunk(version, name), 100)
        self.read_with_one_warning(slow_folder, disk, "damaged: its checksum does not match; it is not copied")
        assert not {*copies_in(disk)} & set(spoilt)
        assert len(copies_in(disk)) == SHARDS - 2

    def test_an_original_that_cannot_be_read_is_not_copied(self, slow_folder, version, disk, monkeypatch):
        preadv = os.preadv

        def bad_sectors(descriptor, *arguments):
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/features/c/0/0"):
                raise OSError(errno.EIO, "Input/output error")
            return preadv(descriptor, *arguments)

        expected = [array.copy() for array in featcache.open(slow_folder).values()]
        cache = featcache.open(slow_folder, copy_to=disk)
        monkeypatch.setattr(directory.os, "preadv", bad_sectors)
        with told() as messages:
            settle(cache)
            assert read_all(cache, expected)
        (message,) = messages
        assert "cannot be read: Input/output error; it is not copied" in message
        assert not copies_in(disk)

    def test_trouble_that_nobody_thought_of(self, slow_folder, version, disk, monkeypatch):
        def blocks(*_):
            yield memoryview(b"")
            raise MemoryError("no room for a block")

        with monkeypatch.context() as patched:
            patched.setattr(Shard, "feature_blocks", blocks)
            self.read_with_one_warning(slow_folder, disk, "MemoryError: no room for a block: no more shards are copied")
        settle(featcache.open(slow_folder, copy_to=disk))  # by another cache, in the same process
        assert len(copies_in(disk)) == SHARDS

    @pytest.mark.parametrize("call", ["posix_fallocate", "write", "fsync"])
    def test_a_full_disk(self, slow_folder, version, disk, monkeypatch, call):
        settle_two(slow_folder, disk)
        before = copies_in(disk)
        real = getattr(os, call)

        def full(descriptor, *arguments):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(disk)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, *arguments)

        monkeypatch.setattr(places.os, call, full)
        cache = self.read_with_one_warning(slow_folder, disk, "No space left on device: no more shards are copied")
        assert copies_in(disk) == before
        assert mapped(disk) == set(map(str, before.values()))  # what is there is used
        assert len(cache) == 6 * SHARDS

    def test_a_disk_with_less_room_than_the_limit(self, slow_folder, version, disk, monkeypatch):
        real = os.statvfs

        def statvfs(path):
            found = real(path)
            return os.statvfs_result((*found[:4], 0, *found[5:]))

        monkeypatch.setattr(places.os, "statvfs", statvfs)
        self.read_with_one_warning(slow_folder, disk, "No space left on device", copy_limit="1TB")
        assert not copies_in(disk)

    def test_a_place_that_is_no_folder(self, slow_folder, version, tmp_path):
        (tmp_path / "file").touch()
        self.read_with_one_warning(slow_folder, tmp_path / "file", "Not a directory: no more shards are copied")
        assert (tmp_path / "file").read_bytes() == b""

    @pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
    def test_a_folder_that_may_not_be_written(self, slow_folder, version, disk):
        disk.mkdir(mode=0o555)
        self.read_with_one_warning(slow_folder, disk, "Permission denied")
        assert not list(disk.iterdir())

    def test_a_file_system_without_locks(self, slow_folder, version, disk, monkeypatch):
        def flock(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
        self.read_with_one_warning(slow_folder, disk, "No locks available")
        assert not copies_in(disk)

    def test_a_copy_of_another_size_is_made_again(self, slow_folder, version, disk):
        settle(featcache.open(slow_folder, copy_to=disk))
        name, path = next(iter(copies_in(disk).items()))
        path.write_bytes(b"x")
        cache = featcache.open(slow_folder, copy_to=disk)
        settle(cache)
        assert path.read_bytes() == chunk(version, name).read_bytes()
        assert read_all(cache, featcache.open(slow_folder).values())

    def test_a_copy_that_went_bad_is_found_by_checking(self, slow_folder, version, disk):
        settle(featcache.open(slow_folder, copy_to=disk))
        path = copies_in(disk)[next(name for name in copies_in(disk))]
        flip(path, 0)
        cache = featcache.open(slow_folder, copy_to=disk)
        settle(cache)
        with pytest.raises(DamagedError, match=f"features in {path} are not what was written; remove this copy"):
            cache.batch(range(len(cache)), check=True)

    def test_the_folder_may_go_at_any_time(self, slow_folder, version, disk):
        expected = [array.copy() for array in featcache.open(slow_folder).values()]
        cache = featcache.open(slow_folder, copy_to=disk)
        settle(cache)
        shutil.rmtree(disk)
        assert read_all(cache, expected)

    def test_links_in_the_folder_of_copies_are_not_followed(self, slow_folder, version, disk, tmp_path):
        """Neither to write a copy, nor to make room for one: what they lead to is not featcache's."""
        settle(featcache.open(slow_folder, copy_to=disk))
        (home,) = disk.glob("featcache/*-*")
        victim = tmp_path / "victim"
        victim.mkdir()
        for name in (*copies_in(disk), "0123456789ab-00c0ffee", "0123456789ab-11c0ffee.part"):
            (victim / name).write_bytes(b"the only copy")
        before = {path: path.read_bytes() for path in victim.iterdir()}
        shutil.rmtree(home)
        home.symlink_to(victim)
        (disk / "featcache" / "another-0123456789ab.00c0ffee").symlink_to(victim)
        expected = [array.copy() for array in featcache.open(slow_folder).values()]
        cache = featcache.open(slow_folder, copy_to=disk, copy_limit=20_000)
        with told() as messages:
            settle(cache)
            assert read_all(cache, expected)
        (message,) = messages
        assert f"{home}: Too many levels of symbolic links: no more shards are copied" in message
        assert {path: path.read_bytes() for path in victim.iterdir()} == before
