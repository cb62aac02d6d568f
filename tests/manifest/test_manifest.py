"""A manifest is read as it was written."""

import csv
import gzip
import io
import json
import math
import pickle
import re
import struct
import sys
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from manifests import faults_of, refused, rows_of

from featcache.errors import secret_in
from featcache.manifest.read import read_manifest
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import COLUMNS, SPELLINGS

# What is read


def test_reads_columns_and_rows(written):
    header = "id,path,start,duration,channel,text,,Speaker ID"
    manifest = read_manifest(written(f"{header}\na,x.wav,0.5,2,1,hi,1,2\nb,y.wav,,,,,,\n"))
    first = Utterance(id="a", path="x.wav", start=0.5, duration=2.0, channel=1)
    assert rows_of(manifest) == [first, Utterance(id="b", path="y.wav")]
    assert manifest.ids == Strings.of(["a", "b"])
    assert manifest.paths == Strings.of(["x.wav", "y.wav"])
    for values, dtype, expected in [
        (manifest.start, np.float64, [0.5, math.nan]),
        (manifest.duration, np.float64, [2.0, math.nan]),
        (manifest.channel, np.int32, [1, -1]),
    ]:
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, expected)
    others = {"text": ["hi", ""], "": ["1", ""], "Speaker ID": ["2", ""]}
    assert manifest.columns == {name: Strings.of(cells) for name, cells in others.items()}
    assert manifest[-1].id == "b"
    with pytest.raises(IndexError):
        manifest[2]


def test_an_utterance_travels_by_pickle():
    utterance = Utterance(id="a", path="x.wav", start=0.5, channel=1)
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
def test_format_by_suffix_then_by_first_line(written, name, content):
    """Also of a gzip file, which may have any name, and whose own suffix does not count."""
    packed = gzip.compress(content.encode())
    for file, data in (
        (name, packed),
        (f"{name}.gz", packed),
        (f"{name}.GZ", packed),
        (f"{name}.gz", content),
    ):
        assert read_manifest(written(data, file)).columns == {"text": Strings.of(["hi"])}
    path = written(content, name)
    manifest = read_manifest(path)
    assert rows_of(manifest) == [Utterance(id="a", path="x.wav")]
    assert manifest.columns == {"text": Strings.of(["hi"])}
    assert read_manifest(path, carry=False).columns == {}


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
    assert rows_of(manifest) == [Utterance(id="a", path="x.wav")]
    assert not sys.stdin.closed
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"id,path\n,x.wav\n")))
    assert faults_of("-") == ["line 2: id is missing"]


def test_root_is_the_manifests_folder_unless_given(written, tmp_path, monkeypatch):
    path = written("id,path\na,wavs/x.wav\n")
    assert read_manifest(path).resolve("wavs/x.wav") == f"{tmp_path}/wavs/x.wav"
    assert read_manifest(path).resolve("/corpus/x.wav") == "/corpus/x.wav"
    assert read_manifest(path, root="/corpus").resolve("wavs/x.wav") == "/corpus/wavs/x.wav"
    monkeypatch.chdir(tmp_path)
    assert read_manifest("train.csv").root == tmp_path
    assert read_manifest("train.csv").source == "train.csv"
    assert read_manifest("train.csv", root="corpus").root == tmp_path / "corpus"


@pytest.mark.parametrize("spelled", [str, str.upper, str.title, " {} ".format])
@pytest.mark.parametrize(
    ("column", "spelling"), [(c, s) for c, all_ in SPELLINGS.items() for s in all_]
)
def test_every_spelling(written, column, spelling, spelled):
    cells = {"id": "a", "path": "x.wav", "start": "1", "duration": "2", "channel": "3"}
    cells = {spelled(spelling) if name == column else name: cell for name, cell in cells.items()}
    table = ",".join(cells) + "\n" + ",".join(cells.values()) + "\n"
    for path in (written(table), written(json.dumps(cells) + "\n", "train.jsonl")):
        manifest = read_manifest(path)
        assert rows_of(manifest) == [
            Utterance(id="a", path="x.wav", start=1.0, duration=2.0, channel=3)
        ]
        assert manifest.columns == {}


