"""Opening a version that was to hold more: a warning that says how much more, or an error; and none without reason."""

import shutil
import signal
import warnings

import pytest
from cache_contents import only_version, shard_folders
from pausing import interrupt

import featcache
from featcache.errors import FeatcacheWarning, StoreError

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
        assert "is going on" in going_on
        missing = len(plain.rows) - shards(only_version(cache))
        assert 0 < missing < len(plain.rows)
        (message,) = opened(cache)
        expected = f"{missing} of the {len(plain.rows)} utterances of {job[1]} are missing: extraction was interrup"
        assert expected in message
        assert "; run the same `featcache extract` again to add the rest" in message
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

    def test_shards_that_were_removed_are_missed_until_they_are_made_again(self, cli, job, scratch):
        cache = scratch / "cache"
        assert cli(*job).code == 0
        for folder in shard_folders(cache)[3:5]:
            shutil.rmtree(folder)
        (message,) = opened(cache)
        assert f"2 of the 12 utterances of {job[1]} are missing: " in message
        with pytest.raises(StoreError, match="shards have been removed"):
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

    def test_without_what_a_manifest_wants_it_is_not_known_to_be_whole_until_a_run_says_it_again(
        self, cli, job, scratch
    ):
        cache = scratch / "cache"
        assert cli(*job).code == 0
        shutil.rmtree(only_version(cache).path / "wanted")
        (message,) = opened(cache)
        assert "is gone, of which 12 shards were made" in message
        with pytest.raises(StoreError, match="is gone"):
            featcache.open(cache, strict=True)
        assert cli("verify", cache).code == 1
        assert "nothing to do" in cli(*job).out
        assert opened(cache, strict=True) == []

    def test_records_for_people_do_not_count(self, cli, job, scratch):
        cache = scratch / "cache"
        assert cli(*job).code == 0
        shutil.rmtree(only_version(cache).path / "runs")
        assert opened(cache, strict=True) == []
