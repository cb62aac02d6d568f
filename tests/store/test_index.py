"""The index knows every item that counts, and is the one that the shards give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_shards import item, write

from featcache.errors import DamagedError
from featcache.store.index import build_index, open_index
from featcache.store.shard_items import ShardItems, find_duplicates
from featcache.strings import Strings


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strings, "hashes", lambda self: original(self) & np.uint64(1))
        found = index.find(wanted)
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
    assert find_duplicates(map(ShardItems.read, map(version.shard, version.shard_names()))) == []
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
    (duplicate,) = find_duplicates(map(ShardItems.read, [early, late]))
    assert (duplicate.id, duplicate.shards, duplicate.same_row) == ("b", (early.name, late.name), True)
    other = write(version, [item("b", 3, start=0.5)], row=1, run="20260103")
    assert [duplicate.same_row for duplicate in find_duplicates(map(ShardItems.read, [early, late, other]))] == [
        True,
        False,
    ]
    assert int(open_index(version).num_frames[open_index(version).find_one("b")]) == 3
