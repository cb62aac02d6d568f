"""Manifests of other tools are read as they are: recognised, with the rows that their own
readers give."""

import gc
import json
import re

import numpy as np
import pytest
import soundfile
from foreign_manifests import CLIPS, RATE, WRITERS, dataset, recording
from manifests import faults_of, refused, rows_of
from pages import text_of

from featcache.audio.members import copy_of
from featcache.errors import ArgumentError, ManifestError
from featcache.manifest.formats import FORMATS
from featcache.manifest.read import read_manifest
from featcache.manifest.segments import Utterance


def without_commas(clips):
    return [clip._replace(text=clip.text.replace(",", "")) for clip in clips]


@pytest.mark.parametrize("name", WRITERS)
def test_is_recognised_and_gives_its_rows(top, name):
    clips = (
        without_commas(CLIPS) if name in ("audiofolder", "speechbrain csv", "semicolons") else CLIPS
    )
    written = WRITERS[name](top, clips)
    manifest = read_manifest(written.manifest, values=written.values)
    assert manifest.format == written.format
    assert list(manifest.ids) == written.ids
    assert list(manifest.paths) == written.paths
    assert {manifest.resolve(path) for path in manifest.paths} == {
        f"{top}/{clip.path}" for clip in CLIPS
    }
    seconds = [clip.seconds for clip in clips] if written.has_seconds else [np.nan] * len(clips)
    np.testing.assert_array_equal(manifest.duration, seconds)
    for column, expected in zip(written.columns, ("text", "speaker"), strict=False):
        assert list(manifest.columns[column]) == [getattr(clip, expected) for clip in clips]
    for options in ({"format": written.format, "carry": False}, {"audio": False}):
        assert rows_of(
            read_manifest(written.manifest, values=written.values, **options)
        ) == rows_of(manifest)


def test_every_format_is_tried():
    # the first five elsewhere
    tried = {"tsv", "parquet", "datasets", "features", "webdataset"} | {
        write.split()[0] for write in WRITERS
    }
    assert {*FORMATS} - tried == {"csv", "jsonl"}  # which tables of tools are


# The tools' own readers


def test_kaldi_as_lhotse_reads_it(top):
    lhotse = pytest.importorskip("lhotse.kaldi")
    for clip in CLIPS:
        soundfile.write(top / clip.path, np.zeros(clip.samples), RATE)
    written = WRITERS["kaldi with segments"](top, CLIPS)
    with (written.manifest / "segments").open("a") as file:
        file.write(f"tail {CLIPS[0].stem} 0.1 -1\npart {CLIPS[1].stem} 0.105 0.355\n")
    for name, value in (("text", "the rest"), ("utt2spk", "ann")):
        with (written.manifest / name).open("a") as file:
            file.write(f"tail {value}\npart {value}\n")
    ours = read_manifest(written.manifest)
    recordings, supervisions, _ = lhotse.load_kaldi_data_dir(written.manifest, sampling_rate=RATE)
    theirs = {one.id: one for one in supervisions}
    assert set(theirs) == set(ours.ids)
    for row, speaker, text in zip(
        rows_of(ours), ours.columns["speaker"], ours.columns["text"], strict=True
    ):
        one = theirs[row.id]
        assert row.path == recordings[one.recording_id].sources[0].source
        assert row.start == one.start
        assert (
            row.duration is None
            if row.id == "tail"
            else row.duration == pytest.approx(one.duration, abs=1e-9)
        )
        assert (speaker, text) == (one.speaker, one.text)


