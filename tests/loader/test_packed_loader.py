"""Batches of whole utterances in rows: what they hold, in which shares, and that training goes
on from any moment with any number of ranks and workers."""

import json
import math
import pickle
from itertools import chain, islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from make_cache import codes_cache, made_cache, make_features

import featcache
from featcache.errors import ArgumentError, FeatcacheWarning
from featcache.spec import Clip

BUDGETS = [61, 64, 65, 127, 128, 129, 509]
SMALL_BUDGETS = [7, 8, 9, 31, 32, 33, 37]  # shorter than the longest utterance


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """Codes `[frames, 4]` of 120 utterances of 1 to 60 frames."""
    folder = tmp_path_factory.mktemp("codes")
    arrays = make_features(120, (4,), "uint16", max_frames=60)
    items = list(arrays.items())
    return made_cache(folder, dict(items[:50]), dict(items[50:]), frame_rate=12.5)


@pytest.fixture(scope="module")
def dataset(codes):
    return featcache.FeatureDataset(codes)


def packed(mixture, **options):
    options = {"tokens": 128, "rows": 4, "overflow": "error", "window": 8} | options
    return featcache.PackedLoader(mixture, **options)


def documents_in(batch):
    """The documents of a batch, as (id, part), with the frames of each, as its tokens say."""
    ids, positions = batch["document_ids"], batch["positions"]
    for number, (id_, part) in enumerate(zip(batch["ids"], batch["parts"].tolist(), strict=True)):
        is_own = ids == number
        rows = {*torch.nonzero(is_own)[:, 0].tolist()}
        assert rows <= {batch["rows"][number].item()}
        assert positions[is_own].tolist() == [*range(int(is_own.sum()))]
        yield (id_, part), batch["features"][is_own]


def all_documents(loader):
    return [document for batch in loader for document in documents_in(batch)]


def names(batches):
    """What each batch holds, and where."""
    return [
        [*zip(batch["ids"], batch["parts"].tolist(), batch["rows"].tolist(), strict=True)]
        for batch in batches
    ]


# What a batch holds


def test_a_batch_holds_whole_utterances_and_says_where(codes, dataset):
    loader = packed(dataset)
    seen = all_documents(loader)
    assert sorted(id_ for (id_, _), _ in seen) == sorted(dataset.ids)
    for (id_, part), frames in seen:
        assert part == 0
        assert frames.dtype == torch.uint16
        np.testing.assert_array_equal(frames, codes[id_])
    for batch in packed(dataset):
        assert batch["features"].shape == (4, 128, 4)
        ids, flat = batch["document_ids"], batch["document_ids"].flatten()
        assert (batch["features"][ids < 0].int() == 0).all()
        assert (batch["positions"][ids < 0] == 0).all()
        assert batch["lengths"].tolist() == [len(codes[id_]) for id_ in batch["ids"]]
        bounds = batch["cu_seqlens"].tolist()
        assert batch["cu_seqlens"].dtype == torch.int32
        assert (bounds[0], bounds[-1]) == (0, 512)
        assert batch["max_seqlen"] == max(np.diff(bounds))
        for begin, end in pairwise(bounds):
            assert len({*flat[begin:end].tolist()}) == 1
            assert begin // 128 == (end - 1) // 128
        assert len(bounds) - 1 == sum((ids[row].diff() != 0).sum().item() + 1 for row in range(4))


def test_padding_codebooks_dtype_and_transform_are_those_of_any_loader(codes):
    dataset = featcache.FeatureDataset(codes, codebooks=2, padding_value=1024)
    loader = packed(dataset, dtype=torch.long, transform=lambda batch: batch | {"seen": True})
    for batch in loader:
        assert batch["seen"]
        assert batch["features"].shape == (4, 128, 2)
        assert batch["features"].dtype == torch.long
        assert (batch["features"][batch["document_ids"] < 0] == 1024).all()
        for (id_, _), frames in documents_in(batch):
            np.testing.assert_array_equal(frames, codes[id_][:, :2])