def test_the_exact_name_wins_and_the_other_is_carried(written):
    """Of paths, it is said."""
    line = '{"ID": "1", "id": "a", "key": "k", "audio": "a.wav", "path": "x.wav"}\n'
    for path in (
        written("ID,id,key,audio,path\n1,a,k,a.wav,x.wav\n"),
        written(line, "train.jsonl"),
    ):
        manifest = read_manifest(path)
        assert rows_of(manifest) == [Utterance(id="a", path="x.wav")]
        assert manifest.columns == {"ID": ["1"], "key": ["k"], "audio": ["a.wav"]}
        assert manifest.notes[-1].endswith(
            "audio is read from the column 'path', and not from 'audio'"
        )


@pytest.mark.parametrize("name", ["ends.csv", "ends.jsonl", "ends.parquet"])
def test_an_end_stands_for_a_duration(tmp_path, name):
    """As the tables of AMI and GigaSpeech have it; where there are durations, it is a
    column as any other."""
    rows = [{"id": "a", "path": "x.wav", "begin_time": 0.1, "end_time": 0.3}]
    rows += [{"id": "b", "path": "x.wav", "begin_time": 7.52, "end_time": None}]
    table = pytest.importorskip("pandas").DataFrame(rows)
    if name.endswith(".csv"):
        table.to_csv(tmp_path / name, index=False)
    elif name.endswith(".jsonl"):
        table.to_json(tmp_path / name, orient="records", lines=True)
    else:
        table.to_parquet(tmp_path / name)
    for carry in (True, False):
        manifest = read_manifest(tmp_path / name, carry=carry)
        np.testing.assert_array_equal(manifest.start, [0.1, 7.52])
        np.testing.assert_array_equal(manifest.duration, [0.2, np.nan])
    assert read_manifest(tmp_path / name).columns["end_time"][0] == "0.3"


def test_an_end_counts_in_rows_without_a_duration_whatever_others_have(written):
    ends = [{"id": f"end-{n}", "path": "x.wav", "start": 1, "end": 2 + n} for n in range(256)]
    timed = {"id": "timed", "path": "x.wav", "start": 1, "duration": 0.25, "end": 9}
    expected = {row["id"]: row.get("duration", row["end"] - 1) for row in [timed, *ends]}
    for rows in ([timed, *ends], [*ends, timed]):
        manifest = read_manifest(written("\n".join(map(json.dumps, rows)), "train.jsonl"))
        assert dict(zip(manifest.ids, manifest.duration.tolist(), strict=True)) == expected
    table = "id,path,start,duration,end\na,x.wav,0.5,,1.0\nb,x.wav,0.5,0.25,none\nc,x.wav,,,\n"
    manifest = read_manifest(written(table))
    np.testing.assert_array_equal(manifest.duration, [0.5, 0.25, math.nan])


def test_json_values_are_carried_as_text(written):
    values = ["007", 7, 1.5, True, None, ["a", 1], {"k": "é"}, "", [None]]
    lines = [
        json.dumps({"id": f"u{i}", "path": "x.wav", "extra": value})
        for i, value in enumerate(values)
    ]
    manifest = read_manifest(written("\n".join(lines), "train.jsonl"))
    assert list(manifest.columns["extra"]) == [
        "007",
        "7",
        "1.5",
        "true",
        "",
        '["a",1]',
        '{"k":"é"}',
        "",
        "[null]",
    ]


def test_keys_may_come_and_go_between_json_lines(written):
    rows = [{"id": f"u{i}", "path": "x.wav"} for i in range(5000)]
    rows[10] = {"early": "e", **rows[10]}
    rows[4990] |= {"late": "l", "offset": 2}
    manifest = read_manifest(written("\n".join(map(json.dumps, rows)), "train.jsonl"))
    assert list(manifest.ids) == [row["id"] for row in rows]
    assert list(manifest.columns["early"]) == [row.get("early", "") for row in rows]
    assert list(manifest.columns["late"]) == [row.get("late", "") for row in rows]
    assert np.flatnonzero(~np.isnan(manifest.start)).tolist() == [4990]


