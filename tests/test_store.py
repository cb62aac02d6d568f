"""The store: shards that appear whole, versions, claims, the index, the ledger, and what is said of them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from conftest import scratch_folder
from hypothesis import given
from hypothesis import strategies as st

from featcache.errors import DamagedError, ExtractorError, StoreError
from featcache.spec import FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.check import check_shard
from featcache.store.claims import Claim
from featcache.store.combine import combined_crc32c
from featcache.store.index import build_index, find_repeats, open_index
from featcache.store.runs import Failure, Run, asked_of, latest_failures
from featcache.store.shard import Item, Shard, ShardWriter
from featcache.store.version import (
    Version,
    VersionInfo,
    differing_keys,
    select_version,
    select_versions,
    version_folders,
)
from featcache.strings import Strings

SPEC = FeatureSpec((2,), "float32", 100.0, 160, 16000, "anything")
INFO = VersionInfo("mine", "0123456789abcdef" * 4, {"name": "mine"}, SPEC, {"featcache": "0"})
SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")
SIDED = replace(INFO, spec=replace(SPEC, side=SIDE))
DTYPES = ["float32", "float16", "uint8", "uint16", "uint32", "int64"]


@pytest.fixture
def version(scratch) -> Version:
    """An empty version."""
    return Version.create(scratch, INFO)


def item(id_: str, frames: int = 3, **columns) -> Item:
    """An item of a clip that gives so many frames."""
    values = {"path": f"{id_}.wav", "start": None, "duration": None, "channel": None, "num_samples": frames * 160}
    return Item(id=id_, **{**values, "size": 1, "mtime_ns": 2, "sample_rate": 16000, **columns})


def write(
    version: Version, items: list[Item], values=None, *, row: int = 0, supersedes=None, run: str = "", side=None
) -> Shard:
    """Commit a shard; item `i` of it is all `i`, unless values `[frames, 2]` are given."""
    counts = [one.num_samples // 160 for one in items]
    if values is None:
        values = np.repeat(np.arange(len(items), dtype=np.float32), counts)[:, None] * np.ones((1, 2), np.float32)
    spec = version.info.spec
    writer = ShardWriter(version.work_folder("shard"), spec.item_shape, version.dtype, spec.side)
    writer.append(items, np.ascontiguousarray(values, version.dtype), counts, side or {})
    name = writer.commit(
        version.path / "shards", sample_rate=16000, row=row, supersedes=supersedes or {}, made_by={"run": run}
    )
    return version.shard(name)


def problems(version: Version, shard: Shard) -> list[str]:
    return [problem.kind for problem in check_shard(shard, version.info.spec)]


# Zarr v3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4)])
def test_an_array_is_one_chunk_that_stock_zarr_reads(scratch, dtype, shape):
    """Raw little-endian values and four bytes of checksum, byte for byte what zarr-python writes."""
    array = np.random.default_rng(1).integers(0, 200, shape).astype(dtype)
    zarr3.write_array(scratch / "ours", array)
    chunk = zarr3.chunk_path(scratch / "ours", len(shape)).read_bytes()
    assert chunk[:-4] == array.tobytes()
    found = zarr.open_array(scratch / "ours", mode="r")
    assert (found.shape, found.dtype, found.chunks) == (array.shape, array.dtype, array.shape)
    assert (found[...] == array).all()
    theirs = zarr.create_array(
        scratch / "theirs",
        data=array,
        chunks=shape,
        compressors=[zarr.codecs.Crc32cCodec()],
        config={"write_empty_chunks": True},
    )
    assert zarr3.chunk_path(scratch / "theirs", len(shape)).read_bytes() == chunk
    assert theirs.metadata.to_dict()["codecs"] == found.metadata.to_dict()["codecs"]


def test_stock_zarr_refuses_a_flipped_bit(scratch):
    """The checksum is Zarr's own: no reader takes damaged features for good ones."""
    zarr3.write_array(scratch, np.arange(100, dtype=np.float32))
    path = zarr3.chunk_path(scratch, 1)
    data = bytearray(path.read_bytes())
    data[123] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(scratch, mode="r")[...]


def test_stock_zarr_refuses_a_chunk_that_is_gone_or_does_not_fill_it(scratch):
    """What format 1 reads with `map_array` is never fill values."""
    zarr3.write_array(scratch, np.arange(100, dtype=np.float32))
    zarr3.chunk_path(scratch, 1).unlink()
    with pytest.raises(DamagedError, match="missing"):
        zarr3.map_array(scratch)
    with pytest.raises(DamagedError, match="missing"):
        zarr3.read_array(scratch)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 2, 4)])
