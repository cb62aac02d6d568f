"""Datasets read together: in what shares, and the documents that each of them gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from featcache.errors import ArgumentError, is_number, listing
from featcache.loader.dataset import FeatureDataset
from featcache.loader.utterances import DatasetVersion
from featcache.manifest.columns import TypedColumn
from featcache.manifest.strings import Strings

By = Literal["tokens", "seconds", "utterances"]
"""The unit of weights and shares."""


@dataclass(frozen=True)
class Mixture:
    """Several datasets by name, read as one sequence. `union` and `weighted` make mixtures.

    The features of all sources must have the same shape and dtype."""

    sources: Mapping[str, FeatureDataset]
    """The datasets."""
    is_endless: bool = False
    """True if utterances come again and again, see `weighted`."""
    weights: Mapping[str, float] | None = None
    """The weight of each source, before the temperature; None for its size."""
    by: By = "tokens"
    """The unit of weights and shares."""
    temperature: float = 1.0
    """The temperature of the weights."""
    one_source: bool = False
    """True if all rows of a batch are of one source."""

    def __post_init__(self) -> None:
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise ArgumentError('the mixture has no sources by name: give {"name": dataset}')
        for name, dataset in self.sources.items():
            if not isinstance(dataset, FeatureDataset):
                raise ArgumentError(f"the source {name!r} is no FeatureDataset")
            if not len(dataset):
                raise ArgumentError(f"the source {name!r} has no utterances")
            if dataset.is_cropped:
                raise ArgumentError(
                    f"the source {name!r} has a crop: rows hold whole utterances; leave crop= out"
                )
            for what, of_source in _batched(dataset).items():
                of_first = _batched(self.first)[what]
                if of_source != of_first:
                    raise ArgumentError(
                        f"the source {name!r} has other {what} than the first: {of_source}, and "
                        f"not {of_first}"
                    )

    @classmethod
    def union(cls, sources: Mapping[str, FeatureDataset], *, one_source: bool = False) -> Mixture:
        """Return the mixture that has every utterance of all sources once in an epoch. At any
        moment, about the same part of each source has been read.

        Args:
            sources: Datasets by name.
            one_source: Fill each batch of a rank from one source. Then some rows of a
                window's last batches are empty.
        """
        return cls(sources, one_source=one_source)

    @classmethod
    def weighted(
        cls,
        sources: Mapping[str, FeatureDataset],
        *,
        by: By,
        weights: Mapping[str, float] | None = None,
        temperature: float = 1.0,
        one_source: bool = False,
    ) -> Mixture:
        """Return the mixture that never ends, and in which each source has its share. A source
        begins again, in another order, when all its utterances have been read.

        Args:
            sources: Datasets by name.
            by: The unit in which shares are counted: `"tokens"`, `"seconds"` or
                `"utterances"`.
            weights: The weight of each source, above 0; by default its size, in the same
                unit.
            temperature: Shares are in proportion to `weight ** (1 / temperature)`: above 1,
                they become more equal.
            one_source: As in `union`.

        Raises:
            ArgumentError: There is no such unit, or a weight is missing or not above 0.
        """
        if by not in get_args(By):
            raise ArgumentError(f"by is {by!r}: choose {listing(map(repr, get_args(By)))}")
        if not (is_number(temperature) and 0 < temperature < math.inf):
            raise ArgumentError(
                f"temperature is {temperature!r}: it must be a finite number above 0"
            )
        if weights is not None and not isinstance(weights, Mapping):
            raise ArgumentError(f"weights is {weights!r}: give a number for each source, by name")
        if weights is not None and {*weights} != {*sources}:
            raise ArgumentError(
                f"weights= names {listing(map(repr, weights))}; the sources are "
                f"{listing(map(repr, sources))}"
            )
        for name, weight in (weights or {}).items():
            if not (is_number(weight) and 0 < weight < math.inf):
                raise ArgumentError(f"the weight of {name!r} is {weight!r}: give a number above 0")
        return cls(sources, True, weights, by, float(temperature), one_source)

    @property
    def first(self) -> FeatureDataset:
        """The first source."""
        return next(iter(self.sources.values()))

    @property
    def versions(self) -> list[DatasetVersion]:
        """The versions of all sources."""
        return [version for dataset in self.sources.values() for version in dataset.versions]

    def __repr__(self) -> str:
        kind = "weighted" if self.is_endless else "union"
        return f"Mixture.{kind}({dict(self.sources)!r})"


def _batched(dataset: FeatureDataset) -> dict[str, Any]:
    """Return what must be the same in all sources, so that one batch can hold them."""
    specs = {version.name: version.cache.spec for version in dataset.versions}
    rates = [spec.axis.exact_rate for spec in specs.values() if spec.axis.exact_rate]
    return {
        "versions": [*specs],
        "dtypes": [spec.dtype for spec in specs.values()],
        "shapes": [
            (version.cache.spec.axis.kind, item_shape_of(version)) for version in dataset.versions
        ],
        "sizes of codebooks": [
            version.cache.spec.codebook_sizes[: version.codebooks] for version in dataset.versions
        ],
        "tracks of labels": [spec.has_labels for spec in specs.values()],
        "values of padding": [
            # NaN is NaN as text.
            str(np.asarray(version.padding_value).tolist())
            for version in dataset.versions
        ],
        "ratios of frame rates": [str(rate / rates[0]) for rate in rates],
        "columns": {name: _kind(column) for name, column in dataset.columns.items()},
        "classes": dataset.classes,
    }


def item_shape_of(version: DatasetVersion) -> tuple[int, ...]:
    """Return the shape of a frame or a vector in a batch."""
    if version.codebooks is not None:
        return (version.codebooks,)
    return version.cache.spec.item_shape


def _kind(column: TypedColumn) -> str:
    """Describe what a column's values become in a batch."""
    if not isinstance(column, np.ndarray):
        return "text" if isinstance(column, Strings) else "lists"
    return f"{column.dtype} {[*column.shape[1:]] or ''}".strip()
