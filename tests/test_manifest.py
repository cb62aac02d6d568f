"""A manifest is read as it was written, or refused with every fault at its line."""

from __future__ import annotations

import csv
import io
import json
import math
import pickle
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from featcache.errors import ManifestError
from featcache.manifest import SPELLINGS, Manifest, Utterance, read_manifest, row_hashes
from featcache.strings import Strings

DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def write(tmp_path):
    def write(content: str | bytes, name: str = "train.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def faults_of(path: Path | str, **options) -> list[str]:
    """The lines of the message below its first, which must count them."""
    with pytest.raises(ManifestError) as caught:
        read_manifest(path, **options)
    summary, *faults = str(caught.value).splitlines()
    name = "<stdin>" if path == "-" else path
    assert summary == f"{name}: {len(faults)} fault{'s' if len(faults) > 1 else ''}"
    assert all(fault.startswith("  ") for fault in faults)
    return [fault[2:] for fault in faults]


def rows_of(manifest: Manifest) -> list[Utterance]:
    return [manifest[row] for row in range(len(manifest))]


# What is read


def test_reads_columns_and_rows(write):
    manifest = read_manifest(write("id,path,start,duration,channel,text\na,x.wav,0.5,2,1,hi\nb,y.wav,,,,\n"))
    assert rows_of(manifest) == [
        Utterance("a", "x.wav", 0.5, 2.0, 1),
        Utterance("b", "y.wav", None, None, None),
    ]
    assert manifest.ids == Strings.of(["a", "b"])
    assert manifest.paths == Strings.of(["x.wav", "y.wav"])
    for values, dtype, expected in [
        (manifest.start, np.float64, [0.5, math.nan]),
        (manifest.duration, np.float64, [2.0, math.nan]),
        (manifest.channel, np.int32, [1, -1]),
    ]:
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, expected)
    assert manifest.columns == {"text": Strings.of(["hi", ""])}


def test_rows_count_from_the_end_and_stop_at_it(write):
    manifest = read_manifest(write("id,path\na,x.wav\nb,y.wav\n"))
    assert manifest[-1].id == "b"
    with pytest.raises(IndexError):
        manifest[2]


def test_an_utterance_travels_by_pickle():
    utterance = Utterance("a", "x.wav", 0.5, None, 1)
    pickled = pickle.dumps(utterance)
    assert pickle.loads(pickled) == utterance
    assert len(pickled) < 200


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id,path,text\na,x.wav,hi\n"),
        ("a.CSV", "id,path,text\na,x.wav,hi\n"),
        ("a.tsv", "id\tpath\ttext\na\tx.wav\thi\n"),
        ("a.jsonl", '{"id": "a", "path": "x.wav", "text": "hi"}\n'),
        ("a.json", '{"id": "a", "path": "x.wav", "text": "hi"}\n'),
        ("a.txt", "id,path,text\na,x.wav,hi\n"),
        ("a.txt", "id\tpath\ttext\na\tx.wav\thi\n"),
        ("manifest", '{"id": "a", "path": "x.wav", "text": "hi"}\n'),
    ],
)
def test_format_by_suffix_then_by_first_line(write, name, content):
    manifest = read_manifest(write(content, name))
    assert rows_of(manifest) == [Utterance("a", "x.wav", None, None, None)]
    assert list(manifest.columns["text"]) == ["hi"]


@pytest.mark.parametrize(
    "content",
    [
        "id,path\na,x.wav\n",
        "id\tpath\na\tx.wav\n",
        '\n{"id": "a", "path": "x.wav"}\n',
        "\ufeffid,path\na,x.wav",
    ],
)
def test_standard_input(monkeypatch, tmp_path, content):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    manifest = read_manifest("-")
    assert manifest.source == "<stdin>"
    assert manifest.root == tmp_path
    assert rows_of(manifest) == [Utterance("a", "x.wav", None, None, None)]
    assert not sys.stdin.closed


def test_faults_of_standard_input_name_it(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"id,path\n,x.wav\n")))
    assert faults_of("-") == ["line 2: id is missing"]


