"""What `extract` says before a run, and after one: of failures, missing files, the disk,
copies, what is left."""

import json
from unittest.mock import Mock, call

import numpy as np
import pytest
from cache_contents import items, only_version
from corpora import COLUMNS, Corpus, speech
from extractions import failures_of
from manifests import manifest_of
from processes import run_here

from featcache.errors import Reason
from featcache.extraction.audio_files import missing_file_notes, where_missing
from featcache.extraction.plan import disk_space_notes
from featcache.manifest.audio_locations import as_root
from featcache.manifest.read import read_manifest


@pytest.fixture
def spoilt(tmp_path):
    """Three clips that are sound, one of no samples, one that is text, and three that are
    not there."""
    made = Corpus(tmp_path / "spoilt")
    made.folder.mkdir()
    for name, samples in {**dict.fromkeys("abc", speech(0.5)), "empty": np.zeros(0)}.items():
        made.record(name, f"{name}.wav", samples)
    (made.folder / "text.wav").write_text("not audio at all, but a line of text")
    for name in ("text", "gone-1", "gone-2", "gone-3"):
        made.add(name, f"{name}.wav")
    return made


def test_failures_of_earlier_runs_are_explained_each_time(cli, spoilt, scratch):
    """How many, of which reasons, that they were not tried again, and what tries them."""
    command = ("extract", spoilt.manifest(), "-o", scratch / "c")
    first = cli(*command).with_code(3)
    assert "failures: empty 1, file_missing 3, not_audio 1\n" in first.out
    assert "not tried again" not in first.out
    told = (
        "5 failed before and were not tried again (--retry-failed does): empty 1, "
        "file_missing 3, not_audio 1\n"
    )
    again = cli(*command).with_code(3)
    assert f"  8 utterances: 0 extracted, 3 already there, 5 failed\n  {told}" in again.out
    assert "failures:" not in again.out
    assert f"3 are there, 5 have failed before\n  {told}" in cli(*command, "--dry-run").out
    tried = cli(*command, "--retry-failed")
    assert "not tried again" not in tried.out
    assert "failures: empty 1, file_missing 3, not_audio 1\n" in tried.out


def test_the_failures_of_two_versions_in_an_object_store_are_shown_by_its_url(spoilt):
    pytest.importorskip("obstore")
    configs = ("-c", "fbank80", "-c", "mfcc13")
    said = run_here(
        "extract",
        spoilt.manifest(),
        *configs,
        "-o",
        "memory://summary/c",
        "--device",
        "cpu",
        code=3,
    )
    assert "why utterances failed: featcache info memory://summary/c --failures\n" in said


FAILED = {
    "elsewhere": (["wav/a.wav"], Reason.FILE_MISSING, "there is no such file: {folder}/wav/a.wav"),
    "text": (["text.wav"], Reason.NOT_AUDIO, "cannot be read as audio: format not recognised"),
    "empty": (["zero.wav"], Reason.EMPTY, "the file holds 0 bytes"),
    "short": (
        ["a.wav", 0, 0.01],
        Reason.TOO_SHORT,
        "160 samples at 16000 Hz are too few for one frame",
    ),
    "channel": (
        ["a.wav", "", "", 1],
        Reason.NO_SUCH_CHANNEL,
        "no channel 1: the file has 1 channel, counted from 0",
    ),
    "late": (
        ["a.wav", 5, 1],
        Reason.SEGMENT_OUTSIDE,
        "the segment goes from 5.000 s to 6.000 s, but the file holds 0.500 s",
    ),
}
"""By id: the rest of its row, and what is said of it."""


