"""The input of every adapter: a cache, or a dataset that joins it with a manifest."""

from __future__ import annotations

import numpy as np

from featcache.errors import ArgumentError, MissingDependencyError
from featcache.loader import Cache, FeatureDataset

__all__ = ["caches_of", "dataset_of", "missing", "position_of", "whole_dataset"]


def dataset_of(given: Cache | FeatureDataset) -> FeatureDataset:
    """The dataset itself, or that of all the cache's utterances."""
    return given if isinstance(given, FeatureDataset) else FeatureDataset(given)


def caches_of(dataset: FeatureDataset) -> dict[str, Cache]:
    """The dataset's versions by name; `features`, where it has one without a name."""
    return {dataset.names[0]: dataset.cache} if isinstance(dataset.cache, Cache) else dict(dataset.cache)


def missing(error: ImportError, adapter: str) -> MissingDependencyError:
    """What an adapter raises where its toolkit, or a package that this needs, does not import."""
    package = (error.name or adapter).partition(".")[0]
    return MissingDependencyError(package, f"featcache.adapters.{adapter}", extra=None)


def position_of(cache: Cache, id: str) -> int:  # noqa: A002
    """The position of one utterance: `cache.find` without the price of arrays.

    Raises:
        MissingItemError: it is not there.
    """
    position = cache.index.find_one(id)
    if position < 0:
        raise cache.missing_error([id], 1)
    return position


def whole_dataset(given: Cache | FeatureDataset, instead: str) -> FeatureDataset:
    """As `dataset_of`, for adapters whose manifests name utterances, which are then read whole from the cache.

    Args:
        given: a cache, or a dataset.
        instead: how to have a part of the features, for the message.

    Raises:
        ArgumentError: the dataset reads its utterances in part, which such a manifest cannot say.
    """
    dataset = dataset_of(given)
    first = next(iter(caches_of(dataset).values()))
    if not np.array_equal(dataset.lengths, first.lengths[first.find(dataset.ids)]):
        raise ArgumentError(f"the dataset has a crop=: pass a dataset without it, and {instead}")
    if any(version.codebooks is not None for version in dataset.versions):
        raise ArgumentError(f"the dataset has codebooks=: pass a dataset without it, and {instead}")
    return dataset
