"""Other tools' manifests with faults: each is named, by file and line; and what is left
out."""

import gzip
import io
import json
import os
import subprocess
import tempfile

import pytest
from foreign_manifests import CLIPS, WRITERS, recording, supervision
from manifests import faults_of, refused

from featcache.errors import ManifestError
from featcache.manifest.formats import source
from featcache.manifest.read import read_manifest


def test_faults_of_a_data_directory(top):
    written = WRITERS["kaldi"](top, CLIPS[:2])
    scp = f"a {CLIPS[0].path}\nb sox x.sph -t wav - |\n\nc\nd feats.ark:1234\na y.wav\n"
    (written.manifest / "wav.scp").write_text(scp)
    rows = (
        "u1 a 0 1,u2 x 0 1,u3 a 1 1,u4 a one 2,u5 a 0,u1 a 1 2,u6 a -1 1,u7 a 0 -1,u8 a 0 "
        "nan,u9 a 0 inf"
    )
    (written.manifest / "segments").write_text(rows.replace(",", "\n"))
    expected = [
        "wav.scp, line 2: path is a command, which runs only with --allow-commands: 'sox'",
        "wav.scp, line 4: path is missing",
        "wav.scp, line 6: id 'a' is already on wav.scp, line 1",
        "segments, line 2: recording 'x' is not in wav.scp",
        "segments, line 3: ends at 1.0, and starts at 1.0: only an end of -1 is that "
        "of the recording",
        "segments, line 4: could not convert string to float: 'one'",
        "segments, line 5: 3 fields, but utterance, recording, start and end are expected",
        "segments, line 6: id 'u1' is already on segments, line 1, for another path, start, duration "
        "or channel",
        "segments, line 7: start is negative: -1.0",
        "segments, line 9: ends at nan, and starts at 0.0: only an end of -1 is that "
        "of the recording",
        "segments, line 10: ends at inf, and starts at 0.0: only an end of -1 is that "
        "of the recording",
    ]
    assert sorted(faults_of(written.manifest)) == sorted(expected)


def test_of_an_id_that_is_twice_in_a_file_of_values_the_first_counts(tmp_path):
    """Wherever the two are: in one batch of lines or in two, before the id is wanted or
    after."""
    ids = [f"u{number:04}" for number in range(600)]
    (tmp_path / "wav.scp").write_text("".join(f"{id_} {id_}.wav\n" for id_ in ids))
    lines = [f"{id_} first\n" for id_ in reversed(ids)]
    lines[10:10] = ["u0001 first\n", f"{ids[-1]} second\n"]
    (tmp_path / "text").write_text("".join([*lines, *(f"{id_} second\n" for id_ in ids)]))
    assert set(read_manifest(tmp_path).columns["text"]) == {"first"}


def test_a_pipe_inside_of_a_folder_is_not_waited_for(top):
    written = WRITERS["kaldi"](top, CLIPS[:2])
    os.mkfifo(written.manifest / "utt2lang")
    with pytest.raises(ManifestError, match="utt2lang is not a regular file"):
        read_manifest(written.manifest)


def test_a_pipe_may_be_compressed_by_gzip(tmp_path):
    # more lines than its format is recognised by
    ids = [f"u{number}" for number in range(999)]
    text = "".join(f"{id_},a.wav\n" for id_ in ["id", *ids]).replace("a.wav", "path", 1)
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(text.encode()))
    with subprocess.Popen(["cat", tmp_path / "train.csv.gz"], stdout=subprocess.PIPE) as cat:
        assert list(read_manifest(f"/dev/fd/{cat.stdout.fileno()}").ids) == ids


def test_a_pipe_needs_a_disk_only_if_it_is_large(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with subprocess.Popen(["echo", "id,path\na,a.wav"], stdout=subprocess.PIPE) as echo:
        assert list(read_manifest(f"/dev/fd/{echo.stdout.fileno()}").ids) == ["a"]
    monkeypatch.setattr(source, "_COPY_IN_MEMORY", 1)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: io.FileIO("/dev/full", "r+"))
    with subprocess.Popen(["echo", "id,path\na,a.wav"], stdout=subprocess.PIPE) as echo:
        fault = refused(f"/dev/fd/{echo.stdout.fileno()}")
    assert (
        fault == "cannot be read: No space left on device for a copy of the pipe: set TMPDIR to "
        "another folder"
    )


