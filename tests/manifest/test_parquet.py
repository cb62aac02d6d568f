"""A manifest in Parquet is the same manifest as in memory, and its faults are named by
row."""

import datetime
import math
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from manifests import assert_same_manifest, faults_of, refused, rows_of, small_tables

from featcache.audio.members import copy_of
from featcache.errors import AudioError, MissingDependencyError, install_hint
from featcache.manifest.audio_locations import Member
from featcache.manifest.read import manifest_of, read_manifest
from featcache.manifest.segments import Utterance

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = {"id": ["a", "b", "c"], "path": ["x.wav", "x.wav", "y.wav"], "start": [0.5, 2.0, None]}


def parquet(folder, columns, name="train.parquet", **options):
    pq.write_table(
        pa.table(columns) if isinstance(columns, dict) else columns, folder / name, **options
    )
    return folder / name


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=small_tables, group=st.integers(1, 4))
def test_is_what_the_same_table_in_memory_is(tmp_path, table, group):
    """Which is what the same table in JSON Lines is."""
    path = parquet(tmp_path, pa.Table.from_pylist(table), row_group_size=group)
    assert_same_manifest(read_manifest(path), manifest_of(table))


def test_of_many_rows_each_batch_is_read_from_where_it_begins(tmp_path):
    numbers = range(20_000)
    columns = {
        "id": [f"utt-{number}" for number in numbers],
        "path": [f"{number}.wav" if number < 9000 else f"{number}.wäv" for number in numbers],
        "duration": [1 + number / 8 for number in numbers],
        "channel": [number % 3 for number in numbers],
        "text": ["" if number % 2 else f"said {number}" for number in numbers],
    }
    rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
    path = parquet(tmp_path, columns, row_group_size=9500)
    assert_same_manifest(read_manifest(path), manifest_of(rows))


def test_types_that_hold_the_same_values_make_the_same_manifest_and_so_does_another_name(tmp_path):
    expected = rows_of(read_manifest(parquet(tmp_path, ROWS)))
    assert rows_of(read_manifest(parquet(tmp_path, ROWS, name="train.bin"))) == expected
    for strings, numbers in (
        (pa.large_string(), pa.float32()),
        (pa.dictionary(pa.int32(), pa.string()), pa.float64()),
    ):
        types = {"id": strings, "path": strings, "start": numbers}
        columns = {name: pa.array(cells).cast(types[name]) for name, cells in ROWS.items()}
        assert rows_of(read_manifest(parquet(tmp_path, columns))) == expected
    numbered = read_manifest(parquet(tmp_path, {**ROWS, "id": [7, 8, 9]}))
    assert list(numbered.ids) == ["7", "8", "9"]


def test_other_columns_are_carried_as_text_and_bytes_are_not(tmp_path):
    columns = {
        "id": ["a", "b"],
        "path": ["x.wav", "y.wav"],
        "age": [30, None],
        "words": [["the", "kettle"], []],
        "said": [datetime.date(2026, 1, 2), None],
        "picture": [b"\x00", b"\xff"],
        "audio_bytes": [{"bytes": b"RIFF", "sampling_rate": 8000}] * 2,
    }
    manifest = read_manifest(parquet(tmp_path, columns))
    assert manifest.columns == {
        "age": ["30", ""],
        "words": ['["the","kettle"]', "[]"],
        "said": ["2026-01-02", ""],
    }
    assert read_manifest(tmp_path / "train.parquet", carry=False).columns == {}


def test_columns_of_numbers_and_spellings_mean_the_same(tmp_path):
    path = parquet(
        tmp_path,
        {"utt": ["a"], "audio_filepath": ["x.wav"], "offset": [1], "dur": [2.5], "channel": [0.0]},
    )
    assert rows_of(read_manifest(path)) == [
        Utterance(id="a", path="x.wav", start=1.0, duration=2.5, channel=0)
    ]


def test_nan_is_no_value_as_in_a_table_in_memory(tmp_path):
    numbers = {"start": [0.5, math.nan], "duration": [math.nan, 2.0], "snr": [math.nan, 12.5]}
    table = pa.table({"id": ["a", "b"], "path": ["x.wav", "y.wav"]} | numbers)
    path = parquet(tmp_path, table)
    manifest = read_manifest(path)
    assert manifest[0] == Utterance(id="a", path="x.wav", start=0.5)
    assert list(manifest.columns["snr"]) == ["", "12.5"]
    assert_same_manifest(manifest, manifest_of(table))


