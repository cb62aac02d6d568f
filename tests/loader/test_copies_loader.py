"""Copies of utterances in training: a dataset finds them by the ids of the utterances."""

import math

import numpy as np
import pytest
import torch
from augment_section import config_of, extract
from corpora import Corpus, speech
from make_cache import make_features, make_version

import featcache
from featcache.errors import ArgumentError, ManifestError, MissingItemError
from featcache.manifest.read import manifest_of
from featcache.stats import moments

SUFFIXES = ["_sp0.9", "_sp0.9_snr5", "", "_snr5"]
VERSIONS = {
    "both": (
        {"speed": [0.9, 1.0], "noise": {"manifest": "noises.csv", "snr": [5], "seed": 0}},
        SUFFIXES,
    ),
    "speeds": ({"speed": [0.9, 1.0, 1.1]}, ["_sp0.9", "", "_sp1.1"]),
    "plain": (None, [""]),
    "fast": ({"speed": [1.1]}, ["_sp1.1"]),
    "other": (
        {"speed": [1.0], "noise": {"manifest": "noises.csv", "snr": [5], "seed": 1}},
        ["", "_snr5"],
    ),
}
"""The `augment` section of each version, and the suffixes of the copies that it makes."""

PLAIN_IDS = [f"utt-{number:02}" for number in range(12)]
TRAIN = [{"id": "utt-03", "speaker": "x", "digit": 3}, {"id": "utt-01", "speaker": "y", "digit": 1}]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    for name, (section, suffixes) in VERSIONS.items():
        ids = [f"{id_}{suffix}" for id_ in PLAIN_IDS for suffix in suffixes]
        features = dict(zip(ids, make_features(len(ids)).values(), strict=True))
        make_version(folder, features, name=name, augment=section)
    return folder


@pytest.fixture
def both(made):
    return featcache.open(made, "both")


def test_the_ids_of_utterances_give_all_their_copies(both):
    dataset = featcache.FeatureDataset(both, TRAIN)
    assert list(dataset.ids) == [
        f"{id_}{suffix}" for id_ in ("utt-03", "utt-01") for suffix in SUFFIXES
    ]
    assert list(dataset.columns["speaker"]) == ["x"] * 4 + ["y"] * 4
    assert dataset.columns["digit"].tolist() == [3] * 4 + [1] * 4
    assert dataset.columns["speed"].tolist() == [0.9, 0.9, 1.0, 1.0] * 2
    np.testing.assert_array_equal(dataset.columns["snr"], [math.nan, 5, math.nan, 5] * 2)
    batch = dataset.collate(dataset.__getitems__([1, 2]))
    assert batch["ids"] == ["utt-03_sp0.9_snr5", "utt-03"]
    assert batch["speed"].tolist() == [0.9, 1.0]
    assert batch["speed"].dtype == torch.float64
    for row, id_ in enumerate(batch["ids"]):
        features = batch["features"][row, : batch["lengths"][row]]
        assert features.numpy().tobytes() == both[id_].tobytes()
    assert dataset.lengths.tolist() == [len(both[id_]) for id_ in dataset.ids]


def test_without_copies_the_ids_are_taken_as_they_are(both):
    dataset = featcache.FeatureDataset(both, TRAIN, copies=False)
    assert list(dataset.ids) == ["utt-03", "utt-01"]
    assert list(dataset.columns) == ["speaker", "digit"]
    dataset = featcache.FeatureDataset(both, [{"id": "utt-02_snr5", "speed": "slow"}], copies=False)
    assert list(dataset.ids) == ["utt-02_snr5"]
    assert dataset[0]["speed"] == "slow"


def test_without_a_manifest_there_are_all_copies_or_the_plain_ones(made, both):
    dataset = featcache.FeatureDataset(both)
    assert list(dataset.ids) == list(both.ids)
    assert dataset.columns["speed"].tolist() == [0.9, 0.9, 1.0, 1.0] * 12
    np.testing.assert_array_equal(dataset.columns["snr"], [math.nan, 5, math.nan, 5] * 12)
    dataset = featcache.FeatureDataset(both, copies=False)
    assert list(dataset.ids) == PLAIN_IDS
    assert dataset.columns == {}
    assert dataset[3]["features"].numpy().tobytes() == both["utt-03"].tobytes()
    with pytest.raises(ArgumentError, match=r"has no plain copies: it has _sp1\.1"):
        featcache.FeatureDataset(featcache.open(made, "fast"), copies=False)


