"""Features stored as bfloat16: as bits on disk, bfloat16 in tensors, float32 in numpy."""

import json
import shutil

import numpy as np
import pytest
import torch
import zarr
from damage import flip
from hypothesis import given
from hypothesis import strategies as st

import featcache
from featcache.config import load_config
from featcache.errors import ArgumentError, ConfigError
from featcache.extraction.live import extractor
from featcache.spec import as_values, bfloat16_bits
from featcache.version.selection import select_version


@pytest.fixture(scope="module")
def cache(plain, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bfloat16")
    whole = load_config("fbank80", {"store.dtype": "float32", "name": "whole"})
    halves = load_config("fbank80", {"store.dtype": "bfloat16", "name": "halves"})
    mean = load_config("fbank80", {"store": {"dtype": "bfloat16", "pool": "mean"}, "name": "mean"})
    options = featcache.Options(device="cpu", threads=1)
    featcache.extract(plain.manifest(), [whole, halves, mean], folder, options)
    return folder


@pytest.fixture(scope="module")
def rounded(cache):
    """What torch makes of the features in float32, by utterance."""
    whole = featcache.open(cache, "whole")
    return {id_: torch.from_numpy(np.array(value)).bfloat16() for id_, value in whole.items()}


@given(st.floats(width=32, allow_nan=False))
def test_rounding_is_torchs(value):
    expected = torch.tensor(value, dtype=torch.float32).bfloat16()
    bits = bfloat16_bits(value)
    assert int(bits) == int(expected.view(torch.int16)) & 0xFFFF
    assert float(as_values(np.array(bits), "bfloat16")) == float(expected)


def test_it_is_stored_as_its_bits_and_read_as_what_they_mean(cache, rounded):
    halves = featcache.open(cache, "halves")
    assert (halves.spec.dtype, halves.stored_dtype) == ("bfloat16", np.uint16)
    for id_, expected in rounded.items():
        assert halves[id_].dtype == np.float32
        np.testing.assert_array_equal(halves[id_], expected.float().numpy())
        bits = halves.item(id_, raw=True)
        assert torch.equal(torch.from_numpy(bits.copy()).view(torch.bfloat16), expected)
    shard = halves.version.path / "shards" / halves.index.shards[0]
    stored = zarr.open_group(shard, mode="r")["features"]
    assert (stored.dtype, stored.shape[1:]) == (np.uint16, (80,))
    whole = featcache.open(cache, "whole").spec.num_bytes(100)
    assert whole == 2 * halves.spec.num_bytes(100)


@pytest.mark.parametrize("check", [False, True])
def test_batches_are_bfloat16(cache, rounded, check):
    halves = featcache.open(cache, "halves", check=check)
    features, lengths = halves.batch(["utt-03", "utt-11"], padding_value=-3.14159)
    assert features.dtype == torch.bfloat16
    assert torch.equal(features[0, : lengths[0]], rounded["utt-03"])
    assert torch.equal(features[1], rounded["utt-11"])
    padding = torch.tensor(-3.14159).bfloat16()
    assert (features[0, lengths[0] :] == padding).all()
    out = torch.empty(100_000, dtype=torch.bfloat16)
    into, _ = halves.batch(["utt-03", "utt-11"], padding_value=-3.14159, out=out)
    assert into.data_ptr() == out.data_ptr()
    assert torch.equal(into, features)
    with pytest.raises(ArgumentError, match=r"out is torch.float32: it must be torch.bfloat16"):
        halves.batch([0], out=out.float())


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
def test_training_reads_it(cache, rounded, dtype):
    halves = featcache.open(cache, "halves")
    dataset = featcache.FeatureDataset(halves, crop=20)
    (batch,) = featcache.DataLoader(dataset, batch_size=12, dtype=dtype)
    assert batch["features"].dtype == (dtype or torch.bfloat16)
    collated = dataset.collate([dataset[0], dataset[1]])
    assert torch.equal(collated["features"], dataset.batch([0, 1])["features"])
    for id_, features, start in zip(
        batch["ids"], batch["features"], batch["crop_start"].tolist(), strict=True
    ):
        first = round(start * 100)
        assert torch.equal(features, rounded[id_][first : first + 20].to(features.dtype))


@pytest.mark.parametrize("check", [False, True])
def test_packed_rows_hold_it(cache, rounded, check):
    halves = featcache.open(cache, "halves", check=check)
    dataset = featcache.FeatureDataset(halves, padding_value=-3.14159)
    loader = featcache.PackedLoader(dataset, tokens=100, rows=2, overflow="split")
    features = torch.cat([batch["features"].flatten(0, -2) for batch in loader])
    assert features.dtype == torch.bfloat16
    is_padding = (features == torch.tensor(-3.14159).bfloat16()).all(1)
    expected = torch.cat([*rounded.values()])
    assert is_padding.any()
    sums = features[~is_padding].float().sum(1)
    assert torch.equal(sums.sort()[0], expected.float().sum(1).sort()[0])


def test_columns_and_exports_have_its_values(cache, rounded, tmp_path, cli):
    halves = featcache.open(cache, "halves")
    done = cli("export", "--to", "numpy", halves.version.path, "-o", tmp_path / "out").with_code(0)
    assert "bfloat16 becomes float32, which holds it exactly" in done.out + done.err
    for id_, expected in rounded.items():
        array = np.load(tmp_path / "out" / f"{id_}.npy")
        np.testing.assert_array_equal(array, expected.float().numpy())


def test_statistics_vectors_and_live_features_are_of_its_values(
    cache, rounded, plain, tmp_path, cli
):
    halves, mean = featcache.open(cache, "halves"), featcache.open(cache, "mean")
    path = tmp_path / "stats.npz"
    cli("stats", halves.version.path, "-o", path).with_code(0)
    joined = torch.cat([*rounded.values()]).double()
    np.testing.assert_allclose(np.load(path)["mean"], joined.mean(0), rtol=1e-6)
    for id_, expected in rounded.items():
        np.testing.assert_allclose(mean[id_], expected.double().mean(0), rtol=1e-5, atol=1e-6)
    live = extractor(halves).file(plain.folder / "03.wav")
    np.testing.assert_array_equal(live, halves["utt-03"])
    again = tmp_path / "again"
    options = featcache.Options(device="cpu", source=str(halves.version.path))
    config = load_config(
        "fbank80", {"store": {"dtype": "bfloat16", "pool": "mean"}, "name": "mean"}
    )
    featcache.extract(plain.manifest(), config, again, options)
    for id_, vector in featcache.open(again).items():
        assert vector.tobytes() == mean[id_].tobytes()


def test_it_is_verified_repaired_recomputed_and_described(cache, plain, tmp_path, cli):
    copy = tmp_path / "copy"
    version = select_version(cache, "halves").path
    shutil.copytree(version, copy / version.name)
    flip(next((copy / version.name / "shards").glob("*/features/c/0/0")), 1000, 6)
    assert "checksum" in cli("verify", copy, "--manifest", plain.manifest()).with_code(1).out
    cli("repair", copy, "--manifest", plain.manifest()).with_code(0)
    ends = ("--manifest", plain.manifest(), "--recompute", "12")
    assert "12 bit-identical" in cli("verify", copy, *ends).with_code(0).out
    assert "bfloat16 [frames, 80]" in cli("info", copy).with_code(0).out
    assert cli("show", copy, "utt-03", "--json").with_code(0).json()
    report = tmp_path / "report.html"
    cli("report", copy, "-o", report).with_code(0)
    assert "bfloat16" in report.read_text()


def test_nan_is_found_in_it(plain, tmp_path):
    from extractions import write_config

    config = write_config(tmp_path, "NotANumber", module="mistaken_extractors")
    bits = load_config(config, {"store.dtype": "bfloat16"})
    summary = featcache.extract(
        plain.manifest(), bits, tmp_path / "c", featcache.Options(device="cpu")
    )
    assert "features are NaN or infinite as bfloat16;" in summary.too_many_failures


def test_features_beyond_float16_fit(plain, tmp_path):
    from extractions import write_config

    config = write_config(tmp_path, "Overflowing", module="mistaken_extractors")
    bits = load_config(config, {"store.dtype": "bfloat16"})
    summary = featcache.extract(
        plain.manifest(), bits, tmp_path / "c", featcache.Options(device="cpu")
    )
    assert summary.failed == 0


def test_codes_and_times_are_not_stored_as_it(plain, tmp_path):
    from extractions import write_config

    config = write_config(tmp_path, "ThreeRates", module="track_extractors")
    bits = load_config(config, {"store.dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"store\.dtype: bfloat16: codes of"):
        featcache.extract(plain.manifest(), bits, tmp_path / "c", featcache.Options(device="cpu"))


def test_the_document_says_so(cache):
    path = select_version(cache, "halves").path / "zarr.json"
    document = json.loads(path.read_text())["attributes"]["featcache"]
    assert (document["format"], document["spec"]["dtype"]) == (2, "bfloat16")