def test_json_cells_may_be_numbers_text_or_null(written):
    lines = (
        '{"id": 12, "path": "x.wav", "start": "0.5", "duration": 2, "channel": "1"}\n'
        '{"id": "b", "path": "x.wav", "start": null, "duration": null, "channel": null}\n'
        '{"id": "c", "path": "x.wav", "start": 0, "duration": 1e-3, "channel": 0.0}\n'
    )
    manifest = read_manifest(written(lines, "train.jsonl"))
    assert rows_of(manifest) == [
        Utterance(id="12", path="x.wav", start=0.5, duration=2.0, channel=1),
        Utterance(id="b", path="x.wav"),
        Utterance(id="c", path="x.wav", start=0.0, duration=0.001, channel=0),
    ]


def test_byte_order_mark_crlf_and_blank_lines(written):
    content = b"\xef\xbb\xbf\r\n  \r\nid,path,text\r\n\r\na,x.wav,hi\r\n   \r\nb,y.wav,ho\r\n\r\n"
    for name, separator in (("train.csv", b","), ("train.tsv", b"\t"), ("train.txt", b"\t")):
        manifest = read_manifest(written(content.replace(b",", separator), name))
        assert list(manifest.ids) == ["a", "b"]
        assert list(manifest.columns["text"]) == ["hi", "ho"]


@pytest.mark.parametrize(("name", "mark"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_cell_may_be_as_long_as_a_line(written, name, mark):
    cells = "a", "x.wav", "é" * 2_000_000
    manifest = read_manifest(
        written(f"{mark.join(('id', 'path', 'words'))}\n{mark.join(cells)}\n", name)
    )
    assert list(manifest.columns["words"]) == [cells[2]]


def test_only_ids_are_required_without_audio(written):
    manifest = read_manifest(written("id,text\na,hi\nb,ho\n"), audio=False)
    assert rows_of(manifest) == [Utterance(id="a", path=""), Utterance(id="b", path="")]
    assert list(read_manifest(written("id,path\na,\n"), audio=False).paths) == [""]
    assert list(read_manifest(written("id\na\n\nb\n"), audio=False).ids) == ["a", "b"]


# Whatever is written is read

text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
ODD_CELLS = ["007", " padded ", "1.50", "null", "", "nan", "a,b", 'say "hi"', "two\nlines", "名前"]
carried = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(
    ODD_CELLS
)
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


def as_csv(rows) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*rows[0]])
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def as_tsv(rows) -> str:
    lines = [
        rows[0],
        *(["" if cell is None else str(cell) for cell in row.values()] for row in rows),
    ]
    return "".join("\t".join(line) + "\r\n" for line in lines)


def as_jsonl(rows, ensure_ascii=False) -> str:
    return "".join(json.dumps(row, ensure_ascii=ensure_ascii) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("t.csv", as_csv),
        ("t.tsv", as_tsv),
        ("t.jsonl", as_jsonl),
        ("t.jsonl", partial(as_jsonl, ensure_ascii=True)),
    ],
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rows=tables)
@example(
    rows=[
        (Utterance(id='"', path=" x\u2028", start=0.0, duration=5e-324, channel=0), "\r"),
        (Utterance(id="\ufeff", path="é"), "\n"),
        (Utterance(id="😀", path="\\ud800"), "\ud7ff"),
        (Utterance(id="'", path="'"), '"'),
    ]
)
def test_whatever_is_written_is_read(tmp_path, name, write, rows):
    if name == "t.tsv":
        rows = [(utterance, speaker.translate({9: "", 10: ""})) for utterance, speaker in rows]
    objects = [{**utterance.row(), "speaker": speaker} for utterance, speaker in rows]
    (tmp_path / name).write_bytes(write(objects).encode())
    manifest = read_manifest(tmp_path / name)
    assert rows_of(manifest) == [utterance for utterance, _ in rows]
    assert list(manifest.columns["speaker"]) == [speaker for _, speaker in rows]


ODD = [
    "a",
    "x/é.wav",
    "1.5",
    1.5,
    "",
    None,
    "nan",
    math.nan,
    "-1",
    "0",
    -0.0,
    "1e9",
    "1000000001",
    "5e-324",
]
ODD += [" 3 ", True, [1], "x|", "a\tb", "a\0", "\ud800", "s3://u:p@h/x", "https://h/x?y=1", "\x85"]
ODD += ["x" * 1001, "é" * 2001, "1_0", "１0"]


