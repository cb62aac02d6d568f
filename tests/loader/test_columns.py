"""A manifest's rows and columns as training gets them: numbers as such, labels numbered, and text untouched."""

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

import featcache
from featcache import FeatureDataset
from featcache.errors import ArgumentError, ManifestError
from featcache.loader.utterances import _numbers
from featcache.strings import Strings


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
def test_numbers_are_numbers(texts, dtype):
    values = _numbers(Strings.of(texts))
    assert values.dtype == dtype
    assert np.array_equal(values, [float(text or "nan") if dtype is np.float64 else int(text) for text in texts], True)


@pytest.mark.parametrize(
    "texts",
    [
        [],
        ["", ""],
        ["007", "008"],  # names of speakers, which have to come back as they were
        ["1", "-01"],
        ["00"],
        ["1", "+05"],
        ["1", "two"],
        ["nan", "1"],
        ["inf"],
        ["1_000"],
        [" 1"],
        ["1-2", "3"],
        ["2020-11-05"],
        ["."],
        ["-"],
        ["1.2.3"],
        ["12345678901234567890", "1"],  # beyond int64
        ["1234567890123456789", "0.5"],  # beyond what float64 holds to the last digit
        ["١"],
    ],
)
def test_everything_else_is_text(texts):
    assert _numbers(Strings.of(texts)) is None


@given(st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1).map(str), st.just("7")), min_size=1))
def test_whole_numbers_come_back_as_they_were(texts):
    assert list(map(str, _numbers(Strings.of(texts)).tolist())) == texts


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_fractions_come_back_as_they_were(values):
    texts = list(map(repr, values))
    if max(map(len, texts)) <= 24:
        assert _numbers(Strings.of(texts)).tolist() == values


@given(st.lists(st.text("0123456789.-eE+ax", max_size=6), max_size=6))
def test_nothing_that_python_does_not_take_for_a_number_is_one(texts):
    values = _numbers(Strings.of(texts))
    if values is not None:
        for value, text in zip(values.tolist(), texts, strict=True):
            assert value == float(text) if text else math.isnan(value)


class TestInADataset:
    @pytest.fixture
    def manifest(self, tmp_path):
        path = tmp_path / "train.csv"
        path.write_text("id,digit,speaker,snr,text\nutt-0,7,007,10.5,one\nutt-1,3,019,,two\nutt-2,0,100,-3,3\n")
        return path

    def test_items_hold_numbers_and_batches_tensors(self, cache, manifest):
        dataset = featcache.FeatureDataset(cache, manifest)
        item = dataset[0]
        item.pop("features")
        assert item == {"id": "utt-0", "digit": 7, "speaker": "007", "snr": 10.5, "text": "one"}
        for batch in (dataset.batch([2, 0]), dataset.collate([dataset[2], dataset[0]])):
            assert batch["digit"].dtype == torch.int64
            assert batch["digit"].tolist() == [0, 7]
            assert batch["snr"].dtype == torch.float64
            assert batch["snr"].tolist() == [-3.0, 10.5]
            assert batch["speaker"] == ["100", "007"]
            assert batch["text"] == ["3", "one"]

    def test_are_what_a_mapping_says(self, cache, manifest):
        dataset = featcache.FeatureDataset(cache, manifest, columns={"digit": str, "snr": float})
        assert dataset.batch([0, 1])["digit"] == ["7", "3"]
        assert dataset.batch([0])["snr"].tolist() == [10.5]
        assert featcache.FeatureDataset(cache, manifest, columns={"digit": float}).batch([0])["digit"].tolist() == [7.0]

    @pytest.mark.parametrize(
        ("columns", "what"),
        [
            ({"text": int}, r"train.csv: the column 'text' should be int, but not all its values are"),
            ({"snr": int}, r"the column 'snr' should be int"),
            ({"speaker": float}, r"the column 'speaker' should be float"),
            ({"digit": list}, r"the column 'digit' cannot be list: choose str"),
            ({"digits": int}, r"has no column 'digits'; it has 'digit', 'speaker'"),
        ],
    )
    def test_what_they_are_not_is_refused(self, cache, manifest, columns, what):
        with pytest.raises(ManifestError, match=what):
            featcache.FeatureDataset(cache, manifest, columns=columns)