def test_an_array_without_a_value_has_no_chunk(scratch, shape):
    """As in stock Zarr, for which a chunk is never of size 0; and a chunk that is there all the same is damage."""
    metadata = json.loads(zarr3.write_array(scratch / "a", np.empty(shape, np.float32)))
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [1, *shape[1:]]
    assert [path.name for path in (scratch / "a").iterdir()] == ["zarr.json"]
    found = zarr.open_array(scratch / "a", mode="r")
    read, checksum = zarr3.read_array(scratch / "a")
    mapped = zarr3.map_array(scratch / "a")
    for array in (found[...], read, mapped):
        assert (array.shape, array.dtype) == (shape, np.float32)
    assert (checksum, mapped.flags.writeable) == (0, False)
    zarr3.write_array(scratch / "b", np.ones((3, *shape[1:]), np.float32))
    (scratch / "a" / "zarr.json").replace(scratch / "b" / "zarr.json")
    for reader in (zarr3.read_array, zarr3.map_array):
        with pytest.raises(DamagedError, match="no value"):
            reader(scratch / "b")


def test_a_map_outlives_its_file(scratch):
    """What training has mapped stays as it was when repair removes a shard."""
    zarr3.write_array(scratch, np.arange(100_000, dtype=np.float32))
    before = len(os.listdir("/proc/self/fd"))
    mapped = zarr3.map_array(scratch)
    assert len(os.listdir("/proc/self/fd")) == before  # a thousand shards are no thousand open files
    zarr3.chunk_path(scratch, 1).unlink()
    assert (mapped == np.arange(100_000)).all()
    with pytest.raises(ValueError, match="read-only"):
        mapped[0] = 1


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "format", "checksum", "é"]), JSON, max_size=4),
    st.integers(0),
    st.integers(0, 7),
)
def test_sealed_metadata_comes_back_or_is_refused(attributes, at, bit):
    """Whatever it holds, even what looks like a seal; and no flipped bit goes unnoticed."""
    attributes = {**attributes, "nested": {"checksum": "00000000"}}
    attributes.pop("checksum", None)
    with scratch_folder() as folder:
        data = bytearray(zarr3.group_metadata(attributes))
        (folder / "zarr.json").write_bytes(data)
        assert zarr3.read_group(folder) == attributes
        assert attributes.items() <= json.loads(data)["attributes"]["featcache"].items()
        data[at % len(data)] ^= 1 << bit
        (folder / "zarr.json").write_bytes(data)
        with pytest.raises(DamagedError):
            zarr3.read_group(folder)


