"""A manifest with faults is refused, with every fault at its line."""

import bz2
import gzip
import json
import lzma
import os
from functools import partial
from urllib.parse import quote

import numpy as np
import pytest
from containers import write_tables
from hypothesis import example, given
from hypothesis import strategies as st
from make_cache import make_features, make_version
from manifests import faults_of, refused

from featcache.errors import ArgumentError, ManifestError, refuse_url, secret_in, without_secrets
from featcache.manifest.audio_locations import as_root
from featcache.manifest.read import read_manifest
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import SPELLINGS
from featcache.storage.location import parse_location
from featcache.version.corpus import Part, put_part


def test_all_faults_are_reported_together_and_in_order(written):
    path = written(
        b"id,path,start,duration,channel,text\na,x.wav,-0.5,0,left,fine\n"
        b'b,x.wav,,,,"a quoted\nnewline"\n'
        b"b,,1,inf,-1,\nc,sox x.mp3 -t wav - |,soon,nan,1.5,\nd,x.wav\n\ne,x.wav,,,,caf\xe9\n"
        b"f\x07,x.wav,1e10,,,\na,y.wav,,,,\n,x.wav,,,,\n"
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
        "line 5: id 'b' is already on line 3, for another path, start, duration or channel",
        "line 6: path is a command, which runs only with --allow-commands: 'sox'",
        "line 6: start is not a number: 'soon'",
        "line 6: duration is not finite: nan",
        "line 6: channel is not a whole number from 0 up: '1.5'",
        "line 7: 2 fields, but the header has 6",
        "line 9: byte 15 is not UTF-8: 0xe9",
        "line 10: id has a control character: 'f\\x07'",
        "line 10: start is more seconds than a recording has: '1e10'",
        "line 11: id 'a' is already on line 2, for another path, start, duration or channel",
        "line 12: id is missing",
        "line 13: not a CSV row: ',' expected after '\"' (is a quote not closed, or not doubled?)",
        "line 14: there is a NUL byte",
        "line 15: not a CSV row: unexpected end of data (is a quote not closed, or not doubled?)",
    ]


@pytest.mark.parametrize("cell", ["1_0", "１０", "٣", "0x10", "1e5_0"])
def test_what_only_python_takes_for_a_number_is_none(written, cell):
    """Also in the spelling that each format has for times."""
    no_number = f"line 2: start is not a number: {cell!r}"
    assert faults_of(written(f"id,path,start\na,x.wav,{cell}\n")) == [no_number]
    assert faults_of(written(f"id;path;start\na;x.wav;{cell}\n")) == [no_number]
    assert faults_of(written(f"id,path,start_ms,end_ms\na,x.wav,{cell},9999\n")) == [
        no_number.replace("start", "start_ms")
    ]
    assert faults_of(written(f"id,path,start,end\na,x.wav,1,{cell}\n")) == [
        no_number.replace("start", "end")
    ]
    assert faults_of(written(f"id,path,channel\na,x.wav,{cell}\n")) == [
        no_number.replace("start", "channel")
    ]
    row = json.dumps({"audio_filepath": "x.wav", "offset": cell, "duration": 1.0})
    assert faults_of(written(row, "nemo.json")) == [no_number.replace("line 2", "line 1")]
    speechbrain = written(f"ID,duration,wav,start,stop\na,9.5,x.wav,0,{cell}\n")
    assert faults_of(speechbrain, values={"sample_rate": "16000"}) == [
        "line 2: start and stop are no whole numbers of samples: give start and duration in "
        f"seconds: '0', {cell!r}"
    ]
    folder = speechbrain.parent / "data"
    folder.mkdir()
    (folder / "wav.scp").write_text("r x.wav\n")
    (folder / "segments").write_text(f"a r {cell} 20\nb r 1 {cell}\n")
    no_float = f"could not convert string to float: {cell!r}"
    assert faults_of(folder) == [f"segments, line {line}: {no_float}" for line in (1, 2)]


