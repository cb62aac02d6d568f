"""Make up features, and versions of them, with the writers of the tests."""

from collections.abc import Sequence

import make_cache
import numpy as np
from corpus import KINDS
from numpy.typing import NDArray

from featcache.storage.location import Location
from featcache.version.version import Version
from featcache.version.wanted import Wanted

BINS = 80


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
    return [
        np.take(pool, np.arange(start, start + length), axis=0, mode="wrap")
        for length, start in cuts
    ]


def make_version(
    cache: Location,
    utterances: Sequence[NDArray],
    items_per_shard: int = 500,
    quantized: bool = False,
) -> Version:
    """A version of these features, wanted by a manifest as after a run over it."""
    version = make_cache.make_version(
        cache, shard_of(utterances[:items_per_shard], 0), quantized=quantized, extractor="fbank"
    )
    for row in range(items_per_shard, len(utterances), items_per_shard):
        add_shard(version, utterances[row : row + items_per_shard], row)
    tables = [
        shard.table
        for shard in sorted(map(version.shard, version.shard_names()), key=lambda one: one.info.row)
    ]
    rows = [
        np.stack([table[name] for name in ("id_hash", "row_hash", "generation")])
        for table in tables
    ]
    Wanted("made up", np.concatenate(rows, axis=1)).save(version)
    return version


def add_shard(version: Version, utterances: Sequence[NDArray], row: int) -> str:
    """One more shard, of the rows from this one on; its name."""
    return make_cache.add_shard(version, shard_of(utterances, row), row=row)


def shard_of(utterances: Sequence[NDArray], row: int) -> dict[str, NDArray]:
    """The features of a shard by id."""
    return {
        f"speaker{number % 997:03}-{number:08}": array
        for number, array in enumerate(utterances, row)
    }
