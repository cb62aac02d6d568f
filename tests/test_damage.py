"""Damage: whatever byte changes or file goes, verify names it, and repair brings back just that."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from conftest import check, chunk_files, items, only_version, speech, write_config
from make_cache import add_shard, make_features, make_version

import featcache
from featcache.errors import DamagedError
from featcache.extraction import Options
from featcache.manifest import read_manifest
from featcache.repair import repair
from featcache.spec import SideSpec
from featcache.store import zarr3
from featcache.store.check import check_shard
from featcache.store.index import build_index, open_index
from featcache.store.shard import COLUMNS, Shard
from featcache.store.version import Version

CHUNKS = {name: f"{name}/c/0/0" if name in ("features", "segments", "sources") else f"{name}/c/0" for name in COLUMNS}
CHUNKS["features"] = "features/c/0/0"
FILES = ["zarr.json", *(f"{name}/zarr.json" for name in CHUNKS), *CHUNKS.values()]
"""Every file of a shard."""


@pytest.fixture(scope="module")
def sound(cli, plain, tmp_path_factory) -> Path:
    """A sound cache of three shards."""
    cache = tmp_path_factory.mktemp("sound")
    assert cli("extract", plain.manifest(), "-o", cache, "--shard-size", "0.04").code == 0
    assert len(chunk_files(cache)) == 3
    return cache


@pytest.fixture
def cache(sound, scratch) -> Path:
    """A copy of the sound cache, to spoil."""
    return Path(shutil.copytree(sound, scratch / "cache"))


def victim(cache: Path) -> Shard:
    """The shard to spoil: the second in the cache's order."""
    version = only_version(cache)
    return version.shard(open_index(version).shards[1])


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def assert_repaired(cli, cache: Path, sound: Path, plain) -> None:
    """Repair brings back the very shards, and verify finds nothing any more."""
    repaired = cli("repair", cache, "--manifest", plain.manifest())
    assert repaired.code == 0, repaired.err
    assert chunk_files(cache) == chunk_files(sound)
    assert items(cache) == items(sound)
    verified = cli("verify", cache, "--manifest", plain.manifest())
    assert verified.code == 0, verified.out
    assert "no damage found" in verified.out


def test_the_files_of_a_shard_are_these(sound):
    """No file of a shard escapes the tests below."""
    folder = victim(sound).folder
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == set(FILES)


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
        problems = list(check_shard(version.shard(shard.name), version.info.spec))
        assert problems, f"bit {bit} of byte {at}"
        assert {problem.shard for problem in problems} == {shard.name}
        flip(shard.folder / file, at, bit)
    assert check(cache).problems == []


def test_a_flipped_bit_in_any_byte_of_the_metadata_is_found(cache):
    """Each byte of a shard's own zarr.json, digits of the checksum included; each of the version's."""
    version, shard = only_version(cache), victim(cache)
    chance = random.Random(1)
    for path in (shard.folder / "zarr.json", version.path / "zarr.json"):
        for at in range(path.stat().st_size):
            bit = chance.randrange(8)
            flip(path, at, bit)
            with pytest.raises(DamagedError, match="damaged"):
                zarr3.read_group(path.parent)
            flip(path, at, bit)
    assert check(cache).problems == []


def test_a_flipped_bit_in_features_names_the_utterance(cache):
    """The one whose frames it is in, wherever in the shard."""
    version, shard = only_version(cache), victim(cache)
    chunk = shard.folder / CHUNKS["features"]
    frame_bytes = shard.features[:1].nbytes
    for number, id_ in enumerate(shard.ids):
        for frame in (int(shard.offsets[number]), int(shard.offsets[number + 1]) - 1):
            at = frame * frame_bytes + random.Random(frame).randrange(frame_bytes)
            flip(chunk, at)
            (problem,) = check_shard(version.shard(shard.name), version.info.spec)
            assert (problem.kind, problem.id) == ("checksum", id_)
            assert id_ in problem.message
            flip(chunk, at)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_is_repaired(cli, plain, sound, cache, file):
    """From the shell: verify exits with 1 and names the shard; repair brings back the same bytes under that name."""
    shard = victim(cache)
    flip(shard.folder / file, random.Random(file).randrange((shard.folder / file).stat().st_size), 3)
    inodes = {name: os.stat(only_version(cache).shard(name).folder).st_ino for name in chunk_files(cache)}
    verified = cli("verify", cache)
    assert verified.code == 1
    assert shard.name in verified.out
    assert "featcache repair" in verified.err
    assert_repaired(cli, cache, sound, plain)
    for name, inode in inodes.items():
        assert (os.stat(only_version(cache).shard(name).folder).st_ino == inode) == (name != shard.name)


