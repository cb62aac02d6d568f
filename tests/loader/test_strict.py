"""Opening a version that was to hold more: a warning that says how much more, or an error; and none without reason."""

import shutil
import signal
import warnings

import pytest
from cache_contents import only_version, shard_folders
from extractions import ONE_EACH
from pausing import interrupt

import featcache
from featcache.errors import FeatcacheWarning, StoreError


def opened(folder, **options):
    """What opening a version warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        featcache.open(folder, **options)
    ours = [warning for warning in caught if warning.category is FeatcacheWarning]
    assert all(warning.filename == __file__ for warning in ours)
    return [str(warning.message) for warning in ours]


@pytest.fixture
def cache(scratch):
    """The cache that `job` makes."""
    return scratch / "cache"


@pytest.fixture
def job(plain, gated_config, cache):
    command = ("extract", plain.manifest(), "-c", gated_config, "--shard-size", ONE_EACH, "--threads", 1)
    return (*command, "-o", cache)


@pytest.fixture
def stopped_half_way(cli, job, cache, gate):
    """Starts an extraction and stops it by a signal after three clips; gives what opening said meanwhile."""

    def stopped(number, job=job):
        gate.write_text("3")
        running = cli.start(*job)
        running.wait_until(lambda: len(shard_folders(cache)) == 3)
        going_on = opened(cache)
        if number == signal.SIGINT:
            interrupt(running, gate)
        else:
            running.send(number)
            running.wait()
            gate.unlink()
        return going_on

    return stopped


def test_a_whole_run_over_more_rows_makes_up_for_a_killed_one(cli, job, cache, plain, stopped_half_way):
    stopped_half_way(signal.SIGKILL)
    more = plain.manifest([*plain.rows, {**plain.rows[0], "id": "one-more"}], "more.csv")
    assert cli(job[0], more, *job[2:]).code == 0
    assert {*featcache.open(cache, strict=True).ids} == {*plain.ids, "one-more"}
    assert cli("verify", cache).code == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_half_way_it_warns_until_it_is_whole(cli, job, cache, plain, stopped_half_way, number):
    (going_on,) = stopped_half_way(number)
    assert "is going on" in going_on
    missing = len(plain.rows) - len(shard_folders(cache))
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


def test_failures_are_not_missing(cli, job, cache, plain, stopped_half_way):
    rows = [{**row, "path": "nowhere.wav"} if i in (0, 11) else row for i, row in enumerate(plain.rows)]
    job = (*job[:1], plain.manifest(rows, "failing.csv"), *job[2:])
    stopped_half_way(signal.SIGKILL, job)
    missing = len(rows) - len(shard_folders(cache)) - 1
    assert f"{missing} of the 12 utterances of {job[1]} are missing, 1 failed: " in opened(cache)[0]
    assert cli(*job).code == 3
    assert opened(cache, strict=True) == []


def test_a_repair_that_ends_well_hides_nothing(cli, cache, plain, stopped_half_way):
    stopped_half_way(signal.SIGKILL)
    before = opened(cache)
    version = only_version(cache)
    chunk = next(version.path.glob("shards/*/features/c/0/0"))
    chunk.write_bytes(chunk.read_bytes()[:-1])
    assert cli("repair", version.path, "--manifest", plain.manifest()).code == 0
    assert opened(cache) == before


def test_nothing_is_said_of_whole_versions_that_grow(cli, job, cache, plain):
    half = (*job[:1], plain.manifest(plain.rows[:6], "half.csv"), *job[2:])
    for command in (half, job):
        assert cli(*command).code == 0
        assert opened(cache, strict=True) == []


def test_of_a_whole_version_nothing_is_said_until_something_is_gone_nor_when_it_is_made_again(cli, job, cache):
    assert cli(*job).code == 0
    assert opened(cache, strict=True) == []
    version = only_version(cache).path
    shutil.rmtree(version / "runs")  # records for people do not count
    assert opened(cache, strict=True) == []

    for folder in shard_folders(cache)[3:5]:
        shutil.rmtree(folder)
    (message,) = opened(cache)
    assert f"2 of the 12 utterances of {job[1]} are missing: " in message
    with pytest.raises(StoreError, match="shards have been removed"):
        featcache.open(cache, strict=True)
    assert message.split(": ", 1)[1] in cli("info", cache).out
    assert cli(*job).code == 0
    assert opened(cache, strict=True) == []

    shutil.rmtree(version / "wanted")
    (message,) = opened(cache)
    assert "is gone, of which 12 shards were made" in message
    with pytest.raises(StoreError, match="is gone"):
        featcache.open(cache, strict=True)
    assert cli("verify", cache).code == 1
    assert "nothing to do" in cli(*job).out
    assert opened(cache, strict=True) == []