@pytest.mark.parametrize("cell", ["nan", "inf", "Infinity", "1e400", "-nan"])
def test_a_number_that_is_not_finite_is_a_fault_alone_in_its_batch(written, cell):
    for column in ("start", "duration", "channel"):
        assert faults_of(written(f"id,path,{column}\na,x.wav,{cell}\n")) == [
            f"line 2: {column} is not finite: {float(cell)}"
        ]


def test_faults_of_json_lines(written):
    path = written(
        b'{"id": "a", "path": "x.wav"}\n'
        b"\n"
        b'{"id": "b", "path": "x.wav"\n["c", "x.wav"]\n{"path": "x.wav", "id": null}\n'
        b'{"id": "d"}\n'
        b'{"id": "e", "path": {"bytes": ""}, "start": true, "duration": [1], "channel": {}}\n'
        b'{"id": "f", "path": "x.wav", "start": -1, "duration": NaN, "channel": 4294967296}\n'
        b'{"id": "g", "path": "x\\u0000.wav"}\n'
        b'{"id": "half \\ud83d", "path": "x.wav"}\n'
        b'{"id": "whole \\ud83d\\ude00", "path": "x.wav"}\n'
        b'{"id": "caf\xe9", "path": "x.wav"}\n{"id": "a", "path": "y.wav"}\n'
        b'{"id": true, "path": "x.wav", "duration": 1' + b"0" * 400 + b"}\n"
        b'{"id": "h", "path": "x.wav", "key": ' + b"[" * 100_000 + b"\n"
        b'{"id": "i", "path": "x.wav", "key": ' + b"1" * 5_000 + b"}\n",
        "train.jsonl",
    )
    faults = faults_of(path)
    assert [
        fault for fault in faults if not fault.startswith(("line 10:", "line 15:", "line 16:"))
    ] == [
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
        "line 13: id 'a' is already on line 1, for another path, start, duration or channel",
        "line 14: id is not text: True",
        f"line 14: duration is not a number: 1{'0' * 17}...{'0' * 19}",
    ]
    unreadable = [fault for fault in faults if "JSON that cannot be read" in fault]
    assert [fault.split(":")[0] for fault in unreadable] == ["line 10", "line 15", "line 16"]


@pytest.mark.parametrize(
    "cell", ["NaN", "-Infinity", "1e400", "123456789012345678901234567890", '"\\ud83d\\ude00"']
)
def test_json_that_not_every_parser_reads_is_read_as_python_does(written, cell):
    manifest = read_manifest(
        written(f'{{"id": "a", "path": "x.wav", "x": [{cell}]}}\n', "train.jsonl")
    )
    assert manifest.columns["x"][0] == json.dumps([json.loads(cell)], ensure_ascii=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.csv", "\nid,wav_name,text\n1,x.wav,hi\n"),
        ("train.jsonl", '\n{"id": 1, "wav_name": "x.wav"}\n{"wav_name": "y.wav", "text": "hi"}\n'),
    ],
)
def test_a_missing_column_is_one_fault_that_names_what_is_there(written, name, content):
    fault, *others = faults_of(written(content, name))
    assert fault.startswith(
        "line 2: no path column among 'id', 'wav_name', 'text': rename or add one"
    )
    assert all(spelling in fault for spelling in SPELLINGS["path"])
    assert others == (["line 3: id is missing"] if name == "train.jsonl" else [])
    (fault,) = faults_of(written("text\nhi\n"), audio=False)
    assert fault.startswith("line 1: no id column among 'text': rename or add one")
    faults = faults_of(written("text,duration\nhi,-1\n"))  # others are not hidden
    assert [fault[:16] for fault in faults] == ["line 1: no path ", "line 2: duration"]