def test_the_quick_check_reads_no_features(cli, cache):
    """`--no-data` finds what is wrong in metadata and columns, and says that it did not look further."""
    shard = victim(cache)
    flip(shard.folder / CHUNKS["features"], 100)
    quick = cli("verify", cache, "--no-data")
    assert (quick.code, "features not read" in quick.out) == (0, True)
    flip(shard.folder / CHUNKS["offsets"], 9)
    assert cli("verify", cache, "--no-data").code == 1


def test_json_names_what_is_damaged(cli, cache):
    """One document on stdout, and the same exit code."""
    shard = victim(cache)
    flip(shard.folder / CHUNKS["features"], 0)
    verified = cli("verify", cache, "--json")
    assert verified.code == 1
    assert not verified.json()["ok"]
    (problem,) = verified.json()["versions"][0]["problems"]
    assert (problem["shard"], problem["id"], problem["kind"]) == (shard.name, shard.ids[0], "checksum")


# Side arrays


SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")
SIDE_CHUNKS = ["side_scales/c/0", "side_scales_offsets/c/0", "side_marks/c/0/0", "side_marks_offsets/c/0"]
SIDE_FILES = [f"side_{name}/zarr.json" for name in ("scales", "scales_offsets", "marks", "marks_offsets")] + SIDE_CHUNKS


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


@pytest.mark.parametrize("file", SIDE_CHUNKS)
def test_a_flipped_bit_in_any_byte_of_a_side_array_is_found(sided, file):
    """Of its entries, of their offsets, of the checksums of both: as in the columns."""
    version, shard = sided
    for at in range((shard.folder / file).stat().st_size):
        flip(shard.folder / file, at, at % 8)
        (problem,) = check_shard(version.shard(shard.name), version.info.spec, data=False)
        assert (problem.kind, problem.shard) == ("checksum", shard.name)
        assert file.partition("/")[0] in problem.message
        flip(shard.folder / file, at, at % 8)
    assert list(check_shard(version.shard(shard.name), version.info.spec)) == []


@pytest.mark.parametrize("file", SIDE_FILES[:4])
def test_a_flipped_bit_in_the_metadata_of_a_side_array_is_found(sided, file):
    """The first byte, the last, and some at random."""
    version, shard = sided
    size = (shard.folder / file).stat().st_size
    chance = random.Random(file)
    for at in {0, size - 1, *(chance.randrange(size) for _ in range(20))}:
        flip(shard.folder / file, at, at % 8)
        (problem,) = check_shard(version.shard(shard.name), version.info.spec)
        assert (problem.kind, problem.shard) == ("metadata", shard.name)
        flip(shard.folder / file, at, at % 8)


def test_side_arrays_that_a_version_declares_and_a_shard_lacks_are_found(sided):
    """A shard of a version that has none, under the metadata of one that has."""
    version, shard = sided
    for path in shard.folder.glob("side_*"):
        shutil.rmtree(path)
    info = replace(shard.info, metadata={name: crc for name, crc in shard.info.metadata.items() if name in CHUNKS})
    (shard.folder / "zarr.json").write_bytes(zarr3.group_metadata(asdict(info)))
    found = list(check_shard(version.shard(shard.name), version.info.spec))
    assert {problem.shard for problem in found} == {shard.name}
    assert len(found) == 4


# Whole files


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swap_in_another(path: Path) -> None:
    """The same file of another shard, sound in itself."""
    shard = path
    while shard.parent.name != "shards":
        shard = shard.parent
    other = next(folder for folder in sorted(shard.parent.iterdir()) if folder.is_dir() and folder != shard)
    shutil.copy(other / path.relative_to(shard), path)