def test_faults_of_lhotses_objects(top, written):
    clip = CLIPS[0]
    base = {"id": "x", "start": 0.0, "duration": 1.0, "channel": 0, "type": "MonoCut"}
    good = recording(top, clip)
    rows = [
        {**base, "recording": good},
        {"id": "x", "type": "MixedCut", "tracks": []},
        {
            **base,
            "recording": {**good, "sources": [{"type": "memory", "channels": [0], "source": ""}]},
        },
        {**base, "recording": {**good, "sources": good["sources"] * 2}},
        {**base, "recording": {**good, "transforms": [{"name": "Volume", "kwargs": {}}]}},
        {
            **base,
            "recording": {**good, "sources": [{**good["sources"][0], "channels": [0, 1]}]},
            "channel": 2,
        },
        {**base, "recording": {"id": "x", "duration": 1.0}},
        {**base, "recording": None},
        {**base, "id": "y", "duration": -1, "recording": good},
        {**base, "id": "z", "channel": 1, "recording": good},
        {"id": "t", "duration": 1.0, "type": "MonoCut", "recording": good},
        {**base, "recording": {**good, "transforms": 5}},
        {**base, "recording": {**good, "sources": [{**good["sources"][0], "channels": ["0"]}]}},
        {**base, "id": "whole", "start": None, "duration": None, "recording": good},
        {
            **base,
            "id": "two",
            "supervisions": [{"speaker": ["ann"]}, {"speaker": ["bob"]}],
            "recording": good,
        },
    ]
    faults = faults_of(written("\n".join(map(json.dumps, rows)), "cuts.jsonl"))
    assert faults == [
        "line 2: MixedCut without a recording is not read: save its audio first",
        "line 3: a source of type 'memory' is not read, only 'file', 'url' and 'command'",
        "line 4: the recording has 2 sources, and one is read: make a recording of each",
        "line 5: the recording has transforms, which are not applied: Volume: save its audio first",
        "line 6: channel 2 is not among the recording's: [0, 1]",
        "line 7: not as expected: Object missing required field `sources` - at `$.recording`",
        "line 8: MonoCut without a recording is not read: save its audio first",
        "line 9: duration is negative: -1.0",
        "line 10: channel 1 is not among the recording's: [0]",
        "line 11: a cut without start or duration",
        "line 12: not as expected: Expected `array | null`, got `int` - at "
        "`$.recording.transforms`",
        "line 13: not as expected: Expected `int`, got `str` - at "
        "`$.recording.sources[0].channels[0]`",
    ]


def test_cuts_with_transforms_are_one_line_with_the_way_out(tmp_path):
    lhotse = pytest.importorskip("lhotse")
    sources = [lhotse.AudioSource("file", [0], "a.wav")]
    cut = lhotse.Recording(
        "r", sources, sampling_rate=8000, num_samples=8000, duration=1.0
    ).to_cut()
    cuts = [cut.perturb_speed(1.1).resample(16000).with_id(f"c{number}") for number in range(20)]
    lhotse.CutSet.from_cuts(cuts).to_file(tmp_path / "cuts.jsonl")
    with pytest.raises(ManifestError) as caught:
        read_manifest(tmp_path / "cuts.jsonl")
    (fault,) = str(caught.value).splitlines()[1:]
    assert fault == (
        "  line 1 and 19 more: the recording has transforms, which are not applied: "
        "Speed, Resample: give the cuts "
        "without: augment.speed in the config makes copies; audio is resampled to the config's rate"
    )


def test_supervisions_without_recordings_say_where_they_are_looked_for(written):
    line = json.dumps(supervision(CLIPS[0]))
    assert "there is no a_recordings_b.jsonl beside them" in refused(
        written(line, "a_supervisions_b.jsonl")
    )
    assert "supervisions have no paths: `lhotse cut simple`" in refused(written(line, "said.jsonl"))


def test_channels_of_lhotses_cuts(top, written):
    stereo = {**recording(top, CLIPS[0])}
    stereo["sources"] = [{**stereo["sources"][0], "channels": [0, 1]}]
    base = {"start": 0.0, "duration": 1.0, "recording": stereo}
    rows = [
        {**base, "id": "left", "channel": 0, "type": "MonoCut"},
        {**base, "id": "right", "channel": 1, "type": "MonoCut"},
        {**base, "id": "both", "channel": [0, 1], "type": "MultiCut"},
        {**base, "id": "one", "channel": [1], "type": "MultiCut"},
    ]
    manifest = read_manifest(written("\n".join(map(json.dumps, rows)), "cuts.jsonl"))
    assert manifest.channel.tolist() == [0, 1, -1, 1]


