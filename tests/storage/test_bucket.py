"""A store in an object store: requests that are lost, writers that are killed, and
listings of very many names."""

import os
import random
import re
import signal
import time
import uuid
from collections import Counter
from functools import lru_cache, partial
from threading import Thread
from urllib.request import Request, urlopen

import pytest
from forking import fork, join
from loopback import serving
from object_stores import any_store
from s3_in_memory import ENVIRONMENT

from featcache.errors import StoreError
from featcache.storage import bucket, clients
from featcache.storage.base import MARK
from featcache.storage.bucket import Bucket
from featcache.storage.clients import client
from featcache.storage.location import parse_location

pytest.importorskip("obstore")

FILES = {MARK: b"{}", **{f"{name}/c/0": name.encode() * 1000 for name in "abcdef"}}
KEYS = {f"shards/ab/{path}" for path in FILES}


@pytest.fixture
def store(s3) -> Bucket:
    return Bucket(parse_location("root", f"s3://speech/{uuid.uuid4()}"))


@pytest.fixture
def remembered() -> Bucket:
    """A store in memory, which is quick."""
    return Bucket(any_store())


def test_a_shard_takes_few_requests(s3, store):
    store.publish(FILES, "shards/ab")
    assert s3.requests["PUT"] == 8
    assert sum(s3.requests.values()) == 11
    s3.reset()
    store.publish(FILES, "shards/ab")
    assert s3.requests == {"GET": 1}
    s3.reset()
    assert [bytes(block) for block in store.blocks("shards/ab/a/c/0", 1000)] == [b"a" * 1000]
    assert s3.requests == {"GET": 1}
    opened = store.open("shards/ab/a/c/0", 1000)
    assert bytes(opened.read_ranges([996], [4])[0]) == b"aaaa"
    assert s3.requests == {"GET": 2}
    opened.read_ranges([0, 300, 100], [100, 10, 100])
    assert s3.requests == {"GET": 3}
    s3.reset()
    store.sweep()
    assert s3.requests == {"GET": 1}


@pytest.mark.parametrize("fault", ["before", "after", "503", "cut"])
def test_a_request_that_fails_once_is_made_again(s3, store, fault):
    """Whichever it is; also where it was done, and only its answer lost."""
    seen = set()

    def fail_first(method, path):
        is_first = (method, path) not in seen
        seen.add((method, path))
        return fault if is_first else None

    data = random.Random(1).randbytes(3_000_000)
    for step in (
        lambda: store.put("tags/a", data),
        lambda: store.read("tags/a", len(data)) == data,
        lambda: b"".join(map(bytes, store.blocks("tags/a", len(data)))) == data,
        lambda: store.map("tags/a", len(data)).tobytes() == data,
        lambda: store.open("tags/a", None).read_ranges([10], [50_000]) == [data[10:50_010]],
        lambda: store.publish(FILES, "shards/ab"),
        lambda: store.names("shards") == ["ab"],
        lambda: {key for key, _ in store.walk("shards")} == KEYS,
        lambda: store.remove("tags/a"),
        lambda: store.exists("tags/a") is False,
        lambda: store.sweep() == [],
    ):
        seen.clear()
        s3.fault = fail_first
        assert step() in (None, True)
        s3.fault = lambda method, path: None


@pytest.mark.parametrize("fault", ["stall", "silent"])
def test_an_answer_that_stops_is_asked_for_again_and_ends_no_reader(s3, store, monkeypatch, fault):
    """Long before the time to wait for the store is over."""
    data = random.Random(1).randbytes(1_000_000)
    store.put("tags/a", data)
    monkeypatch.setenv("FEATCACHE_STORE_SECONDS", "6")
    monkeypatch.setattr(clients, "_connected", lru_cache(clients._connect))
    for read in (
        lambda: store.read("tags/a", len(data)),
        lambda: b"".join(map(bytes, store.blocks("tags/a", len(data)))),
        lambda: store.open("tags/a", None).read_ranges([0], [len(data)])[0],
    ):
        faults = iter([fault])
        s3.fault = lambda method, path, faults=faults: (
            next(faults, None) if method == "GET" else None
        )
        begun = time.monotonic()
        assert bytes(read()) == data
        assert time.monotonic() - begun < 5
        assert next(faults, None) is None


