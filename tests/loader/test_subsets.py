"""Subsets of a dataset, by torch's means and by its own: folds, splits and lists of positions."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from make_cache import make_features, make_version
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Subset, SubsetRandomSampler, random_split

import featcache
from featcache import DataLoader, FeatureDataset
from featcache.errors import ArgumentError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twenty utterances of a manifest, in another order than the cache's."""
    folder = tmp_path_factory.mktemp("features")
    make_version(folder / "features", make_features(20))
    manifest = folder / "train.csv"
    manifest.write_text("id,digit,text\n" + "".join(f"utt-{n},{n % 10},word {n}\n" for n in range(19, -1, -1)))
    return FeatureDataset(featcache.open(folder / "features"), manifest, crop=5)


def same(item, other):
    assert item.keys() == other.keys()
    for name, value in item.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


positions = st.lists(st.integers(-20, 19), max_size=25)


@given(positions, st.data())
def test_a_subset_of_a_subset_is_what_torchs_is(whole, rows, data):
    count = len(rows)
    again = data.draw(st.lists(st.integers(-count, count - 1), max_size=9)) if count else []
    ours, torchs = whole.subset(rows).subset(np.array(again, np.int64)), Subset(Subset(whole, rows), again)
    assert len(ours) == len(torchs)
    for item, other in zip(ours, torchs, strict=True):
        same(item, other)
    assert list(ours.ids) == [item["id"] for item in torchs]
    assert ours.lengths.tolist() == [len(item["features"]) for item in torchs]
    assert ours.shards.tolist() == [0] * len(ours)
    same(ours.batch(range(len(ours))), whole.collate(list(torchs)))


def folds(count, number):
    """The positions of each fold's training and test part, as scikit-learn's KFold gives them."""
    parts = np.array_split(np.arange(count), number)
    return [(np.setdiff1d(np.arange(count), part), part) for part in parts]


@pytest.mark.parametrize("make", [lambda whole, rows: whole.subset(rows), Subset])
def test_folds(whole, make):
    tested = []
    for train, test in folds(len(whole), 3):
        loaders = (
            DataLoader(make(whole, train), batch_size=4),
            TorchLoader(make(whole, train), batch_size=4, shuffle=True, collate_fn=whole.collate),
        )
        for loader in loaders:
            seen = [id_ for batch in loader for id_ in batch["ids"]]
            assert sorted(seen) == sorted(whole.ids[row] for row in train)
        tested += [id_ for batch in DataLoader(make(whole, test), batch_size=9) for id_ in batch["ids"]]
    assert sorted(tested) == sorted(whole.ids)


def test_random_split_and_plain_lists_of_positions(whole):
    train, dev = random_split(whole, [0.7, 0.3], torch.Generator().manual_seed(0))
    ids = [[id_ for batch in DataLoader(part, batch_size=4) for id_ in batch["ids"]] for part in (train, dev)]
    assert [len(part) for part in ids] == [14, 6]
    assert sorted(ids[0] + ids[1]) == sorted(whole.ids)
    (batch,) = TorchLoader(whole, 8, sampler=SubsetRandomSampler([3, 5, 8]), collate_fn=whole.collate)
    assert sorted(batch["ids"]) == sorted(whole.ids[row] for row in (3, 5, 8))
    (batch,) = DataLoader(Subset(whole, range(3, 9)), [[-1, 0]])  # positions in the subset
    assert batch["ids"] == [whole.ids[8], whole.ids[3]]


def test_a_subset_has_an_epoch_of_its_own(whole):
    train, dev = whole.subset(range(15)), whole.subset(range(15, 20))
    train.set_epoch(3)
    assert (train.epoch, dev.epoch, whole.epoch) == (3, 0, 0)
    assert not torch.equal(train.batch(range(15))["features"], whole.batch(range(15))["features"])


def test_positions_that_are_none_are_refused(whole):
    with pytest.raises(IndexError, match="no utterance at 20: the dataset has 20"):
        whole.subset([3, 20])
    with pytest.raises(ArgumentError, match=r"rows are bool \[20\]: give a list of positions"):
        whole.subset(np.ones(20, bool))
    with pytest.raises(IndexError, match="no utterance at -21"):
        DataLoader(Subset(whole, [-21]), batch_size=4)
