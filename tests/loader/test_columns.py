"""A manifest's columns as training gets them: numbers where they are numbers, and text untouched otherwise."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from make_cache import make_features, make_version

import featcache
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


@pytest.fixture
def cache(tmp_path):
    make_version(tmp_path / "features", make_features(4))
    return featcache.open(tmp_path / "features")


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