def test_root_is_the_manifests_folder_unless_given(write, tmp_path, monkeypatch):
    path = write("id,path\na,wavs/x.wav\n")
    assert read_manifest(path).resolve("wavs/x.wav") == tmp_path / "wavs/x.wav"
    assert read_manifest(path).resolve("/corpus/x.wav") == Path("/corpus/x.wav")
    assert read_manifest(path, root="/corpus").resolve("wavs/x.wav") == Path("/corpus/wavs/x.wav")
    monkeypatch.chdir(tmp_path)
    assert read_manifest("train.csv").root == tmp_path
    assert read_manifest("train.csv").source == "train.csv"
    assert read_manifest("train.csv", root="corpus").root == tmp_path / "corpus"


@pytest.mark.parametrize("spelled", [str, str.upper, str.title, " {} ".format])
@pytest.mark.parametrize(("column", "spelling"), [(c, s) for c, all_ in SPELLINGS.items() for s in all_])
def test_every_spelling(write, column, spelling, spelled):
    cells = {"id": "a", "path": "x.wav", "start": "1", "duration": "2", "channel": "3"}
    cells = {spelled(spelling) if name == column else name: cell for name, cell in cells.items()}
    for path in (
        write(",".join(cells) + "\n" + ",".join(cells.values()) + "\n"),
        write(json.dumps(cells) + "\n", "train.jsonl"),
    ):
        manifest = read_manifest(path)
        assert rows_of(manifest) == [Utterance("a", "x.wav", 1.0, 2.0, 3)]
        assert manifest.columns == {}


def test_spellings_are_lower_case_and_mean_one_thing():
    spellings = [spelling for all_ in SPELLINGS.values() for spelling in all_]
    assert len(set(spellings)) == len(spellings)
    assert all(spelling == spelling.lower().strip() for spelling in spellings)
    assert all(column in all_ for column, all_ in SPELLINGS.items())


def test_the_exact_name_wins_and_the_other_is_carried(write):
    for path in (
        write("ID,id,key,path\n1,a,k,x.wav\n"),
        write('{"ID": "1", "id": "a", "key": "k", "path": "x.wav"}\n', "train.jsonl"),
    ):
        manifest = read_manifest(path)
        assert list(manifest.ids) == ["a"]
        assert manifest.columns == {"ID": Strings.of(["1"]), "key": Strings.of(["k"])}


def test_other_columns_are_carried_untouched(write):
    carried = ["007", " padded ", "1.50", "null", "", "nan", "a,b", 'say "hi"', "two\nlines", "名前"]
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(["id", "path", "", "Speaker ID"])
    writer.writerows([f"u{i}", "x.wav", cell, cell] for i, cell in enumerate(carried))
    manifest = read_manifest(write(buffer.getvalue()))
    assert manifest.columns == {"": Strings.of(carried), "Speaker ID": Strings.of(carried)}


def test_json_values_are_carried_as_text(write):
    values = ["007", 7, 1.5, True, None, ["a", 1], {"k": "é"}, ""]
    lines = [json.dumps({"id": f"u{i}", "path": "x.wav", "extra": value}) for i, value in enumerate(values)]
    manifest = read_manifest(write("\n".join(lines), "train.jsonl"))
    assert list(manifest.columns["extra"]) == ["007", "7", "1.5", "true", "null", '["a",1]', '{"k":"é"}', ""]


def test_keys_may_come_and_go_between_json_lines(write):
    rows = [{"id": f"u{i}", "path": "x.wav"} for i in range(5000)]
    rows[10] = {"early": "e", **rows[10]}
    rows[4990] |= {"late": "l", "offset": 2}
    manifest = read_manifest(write("\n".join(map(json.dumps, rows)), "train.jsonl"))
    assert list(manifest.ids) == [row["id"] for row in rows]
    assert list(manifest.columns["early"]) == [row.get("early", "") for row in rows]
    assert list(manifest.columns["late"]) == [row.get("late", "") for row in rows]
    assert np.flatnonzero(~np.isnan(manifest.start)).tolist() == [4990]


