"""Whatever is wrong in an index, nothing wrong is read by it: it is built anew."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
from damage import flip
from make_cache import make_features, make_version
from small_shards import INFO, item, write

import featcache
from featcache.health.verify import verify
from featcache.store.checksums import crc32c
from featcache.store.documents import UNSEALED, seal
from featcache.store.index import Index, build_index, index_folder, load_index, open_index
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version

ARRAYS = ("shard", "item", "first_frame", "num_frames", "row_hash", "id_hash", "by_hash")
HEADER_BYTES = 128
"""Of each of the `.npy` files below."""


def same(index: Index, other: Index) -> bool:
    return (index.shards, index.ids) == (other.shards, other.ids) and all(
        np.array_equal(getattr(index, name), getattr(other, name)) for name in ARRAYS
    )


@pytest.fixture
def small(version) -> Version:
    """Three utterances in two shards, and their index."""
    write(version, [item("a", 2), item("b", 1)], row=0)
    write(version, [item("c", 3)], row=2)
    open_index(version)
    return version


def test_no_flipped_bit_of_an_index_is_believed(small):
    """Every bit of `index.json`, and of every array's file, header and all: not one is taken for an index."""
    names = small.shard_names()
    folder = index_folder(small, names)
    files = sorted(folder.iterdir())
    assert len(files) == 10
    believed = []
    for path in files:
        data = path.read_bytes()
        for bit in range(8 * len(data)):
            spoilt = bytearray(data)
            spoilt[bit // 8] ^= 1 << bit % 8
            path.write_bytes(spoilt)
            if load_index(small, names) is not None:
                believed.append((path.name, bit))
        path.write_bytes(data)
    assert believed == []
    assert same(load_index(small, names), build_index(map(small.shard, names)))


def test_nothing_fails_for_a_flipped_bit_of_an_index(small):
    """Opening gives what the shards say, and verify finds no damage."""
    names = small.shard_names()
    expected = build_index(map(small.shard, names))
    folder = index_folder(small, names)
    for path in sorted(folder.iterdir()):
        for at in np.linspace(0, min(path.stat().st_size, HEADER_BYTES) - 1, 3).astype(int).tolist():
            flip(path, at, at % 8)
            report = verify(small)
            assert report.problems == []
            (note,) = report.notes[-1:]
            assert note == f"{folder}: damaged: this index is built anew when the version is opened next"
            assert same(open_index(small), expected)
            assert load_index(small, names) is not None  # built anew, and kept


def test_an_index_whose_arrays_do_not_fit_together_is_not_believed(small):
    """Though all its checksums are right, as a faulty writer's would be."""
    names = small.shard_names()
    folder = index_folder(small, names)
    sound = load_index(small, names)
    two, three = np.uint32(2), np.uint32(3)
    for name, array in {
        "shard": np.array([0, 0, two], np.uint32),
        "by_hash": np.array([0, 1, three], np.uint32),
        "num_frames": sound.num_frames[:-1],
        "item": sound.item.astype(np.int64),
        "id_offsets": sound.ids.offsets + 1,
        "ids": sound.ids.blob[:-1],
    }.items():
        kept = (folder / f"{name}.npy").read_bytes()
        np.save(folder / f"{name}.npy", array)
        reseal(folder, name)
        assert load_index(small, names) is None
        (folder / f"{name}.npy").write_bytes(kept)
        reseal(folder, name)
        assert same(load_index(small, names), sound)


def test_an_index_whose_runs_are_no_names_is_not_believed(small):
    """Nor one that has another number of them than of shards."""
    names = small.shard_names()
    folder = index_folder(small, names)
    document = json.loads((folder / "index.json").read_text())
    for runs in ([1] * len(names), [""] * (len(names) + 1), 3):
        write_document(folder, {**document, "runs": runs})
        assert load_index(small, names) is None
    write_document(folder, document)
    assert load_index(small, names) is not None


def reseal(folder, name):
    """Have `index.json` say that the array's file is as it was written."""
    document = json.loads((folder / "index.json").read_text())
    data = np.frombuffer((folder / f"{name}.npy").read_bytes(), np.uint8)
    document["crc32c"][name] = f"{crc32c(data):08x}"
    write_document(folder, document)


def write_document(folder, document):
    (folder / "index.json").write_bytes(seal({**document, "checksum": UNSEALED}))


def test_the_index_of_another_version_is_not_believed(scratch):
    """Of one with the same shards' names and other frames: neither under its own name nor under this one's."""
    own, other = (Version.create(scratch, replace(INFO, fingerprint=digit * 64)) for digit in "ab")
    for version, frames in ((own, 2), (other, 3)):
        items = [item(name, frames, num_samples=480, size=7) for name in "xy"]
        values = np.arange(4 * frames, dtype=np.float32).reshape(-1, 2)
        write_frames(version, items, values, frames)
    assert own.shard_names() == other.shard_names()
    expected = open_index(own)
    foreign = open_index(other)
    assert foreign.first_frame.tolist() != expected.first_frame.tolist()
    theirs, ours = (index_folder(version, version.shard_names()) for version in (other, own))
    assert theirs.name != ours.name
    for copy in (own.path / "index" / theirs.name, ours):
        shutil.rmtree(own.path / "index")
        copy.parent.mkdir()
        shutil.copytree(theirs, copy)
        assert same(open_index(own), expected)
        assert same(open_index(own), expected)


def write_frames(version, items, values, frames):
    """Commit a shard of so many frames an item, whatever its samples say: the name does not depend on it."""
    writer = ShardWriter(version.work_folder("shard"), version.info.spec)
    writer.append(items, values, [frames] * len(items))
    made_by = {"fingerprint": version.info.fingerprint}
    writer.commit(version.path / "shards", sample_rate=16000, row=0, supersedes={}, made_by=made_by)


def test_indexes_of_earlier_versions_of_the_format_go(tmp_path):
    """They lie under other names, and are removed as old ones."""
    version = make_version(tmp_path, make_features(4))
    for number in range(5):
        (version.path / "index" / f"{number:012x}").mkdir(parents=True)
        os.utime(version.path / "index" / f"{number:012x}", (number, number))
    featcache.open(tmp_path)
    assert len(list((version.path / "index").iterdir())) == 3
