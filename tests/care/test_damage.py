"""Damage to a shard: verify names it, and repair brings back what was there. (tests/format/test_shards.py spoils each
byte and file of one.)
"""

import os
import random
import shutil
import threading
from itertools import product
from pathlib import Path

import pytest
from cache_contents import chunk_files, items, only_version
from damage import CHUNKS, SPOIL, assert_repaired, flip, victim
from extractions import write_config

import featcache
import featcache.care.verify
from featcache.care.verify import examine_shard, verify
from featcache.version.version import Version

# One bit


def test_a_flipped_bit_in_features_names_the_utterance(cache):
    version, shard = only_version(cache), victim(cache)
    chunk = shard.folder / CHUNKS["features"]
    frame_bytes = shard.features[:1].nbytes
    offsets = shard.table.offsets("frame")
    for number, id_ in enumerate(shard.table.ids):
        for frame in (int(offsets[number]), int(offsets[number + 1]) - 1):
            at = frame * frame_bytes + random.Random(frame).randrange(frame_bytes)
            flip(chunk, at)
            (problem,) = examine_shard(version, shard.name, True)[1]
            assert (problem.kind, problem.id) == ("checksum", id_)
            assert id_ in problem.message
            flip(chunk, at)


def flip_some_bit(path: Path) -> None:
    flip(path, random.Random(path.name).randrange(path.stat().st_size), 3)


FILES = ("zarr.json", "features/zarr.json", *CHUNKS.values())
SPOILT = [  # most are slow: what is repaired, and how, is the same for all
    pytest.param(file, spoil, id=f"{file}-{spoil.__name__}", marks=pytest.mark.slow if number % len(SPOIL) else ())
    for number, (file, spoil) in enumerate(product(FILES, [flip_some_bit, *SPOIL]))
]


@pytest.mark.parametrize(("file", "spoil"), SPOILT)
def test_a_spoilt_file_is_found_and_repaired(cli, plain, sound, cache, file, spoil):
    """One bit flipped; gone, empty, a byte too short or too long, a folder, or another shard's. From the shell: verify
    exits with 1 and names the shard; repair brings back its utterances, and touches no other shard.
    """
    shard = victim(cache)
    spoil(shard.folder / file)
    others = [path for path in shard.folder.parent.iterdir() if path.is_dir() and path != shard.folder]
    inodes = [os.stat(folder).st_ino for folder in others]
    verified = cli("verify", cache)
    assert verified.code == 1, verified.err
    assert shard.name in verified.out
    assert "featcache repair" in verified.err
    assert_repaired(cli, cache, sound, plain)
    assert [os.stat(folder).st_ino for folder in others] == inodes


def test_the_quick_check_reads_no_features(cli, cache):
    """And says so. (What it finds: a damaged side array, below.)"""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    quick = cli("verify", cache, "--no-data")
    assert (quick.code, "features not read" in quick.out) == (0, True)


def test_a_verification_that_is_stopped_says_so(cache):
    version, stop, looked_at = only_version(cache), threading.Event(), []

    def stop_after_one():
        looked_at.append(None)
        stop.set()

    name = version.shard_names()[0]
    flip(version.shard(name).folder / "zarr.json", 40)
    found = verify(version, report=stop_after_one, stop=stop)
    assert found.interrupted
    assert (found.shards, found.damaged_shards, len(looked_at)) == (3, [name], 1)
    assert not verify(version).interrupted


@pytest.mark.parametrize("kept", [True, False], ids=["index-kept", "no-index"])
def test_few_tables_stay_mapped(cache, monkeypatch, kept):
    """A process may map some 65,000 files: a version of more shards is verified all the same."""
    monkeypatch.setattr(featcache.care.verify, "_MOST_MAPPED", 1)
    version, mapped = only_version(cache), []
    if not kept:
        shutil.rmtree(version.path / "index")

    def count_maps():
        maps = Path("/proc/self/maps").read_text().splitlines()
        mapped.append(sum(f"{version.path}/shards/" in line for line in maps))

    assert verify(version, report=count_maps).problems == []
    assert len(mapped) == 3
    assert mapped[-1] <= 2  # before, the next one may be mapped, as it is being checked


# Side arrays


def side_files(cache: Path) -> dict[str, bytes]:
    """Every file of the side arrays in a cache's one version."""
    shards = only_version(cache).path / "shards"
    return {str(path.relative_to(shards)): path.read_bytes() for path in shards.glob("*/side_*/**/*") if path.is_file()}


def test_a_damaged_side_array_is_extracted_again(cli, plain, scratch):
    """With the rest of its shard, by an extractor that gives, beside the features, how many frames there are."""
    config = write_config(scratch, "Moments", module="row_extractors")
    cache = scratch / "cache"
    assert cli("extract", plain.manifest(), "-o", cache, "-c", config, "--shard-size", "0.0008").code == 0
    names, sound, features = only_version(cache).shard_names(), side_files(cache), items(cache)
    assert len(names) > 2
    assert len(sound) == 2 * len(names)
    opened = featcache.open(cache)
    assert [opened.side("counts", id_).tolist() for id_ in opened.ids] == [[len(opened[id_])] for id_ in opened.ids]
    shard = victim(cache)
    flip(shard.folder / "side_counts" / "c" / "0", 9)
    verified = cli("verify", cache, "--no-data")
    assert verified.code == 1
    assert "side_counts/c/0: damaged: its checksum does not match" in verified.out
    refused = cli("repair", cache, "--manifest", plain.manifest())
    assert (refused.code, only_version(cache).shard_names()) == (2, names)
    assert "names row_extractors:Moments, which is not a registered extractor; --trust-remote-code" in refused.err
    assert cli("repair", cache, "--manifest", plain.manifest(), "--trust-remote-code").code == 0
    assert (only_version(cache).shard_names(), side_files(cache), items(cache)) == (names, sound, features)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0


# What is beside the shards: a version's metadata, restored, and its index, built anew


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
