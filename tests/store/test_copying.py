"""`featcache copy`: between folders and object stores, continued after a kill, checked on the way."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import pytest
import torch
from make_cache import add_shard, make_features, make_version

import featcache
from featcache.errors import ArgumentError, DamagedError, StoreError
from featcache.health.verify import verify
from featcache.spec import SideSpec
from featcache.storage.location import parse_location
from featcache.storage.store import store_of
from featcache.storage.stream import open_stream
from featcache.store.copying import copy_version
from featcache.store.ledger import Failure
from featcache.store.run_records import ShardEvent
from featcache.store.runs import Run
from featcache.store.selection import select_version, select_versions, version_folders
from featcache.store.version import Version

pytest.importorskip("obstore")
SHARDS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A cache of five shards, with an index, and the record of a run with a failure."""
    folder = tmp_path_factory.mktemp("copying") / "features"
    items = list(make_features(60, max_frames=200).items())
    side = (SideSpec("scale", (2,), "float32", "scales"), SideSpec("nothing", (), "float32", "none"))
    version = make_version(folder, *(dict(items[at::SHARDS]) for at in range(SHARDS)), side=side)
    run = Run(version, {"manifest": "m.csv", "root": "/", "utterances": 61, "new": 61, "held": 0, "replaced": 0})
    run.fail([Failure(id="bad", path="bad.wav", reason="decode", message="no audio")])
    run.record_shards([ShardEvent(name, 60 // SHARDS) for name in version.shard_names()])
    run.finish({"extracted": 60, "failed": 1, "interrupted": False, "items": 60})
    featcache.open(folder)
    return folder


def as_given(location):
    """A location as `featcache.open` takes it."""
    return location if isinstance(location, Path) else str(location)


@pytest.fixture(params=["folder", "memory"])
def to(request, tmp_path):
    """A place for a cache. (S3 has tests of its own, which take longer.)"""
    if request.param == "folder":
        return tmp_path / "copy" / "features"
    return parse_location("to", f"memory://{uuid.uuid4()}/features")


def contents(cache):
    """Every file of the only version in a cache, but those of the index, which a folder builds itself."""
    (path,) = version_folders(cache)
    files = sorted(name for name, _ in store_of(path).walk(path) if not name.startswith(("index/", "work/")))
    return {name: store_of(path).get(path.joinpath(*name.split("/")), lambda size: None) for name in files}


def says(version):
    report = verify(version)
    return [problem.message for problem in report.problems], report.utterances, report.failed, report.shards


class TestCopies:
    def test_it_says_the_same_and_is_not_copied_twice(self, folder, to):
        version = select_version(folder)
        result = copy_version(version, to)
        assert (result.copied, result.there, result.problems, result.interrupted) == (SHARDS, 0, [], False)
        assert contents(to) == contents(folder)
        copy = select_version(to)
        assert says(copy) == says(version)
        local, far = (
            featcache.open(folder, strict=True),
            featcache.open(as_given(to), strict=True),
        )
        assert torch.equal(far.batch(range(60), check=True)[0], local.batch(range(60))[0])
        again = copy_version(version, to)
        assert (again.copied, again.there, again.num_bytes, again.records) == (0, SHARDS, 0, 0)
        assert contents(to) == contents(folder)

    def test_back_to_a_folder_the_bytes_are_the_same(self, folder, tmp_path, s3):
        far = parse_location("to", "s3://speech/back")
        assert copy_version(select_version(folder), far).copied == SHARDS
        assert contents(far) == contents(folder)
        assert copy_version(select_version(folder), far).num_bytes == 0
        copy_version(select_version(far), tmp_path)
        assert contents(tmp_path) == contents(folder)
        assert not [name for path in tmp_path.glob("*/work/*") if (name := path.name) and not name.endswith(".lock")]

    def test_what_is_added_is_copied_later(self, folder, tmp_path, to):
        shutil.copytree(folder, tmp_path / "c")
        (path,) = version_folders(tmp_path / "c")
        name = sorted((path / "shards").glob("*/"))[0].name
        shutil.move(path / "shards" / name, tmp_path / name)
        assert copy_version(Version.open(path), to).copied == SHARDS - 1
        with pytest.raises(StoreError, match="no longer there"):
            featcache.open(as_given(to), strict=True)
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

    @pytest.mark.parametrize("file", ["features/c/0/0", "ids/c/0", "ids/zarr.json", "zarr.json", "features/zarr.json"])
    def test_a_damaged_shard_is_named_and_not_copied(self, folder, tmp_path, to, file):
        shutil.copytree(folder, tmp_path / "c")
        version = select_version(tmp_path / "c")
        shard = version.path / "shards" / version.shard_names()[1]
        data = bytearray((shard / file).read_bytes())
        data[len(data) // 2] ^= 1
        (shard / file).write_bytes(data)
        shutil.rmtree(version.path / "index")
        shutil.copytree(select_version(folder).path / "index", version.path / "index")
        result = copy_version(version, to)
        assert [problem.shard for problem in result.problems] == [shard.name]
        assert result.copied == SHARDS - 1
        assert select_version(to).shard_names() == sorted({*version.shard_names()} - {shard.name})


@pytest.fixture(scope="module")
def extracted_again(tmp_path_factory):
    """A cache whose every shard replaces two utterances of the one before; `utt-<n>` in shard n // 2 and the next."""
    folder = tmp_path_factory.mktemp("copying") / "again"
    version, name = make_version(folder), None
    for at in range(6):
        features = {f"utt-{at * 2 + of}": np.full((3, 80), at, np.float16) for of in range(4)}
        run = f"20260101T00000{at}.000000Z-0000"
        name = add_shard(version, features, run=run, supersedes={name: [2, 3]} if name else {})
    return folder


@pytest.mark.filterwarnings("ignore::featcache.errors.FeatcacheWarning")  # there are no records of these runs
class TestUtterancesThatWereExtractedAgain:
    """A copy has none of their older features, however far it has come."""

    def values(self, cache):
        return {id_: features[0, 0] for id_, features in featcache.open(as_given(cache)).items()}

    @pytest.mark.parametrize("threads", [1, 4])
    def test_a_copy_that_is_stopped_and_continued(self, extracted_again, to, threads):
        whole, counts = self.values(extracted_again), [0]
        while counts[-1] < len(whole):
            stop = threading.Event()
            copy_version(select_version(extracted_again), to, threads=threads, report=stop.set, stop=stop)
            copied = self.values(to)
            assert copied.items() <= whole.items()
            counts.append(len(copied))
        assert len(counts) > 1
        assert counts == sorted({*counts})

    def test_a_damaged_shard_and_what_it_replaces(self, extracted_again, to, tmp_path):
        whole = self.values(extracted_again)
        shutil.copytree(extracted_again, tmp_path / "c")
        version = select_version(tmp_path / "c")
        index = featcache.open(tmp_path / "c").index
        bad = index.place(index.find_one("utt-6")).shard
        file = version.path / "shards" / bad / "features/c/0/0"
        file.write_bytes(b"\0" * file.stat().st_size)
        result = copy_version(version, to)
        first, *others = [problem.message for problem in result.problems]
        assert result.problems[0].shard == bad
        assert bad in first
        assert others
        assert all("replaces some of its utterances" in message for message in others)
        assert self.values(to).items() <= whole.items()


class TestFaults:
    def test_requests_that_fail_on_the_way(self, folder, s3, tmp_path):
        numbers, faults = iter(range(10**9)), ["before", "503", "cut", "after"]

        def some(method, path):
            number = next(numbers)
            return None if number % 5 else faults[number // 5 % 4]

        s3.fault = some
        far = parse_location("to", "s3://speech/faults")
        copy_version(select_version(folder), far)
        copy_version(select_version(far), tmp_path)
        assert contents(tmp_path) == contents(folder)

    def test_large_files_are_written_in_parts(self, s3):
        location = parse_location("to", "s3://speech/large/file")
        blocks = [os.urandom(1 << 20) for _ in range(20)]
        assert store_of(location).put_blocks(location, lambda: map(memoryview, blocks)) == 20 << 20
        assert store_of(location).get(location, lambda size: None) == b"".join(blocks)

        def broken():
            yield from map(memoryview, blocks[:12])
            raise StoreError("damaged")

        other = parse_location("to", "s3://speech/large/other")
        with pytest.raises(StoreError, match="damaged"):
            store_of(other).put_blocks(other, broken)
        assert not store_of(other).exists(other)


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_kill_loses_nothing_and_shows_nothing_half(folder, tmp_path, s3, kind):
    to = str(tmp_path / "copy") if kind == "folder" else f"s3://speech/{uuid.uuid4()}"
    where, shards = parse_location("to", to), set()

    def written():
        return s3.requests["PUT"] if kind == "s3" else sum(len(files) for _, _, files in os.walk(tmp_path / "copy"))

    for more in (4, 12, 30, 50, 10**9):
        until = written() + more
        process = subprocess.Popen(
            [sys.executable, "-m", "featcache", "copy", str(folder), to, "--threads", "1"],
            env={**os.environ, **s3.environment},
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None:
            if written() >= until:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.001)
        try:
            (copy,) = select_versions(where)
        except DamagedError:
            raise
        except StoreError:  # there is no version yet
            assert not shards
            continue
        assert shards <= {*copy.shard_names()}  # what was there stays
        shards = {*copy.shard_names()}
        assert {problem.kind for problem in verify(copy).problems} <= {"lost", "unfinished", "record"}
        if process.returncode == 0:
            break
    assert process.returncode == 0
    assert contents(where) == contents(folder)


def test_all_versions_of_a_cache_are_copied_and_a_stop_that_nobody_set_stays_so(cli, tmp_path):
    for name in ("one", "two", "three"):
        make_version(tmp_path / "a", make_features(3, prefix=name), name=name)
    finished = cli("copy", tmp_path / "a", tmp_path / "b")
    assert finished.code == 0, finished.err
    assert [version.info.name for version in select_versions(tmp_path / "b")] == ["one", "three", "two"]
    stop = threading.Event()
    copy_version(select_version(tmp_path / "a", "one"), tmp_path / "c", stop=stop)
    assert not stop.is_set()


def test_a_cache_is_not_copied_into_itself(folder):
    version = select_version(folder)
    for target in (folder, version.path, version.path / "shards"):
        with pytest.raises(ArgumentError, match="give another cache to copy to"):
            copy_version(version, target)


def test_what_cannot_be_read_is_a_damaged_shard_and_the_others_are_copied(folder, tmp_path, monkeypatch):
    version = select_version(folder)
    bad = version.shard_names()[1]

    def opened(location, size):
        if bad in str(location):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_stream(location, size)

    monkeypatch.setattr("featcache.store.chunk_file.open_stream", opened)
    copied = copy_version(version, tmp_path / "copy")
    assert [problem.shard for problem in copied.problems] == [bad]
    assert copied.copied == SHARDS - 1


def test_the_command(cli, folder, s3, tmp_path):
    url = "s3://speech/command"
    finished = cli("copy", folder, url, "--json", env=s3.environment)
    assert finished.code == 0, finished.err
    (version,) = json.loads(finished.out)["versions"]
    assert (version["copied"], version["there"]) == (SHARDS, 0)
    finished = cli("copy", f"{url}/fbank80", str(tmp_path / "c"), env=s3.environment)
    assert finished.code == 0, finished.err
    assert f"{SHARDS} shards copied" in finished.out
    documents = []
    for place in (str(folder), str(tmp_path / "c"), url):
        finished = cli("verify", place, "--json", env=s3.environment)
        assert finished.code == 3  # as an utterance has failed
        documents.append(json.loads(finished.out.replace(place, "CACHE")))
    assert documents[0] == documents[1] == documents[2]
