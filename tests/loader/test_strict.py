"""Opening a version that was to hold more: a warning that says how much more, or an
error; and none without reason."""

import os
import shutil
import signal
import warnings

import pytest
from cache_contents import only_version, shard_folders
from damage import mend
from extractions import ONE_EACH, extract_fbank
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_half_way_it_warns_until_it_is_whole(
    cli, plain, gate, gated_config, scratch, number
):
    cache = scratch / "cache"
    command = (
        "extract",
        plain.manifest(),
        "-c",
        gated_config,
        "--shard-size",
        ONE_EACH,
        "--threads",
        1,
    )
    job = (*command, "-o", cache)
    gate.write_text("3")
    running = cli.start(*job)
    running.wait_until(lambda: len(shard_folders(cache)) == 3)
    (going_on,) = opened(cache)
    assert "is going on" in going_on
    if number == signal.SIGINT:
        interrupt(running, gate)
    else:
        running.send(number)
        running.wait()
        gate.unlink()
    missing = len(plain.rows) - len(shard_folders(cache))
    assert 0 < missing < len(plain.rows)
    (message,) = opened(cache)
    expected = (
        f"{missing} of the {len(plain.rows)} utterances of {job[1]} are missing: extraction "
        "was interrup"
    )
    assert expected in message
    assert "; run the same `featcache extract` again" in message
    assert "\n" not in message
    with pytest.raises(StoreError) as caught:
        featcache.open(cache, strict=True)
    assert str(caught.value) == message
    assert message.split(": ", 1)[1] in cli("info", cache).out
    assert message.split(": ", 1)[1] in cli("stats", cache).err
    assert cli(*job).code == 0
    assert opened(cache, strict=True) == []


def test_of_a_whole_version_nothing_is_said_until_something_is_gone_nor_when_it_is_made_again(
    cli, plain, scratch
):
    """Whole is one that grows, or of which utterances have failed; and repair makes none
    whole that was not."""
    rows = [
        {**row, "path": "nowhere.wav"} if number in (0, 11) else row
        for number, row in enumerate(plain.rows)
    ]
    manifests = {
        "half.csv": rows[:6],
        "all.csv": rows,
        "more.csv": [*rows, {**rows[1], "id": "one-more"}],
    }

    def extracted(name):
        """Extract, into shards of an utterance each; how many were extracted."""
        path = plain.manifest(manifests[name], name)
        return extract_fbank(path, scratch, shard_megabytes=0.001).versions[0].extracted

    for name in ("half.csv", "all.csv"):
        assert extracted(name) == 5
        assert opened(scratch, strict=True) == []
    version = only_version(scratch).path
    shutil.rmtree(version / "runs")  # records for people do not count
    assert opened(scratch, strict=True) == []

    for folder in shard_folders(scratch)[3:5]:
        shutil.rmtree(folder)
    (message,) = opened(scratch)
    manifest = plain.folder / "all.csv"
    assert f"2 of the 12 utterances of {manifest} are missing, 2 failed: " in message
    with pytest.raises(StoreError, match="shards have been removed"):
        featcache.open(scratch, strict=True)
    assert message.split(": ", 1)[1] in cli("info", scratch).out
    chunk = next(version.glob("shards/*/features/c/0/0"))
    os.truncate(chunk, chunk.stat().st_size - 1)
    mend(version, manifest)
    assert opened(scratch) == [message]
    assert extracted("more.csv") == 3
    assert opened(scratch, strict=True) == []
    assert cli("verify", scratch).code == 3  # two have failed, and nothing is damaged

    shutil.rmtree(version / "wanted")
    (message,) = opened(scratch)
    assert f"is gone, of which {len(shard_folders(scratch))} shards were made" in message
    with pytest.raises(StoreError, match="is gone"):
        featcache.open(scratch, strict=True)
    assert cli("verify", scratch).code == 1
    assert [extracted(name) for name in manifests] == [0, 0, 0]
    assert opened(scratch, strict=True) == []
