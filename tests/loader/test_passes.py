"""An epoch belongs to the pass that is read, whoever forks, pickles or copies the dataset;
and a state goes on exactly where it was taken, over the rows that it was taken over."""

import copy
import functools
import io
import itertools
import json
import multiprocessing
import pickle
import threading

import cloudpickle
import hypothesis.strategies as st
import numpy as np
import pytest
from accelerate.data_loader import DataLoaderShard
from forking import run_forked
from hypothesis import given
from make_cache import make_version
from test_corpus import make_corpus
from torch.utils.data import DataLoader, RandomSampler

import featcache
from featcache import BucketBatchSampler, Crop, FeatureDataset
from featcache.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore:a worker process takes longer")

COUNT = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Utterances of one length, whose frames hold their own numbers."""
    folder = tmp_path_factory.mktemp("features")
    frames = np.arange(60, dtype=np.float32)[:, None]
    items = [(f"utt-{number}", 100 * number + frames) for number in range(COUNT)]
    make_version(folder, dict(items[:9]), dict(items[9:]))
    return folder


def rows(numbers=range(COUNT)):
    return [{"id": f"utt-{number}", "half": number % 2} for number in numbers]


@pytest.fixture
def dataset(folder):
    return FeatureDataset(featcache.open(folder), rows(), crop=8)


def seen(batches):
    """What a pass shows: the utterances of each batch, and the first frame of each."""
    return [(batch["ids"], batch["features"][:, 0, 0].tolist()) for batch in batches]


def own(dataset, **batching):
    return featcache.DataLoader(dataset, **batching)


def with_a_sampler(dataset, **batching):
    return featcache.DataLoader(dataset, BucketBatchSampler(dataset.lengths, **batching))


class TorchsLoader:
    """torch's, with a sampler that keeps the state, as a training script uses it."""

    def __init__(self, dataset, **batching):
        self.sampler = BucketBatchSampler(dataset.lengths, **batching)
        self.loader = DataLoader(dataset, batch_sampler=self.sampler, collate_fn=dataset.collate)
        self.consumed = 0
        self.set_epoch = self.sampler.set_epoch
        self.load_state_dict = self.sampler.load_state_dict

    def __iter__(self):
        self.consumed = 0
        for batch in self.loader:
            self.consumed += 1
            yield batch

    def state_dict(self):
        return self.sampler.state_dict(consumed=min(self.consumed, self.sampler.given))


batchings = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 9),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "world_size": st.integers(1, 3),
        "seed": st.integers(0, 9),
    }
)


class TestAState:
    @given(batchings, st.integers(0, 3), st.integers(0, 2), st.integers(0, 26))
    def test_of_any_moment_goes_on_as_the_loader_does(self, folder, batching, epoch, passes, steps):
        dataset = FeatureDataset(featcache.open(folder), rows(), crop=8)
        loader, resumed = own(dataset, **batching), own(dataset, **batching)
        if epoch:
            loader.set_epoch(epoch)
        for _ in range(passes):
            seen(loader)
        batches = iter(loader) if steps else None
        for _ in range(min(steps, len(loader))):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [seen(batches)] if steps else []
        expected = [*rest, seen(loader), seen(loader)]
        resumed.load_state_dict(state)
        assert [seen(resumed) for _ in expected] == expected

    @pytest.mark.parametrize("kind", [own, with_a_sampler, TorchsLoader])
    @given(batching=batchings, moments=st.lists(st.integers(0, 30), max_size=3))
    def test_may_be_taken_and_loaded_at_any_moment_by_a_loop_over_epochs(
        self, folder, kind, batching, moments
    ):
        dataset = FeatureDataset(featcache.open(folder), rows(), crop=8)

        def train(moments):
            """Three epochs; killed after so many batches each time, and resumed."""
            found, start, state = [], 0, None
            for moment in [*moments, None]:
                loader, steps, killed = kind(dataset, **batching), 0, False
                if state is not None:
                    loader.load_state_dict(state)
                for epoch in range(start, 3):
                    loader.set_epoch(epoch)
                    for batch in itertools.chain([None], loader):
                        found += [] if batch is None else seen([batch])
                        killed = steps == moment
                        steps += 1
                        if killed:
                            start, state = epoch, loader.state_dict()
                            break
                    if killed:
                        break
                    start, state = epoch + 1, loader.state_dict()
            return found

        assert train(moments) == train([])

    def test_after_a_pass_is_of_the_next_epoch(self, dataset):
        loader = own(dataset, batch_size=5)
        first = seen(loader)
        state = loader.state_dict()
        resumed = own(dataset, batch_size=5)
        resumed.load_state_dict(state)
        assert len(resumed) == 5
        second = seen(loader)
        assert seen(resumed) == second != first
        resumed.load_state_dict(state)
        resumed.set_epoch(0)  # as said, also after it was over
        assert seen(resumed) == first

    def test_is_of_the_latest_of_two_passes_at_once(self, dataset):
        loader = own(dataset, batch_size=5)
        old, latest = iter(loader), iter(loader)
        next(latest)
        list(old)
        resumed = own(dataset, batch_size=5)
        resumed.load_state_dict(loader.state_dict())
        assert seen(resumed) == seen(latest)


