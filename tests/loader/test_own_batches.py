"""featcache.DataLoader without a sampler: the batches that it makes itself, epochs,
ranks, resuming, transforms."""

import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import featcache
from featcache import BucketBatchSampler, Crop, DataLoader, FeatureDataset


@pytest.fixture(scope="module")
def dataset(folder):
    return FeatureDataset(featcache.open(folder), crop=Crop(frames=4))


def ids(loader):
    return [batch["ids"] for batch in loader]


def test_are_those_of_a_sampler_with_these_arguments(dataset):
    batching = {"batch_size": 4, "seed": 5, "drop_last": True, "world_size": 2, "rank": 1}
    sampler = BucketBatchSampler(dataset.lengths, **batching)
    loader = DataLoader(dataset, **batching)
    assert len(loader) == len(sampler)
    assert ids(loader) == [[dataset.ids[row] for row in rows] for rows in sampler]
    windows = {"max_frames": 40, "shards_in_memory": 1, "shuffle": False}
    sampler = BucketBatchSampler(dataset.lengths, shards=dataset.shards, **windows)
    assert ids(DataLoader(dataset, **windows)) == [
        [dataset.ids[row] for row in rows] for rows in sampler
    ]


def test_a_pass_after_a_whole_one_is_of_the_next_epoch(dataset):
    sampler = BucketBatchSampler(dataset.lengths, batch_size=4)
    given_one, own = DataLoader(dataset, sampler), DataLoader(dataset, batch_size=4)
    epochs = []
    for epoch in range(3):
        given_one.set_epoch(epoch)
        epochs.append(ids(given_one))
    assert [ids(own) for _ in range(3)] == epochs
    assert epochs[0] != epochs[1]
    assert ids(given_one) == epochs[2]  # a sampler that is given is where its owner has it
    own.set_epoch(0)
    assert ids(own) == epochs[0]
    own.set_epoch(0)  # said once more, after a whole pass
    next(iter(own))  # a look is no pass
    assert ids(own) == epochs[0]
    own.batch_sampler.set_epoch(1)  # as Lightning does
    assert ids(own) == epochs[1]


@given(st.integers(0, 25), st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_every_utterance_once_in_each_epoch_over_all_ranks_also_if_resumed(
    dataset, steps, size, ranks, shuffle
):
    def loaders():
        options = {"batch_size": size, "shuffle": shuffle, "world_size": ranks, "prefetch": 1}
        return [DataLoader(dataset, rank=rank, **options) for rank in range(ranks)]

    seen, state = [], None
    for loader in loaders():
        ran = 0
        while ran < steps:  # training of some steps, over one epoch or several
            epoch = []
            for batch in loader:
                epoch += batch["ids"]
                ran += 1
                if ran == steps:
                    break
        state = loader.state_dict() if steps else None
        seen += epoch if steps else []
    for loader in loaders():
        if state is not None:
            loader.load_state_dict(state)
        seen += [id_ for batch in loader for id_ in batch["ids"]]
    assert sorted(seen) == sorted(dataset.ids)


def test_a_transform_makes_of_each_batch_what_training_gets_ahead_of_it(dataset):
    threads = set()

    def transform(batch):
        threads.add(threading.current_thread())
        assert batch["features"].dtype == torch.float32
        batch["features"] += 1
        return batch["features"], {"lengths": batch["lengths"], "ids": batch["ids"]}

    plain = DataLoader(dataset, batch_size=4, dtype=torch.float32)
    changed = DataLoader(dataset, batch_size=4, dtype=torch.float32, transform=transform)
    for batch, (features, others) in zip(plain, changed, strict=True):
        assert torch.equal(features, batch["features"] + 1)
        assert others["ids"] == batch["ids"]
    assert threading.current_thread() not in threads
