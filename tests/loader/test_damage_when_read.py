"""What a cache says of damage that reading meets."""

import errno
import shutil
from pathlib import Path

import pytest
from damage import flip, refusing
from make_cache import make_features, make_version

import featcache
from featcache.errors import DamagedError, StoreError
from featcache.loader.shards import Shards


class TestDamage:
    @pytest.fixture
    def version(self, tmp_path):
        return make_version(tmp_path, make_features(5, max_frames=9), make_features(5, prefix="new"))

    def test_a_flipped_bit_is_found_by_checking(self, tmp_path, version):
        shard = version.shard(featcache.open(tmp_path).index.shards[0])
        flip(shard.folder / "features" / "c" / "0" / "0", 100)  # in the first utterance's features
        cache, checking = featcache.open(tmp_path), featcache.open(tmp_path, check=True)
        for read in (
            lambda: cache.item("utt-0", check=True),
            lambda: cache.batch([0, 1], check=True),
            lambda: checking[0],
            lambda: checking.batch(["utt-1", "utt-0"]),
            lambda: list(checking.values()),
        ):
            with pytest.raises(DamagedError, match=rf"utt-0: damaged: .*{shard.name}.*featcache repair {version.path}"):
                read()
        assert cache[0].shape == checking.item(0, check=False).shape == checking.batch([0], check=False)[0][0].shape
        checking.batch(range(1, 10))

    @pytest.mark.parametrize("options", [{}, {"ram": "1MB"}])
    def test_the_very_bytes_that_are_given_are_checked(self, tmp_path, version, monkeypatch, options):
        cache = featcache.open(tmp_path, check=True, **options)
        real = Shards._read_into

        def read_into(shards, out, *arguments):  # wrong, as if a copy took the place of the original just then
            real(shards, out, *arguments)
            out += 1

        monkeypatch.setattr(Shards, "_read_into", read_into)
        with pytest.raises(DamagedError, match="utt-0: damaged"):
            cache.batch([0])

    @pytest.mark.parametrize("name", ["features/c/0/0", "items/c/0/0"])
    @pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-5])])
    def test_a_damaged_shard_names_the_remedy(self, tmp_path, version, name, harm):
        cache = featcache.open(tmp_path)
        harm(version.shard(cache.index.shards[0]).folder / name)
        with pytest.raises(DamagedError, match=r"damaged.*featcache repair"):
            cache.item(0, check=True)
        assert len(cache[7])

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            ("show", "features/c/0/0"),
            ("show", "text/c/0"),
            ("stats", "features/c/0/0"),
            *((command, name) for command in ("info", "show", "stats") for name in ("zarr.json", "../../zarr.json")),
        ],
    )
    def test_a_command_says_once_what_mends_it(self, cli, tmp_path, version, command, name):
        path = version.shard(featcache.open(tmp_path).index.shards[0]).folder / name
        shutil.rmtree(version.path / "index")  # so that it is built from what the shards say
        path.write_bytes(path.read_bytes()[:-50])
        told = cli(command, tmp_path, *(["utt-0"] if command == "show" else []))
        assert (told.code, told.out) == (1, "")
        (line,) = told.err.splitlines()
        assert line.count("featcache repair") == 1
        assert line.endswith(f"; `featcache repair {version.path} --manifest MANIFEST` repairs it")

    def test_a_shard_that_ends_before_an_item_is_damage(self, tmp_path, version):
        cache = featcache.open(tmp_path)
        cache.index.first_frame = cache.index.first_frame + 1000  # as a forged index has it
        with pytest.raises(DamagedError, match=r"ends before frame.*featcache repair"):
            list(cache.values())

    def test_a_shard_that_cannot_be_mapped_is_a_store_error(self, tmp_path, version, monkeypatch):
        cache = featcache.open(tmp_path)
        monkeypatch.setattr("featcache.storage.directory.map_file", refusing(errno.ENOMEM))
        with pytest.raises(StoreError, match=f"{cache.index.shards[0]}/.*: cannot be read: Cannot allocate memory"):
            cache[0]
