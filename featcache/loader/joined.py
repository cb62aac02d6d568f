"""Columns of a dataset that other versions give: a score or a vector of each utterance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.format.shard import dequantize_array
from featcache.loader.cache import Cache
from featcache.loader.opening import open as open_cache
from featcache.spec import Ints, as_values

Source = str | os.PathLike[str] | Cache
"""A version that gives a column: opened, or what `featcache.open` opens."""


def open_columns(sources: Mapping[str, Source], check: bool) -> dict[str, Cache]:
    """Open the versions that give columns, by the columns' names. Raises ArgumentError if
    one has no vector or number for each utterance; StoreError as `featcache.open`."""
    caches = {}
    for name, source in sources.items():
        cache = source
        if not isinstance(cache, Cache):
            cache = open_cache(os.fspath(cache), check=check)
        axis = cache.spec.axis
        if axis.is_ragged:
            raise ArgumentError(
                f"columns: {name}: {cache.version.path} has {axis}, and a column has one value for "
                "each utterance: open it as one of the dataset's versions, or pool it"
            )
        caches[name] = cache
    return caches


def read_column(cache: Cache, positions: Ints) -> NDArray[Any]:
    """Read the value of each utterance, `[n, *item_shape]` of the spec's dtype; zeros at
    positions of -1. Raises DamagedError if a shard is damaged."""
    values = np.zeros((len(positions), *cache.spec.item_shape), cache.spec.values_dtype)
    rows = np.flatnonzero(positions >= 0)
    if cache.check:
        for row in rows.tolist():
            values[row] = cache.item(int(positions[row]))
        return values
    shards = np.asarray(cache.index.shard[positions[rows]])
    entries = np.asarray(cache.index.first_frame[positions[rows]])
    order = np.lexsort((entries, shards))
    numbers, begins = np.unique(shards[order], return_index=True)
    for number, places in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
        first, last = int(entries[places[0]]), int(entries[places[-1]])
        stored = cache.shard_frames(number, first, last + 1 - first)[entries[places] - first]
        if cache.spec.is_quantized:
            of_rows = cache.scales_and_offsets(positions[rows[places]])
            stored = dequantize_array(stored, of_rows[:, 0], of_rows[:, 1])
        values[rows[places]] = as_values(stored, cache.spec.dtype)
    return values
