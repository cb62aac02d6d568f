"""The open cache for a version's folder, which is all that manifests of other toolkits can name."""

from __future__ import annotations

from pathlib import Path

from featcache.loader import Cache, open  # noqa: A004

__all__ = ["recall", "remember"]

_caches: dict[str, Cache] = {}


def remember(cache: Cache) -> str:
    """Have `recall` give this very cache, with the options that it was opened with; returns its version's folder."""
    folder = str(cache.version.path)
    _caches[folder] = cache
    return folder


def recall(folder: str | Path) -> Cache:
    """The cache of a version's folder: the one that was remembered last, or else opened, and kept open.

    Raises:
        StoreError: there is no version in the folder.
        DamagedError: the version's metadata is damaged.
    """
    cache = _caches.get(str(folder))
    if cache is None:
        cache = _caches[str(folder)] = open(folder)
    return cache
