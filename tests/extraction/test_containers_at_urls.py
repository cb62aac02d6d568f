"""Containers at URLs: the features of the files that were packed, fetched by few
requests, and nothing unasked."""

import tempfile
import threading
import time

import pytest
from cache_contents import items, provenance
from containers import packed
from corpora import Corpus
from extractions import extract_fbank, failures_of, reasons_of
from forking import wait_until
from object_stores import BUCKET, upload

from featcache.audio import members, remote
from featcache.audio.kept import Kept
from featcache.audio.members import copy_of
from featcache.errors import AudioError
from featcache.extraction.downloads import Downloads
from featcache.manifest.audio_locations import Member, Url
from featcache.manifest.segments import Utterance

pytest.importorskip("obstore")


@pytest.fixture
def server(server, monkeypatch):
    """The web server, and a process that has fetched nothing, and asks in small pieces."""
    monkeypatch.setattr(remote, "_RANGE", 100_000)
    forget(monkeypatch)
    return server


def forget(monkeypatch):
    """What was fetched, and what servers said."""
    monkeypatch.setattr(members, "_COPIES", Kept(1 << 30, lambda copy: copy.stamp.size))
    monkeypatch.setattr(members, "_STAMPS", Kept(100, seconds=60))


def serve(server, folder, kind="tar"):
    """Let the server have the containers of a folder, and nobody else."""
    for path in [path for path in folder.iterdir() if path.name.endswith(f".{kind}")]:
        server.files[f"/{path.name}"] = path.read_bytes()
        path.unlink()