def test_of_several_versions_those_copies_are_taken_that_all_have(made, both):
    versions = {"a": both, "b": featcache.open(made, "speeds")}
    dataset = featcache.FeatureDataset(versions, TRAIN)
    assert list(dataset.ids) == ["utt-03_sp0.9", "utt-03", "utt-01_sp0.9", "utt-01"]
    assert dataset[0]["speed"] == 0.9
    assert "snr" not in dataset.columns  # speeds alone have none
    assert len(featcache.FeatureDataset(versions)) == 24
    versions["c"] = featcache.open(made, "plain")
    assert list(featcache.FeatureDataset(versions).ids) == PLAIN_IDS
    versions["d"] = featcache.open(made, "fast")
    with pytest.raises(ArgumentError, match="no copies in common"):
        featcache.FeatureDataset(versions, TRAIN)


@pytest.mark.parametrize("manifest", [TRAIN, None])
def test_copies_with_different_noise_are_not_joined(made, both, manifest):
    versions = {"a": both, "b": featcache.open(made, "other")}
    with pytest.raises(ArgumentError, match=r"different noise, or different seeds.*copies=False"):
        featcache.FeatureDataset(versions, manifest)
    plain = featcache.FeatureDataset(versions, manifest, copies=False)
    assert list(plain.ids) == (PLAIN_IDS if manifest is None else ["utt-03", "utt-01"])
    versions["c"] = featcache.open(made, "speeds")
    assert list(featcache.FeatureDataset(versions, manifest).ids) == list(plain.ids)


@pytest.mark.parametrize("columns", [[], ["digit", "speed"], {"digit": str, "snr": float}])
def test_columns_are_chosen_by_name(both, columns):
    assert sorted(featcache.FeatureDataset(both, TRAIN, columns=columns).columns) == [*columns]


def test_what_would_be_mistaken_is_refused(both):
    with pytest.raises(ManifestError, match=r"1 of 2 ids end in .*, as utt-03_sp0\.9: rename"):
        featcache.FeatureDataset(both, [{"id": "utt-03"}, {"id": "utt-03_sp0.9"}])
    hiding = [{"id": "utt-03", "speed": 2}]
    with pytest.raises(ManifestError, match="the column 'speed' would hide the copies' own"):
        featcache.FeatureDataset(both, hiding)
    assert len(featcache.FeatureDataset(both, hiding, columns=[])) == 4


def test_copies_that_failed_are_missing(tmp_path, scratch):
    """A clip may be long enough, and its faster copy not."""
    corpus = Corpus(tmp_path)
    for name, seconds in (("short", 0.026), ("long", 0.5)):
        corpus.record(name, f"{name}.wav", speech(seconds))
    extract(corpus.manifest(), config_of({"speed": [1.0, 1.1]}), scratch)
    cache = featcache.open(scratch)
    with pytest.raises(MissingItemError, match=r"short_sp1\.1"):
        featcache.FeatureDataset(cache, corpus.manifest())
    dataset = featcache.FeatureDataset(cache, corpus.manifest(), skip_missing=True)
    assert list(dataset.ids) == ["short", "long", "long_sp1.1"]
    assert dataset.skipped == ["short_sp1.1"]
    assert dataset.columns["speed"].tolist() == [1.0, 1.0, 1.1]


def test_statistics_are_of_what_training_has(both):
    dataset = featcache.FeatureDataset(both, TRAIN)
    frames = np.concatenate([both[id_] for id_ in dataset.ids]).astype(np.float64)
    stats = moments(both, manifest_of(TRAIN), by="speaker")
    np.testing.assert_allclose(stats.mean, frames.mean(0), rtol=1e-12)
    assert stats.frames == len(frames)