def test_a_column_that_only_later_json_lines_lack(written):
    rows = [{"id": f"u{i}", "path": "x.wav"} for i in range(5000)]
    del rows[4990]["id"], rows[4995]["path"]
    path = written("\n".join(map(json.dumps, rows)), "train.jsonl")
    assert faults_of(path) == ["line 4991: id is missing", "line 4996: path is missing"]


def test_ids_that_only_some_json_lines_have_in_batches_of_their_own(written):
    without = [{"path": f"{n}.wav"} for n in range(256)]
    named = [{"id": f"u{n}", **row} for n, row in enumerate(without)]
    for rows, line in (([*without, named[0]], 1), ([*named, without[0]], 257)):
        path = written("\n".join(map(json.dumps, rows)), "train.jsonl")
        assert faults_of(path) == [f"line {line}: id is missing"]


BOTH_PATHS = "'WAV' and 'file' both mean path: name one of them path"
STOP = "'Stop' is not read: give a duration, Stop - start, instead"


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("train.csv", "id,WAV,file\na,x,y\n", BOTH_PATHS),
        ("train.jsonl", '{"id": "a", "WAV": "x", "file": "y"}\n', BOTH_PATHS),
        ("train.csv", "id,path,text,text,text\na,x.wav,1,2,3\n", "3 columns are named 'text'"),
        ("train.csv", "id,path,start,Stop\na,x.wav,1,2\n", STOP),
        ("train.jsonl", '{"id": "a", "path": "x.wav", "offset": 1, "Stop": 2}\n', STOP),
    ],
)
def test_columns_that_leave_open_what_is_meant(written, name, content, fault):
    """Two of one meaning or name; and a stop, which may count samples, does not pass for
    a duration."""
    assert faults_of(written(content, name)) == [f"line 1: {fault}"]


def test_ends_that_are_none(written):
    assert faults_of(
        written("id,path,start,end\na,x.wav,1,1\nb,x.wav,,0.5\nc,x.wav,0,late\nd,x.wav,late,2\n")
    ) == [
        "line 2: end is 1.0, and the row starts at 1.0",
        "line 4: end is not a number: 'late'",
        "line 5: start is not a number: 'late'",
    ]
    faults = faults_of(written("id,path,start,end,end_time\na,x.wav,1,2,2\n"))
    assert faults == ["line 2: 'end', 'end_time' both end the row: leave one, or give durations"]
    beside_a_duration = read_manifest(written("id,path,start,duration,end\na,x.wav,1,2,3\n"))
    assert list(beside_a_duration.columns["end"]) == ["3"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(
            (f"train{suffix}", blank)
            for suffix in (".csv", ".tsv", ".jsonl", "")
            for blank in ("", "\ufeff", "\n\r\n")
        ),
        *(("train.csv", header) for header in ("id,path", "\nid,path\n\n")),
        ("train.tsv", "id\tpath\n"),
    ],
)
def test_no_rows_is_a_fault(written, name, content):
    assert faults_of(written(content, name)) == ["there are no rows"]


def test_a_json_array_is_told_what_is_expected(written):
    for content in ('[{"id": "a", "path": "x.wav"}]', '\n[\n  {"id": "a"}\n]\n'):
        line = 1 + content.startswith("\n")
        expected = (
            f"line {line}: a JSON array; one object on each line is expected: jq -c '.[]' "
            "makes them"
        )
        assert faults_of(written(content, "train.json")) == [expected]
        assert faults_of(written(content, "manifest")) == [expected]


def test_line_numbers_after_quoted_newlines(written):
    path = written(
        'id,path,text\na,x.wav,"one\r\ntwo\n\nthree"\nb,x.wav,"1\n2"\nc,,\n,x.wav,"1\n2"\n'
    )
    assert faults_of(path) == ["line 8: path is missing", "line 9: id is missing"]