def test_cuts_as_lhotse_reads_them(top, tmp_path):
    lhotse = pytest.importorskip("lhotse")
    written = WRITERS["lhotse cuts"](top, CLIPS)
    cuts = lhotse.CutSet.from_file(written.manifest).to_eager()
    short = cuts[CLIPS[0].stem].truncate(offset=0.05, duration=0.1).with_id("short")
    windows = [*cuts.cut_into_windows(0.2), short]
    lhotse.CutSet.from_cuts(windows).to_file(tmp_path / "windows.jsonl")
    ours = read_manifest(tmp_path / "windows.jsonl")
    assert len(ours) == len(windows) > len(CLIPS)
    for row, text, one in zip(rows_of(ours), ours.columns["text"], windows, strict=True):
        source = one.recording.sources[0].source
        assert row == Utterance(id=one.id, path=source, start=one.start, duration=one.duration)
        assert text == one.supervisions[0].text


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Lhotse leaves tars open
@pytest.mark.parametrize("form", ["flac", "original"])
def test_shar_as_lhotse_reads_it(tmp_path, form):
    """By its own writer: in several shards, with a cut of a part, a channel of two, and
    an id with a slash."""
    lhotse = pytest.importorskip("lhotse")
    for number, channels in enumerate((1, 1, 2)):
        samples = np.random.default_rng(number).uniform(-0.5, 0.5, (3000, channels))
        soundfile.write(tmp_path / f"{number}.wav", samples, RATE)
    recordings = [lhotse.Recording.from_file(tmp_path / f"{number}.wav") for number in range(3)]
    cuts = [recording.to_cut() for recording in recordings]
    cuts[1] = cuts[1].truncate(offset=0.05, duration=0.1).with_id("ann/1")
    cuts.append(cuts[2].to_mono()[1].with_id("right"))
    folder = tmp_path / "shar"
    folder.mkdir()
    lhotse.CutSet.from_cuts(cuts).to_shar(folder, {"recording": form}, shard_size=2, verbose=False)
    (folder / "features.000000.tar").touch()
    theirs = [
        *lhotse.CutSet.from_shar(
            {"cuts": sorted(folder.glob("c*")), "recording": sorted(folder.glob("r*"))}
        )
    ]
    ours = read_manifest(folder)
    assert (ours.format, list(ours.ids)) == ("lhotse", ["0", "ann/1", "2", "right"])
    assert ours.notes[-1].endswith(
        "of Lhotse Shar, cuts and recording are read, and nothing else: features"
    )
    for row, cut in zip(rows_of(ours), theirs, strict=True):
        with copy_of(ours.resolve(row.path)).open() as file:
            assert file.read() == cut.recording.sources[0].source
        assert row == Utterance(id=cut.id, path=row.path, start=0, duration=cut.duration)
    one = read_manifest(folder / "cuts.000001.jsonl.gz")
    assert rows_of(one) == rows_of(ours)[2:]


def test_shar_whose_audio_is_elsewhere(tmp_path):
    shar = {
        **recording(tmp_path, CLIPS[0]),
        "sources": [{"type": "shar", "channels": [0], "source": ""}],
    }
    cut = {
        "id": "x",
        "start": 0,
        "duration": 1.0,
        "channel": 0,
        "type": "MonoCut",
        "recording": shar,
    }
    (tmp_path / "cuts.000007.jsonl").write_text(json.dumps(cut))
    ours = read_manifest(tmp_path, root="s3://bucket/shar")
    assert list(ours.paths) == ["recording.000007.tar/x.flac"]
    said = "not each tar can be read beside its cuts: it is taken to hold FLAC, as Lhotse writes it"
    assert ours.notes[-1].endswith(said)


@pytest.mark.parametrize("name", ["speechbrain csv", "speechbrain json"])
def test_tables_as_speechbrain_reads_them(top, name):
    dataio = pytest.importorskip("speechbrain.dataio.dataio")
    written = WRITERS[name](top, without_commas(CLIPS))
    load = dataio.load_data_csv if name.endswith("csv") else dataio.load_data_json
    theirs = load(str(written.manifest), written.values)
    ours = read_manifest(written.manifest, values=written.values)
    assert dict(zip(ours.ids, ours.paths, strict=True)) == {
        key: row["wav"] for key, row in theirs.items()
    }
    assert np.isnan(ours.duration).all()  # its loader reads whole files
    for column, values in ours.columns.items():
        assert list(values) == [
            str(row[column.removeprefix("original_")]) for row in theirs.values()
        ]