@pytest.mark.parametrize("options", [{}, {"quantized": True}])
@pytest.mark.parametrize("check", [False, True])
def test_checked_and_quantised_features_are_those_of_the_cache(
    tmp_path, monkeypatch, options, check
):
    made_cache(tmp_path, make_features(40, (5,), "float32"), **options)
    cache = featcache.open(tmp_path, check=check)
    requests, frames_of = [], cache._shards.frames
    monkeypatch.setattr(
        cache._shards, "frames", lambda spans: requests.append(spans) or frames_of(spans)
    )
    loader = packed(featcache.FeatureDataset(cache))
    for (id_, _), frames in all_documents(loader):
        np.testing.assert_array_equal(frames, cache[id_])
    assert len(requests) == len(loader)  # all of a batch at once, which a bucket answers so


def test_columns_come_for_each_document(codes):
    rows = [
        {"id": id_, "speaker": f"s{number % 3}", "gain": number / 2, "text_ids": [number, 1]}
        for number, id_ in enumerate(codes.ids)
    ]
    dataset = featcache.FeatureDataset(codes, rows, classes="speaker")
    for batch in packed(dataset):
        numbers = [int(id_.removeprefix("utt-")) for id_ in batch["ids"]]
        assert batch["speaker"].tolist() == [number % 3 for number in numbers]
        assert batch["gain"].tolist() == [number / 2 for number in numbers]
        assert batch["text_ids"] == [[number, 1] for number in numbers]


def test_versions_of_other_rates_lie_in_rows_of_their_own(tmp_path):
    random = np.random.default_rng(0)
    seconds = random.uniform(0.1, 3, 60)
    arrays = {
        name: {f"u{n}": np.full((max(1, int(s * rate + random.integers(3))), 2), n, np.float32) for n, s in enumerate(seconds)}
        for name, rate in {"mel": 86, "codes": 12.5}.items()
    }  # fmt: skip
    caches = {
        "mel": made_cache(tmp_path / "mel", arrays["mel"], frame_rate=86),
        "codes": made_cache(tmp_path / "codes", arrays["codes"], frame_rate=12.5, name="codes"),
        "speaker": made_cache(
            tmp_path / "speaker",
            {f"u{n}": np.full((1, 3), n, np.float32) for n in range(60)},
            axis=Clip(),
            name="speaker",
        ),
    }
    loader = packed(featcache.FeatureDataset(caches), tokens=300)
    seen = []
    for batch in loader:
        assert batch["features"]["mel"].shape == (4, 300, 2)
        assert batch["features"]["codes"].shape == (4, math.ceil(300 * 12.5 / 86), 2)
        numbers = [int(id_[1:]) for id_ in batch["ids"]]
        assert batch["features"]["speaker"].tolist() == [[n] * 3 for n in numbers]
        assert batch["lengths"]["speaker"] is None
        assert batch["cu_seqlens"].keys() == {"mel", "codes"}
        for name in ("mel", "codes"):
            for document, id_ in enumerate(batch["ids"]):
                is_own = batch["document_ids"][name] == document
                np.testing.assert_array_equal(batch["features"][name][is_own], caches[name][id_])
                assert {*torch.nonzero(is_own)[:, 0].tolist()} == {batch["rows"][document].item()}
        seen += numbers
    assert sorted(seen) == [*range(60)]


def test_spare_tokens_belong_to_the_document_before_them(codes, dataset):
    for batch in packed(dataset, spare=3):
        for number, id_ in enumerate(batch["ids"]):
            is_own = batch["document_ids"] == number
            frames = batch["features"][is_own].int()
            assert batch["positions"][is_own].tolist() == [*range(len(codes[id_]) + 3)]
            assert (frames[-3:] == 0).all()
            np.testing.assert_array_equal(frames[:-3], codes[id_])


# What is longer than a row


def test_what_is_longer_than_a_row_is_refused_unless_it_is_said_what_to_do(dataset):
    lengths = dataset.lengths
    count = int((lengths > 30).sum())
    with pytest.raises(
        ArgumentError,
        match=f"{count} utterances of 'data' are longer than 30 tokens, the longest has",
    ):
        packed(dataset, tokens=30)
    with pytest.raises(ArgumentError, match="overflow is 'cut': choose 'error', 'split', 'drop'"):
        packed(dataset, overflow="cut")