SPOIL = [delete, empty, shorten, lengthen, replace_by_folder, swap_in_another]


@pytest.mark.parametrize(
    "file", ["zarr.json", "features/zarr.json", CHUNKS["features"], CHUNKS["ids"], CHUNKS["crc32c"]]
)
@pytest.mark.parametrize("spoil", SPOIL, ids=lambda spoil: spoil.__name__)
def test_a_spoilt_file_is_found_and_repaired(cli, plain, sound, cache, file, spoil):
    """Gone, empty, a byte too short or too long, a folder, or another shard's."""
    shard = victim(cache)
    spoil(shard.folder / file)
    verified = cli("verify", cache)
    assert verified.code == 1, verified.err
    assert shard.name in verified.out
    assert_repaired(cli, cache, sound, plain)


@pytest.mark.parametrize("file", SIDE_FILES)
@pytest.mark.parametrize("spoil", SPOIL[:5], ids=lambda spoil: spoil.__name__)
def test_a_spoilt_file_of_a_side_array_is_found(sided, file, spoil):
    """Gone, empty, a byte too short or too long, a folder."""
    version, shard = sided
    spoil(shard.folder / file)
    assert {problem.shard for problem in check_shard(shard, version.info.spec, data=False)} == {shard.name}


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
    assert len(sound) == 4 * len(names)
    opened = featcache.open(cache)
    assert [opened.side("counts", id_).tolist() for id_ in opened.ids] == [[len(opened[id_])] for id_ in opened.ids]
    shard = victim(cache)
    flip(shard.folder / "side_counts" / "c" / "0", 9)
    (shard.folder / "side_counts_offsets" / "c" / "0").unlink()
    verified = cli("verify", cache, "--no-data")
    assert verified.code == 1
    assert "side_counts: damaged: its checksum does not match" in verified.out
    assert "side_counts_offsets/c/0: damaged: the file is missing" in verified.out
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert (only_version(cache).shard_names(), side_files(cache), items(cache)) == (names, sound, features)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0


def test_shards_that_changed_places_are_found(cli, plain, sound, cache):
    """Each is sound, and neither is what its name says."""
    folders = [path for path in sorted((only_version(cache).path / "shards").iterdir()) if path.is_dir()]
    folders[0].rename(cache / "aside")
    folders[1].rename(folders[0])
    (cache / "aside").rename(folders[1])
    verified = cli("verify", cache, "--json")
    assert verified.code == 1
    assert {problem["shard"] for problem in verified.json()["versions"][0]["problems"]} == {
        folders[0].name,
        folders[1].name,
    }
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0


def test_a_shard_that_is_gone_is_missing_and_extracted_again(cli, plain, sound, cache):
    """Only a manifest can tell; the next run makes the very shard."""
    shard = victim(cache)
    ids = set(shard.ids)
    shutil.rmtree(shard.folder)
    assert cli("verify", cache).code == 0
    verified = cli("verify", cache, "--manifest", plain.manifest(), "--json")
    assert verified.code == 1
    assert {problem["id"] for problem in verified.json()["versions"][0]["problems"]} == ids
    assert cli("extract", plain.manifest(), "-o", cache, "--shard-size", "0.04").code == 0
    assert chunk_files(cache) == chunk_files(sound)


def test_several_damaged_shards_are_repaired_at_once(cli, plain, sound, cache):
    """All of them damaged: everything is extracted again, and equal."""
    for number, name in enumerate(only_version(cache).shard_names()):
        flip(only_version(cache).shard(name).folder / FILES[number * 5], 40)
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0


# What is beside the shards


@pytest.mark.parametrize(
    "spoil", [*SPOIL[:4], lambda path: flip(path, 200)], ids=["delete", "empty", "shorten", "lengthen", "flip"]
)
def test_the_versions_own_metadata_is_restored(cli, plain, sound, cache, spoil):
    """From the record of a run: the config it was asked for, if it has this fingerprint."""
    path = only_version(cache).path / "zarr.json"
    before = Version.open(path.parent).info
    spoil(path)
    verified = cli("verify", cache)
    assert verified.code == 1
    assert "zarr.json: damaged" in verified.err + verified.out
    assert "featcache repair" in verified.err
    assert_repaired(cli, cache, sound, plain)
    after = Version.open(path.parent).info
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