class TestWhere:
    @pytest.fixture
    def manifest(self, tmp_path):
        path = tmp_path / "all.csv"
        rows = ["utt-3,train,anna,1,1.0,false", "utt-0,test,ben,2,,true", "utt-2,train,ben,3,1.5,True"]
        header = "id,split,speaker,digit,score,noisy"
        path.write_text("\n".join([header, *rows, "elsewhere,dev,ben,3,2.0,"]))
        return path

    @pytest.mark.parametrize(
        ("where", "ids"),
        [
            ({"split": "train"}, ["utt-3", "utt-2"]),
            ({"split": ["train", "test"]}, ["utt-3", "utt-0", "utt-2"]),
            ({"split": ("train", "test"), "speaker": "ben"}, ["utt-0", "utt-2"]),
            ({"digit": 2}, ["utt-0"]),
            ({"digit": 2.0}, ["utt-0"]),
            ({"score": 1}, ["utt-3"]),
            ({"noisy": True}, ["utt-0", "utt-2"]),
            ({"id": ["utt-2", "utt-3"]}, ["utt-3", "utt-2"]),
        ],
    )
    def test_chooses_rows_in_their_order(self, cache, manifest, where, ids):
        for columns in (None, [], ["digit"]):
            dataset = featcache.FeatureDataset(cache, manifest, where=where, columns=columns)
            assert list(dataset.ids) == ids
            assert dataset.lengths.tolist() == [len(cache[name]) for name in ids]
        assert dataset.batch([0])["digit"].dtype == torch.int64

    @pytest.mark.parametrize(
        ("where", "what"),
        [
            ({"split": "valid"}, r"all.csv: no row has split valid; there are 'dev', 'test', 'train'"),
            ({"part": "train"}, r"has no column 'part' for where=; it has 'id', 'split', 'speaker', 'digit', 'score'"),
            ({"split": "train", "digit": 2}, r"all.csv: no row has all of split train, digit 2"),
            ({"split": []}, r"all.csv: split has an empty list in where=, which matches no row"),
        ],
    )
    def test_what_is_not_there_is_refused(self, cache, manifest, where, what):
        with pytest.raises(ManifestError, match=what):
            featcache.FeatureDataset(cache, manifest, where=where)

    def test_needs_a_manifest(self, cache):
        with pytest.raises(ArgumentError, match="where= selects rows of a manifest: give a manifest too"):
            featcache.FeatureDataset(cache, where={"split": "train"})


ROWS = [{"id": f"utt-{n}", "speaker": f"spk{n % 3}", "digit": str(n % 10), "n": n} for n in range(20)]


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


def test_others_use_the_mapping_of_the_training_data_also_from_a_file_and_have_no_other_labels(cache):
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
        ({"classes": "spaeker"}, ManifestError, "no column of text is 'spaeker', for classes=; there are 'speaker'"),
        ({"classes": "speaker", "columns": ["n"]}, ManifestError, "no column of text is 'speaker', for classes=; "),
        ({"manifest": None, "classes": "speaker"}, ManifestError, "no column of text is 'speaker', .* there are none"),
        ({"manifest": [{"id": "utt-1", "s": "a"}, {"id": "utt-2"}], "classes": "s"}, ManifestError, "'s' is empty in"),
        ({"classes": {"speaker": "spk0"}}, ArgumentError, "'speaker' has 'spk0': give a list of labels as text"),
        ({"classes": {"speaker": [0, 1]}}, ArgumentError, r"'speaker' has \[0, 1\]: give a list of labels as text"),
        ({"classes": {"speaker": ["a", "a"]}}, ArgumentError, "'speaker' has the same label twice: 'a', 'a'"),
        ({"classes": 5}, ArgumentError, "classes is 5: give the name of a column, or labels by column"),
        ({"where": lambda row: False}, ManifestError, "<list>: where= is true for none of 20 rows"),
    ],
)
def test_what_does_not_fit_is_one_line(cache, options, error, what):
    with pytest.raises(error, match=what) as caught:
        FeatureDataset(cache, **{"manifest": ROWS, **options})
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
    dataset = FeatureDataset(cache, ROWS, where=lambda row: row["digit"] == "3" and row["n"] == "13", **types)
    assert list(dataset.ids) == ["utt-13"]
    assert dataset.classes == {"n": ["13"]}
