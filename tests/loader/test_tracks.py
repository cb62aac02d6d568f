"""Tracks: an array beside the main one as a cache of its own, and versions whose utterances are
one vector each."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from damage import flip
from make_cache import made_cache, made_up_side, make_features, padded_reference

import featcache
from featcache.errors import ArgumentError, DamagedError
from featcache.spec import Clip, Frames, Track

SLOW = Track("slow", (2,), "int64", "every third frame", Frames(25.0))
UNTIMED = Track("untimed", (), "float32", "anything")


@pytest.fixture(scope="module")
def features():
    made = make_features(12, (4,), "float32", max_frames=60)
    return {id_: np.repeat(array, 3, axis=0) for id_, array in made.items()}  # none is empty


@pytest.fixture(scope="module")
def cache(tmp_path_factory, features):
    items = list(features.items())
    shards = (dict(items[:5]), dict(items[5:]))
    folder = tmp_path_factory.mktemp("tracks")
    return made_cache(folder, *shards, side=(SLOW, UNTIMED), frame_rate=75.0)


@pytest.fixture(scope="module")
def slow(features):
    return {id_: made_up_side(SLOW, array) for id_, array in features.items()}


def test_a_track_is_a_cache_of_its_entries(cache, slow):
    track = cache.track("slow")
    assert track.spec.tracks == (replace(SLOW, name="features"),)
    assert [*track.ids] == [*slow]
    assert track.lengths.tolist() == [*map(len, slow.values())]
    for id_, entries in track.items():
        np.testing.assert_array_equal(entries, slow[id_])
    ids = [*slow][::-2]
    batch, lengths = track.batch(ids, padding_value=-1)
    np.testing.assert_array_equal(batch, padded_reference([slow[id_] for id_ in ids], -1))
    assert lengths.tolist() == [len(slow[id_]) for id_ in ids]
    assert "25 frames/s" in repr(track)
    assert "int64 [frames, 2]" in repr(track)


def test_a_span_of_seconds_is_the_same_time_in_each_track(cache, features, slow):
    id_ = max(features, key=lambda one: len(features[one]))
    whole = cache.item(id_, start=0.2, duration=0.4)
    np.testing.assert_array_equal(whole, features[id_][15:45])
    np.testing.assert_array_equal(
        cache.track("slow").item(id_, start=0.2, duration=0.4), slow[id_][5:15]
    )


def test_tracks_of_one_version_are_joined_in_a_dataset(cache, features, slow):
    both = {"fast": cache, "slow": cache.track("slow")}
    dataset = featcache.FeatureDataset(both, crop=featcache.Crop(seconds=0.2))
    for batch in featcache.DataLoader(dataset, batch_size=5, seed=1):
        for row, id_ in enumerate(batch["ids"]):
            count = int(batch["lengths"]["slow"][row])
            assert int(batch["lengths"]["fast"][row]) == 3 * count
            fast, entries = (batch["features"][name][row].numpy() for name in ("fast", "slow"))
            first = int(np.flatnonzero((features[id_] == fast[0]).all(1))[0]) // 3
            np.testing.assert_array_equal(entries[:count], slow[id_][first : first + count])


def test_a_track_is_the_same_in_another_process(cache, slow):
    track = pickle.loads(pickle.dumps(cache.track("slow")))
    assert {id_: entries.tolist() for id_, entries in track.items()} == {
        id_: entries.tolist() for id_, entries in slow.items()
    }


def test_a_track_is_opened_once(cache, monkeypatch):
    """Also in another process; opening one reads the table of every shard."""
    for opened in (cache, pickle.loads(pickle.dumps(cache))):
        track = opened.track("slow")
        with monkeypatch.context() as patch:
            patch.setattr("featcache.loader.track.TrackShards", None)
            assert opened.track("slow") is track


def test_an_unknown_track_is_refused_with_those_that_exist(cache):
    with pytest.raises(ArgumentError, match="no track 'fast'; there are features, slow, untimed"):
        cache.track("fast")
    assert cache.track("features") is cache


def test_a_flipped_bit_of_a_track_is_found(tmp_path, features):
    cache = made_cache(tmp_path, features, side=(SLOW,))
    (shard,) = cache.index.shards
    flip(cache.version.path / "shards" / shard / "side_slow/c/0/0", 3)
    track = featcache.open(tmp_path).track("slow")
    with pytest.raises(DamagedError, match="damaged"):
        track.batch([0, 1], check=True)
    with pytest.raises(DamagedError, match="damaged"):
        featcache.open(tmp_path, check=True).track("slow").item(0)


VECTORS = {f"utt-{number}": np.full((1, 3), number, np.float32) for number in range(9)}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    return made_cache(folder, VECTORS, axis=Clip(), name="speaker")


def test_an_utterance_of_a_vector_version_is_one_vector(vectors):
    np.testing.assert_array_equal(vectors["utt-4"], [4, 4, 4])
    assert vectors["utt-4"].shape == (3,)
    assert vectors.lengths.tolist() == [1] * 9
    batch, lengths = vectors.batch(["utt-7", "utt-2"])
    assert lengths is None
    torch.testing.assert_close(batch, torch.tensor([[7.0] * 3, [2.0] * 3]))
    assert vectors.batch([])[0].shape == (0, 3)
    assert "float32 [3], one for each utterance" in repr(vectors)
    np.testing.assert_array_equal(vectors.item("utt-4", start=0.1, duration=0.2), [4, 4, 4])


def test_vectors_are_stacked_beside_frames(vectors, tmp_path):
    frames = make_features(9, (4,), "float32")
    both = {"fbank": made_cache(tmp_path, frames), "speaker": vectors}
    dataset = featcache.FeatureDataset(both)
    assert dataset[5]["features"]["speaker"].tolist() == [5, 5, 5]
    for batch in featcache.DataLoader(dataset, batch_size=4):
        numbers = [int(id_.removeprefix("utt-")) for id_ in batch["ids"]]
        assert batch["features"]["speaker"].tolist() == [[number] * 3 for number in numbers]
        assert batch["lengths"]["speaker"] is None
        assert batch["lengths"]["fbank"].tolist() == [len(frames[id_]) for id_ in batch["ids"]]
    items = [dataset[row] for row in (3, 1)]
    collated = dataset.collate(items)
    assert collated["features"]["speaker"].tolist() == [[3] * 3, [1] * 3]
    assert collated["lengths"]["speaker"] is None
