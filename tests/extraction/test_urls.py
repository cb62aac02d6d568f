"""Extraction from audio at URLs: the features of local files, whatever servers do, and
nothing asked for a stranger."""

import re
import sys
import threading

import pytest
from cache_contents import items, only_version
from corpora import Corpus
from extractions import TINY, extract_fbank, reasons_of
from manifests import manifest_of
from object_stores import BUCKET, upload

import featcache
from featcache.audio import remote
from featcache.errors import ManifestError, MissingDependencyError, install_hint
from featcache.storage import clients
from featcache.storage.location import parse_location
from featcache.storage.opening import open_store
from featcache.version.ledger import read_failures

pytest.importorskip("obstore")


@pytest.fixture
def server(server, corpus: Corpus):
    files = [path for path in corpus.folder.rglob("*") if path.is_file()]
    server.files = {f"/{path.relative_to(corpus.folder)}": path.read_bytes() for path in files}
    return server


@pytest.fixture
def bucket(s3, corpus: Corpus):
    upload(corpus.folder, f"s3://{BUCKET}/corpus")
    return s3


# --- values


def test_features_are_those_of_the_files(cli, corpus, truth, bucket, scratch):
    """In an S3 bucket, by the command: bit for bit, and nothing is left to do."""
    manifest, root = corpus.manifest(), ["--root", "s3://speech/corpus"]

    def run(*args):
        return cli(*args, *root, env=bucket.environment)

    run("extract", manifest, "-o", scratch / "c", "--shard-size", TINY).with_code(0)
    assert items(scratch / "c") == truth
    assert "nothing to do" in run("extract", manifest, "-o", scratch / "c").with_code(0).out
    for how in ("stat", "content"):
        run("verify", scratch / "c", "--manifest", manifest, f"--sources={how}").with_code(0)
    again = run(
        "verify", scratch / "c", "--manifest", manifest, "--recompute", 5, "--device", "cpu"
    )
    assert (again.code, "5 bit-identical" in again.out) == (0, True)
    assert "modified" not in cli("show", scratch / "c", "plain-00").with_code(0).out


def test_an_object_that_has_changed_is_extracted_again(cli, corpus, bucket, scratch):
    manifest, root = corpus.manifest(), "s3://speech/corpus"
    extract_fbank(manifest, scratch / "c", root)
    kept = (corpus.folder / "plain/02.wav").read_bytes()
    open_store(parse_location("url", f"{root}/plain")).put("02.wav", kept[:-200] + bytes(200))
    for how in ("stat", "content"):
        args = ["--manifest", manifest, "--root", root, f"--sources={how}", "--no-data"]
        checked = cli("verify", scratch / "c", *args, env=bucket.environment).with_code(1)
        assert "plain-02: s3://speech/corpus/plain/02.wav: has changed since" in checked.out
    assert extract_fbank(manifest, scratch / "c", root).versions[0].extracted == 0
    assert (
        extract_fbank(manifest, scratch / "c", root, check_sources=True).versions[0].extracted == 1
    )


def test_urls_and_files_in_one_manifest(corpus, server, scratch, truth):
    """A third of the paths are URLs, a third file URLs, a third plain."""
    kinds = [lambda path: server.url(f"/{path}"), lambda path: (corpus.folder / path).as_uri(), str]
    rows = [
        {**row, "path": kinds[number % 3](row["path"])} for number, row in enumerate(corpus.rows)
    ]
    assert not extract_fbank(corpus.manifest(rows, "mixed.csv"), scratch / "c").failed
    assert items(scratch / "c") == truth


def test_paths_that_no_store_has_fail_alone(cli, bucket, scratch, tmp_path):
    good = "s3://speech/corpus/plain/00.wav"
    rows = [
        ("a", good),
        ("b", "s3://speech//corpus/plain/00.wav"),
        ("c", "s3://speech/../a.wav"),
        ("d", "s3://speech"),
    ]
    manifest = manifest_of(tmp_path, rows, ("id", "path"))
    assert cli("extract", manifest, "-o", scratch / "c", env=bucket.environment).code == 3
    assert reasons_of(cli, scratch / "c") == dict.fromkeys("bcd", "file_missing")


