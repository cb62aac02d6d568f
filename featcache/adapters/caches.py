"""The open caches of adapters, and the datasets that adapters take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, MissingDependencyError
from featcache.export.lhotse import TRACK, folder_of
from featcache.export.rows import place_of
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


def dataset_of(source: Cache | FeatureDataset) -> FeatureDataset:
    """Return a dataset itself, or the dataset of all utterances of a cache."""
    if not isinstance(source, FeatureDataset):
        source = FeatureDataset(source)
    for version in source.versions:
        if version.cache.spec.axis.has_times:
            what = "holds events, and adapters give frames and vectors"
            remedy = "read them with featcache.FeatureDataset"
            raise ArgumentError(f"{place_of(version.cache)}: {what}: {remedy}")
    return source


def whole_dataset(source: Cache | FeatureDataset, instead: str) -> FeatureDataset:
    """Return the dataset for an adapter that reads whole utterances later, by their ids.
    Raises ArgumentError, with `instead` as the remedy, for a dataset that reads only parts
    of them, or whose ids lead to other utterances of a corpus."""
    dataset = dataset_of(source)
    remedy = f"pass a dataset without it, and {instead}"
    first = dataset.versions[0]
    if not np.array_equal(dataset.lengths, first.values_of(first.cache.lengths)):
        raise ArgumentError(f"the dataset has a crop=: {remedy}")
    if any(version.codebooks is not None for version in dataset.versions):
        raise ArgumentError(f"the dataset has codebooks=: {remedy}")
    for version in dataset.versions:
        if isinstance(version.cache, Corpus):
            require_same(version, dataset, version.cache.find(dataset.ids))
    return dataset


def require_same(
    version: DatasetVersion, dataset: FeatureDataset, positions: NDArray[np.int64]
) -> None:
    """Raise ArgumentError if the dataset's ids lead to positions of other utterances."""
    expected = version.positions_of(np.arange(len(dataset)))
    others = np.flatnonzero(positions != expected)
    if len(others):
        id_ = dataset.ids[int(others[0])]
        raise ArgumentError(
            f"{version.cache.version.path}: several parts have an utterance {id_!r}, of which "
            "only the first is found: pass the cache of one part, corpus.part(name)"
        )


def remember(cache: Cache) -> str:
    """Let `cache_of` return this cache, with its options. Returns its `folder_of`."""
    folder = folder_of(cache)
    _open_caches[folder] = cache
    return folder


def cache_of(folder: str | Path) -> Cache:
    """Return the cache that was last remembered for a `folder_of`, or open and keep it."""
    folder = str(folder)
    if folder not in _open_caches:
        version, _, track = folder.partition(TRACK)
        cache = open(version)
        _open_caches[folder] = cache.track(track) if track else cache
    return _open_caches[folder]


def missing_toolkit(error: ImportError, adapter: str) -> MissingDependencyError:
    """Make the error for a toolkit that cannot be imported, or a package that it needs."""
    package = (error.name or adapter).partition(".")[0]
    return MissingDependencyError(package, f"featcache.adapters.{adapter}", extra=None)
