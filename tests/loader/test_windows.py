"""With windows, an epoch needs the shards of one window at a time, and each of them once."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from make_cache import make_features, make_version

import featcache
from featcache import BucketBatchSampler
from featcache.errors import ArgumentError


@st.composite
def corpora(draw):
    """Lengths, and the shard of each utterance: all in some shards, in any order."""
    shards = draw(st.lists(st.integers(0, 9), min_size=1, max_size=80))
    return np.array(draw(st.lists(st.integers(1, 60), min_size=len(shards), max_size=len(shards)))), np.array(shards)


def ranks_of(lengths, world_size, **rules):
    return [list(BucketBatchSampler(lengths, rank=rank, world_size=world_size, **rules)) for rank in range(world_size)]


def shards_of_rounds(ranks, shards):
    """The shards that each round over the ranks needs."""
    return [set(shards[np.concatenate(batches).astype(int)].tolist()) for batches in zip(*ranks, strict=True)]


@settings(deadline=None)
@given(corpora(), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 2**40))
def test_every_utterance_once_and_no_more_shards_at_a_time_than_asked(corpus, most, world_size, shuffle, seed):
    lengths, shards = corpus
    rules = {"max_frames": 200, "seed": seed, "shuffle": shuffle, "shards": shards, "shards_in_memory": most}
    ranks = ranks_of(lengths, world_size, **rules)
    assert sorted(at for batches in ranks for batch in batches for at in batch) == [*range(len(lengths))]
    assert all(lengths[batch].max() * len(batch) <= 200 for batches in ranks for batch in batches if batch)
    needed, held = shards_of_rounds(ranks, shards), set()
    done = set()
    for number, now in enumerate(needed):
        later = set().union(*needed[number:])
        done |= held - later
        held = (held | now) - done
        assert not now & done  # a shard that was let go of is never needed again
        assert len(held) <= most


@settings(deadline=None)
@given(corpora(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.data())
def test_what_is_left_of_an_epoch_is_taken_window_by_window_too(corpus, most, before, after, data):
    lengths, shards = corpus
    rules = {"batch_size": 4, "shards": shards, "shards_in_memory": most}
    first = [BucketBatchSampler(lengths, rank=rank, world_size=before, **rules) for rank in range(before)]
    rounds = data.draw(st.integers(0, len(first[0])))
    passes = [iter(sampler) for sampler in first]
    seen = [[next(each) for each in passes] for _ in range(rounds)]
    state = first[0].state_dict()
    resumed = [BucketBatchSampler(lengths, rank=rank, world_size=after, **rules) for rank in range(after)]
    for sampler in resumed:
        sampler.load_state_dict(state)
    rest = [list(sampler) for sampler in resumed]
    every = [at for batches in (*seen, *rest) for batch in batches for at in batch]
    assert sorted(every) == [*range(len(lengths))]
    if before == after:
        assert rest == [list(each) for each in passes]
    needed = [set(shards[np.concatenate(batches).astype(int)].tolist()) for batches in seen]
    needed += shards_of_rounds(rest, shards)
    for number in range(len(needed)):
        begun = set().union(*needed[: number + 1])
        assert len(begun & set().union(*needed[number:])) <= most


def test_windows_differ_between_epochs_and_are_of_even_sizes():
    lengths, shards = np.full(900, 10), np.repeat(np.arange(9), 100)
    sampler = BucketBatchSampler(lengths, batch_size=10, shards=shards, shards_in_memory=4)
    firsts = []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        windows = [set(shards[np.concatenate(batches[first : first + 30])].tolist()) for first in range(0, 90, 30)]
        assert [len(window) for window in windows] == [3, 3, 3]
        firsts.append(frozenset(windows[0]))
    assert len(set(firsts)) > 3


def test_the_shards_of_a_dataset_are_those_that_hold_its_utterances(tmp_path):
    version = make_version(tmp_path, *(make_features(5, prefix=letter) for letter in "abcd"))
    cache = featcache.open(version.path)
    rows = "\n".join(f"{cache.ids[at]},{at % 2}" for at in reversed(range(20)))
    (tmp_path / "m.csv").write_text(f"id,half\n{rows}\n")
    dataset = featcache.FeatureDataset(cache, tmp_path / "m.csv", where={"half": "1"})
    of_id = {id_: name for name in version.shard_names() for id_ in version.shard(name).table.ids}
    assert [cache.index.shards[shard] for shard in dataset.shards] == [of_id[id_] for id_ in dataset.ids]
    assert len(dataset.shards) == 10
    batches = BucketBatchSampler(dataset.lengths, batch_size=2, shards=dataset.shards, shards_in_memory=1)
    assert all(len(set(dataset.shards[batch].tolist())) == 1 for batch in batches)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": [0, 0, 1]}, "go together: give both, shards=dataset.shards, or neither"),
        ({"shards_in_memory": 2}, "go together"),
        ({"shards": [0, 1], "shards_in_memory": 2}, r"shards is int64 \[2\]: it must be the number of a shard"),
        ({"shards": [0, -1, 1], "shards_in_memory": 2}, "it must be the number of a shard, from 0, for each of the 3"),
        ({"shards": [0.5, 1, 1], "shards_in_memory": 2}, "shards is float64"),
        ({"shards": [0, 0, 1], "shards_in_memory": 0}, "shards_in_memory"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        BucketBatchSampler([3, 4, 5], batch_size=2, **arguments)


def test_a_state_of_other_shards_is_refused():
    state = BucketBatchSampler([3, 4, 5], batch_size=1, shards=[0, 0, 1], shards_in_memory=1).state_dict()
    for other in ({}, {"shards": [0, 1, 1], "shards_in_memory": 1}):
        with pytest.raises(ArgumentError, match="the state is for other utterances than these 3, or for other shards"):
            BucketBatchSampler([3, 4, 5], batch_size=1, **other).load_state_dict(state)