def test_a_small_file_is_replaced_whole_or_stays(scratch, monkeypatch):
    """`write_file` leaves the old one, and no litter, where the disk is full."""
    zarr3.write_file(scratch / "file", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(StoreError, match="No space left"):
        zarr3.write_file(scratch / "file", b"new")
    assert [path.name for path in scratch.iterdir()] == ["file"]
    assert (scratch / "file").read_bytes() == b"old"


# Shards


ITEMS = st.lists(
    st.builds(
        item,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        st.integers(1, 5),
        path=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
        start=st.none() | st.floats(0, 1e6),
        duration=st.none() | st.floats(1e-3, 1e6),
        channel=st.none() | st.integers(0, 2**31 - 1),
        size=st.integers(0, 2**62),
        mtime_ns=st.integers(-(2**62), 2**62),
        sample_rate=st.integers(1, 10**6),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda one: one.id,
)


@given(ITEMS)
def test_a_shard_keeps_what_its_items_are(items):
    """Every column comes back as it went in; and the shard is sound."""
    with scratch_folder() as folder:
        version = Version.create(folder, INFO)
        shard = write(version, items)
        assert list(shard.items()) == items
        assert list(shard.items([len(items) - 1])) == items[-1:]
        assert shard.info.items == len(items)
        assert [shard.features[first, 0] for first in shard.offsets[:-1]] == list(range(len(items)))
        assert problems(version, shard) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_of_any_dtype_is_sound(scratch, dtype):
    """Also where all of it is zero."""
    version = Version.create(scratch, replace(INFO, spec=replace(SPEC, dtype=dtype)))
    shard = write(version, [item("a"), item("b")], np.zeros((6, 2)))
    assert problems(version, shard) == []
    group = zarr.open_group(shard.folder, mode="r")
    assert group["features"].dtype == dtype
    assert set(group.array_keys()) == {"features", "offsets", "crc32c", "num_samples", "ids", "id_offsets", "paths",
                                       "path_offsets", "segments", "channels", "sources"}  # fmt: skip


def test_the_same_items_make_the_same_shard(version):
    """A redo has the same name, and finds the first one there."""
    items = [item("a"), item("b", start=0.5)]
    first = write(version, items)
    inode = first.folder.stat().st_ino
    again = write(version, items)
    assert (again.name, again.folder.stat().st_ino) == (first.name, inode)
    assert list((version.path / "work").iterdir()) == []
    names = {first.name}
    for other in (
        [item("a"), item("c", start=0.5)],
        [item("b", start=0.5), item("a")],
        [item("a"), item("b")],
        [item("a"), item("b", start=0.5, mtime_ns=3)],
        [item("a"), item("b", start=0.5, path="elsewhere.wav")],
    ):
        names.add(write(version, other).name)
    names.add(write(version, items, supersedes={first.name: [0]}).name)
    assert len(names) == 7


def test_a_shard_that_is_not_committed_is_nowhere(version):
    """Discarded, it leaves nothing; before that, it is only in work/."""
    writer = ShardWriter(version.work_folder("x"), (2,), version.dtype)
    writer.append([item("a")], np.zeros((3, 2), np.float32), [3])
    assert version.shard_names() == []
    writer.discard()
    assert list((version.path / "work").iterdir()) == []


@pytest.mark.parametrize("values", [np.zeros((3, 2)), np.zeros((3, 3), np.float32), np.zeros((2, 2), np.float32)])
def test_a_shard_takes_only_what_the_version_holds(version, values):
    """Another dtype, another shape, another number of frames: the extractor's fault, told as such."""
    writer = ShardWriter(version.work_folder("x"), (2,), version.dtype)
    with pytest.raises(ExtractorError, match="float32"):
        writer.append([item("a")], values, [3])
    writer.discard()


def test_a_shard_without_side_arrays_is_what_it_was_in_0_1_0(version):
    """Every file of it and of its version, byte for byte: whoever upgrades extracts nothing again."""
    shard = write(version, [item("a"), item("b", 2, start=0.5, channel=1)], run="20260101")
    digest = hashlib.sha256()
    for path in sorted(path for path in version.path.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(version.path)}\n".encode() + path.read_bytes())
    assert shard.name == "694c700d8038"
    assert digest.hexdigest() == "a3ddcdccd6672c9d91c0f578515227dd3cadf0f471b03e36f3bfa04aeb45e235"


# Side arrays


def side_of(counts, first: int = 0) -> dict:
    """Data of both side arrays: so many entries for each item, counted up from `first`; of marks one more."""
    more = [count + 1 for count in counts]
    scales = np.arange(first, first + sum(counts), dtype=np.float32)
    marks = np.arange(first, first + 2 * sum(more), dtype=np.uint16).reshape(-1, 2)
    return {"scales": (scales, counts), "marks": (marks, more)}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(0, 6))
def test_a_shard_keeps_its_side_arrays(counts, split):
    """Appended at once or in two parts, with as many entries as there are, or none; and stock Zarr reads them."""
    with scratch_folder() as folder:
        version = Version.create(folder, SIDED)
        spec = version.info.spec
        writer = ShardWriter(version.work_folder("x"), spec.item_shape, version.dtype, spec.side)
        expected = {"scales": [], "marks": []}
        for part in (range(len(counts))[:split], range(len(counts))[split:]):
            data = side_of([counts[number] for number in part], 100 * len(part))
            items = [item(f"utt-{number}", 1) for number in part]
            writer.append(items, np.zeros((len(part), 2), np.float32), [1] * len(part), data)
            for name, (entries, each) in data.items():
                expected[name] += np.split(entries.copy(), np.cumsum(each))[:-1]
                entries[...] = 0  # the buffer is used again
        name = writer.commit(version.path / "shards", sample_rate=16000, row=0, supersedes={}, made_by={})
        shard = version.shard(name)
        assert problems(version, shard) == []
        group = zarr.open_group(shard.folder, mode="r")
        for spec in SIDE:
            for check in (False, True):
                side = shard.side(spec.name, check)
                assert side.entries.dtype == spec.dtype
                assert not side.entries.flags.writeable
                for number, entries in enumerate(expected[spec.name]):
                    assert side.item(number).shape == entries.shape
                    assert (side.item(number) == entries).all()
            assert (group[f"side_{spec.name}"][...] == np.concatenate(expected[spec.name])).all()
            assert group[f"side_{spec.name}_offsets"].dtype == np.uint64
            assert group[f"side_{spec.name}_offsets"].shape == (len(counts) + 1,)


def test_side_arrays_do_not_rename_a_shard(scratch):
    """Its name is that of its items, as ever."""
    plain, sided = Version.create(scratch / "plain", INFO), Version.create(scratch / "sided", SIDED)
    assert write(plain, [item("a")]).name == write(sided, [item("a")], side=side_of([2])).name


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ({}, "side arrays are none; this version's are marks, scales"),
        ({"scales": side_of([1])["scales"]}, "side arrays are scales; this version's are marks, scales"),
        (side_of([1, 1]), r"side array scales has \[1, 1\] entries for 1 items"),
        (side_of([1]) | {"scales": (np.zeros(0, np.float32), [-1])}, "-1"),
        (side_of([1]) | {"scales": (np.zeros(2, np.float32), [1])}, r"float32 \[2\]; this version's is float32 \[1\]"),
        (side_of([1]) | {"scales": (np.zeros(1), [1])}, r"scales is float64 \[1\]; this version's is float32 \[1\]"),
        (side_of([1]) | {"marks": (np.zeros((1, 3), np.uint16), [1])}, r"marks is uint16 \[1, 3\].*\[1, 2\]"),
    ],
)
def test_a_shard_takes_only_the_side_arrays_of_its_version(scratch, side, words):
    """Told as the extractor's fault; and nothing of the call has been added."""
    version = Version.create(scratch, SIDED)
    writer = ShardWriter(version.work_folder("x"), (2,), version.dtype, SIDE)
    with pytest.raises(ExtractorError, match=words):
        writer.append([item("a")], np.zeros((3, 2), np.float32), [3], side)
    assert (writer.items, writer.num_bytes) == (0, 0)
    writer.discard()
    plain = ShardWriter(version.work_folder("x"), (2,), version.dtype)
    with pytest.raises(ExtractorError, match="this version's are none"):
        plain.append([item("a")], np.zeros((3, 2), np.float32), [3], side_of([1]))
    plain.discard()


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ([SideSpec("Scales", (), "float32", "")], "'Scales'"),
        ([SideSpec("../x", (), "float32", "")], "'../x'"),
        ([SideSpec("x", (), "complex64", "")], "complex64"),
        ([SideSpec("x", (2, 0), "float32", "")], r"\[2, 0\]"),
        ([SideSpec("x", (), "float32", ""), SideSpec("x_offsets", (), "float32", "")], "x, x_offsets"),
    ],
)
def test_a_version_is_not_made_for_side_arrays_that_cannot_be_stored(scratch, side, words):
    """What an extractor declares is held against the format before anything is written."""
    with pytest.raises(ExtractorError, match=words):
        Version.create(scratch, replace(INFO, spec=replace(SPEC, side=tuple(side))))
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("values", [[0, 2, 1, 3], [1, 1, 2, 3], [0, 1, 2, 2], [0, 1, 2, 4]])
def test_side_offsets_that_make_no_sense_are_found(scratch, values):
    """Sound bytes, wrong content: they may stand still, but not fall, and they span all entries."""
    version = Version.create(scratch, SIDED)
    shard = write(version, [item(name) for name in "abc"], side=side_of([0, 3, 0]))
    assert problems(version, shard) == []
    writer = zarr3.ChunkWriter(shard.folder / "side_scales_offsets" / "c" / "0")
    writer.append(np.array(values, np.uint64))
    writer.close()
    assert problems(version, shard) == ["offsets"]


