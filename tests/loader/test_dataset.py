"""A dataset: features joined with the columns of a manifest, alone, in torch's
DataLoader, in subsets."""

import copy
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from make_cache import assert_same, in_three_shards, made_cache, make_features, make_version
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, random_split

import featcache
from featcache import FeatureDataset
from featcache.errors import ArgumentError, ManifestError, MissingItemError
from featcache.manifest.read import read_manifest

ROWS = {f"utt-{n}": {"path": f"{n}.wav", "start": n / 2 or None} for n in range(20)}
"""What the manifest says of the utterances."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory, features):
    """A cache of these rows; nobody changes it."""
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, *in_three_shards(features), rows=ROWS)
    return folder


@pytest.fixture
def manifest(written):
    """Six of the utterances, in another order, with columns."""
    rows = [
        f"utt-{n},{n}.wav,{n / 2 if n else ''},spk{n % 2},hello {n}" for n in (4, 2, 11, 0, 19, 7)
    ]
    return written("\n".join(["ID,wav,start,speaker,text", *rows]))


class TestFeatureDataset:
    def test_without_a_manifest_is_the_cache(self, cache, features):
        dataset = featcache.FeatureDataset(cache)
        assert len(dataset) == 20
        assert list(dataset.ids) == list(features)
        for item, (name, array) in zip(dataset, features.items(), strict=True):
            assert item.keys() == {"id", "features"}
            assert item["id"] == name
            assert np.array_equal(item["features"].numpy(), array)

    def test_joins_a_manifests_columns_in_its_order(self, cache, features, manifest):
        dataset = featcache.FeatureDataset(cache, manifest)
        what = f"{cache.version.path.name}: 6 utterances with path, start, speaker, text"
        assert repr(dataset) == f"FeatureDataset({what})"
        assert list(dataset.ids) == ["utt-4", "utt-2", "utt-11", "utt-0", "utt-19", "utt-7"]
        assert dataset.lengths.tolist() == [len(features[name]) for name in dataset.ids]
        item = dataset[2]
        assert torch.equal(item.pop("features"), torch.from_numpy(features["utt-11"]))
        assert item == {
            "id": "utt-11",
            "path": "11.wav",
            "start": 5.5,
            "speaker": "spk1",
            "text": "hello 11",
        }
        assert np.isnan(dataset[3]["start"])
        assert dataset[-1]["id"] == dataset[np.int64(5)]["id"] == "utt-7"
        for row in (6, -7):
            with pytest.raises(IndexError):
                dataset[row]

    def test_a_path_may_be_of_another_type(self, cache, manifest):
        (entry,) = (each for each in os.scandir(manifest.parent) if each.name == manifest.name)
        assert (
            featcache.FeatureDataset(cache, entry).ids
            == featcache.FeatureDataset(cache, manifest).ids
        )

    def test_carries_the_columns_that_are_asked_for(self, cache, manifest):
        assert dataset_keys(cache, manifest, columns=["text"]) == {"id", "features", "text"}
        assert dataset_keys(cache, manifest, columns=()) == {"id", "features"}
        # which is there anyway
        assert dataset_keys(cache, manifest, columns=["id"]) == {"id", "features"}
        read = read_manifest(manifest)
        assert dataset_keys(cache, read, columns=["start"]) == {"id", "features", "start"}
        with pytest.raises(
            ManifestError,
            match=r"train.csv: has no column 'txt' \(did you mean text\?\); it has 'path', 'start', 'speaker'",
        ):
            featcache.FeatureDataset(cache, manifest, columns=["txt"])

    def test_an_item_is_the_callers_own(self, cache, features):
        dataset = featcache.FeatureDataset(cache)
        dataset[0]["features"].zero_()
        assert np.array_equal(dataset[0]["features"].numpy(), features["utt-0"])

    def test_names_the_utterances_that_the_cache_has_not_and_goes_without_them_if_told_so(
        self, tmp_path, manifest
    ):
        features = make_features(8)
        cache = made_cache(tmp_path / "features", features, rows=ROWS)
        with pytest.raises(
            MissingItemError, match=r"train.csv: 2 of 6 utterances are not in .*: utt-11, utt-19$"
        ):
            featcache.FeatureDataset(cache, manifest)
        dataset = featcache.FeatureDataset(cache, manifest, skip_missing=True)
        assert list(dataset.ids) == ["utt-4", "utt-2", "utt-0", "utt-7"]
        assert dataset.skipped == ["utt-11", "utt-19"]
        batch = dataset.collate([dataset[row] for row in range(4)])
        assert batch["ids"] == list(dataset.ids)
        assert (
            batch["lengths"].tolist()
            == dataset.lengths.tolist()
            == [len(features[name]) for name in dataset.ids]
        )
        assert [text.split()[-1] for text in batch["text"]] == [
            name.split("-")[1] for name in dataset.ids
        ]
        # another corpus, surely
        with pytest.raises(MissingItemError, match="2 of 2 utterances"):
            featcache.FeatureDataset(cache, [{"id": "else-1"}, {"id": "else-2"}], skip_missing=True)

    @pytest.mark.parametrize("name", ["ids", "features", "lengths"])
    def test_a_column_that_clashes_is_refused_unless_left_out(self, cache, written, name):
        manifest = written(f"id\t{name}\nutt-1\tx", "clash.tsv")
        with pytest.raises(ManifestError, match=rf"clash.tsv: the column '{name}' would hide"):
            featcache.FeatureDataset(cache, manifest)
        assert dataset_keys(cache, manifest, columns=[]) == {"id", "features"}

    def test_is_gathered_in_one_call(self, cache, monkeypatch):
        dataset = featcache.FeatureDataset(cache)
        calls = []
        gather = type(cache).gather
        monkeypatch.setattr(
            type(cache),
            "gather",
            lambda *args, **options: calls.append(1) or gather(*args, **options),
        )
        list(DataLoader(Subset(dataset, range(3, 9)), batch_size=3, collate_fn=dataset.collate))
        assert len(calls) == 2

    def test_a_collate_of_the_users_own_gets_a_list_of_items(self, cache):
        def longest_first(items):
            items.sort(key=lambda item: len(item["features"]), reverse=True)
            return dataset.collate(items)

        dataset = featcache.FeatureDataset(cache)
        for batch in DataLoader(dataset, batch_size=7, collate_fn=longest_first, num_workers=1):
            lengths = batch["lengths"].tolist()
            assert lengths == sorted(lengths, reverse=True)
            assert torch.equal(batch["features"], cache.batch(batch["ids"])[0])

    def test_a_worker_that_only_passes_batches_on_says_what_is_faster(self, cache):
        dataset = featcache.FeatureDataset(cache)
        loader = DataLoader(dataset, batch_size=7, collate_fn=dataset.collate, num_workers=1)
        # warnings are errors in tests
        with pytest.raises(featcache.FeatcacheWarning, match=r"featcache\.DataLoader"):
            list(loader)


def dataset_keys(cache, manifest, **options):
    return featcache.FeatureDataset(cache, manifest, **options)[0].keys()


@pytest.mark.parametrize(
    "change",
    [
        lambda items: items,
        lambda items: items[:2],
        lambda items: items + items[:1],
        copy.copy,
        lambda items: items.copy(),
        lambda items: [items[at] for at in range(3)],
    ],
)
def test_what_a_collate_function_gets_is_a_list(cache, manifest, change):
    """It may be sliced, added to, copied, looked at: whatever is done to it, the batch is
    that of the rows."""
    dataset = featcache.FeatureDataset(cache, manifest, padding_value=9)
    rows = change([3, 1, 5])
    changed = change(dataset.__getitems__([3, 1, 5]))
    assert_same(dataset.collate(changed), dataset.batch(rows))
    assert [item["id"] for item in changed] == [dataset.ids[row] for row in rows]
    assert_same(dataset.collate(changed), dataset.batch(rows))


@pytest.fixture(scope="module")
def whole(folder):
    """Twenty utterances of a manifest, in another order than the cache's."""
    rows = [{"id": f"utt-{n}", "digit": n % 10, "text": f"word {n}"} for n in range(19, -1, -1)]
    return FeatureDataset(featcache.open(folder), rows, crop=5)


