"""Which items of damaged shards are sound, and what a shard of just these is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from cache_contents import check
from damage import CHUNKS, DECODERS, flip
from small_shards import SIDE, SIDED, item, write

from featcache.errors import DamagedError
from featcache.store.check import check_shard
from featcache.store.damaged import DamagedShard, RepairPlan, copy_sound_items, plan_repairs
from featcache.store.index import open_index
from featcache.store.shard import Shard
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version

FEATURES = CHUNKS["features"]
ITEM_BYTES = 3 * 2 * 4
"""Of each of the items below."""


def items_of(name: str, count: int = 5) -> list:
    return [
        item(f"{name}-{number}", start=0.25 * number, duration=0.1, channel=number % 2, by_ffmpeg=number == 3)
        for number in range(count)
    ]


def spoil_item(shard: Shard, number: int) -> None:
    flip(shard.folder / FEATURES, number * ITEM_BYTES + 7)


def only(version: Version, *shards: Shard) -> RepairPlan:
    (found,) = plan_repairs(version, [shard.name for shard in shards])
    return found


@pytest.fixture
def shard(version) -> Shard:
    """The first of two shards of five items."""
    first = write(version, items_of("a"), run="1", row=3)
    write(version, items_of("b"), run="1", row=8)
    return first


def test_a_shard_of_the_sound_items_is_what_the_damaged_one_was(version, shard):
    """Its items, features, checksums, place in the order and provenance; what it takes the place of is written down."""
    expected = list(shard.items([0, 2, 4]))
    features = [shard.features[3 * number : 3 * number + 3].tobytes() for number in (0, 2, 4)]
    checksums = shard.column("crc32c")[[0, 2, 4]]
    for number in (1, 3):
        spoil_item(shard, number)
    found = only(version, shard)
    assert (found.kept, [*found.again]) == ([0, 2, 4], ["a-1", "a-3"])
    kept = version.shard(copy_sound_items(version, found.shard, found.kept).name)
    assert list(kept.items()) == expected
    assert [kept.features[3 * number : 3 * number + 3].tobytes() for number in range(3)] == features
    assert np.array_equal(kept.column("crc32c"), checksums)
    made_by = {"run": "1", "fingerprint": version.info.fingerprint}
    assert (kept.info.row, kept.info.made_by, kept.info.seconds) == (3, made_by, 0.09)
    assert kept.info.supersedes == {shard.name: [0, 2, 4]}
    assert list(check_shard(kept, version.info.spec)) == []
    # Until the damaged one is removed, both are there: the new one's count, and just the damaged are left of the other.
    index = open_index(version)
    assert len(index) == 10
    again = only(version, shard)
    assert (again.kept, [*again.again]) == ([], ["a-1", "a-3"])
    shutil.rmtree(shard.folder)
    assert len(open_index(version)) == 8
    assert check(version.path.parent).problems == []


def test_it_is_made_once_however_often(version, shard):
    """Killed and begun again, or twice at once: the same name, and nothing is left in `work/`."""
    spoil_item(shard, 0)
    found = only(version, shard)
    assert copy_sound_items(version, found.shard, found.kept) == copy_sound_items(version, found.shard, found.kept)
    assert not list((version.path / "work").iterdir())


def test_what_the_damaged_shard_had_replaced_stays_replaced(version, shard):
    """Where that is still there; and what others have replaced of it is not kept."""
    newer = write(version, items_of("a")[:2], run="2", supersedes={shard.name: [0, 1], "0123456789ab": [7]})
    newest = write(version, items_of("a")[1:2], run="3", supersedes={newer.name: [1]})
    flip(newer.folder / FEATURES, 2 * ITEM_BYTES)  # the checksum of all
    found = only(version, newer)
    assert (found.kept, [*found.again]) == ([0], [])
    kept = version.shard(copy_sound_items(version, found.shard, found.kept).name)
    assert kept.info.supersedes == {shard.name: [0, 1], newer.name: [0]}
    shutil.rmtree(newer.folder)
    index = open_index(version)
    where = {id_: index.shards[number] for id_, number in zip(index.ids, index.shard.tolist(), strict=True)}
    assert (where["a-0"], where["a-1"], where["a-2"]) == (kept.name, newest.name, shard.name)


def test_of_an_utterance_in_two_shards_the_item_that_does_not_count_is_left_out(version, shard):
    """Two runs had another row for it: `verify` calls that damage, and nothing has to be extracted."""
    later = write(version, [item("a-1", path="other.wav"), item("c-1")], run="2")
    (problem,) = check(version.path.parent).problems
    assert (problem.kind, problem.shard) == ("duplicate", shard.name)
    found = only(version, shard)
    assert (found.kept, [*found.again]) == ([0, 2, 3, 4], [])
    copy_sound_items(version, found.shard, found.kept)
    shutil.rmtree(shard.folder)
    assert check(version.path.parent).problems == []
    index = open_index(version)
    assert index.shards[index.shard[index.find_one("a-1")]] == later.name


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("column", [name for name in [*CHUNKS, "decoders"] if name != "features"])
def test_where_a_column_is_damaged_nothing_is_kept(version, shard, column, with_index):
    """Which utterances there were, the index knows, or the shard's ids."""
    if with_index:
        open_index(version)
    flip(shard.folder / CHUNKS.get(column, DECODERS), 1)
    found = only(version, shard)
    assert found.kept == []
    if with_index or column not in ("ids", "id_offsets"):
        assert [*found.again] == [f"a-{number}" for number in range(5)]
    else:
        assert found.again is None


