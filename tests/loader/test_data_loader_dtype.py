"""featcache.DataLoader(dtype=): features converted to what can hold them, and codes never to anything else."""

import numpy as np
import pytest
import torch
from make_cache import make_features, make_version

import featcache
from featcache import Crop, DataLoader, FeatureDataset
from featcache.errors import ArgumentError
from featcache.loader.data_loader import dequantized

BATCHES = [[3, 1, 4], [15, 9], [26], [5, 35, 8, 9, 7], [], [9, 3, 2, 3, 8, 4, 6]]


@pytest.fixture(scope="module")
def features():
    return make_features(50, (8,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, features):
    folder = tmp_path_factory.mktemp("features")
    make_version(folder, features, name="fbank")
    make_version(folder, make_features(50, (4,), "uint16", seed=1), name="codes", frame_rate=50.0)
    return folder


@pytest.fixture
def dataset(folder):
    return FeatureDataset(featcache.open(folder, "fbank"), padding_value=3)


def test_several_versions_are_converted_each_as_asked_for(folder):
    caches = {name: featcache.open(folder, name) for name in ("fbank", "codes")}
    caches["codes"].index.num_frames.sum()
    dataset = FeatureDataset(caches, codebooks={"codes": 2})
    plain = dataset.batch([3, 1])
    (batch,) = DataLoader(dataset, [[3, 1]], dtype={"codes": torch.int64})
    assert batch["features"]["codes"].dtype == torch.int64
    assert torch.equal(batch["features"]["codes"], plain["features"]["codes"].long())
    assert torch.equal(batch["features"]["fbank"], plain["features"]["fbank"])
    assert torch.equal(batch["lengths"]["codes"], plain["lengths"]["codes"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_converts_to_a_dtype(dataset, dtype):
    for batch, rows in zip(DataLoader(dataset, BATCHES, dtype=dtype), BATCHES, strict=True):
        assert torch.equal(batch["features"], dataset.batch(rows)["features"].to(dtype))


def codes_of(folder, **options):
    return FeatureDataset(featcache.open(folder, "codes"), **options)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_codes_are_converted_to_integers_that_hold_them(folder, dtype):
    dataset = codes_of(folder)
    (batch,) = DataLoader(dataset, [[3, 1]], dtype=dtype)
    assert torch.equal(batch["features"], dataset.batch([3, 1])["features"].to(dtype))


@pytest.mark.parametrize(
    ("dtype", "what"),
    [
        (torch.bfloat16, "dtype is torch.bfloat16, and these features are .*: give one of integers"),
        (torch.float32, "give one of integers"),
        (torch.bool, "give one of integers"),
        (torch.uint8, "dtype is torch.uint8, which ends at 255: these features go up to 1,023"),
        (torch.int8, "which ends at 127"),
    ],
)
def test_codes_stay_what_they_are(folder, dtype, what):
    with pytest.raises(ArgumentError, match=what):
        DataLoader(codes_of(folder), [[1]], dtype=dtype)
    with pytest.raises(ArgumentError, match=what):
        DataLoader(both_of(folder), [[1]], dtype={"codes": dtype})


def test_what_codes_are_padded_with_is_held_too(folder):
    dataset = codes_of(folder, padding_value=40_000)
    with pytest.raises(ArgumentError, match="these features go up to 40,000"):
        DataLoader(dataset, [[1]], dtype=torch.int16)
    DataLoader(dataset, [[1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, (torch.bfloat16, torch.uint16)), (torch.int64, (torch.float16, torch.int64))],
)
def test_of_several_versions_one_dtype_is_for_those_that_it_fits(folder, dtype, expected):
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


def test_quantised_features_come_as_values(tmp_path, features):
    make_version(tmp_path / "features", features, quantized=True)
    dataset = FeatureDataset(featcache.open(tmp_path / "features"), padding_value=-7, crop=Crop(frames=9))
    for dtype in (None, torch.float16):
        for batch, rows in zip(DataLoader(dataset, BATCHES, dtype=dtype), BATCHES, strict=True):
            plain = dataset.batch(rows)["features"]
            assert batch["features"].dtype == (dtype or torch.float32)
            assert torch.equal(batch["features"], plain.to(dtype or torch.float32))
    for rows in BATCHES:  # as it is done on a GPU
        (ranges,) = dataset.frame_ranges(np.array(rows, np.int64), 0)
        values = dequantized(ranges.gather(raw=True), ranges, None, lambda tensor: tensor)
        assert torch.equal(values, dataset.batch(rows)["features"])