@pytest.mark.parametrize(
    "spoil", [*SPOIL[:4], lambda path: flip(path, 20)], ids=["delete", "empty", "shorten", "lengthen", "flip"]
)
def test_the_group_of_shards_is_restored(cli, plain, sound, cache, spoil):
    """`shards/zarr.json` is nobody's data, but stock Zarr needs it."""
    spoil(only_version(cache).path / "shards" / "zarr.json")
    verified = cli("verify", cache)
    assert verified.code == 1
    assert "shards/zarr.json" in verified.out
    assert_repaired(cli, cache, sound, plain)


INDEX = ["index.json", *(f"{name}.npy" for name in ("ids", "id_offsets", "shard", "item", "first_frame", "num_frames"))]
INDEX += ["row_hash.npy", "id_hash.npy", "by_hash.npy"]


@pytest.mark.parametrize("file", INDEX)
def test_a_damaged_index_is_found_and_built_anew(cli, plain, sound, cache, file):
    """It is derived: repair throws it away."""
    (folder,) = only_version(cache).path.glob("index/*")
    assert {path.name for path in folder.iterdir()} == set(INDEX)
    flip(folder / file, (folder / file).stat().st_size - 2)
    verified = cli("verify", cache)
    assert verified.code == 1
    assert f"{folder.name}" in verified.out
    assert_repaired(cli, cache, sound, plain)
    assert not check(cache).problems


