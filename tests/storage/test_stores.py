"""What every store must do: one suite for a folder, the memory of a process, and S3."""

import os
import signal
import socket
import sys
import time
import uuid
from collections import OrderedDict

import pytest
from object_stores import any_store
from processes import start_script

from featcache.errors import ArgumentError, DamagedError, MissingDependencyError, StoreError
from featcache.storage import clients
from featcache.storage.location import ObjectPath, folder_of, parse_location
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.storage.stream import open_stream


def accept(size):
    pass


@pytest.fixture(params=["folder", "memory", "s3"])
def root(request, tmp_path):
    if request.param == "folder":
        return tmp_path
    pytest.importorskip("obstore")
    if request.param == "s3":
        request.getfixturevalue("s3")
        return parse_location("root", f"s3://speech/{uuid.uuid4()}")
    return any_store()


class TestEveryStore:
    def test_what_was_put_is_got_whole_and_in_ranges(self, root):
        store, location = store_of(root), root / "a" / "b"
        store.put(location, b"0123456789")
        sizes = []
        assert store.get(location, sizes.append) == b"0123456789"
        assert sizes == [10]
        assert [bytes(part) for part in store.get_ranges(location, [8, 0, 3], [2, 2, 4])] == [b"89", b"01", b"3456"]
        assert store.get_ranges(location, [], []) == []
        assert store.size(location) == 10
        ends = [store.size_and_range(location, start, 4) for start in (6, 8, 10, 20)]
        assert ends == [(10, b"6789"), (10, b"89"), (10, b""), (10, b"")]
        store.put(location, b"new")
        assert store.get(location, accept) == b"new"

    def test_a_size_is_refused_before_the_bytes_are_read(self, root):
        store = store_of(root)
        store.put(root / "a", b"0123456789")

        def refuse(size):
            raise DamagedError("too large")

        with pytest.raises(DamagedError, match="too large"):
            store.get(root / "a", refuse)

    def test_a_file_is_put_once_if_it_is_to_be_absent(self, root):
        store = store_of(root)
        assert store.put_if_absent(root / "a", b"first")
        assert not store.put_if_absent(root / "a", b"second")
        assert store.get(root / "a", accept) == b"first"

    def test_what_is_not_there_is_not_found(self, root):
        store = store_of(root)
        store.put(root / "there", b"")
        for read in (
            lambda: store.get(root / "a", accept),
            lambda: store.size(root / "a"),
            lambda: store.size_and_range(root / "a", 0, 1),
            lambda: store.names(root / "a"),
            lambda: store.get_ranges(root / "a", [0], [1]),
        ):
            with pytest.raises(FileNotFoundError) as caught:
                read()
            assert str(caught.value.filename) == str(root / "a")
        assert not store.exists(root / "a")
        assert store.exists(root / "there")
        store.delete(root / "a")

    def test_listings(self, root):
        store = store_of(root)
        for name in ("f/a", "f/b/c", "f/b/d", "fa/x"):
            store.put(root / name, name.encode())
        assert sorted(store.names(root / "f")) == ["a", "b"]
        assert store.folders(root / "f") == ["b"]
        assert sorted(store.walk(root / "f")) == [("a", 3), ("b/c", 5), ("b/d", 5)]
        assert store.exists(root / "f")
        store.delete(root / "f" / "a")
        assert sorted(store.names(root / "f")) == ["b"]

    def test_a_file_is_read_from_its_beginning_and_again(self, root):
        data = os.urandom(20_000_001)  # several blocks
        store_of(root).put(root / "a", data)
        with open_stream(root / "a") as file:
            for _ in range(2):
                found, buffer = bytearray(), bytearray(1 << 20)
                while count := file.readinto(buffer):
                    found += buffer[:count]
                assert found == data
                file.seek(0)

    def test_what_is_read_ahead_is_the_same(self, root):
        store = store_of(root)
        store.put(root / "a", b"data")
        with read_ahead([root / "a", root / "b"]):
            assert store.get(root / "a", accept) == b"data"
            with pytest.raises(FileNotFoundError):
                store.get(root / "b", accept)


