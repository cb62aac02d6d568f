"""Damage that reading meets: what a cache says of it; files truncated where they are, and
sectors that cannot be read.

What could end in a signal runs in a process of its own, which the kernel would end by
SIGBUS if what it reads were mapped."""

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from cache_contents import items
from click.testing import CliRunner
from damage import CHUNKS, flip, mend, refusing, victim
from forking import run_forked
from local_copies import chunk, copies_in, mapped, settled
from make_cache import in_three_shards, make_features, make_version

import featcache
from featcache.cli import main
from featcache.errors import DamagedError, StoreError
from featcache.loader.shards import Shards
from featcache.spec import Track
from featcache.stats import moments


def three_shards(folder, **options):
    """A version whose features are long enough for a page of their own."""
    return make_version(folder, *in_three_shards(make_features(20, max_frames=400)), **options)


@pytest.fixture
def version(tmp_path):
    return three_shards(tmp_path / "c", side=(Track("scales", (), "float32", ""),))


def features_of(version):
    """The file of features of the third shard."""
    return chunk(version, featcache.open(version.path).index.shards[2])


def messages_of(cache):
    """What is said of damage by each way to read utterances with `check`."""
    everything, part = range(len(cache)), {"start": 0, "duration": 0.02}
    for read in (
        lambda: [cache.item(id_, check=True) for id_ in cache.ids],
        lambda: [cache.item(id_, **part, check=True) for id_ in cache.ids],
        lambda: cache.batch(everything, check=True),
        lambda: cache.batch(everything, **part, check=True),
        lambda: [
            *featcache.DataLoader(
                featcache.FeatureDataset(cache), [everything[:10], everything[10:]]
            )
        ],
    ):
        with pytest.raises(DamagedError) as caught:
            read()
        yield str(caught.value)


@pytest.mark.parametrize("quantized", [False, True])
def test_a_file_that_is_truncated_while_it_is_open_is_damage_with_check(tmp_path, quantized):
    version = three_shards(tmp_path, quantized=quantized)

    def read():
        cache = featcache.open(tmp_path, check=True)
        cache.batch(range(len(cache)))  # all is open
        os.truncate(features_of(version), 100)
        for message in messages_of(cache):
            assert "damaged: " in message
            assert f"`featcache repair {version.path}" in message

    run_forked(read)


def test_a_copy_on_a_local_disk_that_is_truncated_is_to_be_removed(version, disk):
    def read():
        cache = settled(version.path, check=True, copy_to=disk)
        assert len(mapped(disk)) == 3
        for path in copies_in(disk).values():
            os.truncate(path, 100)
        for message in messages_of(cache):
            assert str(disk) in message
            assert message.endswith("remove this copy")

    run_forked(read)


def test_statistics_read_from_the_file(version):
    """Whole shards, without `check`: what the disk refuses is an error here too."""

    def read():
        cache = featcache.open(version.path)
        list(cache.values())
        cache._shards._file(2)  # it is open
        os.truncate(features_of(version), 100)
        for compute in (lambda: moments(cache), lambda: cache.shard_frames(2, 0, 50)):
            with pytest.raises(DamagedError, match="it ends before byte"):
                compute()

    run_forked(read)


# Bad sectors


