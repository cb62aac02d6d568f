"""Audio files at URLs: the same samples, whatever servers do on the way, and what is said
if they cannot be had."""

import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from urllib.parse import quote

import numpy as np
import pytest
from audio_files import KINDS, bad_files, write_tone
from decoded_audio import WHOLE, in_seconds
from processes import open_files

from featcache.audio import remote
from featcache.audio.content_hash import ContentHashes
from featcache.audio.decode import decode, probe, probe_seconds
from featcache.audio.remote import fetch, stamp_of
from featcache.errors import AudioError, Reason
from featcache.extraction.downloads import Downloads
from featcache.manifest.audio_locations import Url, is_audio_url, locate
from featcache.manifest.segments import Utterance
from featcache.storage import clients

pytest.importorskip("obstore")

PASSING = ["drop", "half", "reset", "replace", 500, 502, 503, 429, (429, {"Retry-After": "1"}), 408]


def at_url(server, path: Path) -> Url:
    server.files[f"/{path.name}"] = path.read_bytes()
    return Url(server.url(f"/{path.name}"))


def bytes_of(url: str) -> bytes:
    with fetch(Url(url)).open() as file:
        return file.read()


def fault_of(url: str) -> AudioError:
    with pytest.raises(AudioError) as raised:
        fetch(Url(url))
    return raised.value


# --- the samples


@pytest.mark.parametrize("in_memory", [remote.IN_MEMORY, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_the_file(files, server, monkeypatch, kind, in_memory):
    path, whole = files[kind]
    monkeypatch.setattr(remote, "IN_MEMORY", in_memory)
    cuts = [WHOLE, in_seconds(1000, 9000), in_seconds(500, 1200), WHOLE]
    here = list(decode(path, cuts, hashes=ContentHashes()))
    there = list(decode(at_url(server, path), cuts, hashes=ContentHashes()))
    assert len(whole)
    for (samples, source), (others, other) in zip(here, there, strict=True):
        np.testing.assert_array_equal(samples, others)
        assert other == source._replace(mtime_ns=other.mtime_ns)
        assert other.mtime_ns < 0
    assert server.requests == [f"GET /{path.name}"]


def test_bad_files_are_as_bad_at_urls(tmp_path, server):
    for name, (path, reason) in bad_files(tmp_path).items():
        if os.path.isfile(path):
            (fault,) = decode(at_url(server, path), [WHOLE])
            assert (name, fault.reason) == (name, reason)
            assert str(fault) == str(next(iter(decode(path, [WHOLE]))))


def test_nothing_stays_open(tmp_path, server, monkeypatch):
    url = at_url(server, write_tone(tmp_path / "a.wav"))
    assert not isinstance(next(iter(decode(url, [WHOLE]))), AudioError)
    before = [name for name in open_files("/") if name.endswith("(deleted)")]  # copies
    for limit in (32 << 20, 100):
        monkeypatch.setattr(remote, "IN_MEMORY", limit)
        for _ in decode(url, [WHOLE, WHOLE]):
            pass
        assert [name for name in open_files("/") if name.endswith("(deleted)")] == before


def test_the_header_alone_tells_the_length(tmp_path, server):
    for suffix in ("wav", "flac"):
        path = write_tone(tmp_path / f"long.{suffix}", 30.0, kind=f"{suffix}-16")
        url = at_url(server, path)
        assert probe_seconds(url) == probe_seconds(path) == 30.0
        assert probe(url).sample_rate == probe(path).sample_rate
        assert path.stat().st_size > remote._BEGINNING or suffix == "flac"
    server.has_ranges = False
    assert probe_seconds(url) is None
    assert probe_seconds(Url(server.url("/gone.wav"))) is None


# --- what servers do


@pytest.fixture(params=["http", "s3", "gs"])
def base(request, server, monkeypatch):
    """The beginning of the server's URLs, which does as an object store, too: it is asked
    for `/bucket/key`."""
    if request.param == "http":
        return server.address
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.address)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    account = {"gcs_base_url": server.address, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(account))
    clients._connected.cache_clear()
    server.has_dates = True
    return f"{request.param}:/"


@pytest.mark.parametrize("in_memory", [remote.IN_MEMORY, 100])
@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_what_passes_is_tried_again(server, base, monkeypatch, fault, in_memory):
    monkeypatch.setattr(remote, "IN_MEMORY", in_memory)
    content = bytes(range(256)) * 500
    server.files["/b/a"], server.faults["/b/a"] = content, [fault, fault]
    assert bytes_of(f"{base}/b/a") == content  # as it was replaced twice, too
    assert server.requests == ["GET /b/a"] * 3
    server.faults["/b/a"] = [fault]
    stamp_of(Url(f"{base}/b/a"))


@pytest.mark.parametrize("fault", PASSING, ids=str)
def test_tries_end(server, base, fault):
    server.files["/b/a"], server.always["/b/a"] = bytes(1000), fault
    failed = fault_of(f"{base}/b/a")
    assert (failed.reason, len(server.requests)) == (Reason.FILE_UNREADABLE, remote.TRIES)
    assert str(failed).startswith("cannot be fetched: the ")
    assert str(failed).endswith(f"({remote.TRIES} tries)")
    assert "secret" not in str(failed)


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (404, Reason.FILE_MISSING, "there is no such file"),
        (403, Reason.FILE_UNREADABLE, "cannot be fetched: the server forbids it (403)"),
        (401, Reason.FILE_UNREADABLE, "cannot be fetched: the server forbids it (401)"),
        (400, Reason.FILE_UNREADABLE, "cannot be fetched: the server answers 400 Bad Request"),
    ],
)
def test_what_stays_is_not_tried_again(server, base, status, reason, message):
    server.always["/b/a"] = status
    failed = fault_of(f"{base}/b/a")
    assert (failed.reason, str(failed), len(server.requests)) == (reason, message, 1)


