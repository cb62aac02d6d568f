"""A manifest's rows and columns as training gets them: numbers as such, labels numbered,
and text untouched."""

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from featcache import FeatureDataset
from featcache.errors import ArgumentError, ManifestError
from featcache.manifest.columns import numbers
from featcache.manifest.strings import Strings


@pytest.mark.parametrize(
    ("texts", "dtype"),
    [
        (["0", "-7", "10", str(2**63 - 1), str(-(2**63))], np.int64),
        (["0.5", "-1", "2e-3", "1E5", ".5", "3."], np.float64),
        (["1", "", "-2.5"], np.float64),
        (["", "3"], np.float64),
        (["0", "-0", "0.0"], np.float64),
    ],
)
def test_numbers_arenumbers(texts, dtype):
    values = numbers(Strings.of(texts))
    assert values.dtype == dtype
    assert np.array_equal(
        values, [float(text or "nan") if dtype is np.float64 else int(text) for text in texts], True
    )


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["", ""],
        ["007", "008"],  # names of speakers, which have to come back as they were
        ["12345678901234567890", "1"],  # beyond int64
        ["1234567890123456789", "0.5"],  # beyond what float64 holds to the last digit
        *[
            [text]
            for text in ("00", "inf", "1_000", " 1", "2020-11-05", ".", "-", "1.2.3", "١", "1e400")
        ],
        *[["1", text] for text in ("-01", "+05", "two", "nan", "1-2")],
    ],
)
def test_everything_else_is_text(texts):
    assert numbers(Strings.of(texts)) is None


@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1).map(str), st.just("7")), min_size=1))
def test_whole_numbers_come_back_as_they_were(texts):
    assert list(map(str, numbers(Strings.of(texts)).tolist())) == texts


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_fractions_come_back_as_they_were(values):
    texts = list(map(repr, values))
    if max(map(len, texts)) <= 24:
        assert numbers(Strings.of(texts)).tolist() == values


@given(st.lists(st.text("0123456789.-eE+ax", max_size=6), max_size=6))
def test_nothing_that_python_does_not_take_for_a_number_is_one(texts):
    values = numbers(Strings.of(texts))
    if values is not None:
        for value, text in zip(values.tolist(), texts, strict=True):
            assert value == float(text) if text else math.isnan(value)


@pytest.fixture
def manifest(written):
    """Four utterances, of which the cache has three."""
    rows = (
        "utt-3,train,007,7,10.5,one,false",
        "utt-0,test,019,3,,two,true",
        "utt-2,train,019,0,-3,3,True",
        "elsewhere,dev,019,0,2.0,four,",
    )
    return written("\n".join(["id,split,speaker,digit,snr,text,noisy", *rows]))


def test_items_hold_numbers_and_batches_tensors(cache, manifest):
    dataset = FeatureDataset(cache, manifest, skip_missing=True)
    item = dataset[0]
    item.pop("features")
    texts = {"id": "utt-3", "split": "train", "speaker": "007", "text": "one"}
    assert item == {**texts, "digit": 7, "snr": 10.5, "noisy": False}
    for batch in (dataset.batch([2, 0]), dataset.collate([dataset[2], dataset[0]])):
        assert batch["digit"].dtype == torch.int64
        assert batch["digit"].tolist() == [0, 7]
        assert batch["snr"].dtype == torch.float64
        assert batch["snr"].tolist() == [-3.0, 10.5]
        assert batch["speaker"] == ["019", "007"]
        assert batch["text"] == ["3", "one"]


TYPES = {
    "clean": [True, False, True, False],
    "count": [3, 0, -1, 7],
    "snr": [0.5, 2.0, -1.25, 1e-7],
    "text": ["one", "7", "true", ""],
    "code": ["1", "2", "3", "4"],
    "maybe": [True, None, False, None],
    "said": ["hi", None, "", "ho"],
    "tags": [["a"], [], ["b", "c"], ["d"]],
    "meta": [{"a": 1}, {"a": 2}, {"a": 3}, {"a": None}],
}
TYPED_ROWS = [
    {"id": f"utt-{n}", **{name: cells[n] for name, cells in TYPES.items()}} for n in range(4)
]