def test_what_fails_is_counted_and_the_first_is_shown_and_all_are_in_the_ledger(
    cli, spoilt, scratch
):
    (spoilt.folder / "zero.wav").touch()
    rows = [dict(zip(COLUMNS, [id_, *row], strict=False)) for id_, (row, *_) in FAILED.items()]
    done = cli("extract", spoilt.manifest(rows), "-o", scratch / "c").with_code(3)
    counts = ", ".join(sorted(f"{reason} 1" for _, reason, _ in FAILED.values()))
    first = f"elsewhere: wav/a.wav: there is no such file: {spoilt.folder}/wav/a.wav"
    assert f"\nfailures: {counts}\nthe first is {first}\nwhy " in done.out
    listed = cli("info", scratch / "c", "--failures").out
    for id_, ((path, *_), reason, message) in FAILED.items():
        assert "\t".join([id_, reason, path, message.format(folder=spoilt.folder)]) in listed


def test_json_tells_failures_of_this_run_from_those_before(cli, spoilt, scratch):
    four = [*spoilt.rows[:4]]
    cli("extract", spoilt.manifest(four, "four.csv"), "-o", scratch / "c")
    document = cli("extract", spoilt.manifest(), "-o", scratch / "c", "--json").json()
    (version,) = document["versions"]
    assert document["failed_by_reason"] == {"file_missing": 3, "not_audio": 1}
    assert version["failed_before"] == {"empty": 1}
    assert (version["failed"], version["missing"]) == (5, 0)
    assert version["fingerprint"] == only_version(scratch / "c").info.fingerprint
    (planned,) = cli(
        "extract", spoilt.manifest(), "-o", scratch / "c", "--dry-run", "--json"
    ).json()["versions"]
    assert sum(planned["failed_before"].values()) == planned["failed"] == 5
    assert planned["fingerprint"] == version["fingerprint"]


def test_one_is_told_in_the_singular_and_what_to_do_in_a_command_that_a_shell_takes(
    cli, plain, scratch
):
    command = ("extract", plain.manifest(plain.rows[:1], "one.csv"), "-o", scratch / "c")
    assert "1 of 1 utterance to extract" in cli(*command, "--dry-run").out
    assert "1 utterance: 1 extracted" in cli(*command).out
    assert "nothing to do: 1 utterance is already there" in cli(*command).out
    gone = plain.manifest([{"id": "gone", "path": "gone.wav"}], "gone.csv")
    command = ("extract", gone, "-o", scratch / "my features")
    assert cli(*command).out.endswith(
        f"featcache info '{only_version(scratch / 'my features').path}' --failures\n"
    )
    assert "1 failed before and was not tried again" in cli(*command).out


def test_where_no_file_is_there_the_root_is_refused_before_anything_is_written(cli, plain, scratch):
    """With the place where one was looked for; instead of a ledger full of utterances
    that nothing is wrong with."""
    for options in ((), ("--dry-run",), ("-c", "mfcc13", "-c", "fbank80")):
        said = cli.refused(
            "extract", plain.manifest(), "-o", scratch / "c", "--root", scratch, *options
        )
        assert "manifest.csv: none of 12 files checked exists, for example 00.wav: " in said
        assert said.endswith(
            f"00.wav: {scratch}/00.wav; relative paths begin at the manifest's folder, or at "
            "--root FOLDER\n"
        )
        assert not (scratch / "c").exists()
    assert cli("extract", plain.manifest(), "-o", scratch / "c").code == 0
    assert (
        "nothing to do"
        in cli("extract", plain.manifest(), "-o", scratch / "c", "--root", scratch).out
    )


def test_files_that_are_missing_are_failures_where_the_root_is_right(cli, plain, scratch):
    """Others of the manifest are there, or it is one file, which may be just gone."""
    rows = [
        *plain.rows,
        {"id": "gone-1", "path": "gone-1.wav"},
        {"id": "gone-2", "path": "gone-2.wav"},
    ]
    manifest = plain.manifest(rows, "longer.csv")
    cache = scratch / "c"
    assert cli("extract", plain.manifest(), "-o", cache).code == 0
    made = cli("extract", manifest, "-o", cache)
    assert (made.code, "file_missing 2" in made.out) == (3, True)
    assert "none of 2 files checked exists, for example gone-1.wav" in made.err
    assert (
        "file_missing 2" in cli("extract", manifest, "-o", cache, "--retry-failed").with_code(3).out
    )
    assert cli("extract", plain.manifest(rows[-1:], "one.csv"), "-o", scratch / "d").code == 3


