"""The batches of an epoch: within their limits, in an order that can be resumed, for
ranks, in windows of shards."""

import copy
import hashlib
import json
from itertools import islice, pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import assume, given
from make_cache import make_features, make_version

import featcache
from featcache import BucketBatchSampler
from featcache.errors import ArgumentError, FeatcacheError
from featcache.loader import sampler as module


def all_ranks(lengths, world_size, **rules):
    return [
        list(BucketBatchSampler(lengths, rank=rank, world_size=world_size, **rules))
        for rank in range(world_size)
    ]


def positions(ranks):
    return sorted(position for batches in ranks for batch in batches for position in batch)


def padding(lengths, batches):
    """Padded frames for each real one."""
    return sum(len(batch) * max(lengths[batch]) for batch in batches) / sum(lengths) - 1


def read_prompts(count):
    """Lengths as of read prompts, 5 s on average, at 100 frames a second."""
    return (
        np.random.default_rng(0).lognormal(np.log(480), 0.4, count).clip(80, 3000).astype(np.int64)
    )


@st.composite
def rules(draw, lengths):
    """What decides an epoch's batches, but for the world size."""
    longest = max(1, *lengths)
    max_frames = draw(st.none() | st.integers(longest, 6 * longest), "max_frames")
    batch_size = draw(
        st.integers(1, 9) if max_frames is None else st.none() | st.integers(1, 9), "batch_size"
    )
    return {
        "max_frames": max_frames,
        "batch_size": batch_size,
        "shuffle": draw(st.booleans(), "shuffle"),
        "seed": draw(st.integers(0, 2**70), "seed"),
    }


many_lengths = st.lists(st.integers(0, 60), min_size=1, max_size=60)
world_sizes = st.integers(1, 7)


def altered(rules=None, **part):
    """A state over three utterances that no sampler ever gave."""
    state = BucketBatchSampler([3, 4, 5], batch_size=2).state_dict()
    state["parts"][0] |= part
    state["parts"][0]["rules"] |= rules or {}
    return state