def test_dropped_utterances_are_counted_and_said(dataset):
    is_long = dataset.lengths > 30
    message = (
        f"^{is_long.sum()} utterances have .*, {dataset.lengths[is_long].sum():,} in all: left"
    )
    with pytest.warns(FeatcacheWarning, match=message) as warned:
        loader = packed(dataset, tokens=30, overflow="drop")
    assert warned[0].filename == __file__
    assert loader.long["data"] == (is_long.sum(), dataset.lengths[is_long].sum())
    kept = [id_ for id_, long in zip(dataset.ids, is_long, strict=True) if not long]
    assert sorted(id_ for (id_, _), _ in all_documents(loader)) == sorted(kept)


@pytest.mark.parametrize(("tokens", "spare"), [(7, 0), (16, 0), (17, 3), (59, 0)])
def test_split_utterances_come_in_consecutive_parts(codes, dataset, tokens, spare):
    with pytest.warns(FeatcacheWarning, match="in all: split"):
        loader = packed(dataset, tokens=tokens, spare=spare, overflow="split")
    parts = {}
    for (id_, part), frames in all_documents(loader):
        whole = frames[: len(frames) - spare]
        assert 1 <= len(whole) <= tokens - spare
        assert parts.setdefault(id_, {}).setdefault(part, whole) is whole
    assert parts.keys() == {*dataset.ids}
    for id_, by_number in parts.items():
        joined = np.concatenate([by_number[number] for number in range(len(by_number))])
        np.testing.assert_array_equal(joined, codes[id_])


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.filterwarnings("ignore:.* more than .* tokens")
def test_an_utterance_longer_than_many_windows_repeats_no_other(tmp_path, window):
    arrays = {f"utt-{number}": np.zeros((3, 1), np.float32) for number in range(400)}
    arrays["utt-7"] = np.zeros((20_000, 1), np.float32)
    dataset = featcache.FeatureDataset(made_cache(tmp_path, arrays))
    for seed in range(3):
        sampler = packed(
            dataset, tokens=16, overflow="split", window=window, seed=seed
        ).batch_sampler
        documents = [document[1:3] for batch in sampler for document in documents_of(batch)]
        assert len(documents) == len({*documents}) == 399 + 1250


# Each once, and the same after a resume


