"""What every store promises: one suite for a folder, the memory of a process, S3 as moto
has it, and as benchmarks do; see `featcache.storage.base`."""

import os
import pickle
import random
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_stores import any_store, lead
from s3_in_memory import s3_in_memory

from featcache.errors import DamagedError
from featcache.storage.base import MARK, checked_key
from featcache.storage.location import parse_location
from featcache.storage.opening import open_store


def shard(name: str) -> dict[str, bytes]:
    """The files of a folder, whose name stands for their content."""
    data = name.encode() * 100
    return {
        MARK: b"{}" + data[:5],
        "features/c/0/0": data,
        "features/zarr.json": b"{}",
        "text/c/0": b"",
        "items": data,
    }


@pytest.fixture(scope="module")
def s3_of_benchmarks():
    with s3_in_memory() as server:
        yield server


@pytest.fixture(params=["folder", "memory", "s3", "s3 of benchmarks"])
def store(request, scratch, monkeypatch):
    if request.param == "folder":
        return open_store(scratch / "cache" / "version")
    pytest.importorskip("obstore")
    if request.param == "s3 of benchmarks":
        lead(monkeypatch, request.getfixturevalue("s3_of_benchmarks"))
    elif request.param == "s3":
        request.getfixturevalue("s3")
    if request.param.startswith("s3"):
        return open_store(parse_location("root", f"s3://speech/{uuid.uuid4()}"))
    return open_store(any_store())


def contents(store) -> dict[str, bytes]:
    return {key: store.read(key, size) for key, size in store.walk()}


