"""Columns of a dataset that other versions give: a score or a vector of each utterance."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.loader.cache import Cache
from featcache.loader.opening import open as open_cache
from featcache.loader.shards import Spans
from featcache.spec import Ints, as_values

Source = str | os.PathLike[str] | Cache
"""A version that gives a column: opened, or what `featcache.open` opens."""

_CHUNK = 1 << 16
"""The most values to read at once."""


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
    rows = rows[np.argsort(positions[rows])]  # in the order in which they are stored
    for first in range(0, len(rows), _CHUNK):
        some = rows[first : first + _CHUNK]
        ones = np.ones_like(some)
        stored = np.concatenate(cache.frames(Spans(positions[some], 0 * ones, ones)))
        values[some] = as_values(stored, cache.spec.dtype)
    return values
