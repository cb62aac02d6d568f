"""Opening a version that was to hold more: a warning that says how much more, or an error; and none without reason."""

import json
import shutil
import signal
import time
import warnings

import pytest
from conftest import only_version
from make_cache import add_shard, make_features, make_version

import featcache
from featcache.errors import FeatcacheWarning, StoreError
from featcache.store.index import open_index
from featcache.store.runs import Failure, Run, is_going_on
from featcache.store.unfinished import find_unfinished

ONE_EACH = "0.0003"
"""MB: a shard size that gives each of the plain utterances a shard of its own, with `odd_extractors`."""


def opened(folder, **options):
    """What opening a version warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        featcache.open(folder, **options)
    assert {warning.category for warning in caught} <= {FeatcacheWarning}
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def shards(version):
    return len(version.shard_names())


class TestExtraction:
    """By what real runs leave."""

    @pytest.fixture
    def job(self, plain, slower_config, scratch):
        command = ("extract", plain.manifest(), "-c", slower_config, "--shard-size", ONE_EACH, "--threads", 1)
        return (*command, "-o", scratch / "cache")

    def stopped_half_way(self, cli, job, cache, number):
        running = cli.start(*job)
        running.wait_until(lambda: len(list(cache.glob("*/shards/????????????"))) >= 3)
        going_on = opened(cache)
        running.send(number)
        running.wait()
        return going_on

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_stopped_half_way_it_warns_until_it_is_whole(self, cli, job, plain, scratch, number):
        cache = scratch / "cache"
        (going_on,) = self.stopped_half_way(cli, job, cache, number)
        assert "it is being extracted" in going_on
        missing = len(plain.rows) - shards(only_version(cache))
        assert 0 < missing < len(plain.rows)
        (message,) = opened(cache)
        expected = (
            f"{missing} of the {len(plain.rows)} utterances of {job[1]} are not there: its extraction was interrup"
        )
        assert expected in message
        assert message.endswith("; the same `featcache extract` again does the rest")
        assert "\n" not in message
        with pytest.raises(StoreError) as caught:
            featcache.open(cache, strict=True)
        assert str(caught.value) == message
        assert message.split(": ", 1)[1] in cli("info", cache).out
        assert message.split(": ", 1)[1] in cli("stats", cache).err
        assert cli(*job).code == 0
        assert opened(cache, strict=True) == []

    def test_failures_are_not_missing(self, cli, job, plain, scratch, slower_config):
        rows = [{**row, "path": "nowhere.wav"} if i in (0, 11) else row for i, row in enumerate(plain.rows)]
        job = (*job[:1], plain.manifest(rows, "failing.csv"), *job[2:])
        cache = scratch / "cache"
        self.stopped_half_way(cli, job, cache, signal.SIGKILL)
        missing = len(rows) - shards(only_version(cache)) - 1
        assert f"{missing} of the 12 utterances of {job[1]} are not there, 1 failed: " in opened(cache)[0]
        assert cli(*job).code == 3
        assert opened(cache, strict=True) == []

    def test_a_repair_that_ends_well_hides_nothing(self, cli, job, plain, scratch):
        cache = scratch / "cache"
        self.stopped_half_way(cli, job, cache, signal.SIGKILL)
        before = opened(cache)
        version = only_version(cache)
        chunk = next(version.path.glob("shards/*/features/c/0/0"))
        chunk.write_bytes(chunk.read_bytes()[:-1])
        assert cli("repair", version.path, "--manifest", plain.manifest()).code == 0
        assert opened(cache) == before

    def test_nothing_is_said_of_whole_versions_also_when_they_grow(self, cli, job, plain, scratch):
        cache = scratch / "cache"
        half = (*job[:1], plain.manifest(plain.rows[:6], "half.csv"), *job[2:])
        assert cli(*half).code == 0
        assert opened(cache, strict=True) == []
        assert cli(*job).code == 0
        assert cli(*job).code == 0
        assert opened(cache, strict=True) == []
        shutil.rmtree(only_version(cache).path / "runs")
        assert opened(cache, strict=True) == []


class TestRecords:
    """By records of any order, written here."""

    @pytest.fixture
    def version(self, tmp_path):
        return make_version(tmp_path, make_features(10))

    def run(self, version, manifest="a.csv", *, new, held, only=False, extracted=None, interrupted=False, failed=()):
        asked = {"manifest": manifest, "root": "/", "utterances": new + held, "new": new, "held": held, "only": only}
        run = Run(version, asked)
        run.fail(Failure(id_, "x.wav", None, None, None, "empty", "", None, None) for id_ in failed)
        if extracted is not None:
            run.finish({"extracted": extracted, "failed": len(failed), "num_bytes": 0, "interrupted": interrupted})
        time.sleep(0.002)  # runs are named by their time
        return run

    def missing(self, version):
        return [(one.manifest, one.missing, one.failed) for one in find_unfinished(version, open_index(version))]

    def test_versions_without_records_or_with_others_are_whole(self, version, tmp_path):
        assert opened(tmp_path) == []
        Run(version, {})
        Run(version, {"manifest": "a.csv"})
        (version.path / "runs" / "x").mkdir()
        (version.path / "runs" / "y").mkdir()
        (version.path / "runs" / "y" / "run.json").write_text("[]")
        (version.path / "runs" / "z").touch()
        assert opened(tmp_path, strict=True) == []

    def test_a_run_that_added_all_it_was_to_add_is_whole_however_it_ended(self, version):
        self.run(version, new=10, held=0)
        assert self.missing(version) == []
        self.run(version, new=0, held=10, extracted=0, interrupted=True)
        assert self.missing(version) == []

    def test_what_is_missing_is_what_was_asked_for_and_is_neither_there_nor_failed(self, version):
        self.run(version, new=15, held=0, failed=["x", "y", "x", "utt-1"])  # of which one was extracted later
        assert self.missing(version) == [("a.csv", 3, 2)]

    def test_the_latest_run_over_a_manifest_counts(self, version):
        self.run(version, new=20, held=0)
        self.run(version, new=13, held=8)
        assert self.missing(version) == [("a.csv", 11, 0)]
        self.run(version, new=11, held=10, extracted=11)
        assert self.missing(version) == []

    def test_a_run_that_ended_later_did_also_what_one_beside_it_did_not(self, version):
        beside = Run(version, {"manifest": "a.csv", "root": "/", "utterances": 20, "new": 20, "held": 0, "only": False})
        time.sleep(0.002)
        self.run(version, new=20, held=0)
        beside.finish({"extracted": 10, "interrupted": False})
        assert self.missing(version) == []

    def test_other_manifests_hide_nothing(self, version):
        self.run(version, new=6, held=0)  # of which it made four
        self.run(version, "b.csv", new=6, held=4, extracted=6)
        assert self.missing(version) == [("a.csv", 2, 0)]
        self.run(version, "c.csv", new=5, held=10, extracted=2, interrupted=True)
        add_shard(version, make_features(2, prefix="c"), row=20)
        assert self.missing(version) == [("c.csv", 3, 0), ("a.csv", 2, 0)]

    def test_a_run_over_some_of_a_manifest_does_not_make_up_for_one_over_all_of_it(self, version):
        self.run(version, new=12, held=0)
        self.run(version, new=1, held=9, only=True, extracted=1)
        assert self.missing(version) == [("a.csv", 2, 0)]

    def test_whether_it_goes_on_is_seen_by_its_lock(self, version, tmp_path):
        run = self.run(version, new=12, held=0)
        assert is_going_on(version, run.id)
        assert "it is being extracted" in opened(tmp_path)[0]
        name = run.id
        del run  # as if killed
        assert not is_going_on(version, name)
        assert "its extraction was interrupted, or goes on elsewhere" in opened(tmp_path)[0]
        assert not is_going_on(version, "none")

    def test_of_very_many_runs_the_latest_are_looked_at(self, version, monkeypatch):
        self.run(version, new=12, held=0)
        record = next(version.path.glob("runs/*/run.json"))
        for number in range(70):
            folder = version.path / "runs" / f"29991231T000000.{number:06}Z-0000"
            folder.mkdir()
            asked = {**json.loads(record.read_text())["asked"], "manifest": f"{number}.csv", "new": 0, "held": 10}
            (folder / "run.json").write_text(json.dumps({"started": "2999", "asked": asked}))
        assert self.missing(version) == []
