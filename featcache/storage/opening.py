"""The store below a location: a folder's or an object store's."""

from __future__ import annotations

from pathlib import Path

from featcache.storage.base import Store
from featcache.storage.location import Location


def open_store(location: Location) -> Store:
    """Give the store of the files below a location. No client of object stores is imported for
    a folder."""
    if isinstance(location, Path):
        from featcache.storage.directory import Directory

        return Directory(location)
    from featcache.storage.bucket import Bucket

    return Bucket(location)