class TestReading:
    def test_what_was_put_is_read_and_replaced(self, store):
        store.put("tags/a", b"old")
        store.put("tags/a", memoryview(b"0123456789"))
        store.put("empty", b"")
        assert store.read("tags/a", 10) == b"0123456789"
        assert store.read("empty", 0) == b""
        with pytest.raises(
            DamagedError, match="tags/a: damaged: 10 bytes, and at most 9 are expected"
        ):
            store.read("tags/a", 9)

    def test_ranges(self, store):
        data = random.Random(1).randbytes(400_000)
        store.put("a", data)
        for num_bytes in (len(data), None):
            opened = store.open("a", num_bytes)
            starts = [399_990, 0, 5, 300_000, 7, 399_996, 400_000, 150_000, 300_001]
            sizes = [10, 10, 100, 50_000, 0, 4, 0, 100_000, 3]
            ranges = opened.read_ranges(starts, sizes)
            assert [bytes(one) for one in ranges] == [
                data[a : a + n] for a, n in zip(starts, sizes, strict=True)
            ]
            assert opened.read_ranges([], []) == []
            out = bytearray(1000)
            opened.read_into(memoryview(out), 399_000)
            assert out == data[399_000:]

    def test_blocks_and_maps_are_the_whole_file(self, store):
        for num_bytes in (0, 1, 1_000_001, 9_000_001):  # what is large is fetched in parts
            data = random.Random(2).randbytes(num_bytes)
            store.put("a", data)
            assert b"".join(bytes(block) for block in store.blocks("a", num_bytes)) == data
            passed = bytearray()
            mapped = store.map("a", num_bytes, passed.extend)
            assert mapped.tobytes() == store.map("a", num_bytes).tobytes() == bytes(passed) == data
            assert mapped.dtype == np.uint8
            if num_bytes:
                with pytest.raises(ValueError, match="read-only"):
                    mapped[0] = 0

    def test_a_file_of_another_size_is_damaged(self, store):
        for size in (0, 5, 99, 101, 100_000):
            store.put("a", bytes(size))
            for read in (
                lambda: store.open("a", 100),
                lambda: list(store.blocks("a", 100)),
                lambda: store.map("a", 100),
                lambda: store.map("a", 9_000_000),
                lambda size=size: store.open("a", None).read_ranges([0, size - 1], [1, 2]),
                lambda size=size: store.open("a", size).read_into(
                    memoryview(bytearray(10)), max(0, size - 9)
                ),
                lambda: store.open("a", None).read_ranges([1 << 50], [1 << 50]),
            ):
                with pytest.raises(DamagedError, match="/a: damaged: "):
                    read()

    def test_what_is_cut_off_after_it_was_opened_is_damaged(self, store):
        store.put("a", bytes(1_000_000))
        opened = store.open("a", 1_000_000)
        if isinstance(path := store.location, os.PathLike):
            os.truncate(path / "a", 1000)
        else:
            store.put("a", bytes(1000))
        # ranges that are near are asked for together, of which obstore's own joining ends
        # the process
        for starts in ([0, 500_000], [900], [500_000, 100_000], [200, 850, 1500], [1500]):
            with pytest.raises(DamagedError, match="damaged: it ends before"):
                opened.read_ranges(starts, [200] * len(starts))

    def test_what_is_not_there_is_not_found(self, store):
        store.put("there", b"")
        for key in ("a", "there2/a"):
            for read in (
                lambda key=key: store.read(key, 1),
                lambda key=key: store.open(key, 1),
                lambda key=key: store.open(key, None),
                lambda key=key: store.map(key, 1),
                lambda key=key: list(store.blocks(key, 1)),
                lambda key=key: list(store.blocks(key, 0)),
            ):
                with pytest.raises(FileNotFoundError) as caught:
                    read()
                assert str(caught.value.filename) == str(store.location / key)
            assert not store.exists(key)
            assert store.names(key) == []
            assert list(store.walk(key)) == []

    def test_listings(self, store):
        assert not store.exists("")
        for key in ("f/a", "f/.b", "fa/x", "zarr.json"):
            store.put(key, key.encode())
        store.publish(shard("0b"), "f/0b")
        assert store.names("f") == ["0b", "a"]
        assert {"zarr.json"} <= {*store.names("")} <= {"zarr.json", "f", "fa", "work"}
        assert dict(store.walk("fa")) == {"fa/x": 4}
        files = {f"f/0b/{path}": len(data) for path, data in shard("0b").items()}
        assert dict(store.walk("f")) == {"f/a": 3, "f/.b": 4, **files}
        assert dict(store.walk()) == {"f/a": 3, "f/.b": 4, "fa/x": 4, "zarr.json": 9, **files}
        assert all(store.exists(key) for key in ("", "f", "f/0b", "f/a", "f/0b/features"))
        below = open_store(store.location / "f")
        assert below.names("") == ["0b", "a"]
        assert below.read("a", 3) == b"f/a"
        assert dict(below.walk("0b")) == {
            f"0b/{path}": len(data) for path, data in shard("0b").items()
        }
        assert below.location.resolve().name == "f"

    def test_a_store_is_pickled_as_its_place(self, store):
        store.put("a", b"data")
        assert pickle.loads(pickle.dumps(store)).read("a", 4) == b"data"


