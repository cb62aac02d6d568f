"""Versions of made-up features, written through the store as extraction does, without any
audio."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from small_shards import create, item, publish

import featcache
from featcache.format.writing import ShardBuilder
from featcache.loader.cache import Cache
from featcache.spec import QUANTIZATION, FeatureSpec, Frames, Track
from featcache.spec.quantize import quantize, stored_spec
from featcache.storage.location import ObjectPath
from featcache.version.version import VersionInfo

Features = Mapping[str, np.ndarray]
"""Arrays `[frames, *item_shape]` by id."""


def make_features(count, item_shape=(80,), dtype="float16", *, max_frames=40, seed=0, prefix="utt"):
    """Random features of `count` utterances: `utt-0`, `utt-1` …"""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, max_frames + 1, count).tolist()
    if np.dtype(dtype).kind == "f":
        arrays = [rng.standard_normal((length, *item_shape)).astype(dtype) for length in lengths]
    else:
        arrays = [rng.integers(0, 200, (length, *item_shape)).astype(dtype) for length in lengths]
    return {f"{prefix}-{number}": array for number, array in enumerate(arrays)}


def make_version(
    cache,
    *shards,
    name="fbank80",
    fingerprint=None,
    side=(),
    quantized=False,
    frame_rate=100.0,
    axis=None,
    rows=None,
    units="log mel energy",
    **sections,
):
    """Make a version of shards, the `Features` of each, in a folder or a place in an
    object store.

    The first array of all decides the item shape and the dtype; integers of several
    columns are codes of codebooks of 1,024. They are along time, unless `axis` says else. The fingerprint covers the config, of which
    these are sections, unless it is given. `made_up_side` says what side arrays hold;
    `rows`, what the manifest says of utterances, by id: `{"path": "a.wav", "start":
    1.5}`."""
    given = {key: section for key, section in sections.items() if section}
    config = {"name": name, "extractor": "made_up", "params": {}, **given}
    fingerprint = fingerprint or hashlib.sha256(json.dumps(config).encode()).hexdigest()
    first = next(iter(shards[0].values())) if shards else np.zeros((1, 80), np.float16)
    axis = Frames(frame_rate, 400) if axis is None else axis
    main = Track("features", first.shape[1:], first.dtype.name, units, axis)
    spec = FeatureSpec.of(16000, main, *side)
    if first.dtype.kind == "u" and first.ndim == 2:
        spec = replace(spec, units="codes", codebook_sizes=(1024,) * first.shape[1])
    if quantized:
        spec = stored_spec(spec, "uint8")
    cache = cache if isinstance(cache, ObjectPath) else Path(cache)
    version = create(
        cache, VersionInfo(name=name, fingerprint=fingerprint, config=config, spec=spec, made_by={})
    )
    row = 0
    for features in shards:
        add_shard(version, features, row=row, rows=rows)
        row += len(features)
    return version


def made_cache(folder, *shards, **options):
    """The only version in a folder, made so and opened."""
    return featcache.open(make_version(folder, *shards, **options).path)


def in_three_shards(features):
    """Features in three shards: seven utterances, one, and the rest."""
    items = list(features.items())
    return [dict(items[:7]), dict(items[7:8]), dict(items[8:])]


def padded_reference(arrays, padding_value=0):
    """A batch, made in the slow and obvious way."""
    longest = max(len(array) for array in arrays)
    rows = []
    for array in arrays:
        padding = np.full((longest - len(array), *array.shape[1:]), padding_value, array.dtype)
        rows.append(np.concatenate([array, padding]))
    return np.stack(rows)


def assert_same(found, expected):
    """Batches, items, or lists of them: with the same names in the same order, and
    tensors of the same dtypes."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    else:
        assert found == expected


def made_up_side(spec, features):
    """Entries beside an utterance's features: one for each three frames, counted up from
    how many frames it has."""
    count = len(features) // 3
    values = len(features) + np.arange(count * int(np.prod(spec.item_shape)))
    return values.reshape(count, *spec.item_shape).astype(spec.dtype)


def add_shard(version, features, *, row=0, generation=1, rows=None, run=""):
    """Publish one more shard; returns its name. `generation` is that of all items, or a
    mapping by id."""
    spec = version.info.spec
    arrays: Sequence[np.ndarray] = list(features.values())
    lengths = [len(array) for array in arrays]
    generations = dict.fromkeys(features, generation) if isinstance(generation, int) else generation
    source = {"size": 1000, "mtime_ns": 5, "sample_rate": spec.sample_rate}
    items = [
        item(
            name,
            **{"path": f"audio/{name}.wav", **source, **(rows or {}).get(name, {})},
            num_samples=length * 160 + 240,
            generation=generations.get(name, 1),
        )
        for name, length in zip(features, lengths, strict=True)
    ]
    builder = ShardBuilder(spec)
    for one, stored in zip(items, arrays, strict=True):
        sides = {side.name: made_up_side(side, stored) for side in spec.side}
        if spec.is_quantized:
            levels, parameters = quantize(torch.from_numpy(stored), [len(stored)])
            stored, sides[QUANTIZATION] = levels.numpy(), parameters.numpy()
        builder.append(one, stored, sides)
    return publish(version, builder, row, run).name


def codes_cache(folder, codes=None, dtype="uint16"):
    """A cache of codes, `[frames, 2]`: those that are given, or random ones, cut to
    codebooks of 16 and 300."""
    sizes = (16, 300)
    codes = codes or make_features(20, (2,), "uint16", max_frames=300)
    codes = {name: (array % np.array(sizes)).astype(dtype) for name, array in codes.items()}
    spec = FeatureSpec((2,), dtype, 75.0, 0, 24000, "codes", sizes)
    config = {"name": "codec", "extractor": "made_up"}
    info = VersionInfo(name="codec", fingerprint="1" * 64, config=config, spec=spec, made_by={})
    version = create(Path(folder), info)
    add_shard(version, codes)
    return Cache(version)