class TestEpoch:
    @given(data=st.data(), lengths=many_lengths, world_size=world_sizes)
    def test_has_every_utterance_once_in_batches_within_budget_as_many_for_each_rank(
        self, data, lengths, world_size
    ):
        given_rules = data.draw(rules(lengths))
        ranks = all_ranks(lengths, world_size, **given_rules)
        assert positions(ranks) == list(range(len(lengths)))
        assert len({len(batches) for batches in ranks}) == 1
        assert len(BucketBatchSampler(lengths, world_size=world_size, **given_rules)) == len(
            ranks[0]
        )
        every = [batch for batches in ranks for batch in batches]
        for batch in filter(None, every):
            assert len(batch) <= (given_rules["batch_size"] or len(lengths))
            assert len(batch) * max(lengths[position] for position in batch) <= (
                given_rules["max_frames"] or 10**9
            )
        if [] in every:  # only where no other batch could be split, and in the last round
            assert every.count([]) < world_size
            assert max(map(len, every)) == 1
            assert all(batch for batches in ranks for batch in batches[:-1])

    @given(data=st.data(), lengths=many_lengths, world_size=world_sizes)
    def test_drop_last_leaves_out_less_than_a_round_and_has_no_empty_batch(
        self, data, lengths, world_size
    ):
        given_rules = data.draw(rules(lengths))
        whole = list(BucketBatchSampler(lengths, **given_rules))
        ranks = all_ranks(lengths, world_size, drop_last=True, **given_rules)
        seen = positions(ranks)
        assert len(set(seen)) == len(seen)
        assert len({len(batches) for batches in ranks}) == 1
        assert all(batch for batches in ranks for batch in batches)
        if given_rules["max_frames"] is None:
            size = given_rules["batch_size"]
            assert {len(batch) for batches in ranks for batch in batches} <= {size}
            assert len(lengths) - len(seen) == len(lengths) % (size * world_size)
        else:
            assert len(ranks[0]) == len(whole) // world_size

    def test_drop_last_leaves_out_others_in_each_epoch(self):
        given_rules = {"batch_size": 16, "world_size": 4, "drop_last": True}
        samplers = [
            BucketBatchSampler(read_prompts(250), rank=rank, **given_rules) for rank in range(4)
        ]
        left_out = np.zeros(250, int)
        for epoch in range(60):
            for sampler in samplers:
                sampler.set_epoch(epoch)
            left_out += 1
            left_out[positions(samplers)] -= 1
        assert left_out.sum() == 60 * (250 - 3 * 4 * 16)
        assert left_out.max() < 30

    def test_batches_hold_as_many_as_the_budget_allows(self):
        lengths = np.full(103, 10)
        sizes = [len(batch) for batch in BucketBatchSampler(lengths, max_frames=109, shuffle=False)]
        assert sizes == [10] * 10 + [3]
        assert len(BucketBatchSampler(lengths, max_frames=10**6)) == 1

    def test_uneven_batches_are_halved_the_largest_first(self):
        lengths = np.array([50, 50, 25, 25, 25, 25, 10, 10, 10, 10, 10, 10])
        ranks = all_ranks(lengths, 4, max_frames=100, shuffle=False)
        assert ranks == [[[0, 1]], [[2, 3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]

    def test_without_shuffling_the_longest_come_first_in_every_epoch(self):
        lengths = read_prompts(300)
        sampler = BucketBatchSampler(lengths, batch_size=10, shuffle=False, seed=3)
        batches = list(sampler)
        longest = [max(lengths[batch]) for batch in batches]
        assert longest[0] == max(lengths)
        assert all(first * 1.001 >= second for first, second in pairwise(longest))
        sampler.set_epoch(5)
        assert list(sampler) == batches

    def test_the_batches_of_one_step_are_alike_in_length(self):
        lengths = read_prompts(4000)
        for step in zip(*all_ranks(lengths, 4, max_frames=20_000), strict=True):
            longest = [max(lengths[batch]) for batch in step]
            # the very shortest and longest are far apart
            assert min(longest) > 0.5 * max(longest)
        means = [
            np.mean(lengths[batch]) for batch in BucketBatchSampler(lengths, max_frames=20_000)
        ]
        assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.3  # and other steps are not

    @pytest.mark.parametrize("rules", [{"max_frames": 20_000}, {"batch_size": 32}])
    def test_padding_is_little(self, rules):
        lengths = read_prompts(10_000)
        at_random = np.array_split(np.random.default_rng(0).permutation(10_000), 300)
        assert padding(lengths, at_random) > 0.9
        for world_size in (1, 8):
            ranks = all_ranks(lengths, world_size, **rules)
            assert padding(lengths, [batch for batches in ranks for batch in batches]) < 0.03


class TestOrder:
    def test_is_the_same_on_every_machine_and_with_every_numpy(self):
        lengths = [(7 * number) % 101 + 1 for number in range(500)]
        sampler = BucketBatchSampler(lengths, max_frames=1000, seed=2**40, rank=1, world_size=3)
        sampler.set_epoch(4)
        assert (
            hashlib.sha256(json.dumps(list(sampler)).encode()).hexdigest()[:16]
            == "a63887413a7a1b41"
        )

    @pytest.mark.parametrize(
        "make", [list, np.array, torch.tensor, lambda lengths: np.array(lengths, np.uint16)]
    )
    def test_does_not_depend_on_how_lengths_are_given(self, make):
        lengths = read_prompts(200).tolist()
        assert list(BucketBatchSampler(make(lengths), batch_size=8)) == list(
            BucketBatchSampler(lengths, batch_size=8)
        )

    @given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
    def test_is_another_one_in_another_epoch_or_with_another_seed(self, epoch, other_epoch, seed):
        assume(epoch != other_epoch)
        lengths = read_prompts(2000)

        def batches(epoch, seed):
            sampler = BucketBatchSampler(lengths, max_frames=20_000, seed=seed)
            sampler.set_epoch(epoch)
            return list(sampler)

        here = batches(epoch, seed)
        assert len(here) > 40
        for other in (batches(other_epoch, seed), batches(epoch, seed + 1)):
            same = set(map(frozenset, here)) & set(map(frozenset, other))
            assert len(same) <= 0.1 * len(here)  # the very longest have no others to be with

    def test_shuffles_utterances_of_one_length_wholly(self):
        sampler = BucketBatchSampler(np.full(1000, 100), batch_size=10)
        meetings = np.zeros((1000, 1000), int)
        for epoch in range(20):
            sampler.set_epoch(epoch)
            for batch in sampler:
                meetings[np.ix_(batch, batch)] += 1
        np.fill_diagonal(meetings, 0)
        assert meetings.max() <= 5
        assert np.abs(np.corrcoef(np.arange(999), np.diagonal(meetings, 1))[0, 1]) < 0.2


def consume(lengths, world_size, steps, state, ahead=0, **rules):
    """What all ranks see in some steps after a state, and their states then; `ahead` more
    batches have been taken, as torch's workers do."""
    seen, states = [], []
    for rank in range(world_size):
        sampler = BucketBatchSampler(lengths, rank=rank, world_size=world_size, **rules)
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        had = sum(part["rounds"] for part in state["parts"]) if state is not None else 0
        left = len(sampler) - had
        batches = list(islice(sampler, None if steps is None else steps + ahead))
        assert len(batches) == (left if steps is None else min(steps + ahead, left))
        seen.append(batches[:steps])
        states.append(sampler.state_dict(consumed=len(seen[-1])) if ahead else sampler.state_dict())
    assert all(state == states[0] for state in states)
    return seen, states[0]


@pytest.fixture
def sampler():
    return BucketBatchSampler(read_prompts(300), batch_size=10)


class TestResume:
    @given(
        data=st.data(),
        lengths=many_lengths,
        legs=st.lists(st.tuples(world_sizes, st.integers(0, 5)), max_size=4),
    )
    def test_sees_each_exactly_once_with_any_ranks_and_any_rules(self, data, lengths, legs):
        state, seen = None, []
        for world_size, steps in [*legs, (data.draw(world_sizes), None)]:
            ahead = data.draw(st.integers(0, 3), "ahead")
            ranks, state = consume(
                lengths, world_size, steps, state, ahead, **data.draw(rules(lengths))
            )
            assert len({len(batches) for batches in ranks}) == 1
            seen += ranks
        assert positions(seen) == list(range(len(lengths)))
        assert positions(consume(lengths, 2, None, state, batch_size=3)[0]) == []

    @given(
        data=st.data(),
        lengths=many_lengths,
        world_size=world_sizes,
        steps=st.integers(0, 8),
        epoch=st.integers(0, 9),
    )
    def test_with_the_same_rules_gives_the_batches_that_would_follow(
        self, data, lengths, world_size, steps, epoch
    ):
        given_rules = {**data.draw(rules(lengths)), "drop_last": data.draw(st.booleans())}
        sampler = BucketBatchSampler(lengths, world_size=world_size, **given_rules)
        sampler.set_epoch(epoch)
        batches = iter(sampler)
        list(islice(batches, steps))
        state = sampler.state_dict()
        resumed = BucketBatchSampler(lengths, world_size=world_size, **given_rules)
        resumed.load_state_dict(state)
        assert resumed.epoch == epoch
        assert resumed.state_dict() == state
        resumed.set_epoch(epoch)  # as a training loop does
        rest = list(batches)
        assert list(resumed) == rest
        assert len(resumed) == len(sampler)  # trainers count from the epoch's beginning
        assert list(resumed) == list(sampler)  # the pass after that is a whole one
        resumed.set_epoch(epoch + 1)
        sampler.set_epoch(epoch + 1)
        assert list(resumed) == list(sampler)

    def test_drop_last_leaves_nothing_for_later_at_the_end_of_an_epoch(self):
        sampler = BucketBatchSampler(read_prompts(103), batch_size=10, world_size=3, drop_last=True)
        list(sampler)
        other = BucketBatchSampler(read_prompts(103), batch_size=10, world_size=2)
        other.load_state_dict(sampler.state_dict())
        assert list(other) == []

    def test_counts_what_training_had_where_that_is_said(self, sampler):
        batches = iter(sampler)
        first = list(islice(batches, 12))
        resumed = BucketBatchSampler(read_prompts(300), batch_size=10)
        resumed.load_state_dict(sampler.state_dict(consumed=7))
        assert list(islice(resumed, 5)) == first[7:]
        assert resumed.state_dict(consumed=5) == sampler.state_dict()
        with pytest.raises(
            ArgumentError, match="consumed is 13; this pass has given 12 batches to this rank"
        ):
            sampler.state_dict(consumed=13)

    def test_a_pass_that_was_given_up_does_not_count(self, sampler):
        old = iter(sampler)
        next(old)
        new = iter(sampler)
        next(new)
        list(islice(old, 5))
        resumed = BucketBatchSampler(read_prompts(300), batch_size=10)
        resumed.load_state_dict(sampler.state_dict())
        assert list(resumed) == list(new)

    def test_begins_where_it_was_for_whoever_asks_for_two_iterators(self, sampler):
        rest = iter(sampler)
        list(islice(rest, 4))
        sampler.load_state_dict(sampler.state_dict())
        first, second = iter(sampler), iter(sampler)
        assert list(zip(first, second, strict=True)) == [(batch, batch) for batch in rest]

    def test_survives_torch_save_and_a_copy_of_the_sampler(self, sampler, tmp_path):
        rest = iter(sampler)
        list(islice(rest, 4))
        torch.save(sampler.state_dict(), tmp_path / "state.pt")
        resumed = copy.deepcopy(sampler)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert list(resumed) == list(rest)

    @pytest.mark.parametrize("batch_size", [2, 3])
    def test_a_state_of_more_rounds_than_there_are_is_refused_as_soon_as_batches_are_wanted(
        self, batch_size
    ):
        sampler = BucketBatchSampler([3, 4, 5], batch_size=batch_size)
        sampler.load_state_dict(altered(rounds=3))
        for ask in (len, list):
            with pytest.raises(ArgumentError, match="not the state of a BucketBatchSampler"):
                ask(sampler)

    @pytest.mark.parametrize(
        ("shards", "lengths", "other_shards"),
        [
            (None, [3, 4, 5, 6], None),
            (None, [3, 5, 4], None),
            ([0, 0, 1], [3, 4, 5], [0, 1, 1]),
            ([0, 0, 1], [3, 4, 5], None),
        ],
    )
    def test_a_state_over_other_utterances_or_shards_is_refused(
        self, shards, lengths, other_shards
    ):
        def sampler(lengths, shards):
            return BucketBatchSampler(
                lengths, batch_size=2, shards=shards, shards_in_memory=shards and 1
            )

        what = f"the state is for other utterances than these {len(lengths)}, or for other shards"
        with pytest.raises(ArgumentError, match=what):
            sampler(lengths, other_shards).load_state_dict(sampler([3, 4, 5], shards).state_dict())

    @pytest.mark.parametrize(
        "state",
        [
            {},
            None,
            [],
            {"lengths": "", "epoch": 0, "parts": [{"rules": {"a": 1}, "rounds": 0}]},
            {"lengths": "", "epoch": 0, "parts": 3},
            altered(rules={"max_frames": None, "batch_size": None}),
            altered(rules={"world_size": 0}),
            altered(rounds=-1),
        ],
    )
    def test_what_is_no_state_is_refused(self, state):
        with pytest.raises(ArgumentError, match="not the state of a BucketBatchSampler"):
            BucketBatchSampler([3, 4, 5], batch_size=2).load_state_dict(state)


WINDOWS = {"batch_size": 2, "shards_in_memory": 2}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "no limit: give max_frames, batch_size or both"),
        ({"batch_size": 0}, "batch_size is 0: it must be a whole number, 1 or more"),
        ({"batch_size": 2.5}, "batch_size is 2.5: it must be a whole number, 1 or more"),
        ({"max_frames": -1}, "max_frames is -1: it must be a whole number, 1 or more"),
        (
            {"max_frames": 6},
            "max_frames is 6, and 2 of 4 utterances are longer: the longest has 9 "
            "frames, at position 2",
        ),
        ({"batch_size": 2, "seed": -1}, "seed is -1"),
        ({"batch_size": 2, "rank": -1}, "rank is -1"),
        (
            {"batch_size": 2, "rank": 2, "world_size": 2},
            "rank is 2; with world_size=2 ranks are 0 to 1",
        ),
        ({"batch_size": 2, "world_size": 0}, "world_size is 0"),
        ({"batch_size": 2, "lengths": []}, "lengths is empty"),
        ({"batch_size": 2, "lengths": [3, -1]}, "lengths has -1 at 1"),
        (
            {"batch_size": 2, "lengths": [1.5, 2.0]},
            r"lengths is float64 \[2\]: it must be one integer for each",
        ),
        ({"batch_size": 2, "lengths": [[1, 2]]}, r"lengths is int64 \[1, 2\]"),
        (
            {"batch_size": 2, "shards": [0, 0, 1, 1]},
            "go together: give both, shards=dataset.shards, or neither",
        ),
        ({"batch_size": 2, "shards_in_memory": 2}, "go together"),
        (WINDOWS | {"shards": [0, 1]}, r"shards is int64 \[2\]: it must be the number of a shard"),
        (
            WINDOWS | {"shards": [0, -1, 1, 1]},
            "it must be the number of a shard, from 0, for each of the 4",
        ),
        (WINDOWS | {"shards": [0.5, 1, 1, 1]}, "shards is float64"),
        (WINDOWS | {"shards": [0, 0, 1, 1], "shards_in_memory": 0}, "shards_in_memory"),
    ],
)
def test_arguments_that_do_not_hold_together_are_one_line(arguments, what):
    with pytest.raises(FeatcacheError, match=what) as caught:
        BucketBatchSampler(**{"lengths": [3, 7, 9, 4], **arguments})
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