def test_values_that_make_no_sense_are_found(version):
    """NaN, frames that the audio does not give, and an id that is there twice: sound bytes, wrong content."""
    values = np.zeros((6, 2), np.float32)
    values[4, 1] = np.nan
    assert problems(version, write(version, [item("a"), item("b")], values)) == ["non_finite"]
    values[4, 1] = -np.inf
    assert problems(version, write(version, [item("c"), item("d")], values)) == ["non_finite"]
    long = item("e", frames=3, num_samples=3 * 160)
    writer = ShardWriter(version.work_folder("x"), (2,), version.dtype)
    writer.append([replace(long, num_samples=16000)], np.zeros((3, 2), np.float32), [3])
    name = writer.commit(version.path / "shards", sample_rate=16000, row=0, supersedes={}, made_by={})
    assert problems(version, version.shard(name)) == ["frames"]
    assert problems(version, write(version, [item("f"), item("f", path="g.wav")])) == ["ids"]


# Versions


def test_a_version_is_found_again(scratch):
    """By its folder, by its cache, by its name; and it says what it is."""
    made = Version.create(scratch, INFO)
    assert made.path == scratch / "mine-0123456789ab"
    assert Version.create(scratch, INFO).info == made.info == INFO
    assert version_folders(scratch) == version_folders(made.path) == [made.path]
    assert select_version(scratch, "mine").path == made.path
    assert select_version(scratch, "mine-0123456789ab").path == made.path
    group = zarr.open_group(made.path, mode="r")
    assert list(group["shards"].group_keys()) == []
    assert group.attrs["featcache"]["format"] == 1


