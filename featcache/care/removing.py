"""Removing a version: never beside a run, and nothing of others."""

from __future__ import annotations

import re

from featcache.errors import ArgumentError, listing
from featcache.version.tags import tag_names
from featcache.version.version import Version

__all__ = ["refuse_with_what_is_kept", "remove_version", "what_is_kept"]

_OWN_FILE = re.compile(
    r"(shards/)?zarr\.json|lock|(shards|index|aside)/[0-9a-f]{16}/.+|(tags|wanted|failures|runs|probes)/[^/]+|work/.+"
)
"""What the files of a version are called."""


def what_is_kept(version: Version) -> list[str]:
    """What of a version is not removed without a word from the user: its tags, and files of others in its folder."""
    kept, tags = [], tag_names(version)
    if tags:
        kept.append(f"the tags {listing(tags)}")
    files = sorted(key for key, _ in version.store.walk() if not _OWN_FILE.fullmatch(key))
    if files:
        kept.append(f"files that are not featcache's: {listing(files)}")
    return kept


def refuse_with_what_is_kept(version: Version) -> None:
    """Refuse to remove a version with `what_is_kept`.

    Raises:
        ArgumentError: Says what it is.
    """
    if kept := what_is_kept(version):
        raise ArgumentError(f"{version.path}: holds {'; '.join(kept)}: move it away, or give --force to remove it too")


def remove_version(version: Version, *, force: bool = False) -> None:
    """Remove a version, with everything in its folder. After a kill, it can be done again.

    Raises:
        ArgumentError: It has tags, or there are files of others in its folder, without `force`.
        LockedError: A run, a repair or a prune is under way.
        StoreError: Its folder is a link, or cannot be removed.
    """
    if not force:
        refuse_with_what_is_kept(version)
    with version.at_work("rm"):
        version.store.destroy()