@given(
    st.sampled_from(COLUMNS),
    st.sampled_from(ODD),
    st.lists(st.sampled_from(ODD), max_size=2),
    st.integers(0, 9),
)
@example(COLUMNS[2], "\ud800", [], 0)
def test_cells_that_are_checked_together_are_what_each_is_by_itself(column, usual, odd, count):
    cells = [usual] * count + [*odd, usual]
    if (values := column.plain(cells)) is not None:
        assert [repr(value) for value in values] == [repr(column.parse(cell)) for cell in cells]
        assert not any(isinstance(cell, str) and secret_in(cell) for cell in cells)
        assert all(cell or cell == 0 for cell in cells)


# Segments: what tells rows apart is their path, start, duration and channel


def slow_row_hash(path: str, start: float, duration: float, channel: int) -> int:
    def seconds(value: float) -> bytes:
        return struct.pack("<d", math.nan if math.isnan(value) else 0.0 if value == 0 else value)

    result = 0xCBF29CE484222325
    for byte in path.encode() + seconds(start) + seconds(duration) + struct.pack("<i", channel):
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


OTHER_NAN = struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0]


@given(st.lists(st.tuples(text, st.floats(), st.floats(), st.integers(-1, 2**31 - 1)), min_size=1))
@example(
    [
        ("a", math.nan, OTHER_NAN, -1),
        ("a", OTHER_NAN, -OTHER_NAN, -1),
        ("a", -0.0, 0.0, 0),
        ("", 1.5, 2.5, 1),
    ]
)
def test_row_hashes_equal_the_slow_reference(rows):
    paths, start, duration, channel = zip(*rows, strict=True)
    columns = SegmentColumns(
        Strings.of(paths), np.array(start), np.array(duration), np.array(channel, np.int32)
    )
    assert columns.hashes().tolist() == [slow_row_hash(*row) for row in rows]


# What other tools made: read where that is plain, or refused in one line that says what to do

CSV = "id,path,start\na,x.wav,0.5\nb,y.wav,\n"


def test_a_damaged_gzip_file_is_refused_in_one_line(written):
    whole = gzip.compress((CSV + "".join(f"u{i},x.wav,{i}\n" for i in range(9000))).encode())
    middle = len(whole) // 2
    for content in (whole[:-4], whole[:middle], whole[:middle] + b"spoilt" + whole[middle:]):
        assert re.match("cannot be read: .", refused(written(content, "train.csv.gz")))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_one_fault(written, encoding):
    mark = "" if encoding == "utf-16" else "\ufeff"
    (fault,) = faults_of(written((mark + CSV).encode(encoding)))
    assert fault == "line 1: UTF-16, and UTF-8 is expected: iconv -f UTF-16 -t UTF-8 converts it"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.tsv", "a\tx.wav\nb\ty.wav\n", "there is no header, but a file's name"),
        ("train.csv", "a,x.FLAC,1.5\nb,y.flac,2\n", "there is no header, but a file's name"),
        ("train.csv", CSV.replace(",", "\t"), "fields are separated by tabs: name the file .tsv"),
        (
            "train.csv",
            "a b;x.wav\n",
            "fields are separated by semicolons: name one of them id or path",
        ),
        (
            "train.txt",
            "a|x|y|z|hello\n",
            "fields are separated by |: name the columns in a line above",
        ),
        (
            "segments",
            "a rec 0.0 1.5\nb rec 1.5 2.5\n",
            "fields are separated by spaces: of Kaldi's files, give",
        ),
    ],
)
def test_a_table_without_a_header_or_commas_is_one_fault(written, name, text, words):
    """Not one for each column that it seems to lack, nor for each line."""
    (fault,) = faults_of(written(text, name))
    assert fault.startswith("line 1: ")
    assert words in fault


def test_what_has_a_header_is_not_suspected(written):
    """A column may be called after a file, and a name hold a space, where the columns
    that are needed are there."""
    manifest = read_manifest(written("id,path,notes.wav\na,x.wav,long\n"))
    assert list(manifest.columns) == ["notes.wav"]
    assert list(read_manifest(written("id\na b;c\n"), audio=False).ids) == ["a b;c"]
    assert len(faults_of(written("some name\nx\n"), audio=False)) == 1
