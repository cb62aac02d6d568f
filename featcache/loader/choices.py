"""The choices about a dataset's rows and columns, and columns that other versions give: a
score or a vector of each utterance."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, listing
from featcache.loader.cache import Cache
from featcache.loader.opening import open as open_cache
from featcache.loader.shards import Spans
from featcache.manifest.where import Where
from featcache.spec import Ints, as_values

Source = str | os.PathLike[str] | Cache
"""A version that gives a column: opened, or what `featcache.open` opens."""

Names = Collection[str] | Mapping[str, type | Source] | None
"""The columns of a manifest to take, or a mapping to their types; None for all. A mapping
also names further columns, with the versions that give them."""

Classes = str | Collection[str] | Mapping[str, Sequence[str]]
"""Columns of labels, or a mapping to the labels of each."""

OnChanged = Literal["error", "warn", "use"]
"""The treatment of rows with features of another row or file."""

RESERVED = ("id", "ids", "features", "lengths", "crop_start", "crop_seconds")
"""The keys of items and batches."""

_CHUNK = 1 << 16
"""The most values to read at once."""


@dataclass(frozen=True)
class Choices:
    """The choices about a dataset's rows and columns: arguments of `FeatureDataset`. Raises
    ArgumentError if one has another type."""

    where: Where | None = None
    skip_missing: bool = False
    on_changed: OnChanged = "error"
    copies: bool = True
    columns: Names = None
    classes: Classes = ()

    def __post_init__(self) -> None:
        where, columns, classes = self.where, self.columns, self.classes
        is_named = isinstance(classes, Collection) and all(
            isinstance(name, str) for name in classes
        )
        if not (is_named or isinstance(classes, Mapping)):
            raise ArgumentError(
                f"classes is {classes!r}: give the name of a column, or labels by column"
            )
        is_selection = isinstance(where, str | Mapping | NoneType) or callable(where)
        if isinstance(where, Mapping) and not all(isinstance(name, str) for name in where):
            is_selection = False
        if not is_selection or where == "":
            raise ArgumentError(
                f"where is {where!r}: give an expression, values of columns, or a function of a "
                """row: 'split == "train"', {"split": "train"}"""
            )
        if isinstance(columns, str) or not isinstance(columns, (Collection, NoneType)):
            raise ArgumentError(f"columns is {columns!r}: give a list of names")
        if self.on_changed not in get_args(OnChanged):
            raise ArgumentError(
                f"on_changed is {self.on_changed!r}: choose "
                f"{listing(map(repr, get_args(OnChanged)))}"
            )
        for name, value in self.sources.items():
            if name in RESERVED or not isinstance(value, str | os.PathLike | Cache):
                raise ArgumentError(
                    f"columns: {name!r} is {value!r}: give a type, the path of a version or an "
                    f"opened one, and another name than {listing(RESERVED)}"
                )

    @property
    def names(self) -> Collection[str] | None:
        """The columns of a manifest to take; None for all."""
        if not isinstance(self.columns, Mapping):
            return self.columns
        names = [name for name in self.columns if name not in self.sources]
        return names if names or not self.sources else None

    @property
    def types(self) -> dict[str, type]:
        """The types of columns; labels are text."""
        types: dict[str, Any] = {}
        if isinstance(self.columns, Mapping):
            types = {name: self.columns[name] for name in self.names or ()}
        return types | dict.fromkeys(self.labels, str)

    @property
    def labels(self) -> Mapping[str, Sequence[str] | None]:
        """The labels of each column of labels; None for the labels that occur."""
        if isinstance(self.classes, Mapping):
            return self.classes
        return dict.fromkeys([self.classes] if isinstance(self.classes, str) else self.classes)

    @property
    def sources(self) -> dict[str, Source]:
        """The versions that give columns, by the columns' names."""
        if not isinstance(self.columns, Mapping):
            return {}
        pairs = self.columns.items()
        return {name: value for name, value in pairs if not isinstance(value, type)}

    def open_columns(self, check: bool) -> dict[str, Cache]:
        """Open the versions that give columns, by the columns' names. Raises ArgumentError if
        one has no vector or number for each utterance; StoreError as `featcache.open`."""
        caches = {}
        for name, source in self.sources.items():
            cache = source
            if not isinstance(cache, Cache):
                cache = open_cache(os.fspath(cache), check=check)
            axis = cache.spec.axis
            if axis.is_ragged:
                raise ArgumentError(
                    f"columns: {name}: {cache.version.path} has {axis}, and a column has one "
                    "value for each utterance: open it as one of the dataset's versions, or pool it"
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