@pytest.fixture
def served(plain, server, scratch):
    """The plain corpus in two tars, which the server has, and nobody else."""
    inside = packed(plain, scratch, "tar")
    serve(server, scratch)
    return inside


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "parquet", "arrow", "ark"])
def test_features_are_those_of_the_files(corpus, truth, server, scratch, kind):
    """Bit for bit, by a request for each piece of a container; the members have the sizes
    of the files."""
    inside = packed(corpus, scratch, kind)
    serve(server, scratch, kind)
    manifest = inside.manifest()
    extract_fbank(manifest, scratch / "c", server.address)
    assert items(scratch / "c") == truth
    containers = {path: -(-len(data) // 100_000) for path, data in server.files.items()}
    for path, pieces in containers.items():
        assert server.requests.count(f"GET {path}") == pieces
        assert server.requests.count(f"HEAD {path}") == 1
    sizes = {row["id"]: (corpus.folder / row["path"]).stat().st_size for row in corpus.rows}
    assert {id_: item.size for id_, item in provenance(scratch / "c").items()} == sizes
    assert (
        extract_fbank(manifest, scratch / "c", server.address, check_sources=True)
        .versions[0]
        .extracted
        == 0
    )


def test_commands_find_the_members_as_they_were(cli, served, server, scratch):
    """Who gives no manifest causes no request."""
    manifest = served.manifest()
    root = ["--root", server.address]
    assert (
        "each is fetched whole to"
        in cli("extract", manifest, "-o", scratch / "c", *root).with_code(0).err
    )
    server.requests.clear()
    for args in (["--sources"], ["--sources=content"], ["--recompute", "2", "--device", "cpu"]):
        told = cli("verify", scratch / "c", *args)
        assert not server.requests
        assert told.code == ("--recompute" in args)
    for args, gets in (
        (["--sources"], 0),
        (["--sources=content"], 2),
        (["--recompute", "12", "--device", "cpu"], 2),
    ):
        server.requests.clear()
        assert cli("verify", scratch / "c", "--manifest", manifest, *root, *args).code == 0
        assert (len(set(server.requests)), server.asked("HEAD")) == (2 + gets, 2)
    probed = cli("probe", "fbank80", manifest, *root, "--utterances", "3", "--device", "cpu")
    assert (probed.code, "each is fetched whole to" in probed.err) == (0, True)

    server.files["/audio_1.tar"] += bytes(512)
    told = cli("verify", scratch / "c", "--manifest", manifest, *root, "--sources", "--no-data")
    assert (
        told.code,
        told.out.count("has changed since: its container's ETag or date is another"),
    ) == (1, 6)
    assert (
        cli(
            "verify", scratch / "c", "--manifest", manifest, *root, "--sources=content", "--no-data"
        ).code
        == 0
    )
    again = cli("extract", manifest, "-o", scratch / "c", *root, "--check-sources", "--json")
    assert again.json()["versions"][0]["extracted"] == 6


def test_faults_that_pass_leave_no_trace(plain, served, server, scratch):
    for path in server.files:
        server.faults[path] = ["drop", 503, "half", 429, "reset"]
    assert not extract_fbank(served.manifest(), scratch / "c", server.address).failed
    assert set(items(scratch / "c")) == set(plain.ids)


@pytest.mark.parametrize("lacks", ["has_ranges", "has_etags"])
def test_servers_that_give_only_whole_files_or_no_etags(served, server, scratch, lacks):
    setattr(server, lacks, False)
    assert not extract_fbank(served.manifest(), scratch / "c", server.address).failed
    assert (
        not extract_fbank(served.manifest(), scratch / "c", server.address, check_sources=True)
        .versions[0]
        .extracted
    )


def test_faults_that_stay_are_in_the_ledger(cli, served, server, scratch, monkeypatch):
    """Of the container that is not had all utterances, and of one that is cut short,
    those that are lost."""
    whole = dict(server.files)
    server.files["/audio_0.tar"] = whole["/audio_0.tar"][: len(whole["/audio_0.tar"]) // 2]
    server.always["/audio_1.tar"] = 403
    served.rows[0]["path"] = "audio_0.tar/none.wav"
    manifest = served.manifest()
    extract_fbank(manifest, scratch / "c", server.address)
    found = reasons_of(cli, scratch / "c")
    second = {row["id"] for row in served.rows if row["path"].startswith("audio_1")}
    assert {id_ for id_, reason in found.items() if reason == "file_unreadable"} == second
    assert {reason for id_, reason in found.items() if id_ not in second} == {"truncated"}

    server.always.clear()
    forget(monkeypatch)
    server.requests.clear()
    assert extract_fbank(manifest, scratch / "c", server.address).versions[0].extracted == 6
    # it is what it was, so its members would fail again
    assert not server.requests.count("GET /audio_0.tar")
    server.files = whole
    forget(monkeypatch)
    extract_fbank(manifest, scratch / "c", server.address)
    assert reasons_of(cli, scratch / "c") == {served.rows[0]["id"]: "file_missing"}
    server.requests.clear()
    extract_fbank(manifest, scratch / "c", server.address)
    assert not server.asked("GET")


def test_a_container_that_changes_while_it_is_fetched(cli, served, server, scratch):
    server.faults["/audio_0.tar"] = [None, "replace"]
    extract_fbank(served.manifest(), scratch / "c", server.address)
    lost = {
        row["id"]: "file_unreadable" for row in served.rows if row["path"].startswith("audio_0")
    }
    assert reasons_of(cli, scratch / "c") == lost


def test_one_that_is_too_large_for_the_disk_is_said_to_be(
    cli, served, server, scratch, monkeypatch
):
    monkeypatch.setattr(members, "_LEFT_FREE", 1 << 60)
    extract_fbank(served.manifest(), scratch / "c", server.address)
    message = failures_of(cli, scratch / "c")[0]["message"]
    assert message.startswith(
        f"the container cannot be copied to {tempfile.gettempdir()}: it has 0.0 GB, and "
    )
    assert message.endswith("GB would not be left free there: set TMPDIR to a disk with more room")
    assert not server.asked("GET")


def test_what_is_unpacked_is_not_fetched_again(plain, server, scratch, monkeypatch):
    """Where there is room for one copy alone."""
    inside = packed(plain, scratch, "tar.gz")
    serve(server, scratch, "tar.gz")
    monkeypatch.setattr(members, "_COPIES", Kept(1))
    container, _, name = inside.rows[0]["path"].partition("/")
    member = Member(Url(server.url(f"/{container}")), name)
    assert [copy_of(member).stamp for _ in range(3)] == [copy_of(member).stamp] * 3
    assert server.asked("GET") == 1


def test_a_network_that_goes_away_ends_the_run(plain, server, scratch, monkeypatch):
    monkeypatch.setattr(remote, "TRIES", 1)
    rows = [{**row, "path": f"audio_{number}.tar/a.wav"} for number, row in enumerate(plain.rows)]
    server.files = {f"/audio_{number}.tar": b"tar" for number in range(12)}
    server.faults = {path: [None] for path in server.files}
    server.always = dict.fromkeys(server.files, 503)
    summary = extract_fbank(Corpus(scratch, rows).manifest(), scratch / "c", server.address)
    assert (
        "4 containers in a row could not be fetched, the last one http" in summary.too_many_failures
    )


def test_the_next_containers_are_fetched_ahead(plain, server):
    server.files = {
        f"/audio_{number}.tar": plain.folder.joinpath("00.wav").read_bytes() for number in range(9)
    }
    rows = iter(
        [Utterance(id=str(number), path=f"audio_{number // 2}.tar/a.wav") for number in range(18)]
    )

    def asked():
        return {request for request in server.requests if request.startswith("GET")}

    with Downloads(Url(server.address), 2, pytest.fail, threading.Event()) as downloads:
        for wanted, count in (None, 2), (0, 3), (0, 3), (2, 5), (4, 7):
            if wanted is not None:
                with pytest.raises(AudioError, match="is no tar"):
                    downloads.take(Member(Url(server.url(f"/audio_{wanted}.tar")), "a.wav"))
            while downloads.is_room:
                # At last, a batch whose rows lie in many containers.
                assert downloads.expect(rows if wanted == 4 else [next(rows)])
            wait_until(
                lambda count=count: (
                    asked() == {f"GET /audio_{number}.tar" for number in range(count)}
                )
            )
        time.sleep(0.1)
        assert len(asked()) == 7  # and still no more of them


def test_in_a_bucket(cli, plain, s3, scratch):
    """Of S3, by the command; by few requests, though each takes long."""
    inside = packed(plain, scratch, "tar")
    s3.empty()
    upload(scratch, f"s3://{BUCKET}/corpus")
    for tar in scratch.glob("*.tar"):
        tar.unlink()
    s3.reset()
    s3.seconds = 0.05
    manifest = inside.manifest()
    cli(
        "extract",
        manifest,
        "--root",
        f"s3://{BUCKET}/corpus",
        "-o",
        scratch / "c",
        env=s3.environment,
    ).with_code(0)
    assert set(items(scratch / "c")) == set(plain.ids)
    assert s3.requests == {"HEAD": 2, "GET": 2}
