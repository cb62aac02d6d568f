"""featcache.DataLoader: the batches of its dataset, ahead of time, in memory that is used
again, of any dtype."""

import gc
import math
import pickle
import re
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from damage import flip
from forking import run_forked
from make_cache import assert_same, codes_cache, make_features, make_version
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

import featcache
from featcache import BucketBatchSampler, Crop, DataLoader, FeatureDataset
from featcache.errors import ArgumentError, DamagedError, FeatcacheError
from featcache.loader import data_loader
from featcache.loader.transfer import dequantized


@pytest.fixture(scope="module")
def features():
    return make_features(50, (8,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, features):
    folder = tmp_path_factory.mktemp("features")
    items = list(features.items())
    make_version(folder, dict(items[:20]), dict(items[20:]), name="fbank")
    make_version(folder, make_features(50, (4,), "uint16", seed=1), name="codes", frame_rate=50.0)
    make_version(folder, features, name="levels", quantized=True)
    return folder


@pytest.fixture
def cache(folder):
    return featcache.open(folder, "fbank")


ROWS = [{"id": f"utt-{n}", "digit": n % 10, "text": f"word {n}"} for n in range(49, -1, -1)]


@pytest.fixture
def dataset(cache):
    return FeatureDataset(cache, ROWS, padding_value=3)


BATCHES = [[3, 1, 4], [15, 9], [26], [5, 35, 8, 9, 7], [], [9, 3, 2, 3, 8, 4, 6]]


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_gives_the_datasets_batches_in_the_samplers_order(dataset, prefetch):
    loader = DataLoader(dataset, BATCHES, prefetch=prefetch)
    assert len(loader) == 6
    for _ in range(2):
        found = list(loader)
        assert_same(found, [dataset.batch(rows) for rows in BATCHES])
    assert found[0]["digit"].tolist() == [6, 8, 5]
    assert found[0]["text"] == ["word 46", "word 48", "word 45"]
    assert found[4]["features"].shape == (0, 0, 8)


def test_takes_torchs_batch_samplers_and_generators(dataset):
    sampler = BatchSampler(SequentialSampler(dataset), 8, drop_last=False)
    loader = DataLoader(dataset, sampler)
    assert [len(batch["ids"]) for batch in loader] == [8] * 6 + [2]
    assert len(loader) == 7
    rows = DataLoader(dataset, ([row] for row in (4, 2)))
    assert [batch["ids"] for batch in rows] == [["utt-45"], ["utt-47"]]


def test_a_batch_stays_what_it_is_for_as_long_as_it_is_looked_at(dataset):
    sampler = [np.random.default_rng(seed).integers(0, 50, 6).tolist() for seed in range(40)]
    kept, views = [], []
    for number, batch in enumerate(DataLoader(dataset, sampler, prefetch=3, dtype=torch.float32)):
        if number % 3 == 0:
            kept.append((number, batch))
        views.append(batch["features"][1])
    for number, batch in kept:
        assert torch.equal(batch["features"], dataset.batch(sampler[number])["features"].float())
    for rows, view in zip(sampler, views, strict=True):
        assert torch.equal(view, dataset.batch(rows)["features"][1].float())


def test_memory_is_used_again_when_nobody_looks_at_it(dataset):
    rows = list(range(20))
    addresses = set()
    for batch in DataLoader(dataset, [rows] * 30, prefetch=2):
        addresses.add(batch["features"].data_ptr())
        del batch
    assert len(addresses) <= 4


def test_random_crops_follow_the_samplers_epoch(cache):
    dataset = FeatureDataset(cache, crop=Crop(frames=3))
    sampler = BucketBatchSampler(dataset.lengths, batch_size=50, shuffle=False)
    loader = DataLoader(dataset, sampler)
    (first,), (again,) = loader, loader
    assert torch.equal(first["features"], again["features"])
    sampler.set_epoch(1)
    (second,) = loader
    assert dataset.epoch == 1
    assert not torch.equal(first["features"], second["features"])
    loader.set_epoch(0)
    (again,) = loader
    assert torch.equal(first["features"], again["features"])


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("seen", [0, 1, 5])
def test_resumes_behind_what_training_has_had_and_not_behind_what_was_made_ahead(
    cache, prefetch, seen
):
    dataset = FeatureDataset(cache, crop=Crop(frames=3))

    def loader():
        return DataLoader(
            dataset, BucketBatchSampler(dataset.lengths, batch_size=4), prefetch=prefetch
        )

    whole = loader()
    whole.set_epoch(3)
    expected = list(whole)
    stopped = loader()
    stopped.set_epoch(3)
    batches = iter(stopped)
    for _ in range(seen):
        next(batches)
    state = stopped.state_dict()
    batches.close()
    resumed = loader()
    resumed.load_state_dict(state)
    assert len(resumed) == len(expected)
    assert_same(resumed, expected[seen:])
    assert len(resumed.state_dict()["sampler"]["parts"]) == 1


def test_a_state_is_of_the_latest_iteration_in_the_epoch_that_the_sampler_is_in(dataset):
    loader = DataLoader(dataset, BucketBatchSampler(dataset.lengths, batch_size=4))

    def rounds():
        return loader.state_dict()["sampler"]["parts"][-1]["rounds"]

    for number, _ in enumerate(zip(loader, loader, strict=True), 1):
        assert rounds() == number
    loader.set_epoch(1)
    assert rounds() == 0
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert rounds() == 3
    batches.close()
    assert rounds() == 3
    loader.batch_sampler.set_epoch(2)
    assert rounds() == 0


def test_an_iteration_stays_in_its_epoch(cache):
    dataset = FeatureDataset(cache, crop=Crop(frames=3))
    loader = DataLoader(dataset, BucketBatchSampler(dataset.lengths, batch_size=4), prefetch=1)
    expected = list(loader)
    batches = iter(loader)
    found = [next(batches)]
    loader.set_epoch(1)
    found += batches
    assert (len(found), dataset.epoch) == (len(expected), 1)
    assert_same(found, expected)


def test_the_epochs_of_a_sampler_in_a_batch_sampler_are_gone_through(cache):
    dataset = FeatureDataset(cache, crop=Crop(frames=3))
    sampler = DistributedSampler(dataset, 2, 0)
    loader = DataLoader(dataset, BatchSampler(sampler, 5, drop_last=False))
    first = [batch["ids"] for batch in loader]
    loader.set_epoch(1)
    assert (sampler.epoch, dataset.epoch) == (1, 1)
    assert [batch["ids"] for batch in loader] != first
    sampler.set_epoch(4)
    list(loader)
    assert dataset.epoch == 4


@pytest.mark.parametrize("crop", [None, np.int64(3)])
@pytest.mark.parametrize(
    "make", [list, np.array, torch.tensor, lambda rows: list(torch.tensor(rows))]
)
def test_positions_may_be_of_any_integers_and_count_from_the_end(cache, make, crop):
    dataset = FeatureDataset(cache, crop=crop)
    (batch,) = DataLoader(dataset, [make([-1, 3, -50, 3])])
    assert batch["ids"] == ["utt-49", "utt-3", "utt-0", "utt-3"]
    assert_same(batch, dataset.batch([49, 3, 0, 3]))


def test_what_is_no_position_is_refused(dataset):
    with pytest.raises(ArgumentError, match=r"rows are float64 \[1\]: give a list of positions"):
        dataset.batch([1.5])
    for rows in (None, 3, np.array(3), torch.tensor(3), [[1], [2, 3]]):
        with pytest.raises(
            ArgumentError, match=re.escape(f"rows is {rows!r}: give a list of positions")
        ):
            dataset.batch(rows)
    for row in ("utt-1", slice(3), 1.0):
        with pytest.raises(ArgumentError, match="give the position of an utterance"):
            dataset[row]
    with pytest.raises(IndexError, match=r"no utterance at 50: the dataset has 50$"):
        dataset[50]
    for row in (50, -51):
        with pytest.raises(IndexError, match=f"no utterance at {row}: the dataset has 50$"):
            dataset.batch([row])
    with pytest.raises(
        ArgumentError, match=r"the sampler gives 3: featcache.DataLoader needs lists of positions"
    ):
        next(iter(DataLoader(dataset, [3, 1])))
    for has_epochs in (dataset, BucketBatchSampler([3], batch_size=1)):
        with pytest.raises(
            ArgumentError, match="epoch is -1: it must be a whole number, 0 or more"
        ):
            has_epochs.set_epoch(-1)


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        *[
            ("codes", value, "uint16, .* a whole number from 0 to 65535")
            for value in (-100, 70_000, 0.5, math.nan)
        ],
        ("fbank", 1e6, "float16, which ends at 65504"),
        ("fbank", "x", "give a number"),
    ],
)
def test_batches_are_padded_with_what_their_dtype_holds(folder, name, value, what):
    cache = featcache.open(folder, name)
    for pad in (FeatureDataset, lambda cache, **options: cache.batch([1, 2], **options)):
        with pytest.raises(ArgumentError, match=f"padding_value is '?{value}'?: .*{what}"):
            pad(cache, padding_value=value)


