"""Columns of time are read by their names and units, refused, or told."""

import json

import numpy as np
import pytest
from manifests import faults_of, refused

from featcache.manifest.read import manifest_of, read_manifest

SECONDS = [("0.5", "1.25"), ("2", "4.5")]
MS = [("500", "1250"), ("2000", "4500")]
SAMPLES = [("8000", "20000"), ("32000", "72000")]


def table(columns, rows, extra=""):
    lines = [f"id,path,{','.join(columns)}"]
    lines += [f"u{number},x.wav,{','.join(cells)}" for number, cells in enumerate(rows)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("columns", "rows"),
    [
        ("start_seconds end_seconds", SECONDS),
        ("start end", SECONDS),
        ("begin finish", SECONDS),
        ("xmin xmax", SECONDS),
        ("tmin tmax", SECONDS),
        ("t0 t1", SECONDS),
        ("t1 t2", SECONDS),
        ("tstart tend", SECONDS),
        ("onset offset", SECONDS),
        ("OnsetTime OffsetTime", SECONDS),
        ("start_s stop_s", SECONDS),
        ("startTime endTime", SECONDS),
        ("Begin[sec] End[sec]", SECONDS),
        ("start_ms end_ms", MS),
        ("startMs endMs", MS),
        ("onset_msec offset_msec", MS),
        ("start_time_in_milliseconds stop_time_in_milliseconds", MS),
        ("start_sample end_sample", SAMPLES),
        ("begin_samples stop_samples", SAMPLES),
        ("sample_start sample_end", SAMPLES),
    ],
)
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_pair_cuts_the_rows_and_is_told_and_kept(tmp_path, columns, rows, kind):
    start, end = columns.split()
    path = tmp_path / f"train.{kind}"
    objects = [
        {"id": f"u{number}", "path": "x.wav", start: float(first), end: float(last)}
        for number, (first, last) in enumerate(rows)
    ]
    if kind == "csv":
        path.write_text(table((start, end), rows))
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, objects)))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(objects), path)
    for carry in (True, False):
        manifest = read_manifest(path, carry=carry, values={"sample_rate": "16000"})
        np.testing.assert_array_equal(manifest.start, [0.5, 2.0])
        np.testing.assert_array_equal(manifest.duration, [0.75, 2.5])
        assert f"rows are cut from {start!r} to {end!r}, in " in manifest.notes[-1]
    assert float(read_manifest(path, values={"sample_rate": "16000"}).columns[end][0]) == float(
        rows[0][1]
    )


@pytest.mark.parametrize(
    ("columns", "cells", "expected"),
    [
        ("start duration_s", "1 2.5", (1, 2.5)),
        ("start_ms duration_ms", "1000 2500", (1, 2.5)),
        ("start_ms length_ms", "1000 2500", (1, 2.5)),
        ("start_sample num_samples", "16000 40000", (1, 2.5)),
        ("onset duration", "1 2.5", (1, 2.5)),
        ("onset offset duration", "1 9 2.5", (1, 2.5)),
        ("start_ms end_ms duration", "1000 3500 60", (1, 2.5)),
        ("start_s start_ms end_s end_ms", "1 1000 3.5 3500", (1, 2.5)),
        ("start start_ms", "1 1000", (1, np.nan)),
        ("start_ms text", "1234 hello", (1.234, np.nan)),
        ("offset duration", "1 2.5", (1, 2.5)),
        ("offset text", "1 hello", (1, np.nan)),
        ("start duration end", "1 2.5 none", (1, 2.5)),
    ],
)
def test_a_length_ends_rows_and_a_unit_that_is_said_counts(written, columns, cells, expected):
    path = written(table(columns.split(), [cells.split()]))
    manifest = read_manifest(path, values={"sample_rate": "16000"})
    np.testing.assert_array_equal((manifest.start[0], manifest.duration[0]), expected)


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ("start offset", "'offset' is not read: give a duration, offset - start, instead"),
        ("start stop", "'stop' is not read: give a duration, stop - start, instead"),
        ("start length", "'length' is not read next to 'start': use one unit in both names"),
        ("offset end_ms", "'end_ms' is not read next to 'offset': use one unit in both names"),
        ("start_ms end", "'end' is not read"),
        ("start_ms duration", "'duration' is not read next to 'start_ms'"),
        ("start_sample dur", "'duration' is not read next to 'start_sample'"),
        ("start num_frames", "'num_frames' is not read next to 'start'"),
        ("start_s begin_s", "'start_s' and 'begin_s' both mean start: name one of them start"),
    ],
)
def test_a_start_whose_end_is_not_understood_is_refused(written, columns, fault):
    (told,) = faults_of(written(table(columns.split(), [("1", "2")])), values={"sample_rate": "9"})
    assert told.startswith(f"line 1: {fault}")