@pytest.mark.parametrize(
    ("bucket", "fault", "what"),
    [
        ("speech", "503", "cannot be read or written: the server answers 503"),
        ("nothing", None, "no such bucket"),
    ],
)
def test_what_fails_always_is_one_line(s3, monkeypatch, bucket, fault, what):
    s3.fault = lambda method, path: fault
    monkeypatch.setattr(clients, "_RETRIES", 1)
    monkeypatch.setattr(clients, "_PAUSES", ())
    store = Bucket(parse_location("root", f"s3://{bucket}/x"))
    uses = [
        lambda: store.put("a", b""),
        lambda: store.names("shards"),
        lambda: store.publish(FILES, "shards/ab"),
    ]
    for use in (*uses, lambda: store.read("a", 1)):
        with pytest.raises(StoreError, match=what) as caught:
            use()
        assert "\n" not in str(caught.value)


def test_a_large_file_is_sent_in_parts(remembered, monkeypatch):
    monkeypatch.setattr(bucket, "_PART_BYTES", 1 << 20)
    data = random.Random(1).randbytes(5_000_000)
    remembered.put("a", memoryview(data))
    assert remembered.read("a", len(data)) == data


def test_a_full_disk_below_a_copy_is_named(remembered, monkeypatch):
    """Closing the file flushes once more what could not be written."""
    remembered.put("a", bytes(100))
    monkeypatch.setattr(bucket, "_MAPPED_BYTES", 0)
    monkeypatch.setattr("tempfile.TemporaryFile", partial(open, "/dev/full", "w+b"))
    with pytest.raises(StoreError, match="cannot be written: No space left on device: set TMPDIR"):
        remembered.map("a", 100)


def test_a_temporary_folder_that_is_none_is_named(remembered, tmp_path, monkeypatch):
    """That it is gone is not that an object is: whoever looks for marks would take it for
    that."""
    remembered.put("a", bytes(9_000_000))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    for use in (lambda: remembered.marks_folder, lambda: remembered.map("a", 9_000_000)):
        with pytest.raises(
            StoreError, match=r"gone.*: cannot be written: No such file or directory: set TMPDIR"
        ):
            use()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    for use in (lambda: remembered.marks_folder, lambda: remembered.map("a", 9_000_000)):
        with pytest.raises(
            StoreError, match=r"cannot be written: No usable temporary .*gone.*: set TMPDIR"
        ):
            use()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    (tmp_path / "gone").write_text("a file")
    with pytest.raises(StoreError, match="gone: cannot be written: Not a directory: set TMPDIR"):
        remembered.map("a", 9_000_000)


def test_a_forked_process_that_cannot_copy_the_library_says_so_and_its_children_try_again(
    s3, store, monkeypatch
):
    """It is never used as the parent has left it: its requests would wait for ever."""
    store.put("a", b"data")

    def read() -> None:
        assert store.read("a", 4) == b"data"

    def fail() -> None:
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.tempdir", "/nowhere")
            with pytest.raises(StoreError, match=r"forked process: No .*: set TMPDIR"):
                read()
        assert join(fork(read)) == 0
        read()
        assert join(fork(read)) == 0

    assert join(fork(fail)) == 0


# Listings


def make_folders(
    store: Bucket, folder: str, names: list[str], files: tuple[str, ...] = ("a/0", "b/0", MARK)
) -> None:
    connection = client(store.location.root)
    for name in names:
        for path in files:
            connection.put(f"{store.location.key}/{folder}/{name}/{path}", b"x")


def test_very_many_shards_are_listed_side_by_side(remembered, monkeypatch):
    """Slices have few pages each, one after the other, and together are everything once."""
    monkeypatch.setattr(bucket, "_PAGE", 20)
    chance = random.Random(1)
    names = sorted({f"{chance.getrandbits(64):016x}" for _ in range(700)})
    make_folders(remembered, "shards", names)
    # which have not been published
    make_folders(remembered, "shards", ["0123456789abcdef", "zz"], ("a/0",))
    remembered.put(f"shards/{MARK}", b"{}")
    listed, in_one = Bucket._listed, []

    def watched(self, *arguments, **keywords):
        entries = listed(self, *arguments, **keywords)
        in_one.append(len(entries))
        return entries

    monkeypatch.setattr(Bucket, "_listed", watched)
    assert remembered.names("shards") == [*names, MARK]
    assert max(in_one) <= 20 * 2 * bucket._PAGES
    assert len(in_one) > 15
    assert len([*remembered.walk("shards")]) == 3 * 700 + 3
    assert {key for key, _ in remembered.walk("shards")} > {
        f"shards/{name}/{MARK}" for name in names
    }