def test_a_file_is_fetched_once_for_all_its_rows(corpus, server, scratch):
    rows = [row for row in corpus.rows if row["path"] == "long.flac"]
    assert len(rows) == 6
    server.requests.clear()
    extract_fbank(corpus.manifest(rows, "long.csv"), scratch / "c", server.address)
    # its length, its features, and another batch's
    assert server.requests.count("GET /long.flac") <= 3


# --- faults


def test_faults_that_pass_leave_no_trace(corpus, server, scratch, truth):
    for number, path in enumerate(sorted(server.files)):
        server.faults[path] = [["drop", "half", 500, 503, 429, "reset"][number % 6]] * 2
    assert not extract_fbank(corpus.manifest(), scratch / "c", server.address).failed
    assert items(scratch / "c") == truth


def test_faults_that_stay_are_in_the_ledger_and_tried_again_once_they_may_pass(
    cli, corpus, server, scratch
):
    server.always = {"/plain/00.wav": 503, "/plain/01.flac": 403, "/plain/03.flac": "half"}
    gone = server.files.pop("/plain/02.wav")
    server.files["/plain/04.wav"], kept = b"no audio", server.files["/plain/04.wav"]
    extract_fbank(corpus.manifest(), scratch / "c", server.address)
    assert reasons_of(cli, scratch / "c") == {
        "plain-00": "file_unreadable",
        "plain-01": "file_unreadable",
        "plain-02": "file_missing",
        "plain-03": "file_unreadable",
        "plain-04": "not_audio",
        "ünï-ço∂é": "file_unreadable",
    }
    server.always = {}
    again = extract_fbank(corpus.manifest(), scratch / "c", server.address)
    assert (again.versions[0].extracted, reasons_of(cli, scratch / "c").keys()) == (
        4,
        {"plain-02", "plain-04"},
    )
    server.files |= {"/plain/02.wav": gone, "/plain/04.wav": kept}
    again = extract_fbank(corpus.manifest(), scratch / "c", server.address)
    assert (again.versions[0].extracted, reasons_of(cli, scratch / "c")) == (2, {})


def test_a_stopped_run_does_not_wait_for_tries(corpus, server, scratch, monkeypatch):
    """What was taken before the stop is finished: its tries are counted, and the threads
    that fetch ahead give up."""
    server.always = dict.fromkeys(server.files, 503)
    server.always.pop("/plain/00.wav")  # so that one can be had as the run is planned
    monkeypatch.setattr(remote, "_FIRST_WAIT", 0.01)
    stop = threading.Event()
    observer = featcache.Observer(planned=lambda plan: threading.Timer(0.1, stop.set).start())
    given = {
        "cache": scratch / "c",
        "reading": {"root": server.address},
        "observer": observer,
        "stop": stop,
    }
    assert featcache.extract(corpus.manifest(), **given).interrupted


def test_none_of_the_files_is_there(corpus, server, scratch):
    manifest = corpus.manifest()
    with pytest.raises(
        ManifestError, match=r"none of \d+ files checked exists, for example plain/00.wav: http:"
    ):
        extract_fbank(manifest, scratch / "c", server.url("/elsewhere"))
    with pytest.raises(
        ManifestError, match=r"checked can be had, for example .*: its host refuses the connection"
    ):
        extract_fbank(manifest, scratch / "c", "http://127.0.0.1:1")
    server.always = dict.fromkeys(server.files, 403)
    with pytest.raises(
        ManifestError, match=r"checked can be had, for example .*: the server forbids it \(403\)"
    ):
        extract_fbank(manifest, scratch / "c", server.address)
    assert not (scratch / "c").exists()