def test_faults_of_lists(written):
    faults = faults_of(written("a|hello there\nb|one|two|three\n", "metadata.csv"))
    assert faults == ["line 2: 4 fields, but id|text has 2"]
    assert faults_of(written("a|hello there\n|\n\n||\nb|bye\n", "metadata.csv")) == [
        "line 2: id is missing"
    ]
    assert faults_of(written("path|text\na.wav|hello\n|\n", "list.csv"), format="f5") == [
        "line 3: path is missing"
    ]
    faults = faults_of(written("/data\na.wav\t100\nb.wav\n\nc.wav\tmany\n", "train.tsv"))
    assert faults == [f"line {line}: not a path, a tab and a number of samples" for line in (3, 5)]


def test_placeholders_without_values_and_samples_in_place_of_seconds(written):
    text = "ID,duration,wav,wrd\na,1,$root/x.wav,it costs $5\nb,1,${root}/$set/y.wav,no\n"
    faults = faults_of(written(text), values={"root": "/data"})
    assert faults == ["line 3: path has $set, which has no value: give --set set=FOLDER"]
    manifest = read_manifest(written(text.replace("$set/", "")), values={"root": "/data"})
    assert list(manifest.paths) == ["/data/x.wav", "/data/y.wav"]
    assert list(manifest.columns["wrd"]) == ["it costs $5", "no"]
    text = "ID,duration,wav,start,stop,spk_id\na,9.5,x.wav,0,48000,s\nb,9.5,x.wav,0.5,1.5,s\n"
    with pytest.raises(
        ManifestError,
        match="are numbers of samples: say the files' rate, as --set sample_rate=16000",
    ):
        read_manifest(written(text))
    said = (
        "line 3: start and stop are no whole numbers of samples: give start and duration "
        "in seconds: '0.5', '1.5'"
    )
    assert faults_of(written(text), values={"sample_rate": "16000"}) == [said]
    huge = written(
        json.dumps({"a": {"wav": {"file": "x.wav", "start": 0, "stop": 10**400}}}), "huge.json"
    )
    (fault,) = faults_of(huge, values={"sample_rate": "16000"})
    assert fault.startswith("line 1: start and stop are no whole numbers of samples")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"a": {"wav": "x.wav"},\n "b": 3}', "line 2: not an object of an utterance: 'b'"),
        ('{"a": {"wav": "x.wav"}\n "b": {}}', "line 2: not JSON: Expecting ',' at character 2"),
        ('{"a": {"wav": "x.wav"},\n', "line 2: not JSON: Expecting a key and ':' at character 1"),
        (
            '{"a": {"wav": "x.wav"}}\n{"b": {"wav": "y.wav"}}\n',
            "line 2: not JSON: Extra data at character 1",
        ),
        (
            '{"a": {"wav": "x.wav"},\n "b": {"wav": "y.wav", "x": ' + "[" * 100_000,
            "line 2: JSON that cannot be read: ",
        ),
    ],
)
def test_faults_of_speechbrains_json(written, text, fault):
    (found,) = faults_of(written(text, "t.json"))
    assert found.startswith(fault)


def test_a_folder_leaves_out_what_is_hidden_and_follows_links_once(top):
    (top / "._0_ann.wav").touch()
    (top / "wavs" / "notes.txt").touch()
    (top / ".cache").mkdir()
    (top / ".cache" / "x.wav").touch()
    (top / "wavs" / "again").symlink_to(top)
    (top / "wavs" / "0_ann.FLAC").touch()
    (fault,) = faults_of(top)
    assert (
        fault == "'wavs/0_ann.FLAC' and 'wavs/0_ann.wav' would have the same id: list the files "
        "that are meant"
    )
    (top / "wavs" / "0_ann.FLAC").unlink()
    assert sorted(read_manifest(top).ids) == sorted(clip.path[:-4] for clip in CLIPS)


def test_an_audiofolder_may_have_metadata_in_each_folder_of_any_kind(top):
    for name, content in (
        ("train/metadata.csv", "file_name,text\na.wav,hello\n"),
        ("test/metadata.jsonl", '{"file_name": "b.wav", "speaker": "bob"}\n{"file_name": 7}\n'),
    ):
        (top / name).parent.mkdir()
        (top / name).write_text(content)
    assert faults_of(top) == ["test/metadata.jsonl, line 2: path is not text: 7"]
    (top / "test" / "metadata.jsonl").write_text('{"file_name": "b.wav", "speaker": "bob"}\n')
    manifest = read_manifest(top)
    assert list(manifest.paths) == ["test/b.wav", "train/a.wav"]
    assert manifest.columns == {"speaker": ["bob", ""], "text": ["", "hello"]}
