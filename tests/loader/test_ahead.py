"""Shards of an object store are fetched before the batches that read them, within the
limit, and each byte once."""

import errno
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest
from damage import refusing
from forking import run_forked, wait_until
from local_copies import copies_in, held, sizes
from make_cache import assert_same, make_features, make_version
from object_stores import upload
from processes import MOST_SECONDS, open_files

import featcache
from featcache.errors import StoreError
from featcache.loader.local_copies import ObjectShards
from featcache.loader.shards_ahead import ShardsAhead

pytest.importorskip("obstore")
SHARDS, EACH = 8, 12


def loader_of(cache, window=2, seed=5, **options):
    dataset = featcache.FeatureDataset(cache)
    return featcache.DataLoader(
        dataset, max_frames=1500, seed=seed, shards_in_memory=window, **options
    )


@pytest.fixture(scope="module")
def expected(original):
    """The batches of the cache in a folder."""
    return list(loader_of(featcache.open(original)))


def ahead_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("featcache-ahead")]


@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    wait_until(lambda: not ahead_threads())


@pytest.mark.filterwarnings("error::featcache.FeatcacheWarning")
@pytest.mark.parametrize(
    "room", [2, *(pytest.param(room, marks=pytest.mark.slow) for room in (3, 4)), 6]
)  # in shards
def test_each_byte_is_fetched_once_an_epoch_whatever_the_room(
    s3, uploaded, original, tmp_path, room
):
    limit, most = sum(sizes(original)[-room:]), sum(sizes(original))
    cache, expected = (
        featcache.open(uploaded, copy_to=tmp_path, copy_limit=limit),
        featcache.open(original),
    )
    loader, local = loader_of(cache), loader_of(expected)
    for _ in range(3):
        s3.reset()
        found = []
        for batch in loader:
            found.append(batch)
            assert held(tmp_path) <= limit
        assert_same(found, list(local))
        assert s3.sent <= 1.05 * most
        chunks = [
            path
            for method, path in s3.paths
            if path.endswith("/features/c/0/0") and method == "GET"
        ]
        assert len(chunks) <= 2 * SHARDS


def test_the_next_window_is_fetched_while_training_works_on_this_one_and_let_go_of_at_the_end(
    s3, uploaded, tmp_path
):
    loader = loader_of(featcache.open(uploaded, copy_to=tmp_path))
    next(iteration := iter(loader))
    wait_until(lambda: len(copies_in(tmp_path)) >= 4)
    iteration.close()
    wait_until(lambda: not ahead_threads())
    assert [name for name in open_files(tmp_path) if not name.endswith("/users")] == []


def test_crops_and_parts_of_a_dataset_let_go_of_what_they_have_read(
    s3, uploaded, original, tmp_path
):
    """Less is read of a shard than there is in it."""
    limit = sum(sizes(original)[-3:])
    rows = np.random.default_rng(0).permutation(SHARDS * EACH)[: SHARDS * EACH // 2]
    found, expected = [], []
    remote = featcache.open(uploaded, copy_to=tmp_path, copy_limit=limit)
    for cache, made in ((remote, found), (featcache.open(original), expected)):
        dataset = featcache.FeatureDataset(cache, crop=20).subset(rows)
        loader = featcache.DataLoader(dataset, batch_size=4, shards_in_memory=2)
        s3.reset()
        made += loader
        assert s3.sent <= 1.05 * sum(sizes(original))
    assert_same(found, expected)


def test_of_several_versions_shards_of_both_are_fetched_ahead(s3, uploaded, original, tmp_path):
    items = list(make_features(SHARDS * EACH, (8,), "uint16", max_frames=200).items())
    make_version(tmp_path / "codes", dict(items[:40]), dict(items[40:]), name="codes")
    upload(tmp_path / "codes", "s3://speech/ahead-codes")
    places = {"a": (uploaded, original), "b": ("s3://speech/ahead-codes", tmp_path / "codes")}
    made = []
    for place, tiers in (
        (0, {"copy_to": tmp_path / "copies", "copy_limit": sum(sizes(original))}),
        (1, {}),
    ):
        caches = {name: featcache.open(both[place], **tiers) for name, both in places.items()}
        made.append(
            list(
                featcache.DataLoader(
                    featcache.FeatureDataset(caches), batch_size=8, shards_in_memory=1
                )
            )
        )
    assert_same(*made)


def test_an_iteration_within_another_goes_on(s3, uploaded, original, tmp_path):
    """Validation in the middle of an epoch, whose copies are held meanwhile."""
    cache = featcache.open(uploaded, copy_to=tmp_path, copy_limit=sum(sizes(original)[-4:]))
    expected = list(loader_of(featcache.open(original), seed=7))
    outer = iter(loader_of(cache))
    next(outer)
    wait_until(lambda: len(copies_in(tmp_path)) == 4)
    with pytest.warns(featcache.FeatcacheWarning, match="no room for a shard"):
        assert_same(loader_of(cache, seed=7), expected)
    assert sum(len(batch["ids"]) for batch in outer) > 0


def test_an_error_of_the_store_is_raised_where_the_batch_would_have_come(
    s3, uploaded, tmp_path, monkeypatch
):
    cache = featcache.open(uploaded, copy_to=tmp_path)
    loader = loader_of(cache)
    next(iteration := iter(loader))

    def denied(self):
        raise StoreError("denied")

    monkeypatch.setattr("featcache.format.shard.Shard.open_features", denied)
    cache._shards._files.clear()
    for path in copies_in(tmp_path).values():
        path.unlink()
    cache._shards._copied.clear()
    with pytest.raises(StoreError, match="denied"):
        list(iteration)


def test_ctrl_c_does_not_wait_for_what_is_not_fetched_yet(
    s3, uploaded, tmp_path, monkeypatch, request
):
    """One shard hangs in the network, and others wait for its thread."""
    # a shell has it ignored in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    may_end = threading.Event()
    monkeypatch.setattr("featcache.loader.shards_ahead._SHARDS_AT_ONCE", 1)

    def hang(*_):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        may_end.wait(30)

    monkeypatch.setattr(ObjectShards, "hold", hang)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader_of(featcache.open(uploaded, copy_to=tmp_path), window=SHARDS)))
    assert len(ahead_threads()) == 1  # still in the network: nobody has waited for it
    monkeypatch.undo()
    may_end.set()


