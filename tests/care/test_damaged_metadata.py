"""What is beside the shards, a version's metadata and its index, is restored or built anew."""

import shutil

import pytest
from cache_contents import chunk_files, items, only_version
from damage import SPOIL, assert_repaired, flip, victim

from featcache.version.version import Version


@pytest.mark.parametrize("file", ["zarr.json", "shards/zarr.json"])
@pytest.mark.parametrize(
    "spoil", [*SPOIL[:4], lambda path: flip(path, 20)], ids=["delete", "empty", "shorten", "lengthen", "flip"]
)
def test_metadata_beside_the_shards_is_restored(cli, plain, sound, cache, file, spoil):
    """The version's own from the record of a run: the config it was asked for, if it has this fingerprint."""
    path = only_version(cache).path
    before = Version.open(path).info
    spoil(path / file)
    verified = cli("verify", cache)
    assert verified.code == 1
    assert f"{file}: damaged" in verified.err + verified.out
    assert "featcache repair" in verified.err
    assert_repaired(cli, cache, sound, plain)
    after = Version.open(path).info
    assert (after.fingerprint, after.config, after.spec) == (before.fingerprint, before.config, before.spec)


def test_a_version_without_metadata_or_record_is_left_alone(cli, plain, cache):
    """Nothing tells what it was: repair says what to do, and removes nothing."""
    path = only_version(cache).path
    (path / "zarr.json").unlink()
    shutil.rmtree(path / "runs")
    refused = cli("repair", cache, "--manifest", plain.manifest())
    assert refused.code == 1
    (line,) = refused.err.splitlines()
    assert "no record" in line
    assert len([folder for folder in (path / "shards").iterdir() if folder.is_dir()]) == 3


def test_a_damaged_index_is_noted_and_built_anew(cli, plain, sound, cache):
    """It is derived, and nothing is lost with it: verify says so and exits with 0, and repair builds it anew."""
    (folder,) = only_version(cache).path.glob("index/*")
    flip(folder / "items/c/0/0", 9)
    verified = cli("verify", cache)
    assert (verified.code, verified.err) == (0, "")
    assert f"{folder}: damaged: this index is built anew" in verified.out
    assert_repaired(cli, cache, sound, plain)
    assert "index" not in cli("verify", cache).out


def without_what_is_derived(cache):
    """Take away what a copy of a version may come without: its index, and what is for people or a run."""
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