def test_a_version_says_what_its_side_arrays_are(scratch):
    """They come back as they went in; where there are none, nothing is said of them."""
    assert Version.create(scratch, SIDED).info == SIDED
    assert (
        "side"
        not in json.loads((Version.create(scratch / "b", INFO).path / "zarr.json").read_text())["attributes"][
            "featcache"
        ]["spec"]
    )


def test_what_a_kill_left_of_a_version_goes_when_it_is_old(scratch):
    """With the next version that is opened for writing; what another process may be at work on stays."""
    old, young = scratch / ".mine-0123456789ab.00ff00ff", scratch / ".mine-0123456789ab.11ff00ff"
    others = [scratch / ".mine-0123456789ab", scratch / ".snapshot", scratch / "mine-0123456789ab.00ff00ff"]
    for folder in (old, young, *others):
        (folder / "shards").mkdir(parents=True)
        if folder != young:
            os.utime(folder, (time.time() - 7200,) * 2)
    for _ in range(2):
        path = Version.create(scratch, INFO).path
        assert sorted(scratch.iterdir()) == sorted([path, young, *others])
    os.utime(young, (time.time() - 7200,) * 2)
    Version.create(scratch, INFO)
    assert not young.exists()


def test_several_versions_of_a_name_are_told_apart(scratch):
    """Asked for the name alone, it says how they differ."""
    Version.create(scratch, replace(INFO, config={"params": {"low_freq": 20.0, "bins": 80}}))
    Version.create(scratch, replace(INFO, fingerprint="f" * 64, config={"params": {"low_freq": 0.0, "bins": 80}}))
    with pytest.raises(StoreError, match=r"2 versions.*params.low_freq: 20.0 -> 0.0"):
        select_version(scratch, "mine")
    assert select_version(scratch, "mine-ffffffffffff").info.fingerprint == "f" * 64
    with pytest.raises(StoreError, match="no version called 'yours'; it holds mine-"):
        select_version(scratch, "yours")


def test_damage_to_one_version_does_not_hide_another(scratch):
    """Whoever asks for a version by name gets it."""
    Version.create(scratch, INFO)
    other = Version.create(scratch, replace(INFO, name="other"))
    (other.path / "zarr.json").write_text("{}")
    assert select_version(scratch, "mine").info == INFO
    for name in (None, "other", other.path.name):
        with pytest.raises(DamagedError):
            select_versions(scratch, name)


def test_what_is_no_cache_is_said_to_be_none(scratch):
    """A folder that is not there, a file, an empty folder."""
    (scratch / "file").write_text("")
    for path, words in (
        (scratch / "gone", "no such cache"),
        (scratch / "file", "no such cache"),
        (scratch, "no version"),
    ):
        with pytest.raises(StoreError, match=words):
            version_folders(path)


def test_a_version_of_a_newer_format_is_refused(scratch):
    """With the way out."""
    made = Version.create(scratch, INFO)
    attributes = zarr3.read_group(made.path)
    (made.path / "zarr.json").write_bytes(zarr3.group_metadata({**attributes, "format": 2, "news": True}))
    with pytest.raises(StoreError, match="has format 2; this featcache reads format 1: upgrade it"):
        Version.open(made.path)


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2)) | st.integers(0, 2)
    )
)
def test_configs_differ_from_themselves_in_nothing(config):
    """And from others in what differs."""
    assert differing_keys(config, config) == []
    assert differing_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c: 2 -> 3"]


