"""Everything at once: several versions, crops, quantised features, codebooks, copies and
tiers, as done one by one."""

import math
from fractions import Fraction
from types import SimpleNamespace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from make_cache import make_version, padded_reference

import featcache
from featcache import Crop, FeatureDataset

COUNT, COPIES = 12, ["_sp0.9", ""]
VERSIONS = {"float": 100.0, "quantized": 11025 / 128, "codes": 75.0}
"""Frames per second."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three versions of the same utterances, and the values of each utterance in each."""
    folder = tmp_path_factory.mktemp("features")
    ids = [f"utt-{number}{suffix}" for number in range(COUNT) for suffix in COPIES]
    seconds = np.random.default_rng(5).uniform(0.0, 1.3, len(ids)).tolist()
    stored = {}
    for name, rate in VERSIONS.items():
        rng = np.random.default_rng(len(name))
        arrays = {}
        for row in rng.permutation(len(ids)).tolist():  # an utterance's positions differ
            shape = (max(1, round(seconds[row] * rate) - 1), 4)
            drawn = rng.integers(0, 1000, shape) if name == "codes" else rng.standard_normal(shape)
            arrays[ids[row]] = drawn.astype(np.uint16 if name == "codes" else np.float32)
        items = list(arrays.items())
        shards = [dict(items[first : first + 9]) for first in range(0, len(items), 9)]
        options = {
            "frame_rate": rate,
            "quantized": name == "quantized",
            "augment": {"speed": [0.9, 1.0]},
        }
        make_version(folder, *shards, name=name, **options)
        cache = featcache.open(folder, name)
        stored[name] = {id_: np.array(cache[id_]) for id_ in arrays}
        if name != "quantized":
            assert all(np.array_equal(stored[name][id_], array) for id_, array in arrays.items())
    return folder, stored


def first_frame(crop, window, available, position, epoch, step):
    """Where an utterance's window begins, in Python's integers."""
    places = max(available - window, 0) // step + 1
    if crop.where == "start":
        return 0
    if crop.where == "center":
        return places // 2 * step
    mask = 2**64 - 1
    start = int(np.random.SeedSequence([crop.seed, epoch]).generate_state(1, np.uint64)[0])
    z = (start + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (((z ^ (z >> 31)) >> 32) * places >> 32) * step


def parts_of(stored, names, ids, crop, epoch, positions):
    """Of each version the wanted frames of each utterance."""
    rates = [Fraction(VERSIONS[name]) for name in names]
    ratios = [rate / rates[0] for rate in rates]
    step = math.lcm(*(ratio.denominator for ratio in ratios))
    step = step if step <= rates[0] else 1
    parts = {name: [] for name in names}
    for id_, position in zip(ids, positions, strict=True):
        arrays = [stored[name][id_] for name in names]
        if crop is None:
            windows = [(0, len(array)) for array in arrays]
        else:
            window = crop.frames or max(1, round(crop.seconds * float(rates[0])))
            available = min(
                math.floor(len(array) / ratio) for array, ratio in zip(arrays, ratios, strict=True)
            )
            first = first_frame(crop, window, available, position, epoch, step)
            windows = [(round(first * ratio), max(1, round(window * ratio))) for ratio in ratios]
        for name, array, (first, count) in zip(names, arrays, windows, strict=True):
            parts[name].append(array[first : first + count])
    return parts


crops = st.builds(
    Crop,
    frames=st.integers(1, 60),
    where=st.sampled_from(["random", "start", "center"]),
    seed=st.integers(0, 2**40),
)
asked_for = st.builds(  # a dataset, and the batches that are read of it
    SimpleNamespace,
    names=st.lists(st.sampled_from(list(VERSIONS)), min_size=1, max_size=3, unique=True),
    crop=st.none() | crops,
    codebooks=st.none() | st.integers(1, 4),
    rows=st.lists(
        st.lists(st.integers(-2 * COUNT, 2 * COUNT - 1), max_size=6), min_size=1, max_size=4
    ),
    epoch=st.integers(0, 5),
    ram=st.sampled_from([None, "1MB"]),
    has_manifest=st.booleans(),
    copies=st.booleans(),
    padding=st.integers(0, 9),
)


@given(asked_for)
def test_a_loader_gives_what_the_slow_way_gives(made, asked):
    names, crop, codebooks, rows, copies = (
        asked.names,
        asked.crop,
        asked.codebooks,
        asked.rows,
        asked.copies,
    )
    folder, stored = made
    if not copies:
        rows = [[row // 2 for row in batch] for batch in rows]
    caches = {name: featcache.open(folder, name, ram=asked.ram) for name in names}
    manifest = (
        [{"id": f"utt-{n}", "text": f"word {n}"} for n in range(COUNT)]
        if asked.has_manifest
        else None
    )
    options = {"codebooks": {"codes": codebooks}} if codebooks and "codes" in names else {}
    dataset = FeatureDataset(
        caches, manifest, crop=crop, padding_value=asked.padding, copies=copies, **options
    )
    assert len(dataset) == COUNT * (len(COPIES) if copies else 1)
    dataset.set_epoch(asked.epoch)
    first = caches[names[0]]
    for batch, batch_rows in zip(featcache.DataLoader(dataset, rows), rows, strict=True):
        ids = [dataset.ids[row] for row in batch_rows]
        of_items = dataset.collate([dataset[row] for row in batch_rows])
        batches = [batch, of_items, dataset.collate(dataset.__getitems__(batch_rows))]
        for one in batches:
            assert one["lengths"][names[0]].tolist() == dataset.lengths[batch_rows].tolist()
        assert batch["ids"] == ids
        if asked.has_manifest:
            assert batch["text"] == [
                f"word {id_.removeprefix('utt-').removesuffix('_sp0.9')}" for id_ in ids
            ]
        if copies:
            assert batch["speed"].tolist() == [
                0.9 if id_.endswith("_sp0.9") else 1.0 for id_ in ids
            ]
        parts = parts_of(stored, names, ids, crop, asked.epoch, first.find(ids).tolist())
        for name in names:
            width = codebooks if name == "codes" else None
            arrays = [array[:, :width] for array in parts[name]]
            assert batch["lengths"][name].tolist() == [len(array) for array in arrays]
            some = next(iter(stored[name].values()))[:, :width]
            expected = padded_reference(arrays, asked.padding) if ids else some[np.newaxis][:0, :0]
            for one in batches:
                found = one["features"][name].numpy()
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                assert np.array_equal(found, expected)