def test_samples_of_speechbrains_tables_are_seconds_by_their_rate(written):
    table = written(
        "ID,duration,wav,start,stop,path\na,9.5,x.wav,800,48000,y.wav\nb,9.5,x.wav,800,800,y.wav\n"
    )
    manifest = read_manifest(table, values={"sample_rate": "16000"})
    cut = {"start": 0.05, "duration": 2.95}
    assert rows_of(manifest) == [
        Utterance(id="a", path="x.wav", **cut),
        Utterance(id="b", path="x.wav", start=0.05),
    ]
    assert manifest.notes[-1].endswith("audio is read from the column 'wav', and not from 'path'")
    objects = {
        "a": {"wav": {"file": "{root}/x.wav", "start": 800, "stop": 48000}},
        "b": {"wav": "{root}/x.wav"},
    }
    manifest = read_manifest(
        written(json.dumps(objects), "t.json"), values={"sample_rate": "16000", "root": "/data"}
    )
    assert rows_of(manifest) == [
        Utterance(id="a", path="/data/x.wav", **cut),
        Utterance(id="b", path="/data/x.wav"),
    ]
    # as the recipe of Libriheavy has it
    seconds = read_manifest(written("ID,duration,start,wav\na,1.5,0.25,x.wav\n"))
    assert rows_of(seconds) == [Utterance(id="a", path="x.wav", start=0.25, duration=1.5)]


@pytest.mark.filterwarnings("ignore")
def test_an_audiofolder_as_datasets_reads_it(top):
    pytest.importorskip("torchcodec")  # which datasets needs for audio
    datasets = pytest.importorskip("datasets")
    written = WRITERS["audiofolder"](top, without_commas(CLIPS))
    theirs = datasets.load_dataset(
        "audiofolder", data_dir=str(top), split="train", cache_dir=str(top / "cache")
    )
    theirs = theirs.cast_column("audio", datasets.Audio(decode=False))
    ours = read_manifest(written.manifest)
    by_path = {row["audio"]["path"]: row for row in theirs}
    assert set(by_path) == {str(ours.resolve(path)) for path in ours.paths}
    texts = [by_path[str(ours.resolve(path))]["text"] for path in ours.paths]
    assert list(ours.columns["text"]) == texts
    del theirs
    gc.collect()  # datasets leaves files open


def test_speechbrains_objects_may_be_written_in_any_way(written):
    rows = {
        "a": {"wav": "{root}/a.wav", "text": "one}, {two", "tags": {"x": [{"y": 1}, {}]}},
        'b "\\': {"wav": "b.wav", "text": '"}', "tags": {}},
        "c é": {"tags": {"z": 1e400}, "wav": "c.wav", "text": ""},
        # a line may be as long as what is looked at
        "d": {"wav": "d.wav", "text": "}" * (1 << 20)},
    }
    expected = {
        name: json.dumps(row["tags"], separators=(",", ":"))
        for name, row in rows.items()
        if "tags" in row
    }
    for layout in (
        {},
        {"indent": 2},
        {"separators": (",", ":")},
        {"separators": (" \n,\t", " : ")},
    ):
        manifest = read_manifest(
            written(json.dumps(rows, **layout), "t.json"), values={"root": "/data"}
        )
        assert list(manifest.ids) == [*rows]
        assert manifest.paths[0] == "/data/a.wav"
        assert list(manifest.columns["text"]) == [row["text"] for row in rows.values()]
        assert list(manifest.columns["tags"]) == [*expected.values(), ""]


# Ids


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"duration": 1.5}, "x.wav"),
        ({"offset": 0.0, "duration": 1.5}, "x.wav-000000-000150"),
        ({"offset": 12.345, "duration": 3.999}, "x.wav-001234-000400"),
        ({"offset": 2}, "x.wav-000200"),
        ({"channel": 1}, "x.wav-c1"),
    ],
)
def test_the_path_and_what_is_cut_stand_for_an_id(written, row, expected):
    manifest = read_manifest(written(json.dumps({"audio_filepath": "x.wav", **row}), "nemo.json"))
    assert list(manifest.ids) == [expected]
    assert manifest.notes[-1].endswith(": read as nemo, ids are made from paths")


