"""Shards that are committed to an object store: whatever happens to requests, to processes, and with other writers."""

from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import threading
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from forking import fork, join
from make_cache import add_shard, make_features, make_version
from object_stores import any_store

import featcache
from featcache.errors import DamagedError, StoreError
from featcache.health.verify import verify
from featcache.storage import clients
from featcache.storage.location import parse_location
from featcache.storage.objects import Objects, require_put_if_absent
from featcache.store import commits
from featcache.store.commits import Entry, sweep_attempts
from featcache.store.copying import copy_version
from featcache.store.damaged import DamagedShard, plan_repairs
from featcache.store.index import build_index, load_index, open_index
from featcache.store.index_shards import describe_shards, items_in
from featcache.store.ledger import Failure
from featcache.store.run_records import ShardEvent, read_run
from featcache.store.runs import Run
from featcache.store.version import Version

pytest.importorskip("obstore")

FEATURES = make_features(12, max_frames=9)
FILES = 23
"""Of a shard: two for each of eleven arrays, and its `zarr.json`."""


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    """The temporary folder, in which shards are made before they are uploaded."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(clients, "_FIRST_PAUSE", clients._FIRST_PAUSE / 20)
    return tmp_path


@pytest.fixture
def place(s3):
    return parse_location("place", f"s3://speech/{uuid.uuid4()}")


@pytest.fixture
def memory():
    return any_store()


def files_below(location):
    return sorted(name for name, _ in Objects().walk(location))


def assert_whole(version, features=FEATURES, *, shards=1, is_verified=True):
    """One shard, or so many, with each utterance once; all of it sound, and nothing else beside it."""
    version = Version.open(version.path)
    assert len(version.shard_names()) == shards
    assert len(files_below(version.path / "shards")) == 1 + shards * FILES
    assert not files_below(version.path / "work")
    found = featcache.open(str(version.path), check=True)
    assert sorted(found.ids) == sorted(features)
    batch, lengths = found.batch(list(features))
    for row, length, array in zip(batch.numpy(), lengths.tolist(), features.values(), strict=True):
        np.testing.assert_array_equal(row[:length], array)
    if not is_verified:  # which takes a second
        return
    report = verify(version)
    assert not report.problems
    assert report.repeated == 0


class TestCommit:
    def test_a_shard_is_read_and_copied_like_any_other(self, memory, tmp_path, desk):
        version = make_version(memory, FEATURES, make_features(3, prefix="other"))
        assert_whole(version, {**FEATURES, **make_features(3, prefix="other")}, shards=2)
        assert not [path for path in desk.rglob("*") if path.is_file()]
        copied = copy_version(version, tmp_path / "copy")
        copy = Version.open(tmp_path / "copy" / version.path.name)
        assert copied.copied == 2
        assert copy.shard_names() == version.shard_names()
        assert not verify(copy).problems
        for name in copy.shard_names():  # repair knows which items a shard is named after
            assert not DamagedShard(copy.path / "shards" / name, None, copy.info.spec).check()

    def test_the_same_items_are_committed_once(self, memory):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        assert add_shard(version, FEATURES) == name
        assert_whole(version)

    @pytest.mark.parametrize("is_recorded", [True, False])
    def test_an_index_needs_a_small_file_of_each_shard_or_two_if_no_run_has_recorded_it(self, s3, place, is_recorded):
        shards = [{id_: array} for id_, array in FEATURES.items()][:4]
        version = make_version(place, *shards)
        if is_recorded:
            run = Run(version, {})
            for name in version.shard_names():
                (entry,) = (
                    entry
                    for entry in Objects().names(version.path / "commits")
                    if Entry.read(version.path / "commits" / entry).shard == name
                )
                run.record_shards([ShardEvent(name, 1, entry=entry)])
            run.finish({})
        expected = open_index(version)
        s3.reset()
        index = open_index(Version.open(version.path), keep=True)
        reads = [path for method, path in s3.paths if method == "GET" and "list-type" not in path]
        assert len([path for path in reads if "/shards/" in path]) == (0 if is_recorded else len(shards))
        assert len([path for path in reads if "/commits/" in path]) == len(shards)
        assert len([path for path in reads if "/runs/" in path]) == int(is_recorded)
        others = 1 + 2 + is_recorded  # the version's metadata; an index that is not there, twice; the run's record
        assert len(reads) == (1 if is_recorded else 2) * len(shards) + others
        assert len([path for _, path in s3.paths if "list-type" in path and "shards" in path]) == 1
        for name in ("ids", "shard", "item", "first_frame", "num_frames", "row_hash"):
            assert list(getattr(index, name)) == list(getattr(expected, name))
        kept = load_index(version, version.listed_shards())
        assert kept is not None
        assert list(kept.ids) == list(index.ids)

    def test_an_index_reads_what_has_been_added_since_the_one_that_is_kept(self, s3, place):
        """What supersedes items, or has items that do not count, is read again; the result is the one of all shards."""
        parts = [make_features(3, prefix=prefix, seed=row) for row, prefix in enumerate("abcd")]
        version = make_version(place, parts[0], parts[1])
        (first, _) = (
            shard.name for shard in sorted(map(version.shard, version.shard_names()), key=lambda s: s.info.row)
        )
        add_shard(version, parts[2], row=6, supersedes={first: [1]})
        open_index(version, keep=True)
        twice = {"b-1": parts[1]["b-1"]}
        for features, run in ((parts[3], "20260101T000000.000000Z-0001"), (twice, "20260101T000000.000000Z-0002")):
            add_shard(version, features, row=9, run=run)
        s3.reset()
        found = open_index(Version.open(version.path))
        entered = {path for method, path in s3.paths if method == "GET" and "/commits/" in path}
        assert len(entered) == 4  # two are new; one supersedes, and one is superseded in part
        expected = build_index(map(version.shard, version.shard_names()))
        assert (found.shards, found.runs, found.ids) == (expected.shards, expected.runs, expected.ids)
        assert found.described == expected.described
        for name in ("shard", "item", "first_frame", "num_frames", "row_hash", "id_hash", "by_hash"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        odd = replace(found, described={"items": "many"})
        assert describe_shards(odd, version) == expected.described
        assert not [*items_in(odd, version)]

    def test_a_recorded_shard_that_repair_is_about_to_take_away_is_looked_at(self, memory):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        run = Run(version, {})
        run.record_shards([ShardEvent(name, 1, entry=Objects().names(version.path / "commits")[0])])
        Objects().delete(version.path / "shards" / name / "zarr.json")
        assert len(open_index(Version.open(version.path))) == len(FEATURES)  # as recorded: nobody but repair does that
        run.record_shards([ShardEvent(name, 0, until=run.id)])
        assert len(open_index(Version.open(version.path))) == 0

    @pytest.mark.parametrize("seen", ["recorded", "indexed"])
    def test_a_shard_that_has_lost_its_metadata_is_damaged(self, memory, seen):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        if seen == "recorded":
            Run(version, {}).record_shards([ShardEvent(name, 12, entry=Objects().names(version.path / "commits")[0])])
        else:
            open_index(version, keep=True)
        Objects().delete(version.path / "shards" / name / "zarr.json")
        cache = featcache.open(str(memory))
        with pytest.raises(DamagedError, match=r"zarr\.json: damaged: the file is missing"):
            cache[next(iter(FEATURES))]
        version = Version.open(version.path)
        assert verify(version).damaged_shards == [name]  # so repair brings it back
        assert [(plan.shard.name, plan.kept) for plan in plan_repairs(version, [name])] == [(name, [])]

    def test_so_many_requests(self, s3, place):
        version = make_version(place)
        s3.reset()
        add_shard(version, FEATURES)
        assert s3.requests == Counter(PUT=FILES + 1, GET=1)  # and the entry, which is looked for before
        assert sum(s3.requests.values()) <= 25

    def test_an_entry_that_is_damaged_leaves_the_columns(self, memory):
        version = make_version(memory, FEATURES)
        (entry,) = Objects().names(version.path / "commits")
        place = version.path / "commits" / entry
        data = Objects().get(place, lambda size: None)
        for at in range(0, len(data), 97):
            Objects().put(place, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            assert list(open_index(Version.open(version.path)).ids) == list(FEATURES)
        Objects().delete(place)
        assert_whole(version)


class TestLeftovers:
    def test_what_was_entered_and_not_finished_is_completed(self, memory):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        Objects().delete(version.path / "shards" / name / "zarr.json")
        version = Version.open(version.path)
        assert version.shard_names() == []
        assert add_shard(version, FEATURES) == name
        assert_whole(version)

    def test_what_is_finished_while_somebody_looks_is_there(self, memory, monkeypatch):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        document = version.path / "shards" / name / "zarr.json"
        data = Objects().get(document, lambda size: None)
        Objects().delete(document)
        walk = Objects.walk

        def finish(store, location):
            store.put(document, data)
            return walk(store, location)

        with monkeypatch.context() as patched:
            patched.setattr(Objects, "walk", finish)
            assert add_shard(version, FEATURES) == name
        assert_whole(version)

    @pytest.mark.parametrize("kept", ["nothing", "half"])
    def test_what_was_entered_and_is_lost_is_made_again(self, memory, kept):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        lost = ["zarr.json", "ids/c/0"] if kept == "half" else files_below(version.path / "shards" / name)
        for file in lost:
            Objects().delete(version.path / "shards" / name / file)
        version = Version.open(version.path)
        assert add_shard(version, FEATURES) != name
        assert len(version.shard_names()) == 1
        assert len(files_below(version.path / "commits")) == 2

    def test_what_may_soon_be_swept_is_not_completed(self, memory, monkeypatch):
        version = make_version(memory, FEATURES)
        (name,) = version.shard_names()
        Objects().delete(version.path / "shards" / name / "zarr.json")
        monkeypatch.setattr(commits, "_COMPLETED_SECONDS", -1)
        version = Version.open(version.path)
        assert add_shard(version, FEATURES) != name
        assert len(version.shard_names()) == 1

    def test_a_writer_that_has_slept_looks_whether_its_files_are_there(self, memory, monkeypatch):
        version = make_version(memory)
        monkeypatch.setattr(commits, "_TRUSTED_SECONDS", -1)
        with monkeypatch.context() as patched:
            patched.setattr(commits, "_COMPLETED_SECONDS", -1)
            with pytest.raises(StoreError, match="is too old, or gone: run the same command again"):
                add_shard(version, FEATURES)
        assert version.shard_names() == []
        for name in files_below(version.path / "shards")[:-1]:
            Objects().delete(version.path / "shards" / name)
        add_shard(version, FEATURES)
        assert_whole(version)

    def test_with_what_a_run_has_left_the_index_is_the_one_that_is_kept(self, s3, place):
        version = make_version(place, *({id_: array} for id_, array in FEATURES.items()))
        open_index(version, keep=True)
        Objects().put(version.path / "shards" / "0123456789ab" / "ids" / "zarr.json", b"{}")
        s3.reset()
        assert list(open_index(Version.open(version.path)).ids) == list(FEATURES)
        looked_at = {path.partition("/shards/")[2].partition("/")[0] for _, path in s3.paths if "/shards/" in path}
        assert looked_at == {"0123456789ab"}
        add_shard(version, make_features(1, prefix="more"))
        assert len(open_index(Version.open(version.path))) == len(FEATURES) + 1

    def test_what_was_written_to_try_the_store_is_swept_after_a_day(self, memory, monkeypatch):
        version = make_version(memory, FEATURES)
        left = [version.path.parent / f".put-if-absent.{'0' * 16}", version.path / "work" / f".clock.{'1' * 16}"]
        for probe in left:
            Objects().put(probe, b"")
        sweep_attempts(version, [])
        assert all(map(Objects().exists, left))
        monkeypatch.setattr(commits, "_DAY_SECONDS", -1)
        sweep_attempts(version, [])
        assert not any(map(Objects().exists, left))
        assert_whole(version)

    def test_attempts_are_swept_after_a_day(self, memory, monkeypatch):
        version = make_version(memory, FEATURES)
        left = version.path / "shards" / "0123456789ab"
        Objects().put(left / "ids" / "zarr.json", b"{}")
        sweep_attempts(version, [])
        assert files_below(left)
        assert not verify(version).problems
        monkeypatch.setattr(commits, "_DAY_SECONDS", -1)
        sweep_attempts(version, [])
        assert not files_below(left)
        assert_whole(version)


def at_request(number, fault, *, at_commit=False):
    """A fault of one of the requests that write: the one of that number, or the one that enters a shard."""
    count, lock, done = 0, threading.Lock(), []

    def choose(method, path):
        nonlocal count
        if method not in ("PUT", "POST", "DELETE"):
            return None
        with lock:
            count += 1
            is_it = ("/commits/" in path and not done) if at_commit else count == number
            if is_it:
                done.append(path)
        return fault if is_it else None

    return choose


def commit_once(version):
    """What a run does of a shard, with a failure in its ledger."""
    run = Run(version, {"manifest": "m", "root": "/", "utterances": 13, "new": 13, "held": 0, "replaced": 0})
    run.fail([Failure(id="bad", path="bad.wav", reason="decode", message="no audio")])
    name = add_shard(version, FEATURES, run=run.id)
    run.record_shards([ShardEvent(name, len(FEATURES))], are_there=True)
    run.finish({"extracted": 12, "failed": 1, "interrupted": False, "items": 12})
    return run.id


WRITES = 24 + 4
"""The requests of `commit_once` that write: a shard's and its entry; the run's beginning and end, and two ledgers."""


class TestFaults:
    @pytest.mark.parametrize("fault", ["before", "after", "503", "409"])
    def test_a_request_that_enters_a_shard_may_fail(self, s3, place, fault):
        self.check(s3, place, at_request(0, fault, at_commit=True), is_verified=False)

    @pytest.mark.slow
    @pytest.mark.parametrize("fault", ["before", "after", "503", "409"])
    @pytest.mark.parametrize("number", range(1, WRITES + 1))
    def test_whichever_it_is(self, s3, place, fault, number):
        self.check(s3, place, at_request(number, fault))

    def check(self, s3, place, fault, is_verified=True):
        version = make_version(place)
        s3.fault = fault
        run = commit_once(version)
        s3.reset()
        assert_whole(version, is_verified=is_verified)
        record = read_run(version, run)
        assert [failure["id"] for failure in record.failures.records] == ["bad"]
        assert [event.items for event in record.events()] == [len(FEATURES)]
        assert record.outcome["lines"] == {"failures": 1, "shards": 1}

    def test_a_store_that_replaces_what_is_there_is_refused(self, s3, place):
        require_put_if_absent(place)
        s3.fault = lambda method, path: "unconditional"
        with pytest.raises(StoreError, match="this object store replaces a file") as caught:
            require_put_if_absent(place)
        assert "\n" not in str(caught.value)
        assert not files_below(place)


class TestKills:
    @pytest.mark.parametrize(
        "when",
        [
            pytest.param("array", marks=pytest.mark.slow),
            "entry",
            pytest.param("entry before", marks=pytest.mark.slow),
            "zarr.json",
        ],
    )
    def test_a_killed_writer_costs_its_shard_and_nothing_else(self, s3, place, when):
        other = make_features(5, prefix="other")
        version = make_version(place, other)
        (there,) = version.shard_names()
        pattern = {"array": "/ids/c/0$", "zarr.json": "/shards/[^/]*/zarr.json$"}.get(when, "/commits/")
        killed = []

        def kill(method, path):
            if method == "PUT" and re.search(pattern, path) and not killed:
                killed.append(path)
                os.kill(child, signal.SIGKILL)
                return "before" if when == "entry before" else "after"
            return None

        reading, writing = os.pipe()
        child = fork(lambda: (os.read(reading, 1), add_shard(version, FEATURES)))
        s3.fault = kill
        os.write(writing, b"x")
        assert join(child) == -signal.SIGKILL
        s3.reset()
        for descriptor in (reading, writing):
            os.close(descriptor)
        assert killed
        seen = Version.open(version.path)
        assert seen.shard_names() == [there] if when != "zarr.json" else len(seen.shard_names()) == 2
        name = add_shard(seen, FEATURES)
        assert sorted(Version.open(version.path).shard_names()) == sorted([there, name])
        assert sorted(featcache.open(str(version.path)).ids) == sorted([*other, *FEATURES])
        assert not verify(Version.open(version.path)).problems
        finished = {"entry", "zarr.json"}  # by the next writer: its own attempt is gone
        prefixes = Objects().folders(version.path / "shards")
        assert len(prefixes) == (2 if when in finished else 3)


def race(version, rng, s3=None):
    """Two writers of the same items at once, whose values differ: those of one of them are there, and all of them."""
    barrier, values = threading.Barrier(2), []

    def write(offset):
        features = {id_: array + np.float16(offset) for id_, array in FEATURES.items()}
        values.append(features)
        barrier.wait(30)
        return add_shard(Version.open(version.path), features)

    if s3 is not None:
        s3.fault = lambda method, path: rng.choice([None] * 60 + ["before", "after", "503", "409"])
    with ThreadPoolExecutor(2) as pool:
        names = {*pool.map(write, [0, 1])}
    if s3 is not None:
        s3.reset()
    assert [*names] == Version.open(version.path).shard_names()
    found = featcache.open(str(version.path))["utt-0"]
    (won,) = (features for features in values if np.array_equal(found, features["utt-0"]))
    assert_whole(version, won)


class TestRaces:
    @pytest.mark.parametrize("number", range(5))
    def test_two_writers_at_once(self, memory, number):
        race(make_version(memory), random.Random(number))

    @pytest.mark.slow
    @pytest.mark.parametrize("number", range(200))
    def test_many_pairs_with_faults(self, s3, place, number):
        race(make_version(place), random.Random(number), s3)
