"""Manifests in memory: what a table holds is the manifest that the same table in a file
is."""

import json
import math
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from manifests import assert_same_manifest, small_tables

from featcache.errors import ArgumentError, ManifestError
from featcache.manifest.read import manifest_of, read_manifest


def pandas_frame(rows):
    frame = pytest.importorskip("pandas").DataFrame(rows)
    frame.index = frame.index + 0.5  # whose labels are no positions
    return frame


TABLES = {
    "list": list,
    "pandas": pandas_frame,
    "pandas, nullable": lambda rows: pandas_frame(rows).convert_dtypes(),
    "records of pandas": lambda rows: pandas_frame(rows).convert_dtypes().to_dict("records"),
    "polars": lambda rows: pytest.importorskip("polars").DataFrame(rows, infer_schema_length=None),
    "arrow": lambda rows: pytest.importorskip("pyarrow").Table.from_pylist(rows),
    "datasets": lambda rows: pytest.importorskip("datasets").Dataset.from_list(rows),
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(table=small_tables)
def test_is_what_the_same_table_in_json_lines_is(tmp_path, make, table):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in table), encoding="utf-8")
    assert_same_manifest(manifest_of(make(table)), read_manifest(path, audio=False))


def test_cells_are_what_python_and_numpy_have():
    rows = [
        {
            "id": np.int64(7),
            "path": Path("a.wav"),
            "channel": np.float32(1),
            "start": math.nan,
            3: [1, "b"],
        },
        {
            "id": "b",
            "score": np.float64(0.1),
            "words": np.array(["the", "kettle"]),
            "said": date(2026, 1, 2),
        },
    ]
    manifest = manifest_of(rows)
    assert list(manifest.ids) == ["7", "b"]
    assert list(manifest.paths) == ["a.wav", ""]
    assert manifest.channel.tolist() == [1, -1]
    assert np.isnan(manifest.start).all()
    assert manifest.columns == {
        "3": ['[1,"b"]', ""],
        "score": ["", "0.1"],
        "words": ["", '["the","kettle"]'],
        "said": ["", "2026-01-02"],
    }
    assert manifest_of(rows, carry=False).columns == {}
    assert manifest.root == Path.cwd()


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ([], r"<list>: 1 error\n  there are no rows"),
        ([{"id": "a"}, "b.wav"], r"<list>: 1 error\n  row 2: is a str, not a dictionary"),
        (
            [{"id": "a"}, {"id": "b"}, {"id": "a", "channel": 1}],
            "row 3: id 'a' is already on row 1, for another path, start, duration or channel",
        ),
        ([{"name": "a"}], "no id column among 'name'"),
        (
            [{"id": "a", "x": "hi"}, {"id": "b", "x": "\udcff"}],
            r"row 2: x is not UTF-8: 'utf-8' codec can't .*'\\udcff'",
        ),
        ([{"id": "a", "x": ["\udcff"]}], r"row 1: x is not UTF-8: 'utf-8' codec can't .*'\\udcff'"),
        (
            [{"id": "a", "start": -1.0}, {"id": ""}],
            r"(?s)2 errors\n  row 1: start is negative.*row 2: id is missing",
        ),
    ],
)
def test_faults_name_the_row(table, what):
    with pytest.raises(ManifestError, match=what):
        manifest_of(table)


def test_columns_of_one_name_are_refused():
    frame = pandas_frame([{"id": "a", "x": 1, "y": 2}]).rename(columns={"y": "x"})
    with pytest.raises(ManifestError, match=r"<DataFrame>: 1 error\n  2 columns are named 'x'"):
        manifest_of(frame)


@pytest.mark.parametrize(
    "table", [5, {"id": ["a"]}, np.zeros(3), b"train.csv", iter([{"id": "a"}])]
)
def test_what_is_no_table_is_refused(table):
    with pytest.raises(ArgumentError, match=r"manifest is a \w+: give a path, a data frame"):
        manifest_of(table)
