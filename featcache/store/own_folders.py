"""The folders that featcache writes in and removes: real ones inside a cache, under names that it gives itself.

A link inside a cache may lead anywhere, and a cache may be a stranger's. So nothing is written through one, and nothing
is removed that a link leads to. A cache's own folder may be a link, and so may a version's, for users put them on other
disks: all of this is about what lies below.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from featcache.errors import StoreError

WRITTEN = ("shards", "runs", "probes", "work")
"""The folders of a version without which nothing can be added to it."""

_IN_VERSION = {"index": re.compile(r"[0-9a-f]{12}"), "work": re.compile(r"[^.].*\.[0-9a-f]{8}")}
"""What the folders in a version's folders are called that are removed again."""

_BEING_MADE = re.compile(r"\..+-[0-9a-f]{12}\.[0-9a-f]{8}")
"""What a version is called before it is complete."""


def folder_to_write(version: Path, name: str) -> Path:
    """One of the folders in a version's folder, to write in; it is made if it is missing.

    Raises:
        StoreError: it is a link.
        OSError: it cannot be made.
    """
    refuse_links(version, name)
    path = version / name
    path.mkdir(exist_ok=True)
    return path


def refuse_links(version: Path, *names: str) -> None:
    """Refuse to write in a version some of whose folders are links.

    Raises:
        StoreError: says which, and what to do.
    """
    for name in names:
        path = version / name
        if path.is_symlink():
            raise StoreError(
                f"{path}: is a symbolic link to {os.readlink(path)}, and featcache writes only inside the cache: put "
                "a folder in its place (the version's whole folder may be a link)"
            )


def is_being_made(name: str) -> bool:
    """Whether a folder in a cache is, by its name, a version that is not complete yet."""
    return bool(_BEING_MADE.fullmatch(name))


def remove_from_version(version: Path, place: str, name: str) -> None:
    """Remove the folder `place/name` of a version, as far as that is possible.

    Nothing happens if its name is not one that featcache gives to folders there, or if it or `place` is a link.
    """
    if _IN_VERSION[place].fullmatch(name):
        _remove(version / place, name, os.O_NOFOLLOW)


def remove_from_cache(cache: Path, name: str) -> None:
    """Remove the folder of a version that is not complete, likewise."""
    if is_being_made(name):
        _remove(cache, name)


def _remove(parent: Path, name: str, flags: int = 0) -> None:
    with suppress(OSError):
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | flags)
        try:
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)  # which follows no link, nor takes one
        finally:
            os.close(descriptor)