def test_rows_without_ids_that_cut_alike_are_rows_of_one_clip(written):
    lines = '{"audio": "x.wav", "text": "a"}\n{"audio": "y.wav"}\n{"audio": "x.wav", "text": "b"}'
    manifest = read_manifest(written(lines, "t.jsonl"))
    assert list(manifest.ids) == ["x.wav", "y.wav", "x.wav"]
    assert manifest.notes[-1].endswith(
        "1 row repeats the clip of another row, which is extracted once; if they are parts of it, "
        "name their columns start and duration"
    )
    clips = manifest.clips()
    assert list(clips.ids) == list(clips.clips().ids) == ["x.wav", "y.wav"]
    assert list(clips.columns["text"]) == ["a", ""]
    assert faults_of(written('{"audio": "x\\u0007.wav"}\n' * 2, "t.jsonl"))[0] == (
        "line 1: there is no id, and the path, which stands for it, has a control character: "
        "'x\\x07.wav'"
    )


def test_cuts_that_round_to_one_id_get_exact_ids(written):
    """Ids of cuts that collide with no other cut are those of today: caches have them."""
    cuts = [(1.5012, 2), (1.5049, 2), (3, 2), (1.5012, 2), (None, 4), (None, 5.5), (0, None)]
    rows = [{"path": "x.wav", "start": start, "duration": seconds} for start, seconds in cuts]
    manifest = read_manifest(written("\n".join(map(json.dumps, rows)), "t.jsonl"))
    assert list(manifest.ids) == [
        "x.wav-1.5012-2.0",
        "x.wav-1.5049-2.0",
        "x.wav-000300-000200",
        "x.wav-1.5012-2.0",
        "x.wav--4.0",
        "x.wav--5.5",
        "x.wav-000000",
    ]
    assert len(manifest.clips()) == 6
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled = read_manifest(
        written("\n".join(json.dumps(rows[number]) for number in order), "t.jsonl")
    )
    assert list(shuffled.ids) == [manifest.ids[number] for number in order]


def test_rows_that_nemo_skips_are_left_out_and_counted(written):
    lines = [
        '{"audio_filepath": "a.wav", "_skipme": true}',
        '{"audio_filepath": "b.wav", "_skipme": false}',
    ]
    manifest = read_manifest(written("\n".join(lines), "nemo.json"))
    assert list(manifest.ids) == ["b.wav"]
    assert any(note.endswith("1 row left out, by _skipme") for note in manifest.notes)