def test_another_corpus_with_the_same_paths_is_refused(corpus, server, scratch):
    extract_fbank(corpus.manifest(), scratch / "c", server.address)
    moved = {f"/moved{path}": data for path, data in server.files.items()}
    server.files |= moved | {f"/other{path}": data + b"more" for path, data in server.files.items()}
    assert (
        extract_fbank(corpus.manifest(), scratch / "c", server.url("/moved")).versions[0].extracted
        == 0
    )
    with pytest.raises(
        ManifestError, match=r"\d+ of \d+ files checked are not what .* was extracted from"
    ):
        extract_fbank(corpus.manifest(), scratch / "c", server.url("/other"))


def test_without_credentials_it_says_which(corpus, scratch, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    clients._connected.cache_clear()
    with pytest.raises(
        ManifestError, match="there are no credentials: set AWS_ACCESS_KEY_ID and "
    ) as raised:
        extract_fbank(corpus.manifest(), scratch / "c", "s3://speech/corpus")
    assert "hush" not in str(raised.value)
    clients._connected.cache_clear()

    monkeypatch.setitem(sys.modules, "obstore", None)
    clients._connected.cache_clear()
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("cloud"))):
        extract_fbank(corpus.manifest(), scratch / "c", "s3://speech/corpus")
    assert not (scratch / "c").exists()


def test_secrets_in_a_manifest_are_refused_and_not_told(cli, tmp_path, scratch):
    paths = [
        "https://user:hush@h/a.wav",
        "https://h/a.wav?X-Amz-Signature=hush",
        "https://h/a.wav?id=7",
    ]
    manifest = manifest_of(tmp_path, list(zip("abc", paths, strict=True)), ("id", "path"))
    refused = cli("extract", manifest, "-o", scratch / "c")
    assert (refused.code, refused.err.count("\n"), "hush" in refused.err) == (2, 4, False)
    assert "line 2: path has a user or a password" in refused.err
    assert "line 3: path has a query" in refused.err
    assert "--allow-queries" in refused.err.splitlines()[-1]


def test_a_query_is_part_of_a_path_if_the_user_says_so(cli, server, tmp_path, scratch):
    manifest = manifest_of(
        tmp_path, [("a", "plain/02.wav?id=7"), ("b", "plain/02.wav")], ("id", "path")
    )
    refused = cli("extract", manifest, "--root", server.address, "-o", scratch / "c").with_code(2)
    assert "line 2: path has a query" in refused.err
    taken = cli(
        "extract", manifest, "--root", server.address, "-o", scratch / "c", "--allow-queries"
    )
    assert (taken.code, "GET /plain/02.wav?id=7" in server.requests) == (0, True)
    assert len(featcache.FeatureDataset(featcache.open(scratch / "c"), manifest=manifest)) == 2


# --- caches of strangers


@pytest.fixture
def strangers(cli, corpus, server, scratch):
    """A cache whose items and failures are at URLs."""
    server.files["/plain/04.wav"] = b"no audio"
    extract_fbank(corpus.manifest(), scratch / "c", server.address)
    assert reasons_of(cli, scratch / "c") == {"plain-04": "not_audio"}
    server.requests.clear()
    return scratch / "c"


def test_a_cache_alone_makes_no_requests(cli, corpus, server, strangers):
    for command in (
        ["verify", "--sources"],
        ["verify", "--sources=content"],
        ["verify", "--sources", "--manifest", corpus.manifest()],
        ["verify", "--sources", "--root", server.address],
        ["verify", "--recompute", 3, "--device", "cpu"],
    ):
        ran = cli(command[0], strangers, *command[1:])
        assert ran.code in (1, 3), ran.err
        assert "Traceback" not in ran.err
    assert server.requests == []
    checked = cli("verify", strangers, "--sources")
    assert " not checked: featcache asks only for URLs that --manifest has" in checked.out
    cli("verify", strangers, "--sources", "--manifest", corpus.manifest(), "--root", server.address)
    assert server.asked("HEAD") > 10


def test_failures_of_a_cache_are_not_asked_for(corpus, server, strangers):
    """Under another root, the same rows failed elsewhere."""
    extract_fbank(corpus.manifest(), strangers, corpus.folder)
    assert server.requests == []
    assert "plain-04" in read_failures(only_version(strangers))[0].id