@given(st.data())
@settings(max_examples=40, deadline=None)
@pytest.mark.filterwarnings("ignore:.* more than .* tokens")
def test_the_rows_are_the_same_whatever_moment_training_is_resumed_at(codes, data):
    """With other ranks and other rows in a batch after each resume. In a union, every
    utterance comes once: whole, or in consecutive parts."""
    chosen = data.draw(st.lists(st.integers(0, 119), min_size=1, max_size=100, unique=True))
    dataset = featcache.FeatureDataset(codes).subset(chosen)
    tokens = data.draw(st.sampled_from(SMALL_BUDGETS + BUDGETS))
    rules = {
        "tokens": tokens,
        "overflow": "split" if tokens < dataset.lengths.max() else "error",
        "window": data.draw(st.integers(1, 9)),
        "seed": data.draw(st.integers(0, 9)),
    }
    half = len(chosen) // 2
    sources = {"a": dataset, "b": dataset}
    if half:
        parts = range(half), range(half, len(chosen))
        sources = {name: dataset.subset(part) for name, part in zip("ab", parts, strict=True)}
    mixtures = {
        "one": dataset,
        "union": featcache.Mixture.union(sources),
        "weighted": featcache.Mixture.weighted(sources, by="tokens", weights={"a": 1, "b": 2}),
    }
    kind = data.draw(st.sampled_from(["one", "union", "weighted"] if half else ["one"]))
    mixture, is_endless = mixtures[kind], kind == "weighted"
    whole = packed(mixture, rows=1, **rules).batch_sampler
    expected = [documents_of(batch) for batch in islice(whole, 200 if is_endless else None)]
    state, seen = None, []
    for steps in [*data.draw(st.lists(st.integers(0, 3), max_size=4)), 2 if is_endless else 1000]:
        world_size, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        samplers = [
            packed(mixture, rows=rows, rank=rank, world_size=world_size, **rules).batch_sampler
            for rank in range(world_size)
        ]
        if state is not None:
            for sampler in samplers:
                sampler.load_state_dict(state)
        for batches in islice(zip(*samplers, strict=True), steps):
            of_ranks = [
                [documents_of(batch, batch.row_of == row) for row in range(rows)]
                for batch in batches
            ]
            dealt = [of_ranks[at % world_size][at // world_size] for at in range(world_size * rows)]
            seen += [row for row in dealt if row]
        states = [json.dumps(sampler.state_dict()) for sampler in samplers]
        assert len({*states}) == 1
        state = json.loads(states[0])
    assert seen == expected[: len(seen) if is_endless else None]
    if not is_endless:
        ends = {}
        for source, row, part, first, count in sorted(chain(*seen)):
            number, end = ends.get((source, row), (0, 0))
            assert (part, first) == (number, end)
            ends[source, row] = number + 1, end + count
        assert len(ends) == len(chosen)
        assert sum(end for _, end in ends.values()) == dataset.lengths.sum()


def documents_of(batch, which=slice(None)):
    """The source, row, part, first frame and frames of some documents of a sampler's batch."""
    documents = batch.documents
    columns = documents.sources, documents.rows, documents.parts
    columns = (*columns, documents.firsts[0], documents.counts[0])
    return [*zip(*(column[which].tolist() for column in columns), strict=True)]


def test_a_loader_goes_on_behind_what_training_has_received(dataset):
    whole = names(packed(dataset))
    for steps in (0, 1, 3, len(whole)):
        loader = packed(dataset)
        iterator = iter(loader)
        assert names(islice(iterator, steps)) == whole[:steps]
        resumed = packed(dataset, prefetch=5)
        resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert names(resumed) == whole[steps:]
        second = names(resumed)
        assert sorted(chain(*second)) != sorted(chain(*whole))  # in other rows
        assert {id_ for batch in second for id_, *_ in batch} == {*dataset.ids}
        loader.set_epoch(1)
        assert names(loader) == second


def test_after_a_pass_comes_the_next_epoch_and_its_state(dataset):
    loader = packed(dataset)
    first, state, second = names(loader), loader.state_dict(), names(loader)
    assert first != second
    resumed = packed(dataset)
    resumed.load_state_dict(state)
    assert names(resumed) == second
    resumed.set_epoch(0)
    assert names(resumed) == first
    assert len(packed(dataset)) == len(first)


def test_a_state_of_other_rows_or_rules_is_refused(dataset):
    state = packed(dataset).state_dict()
    shuffled = dataset.subset(np.random.default_rng(0).permutation(len(dataset)))
    for other in (shuffled, dataset.subset(range(119))):
        with pytest.raises(ArgumentError, match="the state is for other utterances"):
            packed(other).load_state_dict(state)
    with pytest.raises(ArgumentError, match="tokens was 128 and is 129, seed was 0 and is 2"):
        packed(dataset, tokens=129, seed=2).load_state_dict(state)
    for wrong in (None, {}, {**state, "position": {}}, featcache.BucketBatchSampler([1], batch_size=1).state_dict()):  # fmt: skip
        with pytest.raises(ArgumentError, match="not the state of a PackedLoader"):
            packed(dataset).load_state_dict(wrong)


def test_a_state_of_another_mixture_is_refused(sources):
    union = featcache.Mixture.union
    mixtures = {
        "union": union(sources),
        "one source": union(sources, one_source=True),
        "weighted": featcache.Mixture.weighted(sources, by="tokens"),
        "by utterances": featcache.Mixture.weighted(sources, by="utterances"),
    }
    for name, mixture in mixtures.items():
        state = packed(mixture).state_dict()
        for other, of_other in mixtures.items():
            loader = packed(of_other)
            if other == name:
                loader.load_state_dict(state)
                continue
            with pytest.raises(ArgumentError, match=r"the state is of other rows: (by|rows) was"):
                loader.load_state_dict(state)


@pytest.mark.parametrize(
    "place",
    [
        {"row": 10**6},
        {"drawn": [121]},
        {"drawn": []},
        {"amounts": [1, 2]},
        {"amounts": [10**30]},
        {"epoch": True},
        {"window": -1},
        {"batches": None},
        {"later": 1},
    ],
)
def test_a_state_of_a_place_that_is_not_there_is_refused(dataset, place):
    state = packed(dataset).state_dict()
    state["position"] |= place
    with pytest.raises(ArgumentError, match="not the state of a PackedLoader"):
        packed(dataset).load_state_dict(state)


def test_a_state_is_plain_numbers_and_text_of_its_own(dataset):
    loader = packed(dataset)
    loader.set_epoch(np.int64(3))
    state = loader.state_dict()
    before = json.dumps(state)
    state["position"]["drawn"][0] = 7
    state["rules"]["tokens"] = 7
    assert json.dumps(loader.state_dict()) == before
    state = json.loads(before)
    numbers = {name: np.array(value) for name, value in state["position"].items()}
    resumed = packed(dataset)
    resumed.load_state_dict(state | {"position": numbers})
    assert json.dumps(resumed.state_dict()) == before


def test_ranks_get_the_same_number_of_batches_of_one_shape(dataset):
    ranks = [packed(dataset, rank=rank, world_size=3) for rank in range(3)]
    batches = [[*rank] for rank in ranks]
    assert len({*map(len, batches)}) == 1
    assert {batch["features"].shape for rank in batches for batch in rank} == {(4, 128, 4)}
    last = [len({*rank[-1]["rows"].tolist()}) for rank in batches]
    assert max(last) - min(last) <= 1  # the last rows are dealt evenly


def test_a_pickled_loader_gives_the_same_batches(dataset):
    loader = packed(dataset)
    next(iter(loader))
    assert names(pickle.loads(pickle.dumps(loader))) == names(packed(dataset))


# Mixtures


@pytest.fixture(scope="module")
def sources(dataset):
    return {"a": dataset.subset(range(90)), "b": dataset.subset(range(90, 120))}


def test_a_union_has_each_utterance_once_and_about_the_same_part_of_each_source(sources):
    loader = packed(featcache.Mixture.union(sources), tokens=512, window=8)
    seen = []
    for batch in loader:
        assert [*zip(batch["sources"], strict=True)] == [
            ("a" if id_ in sources["a"].ids else "b",) for id_ in batch["ids"]
        ]
        seen += batch["ids"]
    assert sorted(seen) == sorted([*sources["a"].ids, *sources["b"].ids])


@pytest.mark.parametrize("by", ["tokens", "seconds", "utterances"])
@pytest.mark.parametrize("temperature", [1, 2.5])
def test_shares_hold_after_any_hundred_rows_and_over_many_documents(sources, by, temperature):
    """Within 5 % in every prefix of 100 rows or more, and within 1 % over 10^5 documents."""
    weights = {"a": 1.0, "b": 3.0}
    mixture = featcache.Mixture.weighted(sources, by=by, weights=weights, temperature=temperature)
    loader = packed(mixture, rows=20, tokens=512, window=64)
    powers = np.array([1, 3 ** (1 / temperature)])
    asked = powers / powers.sum()
    of_rows, documents = [], 0
    for batch in loader.batch_sampler:
        amounts = batch.documents.counts[0]
        if by == "utterances":
            amounts = np.ones_like(amounts)
        cells = 2 * batch.row_of + batch.documents.sources
        of_rows.append(np.bincount(cells, amounts, 2 * 20).reshape(20, 2))
        documents += len(amounts)
        if documents >= 10**5:
            break
    reached = np.cumsum(np.concatenate(of_rows), axis=0)
    reached /= reached.sum(1, keepdims=True)
    assert np.abs(reached[99:] / asked - 1).max() < 0.05
    assert np.abs(reached[-1] / asked - 1).max() < 0.001


def test_without_weights_sources_have_the_shares_of_their_sizes(sources):
    sizes = {name: source.lengths.sum() for name, source in sources.items()}
    loader = packed(featcache.Mixture.weighted(sources, by="tokens"))
    batches = iter(loader)
    assert math.isnan(loader.shares["a"].reached)
    seen = [next(batches) for _ in range(40)]
    for name, (asked, reached, amount) in loader.shares.items():
        assert asked == pytest.approx(sizes[name] / sum(sizes.values()))
        assert reached == pytest.approx(asked, abs=0.02)
        tokens = [
            length
            for batch in seen
            for source, length in zip(batch["sources"], batch["lengths"].tolist(), strict=True)
            if source == name
        ]
        assert amount == sum(tokens)


def test_a_weighted_mixture_repeats_no_utterance_before_all_of_its_source_have_come(sources):
    mixture = featcache.Mixture.weighted(sources, by="utterances", weights={"a": 1, "b": 1})
    ids = [
        id_
        for batch in islice(packed(mixture, window=1), 40)
        for id_, source in zip(batch["ids"], batch["sources"], strict=True)
        if source == "b"
    ]
    times = np.array([ids.count(id_) for id_ in sources["b"].ids])
    assert len(ids) > 100
    assert times.max() - times.min() <= 2


def test_a_weighted_mixture_goes_on_in_the_same_sequence_with_other_ranks(sources):
    mixture = featcache.Mixture.weighted(sources, by="seconds", weights={"a": 1, "b": 2})
    whole = names(islice(packed(mixture, rows=1), 60))
    loader = packed(mixture, rows=4)
    seen = names(islice(loader, 3))
    ranks = [packed(mixture, rows=2, rank=rank, world_size=3) for rank in range(3)]
    for rank in ranks:
        rank.load_state_dict(loader.state_dict())
    ids = [id_ for batch in seen for id_, *_ in batch]
    for batches in islice(zip(*ranks, strict=True), 8):
        ids += [id_ for batch in names(batches) for id_, *_ in batch]
    expected = [id_ for batch in whole for id_, *_ in batch]
    assert sorted(ids) == sorted(expected)
    # another loop goes on
    assert (
        names(islice(loader, 2)) + names(islice(loader, 2))
        == names(islice(iter(packed(mixture, rows=4)), 7))[3:]
    )


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_of_one_source(sources, world_size):
    options = {"world_size": world_size, "window": 16}
    mixture = featcache.Mixture.union(sources, one_source=True)
    seen = []
    for rank in range(world_size):
        for batch in packed(mixture, rank=rank, **options):
            assert len({*batch["sources"]}) <= 1
            seen += batch["ids"]
    assert sorted(seen) == sorted([*sources["a"].ids, *sources["b"].ids])
    state = packed(mixture).state_dict()
    with pytest.raises(ArgumentError, match="rows was 4 and is 3"):
        packed(mixture, rows=3).load_state_dict(state)


def with_vectors(folder, size):
    """A dataset with a column of vectors of another version."""
    cache = made_cache(folder, {"u": np.ones((3, 4), np.float32)})
    vector = {"u": np.ones((1, size), np.float32)}
    made = made_cache(folder / "vectors", vector, axis=Clip(), name="vectors")
    return featcache.FeatureDataset(cache, columns={"vector": made})


def test_faults_of_mixtures_are_told(sources, dataset, tmp_path):
    weighted = featcache.Mixture.weighted
    faults = [
        (lambda: weighted(sources, by="bytes"), "by is 'bytes': choose 'tokens', 'seconds'"),
        (lambda: weighted(sources, by="tokens", weights={"a": 1}), "the sources are 'a', 'b'"),
        (
            lambda: weighted(sources, by="tokens", weights={"a": 1, "b": 0}),
            "the weight of 'b' is 0: give a number above 0",
        ),
        (lambda: weighted(sources, by="tokens", temperature=0), "temperature is 0"),
        (lambda: weighted(sources, by="tokens", temperature=math.inf), "temperature is inf"),
        (lambda: weighted(sources, by="tokens", weights=[3, 1]), r"weights is \[3, 1\]"),
        (
            lambda: packed(weighted(sources, by="tokens", temperature=1e-3)),
            "the share of 'b' is 0 at temperature=0.001",
        ),
        (
            lambda: packed(weighted(sources, by="tokens", weights={"a": 1e300, "b": 1e-300})),
            "the share of 'b' is 0 at temperature=1",
        ),
        (lambda: featcache.Mixture.union({}), "the mixture has no sources"),
        (lambda: featcache.Mixture.union([dataset]), "has no sources by name: give {"),
        (lambda: featcache.Mixture.union({"a": 1}), "the source 'a' is no FeatureDataset"),
        (lambda: packed([dataset]), "mixture is a list: give a FeatureDataset"),
        (lambda: packed(dataset, spare=128), "spare is 128"),
        (lambda: packed(dataset, rank=1), "rank is 1"),
        (
            lambda: packed(dataset, tokens=1 << 20, rows=1 << 11),
            "a batch of 2,048 rows has 2,147,483,648 frames",
        ),
        (
            lambda: len(packed(weighted(sources, by="tokens"))),
            "a weighted mixture has no end",
        ),

        (
            lambda: packed(featcache.FeatureDataset(dataset.cache, crop=3)),
            "rows hold whole utterances",
        ),
        (
            lambda: featcache.Mixture.union(
                {"a": dataset, "b": featcache.FeatureDataset(codes_cache(tmp_path / "other"))}
            ),
            r"the source 'b' has other shapes than the first: .*\(2,\)",
        ),
        (
            lambda: featcache.Mixture.union(
                {"a": dataset, "b": featcache.FeatureDataset(dataset.cache, [{"id": "utt-1", "n": 1}])}
            ),
            "the source 'b' has other columns than the first",
        ),
        (
            lambda: featcache.Mixture.union(
                {name: with_vectors(tmp_path / name, size) for name, size in {"a": 2, "b": 3}.items()}
            ),
            "the source 'b' has other columns than the first",
        ),
    ]  # fmt: skip
    for make, message in faults:
        with pytest.raises((ArgumentError, TypeError), match=message):
            make()


def test_sources_whose_columns_have_other_dtypes_are_refused(codes):
    """A batch would have the dtype of the sources that are in it."""
    rows = {
        "int64": [{"id": "utt-1", "gain": 2}],
        "float64": [{"id": "utt-2", "gain": 2.5}],
        "bool": [{"id": "utt-3", "gain": True}],
        "text": [{"id": "utt-4", "gain": "loud"}],
        "lists": [{"id": "utt-5", "gain": [2]}],
    }
    datasets = {kind: featcache.FeatureDataset(codes, rows[kind]) for kind in rows}
    for one, other in pairwise(datasets):
        message = f"the source 'b' has other columns than the first: .*{other}.*, and not .*{one}"
        with pytest.raises(ArgumentError, match=message):
            featcache.Mixture.union({"a": datasets[one], "b": datasets[other]})


def test_sources_of_other_codecs_are_refused_and_more_codebooks_are_not(tmp_path, codes):
    """An integer dtype, which fits the first, may not fit codes of larger codebooks."""
    more = made_cache(tmp_path / "more", make_features(9, (6,), "uint16"), frame_rate=12.5)
    small = featcache.FeatureDataset(codes_cache(tmp_path / "small"))
    two_books = {
        name: featcache.FeatureDataset(cache, codebooks=2)
        for name, cache in {"codes": codes, "more": more}.items()
    }
    for batch in packed(featcache.Mixture.union(two_books)):
        for number, (id_, source) in enumerate(zip(batch["ids"], batch["sources"], strict=True)):
            frames = batch["features"][batch["document_ids"] == number]
            np.testing.assert_array_equal(frames, two_books[source].cache[id_][:, :2])
    with pytest.raises(ArgumentError, match="'small' has other sizes of codebooks than the first"):
        featcache.Mixture.union({"codes": two_books["codes"], "small": small})


def test_padding_may_be_nan(tmp_path):
    cache = made_cache(tmp_path, make_features(9, (2,), "float32"))
    dataset = featcache.FeatureDataset(cache, padding_value=math.nan)
    for batch in packed(featcache.Mixture.union({"a": dataset, "b": dataset})):
        assert batch["features"][batch["document_ids"] < 0].isnan().all()
        assert not batch["features"][batch["document_ids"] >= 0].isnan().any()
