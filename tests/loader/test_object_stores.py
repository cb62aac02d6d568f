"""A version in an object store is read as one in a folder: item by item, in batches, by
workers, with copies or not."""

import shutil
import time

import numpy as np
import pytest
import torch
from damage import flip, shorten
from local_copies import held, sizes
from make_cache import make_features, make_version
from object_stores import upload
from torch.utils.data import DataLoader

import featcache
from featcache.errors import ArgumentError, DamagedError, FeatcacheWarning
from featcache.loader import places
from featcache.spec import Track

pytest.importorskip("obstore")


def upload_spoilt(url, original, tmp_path, spoil):
    """Upload a copy of the cache, of which a chunk of features is spoilt."""
    copy = shutil.copytree(original, tmp_path / "c")
    spoil(next(copy.glob("*/shards/*/features/c/0/0")))
    upload(copy, url)


def same(cache, local):
    assert list(cache.ids) == list(local.ids)
    everything = np.arange(len(local))
    for one, other in zip(cache.batch(everything), local.batch(everything), strict=True):
        assert torch.equal(one, other)
    for position in range(0, len(local), 9):
        np.testing.assert_array_equal(cache[position], local[position])
    rows = np.random.default_rng(0).integers(0, len(local), 50)
    for one, other in zip(cache.batch(rows), local.batch(rows), strict=True):
        assert torch.equal(one, other)
    parts = {"start": 0.05, "duration": 0.02}
    rows = np.flatnonzero(local.lengths > 10)[:20]
    assert torch.equal(cache.batch(rows, **parts)[0], local.batch(rows, **parts)[0])


class TestSameAsAFolder:
    @pytest.mark.parametrize("check", [False, True])
    @pytest.mark.parametrize("copies", [False, True])
    def test_every_item_and_batch(self, s3, uploaded, original, tmp_path, check, copies):
        copy_to = {"copy_to": tmp_path} if copies else {}
        same(featcache.open(uploaded, check=check, **copy_to), featcache.open(original))

    def test_quantised_codes_and_side_arrays(self, s3, tmp_path):
        side = (Track("scale", (2,), "float32", "scales"),)
        make_version(tmp_path / "c", make_features(20), name="quantised", quantized=True)
        make_version(tmp_path / "c", make_features(20, (8,), "uint16"), name="codes")
        make_version(tmp_path / "c", make_features(20), name="side", side=side)
        upload(tmp_path / "c", "s3://speech/kinds")
        for name in ("quantised", "codes", "side"):
            cache, local = (
                featcache.open(place, name, check=True)
                for place in ("s3://speech/kinds", tmp_path / "c")
            )
            same(cache, local)
        for position in range(20):
            np.testing.assert_array_equal(
                cache.side("scale", position), local.side("scale", position)
            )

    def test_with_ram_each_byte_is_fetched_once(
        self, s3, uploaded, original, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(places, "_SHARED", tmp_path)
        cache, local = featcache.open(uploaded, ram="100MB"), featcache.open(original)
        s3.reset()
        same(cache, local)
        assert s3.sent_of("/features/c/0/0") <= 1.01 * sum(sizes(original))

    def test_with_faults_on_the_way(self, s3, uploaded, original, tmp_path):
        s3.break_every(3)
        same(featcache.open(uploaded, check=True), featcache.open(original))
        everything = featcache.open(uploaded, check=True, copy_to=tmp_path).batch(range(96))[0]
        assert torch.equal(everything, featcache.open(original).batch(range(96))[0])


@pytest.mark.filterwarnings("ignore:a worker process takes longer:featcache.FeatcacheWarning")
@pytest.mark.parametrize(
    ("context", "copies"),
    [
        ("fork", False),
        ("fork", True),
        pytest.param("spawn", False, marks=pytest.mark.slow),
        ("spawn", True),
    ],
)
def test_workers_read_the_same_and_with_copies_fetch_each_byte_once(
    s3, uploaded, original, tmp_path, context, copies
):
    """They read each a part of every shard, and let go of it together: there is room for
    five."""
    local = featcache.open(original)
    options = {"copy_to": tmp_path, "copy_limit": sum(sizes(original)[-5:])} if copies else {}
    cache = featcache.open(uploaded, **options)
    np.testing.assert_array_equal(cache[0], local[0])  # this process has used its connection
    dataset = featcache.FeatureDataset(cache)
    sampler = featcache.BucketBatchSampler(
        dataset.lengths, batch_size=3, shards=dataset.shards, shards_in_memory=2
    )
    workers = {
        "num_workers": 1 if context == "spawn" else 2,
        "multiprocessing_context": context,
        "timeout": 60,
    }
    loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate, **workers)
    for epoch in range(1 if context == "spawn" else 2):
        sampler.set_epoch(epoch)
        s3.reset()
        for batch, rows in zip(loader, sampler, strict=True):
            assert torch.equal(batch["features"], local.batch(rows)[0])
        if copies:
            assert s3.sent_of("/features/c/0/0") <= 1.05 * sum(sizes(original))
    np.testing.assert_array_equal(cache[5], local[5])  # and uses it still


