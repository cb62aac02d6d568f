"""Damage to a shard: verify names it, and repair brings back what was there.
(tests/format/test_shards.py spoils each byte and file of one.)"""

import os
import random
import shutil
import threading
from itertools import product
from pathlib import Path

import pytest
from cache_contents import chunk_files, items, only_version
from damage import CHUNKS, SPOIL, assert_repaired, delete, flip, victim
from make_cache import make_features, make_version

import featcache.care.verify
from featcache.care.verify import verify
from featcache.cli.verify import _print as print_report
from featcache.errors import StoreError
from featcache.version.version import Version


def flip_some_bit(path: Path) -> None:
    flip(path, random.Random(path.name).randrange(path.stat().st_size), 3)


FILES = ("zarr.json", "features/zarr.json", *CHUNKS.values())
SPOILT = [  # most are slow: what is repaired, and how, is the same for all
    pytest.param(
        file,
        spoil,
        id=f"{file}-{spoil.__name__}",
        marks=pytest.mark.slow if number % len(SPOIL) else (),
    )
    for number, (file, spoil) in enumerate(product(FILES, [flip_some_bit, *SPOIL]))
]


@pytest.mark.parametrize(("file", "spoil"), SPOILT)
def test_a_spoilt_file_is_found_and_repaired(cli, plain, sound, cache, file, spoil):
    """One bit flipped; gone, empty, a byte too short or too long, a folder, or another
    shard's. From the shell: verify exits with 1 and names the shard; repair brings back
    its utterances, and touches no other shard."""
    shard = victim(cache)
    spoil(shard.folder / file)
    others = [
        path for path in shard.folder.parent.iterdir() if path.is_dir() and path != shard.folder
    ]
    inodes = [os.stat(folder).st_ino for folder in others]
    verified = cli("verify", cache).with_code(1)
    assert shard.name in verified.out
    assert "featcache repair" in verified.err
    assert_repaired(cli, cache, sound, plain)
    assert [os.stat(folder).st_ino for folder in others] == inodes


@pytest.mark.parametrize("file", ["text/zarr.json", CHUNKS["features"]])
def test_what_kind_of_fault_it_is_does_not_follow_from_where_the_cache_is(scratch, file):
    kinds = []
    for place in ("plain", "checksum"):
        version = make_version(scratch / place, make_features(3))
        (name,) = version.shard_names()
        delete(version.shard(name).folder / file)
        kinds.append([(problem.kind, problem.id) for problem in verify(version).problems])
    assert kinds[0] == kinds[1] != []


def test_the_quick_check_reads_no_features(cli, cache):
    """And says so. (What it finds: a damaged side array, in test_repair_kept.py.)"""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    assert "features not read" in cli("verify", cache, "--no-data").with_code(0).out


def test_a_verification_that_is_stopped_says_so(cache, capsys, monkeypatch):
    """Also beside damage that it has found; and if all shards have been looked at by then."""
    version, stop, looked_at = only_version(cache), threading.Event(), []

    def stop_after_one(*_):
        looked_at.append(None)
        stop.set()

    name = version.shard_names()[0]
    flip(version.shard(name).folder / "zarr.json", 40)
    found = verify(version, report=stop_after_one, stop=stop)
    assert found.interrupted
    assert (found.shards, found.shards_left_out, found.damaged_shards, len(looked_at)) == (
        1,
        2,
        [name],
        1,
    )
    assert not verify(version).interrupted
    print_report(found, None, "")
    assert "interrupted: the rest was not checked" in capsys.readouterr().out
    stop.clear()
    monkeypatch.setattr(featcache.care.verify, "_notes", lambda _: stop.set() or [])
    found = verify(version, stop=stop)
    assert (found.interrupted, found.shards) == (True, 3)


@pytest.mark.parametrize("kept", [True, False], ids=["index-kept", "no-index"])
def test_few_tables_stay_mapped(cache, monkeypatch, kept):
    """A process may map some 65,000 files: a version of more shards is verified all the
    same."""
    monkeypatch.setattr(featcache.care.verify, "_MOST_MAPPED", 1)
    version, mapped = only_version(cache), []
    if not kept:
        shutil.rmtree(version.path / "index")

    def count_maps(*_):
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped.append(sum(f"{version.path}/shards/" in line for line in maps))

    assert verify(version, report=count_maps).problems == []
    assert len(mapped) == 3
    assert mapped[-1] <= 2  # before, the next one may be mapped, as it is being checked


