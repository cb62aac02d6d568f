"""The plan: what a version lacks of a manifest, cut into shard tasks. Pure, so it is
tested with made-up tables."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.extraction.tasks import MAX_ITEMS, shard_ranges, shard_tasks, want
from featcache.format.group import Table
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest
from featcache.version.index import COLUMNS, Index, ShardSummary
from featcache.version.indexing import index_of
from featcache.version.join import RowKeys, join
from featcache.version.ledger import Failure, by_row
from featcache.version.wanted import Wanted

SECONDS = st.one_of(st.floats(0.01, 40), st.sampled_from([1e-9, 3600.0, 1e12, 1e300]))
ROWS = st.lists(SECONDS, min_size=1, max_size=60)


def table(durations, ids=None, starts=None) -> Manifest:
    count = len(durations)
    names = [f"id-{i}" for i in range(count)] if ids is None else ids
    return Manifest(
        source="made up",
        root=Path("/"),
        ids=Strings.of(names),
        paths=Strings.of(f"{name}.wav" for name in names),
        start=np.full(count, np.nan) if starts is None else np.array(starts, np.float64),
        duration=np.array(durations, np.float64),
        channel=np.full(count, -1, np.int32),
        values={},
    )


def keys_of(manifest: Manifest) -> np.ndarray:
    hashes = manifest.hashes()
    return np.stack([manifest.ids.hashes(), hashes, np.zeros_like(hashes)])


def holding(manifest: Manifest, rows) -> Index:
    """The index of a version that holds some rows of a manifest, all of them in one shard."""
    rows = np.array(sorted(rows), np.int64)
    id_hash, row_hash, _ = keys_of(manifest.take(rows))
    by_id = np.argsort(id_hash, kind="stable")
    ids = [*manifest.ids.take(rows)]
    columns = {
        "shard": np.zeros(len(rows), np.uint64),
        "item": np.arange(len(rows), dtype=np.uint64),
        "first_frame": np.arange(len(rows), dtype=np.uint64),
        "num_frames": np.ones(len(rows), np.uint64),
        "generation": np.ones(len(rows), np.uint64),
        "row_hash": row_hash,
        "sorted_id_hash": id_hash[by_id],
        "by_id_hash": by_id.astype(np.uint64),
        "id_offset": np.cumsum([0, *map(len, ids)]).astype(np.uint64),
    }
    table = Table.of(columns, COLUMNS, np.frombuffer("".join(ids).encode(), np.uint8))
    return Index([ShardSummary("0" * 16, 0, len(rows), len(rows), 1.0, "0" * 16, 0)], [], table, {})


def plan(
    manifest: Manifest, index: Index | None = None, seconds_per_shard: float = 30.0, failures=None
):
    """The tasks of a manifest for a version; without an index, for an empty one."""
    index = index or holding(manifest, [])
    status = join(RowKeys.of(manifest), index, failures or {})
    wanted = want("made up", keys_of(manifest), index, [])
    return list(shard_tasks(manifest, status, wanted, manifest.duration, seconds_per_shard))


def failure(manifest: Manifest, row: int) -> Failure:
    return Failure(**manifest[row].row(), reason="empty", message="", size=0, mtime_ns=0)


@given(ROWS, st.floats(0.1, 100), st.data())
def test_every_missing_row_is_in_exactly_one_task_and_no_other_row_is_in_any(
    durations, seconds_per_shard, data
):
    manifest = table(durations)
    states = data.draw(
        st.lists(st.sampled_from("pfm"), min_size=len(durations), max_size=len(durations))
    )
    present = [row for row, state in enumerate(states) if state == "p"]
    failures = by_row(failure(manifest, row) for row, state in enumerate(states) if state == "f")
    planned = plan(manifest, holding(manifest, present), seconds_per_shard, failures)
    asked = [utterance.id for task in planned for utterance in task.utterances]
    assert sorted(asked) == sorted(
        manifest.ids[row] for row, state in enumerate(states) if state == "m"
    )
    assert len(asked) == len(set(asked))


@given(ROWS, st.floats(0.1, 100), st.data())
def test_after_any_tasks_are_done_the_others_remain_as_they_were(
    durations, seconds_per_shard, data
):
    """A killed run, resumed, makes the very shards that an uninterrupted one makes."""
    manifest = table(durations)
    whole = plan(manifest, seconds_per_shard=seconds_per_shard)
    done = data.draw(st.sets(st.integers(0, len(whole) - 1)))
    row_of = {id_: row for row, id_ in enumerate(manifest.ids)}
    rows = [row_of[utterance.id] for number in done for utterance in whole[number].utterances]
    rest = plan(manifest, holding(manifest, rows), seconds_per_shard)
    assert rest == [task for number, task in enumerate(whole) if number not in done]


@given(ROWS, st.floats(0.1, 100))
def test_ranges_rise_one_by_one_and_hold_a_shard_of_audio_at_most(durations, seconds_per_shard):
    """Also if one duration is absurd, milliseconds in place of seconds, say."""
    seconds = np.array(durations)
    ranges = shard_ranges(seconds, seconds_per_shard)
    assert ranges[0] == 0
    assert set(np.diff(ranges).tolist()) <= {0, 1}
    for number in range(int(ranges[-1]) + 1):
        members = seconds[ranges == number]
        # what the last one runs over does not count
        assert members[:-1].sum() <= seconds_per_shard * 1.001


@pytest.mark.parametrize(
    ("hours", "num_shards"),
    [
        (0, 0),
        (0.95, 4),
        (1, 8),
        (1.4, 8),
        (10, 32),
        (100, 100),
        (256, 256),
        (5000, 256),
        (7585, 256),
        (30_000, 1013),
    ],
)
def test_shards_of_codes_grow_with_the_manifest(hours, num_shards):
    """EnCodec's at 1,200 bytes a second: from an eighth of an hour, or 0.5 MB, to 128 MB; at
    least 32 of more than eight hours, and 256 of more than 256."""
    ranges = shard_ranges(np.full(round(hours * 60), 60.0), 128e6 / 1200)
    assert len(np.unique(ranges)) == num_shards


def test_a_shard_holds_no_more_than_so_many_items():
    ranges = shard_ranges(np.full(250_000, 1e-6), 3600.0)
    assert np.bincount(ranges).max() <= MAX_ITEMS + 1


@given(ROWS, st.sets(st.integers(0, 59)))
def test_a_tasks_row_is_no_other_tasks_and_tasks_travel(durations, present):
    manifest = table(durations)
    tasks = plan(manifest, holding(manifest, {row for row in present if row < len(durations)}))
    rows = [task.row for task in tasks]
    assert len({*rows}) == len(tasks)
    assert [task.utterances[0].id for task in tasks] == [f"id-{row}" for row in rows]
    assert pickle.loads(pickle.dumps(tasks)) == tasks


def test_rows_that_another_partition_has_kept_keep_their_generations():
    rows = np.array([[7, 8], [1, 2], [3, 5]], np.uint64)
    before = Wanted("m.csv", rows.copy())
    wanted = want("m.csv", rows, index_of([]), [before])
    assert wanted.rows.tolist() == before.rows.tolist()