@st.composite
def corpora(draw):
    """Lengths, and the shard of each utterance: all in some shards, in any order."""
    shards = draw(st.lists(st.integers(0, 9), min_size=1, max_size=80))
    return np.array(
        draw(st.lists(st.integers(1, 60), min_size=len(shards), max_size=len(shards)))
    ), np.array(shards)


@given(corpora(), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_every_utterance_once_and_no_more_shards_at_once_than_asked_also_if_resumed(
    corpus, most, before, after, data
):
    lengths, shards = corpus
    limit = data.draw(st.sampled_from([{"max_frames": 200}, {"batch_size": 4}]), "limit")
    shuffle, seed = data.draw(st.booleans(), "shuffle"), data.draw(st.integers(0, 2**40), "seed")
    rules = {**limit, "shuffle": shuffle, "seed": seed, "shards": shards, "shards_in_memory": most}
    first = [
        BucketBatchSampler(lengths, rank=rank, world_size=before, **rules) for rank in range(before)
    ]
    rounds = data.draw(st.integers(0, len(first[0])), "rounds")
    passes = [iter(sampler) for sampler in first]
    seen = [[next(each) for each in passes] for _ in range(rounds)]
    state = first[0].state_dict()
    resumed = [
        BucketBatchSampler(lengths, rank=rank, world_size=after, **rules) for rank in range(after)
    ]
    for sampler in resumed:
        sampler.load_state_dict(state)
    rest = [list(sampler) for sampler in resumed]
    assert positions([*seen, *rest]) == [*range(len(lengths))]
    if before == after:
        assert rest == [list(each) for each in passes]
    every = [*seen, *zip(*rest, strict=True)]
    if "max_frames" in limit:
        assert all(
            lengths[batch].max() * len(batch) <= 200
            for batches in every
            for batch in batches
            if batch
        )
    needed = [set(shards[np.concatenate(batches).astype(int)].tolist()) for batches in every]
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
        windows = [
            set(shards[np.concatenate(batches[first : first + 30])].tolist())
            for first in range(0, 90, 30)
        ]
        assert [len(window) for window in windows] == [3, 3, 3]
        firsts.append(frozenset(windows[0]))
    assert len(set(firsts)) > 3


def test_the_shards_of_a_dataset_are_those_that_hold_its_utterances(tmp_path):
    version = make_version(tmp_path, *(make_features(5, prefix=letter) for letter in "abcd"))
    cache = featcache.open(version.path)
    rows = [{"id": cache.ids[at], "half": at % 2} for at in reversed(range(20))]
    dataset = featcache.FeatureDataset(cache, rows, where={"half": 1})
    of_id = {id_: name for name in version.shard_names() for id_ in version.shard(name).table.ids}
    assert [cache.index.shards[shard] for shard in dataset.shards] == [
        of_id[id_] for id_ in dataset.ids
    ]
    assert len(dataset.shards) == 10
    batches = BucketBatchSampler(
        dataset.lengths, batch_size=2, shards=dataset.shards, shards_in_memory=1
    )
    assert all(len(set(dataset.shards[batch].tolist())) == 1 for batch in batches)


@given(st.data(), many_lengths, world_sizes, st.integers(0, 8), st.integers(1, 11))
def test_chunks_decide_nothing(data, lengths, world_size, steps, chunk):
    first_rules, other_rules = data.draw(rules(lengths)), data.draw(rules(lengths))
    drop_last = data.draw(st.booleans())

    def epoch():
        """Its beginning, and what is left of it, by other rules."""
        seen, state = consume(lengths, world_size, steps, None, **first_rules, drop_last=drop_last)
        return seen, consume(lengths, world_size, None, state, **other_rules, drop_last=drop_last)[
            0
        ]

    whole = epoch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", chunk)
        assert epoch() == whole


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{"max_frames": 20_000}, {"batch_size": 64, "drop_last": True}])
def test_a_million_utterances_take_some_twenty_megabytes(rules, traced):
    """And are held as a few arrays; nothing is made of them before batches are wanted."""
    lengths = np.random.default_rng(0).integers(80, 3000, 10**6)

    def make():
        return BucketBatchSampler(lengths, world_size=8, **rules)

    def begin(state):
        sampler = make()
        if state is not None:
            sampler.load_state_dict(state)
        assert next(iter(sampler))
        return sampler

    other = BucketBatchSampler(lengths, world_size=4, **rules)
    half = len(list(other)) // 2
    assert traced(make).peak < 3e6
    for state in (None, other.state_dict(consumed=half)):
        found = traced(lambda: begin(state))  # noqa: B023
        assert found.held < 10e6
        assert found.peak < 25e6
