"""Windows in utterances: where they may lie, what decides where they do, and what becomes of short utterances."""

import numpy as np
import pytest
from make_cache import make_features, make_version

import featcache
from featcache import Crop
from featcache.errors import ArgumentError
from featcache.loader.spans import Windows


@pytest.fixture(scope="module")
def features():
    return make_features(60, (3,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, features):
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, features)
    return folder


@pytest.fixture
def cache(folder):
    return featcache.open(folder)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, "either frames or seconds"),
        ({"frames": 3, "seconds": 1.0}, "either frames or seconds"),
        ({"frames": 0}, "frames is 0: it must be a whole number, 1 or more"),
        ({"frames": 2.5}, "frames is 2.5: it must be a whole number, 1 or more"),
        ({"frames": "20"}, "frames is '20': it must be a whole number, 1 or more"),
        ({"frames": 2**63}, f"frames is {2**63}: it must be a whole number, 1 or more, at most {2**62}"),
        ({"seconds": 1e30}, "seconds is 1e[+]30: it must be a number above 0, and less than 1e9"),
        ({"frames": True}, "frames is True: it must be a whole number, 1 or more"),
        ({"seconds": 0.0}, "seconds is 0.0: it must be a number above 0"),
        ({"seconds": float("nan")}, "seconds is nan: it must be a number above 0"),
        ({"seconds": "2"}, "seconds is '2': it must be a number above 0"),
        ({"frames": 3, "where": "middle"}, "where is 'middle': it must be one of random, start, center"),
        ({"frames": 3, "short": "skip"}, "short is 'skip': it must be one of pad, drop, error"),
        ({"frames": 3, "seed": -1}, "seed is -1"),
    ],
)
def test_what_does_not_hold_together_is_refused(arguments, what):
    with pytest.raises(ArgumentError, match=what):
        Crop(**arguments)


def firsts_of(crop, lengths, epoch):
    """The first frames of windows of a single version."""
    (firsts,), _ = Windows(crop, [100.0]).ranges([lengths], np.arange(len(lengths)), epoch)
    return firsts


def test_random_windows_lie_anywhere_with_the_same_chance():
    firsts = firsts_of(Crop(frames=10), np.full(20_000, 19), 0)
    counts = np.bincount(firsts, minlength=10)
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi-square with 9 degrees of freedom: 1 in 1,000
    again = firsts_of(Crop(frames=10), np.full(20_000, 19), 1)
    assert 0.08 < (firsts == again).mean() < 0.12
    assert abs(np.corrcoef(firsts[:-1], firsts[1:])[0, 1]) < 0.03


def test_windows_are_what_they_were_in_every_release():
    """Training that is resumed after an update sees the same crops."""
    firsts = firsts_of(Crop(frames=5, seed=7), np.full(6, 1000), 2)
    assert firsts.tolist() == [37, 432, 330, 186, 136, 626]


class TestInADataset:
    def test_seconds_are_frames_of_the_version(self, cache):
        assert featcache.FeatureDataset(cache, crop=Crop(seconds=0.052)).lengths.max() == 5
        assert featcache.FeatureDataset(cache, crop=Crop(seconds=0.0001)).lengths.max() == 1

    def test_short_ones_are_dropped_where_that_is_asked_for(self, cache, features, tmp_path):
        kept = [name for name, array in features.items() if len(array) >= 12]
        manifest = tmp_path / "train.csv"
        manifest.write_text("id,digit\n" + "".join(f"{name},{name[4:]}\n" for name in features))
        for source in (None, manifest):
            dataset = featcache.FeatureDataset(cache, source, crop=Crop(frames=12, short="drop"))
            assert list(dataset.ids) == kept
            assert dataset.dropped == [name for name in features if name not in kept]
            assert not dataset.skipped
            assert set(dataset.lengths.tolist()) == {12}
            batch = dataset.batch(range(len(kept)))
            assert batch["features"].shape == (len(kept), 12, 3)
        assert batch["digit"].tolist() == [int(name[4:]) for name in kept]

    def test_short_ones_are_named_where_they_are_refused(self, cache, features):
        count = sum(len(array) < 12 for array in features.values())
        with pytest.raises(
            ArgumentError, match=rf"{count} of 60 utterances are shorter than the crop of 12 frames: utt-"
        ):
            featcache.FeatureDataset(cache, crop=Crop(frames=12, short="error"))
        with pytest.raises(ArgumentError, match="60 of 60 utterances are shorter than the crop of 1000 frames"):
            featcache.FeatureDataset(cache, crop=Crop(frames=1000, short="drop"))
