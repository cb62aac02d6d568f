"""Extraction into an object store, by real commands: what a folder gets; after a kill,
with others, and repaired."""

import os
import signal
import uuid

import pytest
from cache_contents import items

from featcache.storage.location import parse_location
from featcache.storage.opening import open_store
from featcache.version.selection import version_folders
from featcache.version.version import Version

pytest.importorskip("obstore")

SHARDS = ("--shard-size", "0.04", "--threads", "1")
"""Three shards."""


@pytest.fixture
def url(s3):
    return f"s3://speech/{uuid.uuid4()}"


@pytest.fixture
def run(cli, s3, tmp_path):
    """Runs commands that find the store; `machine` tells machines apart."""

    def start(*args, machine="machine", wait=True):
        (tmp_path / machine).mkdir(exist_ok=True)
        env = {**s3.environment, "TMPDIR": str(tmp_path / machine)}
        return cli(*args, env=env) if wait else cli.start(*args, env=env)

    return start


def opened(url):
    (path,) = version_folders(parse_location("url", url))
    return Version.open(path)


def assert_like(run, url, sound, manifest, tmp_path):
    """The cache at a URL has what a folder has, each utterance once; nothing else is
    there, or on this machine."""
    run("copy", url, tmp_path / "copy").with_code(0)
    verified = run("verify", tmp_path / "copy", "--manifest", manifest, "--json").json()[
        "versions"
    ][0]
    assert (verified["problems"], verified["repeated"]) == ([], 0)
    assert items(tmp_path / "copy") == items(sound)
    version = opened(url)
    assert version.store.names("shards") == [*version.shard_names(), "zarr.json"]
    assert not [
        path
        for path in tmp_path.glob("machine*/**/*")
        if path.is_file() and not path.name.endswith(".lock")
    ]


def test_a_store_gets_what_a_folder_gets(run, url, sound, plain, tmp_path):
    rows = [*plain.rows, {"id": "gone", "path": "gone.wav"}]
    manifest = plain.manifest(rows, "one-is-gone.csv")
    # which somebody has begun to make there, and was killed
    (version,) = version_folders(sound)
    group = f"{version.name}/shards/zarr.json"
    open_store(parse_location("url", url)).put(
        group, (version / "shards" / "zarr.json").read_bytes()
    )
    run("extract", manifest, "-o", url, *SHARDS).with_code(3)
    assert "gone.wav" in run("info", url, "--failures").out
    assert "nothing to do" in run("extract", plain.manifest(), "-o", url, *SHARDS).with_code(0).out
    assert_like(run, url, sound, manifest, tmp_path)


@pytest.mark.slow
def test_jobs_of_an_array_fill_a_store(run, url, sound, plain, tmp_path):
    for part in ("0/2", "1/2"):
        assert run("extract", plain.manifest(), "-o", url, *SHARDS, "--partition", part).code == 0
    assert "index built" in run("index", url).out
    assert "index already there" in run("index", url).out
    assert_like(run, url, sound, plain.manifest(), tmp_path)


@pytest.mark.parametrize(
    "request_", ["/features/c/", pytest.param("/items/c/", marks=pytest.mark.slow)]
)
def test_a_killed_run_is_continued(run, url, s3, sound, plain, tmp_path, request_):
    """Of the second shard, a part is there."""
    seen = []

    def kill(method, path):
        if method == "PUT" and request_ in path:
            seen.append(path)
            if len(seen) == 2:
                os.kill(running.pid, signal.SIGKILL)
                return "after"
        return None

    s3.fault = kill
    running = run("extract", plain.manifest(), "-o", url, *SHARDS, wait=False)
    assert running.wait().code == -signal.SIGKILL
    s3.reset()
    assert len(opened(url).shard_names()) == 1
    assert run("extract", plain.manifest(), "-o", url, *SHARDS).code == 0
    assert_like(run, url, sound, plain.manifest(), tmp_path)


@pytest.mark.slow
def test_two_machines_at_once(run, url, sound, plain, tmp_path):
    running = [
        run(
            "extract", plain.manifest(), "-o", url, *SHARDS, machine=f"machine-{number}", wait=False
        )
        for number in range(2)
    ]
    assert [one.wait().code for one in running] == [0, 0]
    assert_like(run, url, sound, plain.manifest(), tmp_path)


@pytest.mark.parametrize("damage", ["a bit", pytest.param("the end", marks=pytest.mark.slow)])
def test_a_damaged_shard_is_repaired(run, url, s3, sound, plain, tmp_path, damage):
    assert run("copy", sound, url).code == 0
    version = opened(url)
    chunk = f"shards/{version.shard_names()[0]}/features/c/0/0"
    data = version.store.read(chunk, 1 << 20)
    version.store.put(
        chunk,
        data[:3000] + bytes([data[3000] ^ 1]) + data[3001:] if damage == "a bit" else data[:-9000],
    )
    assert run("verify", url).code == 1
    repaired = run("repair", url, "--manifest", plain.manifest()).with_code(0)
    kept = repaired.out.partition(" kept")[0].rpartition(" ")[0]
    assert "1 damaged shard" in kept
    assert_like(run, url, sound, plain.manifest(), tmp_path)


def test_a_folder_of_marks_that_is_somebody_elses_is_refused(run, url, plain, tmp_path):
    (tmp_path / "machine").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "machine" / f"featcache-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    assert (
        "is not this user's "
        "folder: set TMPDIR" in run("extract", plain.manifest(), "-o", url).with_code(1).err
    )
    assert not list((tmp_path / "elsewhere").iterdir())