def test_json_cells_may_be_numbers_text_or_null(write):
    manifest = read_manifest(
        write(
            '{"id": 12, "path": "x.wav", "start": "0.5", "duration": 2, "channel": "1"}\n'
            '{"id": "b", "path": "x.wav", "start": null, "duration": null, "channel": null}\n'
            '{"id": "c", "path": "x.wav", "start": 0, "duration": 1e-3, "channel": 0.0}\n',
            "train.jsonl",
        )
    )
    assert rows_of(manifest) == [
        Utterance("12", "x.wav", 0.5, 2.0, 1),
        Utterance("b", "x.wav", None, None, None),
        Utterance("c", "x.wav", 0.0, 0.001, 0),
    ]


def test_byte_order_mark_crlf_and_blank_lines(write):
    content = b"\xef\xbb\xbf\r\n  \r\nid,path,text\r\n\r\na,x.wav,hi\r\n   \r\nb,y.wav,ho\r\n\r\n"
    for path in (
        write(content),
        write(content.replace(b",", b"\t"), "train.tsv"),
        write(content.replace(b",", b"\t"), "train.txt"),
    ):
        manifest = read_manifest(path)
        assert list(manifest.ids) == ["a", "b"]
        assert list(manifest.columns["text"]) == ["hi", "ho"]


def test_quotes_mean_nothing_in_tsv(write):
    manifest = read_manifest(write('id\tpath\ttext\na\tx.wav\t"Hi" he said\nb\ty.wav\t"open\n', "train.tsv"))
    assert list(manifest.columns["text"]) == ['"Hi" he said', '"open']


def test_only_ids_are_required_without_audio(write):
    manifest = read_manifest(write("id,text\na,hi\nb,ho\n"), audio=False)
    assert rows_of(manifest) == [Utterance("a", "", None, None, None), Utterance("b", "", None, None, None)]
    assert list(read_manifest(write("id,path\na,\n"), audio=False).paths) == [""]
    assert list(read_manifest(write("id\na\n\nb\n"), audio=False).ids) == ["a", "b"]


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_columns_need_not_be_carried(write, name):
    content = "id,path,text\na,x.wav,hi\n" if name == "train.csv" else '{"id":"a","path":"x.wav","text":"hi"}'
    assert read_manifest(write(content, name), carry=False).columns == {}


# What is refused


def test_all_faults_are_reported_together_and_in_order(write):
    path = write(
        b"id,path,start,duration,channel,text\n"
        b"a,x.wav,-0.5,0,left,fine\n"
        b'b,x.wav,,,,"a quoted\nnewline"\n'
        b"b,,1,inf,-1,\n"
        b"c,sox x.mp3 -t wav - |,soon,nan,1.5,\n"
        b"d,x.wav\n"
        b"\n"
        b"e,x.wav,,,,caf\xe9\n"
        b"f\x07,x.wav,,,,\n"
        b"a,x.wav,,,,\n"
        b",x.wav,,,,\n"
        b'g,"x"y.wav,,,,\n'
        b"h,x.wav,,,,zero\0zero\n"
        b'i,x.wav,,,,"never closed\n'
    )
    assert faults_of(path) == [
        "line 2: start is negative: -0.5",
        "line 2: duration is zero: leave it empty to read to the end of the file",
        "line 2: channel is not a number: 'left'",
        "line 5: path is missing",
        "line 5: duration is not finite: inf",
        "line 5: channel is not a whole number from 0 up: '-1'",
        "line 5: id 'b' is already on line 3",
        "line 6: path is a pipe, and pipes are never run: 'sox x.mp3 -t wav - |'",
        "line 6: start is not a number: 'soon'",
        "line 6: duration is not finite: nan",
        "line 6: channel is not a whole number from 0 up: '1.5'",
        "line 7: 2 fields, but the header has 6",
        "line 9: byte 15 is not UTF-8: 0xe9",
        "line 10: id has a control character: 'f\\x07'",
        "line 11: id 'a' is already on line 2",
        "line 12: id is missing",
        "line 13: not a CSV row: ',' expected after '\"' (is a quote not closed, or not doubled?)",
        "line 14: there is a NUL byte",
        "line 15: not a CSV row: unexpected end of data (is a quote not closed, or not doubled?)",
    ]