class TestCopies:
    def test_a_limit_below_a_shard_is_refused_at_once(self, s3, uploaded, tmp_path):
        with pytest.raises(ArgumentError, match=r"the largest shard .* copied whole"):
            featcache.open(uploaded, copy_to=tmp_path, copy_limit="10kB")

    def limit(self, original):
        """Room for two shards."""
        return 2 * max(sizes(original)) + 1

    def test_those_that_have_been_read_make_room_within_an_epoch(
        self, s3, uploaded, original, tmp_path
    ):
        local, limit = featcache.open(original), self.limit(original)
        cache = featcache.open(uploaded, copy_to=tmp_path, copy_limit=limit)
        s3.reset()
        for _ in range(2):  # epochs, each of which takes shard after shard
            before = s3.sent
            for position in np.argsort(local.index.shard, kind="stable").tolist():
                np.testing.assert_array_equal(cache[position], local[position])
                assert held(tmp_path) <= limit
            assert s3.sent_of("/features/c/0/0") <= 1.01 * sum(sizes(original))
            assert s3.sent - before <= 1.05 * sum(sizes(original))
            s3.sent_by_path.clear()

    def test_those_that_nobody_reads_any_more_make_room_too(
        self, s3, uploaded, original, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(places, "_IDLE_SECONDS", 0.05)
        local = featcache.open(original)
        cache = featcache.open(uploaded, copy_to=tmp_path, copy_limit=self.limit(original))
        # one utterance of each shard
        for position in np.unique(local.index.shard, return_index=True)[1].tolist():
            np.testing.assert_array_equal(cache[position], local[position])
            time.sleep(0.06)
        assert s3.sent_of("/features/c/0/0") >= sum(sizes(original))  # they were all copied

    def test_if_all_are_in_use_parts_are_read_from_the_store(
        self, s3, uploaded, original, tmp_path
    ):
        local = featcache.open(original)
        cache = featcache.open(uploaded, copy_to=tmp_path, copy_limit=self.limit(original))
        s3.reset()
        with pytest.warns(FeatcacheWarning, match="no room for a shard"):
            same(cache, local)

    def test_a_damaged_shard_is_no_copy(self, s3, original, tmp_path):
        upload_spoilt("s3://speech/damaged", original, tmp_path, lambda chunk: flip(chunk, 100))
        for options in ({"copy_to": tmp_path / "copies"}, {"check": True}):
            cache = featcache.open("s3://speech/damaged", **options)
            with pytest.raises(DamagedError, match="damaged"):
                cache.batch(range(96))
        assert not list((tmp_path / "copies").glob("featcache/*/*.part"))

    def test_objects_of_another_size_are_damage(self, s3, original, tmp_path):
        upload_spoilt("s3://speech/short", original, tmp_path, shorten)
        with pytest.raises(DamagedError, match=r"and .* were written.*featcache repair"):
            featcache.open("s3://speech/short").batch(range(96))
