"""A shard keeps what it was given, appears whole, and takes only what its version holds."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from scratch import scratch_folder
from small_shards import DTYPES, INFO, SIDE, SIDED, SPEC, item, problems, write

from featcache.errors import ExtractorError
from featcache.spec import SideSpec
from featcache.store import zarr3
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version

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
    unique_by=lambda item: item.id,
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
                                       "path_offsets", "segments", "channels", "sources", "source_hashes"}  # fmt: skip


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
    writer = ShardWriter(version.work_folder("x"), version.info.spec)
    writer.append([item("a")], np.zeros((3, 2), np.float32), [3])
    assert version.shard_names() == []
    writer.discard()
    assert list((version.path / "work").iterdir()) == []


@pytest.mark.parametrize("values", [np.zeros((3, 2)), np.zeros((3, 3), np.float32), np.zeros((2, 2), np.float32)])
def test_a_shard_takes_only_what_the_version_holds(version, values):
    """Another dtype, another shape, another number of frames: the extractor's fault, told as such."""
    writer = ShardWriter(version.work_folder("x"), version.info.spec)
    with pytest.raises(ExtractorError, match="float32"):
        writer.append([item("a")], values, [3])
    writer.discard()


def test_a_shard_has_the_name_and_the_values_that_it_had_in_0_1_0(version):
    """Byte for byte: whoever upgrades extracts nothing again, and an older featcache extends what a newer one began."""
    items = [item("a", content_hash=7), item("b", 2, start=0.5, channel=1)]
    shard = write(version, items, run="20260101")
    digest = hashlib.sha256()
    for path in sorted(path for path in shard.folder.glob("*/c/**/*") if path.is_file()):
        if path.relative_to(shard.folder).parts[0] != "source_hashes":
            digest.update(f"{path.relative_to(shard.folder)}\n".encode() + path.read_bytes())
    assert shard.name == "694c700d8038"
    assert digest.hexdigest() == "86f12334d251e04afb713c538bad4439d230466a49711fa5094c74f95007de61"


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
        writer = ShardWriter(version.work_folder("x"), spec)
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
    writer = ShardWriter(version.work_folder("x"), version.info.spec)
    with pytest.raises(ExtractorError, match=words):
        writer.append([item("a")], np.zeros((3, 2), np.float32), [3], side)
    assert (writer.items, writer.num_bytes) == (0, 0)
    writer.discard()
    plain = ShardWriter(version.work_folder("x"), SPEC)
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
    writer = ShardWriter(version.work_folder("x"), version.info.spec)
    writer.append([replace(long, num_samples=16000)], np.zeros((3, 2), np.float32), [3])
    name = writer.commit(version.path / "shards", sample_rate=16000, row=0, supersedes={}, made_by={})
    assert problems(version, version.shard(name)) == ["frames"]
    assert problems(version, write(version, [item("f"), item("f", path="g.wav")])) == ["ids"]


def test_seconds_of_a_shard_are_those_of_its_audio(version):
    """What `info` adds up."""
    shard = write(version, [item("a", 100), item("b", 50)])
    assert math.isclose(shard.info.seconds, 1.5)