def test_faults_of_json_lines(write):
    path = write(
        b'{"id": "a", "path": "x.wav"}\n'
        b"\n"
        b'{"id": "b", "path": "x.wav"\n'
        b'["c", "x.wav"]\n'
        b'{"path": "x.wav", "id": null}\n'
        b'{"id": "d"}\n'
        b'{"id": "e", "path": {"bytes": ""}, "start": true, "duration": [1], "channel": {}}\n'
        b'{"id": "f", "path": "x.wav", "start": -1, "duration": NaN, "channel": 4294967296}\n'
        b'{"id": "g", "path": "x\\u0000.wav"}\n'
        b'{"id": "half \\ud83d", "path": "x.wav"}\n'
        b'{"id": "whole \\ud83d\\ude00", "path": "x.wav"}\n'
        b'{"id": "caf\xe9", "path": "x.wav"}\n'
        b'{"id": "a", "path": "x.wav"}\n'
        b'{"id": true, "path": "x.wav", "duration": 1' + b"0" * 400 + b"}\n"
        b'{"id": "h", "path": "x.wav", "key": ' + b"[" * 100_000 + b"\n"
        b'{"id": "i", "path": "x.wav", "key": ' + b"1" * 5_000 + b"}\n",
        "train.jsonl",
    )
    faults = faults_of(path)
    assert [fault for fault in faults if not fault.startswith(("line 10:", "line 15:", "line 16:"))] == [
        "line 3: not JSON: Expecting ',' delimiter at character 29",
        "line 4: not a JSON object: ['c', 'x.wav']",
        "line 5: id is missing",
        "line 6: path is missing",
        "line 7: path is not text: {'bytes': ''}",
        "line 7: start is not a number: True",
        "line 7: duration is not a number: [1]",
        "line 7: channel is not a number: {}",
        "line 8: start is negative: -1.0",
        "line 8: duration is not finite: nan",
        "line 8: channel is not a whole number from 0 up: 4294967296",
        "line 9: path has a NUL character: 'x\\x00.wav'",
        "line 12: byte 12 is not UTF-8: 0xe9",
        "line 13: id 'a' is already on line 1",
        "line 14: id is not text: True",
        f"line 14: duration is not a number: 1{'0' * 17}...{'0' * 19}",
    ]
    unreadable = [fault for fault in faults if "JSON that cannot be read" in fault]
    assert [fault.split(":")[0] for fault in unreadable] == ["line 10", "line 15", "line 16"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "\nwav_id,audio_filepath,text\n1,x.wav,hi\n"),
        (
            "train.jsonl",
            '\n{"wav_id": 1, "audio_filepath": "x.wav"}\n{"audio_filepath": "y.wav", "text": "hi"}\n',
        ),
    ],
)
def test_a_missing_column_is_one_fault_that_names_what_is_there(write, name, content):
    [fault] = faults_of(write(content, name))
    assert fault.startswith("line 2: no id column among 'wav_id', 'audio_filepath', 'text': rename or add one")
    assert all(spelling in fault for spelling in SPELLINGS["id"])


def test_missing_columns_do_not_hide_other_faults(write):
    faults = faults_of(write("text,duration\nhi,-1\n"))
    assert [fault[:16] for fault in faults] == ["line 1: no id co", "line 1: no path ", "line 2: duration"]


def test_a_column_that_only_later_json_lines_lack(write):
    rows = [{"id": f"u{i}", "path": "x.wav"} for i in range(5000)]
    del rows[4990]["id"], rows[4995]["path"]
    path = write("\n".join(map(json.dumps, rows)), "train.jsonl")
    assert faults_of(path) == ["line 4991: id is missing", "line 4996: path is missing"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.csv", "id,WAV,file\na,x,y\n"), ("train.jsonl", '{"id": "a", "WAV": "x", "file": "y"}\n')],
)
def test_two_columns_that_mean_the_same(write, name, content):
    assert faults_of(write(content, name)) == ["line 1: 'WAV' and 'file' both mean path: name one of them path"]


def test_two_columns_of_one_name(write):
    assert faults_of(write("id,path,text,text,text\na,x.wav,1,2,3\n")) == ["line 1: 3 columns are named 'text'"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "id,path,start,End\na,x.wav,1,2\n"),
        ("train.jsonl", '{"id": "a", "path": "x.wav", "offset": 1, "End": 2}\n'),
    ],
)
def test_an_end_does_not_pass_for_a_duration(write, name, content):
    assert faults_of(write(content, name)) == ["line 1: 'End' is not read: give a duration, End - start, instead"]


