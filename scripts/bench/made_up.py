"""Made-up features, and versions of them, written as a run writes them but without any audio."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from corpus import KINDS
from numpy.typing import NDArray

from featcache.format.shard import Item
from featcache.format.writing import ShardBuilder
from featcache.quantize import quantize, stored_spec
from featcache.spec import QUANTIZATION, FeatureSpec
from featcache.storage.location import Location
from featcache.version.version import Version, VersionInfo
from featcache.version.wanted import Wanted

BINS = 80
MANIFEST = Wanted("made up", np.zeros((3, 0), np.uint64))
"""What wants the items, until they are there."""


def make_features(count: int, mean_seconds: float | None = None) -> list[NDArray[np.float16]]:
    """Arrays float16 [frames, 80], about as smooth as log mel energies.

    Args:
        count: How many.
        mean_seconds: Their length, to a tenth; by default, lengths are those of LibriSpeech.
    """
    random = np.random.default_rng(0)
    noise = random.standard_normal((20_000, BINS), np.float32)
    pool = np.cumsum(noise, 0)
    pool = ((pool[50:] - pool[:-50]) / 5 + 8).astype(np.float16)
    seconds = KINDS["long"].lengths(random)
    if mean_seconds is not None:
        seconds = iter(mean_seconds * random.uniform(0.9, 1.1, count))
    cuts = ((int(next(seconds) * 100) - 2, int(random.integers(len(pool)))) for _ in range(count))
    return [np.take(pool, np.arange(start, start + length), axis=0, mode="wrap") for length, start in cuts]


def make_version(
    cache: Location, utterances: Sequence[NDArray], items_per_shard: int = 500, quantized: bool = False
) -> Version:
    """A version of these features."""
    first = utterances[0]
    spec = FeatureSpec(first.shape[1:], first.dtype.name, 100.0, 400, 16000, "made up")
    if quantized:
        spec = stored_spec(spec, "uint8")
    info = VersionInfo(name="made-up", fingerprint="ab" * 32, config={"name": "made-up"}, spec=spec, made_by={})
    version = Version.create(cache / info.folder_name, info)
    MANIFEST.save(version)
    for row in range(0, len(utterances), items_per_shard):
        add_shard(version, utterances[row : row + items_per_shard], row)
    want_all(version)
    return version


def want_all(version: Version) -> None:
    """Have the manifest want what is there, as after a run over it."""
    tables = [shard.table for shard in sorted(map(version.shard, version.shard_names()), key=lambda one: one.info.row)]
    rows = [np.stack([table[name] for name in ("id_hash", "row_hash", "generation")]) for table in tables]
    Wanted(MANIFEST.manifest, np.concatenate(rows, axis=1)).save(version)


def add_shard(version: Version, utterances: Sequence[NDArray], row: int) -> str:
    """One more shard, of the rows from this one on; its name."""
    items = [
        Item(
            id=f"speaker{number % 997:03}-{number:08}",
            path=f"{number}.wav",
            num_samples=len(array) * 160 + 240,
            size=1,
            mtime_ns=1,
            sample_rate=16000,
        )
        for number, array in enumerate(utterances, row)
    ]
    stored, lengths, side = np.concatenate(utterances), [len(array) for array in utterances], {}
    if version.info.spec.side:
        levels, parameters = quantize(torch.from_numpy(stored), lengths)
        stored, side = levels.numpy(), {QUANTIZATION: (parameters.numpy(), [1] * len(items))}
    builder = ShardBuilder(version.info.spec)
    builder.append(items, stored, lengths, side)
    name, files = builder.files(
        fingerprint=version.info.fingerprint, row=row, manifest=MANIFEST.name, made_by={}, where=version.path
    )
    version.store.publish(files, f"shards/{name}")
    return name
