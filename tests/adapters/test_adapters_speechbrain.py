"""Features in SpeechBrain's datasets and loaders, held against what SpeechBrain makes of
the same arrays by itself."""

import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import featcache
from featcache.errors import ArgumentError, MissingItemError

pytest.importorskip("speechbrain")

from speechbrain.dataio.batch import PaddedBatch
from speechbrain.dataio.dataloader import SaveableDataLoader, make_dataloader
from speechbrain.dataio.dataset import DynamicItemDataset
from speechbrain.dataio.sampler import DynamicBatchSampler
from speechbrain.utils.checkpoints import Checkpointer
from speechbrain.utils.importutils import LazyModule

from featcache.adapters.speechbrain import Collate, item, to_dynamic_item_dataset

# They stand for modules that moved, and warn whoever asks them for anything: hypothesis
# asks every module for its file.
for name in [name for name, module in sys.modules.items() if isinstance(module, LazyModule)]:
    del sys.modules[name]


@pytest.fixture
def recipe(made, tmp_path):
    """A dataset as recipes have them, from a CSV file with the columns that SpeechBrain
    wants."""
    table = tmp_path / "train.csv"
    rows = [
        f"{id_},{len(made.fbank[id_]) / 100},{row['speaker']}" for id_, row in made.rows.items()
    ]
    table.write_text("\n".join(["ID,duration,spk_id", *rows]))
    dataset = DynamicItemDataset.from_csv(table)
    dataset.add_dynamic_item(item(made.cache()))
    dataset.set_output_keys(["id", "spk_id", "feats"])
    return dataset


def without_features(dataset):
    dataset.set_output_keys(
        [key for key in dataset.pipeline.output_mapping if key not in ("feats", "fbank", "codes")]
    )
    return dataset


