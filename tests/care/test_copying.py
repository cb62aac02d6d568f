"""`featcache copy`: between folders and object stores, continued after a kill, checked on
the way."""

import os
import shutil
import signal
import threading
import time
import uuid
from unittest.mock import Mock

import pytest
import torch
from damage import CHUNKS, flip
from forking import fork
from make_cache import make_features, make_version
from object_stores import any_store

import featcache
from featcache.care.copying import copy_version
from featcache.care.verify import verify
from featcache.errors import ArgumentError, StoreError
from featcache.spec import Track
from featcache.storage.directory import Directory
from featcache.storage.location import parse_location
from featcache.storage.opening import open_store
from featcache.version.index import load_index
from featcache.version.ledger import Failure
from featcache.version.records import Run
from featcache.version.selection import select_version, select_versions, version_folders
from featcache.version.version import Version

pytest.importorskip("obstore")
SHARDS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache of five shards, with an index, and the record of a run with a failure."""
    folder = tmp_path_factory.mktemp("copying") / "features"
    items = [*make_features(60, max_frames=200).items()]
    side = (Track("scale", (2,), "float32", "scales"), Track("nothing", (), "float32", "none"))
    version = make_version(folder, *(dict(items[at::SHARDS]) for at in range(SHARDS)), side=side)
    run = Run(
        version,
        {"manifest": "m.csv", "root": "/", "utterances": 61, "new": 61, "held": 0, "replaced": 0},
    )
    run.fail([Failure(id="bad", path="bad.wav", reason="decode", message="no audio")])
    run.finish({"extracted": 60, "failed": 1, "interrupted": False, "items": 60})
    featcache.open(folder)
    return folder


@pytest.fixture(params=["folder", "memory"])
def to(request, tmp_path):
    """A place for a cache. (S3 has tests of its own, which take longer.)"""
    if request.param == "folder":
        return tmp_path / "copy" / "features"
    return any_store()


def contents(cache):
    """Every file of the only version in a cache, but those of the index, which a folder
    builds itself."""
    (path,) = version_folders(cache)
    store = open_store(path)
    return {
        key: store.read(key, size)
        for key, size in store.walk()
        if not key.startswith(("index/", "work/", "lock"))
    }


def has_index(cache):
    version = select_version(cache)
    return load_index(version, version.shard_names()) is not None


class TestCopies:
    def test_it_says_the_same_and_is_not_copied_twice(self, folder, to):
        version = select_version(folder)
        result = copy_version(version, to)
        assert (result.copied, result.there, result.problems, result.interrupted) == (
            SHARDS,
            0,
            [],
            False,
        )
        assert contents(to) == contents(folder)
        assert has_index(to)
        told = [verify(one) for one in (version, select_version(to))]
        said = [
            (len(report.problems), report.utterances, report.failed, report.shards)
            for report in told
        ]
        # the failure is of a row that no manifest wants, and is copied all the same
        assert said == [(0, 60, 0, SHARDS)] * 2
        local, far = (featcache.open(folder, strict=True), featcache.open(str(to), strict=True))
        assert torch.equal(far.batch(range(60), check=True)[0], local.batch(range(60))[0])
        again = copy_version(version, to)
        assert (again.copied, again.there, again.num_bytes, again.records) == (0, SHARDS, 0, 0)
        assert contents(to) == contents(folder)

    def test_what_is_added_is_copied_later(self, folder, tmp_path, to):
        shutil.copytree(folder, tmp_path / "c")
        (path,) = version_folders(tmp_path / "c")
        name = sorted((path / "shards").glob("*/"))[0].name
        shutil.move(path / "shards" / name, tmp_path / name)
        assert copy_version(Version.open(path), to).copied == SHARDS - 1
        assert len(featcache.open(str(to))) < 60
        shutil.move(tmp_path / name, path / "shards" / name)
        assert copy_version(Version.open(path), to).copied == 1
        assert contents(to) == contents(folder)

    def test_another_version_of_that_name_is_refused(self, folder, tmp_path, to):
        copy_version(select_version(folder), to)
        version = select_version(folder)
        make_version(tmp_path / "other", make_features(3), params={"other": 1})
        other = select_version(tmp_path / "other").path
        other.rename(other.with_name(version.path.name))
        with pytest.raises(StoreError, match=r"fingerprint|another version"):
            copy_version(select_version(tmp_path / "other"), to)
        assert contents(to) == contents(folder)

    @pytest.mark.parametrize(
        "file", [*CHUNKS.values(), "text/zarr.json", "zarr.json", "features/zarr.json"]
    )
    def test_a_damaged_shard_is_named_and_not_copied(self, folder, tmp_path, to, file):
        shutil.copytree(folder, tmp_path / "c")
        version = select_version(tmp_path / "c")
        shard = version.path / "shards" / version.shard_names()[1]
        flip(shard / file, (shard / file).stat().st_size // 2)
        result = copy_version(version, to)
        assert [problem.shard for problem in result.problems] == [shard.name]
        assert result.copied == SHARDS - 1
        with pytest.raises(StoreError):  # a copy that is not whole is no version
            select_version(to)
        copied = open_store(to / version.path.name).names("shards")
        assert {*copied} == {*version.shard_names(), "zarr.json"} - {shard.name}

    def test_requests_that_fail_on_the_way(self, folder, s3, tmp_path):
        s3.break_every(5)
        far = parse_location("to", "s3://speech/faults")
        copy_version(select_version(folder), far)
        copy_version(select_version(far), tmp_path)
        assert contents(tmp_path) == contents(folder)


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_kill_loses_nothing_and_shows_nothing_half(folder, tmp_path, s3, kind):
    to = str(tmp_path / "copy") if kind == "folder" else f"s3://speech/{uuid.uuid4()}"
    where = parse_location("to", to)

    def written():
        return (
            s3.requests["PUT"]
            if kind == "s3"
            else sum(len(files) for _, _, files in os.walk(tmp_path / "copy"))
        )

    for more in (4, 12, 30, 50, 10**9):
        until = written() + more
        pid = fork(lambda: copy_version(select_version(folder), where, threads=1))
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if written() >= until:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.001)
        try:
            (copy,) = select_versions(where)
        except StoreError:  # a copy that is not whole is no version
            assert ended[1]
            continue
        assert verify(copy).problems == []
        if not ended[1]:
            break
    assert not ended[1]
    assert contents(where) == contents(folder)


def test_an_interrupted_copy_is_continued_by_the_command_that_all_others_name(
    cli, folder, tmp_path
):
    """`repair` cannot finish it, and no message proposes that."""
    to, stop = tmp_path / "to", threading.Event()
    copied = copy_version(
        select_version(folder), to, threads=1, report=lambda *_: stop.set(), stop=stop
    )
    assert copied.interrupted
    said = cli("verify", to, "--json").with_code(1).json()["versions"][0]["problems"]
    assert [problem["kind"] for problem in said] == ["unfinished"]
    messages = [cli(*command).with_code(1).err for command in (("info", to), ("prune", to))]
    messages.append(cli.refused("repair", to, "--manifest", _manifest(tmp_path), code=1))
    for message in (cli("verify", to).out, *messages):
        assert "run the same `featcache copy` again, which continues it\n" in message
        assert "featcache repair" not in message
    cli("copy", folder, to).with_code(0)
    cli("verify", to).with_code(0)
    assert contents(to) == contents(folder)


def _manifest(folder):
    path = folder / "manifest.csv"
    path.write_text("id,path\na,a.wav\n")
    return path


def test_all_versions_of_a_cache_are_copied_and_a_stop_that_nobody_set_stays_so(cli, tmp_path):
    for name in ("one", "two", "three"):
        make_version(tmp_path / "a", make_features(3, prefix=name), name=name)
    cli("copy", tmp_path / "a", tmp_path / "b").with_code(0)
    assert [version.info.name for version in select_versions(tmp_path / "b")] == [
        "one",
        "three",
        "two",
    ]
    stop = threading.Event()
    copy_version(select_version(tmp_path / "a", "one"), tmp_path / "c", stop=stop)
    assert not stop.is_set()


def test_the_index_appears_whole(folder, tmp_path, monkeypatch):
    put = Mock(wraps=Directory.put)
    monkeypatch.setattr(Directory, "put", lambda *given: put(*given))
    copy_version(select_version(folder), tmp_path)
    assert not [call.args[1] for call in put.call_args_list if call.args[1].startswith("index/")]


def test_a_cache_is_not_copied_into_itself(folder):
    version = select_version(folder)
    for target in (folder, version.path, version.path / "shards"):
        with pytest.raises(ArgumentError, match="give another cache to copy to"):
            copy_version(version, target)


def test_a_dry_run_says_what_would_be_copied_and_writes_nothing(cli, folder, tmp_path):
    before, to = contents(folder), tmp_path / "to"
    plan = cli("copy", folder, to, "--dry-run", "--json").with_code(0).json()
    assert (plan["dry_run"], plan["versions"][0]["copied"], to.exists()) == (True, SHARDS, False)
    done = cli("copy", folder, to, "--json").with_code(0).json()
    assert done["versions"][0]["bytes"] == plan["versions"][0]["bytes"]
    again = cli("copy", folder, to, "--dry-run").with_code(0)
    assert f": 0 shards to copy, 0 kB; {SHARDS} shards were there\n" in again.out
    assert contents(folder) == before
    inside = cli.refused("copy", folder, folder, "--dry-run")
    assert "give another cache to copy to" in inside


def test_the_command_copies_to_a_bucket_and_back_where_the_bytes_are_the_same(
    cli, folder, s3, tmp_path
):
    url, back = "s3://speech/command", tmp_path / "c"
    for copied, there in ((SHARDS, 0), (0, SHARDS)):
        (version,) = (
            cli("copy", folder, url, "--json", env=s3.environment).with_code(0).json()["versions"]
        )
        assert (version["copied"], version["there"], version["bytes"] > 0) == (
            copied,
            there,
            there == 0,
        )
        assert contents(parse_location("to", url)) == contents(folder)
    assert (
        f"{SHARDS} shards copied"
        in cli("copy", f"{url}/fbank80", back, env=s3.environment).with_code(0).out
    )
    assert contents(back) == contents(folder)
    assert has_index(back)
    assert not [
        name for path in back.rglob("work/*") if (name := path.name) and not name.endswith(".lock")
    ]