def states(dataset):
    """States of all kinds of samplers over a dataset, with what loads them."""
    loader, sampler = own(dataset, batch_size=4), BucketBatchSampler(dataset.lengths, batch_size=4)
    # torch's Subset, for example, whose lengths somebody has picked
    numbers = BucketBatchSampler(dataset.lengths.tolist(), batch_size=4)
    given_numbers = featcache.DataLoader(dataset, numbers)
    return [(each, each.state_dict()) for each in (loader, sampler, given_numbers)]


class TestRows:
    @pytest.mark.parametrize(
        "other",
        [
            lambda cache: FeatureDataset(cache, rows(reversed(range(COUNT))), crop=8),
            lambda cache: FeatureDataset(cache, crop=8).subset([1, 0, *range(2, COUNT)]),
            lambda cache: FeatureDataset(cache, rows(), crop=8, where={"half": 1}),
        ],
    )
    def test_that_are_others_or_in_another_order_are_refused(self, folder, other):
        cache = featcache.open(folder)
        first = FeatureDataset(cache, rows(), crop=8)
        if len(other(cache)) < COUNT:
            first = FeatureDataset(cache, rows(), crop=8, where={"half": 0})
        assert (first.lengths == other(cache).lengths).all()
        for (_, state), (theirs, own_state) in zip(
            states(first), states(other(cache)), strict=True
        ):
            with pytest.raises(ArgumentError, match="the state is for other utterances") as error:
                theirs.load_state_dict(state)
            assert "begin the epoch again" in str(error.value)
            theirs.load_state_dict(own_state)

    def test_of_one_name_that_are_of_other_audio_are_refused(self, tmp_path):
        features = {f"{number}": np.zeros((9, 2), np.float32) for number in range(8)}
        paths = {"a": {id_: {"path": f"a/{id_}.wav"} for id_ in features}, "b": {}}
        a, b = (
            FeatureDataset(
                featcache.open(make_version(tmp_path / name, features, rows=of_ids).path)
            )
            for name, of_ids in paths.items()
        )
        assert a.lengths.digest != b.lengths.digest

    def test_of_parts_of_one_content_are_told_apart_by_their_names(self, tmp_path):
        """Each part has the ids and the paths that the others have."""
        make_corpus(tmp_path, [4], [4], [4], prefix="utt")
        corpus = featcache.open(tmp_path)
        whole = FeatureDataset(corpus)
        assert [*whole.ids[:4]] == [*whole.ids[4:8]]
        halves = [whole.subset(range(first, first + 4)) for first in (0, 4, 4)]
        assert halves[0].lengths.digest != halves[1].lengths.digest == halves[2].lengths.digest
        assert whole.lengths.digest == whole.subset(range(12)).lengths.digest

    def test_are_the_same_for_all_ranks_and_however_they_came_there(self, dataset):
        found = {
            BucketBatchSampler(lengths, batch_size=4, rank=rank, world_size=3).state_dict()["rows"]
            for rank in range(3)
            for lengths in (dataset.lengths, pickle.loads(pickle.dumps(dataset)).lengths)
        }
        lengths = pickle.loads(pickle.dumps(dataset.lengths))
        sampler = BucketBatchSampler(lengths, batch_size=4)
        found |= {sampler.state_dict()["rows"], copy.deepcopy(sampler).state_dict()["rows"]}
        assert len(found) == 1
        assert len(pickle.dumps(sampler)) < 2000  # without the dataset

    def test_are_the_same_with_and_without_a_manifest(self, folder, dataset):
        without = FeatureDataset(featcache.open(folder))
        assert without.lengths.digest == dataset.lengths.digest

    def test_of_a_state_of_the_release_before_are_not_known(self, dataset):
        loader = own(dataset, batch_size=4)
        state = loader.state_dict()["sampler"]
        old = {"lengths": "0" * 64, "epoch": 7, "parts": state["parts"]}
        for load, given_one in (
            (loader.load_state_dict, {"sampler": old}),
            (loader.batch_sampler.load_state_dict, old),
        ):
            with pytest.raises(ArgumentError, match="of an earlier release") as error:
                load(given_one)
            assert str(error.value).endswith("begin the epoch again, with set_epoch(7)")
        assert loader.state_dict()["sampler"] == state

    def test_of_lengths_that_were_computed_are_only_numbers(self, dataset):
        for lengths in (dataset.lengths[:5], dataset.lengths + 1, np.sort(dataset.lengths)):
            assert BucketBatchSampler(lengths, batch_size=4).rows_digest == ""


