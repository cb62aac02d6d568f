"""Opening a version that was to hold more: a warning that says how much more, or an error; and none without reason."""

import shutil
import signal
import warnings

import pytest
from cache_contents import only_version, shard_folders
from make_cache import add_shard, make_features, make_version
from pausing import interrupt

import featcache
from featcache.errors import FeatcacheWarning, StoreError
from featcache.store.index import open_index
from featcache.store.ledger import Failure
from featcache.store.run_records import is_running
from featcache.store.runs import Run
from featcache.store.unfinished import find_unfinished

ONE_EACH = "0.0003"
"""MB: a shard size that gives each of the plain utterances a shard of its own, with `odd_extractors`."""


def opened(folder, **options):
    """What opening a version warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        featcache.open(folder, **options)
    ours = [warning for warning in caught if warning.category is FeatcacheWarning]
    assert all(warning.filename == __file__ for warning in ours)
    return [str(warning.message) for warning in ours]


def shards(version):
    return len(version.shard_names())


class TestExtraction:
    """By what real runs leave."""

    @pytest.fixture
    def job(self, plain, gated_config, scratch):
        command = ("extract", plain.manifest(), "-c", gated_config, "--shard-size", ONE_EACH, "--threads", 1)
        return (*command, "-o", scratch / "cache")

    @pytest.fixture
    def stopped_half_way(self, cli, job, scratch, gate):
        """Starts an extraction and stops it by a signal after three clips; gives what opening said meanwhile."""

        def stopped(number, job=job):
            gate.write_text("3")
            running = cli.start(*job)
            running.wait_until(lambda: len(shard_folders(scratch / "cache")) == 3)
            going_on = opened(scratch / "cache")
            if number == signal.SIGINT:
                interrupt(running, gate)
            else:
                running.send(number)
                running.wait()
                gate.unlink()
            return going_on

        return stopped

    @pytest.mark.xfail(
        strict=True, reason="What a killed run was to add is missed until its own manifest is run again."
    )
    def test_a_whole_run_over_more_rows_makes_up_for_a_killed_one(self, cli, job, plain, scratch, stopped_half_way):
        stopped_half_way(signal.SIGKILL)
        more = plain.manifest([*plain.rows, {**plain.rows[0], "id": "one-more"}], "more.csv")
        assert cli(job[0], more, *job[2:]).code == 0
        cache = featcache.open(scratch / "cache", strict=True)
        assert {*cache.ids} == {*plain.ids, "one-more"}
        assert cli("verify", scratch / "cache").code == 0

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_stopped_half_way_it_warns_until_it_is_whole(self, cli, job, plain, scratch, stopped_half_way, number):
        cache = scratch / "cache"
        (going_on,) = stopped_half_way(number)
        assert "extraction is running" in going_on
        missing = len(plain.rows) - shards(only_version(cache))
        assert 0 < missing < len(plain.rows)
        (message,) = opened(cache)
        expected = f"{missing} of the {len(plain.rows)} utterances of {job[1]} are missing: extraction was interrup"
        assert expected in message
        assert message.endswith("; run the same `featcache extract` again to add the rest")
        assert "\n" not in message
        with pytest.raises(StoreError) as caught:
            featcache.open(cache, strict=True)
        assert str(caught.value) == message
        assert message.split(": ", 1)[1] in cli("info", cache).out
        assert message.split(": ", 1)[1] in cli("stats", cache).err
        assert cli(*job).code == 0
        assert opened(cache, strict=True) == []

    def test_failures_are_not_missing(self, cli, job, plain, scratch, stopped_half_way):
        rows = [{**row, "path": "nowhere.wav"} if i in (0, 11) else row for i, row in enumerate(plain.rows)]
        job = (*job[:1], plain.manifest(rows, "failing.csv"), *job[2:])
        cache = scratch / "cache"
        stopped_half_way(signal.SIGKILL, job)
        missing = len(rows) - shards(only_version(cache)) - 1
        assert f"{missing} of the 12 utterances of {job[1]} are missing, 1 failed: " in opened(cache)[0]
        assert cli(*job).code == 3
        assert opened(cache, strict=True) == []

    def test_a_repair_that_ends_well_hides_nothing(self, cli, plain, scratch, stopped_half_way):
        cache = scratch / "cache"
        stopped_half_way(signal.SIGKILL)
        before = opened(cache)
        version = only_version(cache)
        chunk = next(version.path.glob("shards/*/features/c/0/0"))
        chunk.write_bytes(chunk.read_bytes()[:-1])
        assert cli("repair", version.path, "--manifest", plain.manifest()).code == 0
        assert opened(cache) == before

    def test_shards_that_were_removed_are_missed_until_they_are_made_again(self, cli, job, plain, scratch):
        cache = scratch / "cache"
        assert cli(*job).code == 0
        for folder in shard_folders(cache)[3:5]:
            shutil.rmtree(folder)
        (message,) = opened(cache)
        assert f"2 utterances of {job[1]} are no longer there: removed from `shards/`: " in message
        with pytest.raises(StoreError, match="no longer there"):
            featcache.open(cache, strict=True)
        assert message.split(": ", 1)[1] in cli("info", cache).out
        assert cli(*job).code == 0
        assert opened(cache, strict=True) == []

    def test_nothing_is_said_of_whole_versions_also_when_they_grow(self, cli, job, plain, scratch):
        cache = scratch / "cache"
        half = (*job[:1], plain.manifest(plain.rows[:6], "half.csv"), *job[2:])
        assert cli(*half).code == 0
        assert opened(cache, strict=True) == []
        assert cli(*job).code == 0
        assert cli(*job).code == 0
        assert opened(cache, strict=True) == []

    def test_without_the_records_of_runs_it_is_not_known_to_be_whole_until_one_says_so(self, cli, job, scratch):
        cache = scratch / "cache"
        assert cli(*job).code == 0
        runs = only_version(cache).path / "runs"
        shutil.rmtree(runs)
        assert opened(cache) == []  # a copy, made without them
        with pytest.raises(StoreError, match="there is no folder `runs`"):
            featcache.open(cache, strict=True)
        assert cli("verify", cache).code == 0
        runs.mkdir()  # not yet on disk when the power went
        (message,) = opened(cache)
        assert "12 utterances in 12 shards were extracted by 1 run of which there is no record in `runs/`" in message
        with pytest.raises(StoreError, match="there is no record"):
            featcache.open(cache, strict=True)
        assert cli("verify", cache).code == 1
        assert "nothing to do" in cli(*job).out
        assert opened(cache, strict=True) == []
        runs = list((only_version(cache).path / "runs").iterdir())
        assert "nothing to do" in cli(*job).out
        assert list((only_version(cache).path / "runs").iterdir()) == runs


class TestRecords:
    """By records of an earlier featcache, and by the lock."""

    @pytest.fixture
    def version(self, tmp_path, clock):
        return make_version(tmp_path, make_features(10))

    def run(self, version, manifest="a.csv", *, new, held, only=False, extracted=None, failed=(), **outcome):
        asked = {"manifest": manifest, "root": "/", "utterances": new + held, "new": new, "held": held, "only": only}
        run = Run(version, asked)
        run.fail(Failure(id=id_, path="x.wav", reason="empty", message="") for id_ in failed)
        if extracted is not None:
            run.finish({"extracted": extracted, "failed": len(failed), "interrupted": False, **outcome})
        return run

    def missing(self, version):
        return [(run.manifest, run.missing, run.failed) for run in find_unfinished(version, open_index(version))]

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

    def test_a_run_over_some_of_a_manifest_does_not_make_up_for_one_over_all_of_it(self, version):
        self.run(version, new=12, held=0)
        self.run(version, new=1, held=9, only=True, extracted=1)
        assert self.missing(version) == [("a.csv", 2, 0)]

    def test_what_was_there_and_is_not_any_more_is_missing_unless_it_failed_since(self, version):
        self.run(version, new=14, held=0, extracted=13, items=13, failed=["z"])
        (lost,) = find_unfinished(version, open_index(version))
        assert (lost.manifest, lost.utterances, lost.missing, lost.failed, lost.were_there) == ("a.csv", 13, 3, 0, True)
        self.run(version, new=2, held=10, only=True, extracted=0, items=10, failed=["x", "y"])  # a repair
        assert self.missing(version) == [("a.csv", 1, 2)]
        add_shard(version, make_features(1, prefix="c"), row=20)
        assert self.missing(version) == []

    def test_whether_it_goes_on_is_seen_by_its_lock(self, version, tmp_path):
        run = self.run(version, new=12, held=0)
        assert is_running(version, run.id)
        assert "extraction is running" in opened(tmp_path)[0]
        name = run.id
        del run  # as if killed
        assert not is_running(version, name)
        assert "extraction was interrupted, or is running elsewhere" in opened(tmp_path)[0]
        assert not is_running(version, "none")


def test_a_version_without_utterances_and_records_is_not_whole(cli, tmp_path):
    """As a run leaves it that was killed before it had begun, and a copy."""
    version = make_version(tmp_path / "cache")
    (message,) = opened(tmp_path / "cache")
    for _ in range(2):
        with pytest.raises(StoreError, match="holds nothing, and has no record of a run"):
            featcache.open(tmp_path / "cache", strict=True)
        verified = cli("verify", tmp_path / "cache")
        assert verified.code == 1
        assert message.partition(": ")[2] in verified.out + verified.err
        shutil.rmtree(version.path / "runs", ignore_errors=True)