def test_a_host_that_is_not_there(server):
    for url in ("http://127.0.0.1:1/a", "http://no-such-host.invalid/a"):
        started = perf_counter()
        failed = fault_of(url)
        assert failed.reason == Reason.FILE_UNREADABLE
        assert str(failed).startswith("cannot be fetched: its host ")
        assert perf_counter() - started < 30


def test_a_redirection_is_followed_and_its_signature_is_not_told(server):
    server.files["/b"] = b"abc"
    server.always["/a"] = (302, {"Location": "/b?sig=SECRET"})
    assert bytes_of(server.url("/a")) == b"abc"
    server.always["/b"] = 503
    assert "SECRET" not in str(fault_of(server.url("/a")))
    assert "SECRET" not in str(fault_of(server.url("/a")).__cause__)


@pytest.mark.parametrize(
    "path", ["/a b.wav", "/ü/é.wav", "/a+b=c.wav", "/x//y.wav", "/100%.wav", "/a?b.wav"]
)
def test_names_of_files_are_what_servers_know(server, path):
    server.files[path] = path.encode()
    assert bytes_of(server.url(quote(path))) == path.encode()
    if not set(path) & {"%", "?"}:
        assert bytes_of(server.url(path)) == path.encode()
    server.files["/a"] = b"abc"
    assert bytes_of(server.url("/a?author=1&b=%20")) == b"abc"
    assert server.requests[-1] == "GET /a?author=1&b=%20"  # a query is part of a URL


# --- what tells whether a file has changed


def test_an_etag_tells_that_a_file_has_changed(server):
    server.files["/a"] = b"abc"
    url = Url(server.url("/a"))
    before = stamp_of(url)
    assert before == fetch(url).stamp == stamp_of(url)
    assert (before.size, -(2**63) <= before.mtime_ns < 0) == (3, True)
    server.files["/a"] = b"abd"
    assert stamp_of(url).mtime_ns != before.mtime_ns


def test_without_an_etag_it_is_the_date(server):
    server.files["/a"], server.has_etags = b"abc", False
    assert stamp_of(Url(server.url("/a"))) == (3, 0)
    server.has_dates = True
    assert stamp_of(Url(server.url("/a"))) == (3, 1795348800 * 10**9)


@pytest.mark.parametrize("status", [403, 405, 501])
def test_a_server_that_refuses_head_is_asked_for_the_file(server, status):
    server.files["/a"], server.faults["/a"] = b"abc", [status]
    assert stamp_of(Url(server.url("/a"))) == fetch(Url(server.url("/a"))).stamp
    server.always["/a"] = 405
    with pytest.raises(AudioError, match="the server answers 405"):
        stamp_of(Url(server.url("/a")))


# --- URLs


