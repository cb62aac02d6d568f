"""`why`: what makes a config another version, and why utterances would be extracted."""

import os
import shutil

import pytest
from cache_contents import shard_folders
from corpora import Corpus, speech
from soundfile import write

EDITED = {"u0": {"path": "6.wav"}, "u1": {"duration": 0.2}, "u2": {"start": 0.1, "duration": 0.2}}


@pytest.fixture(scope="module")
def corpus(cli, tmp_path_factory):
    """A corpus of 40 rows, and one that fails; they are extracted into the cache."""
    corpus = Corpus(tmp_path_factory.mktemp("corpus"))
    for number in range(7):
        write(corpus.folder / f"{number}.wav", speech(0.5, seed=number), 16000)
    (corpus.folder / "bad.wav").write_bytes(b"RIFF")
    for number in range(40):
        corpus.add(f"u{number}", f"{number % 6}.wav")
    corpus.add("bad", "bad.wav")
    assert cli("extract", corpus.manifest(), "-o", corpus.folder / "cache").code == 3
    return corpus


@pytest.fixture(scope="module")
def cache(corpus):
    return corpus.folder / "cache"


def edited(corpus):
    rows = [row | EDITED.get(row["id"], {}) for row in corpus.rows]
    return corpus.manifest([*rows, {"id": "later", "path": "6.wav"}], "edited.csv")


def causes(cli, corpus, cache, *options):
    document = cli("why", cache, edited(corpus), "-c", "fbank80", "--json", *options).json()
    found = document["plan"]
    assert found["missing"] == sum(one["utterances"] for one in found["causes"])
    return {(one["why"], one["again"]): one["ids"] for one in found["causes"]}, found


def test_it_says_which_keys_make_a_config_another_version(cli, cache):
    (name,) = (path.name for path in cache.iterdir() if path.name.startswith("fbank80"))
    assert cli("why", cache, "-c", "fbank80").out == f"{cache}/{name}: the version of this config\n"
    assert cli("why", cache).out == cli("why", cache, "-c", "fbank80").out  # as for `extract`
    changes = ("--set", "params.low_freq=0", "--set", "audio.max_seconds=9")
    first, second = cli("why", cache / "fbank80", "-c", "fbank80", *changes).out.splitlines()
    assert first.startswith("fbank80-")
    assert first.endswith(": there is no such version")
    assert second == (
        f"{cache}/{name}: another version: params.low_freq: 20.0 -> 0.0; "
        "audio.max_seconds: 21600.0 -> 9.0, which decides no values"
    )
    said = cli.refused("why", cache, "-c", "fbank80", "--set", "low_freq=0")
    assert (
        said == "featcache: --set low_freq: it is not a key of the config (did you mean "
        "params.low_freq?)\n"
    )


def test_it_says_why_utterances_would_be_extracted(cli, corpus, cache):
    """By what is the same of all of them; and what is not."""
    found, counts = causes(cli, corpus, cache)
    assert found == {
        ("new", False): ["later"],
        ("path changed", True): ["u0"],
        ("duration changed", True): ["u1"],
        ("start, duration changed", True): ["u2"],
    }
    assert (counts["utterances"], counts["present"], counts["failed_before"]) == (
        42,
        37,
        {"not_audio": 1},
    )
    assert counts["refused"] is None
    found, counts = causes(cli, corpus, cache, "--retry-failed")
    assert found["failed before: not_audio", False] == ["bad"]
    assert counts["failed_before"] == {}
    told = cli("why", cache, edited(corpus), "-c", "fbank80").out
    assert "42 utterances: 37 there, 4 to extract\n" in told
    assert "  1 again: path changed: u0 (path 0.wav → 6.wav)\n" in told
    assert "  1: new: later\n" in told
    told = cli("why", cache, edited(corpus), "-c", "mfcc13").out
    assert "42 utterances: 0 there, 42 to extract\n  42: new: u0, u1, u2, u3, u4 …\n" in told


def test_it_says_that_a_file_has_changed(cli, corpus, cache, scratch):
    there = shutil.copytree(corpus.folder, scratch / "corpus", ignore=lambda *_: ["cache"])
    os.utime(there / "3.wav", ns=(1, 1))
    moved = (
        "why",
        cache,
        corpus.manifest(),
        "-c",
        "fbank80",
        "--root",
        there,
        "--check-sources",
        "--json",
    )
    (cause,) = cli(*moved).json()["plan"]["causes"]
    assert (cause["why"], cause["again"], cause["example"]) == (
        "file changed",
        True,
        "its file's mtime",
    )
    assert cause["ids"] == [f"u{number}" for number in range(3, 40, 6)]


def test_older_features_whose_newer_ones_are_lost_are_not_called_a_changed_file(cli, scratch):
    audio = Corpus(scratch)
    audio.record("u0", "0.wav", speech(0.5))
    job = (audio.manifest(), "-o", scratch / "cache")
    cli("extract", *job).with_code(0)
    (older,) = shard_folders(scratch / "cache")
    status = (scratch / "0.wav").stat()
    os.utime(scratch / "0.wav", ns=(1, 1))
    cli("extract", *job, "--check-sources").with_code(0)
    (newer,) = {*shard_folders(scratch / "cache")} - {older}
    shutil.rmtree(newer)
    os.utime(scratch / "0.wav", ns=(1, status.st_mtime_ns))
    why = cli("why", scratch / "cache", audio.manifest(), "-c", "fbank80", "--json")
    (cause,) = why.json()["plan"]["causes"]
    assert cause["why"] == "not the newest"
    assert "u0: its features are not the newest" in cli("extract", *job).with_code(0).err


def test_another_corpus_is_said_to_be_refused(cli, corpus, cache):
    other = corpus.manifest([row | {"path": "6.wav"} for row in corpus.rows[:10]], "other.csv")
    found = cli("why", cache, other, "-c", "fbank80")
    assert "10 again: path changed: u0" in found.out
    assert (
        f"featcache extract refuses this manifest: {other}: names other "
        "files for 10 of" in found.err
    )


def test_it_says_where_an_utterance_came_from(cli, corpus, cache, scratch):
    copy = shutil.copytree(cache, scratch / "cache")
    why = "why", copy, edited(corpus), "-c", "fbank80", "--id"
    assert "status       to extract: path changed\n" in cli(*why, "u0").out
    assert "status       there\n" in cli(*why, "u3").out
    failed = cli(*why, "bad").out
    assert (
        "status       failed before, and is not tried again\nmissing      bad: failed in "
        "extraction: " in failed
    )
    assert cli("extract", edited(corpus), "-o", copy).code == 3
    document = cli(*why, "u0", "--json").json()["utterance"]
    (shown,) = cli("show", copy, "u0", "--json").json()["versions"]
    (origin,) = document["versions"]
    assert origin.items() <= shown.items()
    assert document["row"] == {
        "id": "u0",
        "path": "6.wav",
        "start": None,
        "duration": None,
        "channel": None,
    }
    (version,) = copy.iterdir()
    first, second = sorted(path.stem for path in (version / "runs").iterdir())
    assert (origin["run"], origin["manifest"], origin["root"]) == (
        second,
        str(edited(corpus)),
        str(corpus.folder),
    )
    assert {"numpy", "torch", "device"} <= origin["made_by"].keys()
    assert len(origin["superseded"]) == 1
    (older,) = cli("show", copy, "u3", "--json").json()["versions"]
    assert (older["run"], older["shard"], older["superseded"]) == (
        first,
        origin["superseded"][0],
        [],
    )
    assert "'nobody': no such utterance" in cli.refused(
        "why", copy, "-c", "fbank80", "--id", "nobody", code=1
    )