def test_rows_of_nemos_tars_name_their_members(tmp_path):
    """Beside the manifest of all tars or above that of one, elsewhere, or in a tar that
    is the root; and unpacked."""
    rows = [{"audio_filepath": "a.wav", "shard_id": 3, "offset": 0.0, "duration": 1.5}]
    rows += [{"audio_filepath": "a-sub1.wav", "shard_id": 3, "offset": 1.5, "duration": 2.0}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for folder in ("tarred", "tarred/sharded_manifests", "away"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.json").write_text(lines)
    tar = tmp_path / "tarred" / "audio_3.tar"
    tar.touch()
    for folder, root in (
        ("tarred", None),
        ("tarred/sharded_manifests", None),
        ("away", tmp_path / "tarred"),
    ):
        ours = read_manifest(tmp_path / folder / "m.json", root=root)
        assert [*ours.paths] == ["audio_3.tar/a.wav"] * 2
        assert [(row.start, row.duration) for row in rows_of(ours)] == [(0.0, 1.5), (1.5, 2.0)]
        assert ours.resolve(ours.paths[0]).container == str(tar)
    assert list(read_manifest(tmp_path / "away" / "m.json", root=tar).paths) == ["a.wav", "a.wav"]
    assert (
        read_manifest(tmp_path / "away" / "m.json", root="s3://b/x").paths[1] == "audio_3.tar/a.wav"
    )
    (tmp_path / "away" / "a.wav").touch()
    assert read_manifest(tmp_path / "away" / "m.json").paths[0] == "a.wav"
    said = refused(tmp_path / "manifest__OP_0..3_CL_.json")
    assert "NeMo has a range for _OP_ … _CL_: as 'manifest_*.json', quoted" in said


# What is not what it seems


def test_what_fits_two_formats_is_refused_until_one_is_named(written):
    path = written('{"audio_filepath": "x.wav", "sources": [], "sampling_rate": 8000}\n', "t.json")
    assert refused(path) == "may be nemo or lhotse: say which with --format nemo, for example"
    path = written("a x.wav\nb y.wav\n", "list.txt")
    assert refused(path) == "may be kaldi or paths: say which with --format kaldi, for example"
    for name in ("kaldi", "paths"):
        assert read_manifest(path, format=name).format == name


@pytest.mark.parametrize(
    ("lines", "format_name"),
    [
        (
            [
                "x.wav|Mary Ann Lee|hello",
                "y.wav|Mary Ann Lee|good night to all of you",
                "z.wav|Bob|well then",
            ],
            "vits",
        ),
        (
            [
                "x.wav|hello|Mary Ann Lee",
                "y.wav|good night to all of you|Mary Ann Lee",
                "z.wav|so be it|7",
            ],
            "styletts2",
        ),
        (["u1|ann|the ann of old", "u2|bob|hello", "u3|ann|good night", "u4|bob|yes"], "piper"),
        (["u1|0|yes", "u2|0|no", "u3|1|yes"], "piper"),
        (["u1|In 1850|In eighteen fifty", "u2|12|twelve", "u3|Oh, no|oh no"], "ljspeech"),
        (["my songs/a.wav", "b.wav"], "paths"),  # and not ids and paths
    ],
)
def test_lists_of_like_columns_are_told_apart_by_many_lines(written, lines, format_name):
    assert read_manifest(written("\n".join(lines), "list.txt")).format == format_name


@pytest.mark.parametrize(
    ("lines", "readings"),
    [
        (
            ["x.wav|ann|hello"],
            [
                "styletts2 (path 'x.wav', text 'ann', speaker 'hello')",
                "vits (path 'x.wav', speaker",
            ],
        ),
        (["x.wav|Mary Ann|yes", "y.wav|Mary Ann|no"], ["styletts2 (", "vits ("]),
        ([f"{n}.wav|spk{n}|{('yes', 'no')[n % 2]}" for n in range(50)], ["styletts2 (", "vits ("]),
        (
            ["u1|ann|hello there"],
            ["ljspeech (id 'u1', text 'ann', normalised 'hello there')", "piper (id 'u1', speaker"],
        ),
        (["u1|你好|ni3 hao3", "u2|好的|hao3 de5"], ["ljspeech (", "piper ("]),
    ],
)
def test_lists_that_stay_ambiguous_are_refused_with_both_readings(written, lines, readings):
    path = written("\n".join(lines), "list.txt")
    first, second = refused(path).removeprefix("may be ").split(" or ")
    assert first.startswith(readings[0])
    assert second.startswith(readings[1])
    for name in (first.split()[0], second.split()[0]):
        assert read_manifest(path, format=name).format == name


def test_a_folder_may_fit_two_formats(top):
    WRITERS["kaldi"](top, CLIPS)
    (top / "data" / "metadata.csv").write_text("file_name\n../wavs/0_ann.wav\n")
    assert refused(top / "data").startswith("may be audiofolder or kaldi: say which with --format")
    assert len(read_manifest(top / "data", format="kaldi")) == len(CLIPS)


def test_a_format_that_there_is_not(written):
    with pytest.raises(
        ArgumentError,
        match=r"there is no 'kaldo' \(did you mean kaldi\?\): choose folder, audiofolder, kaldi",
    ):
        read_manifest(written("id,path\na,x.wav\n"), format="kaldo")


@pytest.mark.parametrize(
    "name", sorted({*FORMATS} - {"folder", "kaldi", "audiofolder", "datasets", "features"})
)
def test_a_folder_in_place_of_a_file_is_one_line(tmp_path, name):
    assert "is a folder, and this format is a file's" in refused(tmp_path, format=name)


@pytest.mark.parametrize("name", ["ljspeech", "f5"])
def test_a_folder_with_a_list_beside_its_wavs(top, name):
    """As LJSpeech and recipes after it come: the list says what its files are, so it is
    read, and that is said."""
    written = WRITERS[name](top, CLIPS)
    written.manifest.rename(top / "metadata.csv")
    expected = read_manifest(top / "metadata.csv")
    for options in ({}, {"format": name}):
        manifest = read_manifest(top, **options)
        assert rows_of(manifest) == rows_of(expected)
        assert manifest.root == top
    assert read_manifest(top).notes[0].startswith(f"{top}/metadata.csv: read as {name}")
    assert read_manifest(top, format="folder").format == "folder"


@pytest.mark.parametrize("name", ["wav.scp", "commands.txt"])
def test_commands_that_end_in_the_name_of_a_file_are_kaldis(written, name):
    manifest = read_manifest(
        written("u1 sph2pipe -f wav a.sph |\nu2 cat b.wav |\n", name), allow_commands=True
    )
    assert manifest.format == "kaldi"
    assert [row.id for row in rows_of(manifest)] == ["u1", "u2"]


def test_kaldis_fields_are_between_white_space_of_ascii(top):
    """As Kaldi splits them (`isspace` in the C locale): spaces of other scripts belong to
    ids, paths and texts."""
    data = top / "data"
    data.mkdir()
    wide, hard, next_line, unit = "\u3000", "\xa0", "\x85", "\x1f"
    (data / "wav.scp").write_text(f"a{wide}b\t \x0b/x/c{hard}d{unit}.wav \x0c\r\n")
    (data / "segments").write_text(f"u{hard}1 a{wide}b\t0.5 1.5\n")
    (data / "text").write_text(f"u{hard}1  so{wide}much, {next_line}said{wide}\n")
    manifest = read_manifest(data)
    assert rows_of(manifest) == [
        Utterance(id=f"u{hard}1", path=f"/x/c{hard}d{unit}.wav", start=0.5, duration=1.0)
    ]
    assert list(manifest.columns["text"]) == [f"so{wide}much, {next_line}said{wide}"]


@pytest.mark.parametrize("name", ["folder", "audiofolder", "lhotse"])
def test_a_file_in_place_of_what_the_format_is_is_one_line(written, name):
    assert refused(written("id,path\na,x.wav\n"), format=name)


# Datasets of Hugging Face, with audio inside


@pytest.mark.parametrize("saved", [True, False])
def test_a_dataset_has_its_rows_by_place(top, saved):
    pytest.importorskip("pyarrow")
    written = dataset(top, CLIPS, saved)
    manifest = read_manifest(written.manifest)
    assert manifest.format == "datasets"
    assert list(manifest.ids) == list(manifest.paths) == written.ids
    assert manifest.columns == {
        "original_path": [clip.path for clip in CLIPS],
        "text": [clip.text for clip in CLIPS],
        "speaker": [clip.speaker for clip in CLIPS],
    }
    for path, clip in zip(manifest.paths, CLIPS, strict=True):
        place = manifest.resolve(path)
        assert str(place) == f"{written.manifest}/{path}"
        with copy_of(place).open() as file:
            assert file.read().decode() == clip.stem
    assert rows_of(read_manifest(written.manifest, carry=False)) == rows_of(manifest)
    if not saved:
        one = read_manifest(written.manifest / "data-1.parquet")
        assert list(one.paths) == [path for path in written.paths if path.startswith("data-1")]
        with (written.manifest / "data-1.parquet").open("rb") as file:
            piped = read_manifest(f"/dev/fd/{file.fileno()}", format="parquet", audio=False)
            assert len(piped) == len(one)
            with pytest.raises(ManifestError, match=r"name it with \.parquet at its end"):
                read_manifest(f"/dev/fd/{file.fileno()}")


@pytest.mark.filterwarnings("ignore")
def test_what_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"audio": [{"bytes": b"x", "path": "x.wav"}] * 3, "text": ["a", "b", "c"]}
    made = datasets.Dataset.from_dict(rows)
    made.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict(train=made, test=made.select([0])).save_to_disk(tmp_path / "two")
    assert list(read_manifest(tmp_path / "one").columns["text"]) == ["a", "b", "c"]
    manifest = read_manifest(tmp_path / "two")
    assert list(manifest.columns["text"]) == ["a", "b", "c", "a"]
    assert manifest.paths[3] == "test/data-00000-of-00001.arrow/audio/0"
    del made
    gc.collect()


@pytest.mark.filterwarnings("ignore")
def test_files_that_a_dataset_names_are_read_by_their_paths(top):
    """As `to_parquet` of files writes them; also some beside others with bytes, where the
    footer does not say which."""
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    rows = {"audio": [str(top / clip.path) for clip in CLIPS]}
    with_files = datasets.Dataset.from_dict(rows).cast_column("audio", datasets.Audio(decode=False))
    with_files.to_parquet(top / "files.parquet")
    assert list(read_manifest(top / "files.parquet").paths) == rows["audio"]
    parts = [
        {"bytes": b"x", "path": "0.wav"},
        {"bytes": None, "path": "1.wav"},
        {"bytes": None, "path": None},
    ]
    datasets.Dataset.from_dict({"audio": parts, "target": parts}).to_parquet(top / "some.parquet")
    some = read_manifest(top / "some.parquet")
    assert list(some.paths) == ["some.parquet/audio/0", "1.wav", "some.parquet/audio/2"]
    assert some.notes[1].endswith("audio is read from the column 'audio', and not from 'target'")
    table = pyarrow.table({"audio": parts})
    with pyarrow.ipc.new_stream(str(top / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ('{"filename": "data.arrow"}', '"data.arrow"'):
        (top / "state.json").write_text(f'{{"_data_files": [{name}]}}')
        assert list(read_manifest(top, carry=False).paths) == [
            "data.arrow/audio/0",
            "1.wav",
            "data.arrow/audio/2",
        ]
    del with_files
    gc.collect()


@pytest.mark.parametrize("form", ["datasets", "audiofolder"])
def test_seconds_of_a_dataset_say_where_its_clips_came_from(tmp_path, form):
    """Rows are whole files, as the reader of datasets has them."""
    pyarrow = pytest.importorskip("pyarrow")
    said = {"begin_time": [1.5], "end_time": [2.0], "duration": [0.5], "channel": ["phone"]}
    if form == "datasets":
        table = pyarrow.table({"audio": [{"bytes": b"x", "path": "x.wav"}], **said})
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "train.parquet")
    else:
        table = pyarrow.table({"file_name": ["x.wav"], **said})
        pytest.importorskip("pyarrow.csv").write_csv(table, tmp_path / "metadata.csv")
    manifest = read_manifest(tmp_path)
    assert manifest.format == form
    assert rows_of(manifest) == [Utterance(id=manifest.ids[0], path=manifest.paths[0])]
    for name in ("begin_time", "duration", "channel"):
        assert list(manifest.columns[f"original_{name}"]) == [str(said[name][0])]


def test_a_dataset_that_names_files_elsewhere_is_refused(tmp_path):
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "../../secret.arrow"}]}')
    with pytest.raises(ManifestError, match=r"state\.json is not as save_to_disk writes it"):
        read_manifest(tmp_path)


# The page


def documented():
    """The rows of the page's table of formats: format, file, example, id and path."""
    _, _, table = text_of("docs/manifest.md").partition("| format | what it is | file ")
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        name, _, file, example, first = (
            cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]
        )
        text = example.strip("`").replace("\\|", "|").replace("⏎", "\n").replace("⇥", "\t")
        yield name.strip("`"), file.strip("`"), text, re.findall(r"`([^`]*)`", first)


@pytest.mark.parametrize(("name", "file", "text", "first"), [row for row in documented() if row[2]])
def test_each_example_of_the_page_is_recognised_and_gives_what_the_page_says(
    tmp_path, name, file, text, first
):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if file.endswith("/"):
        (path / text).parent.mkdir(parents=True)
        (path / text).touch()
    else:
        path.write_text(text)
    manifest = read_manifest(
        tmp_path if name == "audiofolder" else path, values={"data_root": "/corpora"}
    )
    assert (manifest.format, manifest.ids[0], manifest.paths[0]) == (name, *first)


def test_the_page_has_every_format():
    assert {name for name, *_ in documented()} == {*FORMATS}