IN_ANOTHER_PROCESS = """
import sys, time
from pathlib import Path
from test_store import INFO, Claim, Version
{}
"""


def elsewhere(code: str, *args) -> subprocess.Popen:
    """Run code in another process, which prints a line when it is ready and ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-c", IN_ANOTHER_PROCESS.format(code), *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )


def test_two_processes_create_one_version(scratch):
    """Started at the same instant, in a cache that is not there yet: both get it, and nothing else is left."""
    code = "print(flush=True); sys.stdin.read(); print(Version.create(Path(sys.argv[1]), INFO).path)"
    processes = [elsewhere(code, scratch / "cache") for _ in range(3)]
    for process in processes:
        process.stdout.readline()
    outputs = [process.communicate()[0] for process in processes]
    assert {output.strip() for output in outputs} == {str(scratch / "cache" / "mine-0123456789ab")}
    assert [path.name for path in (scratch / "cache").iterdir()] == ["mine-0123456789ab"]
    assert Version.open(scratch / "cache" / "mine-0123456789ab").info == INFO


# Claims


def test_a_claim_is_one_processs(scratch):
    """Another process does not get it, until it is released or its holder is dead."""
    code = "claim = Claim(Path(sys.argv[1])); print(claim.take(wait=True), flush=True); sys.stdin.read()"
    ours = Claim(scratch / "x.lock")
    assert ours.take()
    assert ours.locked
    waiting = elsewhere(code, scratch / "x.lock")
    again = Claim(scratch / "x.lock")
    assert not again.take()
    ours.release()
    assert waiting.stdout.readline() == "True\n"
    assert not again.take()
    waiting.kill()
    waiting.communicate()
    assert again.take()
    again.release()
    assert not (scratch / "x.lock").exists()


def test_a_claim_of_a_file_that_was_removed_is_none(scratch):
    """Many threads take and release it, and no two ever hold it together."""
    held, most, taken = [0], [0], [0]

    def work():
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            claim = Claim(scratch / "x.lock")
            if claim.take():
                held[0] += 1
                taken[0] += 1
                most[0] = max(most[0], held[0])
                time.sleep(0.0002)
                held[0] -= 1
                claim.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert taken[0] > 50
    assert most[0] == 1


def test_where_there_are_no_locks_every_claim_succeeds(scratch, monkeypatch):
    """Two runs may then do the same shard, and neither sweeps what it cannot know to be dead."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    version = Version.create(scratch, INFO)
    one, other = version.claim("x"), version.claim("x")
    assert one.take()
    assert other.take()
    assert not one.locked
    left = version.work_folder("y")
    left.mkdir()
    version.sweep()
    assert left.is_dir()


def test_a_sweep_takes_what_nobody_claims(version):
    """What a killed run left goes; what a living one writes stays."""
    dead, living = version.work_folder("dead"), version.work_folder("living")
    for folder in (dead, living):
        (folder / "features").mkdir(parents=True)
    (version.path / "work" / "dead.lock").write_text("")
    with version.claim("living") as claim:
        assert claim.take()
        version.sweep()
        assert not dead.exists()
        assert living.is_dir()
        assert [path.name for path in (version.path / "work").glob("*.lock")] == ["living.lock"]
    version.sweep()
    assert list((version.path / "work").iterdir()) == []


def test_folders_that_are_no_shards_are_left_alone(version):
    """Snapshots of the file system, a copy put aside: they lie among the shards and are none."""
    shard = write(version, [item("a")])
    for name in (".snapshot", "lost+found", f"{shard.name}.bak", f".nfs{shard.name}", shard.name.upper() + "x"):
        (version.path / "shards" / name).mkdir()
    (version.path / "shards" / "0123456789ab").write_text("a file")
    assert version.shard_names() == [shard.name]
    assert list(open_index(version).ids) == ["a"]