def test_goes_to_other_processes(dataset):
    loader = DataLoader(dataset, BATCHES, prefetch=3, dtype=torch.float32)
    expected = list(loader)
    small = len(pickle.dumps(DataLoader(dataset, BATCHES)))
    assert len(pickle.dumps(loader)) < small + 100  # not the memory of batches
    copy = pickle.loads(pickle.dumps(loader))
    assert_same(copy, expected)


def test_a_state_is_not_for_every_sampler(dataset):
    loader = DataLoader(dataset, [[1]])
    with pytest.raises(
        ArgumentError,
        match=r"the sampler, a list, keeps no state: featcache.BucketBatchSampler does",
    ):
        loader.state_dict()
    loader = DataLoader(dataset, BucketBatchSampler(dataset.lengths, batch_size=4))
    for state in ({}, None, {"epoch": 1}):
        with pytest.raises(ArgumentError, match="not the state of a DataLoader"):
            loader.load_state_dict(state)


def test_counts_the_seconds_that_training_waits(dataset, monkeypatch):
    # training waits for 1, 2 and 3 s, and takes 10 s after each
    times = iter([0, 1, 11, 13, 23, 26, 36])
    monkeypatch.setattr(featcache.loader.data_loader, "perf_counter", lambda: next(times))
    loader = DataLoader(dataset, [[1]] * 3)
    waited = [loader.waited for _ in loader]
    assert waited == [1, 3, 6]
    assert loader.waited == 6
    iter(loader)
    assert loader.waited == 0