positions = st.lists(st.integers(-20, 19), max_size=25)


@given(positions, st.data())
def test_a_subset_of_a_subset_is_what_torchs_is(whole, rows, data):
    count = len(rows)
    again = data.draw(st.lists(st.integers(-count, count - 1), max_size=9)) if count else []
    ours, torchs = (
        whole.subset(rows).subset(np.array(again, np.int64)),
        Subset(Subset(whole, rows), again),
    )
    assert len(ours) == len(torchs)
    assert_same(list(ours), list(torchs))
    assert list(ours.ids) == [item["id"] for item in torchs]
    assert ours.lengths.tolist() == [len(item["features"]) for item in torchs]
    shard_of = dict(zip(whole.ids, whole.shards.tolist(), strict=True))
    assert ours.shards.tolist() == [shard_of[id_] for id_ in ours.ids]
    assert_same(ours.batch(range(len(ours))), whole.collate(list(torchs)))


def test_what_torch_makes_of_datasets(whole):
    train, dev = random_split(whole, [0.7, 0.3], torch.Generator().manual_seed(0))
    ids = [
        [id_ for batch in featcache.DataLoader(part, batch_size=4) for id_ in batch["ids"]]
        for part in (train, dev)
    ]
    assert [len(part) for part in ids] == [14, 6]
    assert sorted(ids[0] + ids[1]) == sorted(whole.ids)
    (batch,) = DataLoader(
        whole, 8, sampler=SubsetRandomSampler([3, 5, 8]), collate_fn=whole.collate
    )
    assert sorted(batch["ids"]) == sorted(whole.ids[row] for row in (3, 5, 8))
    # positions in the subset
    (batch,) = featcache.DataLoader(Subset(whole, range(3, 9)), [[-1, 0]])
    assert batch["ids"] == [whole.ids[8], whole.ids[3]]
    both = DataLoader(ConcatDataset([whole, whole]), 7, collate_fn=whole.collate)
    assert [id_ for batch in both for id_ in batch["ids"]] == [*whole.ids, *whole.ids]


def test_a_subset_has_an_epoch_of_its_own(whole):
    train, dev = whole.subset(range(15)), whole.subset(range(15, 20))
    train.set_epoch(3)
    assert (train.epoch, dev.epoch, whole.epoch) == (3, 0, 0)
    assert not torch.equal(train.batch(range(15))["features"], whole.batch(range(15))["features"])


def test_an_epoch_can_be_set_where_a_dataset_was_made_in_inference_mode(whole):
    with torch.inference_mode():
        part = whole.subset(range(3))
    part.set_epoch(2)
    assert part.epoch == 2


def test_positions_that_are_none_are_refused(whole):
    with pytest.raises(IndexError, match="no utterance at 20: the dataset has 20"):
        whole.subset([3, 20])
    with pytest.raises(ArgumentError, match=r"rows are bool \[20\]: give a list of positions"):
        whole.subset(np.ones(20, bool))
    with pytest.raises(IndexError, match="no utterance at -21"):
        featcache.DataLoader(Subset(whole, [-21]), batch_size=4)