def test_a_damaged_column_never_gets_into_an_index(version):
    """What is read to build it is held against its checksum: no id that nobody gave, no shifted offset."""
    shard = write(version, [item("a"), item("b")])
    for name in ("ids", "id_offsets", "offsets", "paths", "path_offsets", "segments", "channels"):
        path = next((shard.folder / name / "c").rglob("0*/0" if name == "segments" else "0"))
        data = path.read_bytes()
        path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        with pytest.raises(DamagedError, match=name):
            open_index(version)
        path.write_bytes(data)
    assert list(open_index(version).ids) == ["a", "b"]


# The index


def test_the_index_knows_every_item(version):
    """In the order of the manifest's rows; by id; and what is not there."""
    write(version, [item("c"), item("d", 2)], row=2)
    write(version, [item("a", 1), item("b", 5)], row=0)
    index = open_index(version)
    assert list(index.ids) == ["a", "b", "c", "d"]
    assert index.num_frames.tolist() == [1, 5, 3, 2]
    assert index.find(Strings.of(["d", "nobody", "a"])).tolist() == [3, -1, 0]
    assert [index.find_one(id_) for id_ in ("d", "nobody", "a")] == [3, -1, 0]


@given(st.lists(st.text(min_size=1, max_size=5), unique=True, max_size=40), st.lists(st.text(max_size=5), max_size=20))
def test_ids_are_found_though_their_hashes_collide(ids, others):
    """With hashes of one bit, nearly all collide, and each id is found all the same."""
    ids = [id_ for id_ in ids if id_.isprintable()]
    others = [id_ for id_ in others if id_.isprintable()]
    strings = Strings.of(ids)
    every = build_index([])
    hashes = strings.hashes() & np.uint64(1)
    by_hash = np.argsort(hashes, kind="stable").astype(np.uint32)
    index = replace(every, ids=strings, id_hash=hashes[by_hash], by_hash=by_hash)
    wanted = Strings.of([*ids, *others])
    original = Strings.hashes
    try:
        Strings.hashes = lambda self: original(self) & np.uint64(1)
        found = index.find(wanted)
    finally:
        Strings.hashes = original
    assert found.tolist() == [ids.index(id_) if id_ in ids else -1 for id_ in wanted]


def test_the_index_on_disk_is_the_one_that_is_built(version):
    """Kept once, found again, and another one when there is another shard."""
    write(version, [item("a")], row=0)
    first = open_index(version)
    (folder,) = (version.path / "index").iterdir()
    age = folder.stat().st_mtime_ns
    assert open_index(version).ids == first.ids
    assert folder.stat().st_mtime_ns == age
    write(version, [item("b")], row=1)
    assert list(open_index(version).ids) == ["a", "b"]
    assert len(list((version.path / "index").iterdir())) == 2
    for number in range(5):
        write(version, [item(f"x{number}")], row=2 + number)
        open_index(version)
    assert len(list((version.path / "index").iterdir())) <= 3  # the latest few stay, for who has them mapped


def test_what_is_superseded_is_not_in_the_index(version):
    """The chain ends at the latest item, also where a shard in the middle is gone."""
    first = write(version, [item("a", 1), item("b", 1)], row=0, run="1")
    second = write(version, [item("b", 2, start=1.0)], row=1, supersedes={first.name: [1]}, run="2")
    write(version, [item("b", 3, start=2.0)], row=1, supersedes={second.name: [0]}, run="3")
    index = open_index(version)
    assert list(zip(index.ids, index.num_frames.tolist(), strict=True)) == [("a", 1), ("b", 3)]
    assert find_repeats(map(version.shard, version.shard_names())) == []
    second.folder.rename(version.path / "aside")
    index = open_index(version)
    assert list(zip(index.ids, index.num_frames.tolist(), strict=True)) == [("a", 1), ("b", 3)]


@pytest.mark.parametrize("rows", [(0, 5), (5, 0), (3, 3)])
def test_of_an_id_that_two_runs_extracted_the_later_counts(version, rows):
    """Whatever rows it had in their manifests; alike it merely costs space, and unlike it is told."""
    early = write(version, [item("a", 1), item("b", 1)], row=rows[0], run="20260101")
    late = write(version, [item("c", 1), item("b", 2, mtime_ns=9)], row=rows[1], run="20260102")
    index = open_index(version)
    assert int(index.num_frames[index.find_one("b")]) == 2
    (repeat,) = find_repeats([early, late])
    assert (repeat.id, repeat.shards, repeat.alike) == ("b", (early.name, late.name), True)
    other = write(version, [item("b", 3, start=0.5)], row=1, run="20260103")
    assert [one.alike for one in find_repeats([early, late, other])] == [True, False]
    assert int(open_index(version).num_frames[open_index(version).find_one("b")]) == 3