class TestLocations:
    def test_a_url_is_a_location_in_an_object_store(self):
        location = parse_location("path", "s3://bucket/a//b/")
        assert location == ObjectPath("s3://bucket", "a/b")
        assert str(location / "c" / "d/e") == "s3://bucket/a/b/c/d/e"
        assert (location.name, str(location.parent), (location / "x").name) == ("b", "s3://bucket/a", "x")
        assert str(parse_location("path", "gs://bucket")) == "gs://bucket"

    def test_a_path_is_one_on_this_machine(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert parse_location("path", "./s3:/odd") == tmp_path / "s3:/odd"
        assert parse_location("path", "as3:/odd") == tmp_path / "as3:/odd"
        assert parse_location("path", "features") == tmp_path / "features"

    @pytest.mark.parametrize("url", ["https://host/a", "s3:/bucket/a", "s3:///a", "s3://bucket/../a", "ftp://a/b"])
    def test_other_urls_are_refused(self, url):
        with pytest.raises(ArgumentError, match="path: "):
            parse_location("path", url)

    def test_a_path_made_of_a_url_is_refused(self):
        from pathlib import Path

        with pytest.raises(ArgumentError, match="give the URL as text"):
            parse_location("path", Path("s3://bucket/a"))

    def test_nothing_is_written_in_place_in_an_object_store(self):
        with pytest.raises(StoreError, match="featcache copy"):
            folder_of(parse_location("path", "s3://bucket/a"))


class TestFaults:
    @pytest.mark.parametrize("fault", ["before", "after", "503", "cut"])
    def test_a_request_that_fails_once_is_made_again(self, s3, fault):
        root = parse_location("root", f"s3://speech/{uuid.uuid4()}")
        store, data = store_of(root), os.urandom(100_000)
        store.put(root / "a", data)
        seen = set()

        def fail_first(method, path):
            is_first = (method, path) not in seen
            seen.add((method, path))
            return fault if is_first else None

        s3.fault = fail_first
        assert store.get(root / "a", accept) == data
        seen.clear()
        assert bytes(store.get_ranges(root / "a", [10], [50_000])[0]) == data[10:50_010]
        seen.clear()
        assert store.size(root / "a") == 100_000
        seen.clear()
        assert store.size_and_range(root / "a", 99_999, 4) == (100_000, data[-1:])
        seen.clear()
        assert sorted(store.walk(root)) == [("a", 100_000)]
        seen.clear()
        store.put(root / "b", b"b")
        assert store.get(root / "b", accept) == b"b"
        seen.clear()
        assert store.put_if_absent(root / "c", b"c")  # also where the first attempt was done, and only its answer lost
        seen.clear()
        assert not store.put_if_absent(root / "c", b"d")

    def test_what_fails_always_is_one_line(self, s3, monkeypatch):
        from featcache.storage import objects

        monkeypatch.setattr(objects, "_ATTEMPTS", 1)
        s3.fault = lambda method, path: "503"
        monkeypatch.setattr("featcache.storage.clients._clients", OrderedDict())
        monkeypatch.setattr("featcache.storage.clients._RETRIES", 1)
        with pytest.raises(StoreError, match="cannot be read or written: the server answers 503") as caught:
            store_of(ObjectPath("s3://speech", "a")).size(ObjectPath("s3://speech", "a"))
        assert "\n" not in str(caught.value)


@pytest.fixture
def dead_s3(monkeypatch):
    """The environment that leads to a server that nobody runs."""
    pytest.importorskip("obstore")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{nobody.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(clients, "_clients", OrderedDict())
        yield environment


def test_a_server_that_does_not_answer_is_named_and_given_up(dead_s3, monkeypatch, caplog):
    monkeypatch.setattr(clients, "_SILENT_SECONDS", 0.1)
    monkeypatch.setenv("FEATCACHE_STORE_SECONDS", "0.5")
    location, started = ObjectPath("s3://dead", "a"), time.monotonic()
    with caplog.at_level("INFO", "featcache"), pytest.raises(StoreError, match="its host refuses the connection"):
        store_of(location).names(location)
    assert time.monotonic() - started < 3
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        "s3://dead has not answered for 0 s: it is waited for, for up to 0 s (FEATCACHE_STORE_SECONDS"
    )


@pytest.mark.parametrize("text", ["x", "0", "nan", "1e9"])
def test_what_is_no_number_of_seconds_is_refused(dead_s3, monkeypatch, text):
    monkeypatch.setenv("FEATCACHE_STORE_SECONDS", text)
    location = ObjectPath("s3://dead", "a")
    with pytest.raises(ArgumentError, match=f"FEATCACHE_STORE_SECONDS is '{text}': give a number of seconds"):
        store_of(location).names(location)


def test_an_interrupt_does_not_wait_for_a_server_that_does_not_answer(cli, dead_s3):
    code = """
    from featcache.cli import main
    from featcache.storage import clients
    clients._SILENT_SECONDS = 0.1
    main(["ls", "s3://dead/features"])
    """
    running = start_script(cli, code, env=dead_s3)
    running.wait_until(lambda: "s3://dead has not answered" in running.err())
    running.send(signal.SIGINT)
    assert running.wait().code == 130


def test_without_obstore_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setattr(clients, "_package", None)
    monkeypatch.setattr(clients, "_clients", OrderedDict())
    location = parse_location("cache", "s3://bucket/features/zarr.json")
    with pytest.raises(MissingDependencyError, match=r"pip install 'featcache\[cloud\]'"):
        store_of(location).exists(location)
