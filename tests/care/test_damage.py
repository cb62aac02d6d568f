"""Damage to a shard: whatever byte changes or file goes, verify names it, and repair brings back what was there."""

import os
import random
import shutil
import threading
from itertools import chain, product
from pathlib import Path

import pytest
from cache_contents import check, items, only_version
from damage import CHUNKS, FILES, SPOIL, assert_repaired, each_flip, flip, victim
from extractions import write_config
from make_cache import make_features, make_version

import featcache
import featcache.care.verify
from featcache.care.verify import examine_shard, verify
from featcache.errors import DamagedError
from featcache.format.shard import Shard
from featcache.spec import SideSpec
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
    assert mapped[-1] <= 2  # before, the next one may be mapped, as it is being checked


# Side arrays

SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")
SIDE_FILES = ["side_scales/zarr.json", "side_marks/zarr.json", "side_scales/c/0", "side_marks/c/0/0"]


@pytest.fixture
def sided(scratch) -> tuple[Version, Shard]:
    """A version with side arrays, to spoil, and the first of its two shards."""
    parts = [make_features(4, (2,), "float32", prefix=prefix, max_frames=12, seed=3) for prefix in "ab"]
    version = make_version(scratch, *parts, side=SIDE)
    assert check(scratch).problems == []
    shard = version.shard(version.shard_names()[0])
    found = {str(path.relative_to(shard.folder)) for path in shard.folder.rglob("*") if path.is_file()}
    assert found == {*FILES, *SIDE_FILES}
    return version, shard


@pytest.mark.parametrize("file", SIDE_FILES)
def test_a_flipped_bit_in_any_byte_of_a_side_array_is_found(sided, file):
    """Of its entries, of their checksum, and of its metadata."""
    version, shard = sided
    for _ in each_flip(shard.folder / file):
        (problem,) = examine_shard(version, shard.name, False).problems
        assert (problem.kind, problem.shard) == ("checksum", shard.name)
        assert file.partition("/")[0] in problem.message
    assert examine_shard(version, shard.name, True).problems == []


@pytest.mark.parametrize("file", SIDE_FILES)
@pytest.mark.parametrize("spoil", SPOIL[:5], ids=lambda spoil: spoil.__name__)
def test_a_spoilt_file_of_a_side_array_is_found(sided, file, spoil):
    """Gone, empty, a byte too short or too long, a folder."""
    version, shard = sided
    spoil(shard.folder / file)
    assert {problem.shard for problem in examine_shard(version, shard.name, False)[1]} == {shard.name}


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
