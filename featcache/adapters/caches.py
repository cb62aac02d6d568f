"""The open caches behind what an adapter is given: a cache, a dataset, or a version's
folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, MissingDependencyError
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.loader.opening import open  # noqa: A004

try:
    from featcache.loader.dataset import FeatureDataset
    from featcache.loader.utterances import DatasetVersion
except ImportError as error:
    raise MissingDependencyError(
        (error.name or "").partition(".")[0], "featcache.adapters", "torch"
    ) from error

_open_caches: dict[str, Cache] = {}


def dataset_of(given: Cache | FeatureDataset) -> FeatureDataset:
    """A dataset itself, or the dataset of all utterances of a cache."""
    return given if isinstance(given, FeatureDataset) else FeatureDataset(given)


def whole_dataset(given: Cache | FeatureDataset, instead: str) -> FeatureDataset:
    """As `dataset_of`, for adapters whose manifests name utterances, which are later read
    whole from the cache. An ArgumentError refuses a dataset that reads only parts of
    them, `instead` says how to get these; and one of a corpus in which ids lead to
    others."""
    dataset = dataset_of(given)
    first = dataset.versions[0]
    if not np.array_equal(dataset.lengths, first.values_of(first.cache.lengths)):
        raise ArgumentError(f"the dataset has a crop=: pass a dataset without it, and {instead}")
    if any(version.codebooks is not None for version in dataset.versions):
        raise ArgumentError(f"the dataset has codebooks=: pass a dataset without it, and {instead}")
    for version in dataset.versions:
        if isinstance(version.cache, Corpus):
            require_same(version, dataset, version.cache.find(dataset.ids))
    return dataset


def require_same(
    version: DatasetVersion, dataset: FeatureDataset, found: NDArray[np.int64]
) -> None:
    """Refuse, by an ArgumentError, a dataset by whose ids other utterances are found: at
    these positions."""
    if len(others := np.flatnonzero(found != version.positions_of(np.arange(len(dataset))))):
        where = (
            f"{version.cache.version.path}: several parts have an utterance "
            f"{dataset.ids[int(others[0])]!r}"
        )
        raise ArgumentError(
            f"{where}, of which only the first is found: pass the cache of one part, "
            "corpus.part(name)"
        )


def folder_of(cache: Cache) -> str:
    """Its version's folder, with `@` and its tag if it has one: what `open` takes, and
    toolkits' manifests name."""
    return f"{cache.version.path}{f'@{cache.version.tag}' if cache.version.tag else ''}"


def remember(cache: Cache) -> str:
    """Let `cache_of` return this cache, with the options that it was opened with; returns
    its `folder_of`."""
    _open_caches[folder_of(cache)] = cache
    return folder_of(cache)


def cache_of(folder: str | Path) -> Cache:
    """The cache that was last remembered for a `folder_of`; if there is none, one is
    opened, and kept open."""
    if (cache := _open_caches.get(str(folder))) is None:
        cache = _open_caches[str(folder)] = open(folder)
    return cache


def missing_toolkit(error: ImportError, adapter: str) -> MissingDependencyError:
    """The error for a toolkit, or a package that it needs, which cannot be imported."""
    package = (error.name or adapter).partition(".")[0]
    return MissingDependencyError(package, f"featcache.adapters.{adapter}", extra=None)
