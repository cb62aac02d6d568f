"""`featcache manifest` writes the same utterances in another format."""

import json

import numpy as np
import pytest
import soundfile
from cache_contents import items
from make_cache import make_version
from manifests import rows_of

from featcache.manifest.read import read_manifest
from featcache.manifest.segments import Utterance
from featcache.spec import Clip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A data directory of Kaldi's: a file with two channels, one with one; segments with
    and without an end."""
    top = tmp_path_factory.mktemp("data")
    soundfile.write(top / "a.wav", np.zeros((8000, 2)), 8000)
    soundfile.write(top / "b.wav", np.zeros(4000), 8000)
    (top / "wav.scp").write_text("ra a.wav\nrb b.wav\n")
    (top / "segments").write_text("u1 ra 0.25 0.75 1\nu2 ra 0.1 -1\nu3 rb 0 0.5\nu4 rb 0.125 -1\n")
    (top / "text").write_text('u1 say "one", two\nu3 drei\n')
    return top


@pytest.mark.parametrize("name", ["m.csv", "m.jsonl", "m.jsonl.gz", "m.parquet"])
def test_tables_have_the_same_rows(cli, data, scratch, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    ended = cli("manifest", data, "-o", scratch / name)
    assert (ended.code, ended.out) == (
        0,
        f"{scratch / name}: 4 rows as {name.split('.')[1]}, read as kaldi\n",
    )
    assert f"relative paths are relative to {data}: give --root {data}" in ended.err
    ours, theirs = read_manifest(data), read_manifest(scratch / name, root=data)
    assert rows_of(ours) == rows_of(theirs)
    assert ours.columns == theirs.columns


def test_lhotse_reads_the_cuts(cli, data, scratch):
    lhotse = pytest.importorskip("lhotse")
    assert cli("manifest", data, "-o", scratch / "cuts.jsonl.gz", "--to", "lhotse").code == 0
    cuts = {cut.id: cut for cut in lhotse.CutSet.from_file(scratch / "cuts.jsonl.gz")}
    shapes = {id_: cut.load_audio().shape for id_, cut in cuts.items()}
    assert shapes == {"u1": (1, 4000), "u2": (2, 7200), "u3": (1, 4000), "u4": (1, 3000)}
    assert [sup.text for cut in cuts.values() for sup in cut.supervisions] == [
        'say "one", two',
        None,
        "drei",
        None,
    ]
    assert rows_of(read_manifest(scratch / "cuts.jsonl.gz")) == [
        Utterance(id="u1", path=str(data / "a.wav"), start=0.25, duration=0.5, channel=1),
        Utterance(id="u2", path=str(data / "a.wav"), start=0.1, duration=0.9),
        Utterance(id="u3", path=str(data / "b.wav"), start=0.0, duration=0.5),
        Utterance(id="u4", path=str(data / "b.wav"), start=0.125, duration=0.375),
    ]


def test_nemo_gets_durations_and_rows_whose_files_have_none_are_counted_by_reason(
    cli, plain, scratch
):
    folder = plain.copy(scratch / "audio").folder
    (folder / "00.wav").write_bytes(b"nothing")
    (folder / "01.wav").unlink()
    whole = (folder / "02.wav").read_bytes()
    (folder / "02.wav").write_bytes(whole[: len(whole) // 2])
    rows = [{"path": f"{number:02}.wav", "text": "hi"} for number in range(4)]
    rows.append({"path": "03.wav", "start": 9})
    (scratch / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = (
        "manifest",
        scratch / "m.jsonl",
        "-o",
        scratch / "nemo.json",
        "--to",
        "nemo",
        "--root",
        folder,
        "--json",
    )
    ended = cli(*command)
    assert (ended.code, ended.json()["failed"]) == (3, 4)
    assert (
        "4 rows are left out: file_missing 1, not_audio 1, "
        "segment_outside 1, truncated 1" in ended.err
    )
    (line,) = (scratch / "nemo.json").read_text().splitlines()
    path = str(folder / "03.wav")
    assert json.loads(line) == {
        "audio_filepath": path,
        "duration": 0.46,
        "id": "03.wav",
        "text": "hi",
    }


def test_nemo_gets_the_offset_of_the_audio_whatever_columns_there_are(cli, plain, scratch):
    (scratch / "m.csv").write_text("id,path,start,duration,offset\na,03.wav,0.25,0.125,9000\n")
    cli(
        "manifest",
        scratch / "m.csv",
        "-o",
        scratch / "nemo.json",
        "--to",
        "nemo",
        "--root",
        plain.folder,
    ).with_code(0)
    (row,) = map(json.loads, (scratch / "nemo.json").read_text().splitlines())
    assert (row["offset"], row["duration"]) == (0.25, 0.125)


def test_features_are_the_same_with_durations_from_headers(cli, corpus, scratch, truth):
    """For every rate, format and segment; what gives a duration keeps it."""
    timed = scratch / "timed.json"
    ended = cli(
        "manifest",
        corpus.manifest(),
        "-o",
        timed,
        "--to",
        "nemo",
        "--root",
        corpus.folder,
        "--threads",
        2,
    )
    assert ended.code == 0, ended
    before, after = read_manifest(corpus.manifest()), read_manifest(timed)
    given = before.duration == before.duration
    assert (after.duration[given] == before.duration[given]).all()
    assert (after.duration > 0).all()
    assert cli("extract", timed, "-o", scratch / "cache", "--threads", 1).code == 0
    assert items(scratch / "cache") == truth


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["-o", "m.txt"],
            "m.txt: its suffix names no format: add --to csv, jsonl, parquet, nemo, lhotse",
        ),
        (["-o", "m.csv", "--to", "kaldi"], "there is no 'kaldi': choose csv"),
        (["-o", "m.csv", "--set", "data_root"], "'data_root' is not NAME=VALUE"),
    ],
)
def test_wrong_options_are_one_line(cli, data, scratch, options, words):
    assert words in cli.refused("manifest", data, "-o", scratch / options[1], *options[2:])
    assert not (scratch / options[1]).exists()


def test_a_dash_is_standard_output(cli, data, scratch):
    assert cli("manifest", data, "-o", scratch / "m.csv").code == 0
    ended = cli("manifest", data, "-o", "-", "--to", "csv")
    assert (ended.code, ended.out) == (0, (scratch / "m.csv").read_text())
    assert "-: 4 rows as csv, read as kaldi" in ended.err
    assert "-o: -: its suffix names no format: add --to csv" in cli("manifest", data, "-o", "-").err
    assert cli("manifest", data, "-o", "-", "--to", "csv", "--json").code == 2


@pytest.mark.parametrize("kind", ["nemo", "lhotse"])
def test_a_container_is_refused_before_it_is_copied(cli, scratch, kind):
    (scratch / "m.csv").write_text("id,path\na,gone.tar.gz/a.wav\n")
    said = cli.refused("manifest", scratch / "m.csv", "-o", scratch / "cuts.jsonl", "--to", kind)
    assert "gone.tar.gz/a.wav: is inside a container" in said


@pytest.mark.parametrize("name", ["m.jsonl", "m.parquet"])
def test_cells_keep_their_types(cli, scratch, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    cells = [
        {"clean": True, "n": 3, "snr": 0.5, "code": "7", "tags": ["a"], "meta": {"k": False}},
        {"clean": False, "n": None, "snr": 2.0, "code": "x", "tags": [], "meta": {"k": True}},
    ]
    rows = [{"id": f"u{row}", "path": "a.wav", **each} for row, each in enumerate(cells)]
    (scratch / "given.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cli("manifest", scratch / "given.jsonl", "-o", scratch / name).with_code(0)
    given, written = read_manifest(scratch / "given.jsonl"), read_manifest(scratch / name)
    for column in given.columns:
        assert list(written.cells(column)) == [each[column] for each in cells]
    cli("manifest", scratch / name, "-o", scratch / "m.csv").with_code(0)
    table = read_manifest(scratch / "m.csv")
    assert list(table.columns["clean"]) == ["true", "false"]
    assert list(table.cells("clean")) == [True, False]


def test_columns_of_text_formats_are_written_with_the_types_that_a_dataset_gives_them(cli, scratch):
    (scratch / "m.csv").write_text("id,path,digit,speaker,noisy\na,a.wav,7,007,True\nb,a.wav,,x,\n")
    cli("manifest", scratch / "m.csv", "-o", scratch / "m.jsonl").with_code(0)
    first, second = map(json.loads, (scratch / "m.jsonl").read_text().splitlines())
    assert first == {"id": "a", "path": "a.wav", "digit": 7.0, "speaker": "007", "noisy": True}
    assert second == {"id": "b", "path": "a.wav", "speaker": "x"}


@pytest.mark.parametrize("cells", [[1, "a"], [{}, {}], [2**70, 1], [[], {"a": 1}]])
def test_what_parquet_cannot_hold_is_text_in_it(cli, scratch, cells):
    pytest.importorskip("pyarrow")
    rows = [{"id": f"u{row}", "path": "a.wav", "x": cell} for row, cell in enumerate(cells)]
    (scratch / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cli("manifest", scratch / "m.jsonl", "-o", scratch / "m.parquet").with_code(0)
    given, written = read_manifest(scratch / "m.jsonl"), read_manifest(scratch / "m.parquet")
    assert written.columns == given.columns


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A manifest of four rows, and a version with a score of three of them."""
    folder = tmp_path_factory.mktemp("scored")
    rows = [
        f"{name},{name}.wav,{lang}" for name, lang in zip("abcd", ["en", "de"] * 2, strict=True)
    ]
    (folder / "train.csv").write_text("\n".join(["id,path,lang", *rows]))
    scores = {
        name: np.array([score], np.float32) for name, score in zip("abc", (4, 2, 3.5), strict=True)
    }
    at = {name: {"path": f"{name}.wav"} for name in scores}
    make_version(folder / "features", scores, name="mos", axis=Clip(), rows=at)
    return folder