class TestEnds:
    def test_an_error_reaches_the_loop_at_its_batch(self, tmp_path, features):
        version = make_version(tmp_path / "features", features)
        (chunk,) = version.path.glob("shards/*/features/c/0/0")
        flip(chunk, 0)
        for check, error, what in (
            (True, DamagedError, "utt-0: damaged"),
            (False, KeyError, "speaker"),
        ):
            dataset = FeatureDataset(featcache.open(tmp_path / "features", check=check))
            transform = (
                None
                if check
                else lambda batch: batch if "utt-0" not in batch["ids"] else batch["speaker"]
            )
            batches = iter(DataLoader(dataset, [[1], [2], [0], [3]], transform=transform))
            assert [next(batches)["ids"] for _ in range(2)] == [["utt-1"], ["utt-2"]]
            with pytest.raises(error, match=what):
                next(batches)
        with pytest.raises(IndexError):
            list(DataLoader(dataset, [[1], [50]]))

    def test_an_error_of_the_sampler_too(self, dataset):
        def sampler():
            yield [1]
            raise RuntimeError("no more")

        batches = iter(DataLoader(dataset, sampler()))
        assert next(batches)["ids"] == ["utt-48"]  # what it had given before is not lost
        with pytest.raises(RuntimeError, match="no more"):
            next(batches)

    @pytest.mark.parametrize("is_sampler", [True, False])
    def test_an_error_that_was_raised_keeps_nothing(self, dataset, is_sampler):
        held = []

        def fail():
            own = threading.Event()
            held.append(weakref.ref(own))
            raise RuntimeError("no more")

        def sampler():
            yield [1]
            fail()

        def transform(batch):
            fail()

        gc.disable()  # which would free it later, and not at once
        try:
            loader = DataLoader(dataset, BATCHES, transform=transform)
            if is_sampler:
                loader = DataLoader(dataset, sampler())
            with pytest.raises(RuntimeError, match="no more"):
                list(loader)
            assert not any(reference() for reference in held)
        finally:
            gc.enable()

    def test_a_forked_process_has_an_iteration_of_its_own(self, dataset):
        batches = iter(DataLoader(dataset, BATCHES))
        next(batches)

        def child():
            with pytest.raises(
                FeatcacheError, match="an iteration cannot continue in a forked process"
            ):
                next(batches)
            assert len(list(DataLoader(dataset, BATCHES))) == len(BATCHES)

        run_forked(child)
        assert len(list(batches)) == len(BATCHES) - 1

    def test_a_loop_that_is_left_leaves_no_threads(self, dataset):
        before = set(threading.enumerate())
        for _ in DataLoader(dataset, [[1]] * 20, prefetch=4):
            break
        gc.collect()
        batches = iter(DataLoader(dataset, [[1]] * 20, prefetch=4))
        next(batches)
        batches.close()
        new = {thread.name for thread in set(threading.enumerate()) - before}
        assert not [name for name in new if name.startswith("featcache-loader")]

    @pytest.mark.parametrize(
        ("reading", "training", "most_made_here"),
        [(0, 0, 100), (0, 0.04, 0), (0.04, 0, 6)],
        ids=["reading only", "training", "long batches"],
    )
    def test_only_a_loop_that_waits_for_short_batches_makes_them_itself(
        self, dataset, monkeypatch, reading, training, most_made_here
    ):
        # Seconds: far from both durations, whatever else the machine does.
        monkeypatch.setattr(data_loader, "_SHORT", 10 if reading == training else 0.03)
        batches = [[row % 50] for row in range(100 if reading == training else 40)]
        expected = [dataset.batch(rows) for rows in batches]
        makers = []

        def batch_in(*arguments):
            makers.append(threading.current_thread())
            time.sleep(reading)
            return read(*arguments)

        read = dataset.batch_in
        monkeypatch.setattr(dataset, "batch_in", batch_in)
        loader = DataLoader(dataset, batches, prefetch=8 if reading else None)
        for batch, same in zip(loader, expected, strict=True):
            assert_same(batch, same)
            time.sleep(training)
        made_here = sum(maker is threading.current_thread() for maker in makers)
        assert made_here <= most_made_here
        if reading == training:
            assert made_here > 90

    def test_a_loop_that_makes_short_batches_goes_on_after_a_long_one(self, dataset, monkeypatch):
        monkeypatch.setattr(data_loader, "_SHORT", 1)
        makers = []

        def batch_in(*arguments):
            makers.append(threading.current_thread())
            if len(makers) % 10 == 0:  # as if the machine had been busy
                time.sleep(1.1)
            return read(*arguments)

        read = dataset.batch_in
        monkeypatch.setattr(dataset, "batch_in", batch_in)
        list(DataLoader(dataset, [[1]] * 35))
        assert sum(maker is threading.current_thread() for maker in makers) > 30

    def test_validation_may_keep_batches_for_training(self, dataset, monkeypatch):
        monkeypatch.setattr(data_loader, "_SHORT", 10)  # the loop makes most of them
        with torch.inference_mode():
            kept = [*DataLoader(dataset, [[1]] * 20)]
        assert not any(batch["features"].is_inference() for batch in kept)

    def test_two_loops_do_not_disturb_each_other(self, dataset):
        loader = DataLoader(dataset, BATCHES)
        for batch, other, rows in zip(loader, loader, BATCHES, strict=True):
            assert batch["ids"] == other["ids"] == [dataset.ids[row] for row in rows]
            assert_same(batch, other)
            assert_same(batch, dataset.batch(rows))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"prefetch": "a"}, "prefetch is 'a': it must be a whole number, 1 or more"),
        (
            {"device": "gpu"},
            "device is 'gpu': not a torch device; use cpu, cuda, or cuda:0 and so on",
        ),
        ({"device": 1.5}, "device is 1.5: not a torch device"),
        ({"device": "cuda:99"}, "device is 'cuda:99': there is no such device; torch sees"),
        ({"dtype": "float32"}, "dtype is 'float32': give one of torch's, such as torch.float32"),
        (
            {"dtype": torch.int64},
            "dtype is torch.int64, which would cut off fractions: these features are float16",
        ),
        ({"prefetch": 0}, "prefetch is 0: it must be a whole number, 1 or more"),
        (
            {"batch_sampler": 3},
            "batch_sampler is 3: give lists of positions; batch_size= limits rows",
        ),
        (
            {"dtype": {"features": torch.float32}},
            "dtype is given by name, but the dataset has one version",
        ),
        (
            {"prefetch": 2**63},
            f"prefetch is {2**63}: it must be a whole number, 1 or more, at most 1048576",
        ),
        ({"batch_size": 4}, "batch_sampler makes the batches already: leave it out, or batch_"),
        ({"transform": "f"}, "transform is 'f': give a function of a batch"),
        (
            {"batch_size": 4, "num_workers": 2},
            "featcache.DataLoader has no num_workers: it takes max_frames, batch_",
        ),
        (
            {"batch_sampler": None},
            "nothing says what the batches are: give batch_size= or max_frames=",
        ),
        ({"batch_sampler": None, "shuffle": True}, "nothing says what the batches are"),
        (
            {"batch_sampler": None, "max_frames": 2**63},
            f"max_frames is {2**63}: it must be a whole number, 1 or more, at most {2**62}",
        ),
    ],
)
def test_arguments_that_do_not_do_are_one_line(dataset, options, what):
    with pytest.raises(ArgumentError, match=what) as caught:
        DataLoader(dataset, **{"batch_sampler": BATCHES, **options})
    assert "\n" not in str(caught.value)