def test_where_a_path_is():
    root, url = Path("/corpus"), Url("s3://bucket/corpus/")
    assert locate(root, "a/b.wav") == "/corpus/a/b.wav"
    assert locate(root, "s3://b/k.wav") == Url("s3://b/k.wav")
    assert (
        locate(root, "file:///x/a%20b.wav")
        == locate(url, "file://localhost/x/a%20b.wav")
        == "/x/a b.wav"
    )
    assert locate(url, "./a/b.wav") == Url("s3://bucket/corpus/a/b.wav")
    assert locate(url, "https://h/a.wav") == Url("https://h/a.wav")
    assert locate(url, "/a.wav") == "/a.wav"
    assert locate(root, "hf://x/a.wav") == "/corpus/hf:/x/a.wav"
    for path in ("./a//b.wav", "a/./b.wav", "a/b.wav/"):
        assert locate(root, path) == "/corpus/a/b.wav"
    assert locate(Path(), "a/b.wav") == "a/b.wav"
    assert locate(Path("/"), "a") == "/a"
    assert is_audio_url("S3://b")
    assert not any(map(is_audio_url, ("file:///x", "a.wav", "hf://x", "as3://b")))


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/", "s3://bucket//a.wav", "s3://bucket/a/../b.wav"]
)
def test_keys_that_no_store_has_are_not_asked_for(url, monkeypatch):
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert fault_of(url).reason == Reason.FILE_MISSING


# --- reading ahead


def rows(*paths: str) -> list[Utterance]:
    return [Utterance(id=str(number), path=path) for number, path in enumerate(paths)]


def test_what_is_expected_is_fetched_before_it_is_taken(server):
    server.files |= {f"/{name}": name.encode() * 100 for name in "abc"}
    with Downloads(Url(server.address), 2, pytest.fail, threading.Event()) as downloads:
        downloads.expect(rows("a", "b"))
        downloads.expect(rows("b", "/local.wav"))
        for name in "abb":
            with downloads.take(Url(server.url(f"/{name}"))).open() as file:
                assert file.read() == name.encode() * 100
        assert sorted(server.requests) == ["GET /a", "GET /b"]  # both that want b share it
        assert not downloads._files
        downloads.take(Url(server.url("/c")))
        downloads.take(Url(server.url("/b")))
    assert server.asked("GET") == 4


def test_what_is_held_ahead_is_bounded(server, monkeypatch):
    monkeypatch.setattr("featcache.extraction.downloads._AHEAD_BYTES", 1000)
    server.files |= {"/a": bytes(600), "/b": bytes(600)}
    with Downloads(Url(server.address), 2, pytest.fail, threading.Event()) as downloads:
        assert downloads.is_room
        downloads.expect(rows("a"))
        downloads.expect(rows("b"))
        for url in (server.url("/a"), server.url("/b")):
            downloads._files[Url(url)].fetched.result()
        assert not downloads.is_room
        downloads.take(Url(server.url("/a")))
        assert downloads.is_room


def test_it_gives_up_once_nothing_can_be_fetched_any_more(server, monkeypatch):
    monkeypatch.setattr("featcache.extraction.downloads._MOST_IN_A_ROW", 5)
    names = [f"{number}" for number in range(40)]
    server.files |= {f"/{name}": b"abc" for name in names}
    server.always = {f"/{name}": 503 for name in names if int(name) % 4}
    said: list[str] = []
    with Downloads(Url(server.address), 2, said.append, threading.Event()) as downloads:
        downloads._threads._max_workers = 1  # one after the other
        downloads.expect(rows(*names))
        for name in names:
            with suppress(AudioError):
                downloads.take(Url(server.url(f"/{name}")))
        assert said == []
        server.always = {f"/{name}": 503 for name in names}
        downloads.expect(rows(*names))
        with pytest.raises(AudioError, match="cannot be fetched"):
            downloads.take(Url(server.url("/39")))
    assert len(said) == 1
    assert said[0].startswith(
        "5 audio files in a row could not be fetched, the last one http://127.0.0.1"
    )
    assert said[0].endswith("the server answers 503 Service Unavailable (8 tries)")


def test_a_panic_of_obstore_is_a_failure_of_the_file(server, files, monkeypatch):
    url = at_url(server, next(iter(files.values()))[0])

    class PanicException(BaseException):
        """As pyo3's: no Exception."""

    class Store:
        def get(self, key):
            raise PanicException("HUSH")

    monkeypatch.setattr(remote, "_address", lambda url: (Store(), ""))
    assert fault_of(url).reason == Reason.FILE_UNREADABLE
    assert "obstore panics" in str(fault_of(url))


def test_credentials_that_make_no_sense_are_named(monkeypatch):
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/gone/key.json")
    clients._connected.cache_clear()
    assert "(set: GOOGLE_APPLICATION_CREDENTIALS)" in str(fault_of("gs://bucket/a.wav"))
    clients._connected.cache_clear()