def test_an_end_beside_a_duration_is_carried(write):
    manifest = read_manifest(write("id,path,start,duration,end\na,x.wav,1,2,3\n"))
    assert list(manifest.columns["end"]) == ["3"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"train{suffix}", blank) for suffix in (".csv", ".tsv", ".jsonl", "") for blank in ("", "\ufeff", "\n\r\n")),
        *(("train.csv", header) for header in ("id,path", "\nid,path\n\n")),
        ("train.tsv", "id\tpath\n"),
    ],
)
def test_no_rows_is_a_fault(write, name, content):
    assert faults_of(write(content, name)) == ["there are no rows"]


def test_a_json_array_is_told_what_is_expected(write):
    for content in ('[{"id": "a", "path": "x.wav"}]', '\n[\n  {"id": "a"}\n]\n'):
        line = 1 + content.startswith("\n")
        expected = f"line {line}: a JSON array; one object on each line is expected: jq -c '.[]' makes them"
        assert faults_of(write(content, "train.json")) == [expected]
        assert faults_of(write(content, "manifest")) == [expected]


def test_line_numbers_after_quoted_newlines(write):
    path = write('id,path,text\na,x.wav,"one\r\ntwo\n\nthree"\nb,x.wav,"1\n2"\nc,,\n,x.wav,"1\n2"\n')
    assert faults_of(path) == ["line 8: path is missing", "line 9: id is missing"]


def test_the_first_faults_by_line_are_shown_and_all_are_counted(write):
    rows = [f"u{i % 2000},x.wav,{-1 if i >= 10 else 1}" for i in range(3000)]
    with pytest.raises(ManifestError) as caught:
        read_manifest(write("id,path,start\n" + "\n".join(rows)))
    summary, *faults = str(caught.value).splitlines()
    assert summary.endswith(f"train.csv: {2990 + 1000} faults")
    assert faults[:20] == [f"  line {line}: start is negative: -1.0" for line in range(12, 32)]
    assert faults[20:] == ["  … and 3970 more"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ManifestError, match=r"absent\.csv: cannot be read: No such file"):
        read_manifest(tmp_path / "absent.csv")
    with pytest.raises(ManifestError, match="cannot be read: Is a directory"):
        read_manifest(tmp_path)


def test_bytes_of_another_encoding_make_no_other_faults(write):
    path = write(b"id,path\n" + b"\n".join(b"u\x80%c,x.wav" % byte for byte in range(0x80, 0x90)))
    assert faults_of(path) == [f"line {line}: byte 2 is not UTF-8: 0x80" for line in range(2, 18)]


def test_duplicates_among_many_rows_are_found_quickly(write):
    ids = [f"speaker-{i % 100:03d}-{i:06d}" for i in range(100_000)]
    ids[99_999] = ids[5]
    path = write("id,path\n" + "".join(f"{id_},x.wav\n" for id_ in ids))
    began = time.perf_counter()
    assert faults_of(path) == [f"line 100001: id {ids[5]!r} is already on line 7"]
    assert time.perf_counter() - began < 5


def test_every_row_with_the_same_id(write):
    faults = faults_of(write("id,path\n" + "a,x.wav\n" * 4))
    assert faults == [f"line {line}: id 'a' is already on line 2" for line in (3, 4, 5)]


# Whatever is written is read

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
carried = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
seconds = st.floats(0, 1e9, allow_nan=False)
utterances = st.builds(
    Utterance,
    id=text.filter(len),
    path=text.filter(lambda path: path and not path.rstrip().endswith("|")),
    start=st.none() | seconds,
    duration=st.none() | seconds.filter(bool),
    channel=st.none() | st.integers(0, 2**31 - 1),
)
tables = st.lists(st.tuples(utterances, carried), min_size=1, unique_by=lambda row: row[0].id)
HEADER = ["id", "path", "start", "duration", "channel", "speaker"]


def cells_of(utterance: Utterance, speaker: str) -> list:
    return [utterance.id, utterance.path, utterance.start, utterance.duration, utterance.channel, speaker]


def as_csv(rows) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(HEADER)
    writer.writerows(cells_of(*row) for row in rows)
    return buffer.getvalue()