def test_takes_nothing_but_a_feature_dataset(dataset):
    for other in (
        Subset(TensorDataset(torch.zeros(3)), [1]),
        ConcatDataset([dataset, dataset]),
        [dataset],
    ):
        with pytest.raises(
            ArgumentError,
            match=r"dataset is a \w+: featcache.DataLoader takes a FeatureDataset, or a",
        ):
            DataLoader(other, BATCHES)


@pytest.mark.gpu
class TestOnAGpu:
    @pytest.mark.parametrize("dtype", [None, torch.float32])
    @pytest.mark.parametrize("quantized", [False, True])
    def test_gives_the_same_batches(self, dataset, folder, dtype, quantized):
        if quantized:
            dataset = FeatureDataset(featcache.open(folder, "levels"), ROWS, padding_value=3)
        sampler = [np.random.default_rng(seed).integers(0, 50, 40).tolist() for seed in range(60)]
        loader = DataLoader(dataset, sampler, device="cuda", dtype=dtype, prefetch=4)
        for batch, rows in zip(loader, sampler, strict=True):
            assert all(batch[name].is_cuda for name in ("features", "lengths", "digit"))
            # training is slow: nobody may touch the batch meanwhile
            torch.cuda._sleep(1_000_000)
            plain = dataset.batch(rows)
            expected = plain["features"] if dtype is None else plain["features"].to(dtype)
            assert torch.equal(batch["features"].cpu(), expected)
            assert torch.equal(batch["lengths"].cpu(), plain["lengths"])

    def test_a_transform_works_on_the_stream_of_the_copies(self, dataset):
        sampler = [np.random.default_rng(seed).integers(0, 50, 40).tolist() for seed in range(60)]

        def transform(batch):
            torch.cuda._sleep(1_000_000)
            return {"doubled": [2 * batch["features"].float()]}

        for batch, rows in zip(
            DataLoader(dataset, sampler, device="cuda", transform=transform), sampler, strict=True
        ):
            torch.cuda._sleep(1_000_000)
            assert torch.equal(
                batch["doubled"][0].cpu(), 2 * dataset.batch(rows)["features"].float()
            )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *[
            ("fbank", dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        ],
        *[("codes", dtype) for dtype in (torch.int16, torch.int32, torch.int64)],
        ("levels", torch.float16),
    ],
)
def test_converts_to_a_dtype_that_holds_the_values(folder, name, dtype):
    dataset = FeatureDataset(featcache.open(folder, name))
    for batch, rows in zip(DataLoader(dataset, BATCHES, dtype=dtype), BATCHES, strict=True):
        assert batch["features"].dtype == dtype
        assert torch.equal(batch["features"], dataset.batch(rows)["features"].to(dtype))