def test_without_more_threads_batches_fetch_their_shards(
    s3, uploaded, expected, tmp_path, monkeypatch
):
    """While the interpreter ends, there are none either; no batch waits for ever for what
    is never begun."""

    class Ending(ThreadPoolExecutor):
        def submit(self, *args):
            if self._thread_name_prefix == "featcache-ahead" and (
                self._work_queue.qsize() or self._threads
            ):
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
            return super().submit(*args)

    monkeypatch.setattr("featcache.loader.shards_ahead.ThreadPoolExecutor", Ending)
    assert_same(loader_of(featcache.open(uploaded, copy_to=tmp_path)), expected)


def test_a_disk_that_is_full_is_told_and_ranges_are_read(
    s3, uploaded, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("featcache.loader.places.os.posix_fallocate", refusing(errno.ENOSPC))
    with pytest.warns(
        featcache.FeatcacheWarning, match="No space left on device: no more shards are copied"
    ):
        assert_same(loader_of(featcache.open(uploaded, copy_to=tmp_path)), expected)


def test_the_state_is_of_what_training_has_received_and_not_of_the_windows_ahead(
    s3, uploaded, expected, tmp_path
):
    cache = featcache.open(uploaded, copy_to=tmp_path)
    loader = loader_of(cache)
    iteration = iter(loader)
    received = [next(iteration) for _ in range(5)]
    state = loader.state_dict()
    iteration.close()
    resumed = loader_of(cache)
    resumed.load_state_dict(state)
    assert_same(received, expected[:5])
    assert_same(resumed, expected[5:])


def test_a_forked_child_reads_while_its_parent_fetches(s3, uploaded, original, tmp_path):
    cache, expected = featcache.open(uploaded, copy_to=tmp_path), featcache.open(original)
    loader = loader_of(cache)
    next(iteration := iter(loader))

    def child():
        assert np.array_equal(cache[3], expected[3])
        assert_same(loader_of(cache, seed=7), list(loader_of(expected, seed=7)))
        iteration.close()  # of its parent, which goes on

    run_forked(child)
    assert sum(len(batch["ids"]) for batch in iteration) > 0


def test_without_windows_or_copies_nothing_is_fetched_ahead(
    s3, uploaded, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(ShardsAhead, "windows", None)
    dataset = featcache.FeatureDataset(featcache.open(uploaded, copy_to=tmp_path))
    assert len(list(featcache.DataLoader(dataset, batch_size=8))) == SHARDS * EACH // 8
    assert featcache.DataLoader(dataset, batch_size=8).prefetch == 2
    loader = loader_of(featcache.open(uploaded))
    assert loader.prefetch == 8
    assert_same(loader, expected)


@pytest.fixture
def crowded(monkeypatch):
    """Gives the batches of one window, with the contexts to make them in, where there is
    room for none of its shards; and what fetches these."""

    class Far:
        places, room, where = [None], 0, "nowhere"
        index = SimpleNamespace(shard=np.arange(1000) % 500)
        sizes = np.ones(500, int)

    everything = SimpleNamespace(positions_of=lambda rows: rows)
    monkeypatch.setattr(
        "featcache.loader.shards_ahead.in_object_stores", lambda dataset: [(everything, Far())]
    )

    def given(batches):
        shards = ShardsAhead(SimpleNamespace(versions=()))
        return shards.windows(iter(batches), SimpleNamespace(window=0)), shards

    return given


def test_of_batches_of_the_same_shards_only_the_first_does_not_wait_for_room(crowded):
    given, shards = crowded([[3, 1], [501, 3]])
    (_, first), (_, second) = given

    def make():
        with second:
            pass

    with ThreadPoolExecutor(1) as thread:
        with first:
            made = thread.submit(make)
            assert wait([made], timeout=0.1).not_done
        made.result(MOST_SECONDS)
    shards.close()


def test_the_batches_of_a_large_window_take_no_memory_each(crowded, traced):
    """Each of them reads most of the window's shards."""
    batches = [range(1000)] * 200

    def ahead():
        given, shards = crowded(batches)
        return next(given), given, shards

    assert traced(ahead).held < 5e5  # a set of shards for each batch: 14 MB
