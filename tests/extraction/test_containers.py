"""Extraction from tars and tables: the features of the files that were packed, and a
typed failure for what is lost."""

import os
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from cache_contents import items, provenance
from containers import packed, write_tar
from corpora import Corpus
from extractions import extract_fbank, failures_of, reasons_of

import featcache
from featcache.audio import members
from featcache.errors import ManifestError, MissingDependencyError, install_hint
from featcache.extraction.audio_files import row_seconds
from featcache.manifest.read import read_manifest


@pytest.mark.parametrize("kind", ["tar", "tar.gz", "parquet", "arrow"])
def test_features_are_those_of_the_files(cli, corpus, truth, scratch, kind):
    """Bit for bit, segments too; and whatever asks about the audio again, finds it as it
    was."""
    manifest = packed(corpus, scratch, kind).manifest()
    cache = scratch / "c"
    extract_fbank(manifest, cache)
    assert items(cache) == truth
    sizes = {row["id"]: (corpus.folder / row["path"]).stat().st_size for row in corpus.rows}
    times = {path.stat().st_mtime_ns for path in scratch.glob(f"*.{kind}")}
    found = provenance(cache)
    assert {id_: item.size for id_, item in found.items()} == sizes
    assert {item.mtime_ns for item in found.values()} == times
    assert extract_fbank(manifest, cache, check_sources=True).versions[0].extracted == 0
    for how in ("stat", "content"):
        cli("verify", cache, f"--sources={how}", "--no-data").with_code(0, err="")


def test_what_has_changed_is_told_and_extracted_again(cli, plain, scratch):
    """By the size of the member, and when its container was modified; or by its bytes."""
    corpus = packed(plain, scratch, "tar")
    extract_fbank(corpus.manifest(), scratch / "c")
    os.utime(scratch / "audio_1.tar", ns=(1, 1))
    told = cli("verify", scratch / "c", "--sources", "--no-data", "--json")
    found = {
        problem["id"]: problem["message"] for problem in told.json()["versions"][0]["problems"]
    }
    second = {row["id"] for row in corpus.rows if row["path"].startswith("audio_1")}
    assert found.keys() == second
    assert {message.rpartition(": ")[2] for message in found.values()} == {
        "its container's mtime is another"
    }
    assert cli("verify", scratch / "c", "--sources=content", "--no-data").code == 0
    inside = {path.name: path.read_bytes() for path in plain.folder.glob("*.wav")}
    same_size = inside["10.wav"][:-1] + bytes([inside["10.wav"][-1] ^ 1])
    others = {name: inside[name] for name in sorted(inside)[6:11]}
    write_tar(scratch / "audio_1.tar", others | {"10.wav": same_size})
    told = cli("verify", scratch / "c", "--sources=content", "--no-data", "--json")
    found = {
        problem["id"]: problem["message"] for problem in told.json()["versions"][0]["problems"]
    }
    assert found.keys() == {"utt-10", "utt-11"}
    assert found["utt-10"].endswith("10.wav: has changed since: other bytes, of the same number")
    again = cli("extract", corpus.manifest(), "-o", scratch / "c", "--check-sources", "--json")
    assert again.json()["versions"][0]["extracted"] == 5  # and what is gone cannot be


def test_a_container_that_is_cut_short_loses_what_it_has_lost(cli, plain, scratch):
    corpus = packed(plain, scratch, "tar")
    tar = scratch / "audio_1.tar"
    os.truncate(tar, tar.stat().st_size // 2)
    cli("extract", corpus.manifest(), "-o", scratch / "c").with_code(3)
    lost = reasons_of(cli, scratch / "c")
    assert set(lost.values()) == {"truncated"}
    assert set(plain.ids) - set(lost) == set(items(scratch / "c"))
    assert {row["id"] for row in corpus.rows if row["path"].startswith("audio_0")}.isdisjoint(lost)
    assert len(lost) == 3
    assert (
        "0 extracted, 9 already "
        "there, 3 failed" in cli("extract", corpus.manifest(), "-o", scratch / "c").out
    )
    packed(plain, scratch, "tar")
    assert cli("extract", corpus.manifest(), "-o", scratch / "c").code == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("a.tgz/{}.wav", "none of 12 files checked exists"),
        ("none.tar/{}.wav", "none of 12 files checked exists"),
        ("raw.1.ark:{}[0:99]", "ranges of an archive's entries are not read, only whole ones"),
    ],
)
def test_what_is_no_container_that_can_be_read_is_refused_before_the_run(
    plain, scratch, path, words
):
    write_tar(scratch / "a.tar", {})
    rows = [{"id": row["id"], "path": path.format(number)} for number, row in enumerate(plain.rows)]
    with pytest.raises(ManifestError, match=words):
        extract_fbank(Corpus(scratch, rows).manifest(), scratch / "c")


def test_a_tar_may_be_the_root(cli, plain, scratch):
    packed(plain, scratch, "tar")
    manifest = Corpus(scratch, plain.rows[:6]).manifest()
    assert (
        cli("extract", manifest, "--root", scratch / "audio_0.tar", "-o", scratch / "c").code == 0
    )
    assert cli("verify", scratch / "c", "--sources=content", "--no-data").code == 0


def test_tables_need_pyarrow(plain, scratch, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    rows = [
        {**row, "path": f"train.parquet/audio/{number}"} for number, row in enumerate(plain.rows)
    ]
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("parquet"))):
        extract_fbank(Corpus(scratch, rows).manifest(), scratch / "c")


def test_before_a_run_one_tar_is_unpacked_at_most_and_by_the_thread_that_ctrl_c_ends(
    plain, scratch, monkeypatch
):
    real, threads = members._unpacked, []
    monkeypatch.setattr(
        members,
        "_unpacked",
        lambda *args: threads.append(threading.current_thread()) or real(*args),
    )
    corpus = packed(plain, scratch, "tar.gz")
    rows = [
        {**row, "path": f"audio_{number % 2}.tar.gz/{row['path']}"}
        for number, row in enumerate(plain.rows)
    ]
    manifest = read_manifest(Corpus(corpus.folder, rows).manifest())
    seconds = row_seconds(manifest, np.full(12, np.nan), np.ones(12))
    assert threads == [threading.current_thread()]
    assert seconds[2] == pytest.approx(
        soundfile.info(plain.folder / plain.rows[2]["path"]).duration
    )


def test_a_stopped_run_does_not_wait_for_a_tar_to_be_unpacked(cli, plain, scratch, monkeypatch):
    manifest = packed(plain, scratch, "tar.gz").manifest()
    stop = threading.Event()
    endless = SimpleNamespace(read1=lambda _: stop.set() or bytes(64))
    with monkeypatch.context() as patched:
        patched.setitem(members._UNPACKERS, ".gz", (b"", lambda _: endless))
        assert featcache.extract(manifest, cache=scratch / "c", stop=stop).interrupted
    assert not failures_of(cli, scratch / "c")
    extract_fbank(manifest, scratch / "c")
    assert set(items(scratch / "c")) == set(plain.ids)


def test_large_members_are_copied_to_the_disk_once(plain, sound, scratch, monkeypatch):
    monkeypatch.setattr(members, "IN_MEMORY", 100)
    extract_fbank(packed(plain, scratch, "tar").manifest(), scratch / "c")
    assert items(scratch / "c") == items(sound)