@pytest.mark.parametrize("spoil", SPOIL[:4], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("file", INDEX)
def test_an_index_that_cannot_be_read_is_done_without(sound, cache, file, spoil):
    """Opening a cache builds it anew: deleting it, or part of it, loses nothing."""
    version = only_version(cache)
    (folder,) = version.path.glob("index/*")
    expected = build_index(map(version.shard, version.shard_names()))
    spoil(folder / file)
    found = open_index(version)
    assert found.shards == expected.shards
    assert found.ids == expected.ids
    for name in ("shard", "item", "first_frame", "num_frames", "row_hash", "id_hash", "by_hash"):
        assert (getattr(found, name) == getattr(expected, name)).all()


@pytest.mark.parametrize("file", INDEX[1:])
def test_an_index_with_a_flipped_bit_is_not_believed(sound, cache, file):
    """Else one utterance would be given another one's frames, and nobody would know."""
    version = only_version(cache)
    (folder,) = version.path.glob("index/*")
    expected = build_index(map(version.shard, version.shard_names()))
    flip(folder / file, (folder / file).stat().st_size - 2)
    found = open_index(version)
    assert found.ids == expected.ids
    for name in ("shard", "item", "first_frame", "num_frames", "row_hash", "id_hash", "by_hash"):
        assert (getattr(found, name) == getattr(expected, name)).all()


def test_no_index_is_no_loss(cli, plain, sound, cache):
    """Nor are `work` and `runs` needed: a copy of a version may come without them."""
    path = only_version(cache).path
    for name in ("index", "work", "runs"):
        shutil.rmtree(path / name)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0
    assert items(cache) == items(sound)
    assert "nothing to do" in cli("extract", plain.manifest(), "-o", cache).out
    for name in ("index", "work", "runs"):
        shutil.rmtree(path / name, ignore_errors=True)
    shutil.rmtree(victim(cache).folder)
    for name in ("index", "work", "runs"):
        shutil.rmtree(path / name, ignore_errors=True)
    assert cli("extract", plain.manifest(), "-o", cache, "--shard-size", "0.04").code == 0
    assert chunk_files(cache) == chunk_files(sound)


# When repair must not, or must be careful


def assert_refused(finished, cache: Path, *words: str) -> None:
    """Repair said no in one line, and removed nothing."""
    assert finished.code in (1, 2)
    (line,) = finished.err.splitlines()
    assert all(word in line for word in words), line
    assert len(list(cache.glob("*/shards/*/"))) == 3


def test_repair_needs_every_utterance_of_a_damaged_shard(cli, plain, cache):
    """What the manifest lacks could not be extracted again: nothing is removed, and the utterances are named."""
    shard = victim(cache)
    flip(shard.folder / CHUNKS["features"], 100)
    rows = [row for row in plain.rows if row["id"] != shard.ids[1]]
    refused = cli("repair", cache, "--manifest", plain.manifest(rows, "less.csv"))
    assert_refused(refused, cache, shard.ids[1], "Nothing has been removed")


def test_repair_needs_the_audio_of_a_damaged_shard(cli, plain, cache, scratch):
    """A disk that is not mounted, a wrong --root: the sound utterances of the shard would be lost for nothing."""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    refused = cli("repair", cache, "--manifest", plain.manifest(), "--root", scratch)
    assert_refused(refused, cache, "Nothing has been removed", "--root")


def test_repair_needs_its_device(cli, plain, cache):
    """It looks for it before it removes anything."""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    refused = cli("repair", cache, "--manifest", plain.manifest(), "--device", "cuda:99")
    assert_refused(refused, cache, "cuda:99")


def test_repair_refuses_a_version_under_another_name(cli, plain, cache):
    """What it extracts would go elsewhere."""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    path = only_version(cache).path
    path.rename(path.with_name("renamed"))
    refused = cli("repair", cache, "--manifest", plain.manifest())
    assert_refused(refused, cache, "rename it back")


@pytest.mark.parametrize("way", ["inside", "link"])
def test_a_version_may_be_named_by_any_path(cli, plain, sound, cache, scratch, way):
    """`featcache verify .` in its folder, or through a link."""
    path = only_version(cache).path
    (scratch / "link").symlink_to(path)
    name, cwd = (".", path) if way == "inside" else (scratch / "link", None)
    assert cli("verify", name, cwd=cwd).code == 0
    flip(victim(cache).folder / CHUNKS["features"], 100)
    assert cli("repair", name, "--manifest", plain.manifest(), cwd=cwd).code == 0
    assert chunk_files(cache) == chunk_files(sound)
    assert cli("verify", name, cwd=cwd).code == 0


@pytest.mark.parametrize("damaged", [1, 2], ids=["last but one", "last"])
@pytest.mark.parametrize("row", [0, 5])
def test_repair_brings_back_the_latest_of_an_utterance_that_was_replaced(cli, plain, scratch, row, damaged):
    """Its audio changed twice: an older extraction in a sound shard must not pass for the one that was damaged."""
    corpus, cache = plain.copy(scratch / "corpus"), scratch / "cache"
    made, versions = [], set()
    for seed in (0, 50, 51):
        if seed:
            path = corpus.folder / corpus.rows[row]["path"]
            soundfile.write(path, speech(corpus.rows[row]["duration"], seed=seed), 16000)
        assert cli("extract", corpus.manifest(), "-o", cache, "--check-sources").code == 0
        made += set(only_version(cache).shard_names()) - versions
        versions.update(made)
    expected = items(cache)
    flip(only_version(cache).shard(made[damaged]).folder / CHUNKS["features"], 100)
    assert cli("repair", cache, "--manifest", corpus.manifest()).code == 0
    assert items(cache) == expected
    assert check(cache, manifest=read_manifest(corpus.manifest())).problems == []


def test_repair_brings_back_what_had_failed_once(cli, plain, scratch):
    """An old record in the ledger is no reason to leave out what was there."""
    config = scratch / "limited.yaml"
    config.write_text("name: limited\nextractor: fbank\naudio: {max_seconds: 0.5}\n")
    cache = scratch / "cache"
    job = ("extract", plain.manifest(), "-o", cache, "-c", config)
    assert cli(*job).code == 3
    config.write_text("name: limited\nextractor: fbank\n")
    assert cli(*job, "--retry-failed").code == 0
    expected = items(cache)
    for name in only_version(cache).shard_names():
        flip(only_version(cache).shard(name).folder / CHUNKS["features"], 100)
    assert cli("repair", cache, "--manifest", plain.manifest()).code in (0, 3)
    assert items(cache) == expected


def test_repair_of_what_is_sound_does_nothing(cli, plain, cache):
    """And says so."""
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    repaired = cli("repair", cache, "--manifest", plain.manifest())
    assert (repaired.code, "no damage found" in repaired.out) == (0, True)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_an_interrupted_repair_removes_nothing_that_it_does_not_extract(plain, cache):
    """Stopped while it still verifies, it leaves the damaged shard, whose other utterances are good."""
    flip(victim(cache).folder / CHUNKS["features"], 100)
    stop = threading.Event()
    stop.set()
    done = repair(only_version(cache).path, read_manifest(plain.manifest()), Options("cpu", 1), stop=stop)
    assert done.interrupted
    assert len(only_version(cache).shard_names()) == 3


def add_hollow_shard(cache: Path) -> Path:
    """Add a shard of 10^4 items of 10^5 frames each, whose bytes are a hole in the file: 160 GB for who reads it, and
    no space. Returns its chunk file.
    """
    version, times = only_version(cache), 100_000
    shard = version.shard(add_shard(version, {f"item-{i}": np.zeros((1, 80), np.float16) for i in range(10_000)}))
    offsets = shard.column("offsets") * np.uint64(times)
    columns = {"offsets": offsets, "num_samples": np.diff(offsets) * np.uint64(160)}
    metadata = {name: zarr3.write_array(shard.folder / name, column) for name, column in columns.items()}
    frames = shard.info.frames * times
    metadata["features"] = zarr3.array_metadata((frames, 80), np.dtype(np.float16))
    (shard.folder / "features" / "zarr.json").write_bytes(metadata["features"])
    os.truncate(shard.folder / CHUNKS["features"], frames * 80 * 2 + zarr3.CHECKSUM_BYTES)
    checksums = {name: f"{zarr3.crc32c(np.frombuffer(data, np.uint8)):08x}" for name, data in metadata.items()}
    info = replace(shard.info, frames=frames, metadata={**shard.info.metadata, **checksums})
    (shard.folder / "zarr.json").write_bytes(zarr3.group_metadata(asdict(info)))
    return shard.folder / CHUNKS["features"]


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_an_interrupt_ends_verification_at_once(cli, plain, cache, command):
    """In the middle of a shard of 160 GB; nobody waits for the end of it."""
    chunk = add_hollow_shard(cache)
    more = ["--manifest", plain.manifest()] if command == "repair" else []
    running = cli.start(command, cache, *more, "--threads", 2)

    def is_reading() -> bool:
        open_files = Path(f"/proc/{running.pid}/fd")
        with suppress(OSError):
            return any(os.readlink(open_files / number) == str(chunk) for number in os.listdir(open_files))
        return False

    running.wait_until(is_reading)
    time.sleep(0.2)
    assert is_reading()
    started = time.monotonic()
    running.send(signal.SIGINT)
    finished = running.wait()
    assert time.monotonic() - started < 5
    assert finished.code == 130
    (line,) = finished.err.splitlines()
    assert "interrupted" in line
    assert len(only_version(cache).shard_names()) == 4


def test_repair_says_what_is_missing(cli, plain, cache):
    """After a kill of repair itself, say: no damage, and yet not all is well."""
    shutil.rmtree(victim(cache).folder)
    told = cli("repair", cache, "--manifest", plain.manifest()).out
    assert "5 utterances are in no shard: featcache extract adds them" in told


def test_damage_in_one_version_leaves_the_others_usable(cli, plain, cache):
    """Extraction into, and verification of, a sound version go on; verify of the cache tells of both."""
    assert cli("extract", plain.manifest(), "-o", cache, "-c", "mfcc13").code == 0
    (spoilt,) = cache.glob("mfcc13-*")
    flip(spoilt / "zarr.json", 100)
    assert "nothing to do" in cli("extract", plain.manifest(), "-o", cache).out
    for command in ("verify", "info"):
        told = cli(command, cache)
        assert told.code == 1
        assert "mfcc13" in told.out + told.err
        assert "12 utterances" in told.out
    assert cli("repair", cache, "--manifest", plain.manifest()).code == 0
    assert cli("verify", cache).code == 0