def test_the_ledger_says_where_a_file_was_looked_for(cli, plain, tmp_path, scratch):
    said = {
        "sub/gone.wav": f": {tmp_path}/sub/gone.wav",
        "/nowhere/gone.wav": "",
        "hf://org/a.wav": ": URLs are read that begin with s3, gs, az, https, http",
        "~/a.wav": ": ~ stands for no folder in a manifest",
    }
    paths = [*said, str(plain.folder / "00.wav")]  # where none is there, the root is refused
    manifest = manifest_of(tmp_path, [(path, path) for path in paths], ("id", "path"))
    assert cli("extract", manifest, "-o", scratch / "c").code == 3
    messages = {failure["path"]: failure["message"] for failure in failures_of(cli, scratch / "c")}
    assert messages == {path: f"there is no such file{where}" for path, where in said.items()}
    # below a URL, it is part of a name: servers have folders called like that
    assert where_missing("~anna/a.wav", as_root("https://host/x")) == ": https://host/x/~anna/a.wav"


def test_a_path_that_cannot_be_looked_at_is_not_called_missing(tmp_path):
    """A name that is too long, or a folder that may not be searched, is for the run to
    tell."""
    manifest = read_manifest(
        manifest_of(tmp_path, [("a", "x" * 300), ("b", "y" * 300)], ("id", "path"))
    )
    assert missing_file_notes(manifest, np.ones(2, bool)) == []


def test_a_disk_without_room_is_told_before_the_run(tmp_path, monkeypatch):
    """By the nearest folder that there is: the cache may not be there yet."""
    usage = Mock(return_value=Mock(spec=["free"], free=51_300_000_000))
    monkeypatch.setattr("shutil.disk_usage", usage)
    cache = tmp_path / "not" / "yet"
    (line,) = disk_space_notes(cache, 412e9)
    assert line == f"{cache}: the features take about 412 GB, and the disk has 51.3 GB free"
    assert disk_space_notes(cache, 51e9) == []
    assert usage.call_args_list == [call(tmp_path)] * 2


def test_a_renamed_version_is_not_extracted_again(cli, plain, scratch):
    """It holds what is asked for: the error says so, and touches nothing."""
    command = ("extract", plain.manifest(), "-o", scratch)
    assert cli(*command).code == 0
    version = only_version(scratch).path
    before = items(scratch)
    renamed = version.rename(scratch / "renamed")
    for more in ([], ["--dry-run"]):
        said = cli.refused(*command, *more)
        assert said.startswith(
            f"featcache: {renamed} has this config's fingerprint, but another folder name: "
        )
        assert f"rename it back to {version.name}, or move it out of {scratch}" in said
    assert [path.name for path in scratch.iterdir()] == ["renamed"]
    renamed.rename(version)
    assert "nothing to do" in cli(*command).out
    assert items(scratch) == before


def test_a_config_under_another_name_extracts_nothing_again(cli, plain, scratch, written):
    """The values would be the same: the error names the version that has them, and the
    name that adds to it."""
    configs = [
        written(f"name: {name}\nextractor: fbank\n", f"{name}.yaml") for name in ("first", "second")
    ]
    assert cli("extract", plain.manifest(), "-c", configs[0], "-o", scratch).code == 0
    said = cli.refused("extract", plain.manifest(), "-c", configs[1], "-o", scratch)
    assert f"{only_version(scratch).path} has this config's fingerprint, under another name" in said
    assert "call the config first" in said
    assert (
        cli(
            "extract", plain.manifest(), "-c", configs[1], "-o", scratch / "elsewhere", "--dry-run"
        ).code
        == 0
    )


