"""A location: a path on this machine, or a key in an object store. Both have `/`, `name`
and `parent`, and as text are what a user would write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from featcache.errors import ArgumentError, listing, names_url

SCHEMES = ("s3", "gs", "az", "memory")
"""The kinds of object stores; `memory` is in this process, for tests."""


@dataclass(frozen=True, order=True)
class ObjectPath:
    """A location in an object store. It holds no connection, and may be pickled into any
    process."""

    root: str
    """The bucket, as a URL: `s3://bucket`."""
    key: str
    """The parts of the key, joined by slashes; empty for the bucket itself."""

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.root, "/".join(filter(None, (self.key, name.strip("/")))))

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    @property
    def name(self) -> str:
        """The last part of the key, or the bucket's name."""
        return str(self).rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The location that holds this one."""
        return ObjectPath(self.root, self.key.rpartition("/")[0])

    def absolute(self) -> ObjectPath:
        """Return it: no working directory or link changes it."""
        return self

    resolve = absolute


Location = Path | ObjectPath
"""The place of a file or folder of a cache."""


def parse_location(name: str, text: str | Path | ObjectPath) -> Location:
    """Return `as_location` as an absolute path, since the working directory may change."""
    return as_location(name, text).absolute()


def as_location(name: str, text: str | Path | ObjectPath) -> Location:
    """Parse the location that a user names in the argument `name`: a path, or a URL of one
    of `SCHEMES`. Raises ArgumentError for anything else: a URL of another kind, without a
    bucket, with a possible secret, or as a Path."""
    if isinstance(text, ObjectPath):
        return text
    if not text or not isinstance(text, str | os.PathLike):
        raise ArgumentError(f"{name}: {text!r} is neither a path nor a URL")
    if not names_url(name, text):
        return Path(text)
    if not isinstance(text, str):
        raise ArgumentError(f"{name}: {text} is a Path made of a URL: give the URL as text")
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES:
        known = listing(f"{scheme}://" for scheme in SCHEMES[:3])
        raise ArgumentError(
            f"{name}: {text}: a cache is in a folder, or has a URL that begins with {known}"
        )
    parts = [part for part in key.split("/") if part]
    if not bucket or {".", ".."} & {*parts}:
        raise ArgumentError(
            f"{name}: {text} names no location in a bucket: give {scheme}://BUCKET/FOLDER"
        )
    return ObjectPath(f"{scheme}://{bucket}", "/".join(parts))