def in_shared_memory(value):
    """A value as a spawned process would get it; here, in this process."""
    buffer = io.BytesIO()
    multiprocessing.reduction.ForkingPickler(buffer).dump(value)
    return pickle.loads(buffer.getvalue())


COPIES = {
    "as it is": lambda dataset: dataset,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda dataset: pickle.loads(pickle.dumps(dataset)),
    "cloudpickle": lambda dataset: pickle.loads(cloudpickle.dumps(dataset)),
    "subset": lambda dataset: dataset.subset(range(COUNT)),
    "spawned": in_shared_memory,
}


def crops(dataset, loader, epochs, **others):
    """The first frames in each epoch, by utterance."""
    found = []
    for epoch in epochs:
        dataset.set_epoch(epoch)
        for each in others.values():
            each.set_epoch(epoch + 50)
        found.append(
            {
                id_: first
                for ids, firsts in seen(loader)
                for id_, first in zip(ids, firsts, strict=True)
            }
        )
    return found


class TestAnEpochOfADataset:
    @pytest.mark.parametrize("how", COPIES)
    def test_is_its_own(self, dataset, how):
        dataset.set_epoch(3)
        other = COPIES[how](dataset)
        assert other.epoch == 3
        if how != "as it is":
            other.set_epoch(4)
            assert (dataset.epoch, other.epoch) == (3, 4)
            dataset.set_epoch(5)
            assert (dataset.epoch, other.epoch) == (5, 4)

    @pytest.mark.parametrize("how", COPIES)
    @pytest.mark.parametrize("method", [None, "fork"])
    def test_is_heard_of_by_workers_that_live_on_and_is_not_what_others_set(
        self, dataset, how, method
    ):
        """Ray Train pickles what it gives to its workers."""
        expected = crops(dataset, DataLoader(dataset, 5, collate_fn=dataset.collate), range(3))
        assert expected[0] != expected[1] != expected[2]
        other = COPIES[how](dataset)
        workers = {} if method is None else {"num_workers": 1, "persistent_workers": True}
        loader = DataLoader(
            other, 5, collate_fn=other.collate, multiprocessing_context=method, **workers
        )
        others = {} if how == "as it is" else {"original": dataset}
        assert crops(other, loader, range(3), **others) == expected

    def test_is_each_forked_ranks_own_also_of_its_workers(self, dataset):
        dataset.set_epoch(9)
        expected = crops(
            copy.copy(dataset), DataLoader(copy.copy(dataset), 5, collate_fn=dataset.collate), [9]
        )
        turns = multiprocessing.get_context("fork").Barrier(3, timeout=120)

        def rank(number):
            workers = {"num_workers": 1, "persistent_workers": True}
            loader = DataLoader(dataset, 5, collate_fn=dataset.collate, **workers)
            first = iter(loader)  # workers are forked before anybody has set an epoch here
            turns.wait()
            turns.wait()  # the launcher has set one of its own
            assert dataset.epoch == 9
            assert {id_ for ids, _ in seen(first) for id_ in ids} == set(dataset.ids)
            found = crops(dataset, loader, [number, number + 1])
            turns.wait()
            assert dataset.epoch == number + 1
            alone = crops(
                dataset, DataLoader(dataset, 5, collate_fn=dataset.collate), [number, number + 1]
            )
            assert found == alone != expected

        def launcher():
            turns.wait()
            dataset.set_epoch(77)
            turns.wait()
            turns.wait()

        watching = threading.Thread(target=launcher)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=rank, args=(number,)) for number in (2, 5)]
        for each in ranks:
            each.start()
        watching.start()
        for each in [*ranks, watching]:
            each.join()
        assert [each.exitcode for each in ranks] == [0, 0]
        assert dataset.epoch == 77

    def test_of_a_forked_process_is_its_own(self, dataset):
        dataset.set_epoch(1)

        def child():
            dataset.set_epoch(2)

        run_forked(child)
        assert dataset.epoch == 1