def test_names_that_are_not_spread_evenly_are_listed_all_the_same(remembered, monkeypatch):
    monkeypatch.setattr(bucket, "_PAGE", 10)
    connection = client(remembered.location.root)
    for number in range(35):
        connection.put(f"{remembered.location.key}/runs/{number:04}", b"")
    versions = [f"fbank80-{number:012x}" for number in range(5)]
    for version in versions:
        make_folders(remembered, version, [f"{number:016x}" for number in range(7)])
    remembered.put(f"{versions[0]}/{MARK}", b"")
    remembered.put(f"{versions[3]}/{MARK}", b"")
    assert remembered.names("runs") == [f"{number:04}" for number in range(35)]
    assert remembered.names("") == [versions[0], versions[3]]
    assert remembered.names(versions[2]) == [f"{number:016x}" for number in range(7)]
    assert len([*remembered.walk()]) == 35 + 5 * 7 * 3 + 2
    make_folders(
        remembered, "index", ["ffffffffffffffff", *(f"{number:016x}" for number in range(30))]
    )
    assert len(remembered.names("index")) == 31


def test_names_of_folders_take_one_request_for_each_and_are_of_no_marker(s3, store):
    """A console makes a folder by an object whose name ends with a slash."""
    for key in ("", "made/"):
        urlopen(
            Request(
                f"http://127.0.0.1:{s3.port}/speech/{store.location.key}/{key}", b"", method="PUT"
            )
        ).close()
    store.put("a/b/c", b"")
    store.publish(FILES, "version")
    s3.reset()
    assert store.names("") == ["version"]
    assert s3.requests == {"GET": 1, "HEAD": 3}


def test_a_store_that_lists_in_no_order_is_listed_whole(remembered, monkeypatch):
    monkeypatch.setattr(bucket, "_PAGE", 10)
    names = [f"{number << 58:016x}" for number in range(40)]
    make_folders(remembered, "shards", names)
    listed = Bucket._listed

    def shuffled(self, folder, after="", until="", at_most=float("inf")):
        entries = listed(self, folder, after, until)
        assert after == until == ""
        random.Random(len(entries)).shuffle(entries)
        return entries[: int(min(at_most, len(entries)))]

    monkeypatch.setattr(Bucket, "_listed", shuffled)
    assert remembered.names("shards") == names


# Writers that are killed, and others beside them


def contents(store: Bucket) -> set[str]:
    return {key for key, _ in store.walk()}


def test_what_a_killed_writer_has_left_is_unseen_and_goes(s3, store, monkeypatch):
    """A kill at each request; whoever publishes the same completes it, and else it goes
    after a day."""
    chance, seen = random.Random(1), Counter()
    for at in (0, 1, 2, 4, 7, 8, 9, 10):
        folder = f"shards/{at:02}"
        pid = fork(lambda folder=folder: store.publish(FILES, folder))
        count = iter(range(100))

        def kill(method, path, at=at, pid=pid, count=count):
            if next(count) == at:
                os.kill(pid, signal.SIGKILL)
                return chance.choice(["before", "after"])
            return None

        s3.fault = kill
        assert join(pid) == -signal.SIGKILL
        s3.fault = lambda method, path: None
        sizes = {key for key, _ in store.walk(folder)}
        is_there = f"{at:02}" in store.names("shards")
        assert not is_there or len(sizes) == 7
        seen[is_there] += 1
        if at % 3 == 0:
            store.publish(FILES, folder)
            assert f"{at:02}" in store.names("shards")
    assert len(seen) == 2
    published = {f"shards/{name}/{path}" for name in store.names("shards") for path in FILES}
    assert store.sweep() == []
    now = store._now()
    monkeypatch.setattr(Bucket, "_now", lambda self: now + 2 * 86400)
    left = {key.split("/")[1] for key, _ in store.walk("shards")} - {*store.names("shards")}
    assert {f"shards/{name}" for name in left} <= {*store.sweep(remove=False)}
    store.sweep()
    assert contents(store) == published
    assert store.sweep() == []


def test_what_somebody_removes_while_it_is_written_is_written_again(s3, store):
    """A prune, or a sweep of another machine: whoever has published a folder has seen it
    whole."""
    once = [True]

    def remove(method, path):
        if once and method == "PUT" and path.endswith(MARK):
            once.clear()
            store.remove("shards/ab")
        return None

    s3.fault = remove
    store.publish(FILES, "shards/ab")
    assert contents(store) == KEYS


def test_what_is_removed_again_and_again_is_an_error(remembered, monkeypatch):
    put = Bucket.put

    def remove(self, key, data):
        put(self, key, data)
        if key.endswith("/c/0"):
            self._delete([key])

    monkeypatch.setattr(Bucket, "put", remove)
    with pytest.raises(
        StoreError, match="shards/ab: somebody removes what is written of it: run the same"
    ):
        remembered.publish(FILES, "shards/ab")