class TestWriting:
    def test_a_folder_is_published_whole_and_once(self, store):
        assert store.names("shards") == []
        store.publish(shard("ab"), "shards/ab")
        store.publish({**shard("ab"), MARK: b"of another run"}, "shards/ab")
        store.publish(shard("0c"), "shards/0c")
        assert store.names("shards") == ["0c", "ab"]
        assert contents(store) == {
            f"shards/{name}/{path}": data
            for name in ("ab", "0c")
            for path, data in shard(name).items()
        }

    def test_two_writers_of_a_folder_meet(self, store):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: store.publish(shard("ab"), "shards/ab"), range(4)))
        assert contents(store) == {f"shards/ab/{path}": data for path, data in shard("ab").items()}

    def test_a_folder_that_has_lost_its_mark_or_a_file_is_made_whole(self, store):
        whole = {f"shards/ab/{path}": data for path, data in shard("ab").items()}
        store.publish(shard("ab"), "shards/ab")
        store.remove(f"shards/ab/{MARK}")
        store.publish(shard("ab"), "shards/ab")
        assert contents(store) == whole
        store.put("shards/ab/items", b"x")
        store.put("shards/ab/items", shard("ab")["items"])
        assert contents(store) == whole

    def test_what_is_removed_is_gone(self, store):
        store.publish(shard("ab"), "shards/ab")
        store.publish(shard("abc"), "shards/abc")
        store.put("tags/a", b"")
        for key in ("shards/ab", "shards/ab", "tags/a", "tags/a", "nothing", "shards/abc/items/x"):
            store.remove(key)
        assert store.names("shards") == ["abc"]
        assert contents(store) == {
            f"shards/abc/{path}": data for path, data in shard("abc").items()
        }
        store.remove("shards")
        assert contents(store) == {}

    def test_a_key_never_leads_outside(self, store):
        store.put("a", b"")
        writes = (
            lambda key: store.put(key, b"b"),
            lambda key: store.publish(shard("ab"), key),
            lambda key: store.publish({**shard("ab"), key: b""}, "shards/ab"),
            store.remove,
        )
        reads = (
            lambda key: store.read(key, 1),
            lambda key: store.open(key, 1),
            lambda key: list(store.blocks(key, 1)),
            lambda key: store.map(key, 1),
            store.exists,
            store.names,
            lambda key: list(store.walk(key)),
        )
        for key in ("../a", "/a", "a//b", "a/../b", ".", "a/", "a\0b", "a\nb", "a\udcffb", "a/./b"):
            for use in (*writes, *reads):
                with pytest.raises(DamagedError, match="does not name a file in a cache") as caught:
                    use(key)
                assert str(caught.value).isprintable()
        for use in writes:
            with pytest.raises(DamagedError, match="does not name"):
                use("")
        assert contents(store) == {"a": b""}

    def test_the_folder_of_marks_is_found_again(self, store):
        (store.marks_folder / "mark").write_text("in flight")
        assert (pickle.loads(pickle.dumps(store)).marks_folder / "mark").read_text() == "in flight"
        assert store.sweep() == []
        assert (store.marks_folder / "mark").exists()


FOLDERS = ["shards/00", "shards/0a", "shards/ff", "index/00"]
FILES = ["tags/a", "tags/b", "shards/zarr.json", "zarr.json"]
STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from(FILES), st.binary(max_size=5)),
    st.tuples(st.just("publish"), st.sampled_from(FOLDERS)),
    st.tuples(st.just("remove"), st.sampled_from([*FOLDERS, *FILES, "tags", "shards"])),
    st.tuples(st.just("sweep")),
)


def test_a_store_is_like_a_dict(store, request):
    few = "s3" in request.node.name

    @settings(
        max_examples=3 if few else 60, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
    @given(st.lists(STEPS, max_size=12))
    def run(steps):
        tried, model = open_store(store.location / f"example-{uuid.uuid4()}"), {}
        for what, *arguments in steps:
            if what == "put":
                tried.put(*arguments)
                model[arguments[0]] = arguments[1]
            elif what == "publish":
                tried.publish(shard(arguments[0]), arguments[0])
                model |= {
                    f"{arguments[0]}/{path}": data for path, data in shard(arguments[0]).items()
                }
            elif what == "remove":
                tried.remove(arguments[0])
                model = {
                    key: data
                    for key, data in model.items()
                    if not f"{key}/".startswith(f"{arguments[0]}/")
                }
            else:
                assert tried.sweep(remove=False) == tried.sweep() == []
        assert contents(tried) == model
        for folder in ("shards", "index", "tags"):
            there = {key.split("/")[1] for key in model if key.startswith(f"{folder}/")}
            assert tried.names(folder) == sorted(there)

    run()


@given(st.text("a./\0\n\ud800", max_size=6))
def test_a_key_that_is_taken_names_a_place_below(text):
    try:
        key = checked_key(text)
    except DamagedError:
        return
    assert os.path.normpath(f"/cache/{key}") == f"/cache/{key}"
    assert key == text