@pytest.fixture
def noisy(plain, written):
    """Writes a config of copies with noise."""
    noises = written(json.dumps({"id": "n", "path": str(plain.folder / "00.wav")}), "noises.jsonl")
    text = "name: noisy\nextractor: fbank\naugment: {%snoise: {manifest: %s, snr: [%s], seed: 1}}\n"
    return lambda speeds, snr: written(text % (speeds, noises, snr), "noisy.yaml")


def test_an_utterance_is_resampled_once_however_many_copies_and_configs(
    cli, plain, noisy, tmp_path, scratch
):
    """What is counted is the user's files; the audio is that of the copies, and is called
    so."""
    corpus = Corpus(tmp_path)
    for number, rate in enumerate((16000, 8000, 8000, 8000, 8000)):
        corpus.record(f"utt-{number}", f"{number}.wav", speech(0.5, rate, seed=number), rate)
    config = noisy("speed: [0.9, 1.0, 1.1], ", "5, 10")
    command = (
        "extract",
        corpus.manifest(),
        "-c",
        config,
        "-c",
        "fbank80-uint8",
        "--shard-size",
        "0.02",
    )
    made = cli(*command, "-o", scratch / "c").with_code(0)
    assert "4 utterances were upsampled to 16,000 Hz: they have no sound above half" in made.out
    assert " of audio, with its copies, in " in made.out
    document = cli(*command, "-o", scratch / "d", "--json").json()
    assert (document["upsampled"], document["downsampled"]) == (4, 0)
    versions = document["versions"]
    assert (
        [version["utterances"] for version in versions]
        == [version["extracted"] for version in versions]
        == [45, 5]
    )
    assert [version["upsampled"] for version in versions] == [4, 4]
    seconds = 5 * 0.5 * (1 + 3 * sum(1 / speed for speed in (0.9, 1.0, 1.1)))
    assert document["audio_seconds"] == pytest.approx(seconds, rel=0.01)


def test_silent_utterances_are_counted_and_one_is_named(cli, tmp_path, scratch, written):
    made = Corpus(tmp_path)
    voice = speech(1.0, 16000, seed=1)[:, 0]
    made.record("antiphase", "antiphase.wav", np.stack([voice, -voice * 0.999], 1), subtype="FLOAT")
    made.record("stereo", "stereo.wav", np.stack([voice, -voice * 0.9], 1), subtype="FLOAT")
    made.record("quiet", "quiet.wav", voice * (2e-4 / np.abs(voice).max()), subtype="FLOAT")
    made.record("nothing", "nothing.wav", np.zeros(16000), subtype="FLOAT")
    config = written("name: twice\nextractor: fbank\naugment: {speed: [0.9, 1.1]}\n", "twice.yaml")
    done = cli("extract", made.manifest(), "-c", config, "-o", scratch / "c", "--threads", 1)
    assert (done.code, done.out.count("silent")) == (0, 1)
    assert "2 utterances are silent, for example " in done.out
    one = cli(
        "extract", made.manifest(made.rows[:1], "one.csv"), "-o", scratch / "d", "--json"
    ).json()
    assert one["silent"] == 1
    said = (
        "antiphase: its channels have sound, and what is taken of them (audio.channel) has "
        "next to none"
    )
    assert one["first_silent"].startswith(said)


def test_an_utterance_is_silent_though_its_copies_are_noisy(cli, noisy, tmp_path, scratch):
    """It is resampled, too, as all of its copies are."""
    made, voice = Corpus(tmp_path), speech(1.0, 8000, seed=1)[:, 0]
    made.record(
        "antiphase", "antiphase.wav", np.stack([voice, -voice * 0.999], 1), 8000, subtype="FLOAT"
    )
    done = cli(
        "extract", made.manifest(), "-c", noisy("", "-40"), "-o", scratch / "c", "--json"
    ).json()
    assert (done["silent"], done["upsampled"]) == (1, 1)
