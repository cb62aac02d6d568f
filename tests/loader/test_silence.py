"""Padding by the steady latent of silence, and the times of crops."""

import numpy as np
import pytest
import small_models
import torch

import featcache
from featcache.config import config_from
from featcache.errors import ArgumentError


@pytest.fixture(scope="module")
def cache(plain, tmp_path_factory):
    """Latents, at two precisions, and codes beside them."""
    folder = tmp_path_factory.mktemp("latents")
    weights = str(small_models.vibevoice(tmp_path_factory.mktemp("vibevoice")))
    audio = {"sample_rate": 24000}
    configs = [
        config_from(
            {
                "name": dtype,
                "extractor": "vibevoice",
                "params": {"weights": weights},
                "audio": audio,
                "store": {"dtype": dtype},
            }
        )
        for dtype in ("float32", "float16", "uint8")
    ]
    options = featcache.Options(device="cpu", threads=1)
    featcache.extract(plain.manifest(), [*configs, "fbank80"], folder, options)
    return folder


def test_the_value_is_what_long_silence_settles_on(cache):
    version = featcache.open(cache, "float32")
    silence = np.zeros(24000 * 12, np.float32)
    latents = featcache.extractor(version)(silence, 24000)
    assert np.abs(latents[60:] - version.silence).max() < 1e-5 * np.abs(version.silence).max()
    # which is neither 0, nor what silence begins with
    assert np.abs(latents[0] - version.silence).max() > 1e-2
    assert np.abs(version.silence).max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("check", [False, True])
def test_batches_are_padded_with_it(cache, dtype, check):
    version = featcache.open(cache, dtype, check=check)
    expected = torch.from_numpy(version.silence).to(getattr(torch, dtype))
    features, lengths = version.batch(range(12), padding_value="silence")
    dataset = featcache.FeatureDataset(version, padding_value="silence")
    (batch,) = featcache.DataLoader(dataset, batch_size=12)
    order = [dataset.ids[row] for row in range(12)]
    rows = [batch["ids"].index(id_) for id_ in order]
    assert torch.equal(batch["features"][rows], features)
    collated = dataset.collate([dataset[row] for row in range(12)])
    assert torch.equal(collated["features"], features)
    assert lengths.min() < lengths.max()
    for row, length in zip(features, lengths.tolist(), strict=True):
        assert (row[length:] == expected).all()


def test_packed_rows_of_a_mixture_are_padded_with_it(cache):
    version = featcache.open(cache, "float32")
    padded = [featcache.FeatureDataset(version, padding_value="silence") for _ in "ab"]
    sources = {"a": padded[0].subset(range(6)), "b": padded[1].subset(range(6, 12))}
    loader = featcache.PackedLoader(
        featcache.Mixture.union(sources), tokens=40, rows=2, overflow="error", spare=1
    )
    for batch in loader:
        is_own = torch.zeros(2, 40, dtype=torch.bool)
        for number, id_ in enumerate(batch["ids"]):
            tokens = batch["document_ids"] == number
            np.testing.assert_array_equal(batch["features"][tokens][:-1], version[id_])
            is_own |= tokens & (batch["positions"] < len(version[id_]))
        assert (batch["features"][~is_own] == torch.from_numpy(version.silence)).all()
    plain = featcache.FeatureDataset(version)
    with pytest.raises(ArgumentError, match="'b' has other values of padding than the first"):
        featcache.Mixture.union({"a": padded[0], "b": plain})


def test_it_may_be_chosen_for_one_of_several_versions(cache):
    versions = {name: featcache.open(cache, name) for name in ("float32", "fbank80")}
    dataset = featcache.FeatureDataset(versions, padding_value={"float32": "silence"})
    batch = dataset.batch([0, 11])
    assert (batch["features"]["fbank80"][0, batch["lengths"]["fbank80"][0] :] == 0).all()
    (length, _) = batch["lengths"]["float32"].tolist()
    silence = torch.from_numpy(versions["float32"].silence)
    assert (batch["features"]["float32"][0, length:] == silence).all()


@pytest.mark.parametrize("name", ["fbank80", "uint8"])
def test_versions_without_it_refuse(cache, name):
    version = featcache.open(cache, name)
    with pytest.raises(ArgumentError, match="keeps no value of silence"):
        version.batch([0], padding_value="silence")
    with pytest.raises(ArgumentError, match="keeps no value of silence"):
        featcache.FeatureDataset(version, padding_value="silence")
    with pytest.raises(ArgumentError, match="padding_value is 'noise': give a number"):
        version.batch([0], padding_value="noise")


def test_statistics_of_latents_normalise_them(cache, tmp_path, cli):
    version, path = featcache.open(cache, "float32"), tmp_path / "latents.npz"
    cli("stats", version.version.path, "-o", path).with_code(0)
    features, lengths = version.batch(range(12))
    normalised = featcache.Cmvn.load(path)(features, lengths)
    joined = torch.cat([row[:n] for row, n in zip(normalised, lengths.tolist(), strict=True)])
    assert joined.mean(0).abs().max() < 1e-4
    assert (joined.std(0, correction=0) - 1).abs().max() < 1e-4


def test_a_batch_tells_where_its_windows_are(cache):
    """In seconds of the utterance, which are those of several versions at once."""
    fbank = featcache.open(cache, "fbank80")
    crop = featcache.Crop(seconds=0.3, seed=3)
    dataset = featcache.FeatureDataset(fbank, crop=crop)
    batch = dataset.batch(range(12))
    starts, seconds = batch["crop_start"], batch["crop_seconds"]
    assert (starts.dtype, starts.shape, len({*starts.tolist()}) > 3) == (torch.float64, (12,), True)
    assert (seconds - 0.3).abs().max() < 0.011
    for row, start in enumerate(starts.tolist()):
        window = fbank.item(dataset.ids[row], start=start, duration=0.3)
        np.testing.assert_array_equal(batch["features"][row], window)
    item = dataset[4]
    assert (item["crop_start"], item["crop_seconds"]) == (starts[4], seconds[4])
    both = {"fbank": fbank, "latents": featcache.open(cache, "float32")}
    joint = featcache.FeatureDataset(both, crop=crop).batch([11])
    frames = fbank.item("utt-11", start=float(joint["crop_start"]), duration=0.3)
    np.testing.assert_array_equal(joint["features"]["fbank"][0], frames)
    long = featcache.FeatureDataset(fbank, crop=featcache.Crop(seconds=100)).batch([0])
    assert float(long["crop_start"]) == 0
    assert abs(float(long["crop_seconds"]) - 0.38) < 0.011
    assert "crop_start" not in featcache.FeatureDataset(fbank).batch([0])