def test_columns_of_another_shard_are_not_believed(version, shard):
    """Each is sound in itself, and of the right size: but the shard's name says what its items are."""
    other = next(version.shard(name) for name in version.shard_names() if name != shard.name)
    assert list(check_shard(shard, version.info.spec)) == []
    shutil.copy(other.folder / CHUNKS["ids"], shard.folder / CHUNKS["ids"])
    flip(shard.folder / FEATURES, 0)
    open_index(version)
    assert only(version, shard).kept == []
    with pytest.raises(DamagedError, match="items of another shard"):
        DamagedShard(shard.folder, version.info.fingerprint, version.info.spec).check()


def test_a_shard_under_another_name_is_not_believed(version, shard):
    moved = shard.folder.rename(shard.folder.with_name("0" * 12))
    assert only(version, version.shard(moved.name)).kept == []


def test_what_is_whole_and_makes_no_sense_is_not_kept(version):
    """NaN, and frames that are too many for their audio: `verify` calls them damaged."""
    items, counts = items_of("a", 4), [3, 3, 40, 3]
    values = np.ones((sum(counts), 2), np.float32)
    values[4] = np.nan
    writer = ShardWriter(version.work_folder("odd"), version.info.spec)
    writer.append(items, values, counts)
    name = writer.commit(version.path / "shards", sample_rate=16000, row=0, supersedes={}, made_by={})
    assert {problem.id for problem in check_shard(version.shard(name), version.info.spec)} == {"a-2"}
    found = only(version, version.shard(name))
    assert (found.kept, [*found.again]) == ([0, 3], ["a-1", "a-2"])


def test_side_arrays_go_with_their_items(scratch):
    """Also where an item has no entry, and where none has."""
    version = Version.create(scratch, SIDED)
    counts = {"scales": [1, 0, 2, 0, 3], "marks": [0, 0, 0, 0, 0]}
    entries = {"scales": np.arange(6, dtype=np.float32), "marks": np.empty((0, 2), np.uint16)}
    shard = write(version, items_of("a"), side={name: (entries[name], counts[name]) for name in entries})
    expected = {side.name: [shard.side(side.name).item(number).tolist() for number in (0, 1, 4)] for side in SIDE}
    for number in (2, 3):
        spoil_item(shard, number)
    found = only(version, shard)
    kept = version.shard(copy_sound_items(version, found.shard, found.kept).name)
    assert {
        side.name: [kept.side(side.name, check=True).item(i).tolist() for i in range(3)] for side in SIDE
    } == expected
    assert list(check_shard(kept, version.info.spec)) == []
    flip(shard.folder / "side_scales" / "c" / "0", 2)  # whose entry that was, nothing tells
    assert only(version, shard).kept == []


def test_what_flips_while_it_is_copied_is_not_kept(version, shard):
    """A disk that is failing: nothing is committed, and nothing is left in `work/`."""
    flip(shard.folder / "offsets" / "zarr.json", 0)
    found = only(version, shard)
    assert found.kept == [0, 1, 2, 3, 4]
    before = version.shard_names()
    spoil_item(shard, 3)
    with pytest.raises(DamagedError, match="a-3 was intact before and is damaged now"):
        copy_sound_items(version, found.shard, found.kept)
    assert version.shard_names() == before
    assert not list((version.path / "work").iterdir())


def test_a_shard_that_is_gone_by_now_is_left_out(version, shard):
    assert plan_repairs(version, ["0123456789ab"]) == []
    spoil_item(shard, 0)
    assert plan_repairs(version, [shard.name], stopped=lambda: True) == []
