"""Which rows and columns a dataset takes of a table in memory: by functions, and labels as numbers."""

import json

import pytest
import torch
from make_cache import make_features, make_version

import featcache
from featcache import FeatureDataset
from featcache.errors import ArgumentError, ManifestError

ROWS = [{"id": f"utt-{n}", "speaker": f"spk{n % 3}", "digit": str(n % 10), "n": n} for n in range(20)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, make_features(20), rows={f"utt-{n}": {"path": f"{n}.wav"} for n in range(20)})
    return featcache.open(folder)


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


def test_others_use_the_mapping_of_the_training_data_also_from_a_file(cache):
    train = FeatureDataset(cache, ROWS, classes="speaker")
    for classes in (train.classes, json.loads(json.dumps(train.classes))):
        dev = FeatureDataset(cache, ROWS[2:3], classes=classes)
        assert dev.classes == train.classes
        assert dev[0]["speaker"] == 2


def test_a_label_that_training_did_not_have_is_an_error_that_names_it(cache):
    train = FeatureDataset(cache, ROWS[:2], classes="speaker")
    what = r"<list>: the column 'speaker' has labels that classes= has not: 'spk2'; leave these rows out with where="
    with pytest.raises(ManifestError, match=what):
        FeatureDataset(cache, ROWS, classes=train.classes)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"classes": "spaeker"}, ManifestError, "no column of text is 'spaeker', for classes=; there are 'speaker'"),
        (
            {"classes": "speaker", "columns": ["n"]},
            ManifestError,
            "no column of text is 'speaker', for classes=; there",
        ),
        ({"manifest": None, "classes": "speaker"}, ManifestError, "no column of text is 'speaker', .* there are none"),
        (
            {"manifest": [{"id": "utt-1", "s": "a"}, {"id": "utt-2"}], "classes": "s"},
            ManifestError,
            "'s' is empty in so",
        ),
        ({"classes": {"speaker": "spk0"}}, ArgumentError, "'speaker' has 'spk0': give a list of labels as text"),
        ({"classes": {"speaker": [0, 1]}}, ArgumentError, r"'speaker' has \[0, 1\]: give a list of labels as text"),
        ({"classes": {"speaker": ["a", "a"]}}, ArgumentError, "'speaker' has the same label twice: 'a', 'a'"),
        ({"classes": 5}, ArgumentError, "classes is 5: give the name of a column, or labels by column"),
        ({"where": lambda row: False}, ManifestError, "<list>: where= is true for none of 20 rows"),
        ({"manifest": 5}, ArgumentError, "manifest is a int: give a file or a folder, a data frame"),
    ],
)
def test_what_does_not_fit_is_one_line(cache, options, error, what):
    with pytest.raises(error, match=what) as caught:
        FeatureDataset(cache, **{"manifest": ROWS, **options})
    assert "\n" not in str(caught.value)


def test_rows_are_selected_by_a_function_of_what_an_item_has(cache):
    seen = []
    dataset = FeatureDataset(
        cache, ROWS, where=lambda row: seen.append(row) or (row["digit"] < 3 and row["id"] > "utt-1")
    )
    assert list(dataset.ids) == ["utt-2", "utt-10", "utt-11", "utt-12"]
    assert seen[4] == {"id": "utt-4", "speaker": "spk1", "digit": 4, "n": 4}
    types = {"columns": {"digit": str, "n": int}, "classes": "n"}
    dataset = FeatureDataset(cache, ROWS, where=lambda row: row["digit"] == "3" and row["n"] == "13", **types)
    assert list(dataset.ids) == ["utt-13"]
    assert dataset.classes == {"n": ["13"]}


def test_rows_of_a_table_in_memory_are_compared_with_what_was_extracted(cache):
    rows = [{"id": "utt-1", "path": "1.wav"}, {"id": "utt-2", "path": "3.wav"}]
    with pytest.raises(
        ManifestError, match=r"for 1 of 2 utterances, .* another row or file: utt-2; utt-2: path 2.wav → 3"
    ):
        FeatureDataset(cache, rows)
    assert list(FeatureDataset(cache, rows, where={"id": "utt-1"}).ids) == ["utt-1"]
