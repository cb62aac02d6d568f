"""Opening the store at a location: a folder's or an object store's."""

from __future__ import annotations

from pathlib import Path

from featcache.storage.base import Store
from featcache.storage.location import Location


def open_store(location: Location) -> Store:
    """Open the store at a location. For a folder, no client of object stores is imported."""
    if isinstance(location, Path):
        from featcache.storage.directory import Directory

        return Directory(location)
    from featcache.storage.bucket import Bucket

    return Bucket(location)