# Runs and the ledger


def failure(id_: str, reason: str = "empty") -> Failure:
    return Failure(id_, f"{id_}.wav", None, 1.5, 0, reason, "what was seen", None, None)


def test_the_latest_record_of_an_utterance_counts(version):
    """Over all runs, in the order of time; a record torn by a kill is none."""
    first = Run(version, {"manifest": "a.csv"})
    first.fail([failure("a"), failure("b")])
    first.fail([])
    time.sleep(0.001)
    second = Run(version, {"manifest": "b.csv"})
    second.fail([failure("b", "truncated"), failure("c")])
    with (second.folder / "failures.jsonl").open("a") as file:
        file.write(json.dumps({"id": "a", "path": "a.w"})[:-3])
    found = latest_failures(version)
    assert {id_: one.reason for id_, one in found.items()} == {"a": "empty", "b": "truncated", "c": "empty"}
    assert found["c"] == failure("c")
    assert asked_of(version, first.id) == {"manifest": "a.csv"}
    (second.folder / "run.json").write_text("{")
    assert asked_of(version, second.id) == asked_of(version, "none") == {}


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True, min_size=1, max_size=5))
def test_the_ledger_keeps_any_text(names):
    """Ids, paths and messages of whatever characters, one record a line."""
    failures = [replace(failure(name), path=name, message=name) for name in names]
    with scratch_folder() as folder:
        version = Version.create(folder, INFO)
        Run(version, {}).fail(failures)
        assert latest_failures(version) == {one.id: one for one in failures}


def test_what_probes_found_comes_back_in_the_order_of_time(version):
    """Documents of any form; the store does not ask what is in them."""
    assert version.probes() == []
    documents = [{"device": "cpu", "checksum": "00000000"}, {}, {"policies": [{"name": "pädded \udc80", "wrong": 0.5}]}]
    for document in documents:
        version.write_probe(document)
        time.sleep(0.001)
    assert Version.open(version.path).probes() == documents
    assert len(list((version.path / "probes").iterdir())) == 3
    with pytest.raises(ValueError, match="JSON"):
        version.write_probe({"largest": math.nan})
    assert version.probes() == documents


def test_a_probe_that_is_damaged_is_left_out(version):
    """A flipped bit in any byte of it, half a file, another file, a folder: the others count."""
    version.write_probe({"wrong": 0.25, "policy": "padded"})
    (path,) = (version.path / "probes").iterdir()
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        assert version.probes() == []
        path.write_bytes(data[:at])
        assert version.probes() == []
    path.write_bytes(data)
    for name, text in (("a.json", "[]"), ("b.json", '{"checksum": 1}'), (".c.json.12345678", "{}"), ("notes.txt", "")):
        (path.parent / name).write_text(text)
    (path.parent / "d.json").mkdir()
    assert version.probes() == [{"wrong": 0.25, "policy": "padded"}]
    assert version.shard_names() == []


def test_a_probe_that_cannot_be_written_is_one_clear_line(version):
    """Where, and why."""
    (version.path / "probes").write_text("")
    with pytest.raises(StoreError, match="probes: cannot be written: File exists"):
        version.write_probe({})


def test_a_run_says_what_came_of_it(version):
    """What was asked, when, and the outcome."""
    run = Run(version, {"threads": 2})
    run.finish({"extracted": 5})
    record = json.loads((run.folder / "run.json").read_text())
    assert record["asked"] == {"threads": 2}
    assert record["outcome"] == {"extracted": 5}
    assert record["started"] <= record["finished"]


def test_seconds_of_a_shard_are_those_of_its_audio(version):
    """What `info` adds up."""
    shard = write(version, [item("a", 100), item("b", 50)])
    assert math.isclose(shard.info.seconds, 1.5)


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=30))
def test_the_checksum_of_a_whole_follows_from_those_of_its_parts(parts):
    """As zlib's `crc32_combine`, for all parts at once."""
    crcs = np.array([zarr3.crc32c(np.frombuffer(part, np.uint8)) for part in parts], np.uint32)
    sizes = np.array([len(part) for part in parts], np.int64)
    assert combined_crc32c(crcs, sizes) == zarr3.crc32c(np.frombuffer(b"".join(parts), np.uint8))