def test_faults_are_named_by_row(tmp_path):
    columns = {
        "id": ["a", "b", "a", None],
        "path": ["x", "y |", "z", "w"],
        "duration": [0.0, 1.0, math.inf, 1.0],
    }
    assert faults_of(parquet(tmp_path, columns, row_group_size=2)) == [
        "row 1: duration is zero: leave it empty to read to the end of the file",
        "row 2: path is a command, which runs only with --allow-commands: 'y'",
        "row 3: duration is not finite: inf",
        "row 3: id 'a' is already on row 1, for another path, start, duration or channel",
        "row 4: id is missing",
    ]
    (fault,) = faults_of(parquet(tmp_path, {"id": ["a"], "sound": ["x.wav"]}))
    assert fault.startswith("no path column among 'id', 'sound': rename or add one")
    twice = pa.Table.from_arrays([pa.array(["a"])] * 4, ["id", "path", "x", "x"])
    assert faults_of(parquet(tmp_path, twice)) == ["2 columns are named 'x'"]


def test_bytes_may_be_views_as_polars_has_them(tmp_path):
    sounds = [b"RIFF, a long clip", b"RIFF, another one"]
    parts = [pa.array(sounds, pa.binary_view()), pa.array(["a.wav", "b.wav"], pa.string_view())]
    audio = pa.StructArray.from_arrays(parts, ["bytes", "path"])
    picture = pa.array([b"1", b"2"], pa.binary_view())
    path = parquet(tmp_path, {"audio": audio, "text": ["x", "y"], "picture": picture})
    manifest = read_manifest(path)
    assert list(manifest.paths) == [f"train.parquet/audio/{row}" for row in range(2)]
    assert list(manifest.columns) == ["text"]
    for name, sound in zip(manifest.paths, sounds, strict=True):
        with copy_of(manifest.resolve(name)).open() as file:
            assert file.read() == sound
    table = pq.read_table(path).select(["audio"])
    with (
        pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    with pytest.raises(AudioError, match="holds views, as Polars writes: write it as large_binary"):
        copy_of(Member(tmp_path / "a.arrow", "audio/0"))


def test_lists_of_numbers_are_no_bytes_of_audio(tmp_path):
    audio = pa.struct({"bytes": pa.list_(pa.uint8()), "path": pa.string()})
    column = pa.array([{"bytes": [1, 2], "path": "a.wav"}], audio)
    (fault,) = faults_of(parquet(tmp_path, {"id": ["a"], "audio": column}))
    assert fault.startswith("row 1: path is not text: {'bytes': [1, 2], ")


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    path = parquet(tmp_path, {"id": [f"u{i}" for i in range(999)], "path": ["x.wav"] * 999})
    whole = path.read_bytes()
    for content in (
        b"",
        whole[:-4],
        whole[: len(whole) // 2],
        b"PAR1 and more",
        whole[:100] + bytes(60) + whole[160:],
    ):
        path.write_bytes(content)
        assert re.match("not Parquet or Arrow, or damaged: .", refused(path))


def test_what_to_install_is_said(tmp_path, monkeypatch):
    path = parquet(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=re.escape(install_hint("parquet"))):
        read_manifest(path)


@pytest.mark.parametrize("name", ["audio", "WAV", "audio_bytes"])
def test_bytes_in_a_column_of_such_a_name_are_audio_where_no_column_names_files(tmp_path, name):
    columns = {"id": ["a", "b"], name: [b"RIFF", None], "picture": [b"1", b"2"]}
    manifest = read_manifest(parquet(tmp_path, columns))
    assert manifest.format == "datasets"
    assert list(manifest.ids) == ["a", "b"]
    assert list(manifest.paths) == [f"train.parquet/{name}/0", f"train.parquet/{name}/1"]
    first, second = map(manifest.resolve, manifest.paths)
    with copy_of(first).open() as copy:
        assert copy.read() == b"RIFF"
    with pytest.raises(AudioError, match="holds no bytes"):
        copy_of(second)
    files = read_manifest(parquet(tmp_path, {**columns, "path": ["x.wav", "y.wav"]}))
    assert (files.format, list(files.paths)) == ("parquet", ["x.wav", "y.wav"])


def test_a_table_without_audio_says_what_it_may_have(tmp_path):
    path = parquet(tmp_path, {"id": ["a"], "picture": [b"1"]})
    (fault,) = faults_of(path)
    assert fault.endswith("; or the column audio, with the bytes of files")