@pytest.mark.parametrize(
    "name",
    [
        "zarr.json",
        "features/c/0/0",
        "items/c/0/0",
        "text/c/0",
        "side_scales/c/0",
        "../../zarr.json",
    ],
)
def test_a_bad_sector_is_damage_wherever_it_is(version, bad_sector, name):
    """Reading with `check`, and the commands: one line that names the file, and never a
    bare OSError."""
    path = os.path.normpath(features_of(version).parents[3] / name)
    shutil.rmtree(version.path / "index")
    bad_sector(path.__eq__, 2000 if name == "features/c/0/0" else 0)

    def read():
        cache = featcache.open(version.path, check=True)
        cache.batch(range(len(cache)))
        for id_ in cache.ids:
            cache.side("scales", id_)

    def run(command, *arguments):
        done = CliRunner().invoke(main, [command, str(version.path), *arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.output
        assert done.exit_code == 0 or (
            done.exit_code == 1 and "Input/output error" in done.output
        ), done.output
        return done.exit_code

    def read_by_all():
        with pytest.raises(DamagedError):
            read()
        assert run("verify") == 1
        assert run("stats") == (name != "side_scales/c/0")
        assert run("show", "utt-12") == 1 or name != "features/c/0/0"
        run("info")
        run("verify", "--no-data")

    run_forked(read_by_all)


def test_repair_keeps_what_is_not_on_the_bad_sector(plain, sound, scratch, bad_sector):
    """The damaged shard is read as far as it goes; what is lost is extracted again."""
    cache = Path(shutil.copytree(sound, scratch / "cache"))
    path = victim(cache).folder / CHUNKS["features"]
    bad_sector(str(path).__eq__, path.stat().st_size // 2)
    done = mend(cache, plain.manifest())
    assert len(done.removed) == 1
    assert done.kept > 0
    assert done.extracted > 0
    assert items(cache) == items(sound)


# What a cache says


class TestDamage:
    @pytest.fixture
    def version(self, tmp_path):
        return make_version(
            tmp_path, make_features(5, max_frames=9), make_features(5, prefix="new")
        )

    def test_a_flipped_bit_is_found_by_checking(self, tmp_path, version):
        shard = version.shard(featcache.open(tmp_path).index.shards[0])
        # in the first utterance's features
        flip(shard.folder / "features" / "c" / "0" / "0", 100)
        cache, checking = featcache.open(tmp_path), featcache.open(tmp_path, check=True)
        for read in (
            lambda: cache.item("utt-0", check=True),
            lambda: cache.batch([0, 1], check=True),
            lambda: checking[0],
            lambda: checking.batch(["utt-1", "utt-0"]),
            lambda: list(checking.values()),
        ):
            with pytest.raises(
                DamagedError,
                match=rf"utt-0: damaged: .*{shard.name}.*featcache repair {version.path}",
            ):
                read()
        assert (
            cache[0].shape
            == checking.item(0, check=False).shape
            == checking.batch([0], check=False)[0][0].shape
        )
        checking.batch(range(1, 10))

    @pytest.mark.parametrize("options", [{}, {"ram": "1MB"}])
    def test_the_very_bytes_that_are_given_are_checked(
        self, tmp_path, version, monkeypatch, options
    ):
        cache = featcache.open(tmp_path, check=True, **options)
        real = Shards._read_into

        # wrong, as if a copy took the place of the original just then
        def read_into(shards, out, *arguments):
            real(shards, out, *arguments)
            out += 1

        monkeypatch.setattr(Shards, "_read_into", read_into)
        with pytest.raises(DamagedError, match="utt-0: damaged"):
            cache.batch([0])

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            ("show", "features/c/0/0"),
            ("show", "text/c/0"),
            ("stats", "features/c/0/0"),
            *(
                (command, name)
                for command in ("info", "show", "stats")
                for name in ("zarr.json", "../../zarr.json")
            ),
        ],
    )
    def test_a_command_says_once_what_mends_it(self, cli, tmp_path, version, command, name):
        path = version.shard(featcache.open(tmp_path).index.shards[0]).folder / name
        shutil.rmtree(version.path / "index")  # so that it is built from what the shards say
        path.write_bytes(path.read_bytes()[:-50])
        (line,) = cli.refused(
            command, tmp_path, *(["utt-0"] if command == "show" else []), code=1
        ).splitlines()
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
        with pytest.raises(
            StoreError, match=f"{cache.index.shards[0]}/.*: cannot be read: Cannot allocate memory"
        ):
            cache[0]


def test_of_more_shards_than_may_be_open_those_opened_last_stay(tmp_path, monkeypatch):
    version = make_version(tmp_path, *({f"{number}": np.zeros((2, 2))} for number in range(5)))
    monkeypatch.setattr("featcache.loader.shards._FILES_OPEN", 3)
    cache, opened = featcache.open(version.path, check=True), []
    real = Shards._open_file
    monkeypatch.setattr(
        Shards, "_open_file", lambda self, number: opened.append(number) or real(self, number)
    )
    for position in (0, 1, 2, 3, 4, 3, 4, 2, 4, 0):
        cache[position]
    assert opened == [0, 1, 2, 3, 4, 0]