def test_the_first_faults_by_line_are_shown_all_are_counted_and_those_that_are_alike_are_one_line(
    written,
):
    def told(rows):
        with pytest.raises(ManifestError) as caught:
            read_manifest(written("\n".join(["id,path,start", *rows])))
        return str(caught.value).splitlines()

    summary, *faults = told(f"u{i % 2000},x{i}.wav,{-1 - i if i >= 10 else 1}" for i in range(3000))
    assert summary.endswith(f"train.csv: {2990 + 1000:,} errors")
    assert faults[:20] == [
        f"  line {line}: start is negative: {1 - line:.1f}" for line in range(12, 32)
    ]
    assert faults[20:] == ["  … and 3,970 more"]
    assert told(f"u{i},x.wav,{('one', -2, 'one', 'one')[i % 4]}" for i in range(3000))[1:] == [
        "  line 2 and 2,249 more: start is not a number: 'one'",
        "  line 3 and 749 more: start is negative: -2.0",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert refused(tmp_path / "absent.csv").startswith("cannot be read: No such file")
    with pytest.raises(
        ManifestError, match=r"^'a\\x00b.csv': cannot be read: no path has a NUL in it$"
    ):
        read_manifest("a\0b.csv")
    assert faults_of(tmp_path) == ["there are no audio files below it"]


def test_bytes_of_another_encoding_make_no_other_faults(written):
    path = written(b"id,path\n" + b"\n".join(b"u\x80%c,x.wav" % byte for byte in range(0x80, 0x90)))
    with pytest.raises(
        ManifestError, match=r": 16 errors\n  line 2 and 15 more: byte 2 is not UTF-8: 0x80$"
    ):
        read_manifest(path)


def test_of_many_rows_those_are_compared_whose_hashes_are_equal(written, monkeypatch):
    compared, text = [], Strings.__getitem__
    monkeypatch.setattr(
        Strings, "__getitem__", lambda strings, row: compared.append(row) or text(strings, row)
    )
    ids = [f"speaker-{i % 100:03d}-{i:06d}" for i in range(100_000)]
    ids[99_999] = ids[5]
    path = written("id,path\n" + "".join(f"{id_},{n}.wav\n" for n, id_ in enumerate(ids)))
    other = "for another path, start, duration or channel"
    assert faults_of(path) == [f"line 100001: id {ids[5]!r} is already on line 7, {other}"]
    assert compared == [5, 99_999]
    faults = faults_of(written("id,path\n" + "".join(f"a,{n}.wav\n" for n in range(4))))
    assert faults == [f"line {line}: id 'a' is already on line 2, {other}" for line in (3, 4, 5)]


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST"])
def test_an_audio_file_is_no_manifest(scratch, kind):
    soundfile = pytest.importorskip("soundfile")
    path = scratch / "a"
    soundfile.write(path, np.sin(np.arange(4000) / 9), 8000, format=kind)
    for options in ({}, {"format": "paths"}):
        assert (
            refused(path, **options) == "is an audio file, not a manifest: give its "
            "folder, or a list of paths"
        )


def test_what_is_packed_is_no_manifest(scratch):
    for pack in (bz2.compress, lzma.compress, lambda data: gzip.compress(gzip.compress(data))):
        (scratch / "a.csv").write_bytes(pack(b"id,path\na,x.wav\n"))
        assert refused(scratch / "a.csv").startswith(
            "is compressed; only gzip, once, is read: unpack it"
        )
    (scratch / "a.csv").write_bytes(bytes(99) + os.urandom(99))
    assert refused(scratch / "a.csv").startswith("is neither text nor Parquet")
    _, arrow = write_tables(scratch, [b"a"])
    assert refused(arrow).startswith("is an Arrow file: give the folder that save_to_disk")


def test_a_cache_is_no_manifest(scratch):
    version = make_version(scratch / "corpus" / "c", make_features(2))
    put_part(scratch / "corpus", Part("c", "c.csv"))
    for path in (scratch / "corpus", scratch / "corpus" / "c", version.path):
        assert (
            refused(path) == "is a cache, not a manifest: give the manifest that it "
            "was extracted from"
        )


@pytest.mark.parametrize("name", ["nemo", "jsonl", "kaldi", "fairseq", "vits"])
def test_a_wrong_format_is_one_error(written, name):
    path = written("id,path\n" + "".join(f"u{row},{row}.wav\n" for row in range(99)))
    begin = (
        f"no row is in the format {name}; leave out --format to have the format recognised: line "
    )
    assert refused(path, format=name).startswith(begin)


# --- what gives access


@pytest.mark.parametrize(
    "path",
    [
        *[
            "https://h/a.wav",
            "https://h:8080/a@b.wav",
            "https://[::1]:80/a",
            "https://h/what%3F.wav",
        ],
        *[
            "s3://b/a b%23.wav",
            "file:///x/a#1.wav",
            "file://localhost/a?.wav",
            "curl https://h/a.wav |",
        ],
        *[
            "/corpus/a@b?token=S#1.wav",
            "a/b:c@d.wav",
            "C:/a@b.wav",
            "az:1",
            "file:/home/me@work/a.wav",
            "https:/h/a@b.wav",
            "/data//a@b.wav",
            "//server/share@b.wav",
            "s3:anna:3@home",
            "100%",
        ],
    ],
)
def test_paths_without_secrets_are_not_taken_for_secrets(path):
    assert secret_in(path) is None
    assert without_secrets(f"{path}: is cut, ({path})") == f"{path}: is cut, ({path})"


SCHEMES = st.sampled_from(
    [
        *["https://", "HTTP://", "ftp://", "s3://", "gs://", "s3a://", "webdav+ssl://", "s3:/"],
        *["https:", "https:/", "ftp:///", "x/https:/"],
    ]
)
PASSWORDS = st.text(st.sampled_from("ab3 :%'\"&=+/?#@"), max_size=3).map(lambda text: f"HUSH{text}")
USERS = st.builds(
    "{}{}{}@".format, st.sampled_from(["user", "", "%75"]), st.sampled_from([":", "%3A"]), PASSWORDS
)
QUERIES = st.builds(
    "{}{}HUSH".format,
    st.sampled_from(["?", "#", "?a=b&", "?#", ";sig=", "&sig="]),
    st.sampled_from(["", "X-Amz-Signature=", "key=", "jwt=", "k%65y=", "a b"]),
)


@given(
    st.sampled_from(["", " ", "\t", "'", "curl -s ", "/mnt/", "\ufeff"]),
    SCHEMES,
    st.tuples(USERS, QUERIES | st.just("")) | st.tuples(st.just("") | USERS, QUERIES),
    st.sampled_from([0, 0, 1, 2]),
    st.sampled_from(["", " |"]),
)
@example("", "x/https:/", ("", "?a bHUSH"), 1, " |")
def test_no_spelling_of_a_secret_is_taken_or_told(
    tmp_path_factory, before, scheme, secrets, times_encoded, after
):
    user, query = secrets
    url = f"{scheme}{user}h/a.wav{query}"
    for _ in range(times_encoded):
        url = quote(url, safe="")
    cell = f"{before}{url}{after}"
    manifest = tmp_path_factory.getbasetemp() / "secret.jsonl"
    for row in (
        {"id": "a", "path": cell},
        {"id": cell, "path": "a.wav"},
        {"id": "a", "path": [cell, {"b": cell}]},
        {"path": "a.wav", "duration": cell},
        cell,
    ):
        manifest.write_text(json.dumps(row))
        with pytest.raises(ManifestError) as refused:
            read_manifest(manifest, allow_commands=True)
        assert "HUSH" not in str(refused.value)
    for take in (as_root, partial(parse_location, "-o"), partial(refuse_url, "MANIFEST")):
        with pytest.raises(ArgumentError) as told:
            take(f"{scheme}{user}h/a.wav{query}")
        assert "HUSH" not in str(told.value)