def as_tsv(rows) -> str:
    lines = [HEADER] + [["" if cell is None else str(cell) for cell in cells_of(*row)] for row in rows]
    return "".join("\t".join(line) + "\r\n" for line in lines)


def as_jsonl(rows, ensure_ascii: bool) -> str:
    rows = [dict(zip(HEADER, cells_of(*row), strict=True)) for row in rows]
    return "".join(json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows)


def assert_reads_back(path: Path, content: str, rows) -> None:
    path.write_bytes(content.encode())
    manifest = read_manifest(path)
    assert rows_of(manifest) == [utterance for utterance, _ in rows]
    assert list(manifest.columns["speaker"]) == [speaker for _, speaker in rows]


same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@same_folder
@given(tables)
@example([(Utterance('"', " x\u2028", 0.0, 5e-324, 0), "\r"), (Utterance("\ufeff", "é", None, None, None), "\n")])
def test_csv_round_trip(tmp_path, rows):
    assert_reads_back(tmp_path / "t.csv", as_csv(rows), rows)


@same_folder
@given(tables)
@example([(Utterance('"', "'", None, None, None), '"')])
def test_tsv_round_trip(tmp_path, rows):
    rows = [(utterance, speaker.translate({9: "", 10: ""})) for utterance, speaker in rows]
    assert_reads_back(tmp_path / "t.tsv", as_tsv(rows), rows)


@same_folder
@given(tables, st.booleans())
@example([(Utterance("😀", "\\ud800", None, None, None), "\ud7ff")], True)
def test_jsonl_round_trip(tmp_path, rows, ensure_ascii):
    assert_reads_back(tmp_path / "t.jsonl", as_jsonl(rows, ensure_ascii), rows)


# The identity of a row


def slow_row_hash(path: str, start: float, duration: float, channel: int) -> int:
    def seconds(value: float) -> bytes:
        return struct.pack("<d", math.nan if math.isnan(value) else 0.0 if value == 0 else value)

    result = 0xCBF29CE484222325
    for byte in path.encode() + seconds(start) + seconds(duration) + struct.pack("<i", channel):
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


def hashes_of(rows) -> list[int]:
    paths, start, duration, channel = zip(*rows, strict=True)
    return row_hashes(Strings.of(paths), np.array(start), np.array(duration), np.array(channel, np.int32)).tolist()


OTHER_NAN = struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0]


@given(st.lists(st.tuples(text, st.floats(), st.floats(), st.integers(-1, 2**31 - 1)), min_size=1))
@example([("a", math.nan, OTHER_NAN, -1), ("a", -0.0, 0.0, 0), ("", 1.5, 2.5, 1)])
def test_row_hashes_equal_the_slow_reference(rows):
    assert hashes_of(rows) == [slow_row_hash(*row) for row in rows]


def test_row_hashes_tell_rows_apart_by_each_column():
    row = ("a.wav", 0.0, 1.0, 0)
    others = [
        ("b.wav", 0.0, 1.0, 0),
        ("a.wav", math.nan, 1.0, 0),
        ("a.wav", 0.0, 2.0, 0),
        ("a.wav", 0.0, 1.0, -1),
    ]
    assert len(set(hashes_of([row, *others]))) == 5
    assert len(set(hashes_of([row, ("a.wav", -0.0, 1.0, 0)]))) == 1
    assert len(set(hashes_of([("a", OTHER_NAN, math.nan, -1), ("a", math.nan, -OTHER_NAN, -1)]))) == 1


# Real manifests


@pytest.mark.parametrize(("name", "num_rows"), [("fsdd/manifest.csv", 3000), ("ljspeech/flac.csv", 32)])
def test_real_manifests(name, num_rows):
    path = DATA / name
    if not path.exists():
        pytest.skip("the real data is not here")
    manifest = read_manifest(path)
    assert len(manifest) == num_rows
    assert all(manifest.resolve(manifest[row].path).is_file() for row in range(0, num_rows, 31))
    with path.open(newline="", encoding="utf-8") as file:
        expected = list(csv.DictReader(file))
    assert list(manifest.ids) == [row["id"] for row in expected]
    assert manifest.duration.tolist() == [float(row["duration"]) for row in expected]
    for name, column in manifest.columns.items():
        assert list(column) == [row[name] for row in expected]
