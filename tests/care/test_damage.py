"""Damage to a shard: whatever byte changes or file goes, verify names it, and repair brings back what was there."""

from __future__ import annotations

import os
import random
import shutil
import threading
from itertools import chain, product
from pathlib import Path

import pytest
from cache_contents import check, only_version
from damage import CHUNKS, FILES, SPOIL, assert_repaired, each_flip, flip, victim

import featcache.care.verify
from featcache.care.verify import examine_shard, verify
from featcache.errors import DamagedError
from featcache.version.version import Version


def test_the_files_of_a_shard_are_these(sound):
    """No file of a shard escapes the tests below."""
    folder = victim(sound).folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(FILES)


def some_of(cases, step):
    """The cases, of which all but each so-manyth are slow: what is repaired, and how, is the same for all."""
    params = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        names = "-".join(getattr(value, "__name__", str(value)) for value in values)
        params.append(pytest.param(*values, id=names, marks=pytest.mark.slow if number % step else ()))
    return params


# One bit


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere_is_found(cache, file):
    """The first byte, the last, those of the checksum, and some at random: the shard is named."""
    version, shard = only_version(cache), victim(cache)
    size = (shard.folder / file).stat().st_size
    chance = random.Random(file)
    for at in {0, size // 2, size - 5, size - 4, size - 1, *(chance.randrange(size) for _ in range(6))}:
        bit = chance.randrange(8)
        flip(shard.folder / file, at, bit)
        problems = examine_shard(version, shard.name, True)[1]
        assert problems, f"bit {bit} of byte {at}"
        assert {problem.shard for problem in problems} == {shard.name}
        flip(shard.folder / file, at, bit)
    assert check(cache).problems == []


def test_a_flipped_bit_in_any_byte_of_the_metadata_is_found(cache):
    """Each byte of a shard's own zarr.json, digits of the checksum included; each of the version's."""
    version, shard = only_version(cache), victim(cache)
    for _ in chain(each_flip(shard.folder / "zarr.json"), each_flip(version.path / "zarr.json")):
        with pytest.raises(DamagedError, match="damaged"):
            Version.open(version.path).shard(shard.name)
    assert check(cache).problems == []


def test_a_flipped_bit_in_features_names_the_utterance(cache):
    """The one whose frames it is in, wherever in the shard."""
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


SPOILT = product(("zarr.json", "features/zarr.json", *CHUNKS.values()), [flip_some_bit, *SPOIL])


@pytest.mark.parametrize(("file", "spoil"), some_of(SPOILT, len(SPOIL)))
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
    """`--no-data` finds what is wrong in metadata and columns, and says that it did not look further."""
    shard = victim(cache)
    flip(shard.folder / CHUNKS["features"], 100)
    quick = cli("verify", cache, "--no-data")
    assert (quick.code, "features not read" in quick.out) == (0, True)
    flip(shard.folder / CHUNKS["items"], 9)
    assert cli("verify", cache, "--no-data").code == 1


def test_json_names_what_is_damaged(cli, cache):
    """One document on stdout, and the same exit code."""
    shard = victim(cache)
    flip(shard.folder / CHUNKS["features"], 0)
    verified = cli("verify", cache, "--json")
    assert verified.code == 1
    assert not verified.json()["ok"]
    (problem,) = verified.json()["versions"][0]["problems"]
    assert (problem["shard"], problem["id"], problem["kind"]) == (shard.name, shard.table.ids[0], "checksum")


def test_a_verification_that_is_stopped_says_so(cache):
    """It reports what it had found by then, and looks at nothing more."""
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
    assert max(mapped) <= 2