def assert_alike(batch, expected):
    """The same values under the same keys, whatever their order."""
    assert len(batch) == len(expected)
    keys = expected._PaddedBatch__keys
    assert sorted(batch._PaddedBatch__keys) == sorted(keys)
    assert set(batch._PaddedBatch__padded_keys) == set(expected._PaddedBatch__padded_keys)
    assert set(batch._PaddedBatch__device_prep_keys) == set(expected._PaddedBatch__device_prep_keys)
    for key in keys:
        ours, theirs = batch[key], expected[key]
        assert type(ours) is type(theirs)
        if isinstance(theirs, tuple | torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs


class TestItem:
    def test_takes_and_provides_what_it_is_told(self, made):
        dataset = DynamicItemDataset({"a": {"utt": "utt-3"}, "b": {"utt": "utt-7"}})
        dataset.add_dynamic_item(item(made.cache("codec"), takes="utt", provides="codes"))
        dataset.add_dynamic_item(lambda codes: codes[:, 0].long(), takes="codes", provides="first")
        dataset.set_output_keys(["first"])
        assert np.array_equal(dataset[1]["first"].numpy(), made.codes["utt-7"][:, 0])

    def test_reads_several_versions_of_a_dataset_and_crops(self, made):
        dataset = DynamicItemDataset({id_: {"x": 1} for id_ in made.rows})
        dataset.add_dynamic_item(item(made.both(crop=featcache.Crop(frames=8, where="start"))))
        dataset.set_output_keys(["id", "codes", "fbank"])
        for row in dataset:
            assert np.array_equal(row["fbank"].numpy(), made.fbank[row["id"]][:8])
            assert np.array_equal(row["codes"].numpy(), made.codes[row["id"]][:6])

    def test_is_shared_by_filtered_datasets(self, made, recipe):
        some = recipe.filtered_sorted(
            sort_key="duration", select_n=4, key_max_value={"duration": 0.3}
        )
        (ours,), (theirs,) = recipe.pipeline.dynamic_items, some.pipeline.dynamic_items
        assert ours is not theirs
        assert ours.func.__self__ is theirs.func.__self__
        assert all(np.array_equal(row["feats"].numpy(), made.fbank[row["id"]]) for row in some)
        lengths = [len(row["feats"]) for row in some]
        assert lengths == sorted(lengths)
        assert len(lengths) == 4

    def test_what_is_not_there_is_said(self, made):
        with pytest.raises(MissingItemError, match="utt-77"):
            item(made.cache()).func("utt-77")
        with pytest.raises(
            MissingItemError, match="in the cache, but not in the dataset given: utt-0"
        ):
            item(made.dataset()).func("utt-0")

    def test_provides_is_for_one_version(self, made):
        with pytest.raises(
            ArgumentError, match="provides is 'x', but the dataset's versions have names"
        ):
            item(made.both(), provides="x")


class TestDataset:
    def test_has_all_that_the_dataset_has(self, made):
        dataset = made.both()
        rows = to_dynamic_item_dataset(dataset)
        assert rows.data_ids == list(made.rows)
        for row, expected in zip(rows, dataset, strict=True):
            features, num_frames = expected.pop("features"), row.pop("num_frames")
            assert num_frames == len(features["fbank"])
            duration = row.pop("duration")
            assert duration == made.fbank[row["id"]].shape[0] / 100
            assert expected.pop("duration") == duration or not made.rows[row["id"]]["duration"]
            assert all(torch.equal(row.pop(name), features[name]) for name in ("fbank", "codes"))
            assert row == expected

    def test_without_a_manifest_has_the_caches_utterances(self, made):
        rows = to_dynamic_item_dataset(made.cache(), provides="x")
        assert list(rows[0]) == ["id", "x", "num_frames"]
        assert [len(row["x"]) for row in rows] == made.cache().lengths.tolist()

    def test_empty_cells_of_start_and_duration_are_filled(self, made, tmp_path):
        """They stand for the whole file: SpeechBrain sorts and filters by seconds, and
        would lose what is NaN."""
        (tmp_path / "m.csv").write_text("id,start,duration\nutt-3,,\nutt-7,1.5,0.25\n")
        rows = to_dynamic_item_dataset(featcache.FeatureDataset(made.cache(), tmp_path / "m.csv"))
        seconds = len(made.fbank["utt-3"]) / 100
        assert [(row["start"], row["duration"]) for row in rows] == [(0, seconds), (1.5, 0.25)]
        assert len(rows.filtered_sorted(sort_key="duration", key_max_value={"duration": 60})) == 2

    def test_refuses_columns_that_would_hide_something(self, made, tmp_path):
        (tmp_path / "m.csv").write_text("id,num_frames,feats\nutt-3,4,5\n")
        dataset = featcache.FeatureDataset(made.cache(), tmp_path / "m.csv")
        with pytest.raises(ArgumentError, match="the columns 'num_frames', 'feats' would hide"):
            to_dynamic_item_dataset(dataset)

    def test_dynamic_batches_by_length(self, made):
        rows = to_dynamic_item_dataset(made.dataset())
        sampler = DynamicBatchSampler(
            rows, 80, num_buckets=3, length_func=lambda row: row["num_frames"]
        )
        loader = SaveableDataLoader(
            without_features(rows), batch_sampler=sampler, collate_fn=Collate(made.dataset())
        )
        seen = []
        for batch in loader:
            assert batch.feats.data.shape[:2] == (len(batch), max(batch.num_frames))
            seen += batch.id
        assert sorted(seen) == sorted(made.rows)


class TestCollate:
    @given(data=st.data(), size=st.integers(1, 12))
    def test_equals_padded_batch_of_any_utterances(self, made, data, size):
        dataset = made.both() if data.draw(st.booleans(), "both") else made.dataset()
        rows = to_dynamic_item_dataset(dataset)
        positions = data.draw(
            st.lists(st.integers(0, 29), min_size=size, max_size=size), "positions"
        )
        expected = PaddedBatch([rows[position] for position in positions])
        bare = without_features(rows)
        assert_alike(Collate(dataset)([bare[position] for position in positions]), expected)

    def test_hands_options_on(self, made):
        def with_labels(rows):
            rows.add_dynamic_item(
                lambda digit: torch.arange(digit + 1), takes="digit", provides="labels"
            )
            rows.set_output_keys(["id", "labels", "feats"])
            return rows

        options = {"per_key_padding_kwargs": {"labels": {"value": -100}}, "padded_keys": ["labels"]}
        rows = with_labels(to_dynamic_item_dataset(made.dataset()))
        options_of_theirs = {**options, "padded_keys": ["labels", "feats"]}
        expected = PaddedBatch([rows[position] for position in range(9)], **options_of_theirs)
        bare = without_features(rows)
        assert_alike(
            Collate(made.cache(), **options)([bare[position] for position in range(9)]), expected
        )

    def test_pads_as_the_dataset_says(self, made):
        rows = without_features(to_dynamic_item_dataset(made.dataset()))
        batch = Collate(made.dataset(padding_value=-7))([rows[0], rows[1], rows[2]])
        for features, id_ in zip(batch.feats.data, batch.id, strict=True):
            assert (features[len(made.fbank[id_]) :] == -7).all()

    def test_batches_move_and_are_unpacked(self, made, recipe):
        bare = without_features(recipe)
        batch = Collate(made.cache())([bare[position] for position in range(5)]).to(
            dtype=torch.float64
        )
        assert batch.feats.data.dtype == batch.feats.lengths.dtype == torch.float64
        ids, speakers, (features, lengths) = batch
        assert ids == bare.data_ids[:5]
        assert len(speakers) == len(features) == len(lengths) == batch.batchsize == 5

    def test_refuses_examples_that_have_features_or_no_ids(self, made, recipe):
        with pytest.raises(ArgumentError, match="examples have 'feats' already, read one by one"):
            Collate(made.cache())([recipe[0], recipe[1]])
        with pytest.raises(
            ArgumentError, match="examples have no 'utt': include it in set_output_keys"
        ):
            Collate(made.cache(), takes="utt")([{"id": "utt-3"}])


class TestLoaders:
    def test_resume_where_a_checkpoint_was_taken(self, made, recipe, tmp_path):
        def load():
            loader = make_dataloader(
                without_features(recipe), batch_size=4, collate_fn=Collate(made.cache())
            )
            return loader, Checkpointer(tmp_path / "save", {"loader": loader})

        loader, checkpointer = load()
        rest = []
        for number, batch in enumerate(loader):
            if number > 2:
                rest.append(batch)
            if number == 2:
                checkpointer.save_checkpoint(end_of_epoch=False)
        loader, checkpointer = load()
        checkpointer.recover_if_possible()
        for batch, other in zip(loader, rest, strict=True):
            assert_alike(batch, other)

    @pytest.mark.filterwarnings(
        "ignore:This process:DeprecationWarning"
    )  # which Python 3.12 gives of any fork
    def test_workers_also_of_what_is_pickled_as_for_spawned_ones(self, made):
        dataset = made.dataset()
        rows = to_dynamic_item_dataset(dataset)
        expected = list(make_dataloader(rows, batch_size=4))
        rows, collate = pickle.loads(pickle.dumps((rows, Collate(dataset))))
        for keys, options in ((["id", "feats"], {}), (["id"], {"collate_fn": collate})):
            rows.set_output_keys(keys)
            loader = make_dataloader(
                rows, batch_size=4, num_workers=1, multiprocessing_context="fork", **options
            )
            for batch, other in zip(loader, expected, strict=True):
                assert batch.id == other.id
                assert torch.equal(batch.feats.data, other.feats.data)
                assert torch.equal(batch.feats.lengths, other.feats.lengths)