def written_as(form, folder):
    """The rows in a format whose cells have types."""
    if form == "list":
        return TYPED_ROWS
    if form == "pandas":
        return pytest.importorskip("pandas").DataFrame(TYPED_ROWS)
    if form == "datasets":
        return pytest.importorskip("datasets").Dataset.from_list(TYPED_ROWS)
    if form == "jsonl":
        path = folder / "train.jsonl"
        path.write_text("\n".join(map(json.dumps, TYPED_ROWS)))
        return path
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(TYPED_ROWS)
    if form == "arrow":
        return table
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "train.parquet")
    return folder / "train.parquet"


@pytest.mark.parametrize("form", ["list", "jsonl", "parquet", "arrow", "pandas", "datasets"])
def test_a_cell_keeps_its_type(cache, tmp_path, form):
    seen = []
    manifest = written_as(form, tmp_path)
    dataset = FeatureDataset(cache, manifest, where=lambda row: seen.append(row) or row["clean"])
    assert seen == TYPED_ROWS
    assert list(dataset.ids) == ["utt-0", "utt-2"]
    dataset = FeatureDataset(cache, manifest)
    item = dataset[2]
    del item["features"]
    assert item == TYPED_ROWS[2]
    assert type(item["clean"]) is bool
    for batch in (dataset.batch([1, 0]), dataset.collate([dataset[1], dataset[0]])):
        assert batch["clean"].dtype == torch.bool
        assert batch["count"].dtype == torch.int64
        assert batch["snr"].dtype == torch.float64
        assert batch["clean"].tolist() == [False, True]
        for name in ("text", "code", "maybe", "said", "tags", "meta"):
            assert batch[name] == [TYPES[name][1], TYPES[name][0]]


@pytest.mark.parametrize(("name", "mark"), [("train.csv", ","), ("train.tsv", "\t")])
@pytest.mark.parametrize(("yes", "no"), [("true", "false"), ("True", "False"), ("TRUE", "FALSE")])
def test_written_booleans_are_booleans_if_the_whole_column_is(cache, written, name, mark, yes, no):
    rows = [("id", "clean", "maybe", "word"), ("utt-0", yes, no, yes), ("utt-1", no, "", "maybe")]
    path = written("".join(f"{mark.join(row)}\n" for row in rows), name)
    dataset = FeatureDataset(cache, path, where=lambda row: row["clean"])
    assert list(dataset.ids) == ["utt-0"]
    assert list(FeatureDataset(cache, path, where={"clean": False}).ids) == ["utt-1"]
    batch = FeatureDataset(cache, path).batch([1, 0])
    assert batch["clean"].dtype == torch.bool
    assert batch["clean"].tolist() == [False, True]
    assert (batch["maybe"], batch["word"]) == ([None, False], ["maybe", yes])
    as_text = FeatureDataset(cache, path, columns={"clean": str}, classes="clean")
    assert as_text.classes == {"clean": sorted([yes, no])}
    assert FeatureDataset(cache, path, columns={"clean": bool})[0]["clean"] is True
    with pytest.raises(ManifestError, match="'maybe' should be bool, but not all its values are"):
        FeatureDataset(cache, path, columns={"maybe": bool})


def test_text_of_json_is_read_as_what_a_mapping_says(cache):
    dataset = FeatureDataset(cache, TYPED_ROWS, columns={"code": int, "tags": str, "clean": str})
    item = dataset[2]
    assert (item["code"], item["tags"], item["clean"]) == (3, '["b","c"]', "true")


def test_values_that_are_not_given_are_selected_by_none(cache):
    assert list(FeatureDataset(cache, TYPED_ROWS, where={"maybe": None}).ids) == ["utt-1", "utt-3"]