def test_where_writes_the_rows_that_fit(cli, scored, scratch):
    path = scratch / "selected.csv"
    where = ["--where", "mos > 3", "--column", f"mos={scored}/features/mos"]
    ended = cli("manifest", scored / "train.csv", "-o", path, *where)
    assert ended.code == 3
    assert ended.out == f"{path}: 2 of 4 rows as csv, read as csv\n"
    assert "1 row is left out, of which a version has no value: d\n" in ended.err
    assert path.read_text() == "id,path,lang\na,a.wav,en\nc,c.wav,en\n"
    ended = cli(
        "manifest", scored / "train.csv", "-o", "-", "--to", "csv", "--where", "lang == 'de'"
    )
    assert (ended.code, ended.out) == (0, "id,path,lang\nb,b.wav,de\nd,d.wav,de\n")
    ended = cli("manifest", scored / "train.csv", "-o", scratch / "new.csv", "--json", *where)
    assert json.loads(ended.out) == {
        "output": str(scratch / "new.csv"),
        "format": "csv",
        "where": "mos > 3",
        "rows": 4,
        "utterances": 2,
        "lacking": 1,
        "failed": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--column", "mos=features"], "--column gives --where a column: give --where, too"),
        (
            ["--where", "mos > 3", "--column", "mos"],
            "--column: 'mos' is not NAME=VALUE, as mos=features/dnsmos",
        ),
        (
            ["--where", "mos > 3", "--column", "mos=nothing"],
            "nothing: there is no such cache folder",
        ),
        (["--where", "lang > 3"], "lang is text, and 3 is a number"),
    ],
)
def test_where_that_cannot_be_done_is_one_line(cli, scored, scratch, arguments, message):
    ended = cli("manifest", scored / "train.csv", "-o", scratch / "new.csv", *arguments)
    assert ended.code in (1, 2)
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not (scratch / "new.csv").exists()