# What is beside the shards: a version's metadata, restored, and its index, built anew


@pytest.mark.parametrize("file", ["zarr.json", "shards/zarr.json"])
@pytest.mark.parametrize(
    "spoil",
    [*SPOIL[:4], lambda path: flip(path, 20)],
    ids=["delete", "empty", "shorten", "lengthen", "flip"],
)
def test_metadata_beside_the_shards_is_restored(cli, plain, sound, cache, file, spoil):
    """The version's own from the record of a run: the config it was asked for, if it has
    this fingerprint."""
    path = only_version(cache).path
    before = Version.open(path).info
    spoil(path / file)
    verified = cli("verify", cache).with_code(1)
    assert f"{file}: damaged" in verified.err + verified.out
    assert "featcache repair" in verified.err
    assert_repaired(cli, cache, sound, plain)
    after = Version.open(path).info
    assert (after.fingerprint, after.config, after.spec) == (
        before.fingerprint,
        before.config,
        before.spec,
    )


def test_a_version_without_metadata_or_record_is_left_alone(cli, plain, cache):
    """Nothing tells what it was: repair says what to do, and removes nothing."""
    path = only_version(cache).path
    (path / "zarr.json").unlink()
    shutil.rmtree(path / "runs")
    (line,) = cli.refused("repair", cache, "--manifest", plain.manifest(), code=1).splitlines()
    assert "no record" in line
    assert len([folder for folder in (path / "shards").iterdir() if folder.is_dir()]) == 3


FOLDERS = ["failures", "index", "runs", "shards", "tags", "wanted"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_in_the_place_of_a_folder_is_named_and_stays(cli, plain, sound, cache, folder):
    """It may be the only copy of something: no command removes it, or goes on without it.
    Once it has been moved away, the same command does its work."""
    place = only_version(cache).path / folder
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("the only copy")
    commands = [
        ("verify", cache),
        ("repair", place.parent, "--manifest", plain.manifest()),
        ("info", cache),
    ]
    for command in commands:
        (line,) = cli(*command).with_code(1).err.splitlines()
        assert f"{place}: " in line
        assert line.endswith("not a folder: move it away, and run the same command again")
    assert place.read_text() == "the only copy"
    place.rename(cache.parent / "moved away")
    assert cli("extract", plain.manifest(), "-o", cache, "--shard-size", "0.04").code == 0
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_written_below_a_file_in_the_place_of_a_folder(scratch, folder):
    version = make_version(scratch / "cache", make_features(3))
    place = version.path / folder
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("the only copy")
    fault = f"^{place}: cannot be written: not a folder: move it away, and run the same command"
    for write in (
        lambda: version.store.put(f"{folder}/a", b""),
        lambda: version.store.publish({"zarr.json": b""}, f"{folder}/ab"),
    ):
        with pytest.raises(StoreError, match=fault):
            write()
    assert place.read_text() == "the only copy"


def test_a_damaged_index_is_noted_and_built_anew(cli, plain, sound, cache):
    """It is derived, and nothing is lost with it: verify says so and exits with 0, and
    repair builds it anew."""
    (folder,) = only_version(cache).path.glob("index/*")
    flip(folder / "items/c/0/0", 9)
    assert (
        f"{folder}: damaged: this "
        "index is built anew" in cli("verify", cache).with_code(0, err="").out
    )
    assert_repaired(cli, cache, sound, plain)
    assert "index" not in cli("verify", cache).out


def without_what_is_derived(cache):
    """Take away what a copy of a version may come without: its index, and what is for
    people or a run."""
    for name in ("index", "work", "runs"):
        shutil.rmtree(only_version(cache).path / name, ignore_errors=True)


def test_no_index_is_no_loss(cli, plain, sound, cache):
    without_what_is_derived(cache)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)
    assert "nothing to do" in cli("extract", plain.manifest(), "-o", cache).out
    shutil.rmtree(victim(cache).folder)
    without_what_is_derived(cache)
    assert cli("extract", plain.manifest(), "-o", cache, "--shard-size", "0.04").code == 0
    assert chunk_files(cache) == chunk_files(sound)
