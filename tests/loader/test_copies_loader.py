"""Copies of utterances in training: a dataset finds them by the ids of the utterances."""

import math

import numpy as np
import pytest
import soundfile
import torch
from augment_section import config_of, extract
from corpora import Corpus, speech

import featcache
from featcache.errors import ArgumentError, ManifestError, MissingItemError

SUFFIXES = ["_sp0.9", "_sp0.9_snr5", "", "_snr5"]


@pytest.fixture(scope="module")
def made(plain, tmp_path_factory):
    """A cache of four versions: `both` speeds and noise, `speeds`, `plain`, and `fast`, where no utterance is plain."""
    folder = tmp_path_factory.mktemp("copies")
    soundfile.write(folder / "noise.wav", 0.1 * speech(2.0, seed=3), 16000)
    (folder / "noises.csv").write_text("id,path\nnoise,noise.wav\n")
    sections = {
        "both": {"speed": [0.9, 1.0], "noise": {"manifest": "noises.csv", "snr": [5]}},
        "speeds": {"speed": [0.9, 1.0, 1.1]},
        "plain": None,
        "fast": {"speed": [1.1]},
    }
    for name, section in sections.items():
        extract(plain.manifest(), config_of(section, folder, name=name), folder / "features")
    (folder / "train.csv").write_text("id,speaker,digit\nutt-03,x,3\nutt-01,y,1\n")
    return folder


def opened(made, name):
    return featcache.open(made / "features", name)


def test_the_ids_of_utterances_give_all_their_copies(made):
    cache = opened(made, "both")
    dataset = featcache.FeatureDataset(cache, made / "train.csv")
    assert list(dataset.ids) == [f"{id_}{suffix}" for id_ in ("utt-03", "utt-01") for suffix in SUFFIXES]
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
        assert features.numpy().tobytes() == cache[id_].tobytes()
    assert dataset.lengths.tolist() == [len(cache[id_]) for id_ in dataset.ids]


def test_speeds_alone_have_no_column_for_noise(made):
    dataset = featcache.FeatureDataset(opened(made, "speeds"), made / "train.csv")
    assert len(dataset) == 6
    assert "snr" not in dataset.columns
    assert dataset[5]["speed"] == 1.1


def test_without_copies_the_ids_are_taken_as_they_are(made, tmp_path):
    cache = opened(made, "both")
    dataset = featcache.FeatureDataset(cache, made / "train.csv", copies=False)
    assert list(dataset.ids) == ["utt-03", "utt-01"]
    assert list(dataset.columns) == ["speaker", "digit"]
    (tmp_path / "some.csv").write_text("id,speed\nutt-02_snr5,slow\n")
    dataset = featcache.FeatureDataset(cache, tmp_path / "some.csv", copies=False)
    assert list(dataset.ids) == ["utt-02_snr5"]
    assert dataset[0]["speed"] == "slow"


def test_without_a_manifest_there_are_all_copies_or_the_plain_ones(made, plain):
    cache = opened(made, "both")
    dataset = featcache.FeatureDataset(cache)
    assert list(dataset.ids) == list(cache.ids)
    assert [f"{'' if s == 1 else '_sp0.9'}{'' if np.isnan(n) else '_snr5'}" for s, n in zip(
        dataset.columns["speed"], dataset.columns["snr"], strict=True
    )] == SUFFIXES * 12  # fmt: skip
    dataset = featcache.FeatureDataset(cache, copies=False)
    assert list(dataset.ids) == plain.ids
    assert dataset.columns == {}
    assert dataset[3]["features"].numpy().tobytes() == cache["utt-03"].tobytes()
    with pytest.raises(ArgumentError, match=r"has no plain copies: it has _sp1\.1"):
        featcache.FeatureDataset(opened(made, "fast"), copies=False)


def test_of_several_versions_those_copies_are_taken_that_all_have(made, plain):
    versions = {"a": opened(made, "both"), "b": opened(made, "speeds")}
    dataset = featcache.FeatureDataset(versions, made / "train.csv")
    assert list(dataset.ids) == ["utt-03_sp0.9", "utt-03", "utt-01_sp0.9", "utt-01"]
    assert dataset[0]["speed"] == 0.9
    assert len(featcache.FeatureDataset(versions)) == 24
    versions["c"] = opened(made, "plain")
    assert list(featcache.FeatureDataset(versions).ids) == plain.ids
    versions["d"] = opened(made, "fast")
    with pytest.raises(ArgumentError, match="no copies in common"):
        featcache.FeatureDataset(versions, made / "train.csv")


def test_columns_are_chosen_by_name(made):
    cache = opened(made, "both")
    assert list(featcache.FeatureDataset(cache, made / "train.csv", columns=[]).columns) == []
    dataset = featcache.FeatureDataset(cache, made / "train.csv", columns=["speed", "digit"])
    assert sorted(dataset.columns) == ["digit", "speed"]
    dataset = featcache.FeatureDataset(cache, made / "train.csv", columns={"digit": str, "snr": float})
    assert sorted(dataset.columns) == ["digit", "snr"]


def test_what_would_be_mistaken_is_refused(made, tmp_path):
    cache = opened(made, "both")
    (tmp_path / "marked.csv").write_text("id\nutt-03\nutt-03_sp0.9\n")
    with pytest.raises(ManifestError, match=r"1 of 2 ids end in .*: utt-03_sp0\.9"):
        featcache.FeatureDataset(cache, tmp_path / "marked.csv")
    (tmp_path / "hiding.csv").write_text("id,speed\nutt-03,2\n")
    with pytest.raises(ManifestError, match="the column 'speed' would hide the copies' own"):
        featcache.FeatureDataset(cache, tmp_path / "hiding.csv")
    assert len(featcache.FeatureDataset(cache, tmp_path / "hiding.csv", columns=[])) == 4


def test_copies_that_failed_are_missing(tmp_path, scratch):
    """A clip may be long enough, and its faster copy not."""
    corpus = Corpus(tmp_path)
    for name, seconds in (("short", 0.026), ("long", 0.5)):
        soundfile.write(tmp_path / f"{name}.wav", speech(seconds), 16000)
        corpus.add(name, f"{name}.wav")
    extract(corpus.manifest(), config_of({"speed": [1.0, 1.1]}), scratch)
    cache = featcache.open(scratch)
    with pytest.raises(MissingItemError, match=r"short_sp1\.1"):
        featcache.FeatureDataset(cache, corpus.manifest())
    dataset = featcache.FeatureDataset(cache, corpus.manifest(), skip_missing=True)
    assert list(dataset.ids) == ["short", "long", "long_sp1.1"]
    assert dataset.skipped == ["short_sp1.1"]
    assert dataset.columns["speed"].tolist() == [1.0, 1.0, 1.1]


def test_statistics_are_of_what_training_has(made):
    from featcache.stats import moments

    cache = opened(made, "both")
    dataset = featcache.FeatureDataset(cache, made / "train.csv")
    frames = np.concatenate([cache[id_] for id_ in dataset.ids]).astype(np.float64)
    stats = moments(cache, made / "train.csv", by="speaker")
    np.testing.assert_allclose(stats.mean, frames.mean(0), rtol=1e-12)
    assert stats.frames == len(frames)