def test_samples_need_the_files_rate(written):
    path = written(table(("start_sample", "end_sample"), SAMPLES))
    assert refused(path).endswith("say the files' rate, as --set sample_rate=16000")
    assert "sample_rate" in read_manifest(path, values={"sample_rate": "16000"}).placeholders


def test_times_that_are_none_are_named_by_their_column(written):
    rows = [("-5", "9"), ("soon", "9"), ("9", "late"), ("7", "7"), ("NA", "")]
    assert faults_of(written(table(("start_ms", "end_ms"), rows))) == [
        "line 2: start_ms is negative: -0.005",
        "line 3: start_ms is not a number: 'soon'",
        "line 4: end_ms is not a number: 'late'",
        "line 5: end_ms is 0.007, and the row starts at 0.007",
    ]


@pytest.mark.parametrize(
    ("columns", "is_told"),
    [
        ("start_frame end_frame", True),
        ("segment_start segment_end", True),
        ("from to", True),
        ("end", True),
        ("onset", True),
        ("xmin ymin xmax ymax", False),
        ("original_start original_end", False),
        ("length num_frames", False),
    ],
)
def test_times_that_are_not_read_are_told_if_they_are_numbers(written, columns, is_told):
    names = columns.split()
    one_file_each = "".join(f"{number}.wav,{'1,' * len(names)}x\n" for number in range(3))
    header = f"path,{','.join(names)},text\n"
    manifest = read_manifest(written(header + one_file_each), carry=False)
    assert np.isnan(manifest.start).all()
    assert any("may be times of rows" in note for note in manifest.notes) == is_told
    words = read_manifest(written(header + one_file_each.replace("1,", "de,")))
    assert not any("may say" in note for note in words.notes)


def test_a_duration_without_a_start_is_told_if_it_says_its_unit(written):
    told = read_manifest(written("path,duration_ms\na.wav,1500\n"))
    assert told.notes[-1].endswith(
        "'duration_ms' is not read, since no column says where rows begin"
    )
    assert np.isnan(told.duration).all()
    assert len(read_manifest(written("path,duration,duration_ms\na.wav,1,1000\n")).notes) == 1


def test_rows_that_read_one_file_beside_times_that_are_not_read_are_refused(written):
    rows = [("10", "20"), ("20", "30")]
    for columns in (("start_frame", "end_frame"), ("segment_start", "segment_end")):
        (fault,) = faults_of(written(table(columns, rows)))
        assert fault.startswith(f"line 3: reads what another row reads: {columns[0]!r}, ")
    words = table(("from", "to"), [("de", "en"), ("en", "de")])
    assert len(read_manifest(written(words))) == 2
    one = read_manifest(written(table(("start_frame",), [("10",), ("20",)])))
    assert "'start_frame' may be times" in one.notes[-1]


@pytest.mark.parametrize("name", ["fsID", "slice_file_name"])
def test_urban_sounds_clips_are_read_whole(written, name):
    """Their start and end say which part of a recording they are."""
    manifest = read_manifest(written(f"path,{name},start,end\na.wav,100032,0.05,4.05\n"))
    assert (manifest[0].start, manifest[0].duration) == (None, None)
    assert list(manifest.columns) == [name, "original_start", "original_end"]
    assert "files are read whole" in "".join(manifest.notes)


def test_times_mean_nothing_where_only_ids_count(written):
    manifest = read_manifest(written("id,start,length\na,1,2\n"), audio=False)
    assert list(manifest.columns["length"]) == ["2"]


def test_tables_in_memory_are_read_alike():
    rows = [{"id": "a", "path": "x.wav", "onset": 1.5, "offset": 2}]
    assert manifest_of(rows).duration.tolist() == [0.5]
    with_gaps = [*rows, {"id": "b", "path": "x.wav", "start_ms": 250}]
    np.testing.assert_array_equal(manifest_of(with_gaps).start, [1.5, 0.25])
    np.testing.assert_array_equal(manifest_of(with_gaps).duration, [0.5, np.nan])


def test_rows_that_read_the_same_span_are_found(written):
    table_ = "id,path,start\na,x.wav,\nb,y.wav,1\nc,z.wav,\nd,y.wav,1.0\ne,y.wav,2\nf,x.wav,\n"
    rows = read_manifest(written(table_)).read_again().tolist()
    assert sorted(rows) == [0, 1, 3, 5]
    assert rows[:2] in ([0, 5], [1, 3])
    assert not len(read_manifest(written("id,path\na,x.wav\nb,y.wav\n")).read_again())
