"""What runs over partitions of a manifest have recorded: what is missing is told, and what others made is not read."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scratch import scratch_folder
from small_shards import INFO, item, write

from featcache.store import partitions
from featcache.store.index import build_index, open_index
from featcache.store.ledger import Failure
from featcache.store.partitions import PartitionRows, index_of_partition, is_done, shards_to_make_up_for_in
from featcache.store.run_records import ShardEvent
from featcache.store.runs import Run
from featcache.store.unfinished import find_unfinished
from featcache.store.version import Version

ROWS = 12
DIGEST = "0123456789abcdef"
IDS = [f"u{row:02}" for row in range(ROWS)]


def partition(number: int, count: int, digest: str = DIGEST) -> PartitionRows:
    return PartitionRows(digest, number * ROWS // count, (number + 1) * ROWS // count, ROWS, number, count)


@dataclass
class Array:
    """A version that jobs of arrays fill, as `featcache extract --partition` does, but for the features."""

    version: Version

    def __post_init__(self):
        self.done = set()

    def run(self, number: int, count: int, most: int = ROWS, failing: int = 0, ending: str = "well") -> None:
        """A job that gets so far."""
        mine = partition(number, count)
        todo = [row for row in range(mine.first, mine.end) if row not in self.done]
        if not todo and is_done(self.version, mine):
            return
        asked = {"manifest": "m.csv", "root": "/", "utterances": ROWS, "new": len(todo), "replaced": 0, "only": False}
        run = Run(self.version, {**asked, "part": mine.document()})
        rows = todo if ending == "well" else todo[:most]
        bad, good = rows[:failing], rows[failing:]
        run.fail(Failure(id=IDS[row], path=f"{IDS[row]}.wav", reason="empty", message="") for row in bad)
        for row in good:
            shard = write(self.version, [item(IDS[row])], row=row, run=run.id)
            run.record_shards([ShardEvent(shard.name, 1)])
        self.done |= {*rows}
        if ending == "killed":
            run._lock.release()
        else:
            run.finish({"extracted": len(good), "failed": len(bad), "interrupted": ending == "stopped"})

    def found(self):
        return find_unfinished(self.version, open_index(self.version), all_runs=True)


endings = st.sampled_from(["well", "killed", "stopped"])
jobs = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(0, 4), st.integers(0, 1), endings),
    min_size=1,
    max_size=8,
)


@given(jobs)
def test_a_version_that_lacks_rows_is_never_accepted_and_parts_that_are_complete_make_it_whole(sequence):
    with scratch_folder() as folder:
        array = Array(Version.create(folder, INFO))
        for number, count, most, failing, ending in sequence:
            array.run(number % count, count, most, failing, ending)
        found = array.found()
        lacking = ROWS - len(array.done)
        assert not lacking or found
        if found:
            (finding,) = found
            assert finding.missing >= lacking
            assert finding.partitions
        for number in range(5):
            array.run(number, 5)
        assert array.found() == []


def test_another_manifest_has_parts_of_its_own(version):
    array = Array(version)
    array.run(0, 2)
    other = partition(1, 2, digest="f" * 16)
    assert not is_done(version, other)
    assert not other.is_apart_from(partition(0, 2))
    assert partition(1, 2).is_apart_from(partition(0, 2))
    assert not partition(1, 3).is_apart_from(partition(0, 2))


def test_what_other_parts_have_made_is_not_read(version, monkeypatch):
    """Nor what the latest index has."""
    array = Array(version)
    array.run(0, 4, most=2, ending="killed")
    array.run(3, 4)
    read = []
    shard_of = lambda self, name: read.append(name) or Version.shard_of(self, name)  # noqa: E731
    monkeypatch.setattr(partitions.Version, "shard", shard_of)
    monkeypatch.setattr(Version, "shard_of", lambda self, name: original(self, name), raising=False)
    assert sorted(index_of_partition(version, partition(0, 4)).ids) == IDS[:2]
    assert len(set(read)) == 2
    read.clear()
    assert len(index_of_partition(version, partition(1, 4))) == 0
    assert read == []
    open_index(version)
    array.run(2, 4)
    read.clear()
    index = index_of_partition(version, partition(0, 4))
    assert {*IDS[:2], *IDS[9:]} == {*index.ids}
    assert read == []


original = Version.shard


@pytest.mark.parametrize("seed", range(20))
def test_an_extended_index_has_the_items_of_one_that_is_built(version, seed):
    """Of shards in any order of runs, with items that others supersede, or that two runs have made."""
    chance = random.Random(seed)
    shards = []
    for number in range(6):
        names = chance.sample(IDS, 3)
        older = [(shard.name, i) for shard, members in shards for i, id_ in enumerate(members) if id_ in names]
        supersedes: dict[str, list[int]] = {}
        for name, i in older if chance.random() < 0.5 else ():
            supersedes.setdefault(name, []).append(i)
        run = f"20260101T00000{number}.000000Z-0000"
        items = [item(id_, frames=1 + number) for id_ in names]
        shards.append((write(version, items, row=number, run=run, supersedes=supersedes), names))
    all_shards = [shard for shard, _ in shards]
    whole = build_index(all_shards)
    for cut in range(len(all_shards) + 1):
        both = partitions.extend_index(version, build_index(all_shards[:cut]), build_index(all_shards[cut:]))
        assert {id_: both.place(both.find_one(id_)) for id_ in both.ids} == {
            id_: whole.place(whole.find_one(id_)) for id_ in whole.ids
        }
        assert len(both) == len(whole)


def test_what_workers_have_made_of_a_part_is_the_part_s(version, monkeypatch):
    """Their records name the run that they work for."""
    mine, other = partition(0, 2), partition(1, 2)
    made = {}
    for which in (mine, other):
        asked = {"manifest": "m.csv", "root": "/", "utterances": ROWS, "new": ROWS // 2, "replaced": 0, "only": False}
        run = Run(version, {**asked, "part": which.document()})
        worker = Run(version, {"manifest": "m.csv", "root": "/", "only": True, "part_of": run.id}, after=[run.id])
        shard = write(
            version, [item(IDS[row]) for row in range(which.first, which.end)], row=which.first, run=worker.id
        )
        worker.record_shards([ShardEvent(shard.name, ROWS // 2)])
        made[which] = shard.name
        for one in (worker, run):
            one.finish({"extracted": ROWS // 2, "failed": 0, "interrupted": False})
    read = []
    monkeypatch.setattr(partitions, "build_index", lambda shards: build_index(read.append(s) or s for s in shards))
    index_of_partition(version, mine)
    assert [shard.name for shard in read] == [made[mine]]
    assert shards_to_make_up_for_in(version, mine) == []
    shutil.rmtree(version.path / "shards" / made[mine])
    assert [event.shard for event in shards_to_make_up_for_in(version, mine)] == [made[mine]]
    assert shards_to_make_up_for_in(version, other) == []