@pytest.mark.parametrize(
    ("dtype", "what"),
    [
        (
            torch.bfloat16,
            "dtype is torch.bfloat16, and these features are .*: give one of integers",
        ),
        (torch.float32, "give one of integers"),
        (torch.bool, "give one of integers"),
        (torch.uint8, "dtype is torch.uint8, which ends at 255: these features go up to 1,023"),
        (torch.int8, "which ends at 127"),
    ],
)
def test_codes_stay_what_they_are(folder, dtype, what):
    with pytest.raises(ArgumentError, match=what):
        DataLoader(FeatureDataset(featcache.open(folder, "codes")), [[1]], dtype=dtype)
    with pytest.raises(ArgumentError, match=what):
        DataLoader(both_of(folder), [[1]], dtype={"codes": dtype})


def test_what_codes_are_padded_with_is_held_too(folder):
    dataset = FeatureDataset(featcache.open(folder, "codes"), padding_value=40_000)
    with pytest.raises(ArgumentError, match="these features go up to 40,000"):
        DataLoader(dataset, [[1]], dtype=torch.int16)
    DataLoader(dataset, [[1]], dtype=torch.int32)


def test_padding_below_0_needs_a_dtype_that_holds_it(tmp_path):
    dataset = FeatureDataset(codes_cache(tmp_path, dtype="int64"), padding_value=-1)
    with pytest.raises(
        ArgumentError, match=r"dtype is torch.uint16, which begins at 0, and padding_value is -1$"
    ):
        DataLoader(dataset, [[1]], dtype=torch.uint16)
    (batch,) = DataLoader(dataset, [[0, 1]], dtype=torch.int16)
    assert torch.equal(batch["features"], dataset.batch([0, 1])["features"].to(torch.int16))
    assert (batch["features"] == -1).any()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, (torch.bfloat16, torch.uint16)),
        (torch.int64, (torch.float16, torch.int64)),
        ({"codes": torch.int64}, (torch.float16, torch.int64)),
    ],
)
def test_of_several_versions_one_dtype_is_for_those_that_it_fits_and_others_are_given_by_name(
    folder, dtype, expected
):
    dataset = both_of(folder)
    (batch,) = DataLoader(dataset, [[3, 1]], dtype=dtype)
    features, plain = batch["features"], dataset.batch([3, 1])["features"]
    assert (features["fbank"].dtype, features["codes"].dtype) == expected
    for name, values in features.items():
        assert torch.equal(values, plain[name].to(values.dtype))
    with pytest.raises(ArgumentError, match="would cut off fractions"):
        DataLoader(dataset, [[1]], dtype=torch.bool)


def both_of(folder):
    return FeatureDataset({name: featcache.open(folder, name) for name in ("fbank", "codes")})


def test_levels_become_values_on_the_device(folder):
    """As it is done on a GPU, here on the CPU."""
    dataset = FeatureDataset(
        featcache.open(folder, "levels"), padding_value=-7, crop=Crop(frames=9)
    )
    for rows in BATCHES:
        (ranges,) = dataset.frame_ranges(np.array(rows, np.int64), 0)
        values = dequantized(ranges.gather(raw=True), ranges, None, lambda tensor: tensor)
        assert torch.equal(values, dataset.batch(rows)["features"])