def test_columns_are_what_a_mapping_says(cache, manifest):
    dataset = FeatureDataset(
        cache, manifest, columns={"digit": str, "snr": float}, skip_missing=True
    )
    assert dataset.batch([0, 1])["digit"] == ["7", "3"]
    assert dataset.batch([0])["snr"].tolist() == [10.5]
    dataset = FeatureDataset(cache, manifest, columns={"digit": float}, skip_missing=True)
    assert dataset.batch([0])["digit"].tolist() == [7.0]


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({"split": "train"}, ["utt-3", "utt-2"]),
        ({"split": ["train", "test"]}, ["utt-3", "utt-0", "utt-2"]),
        ({"split": ("train", "test"), "speaker": "019"}, ["utt-0", "utt-2"]),
        ({"digit": 3}, ["utt-0"]),
        ({"digit": 3.0}, ["utt-0"]),
        ({"snr": -3}, ["utt-2"]),
        ({"noisy": True}, ["utt-0", "utt-2"]),
        ({"id": ["utt-2", "utt-3"]}, ["utt-3", "utt-2"]),
    ],
)
def test_where_chooses_rows_in_their_order(cache, manifest, where, ids):
    for columns in (None, [], ["digit"]):
        dataset = FeatureDataset(cache, manifest, where=where, columns=columns)
        assert list(dataset.ids) == ids
        assert dataset.lengths.tolist() == [len(cache[name]) for name in ids]
    assert dataset.batch([0])["digit"].dtype == torch.int64


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({"path": "b.wav"}, ["utt-1", "utt-2"]),
        ({"start": 0}, ["utt-0"]),
        ({"start": [1.5, 7]}, ["utt-1"]),
        ({"duration": 2, "channel": 1}, ["utt-1"]),
        ({"channel": [0, 1.0]}, ["utt-0", "utt-1"]),
    ],
)
def test_where_takes_the_columns_that_features_are_extracted_by(cache, written, where, ids):
    """By their names in a dataset, whatever they are called in the file; numbers are
    compared as numbers."""
    path = written(
        "id,wav,offset,duration,channel\nutt-0,a.wav,0,,0\nutt-1,b.wav,1.50,2.0,1\nutt-2,b.wav,,,\n"
    )
    assert list(FeatureDataset(cache, path, where=where, on_changed="use").ids) == ids
    with pytest.raises(ManifestError, match=r"no row has channel 7; there are '-1', '0', '1'"):
        FeatureDataset(cache, path, where={"channel": 7}, on_changed="use")


ROWS = [{"id": f"utt-{n}", "speaker": f"spk{n % 3}", "digit": n % 10, "n": n} for n in range(20)]


def test_labels_are_numbers_in_items_and_batches_and_the_mapping_is_kept(cache):
    dataset = FeatureDataset(cache, ROWS, classes=["speaker", "digit"])
    assert dataset.classes == {"speaker": ["spk0", "spk1", "spk2"], "digit": list("0123456789")}
    assert dataset[4]["speaker"] == 1
    batch = dataset.batch([4, 2, 9])
    assert torch.equal(batch["speaker"], torch.tensor([1, 2, 0]))
    assert [dataset.classes["digit"][number] for number in batch["digit"]] == ["4", "2", "9"]
    part = dataset.subset([1, 4])  # of one speaker
    assert part.classes is dataset.classes
    assert part.batch([0, 1])["speaker"].tolist() == [1, 1]


def test_the_mapping_does_not_depend_on_the_order_or_on_what_the_cache_lacks(cache):
    rows = [*reversed(ROWS), {"id": "absent", "speaker": "a"}]
    dataset = FeatureDataset(cache, rows, classes="speaker", skip_missing=True)
    assert dataset.classes["speaker"] == ["a", "spk0", "spk1", "spk2"]