class TestAnEpochOfASampler:
    """It comes with each batch."""

    @pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}])
    @pytest.mark.parametrize("how", ["collate", "items"])
    def test_decides_the_crops_in_torchs_loader(self, dataset, workers, how):
        lengths = {"batch_size": 5, "seed": 3}
        ours = own(dataset.subset(range(COUNT)), **lengths)
        sampler = BucketBatchSampler(dataset.lengths, **lengths)
        collate = {"collate": dataset.collate, "items": as_they_are}[how]
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **workers)
        for epoch in (4, 2):
            ours.set_epoch(epoch)
            sampler.set_epoch(epoch)
            found = [*loader] if how == "collate" else [dataset.collate(items) for items in loader]
            assert seen(found) == seen(ours)

    def test_decides_them_in_accelerates_loader_which_sets_that_alone(self, dataset):
        sampler = BucketBatchSampler(dataset.lengths, batch_size=5)
        loader = DataLoaderShard(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
        ours = own(dataset.subset(range(COUNT)), batch_size=5)
        assert [seen(loader) for _ in range(3)] == [seen(ours) for _ in range(3)]

    def test_ends_with_its_last_batch_also_if_nobody_asks_for_the_end(self, dataset):
        """As in a loop that counts the batches."""
        counted, loader = own(dataset, batch_size=5), own(dataset, batch_size=5)
        for _ in range(3):
            batches = iter(counted)
            expected = seen(loader)
            assert seen(itertools.islice(batches, len(counted))) == expected
        counted.set_epoch(2)  # again
        assert seen(counted) == expected
        state = counted.state_dict()
        batches = iter(counted)
        following = seen(itertools.islice(batches, len(counted)))
        counted.load_state_dict(state)
        assert seen(counted) == following

    def test_is_that_of_a_pass_also_if_another_begins(self, dataset):
        sampler = BucketBatchSampler(dataset.lengths, batch_size=5)
        sampler.set_epoch(1)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
        expected = seen(loader)
        batches = iter(loader)
        found = [next(batches)]
        sampler.set_epoch(2)
        dataset.set_epoch(2)
        assert seen([*found, *batches]) == expected

    def test_that_nobody_has_set_leaves_it_to_the_dataset(self, dataset):
        sampler = BucketBatchSampler(dataset.lengths, batch_size=5)
        loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
        assert crops(dataset, loader, [1]) == crops(
            dataset, DataLoader(dataset, 5, collate_fn=dataset.collate), [1]
        )

    def test_is_each_ranks_own_in_threads_that_share_a_dataset(self, dataset):
        def run(epoch, into):
            loader = own(dataset, batch_size=3, rank=epoch % 2, world_size=2)
            loader.set_epoch(epoch)
            into[epoch] = seen(loader)

        alone, together = {}, {}
        for epoch in range(6):
            run(epoch, alone)
        threads = [threading.Thread(target=run, args=(epoch, together)) for epoch in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone


def as_they_are(items):
    return items


def test_torchs_own_collate_stacks_crops_of_one_length(folder):
    whole = FeatureDataset(featcache.open(folder), rows(), crop=Crop(frames=8, where="start"))
    (batch,) = DataLoader(whole, COUNT)
    assert batch["features"].shape == (COUNT, 8, 1)
    assert batch["half"].tolist() == [number % 2 for number in range(COUNT)]
    assert type(batch) is dict


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("names", [None, ["a", "b"]])
def test_features_that_differ_in_length_need_the_datasets_collate(tmp_path, workers, names):
    version = make_version(tmp_path, {"a": np.zeros((3, 2)), "b": np.zeros((4, 2))})
    cache = featcache.open(version.path)
    dataset = FeatureDataset(cache if names is None else dict.fromkeys(names, cache))
    with pytest.raises(ArgumentError) as error:
        list(DataLoader(dataset, 2, num_workers=workers))
    assert str(error.value).splitlines()[-1].endswith("collate_fn=dataset.collate")
    assert workers or "\n" not in str(error.value)
    assert len([*DataLoader(dataset, 1, num_workers=workers)]) == 2


def test_random_samplers_of_torch_follow_the_dataset(dataset):
    loader = functools.partial(DataLoader, dataset, 5, collate_fn=dataset.collate)
    shuffled = loader(sampler=RandomSampler(dataset))
    assert crops(dataset, shuffled, [0, 4]) == crops(dataset, loader(), [0, 4])