def test_a_removal_beside_a_writer_leaves_all_or_nothing(s3, store):
    for at in range(8):
        counter = iter(range(1000))
        other = Thread(target=lambda: store.remove("shards/ab"))

        def begin(method, path, at=at, counter=counter, other=other):
            if next(counter) == at:
                other.start()

        s3.fault = begin
        store.publish(FILES, "shards/ab")
        other.join()
        s3.fault = lambda method, path: None
        found = {key for key, _ in store.walk("shards")}
        assert found == KEYS or f"shards/ab/{MARK}" not in found
        store.remove("shards/ab")


def test_a_bucket_that_lets_nothing_be_removed_is_written_to(remembered, monkeypatch, caplog):
    """Its notes in `work/` stay, which is said once; a sweep does not end a run either."""

    def refuse(store, keys):
        raise StoreError(f"{store.location / keys[0]}: the server forbids it (403)")

    monkeypatch.setattr(Bucket, "_delete", refuse)
    caplog.set_level("INFO")
    for name in ("shards/ab", "shards/cd"):
        remembered.publish(FILES, name)
    assert remembered.names("shards") == ["ab", "cd"]
    monkeypatch.setattr(bucket, "DAY_SECONDS", -1.0)
    assert remembered.sweep() == []
    assert caplog.text.count("(403)") == 1
    with pytest.raises(StoreError, match="403"):  # what must be removed
        remembered.remove("shards/ab")


# What the environment says


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("AWS_ACCESS_KEY_ID", "HUSH\r", "AWS_ACCESS_KEY_ID has a line end"),
        ("AWS_SECRET_ACCESS_KEY", "HUSH\r\n", "AWS_SECRET_ACCESS_KEY has a line end"),
        ("AWS_SESSION_TOKEN", "HUSH\n", "AWS_SESSION_TOKEN has a line end"),
        ("AWS_REGION", "eu\x1b", "AWS_REGION has a line end or another control"),
        ("AWS_ENDPOINT", "u:HUSH@h", "AWS_ENDPOINT is no URL"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "AWS_ENDPOINT_URL is no URL"),
        ("AWS_SKIP_SIGNATURE", "HUSH", "failed to parse (set: "),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/gone/key.json", "Unable to open service account file"),
        ("GOOGLE_SERVICE_ACCOUNT", "/gone/key.json\r", "GOOGLE_SERVICE_ACCOUNT has a line end"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", '"HUSH"', "Unable to decode service account file"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", '{\n"a": 1}\n', "Unable to decode service account file"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "HUSH!", "Invalid Access Key"),
        ("AZURE_STORAGE_SAS_KEY", "HUSH", "Missing component in SAS"),
    ],
)
def test_what_the_environment_cannot_mean_is_one_line(s3, monkeypatch, capfd, name, value, words):
    """No panic of obstore, which prints a backtrace, and nothing that it quotes."""
    scheme = {"AWS": "s3", "GOOGLE": "gs", "AZURE": "az"}[name.partition("_")[0]]
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(name, value)
    with pytest.raises(StoreError, match=re.escape(words)) as raised:
        clients._connect(f"{scheme}://bucket", retries=False)
    message = str(raised.value)
    assert message.startswith(f"{scheme}://bucket: cannot be opened: ")
    assert name in message
    assert "\n" not in message
    assert "HUSH" not in message
    assert "\n" not in capfd.readouterr().err


def test_other_variables_may_hold_lines(s3, monkeypatch):
    for name, value in (("AWS_KEY_PEM", "-----BEGIN\nx\n"), ("AZURE_CLIENT_ID", "a\r")):
        monkeypatch.setenv(name, value)
    assert clients._connect("s3://bucket", retries=False) is not None


class PanicException(BaseException):
    """As pyo3's: no Exception."""


@pytest.mark.parametrize("is_long", [False, True])
def test_a_panic_of_obstore_is_an_error_of_the_store(is_long):
    def panic(connection, path):
        raise PanicException("called `Result::unwrap()` on an `Err` value: HUSH")

    place = any_store()
    with pytest.raises(StoreError, match=r"cannot be read or written: obstore panics") as raised:
        clients.asked(place, panic, is_long=is_long)
    assert "HUSH" not in str(raised.value)


def test_expired_credentials_have_a_remedy(monkeypatch):
    """S3 answers 400, which a HEAD does not explain. A process reads the environment once."""
    with serving(lambda request: request.send(400, {}, b"")) as address:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}.items():
            monkeypatch.setenv(name, value)
        expired = Bucket(parse_location("root", "s3://expired"))
        remedy = r"400 Bad Request .*: if the credentials have expired, set new ones, and start"
        with pytest.raises(StoreError, match=remedy):
            expired.exists("zarr.json")