def test_others_use_the_mapping_of_the_training_data_also_from_a_file_and_have_no_other_labels(
    cache,
):
    train = FeatureDataset(cache, ROWS[:2], classes="speaker")
    what = r"<list>: the column 'speaker' has labels that classes= has not: 'spk2'; leave these rows out with where="
    for classes in (train.classes, json.loads(json.dumps(train.classes))):
        dev = FeatureDataset(cache, ROWS[1:2], classes=classes)
        assert dev.classes == train.classes
        assert dev[0]["speaker"] == 1
        with pytest.raises(ManifestError, match=what):
            FeatureDataset(cache, ROWS, classes=classes)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"manifest": 5}, ArgumentError, "manifest is a int: give a path, a data frame"),
        ({"manifest": ""}, ArgumentError, "the manifest's path is empty"),
        ({"manifest": ["a.csv"]}, ArgumentError, "manifest is a list of paths: give one path; for"),
        *[
            (
                {"cache": given},
                ArgumentError,
                "cache is not an opened cache: give the result of featcache",
            )
            for given in ("features", ["features"], {"fbank": "features"}, None)
        ],
        ({"columns": 5}, ArgumentError, "columns is 5: give a list of names"),
        ({"columns": "speaker"}, ArgumentError, "columns is 'speaker': give a list of names"),
        (
            {"columns": {"text": int}},
            ManifestError,
            "train.csv: the column 'text' should be int, but not all its",
        ),
        ({"columns": {"snr": int}}, ManifestError, "the column 'snr' should be int"),
        ({"columns": {"speaker": float}}, ManifestError, "the column 'speaker' should be float"),
        (
            {"columns": {"digit": list}},
            ManifestError,
            "the column 'digit' cannot be list: choose str",
        ),
        (
            {"columns": {"digits": int}},
            ManifestError,
            r"has no column 'digits' \(did you mean digit\?\); it has 'split', 'speaker', 'digit'",
        ),
        (
            {"where": ["train"]},
            ArgumentError,
            r"where is \['train'\]: give an expression, values of columns, or a function of a row: ",
        ),
        ({"where": ""}, ArgumentError, "where is '': give an expression"),
        ({"where": {3: "train"}}, ArgumentError, "where is {3: 'train'}: give an expression"),
        (
            {"where": "split == train"},
            ManifestError,
            "no column 'train' for where=; it has 'id', 'split', 'speaker'",
        ),
        (
            {"where": {"split": "valid"}},
            ManifestError,
            "no row has split valid; there are 'dev', 'test', 'train'",
        ),
        (
            {"where": {"part": "train"}},
            ManifestError,
            "no column 'part' for where=; it has 'id', 'split', 'speaker'",
        ),
        (
            {"where": {"split": "train", "digit": 3}},
            ManifestError,
            "no row has all of split train, digit 3",
        ),
        (
            {"where": {"split": []}},
            ManifestError,
            "split has an empty list in where=, which matches no row",
        ),
        (
            {"where": lambda row: False},
            ManifestError,
            "train.csv: no row fits the function of where=",
        ),
        (
            {"manifest": None, "where": {"split": "x"}},
            ArgumentError,
            "where= selects rows of a manifest: give a man",
        ),
        (
            {"classes": "spaeker"},
            ManifestError,
            r"has no column of text 'spaeker' \(did you mean speaker\?\) for classes=; it has 'split'",
        ),
        (
            {"classes": "speaker", "columns": ["digit"]},
            ManifestError,
            "has no column of text 'speaker' for classes=; ",
        ),
        (
            {"manifest": None, "classes": "speaker"},
            ManifestError,
            "has no column of text 'speaker' .* it has none",
        ),
        (
            {"manifest": [{"id": "utt-1", "s": "a"}, {"id": "utt-2"}], "classes": "s"},
            ManifestError,
            "'s' is empty in",
        ),
        (
            {"classes": {"speaker": "spk0"}},
            ArgumentError,
            "'speaker' has 'spk0': give a list of labels as text",
        ),
        (
            {"classes": {"speaker": [0, 1]}},
            ArgumentError,
            r"'speaker' has \[0, 1\]: give a list of labels as text",
        ),
        (
            {"classes": {"speaker": ["a", "a"]}},
            ArgumentError,
            "'speaker' has the same label twice: 'a', 'a'",
        ),
        (
            {"classes": 5},
            ArgumentError,
            "classes is 5: give the name of a column, or labels by column",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(cache, manifest, options, error, what):
    with pytest.raises(error, match=what) as caught:
        FeatureDataset(**{"cache": cache, "manifest": manifest, "skip_missing": True, **options})
    assert "\n" not in str(caught.value)


def test_rows_are_selected_by_a_function_of_what_an_item_has(cache):
    seen = []

    def wanted(row):
        seen.append(row)
        return row["digit"] < 3 and row["id"] > "utt-1"

    dataset = FeatureDataset(cache, ROWS, where=wanted)
    assert list(dataset.ids) == ["utt-2", "utt-10", "utt-11", "utt-12"]
    assert seen[4] == {"id": "utt-4", "speaker": "spk1", "digit": 4, "n": 4}
    types = {"columns": {"digit": str, "n": int}, "classes": "n"}
    dataset = FeatureDataset(
        cache, ROWS, where=lambda row: row["digit"] == "3" and row["n"] == "13", **types
    )
    assert list(dataset.ids) == ["utt-13"]
    assert dataset.classes == {"n": ["13"]}
