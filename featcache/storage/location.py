"""A location: a path on this machine, or a key in an object store. Both are continued as in `location / "name"`, and
have `name`, `parent` and, as text, what a user would write.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from featcache.errors import ArgumentError, StoreError, listing, refuse_almost_url, refuse_secrets

SCHEMES = ("s3", "gs", "az", "memory")
"""The object stores that there are; `memory` is one of this process, for tests."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/")


@dataclass(frozen=True, order=True)
class ObjectPath:
    """A location in an object store, which has no folders: a key is a name with slashes in it.

    It holds no connection, and may be pickled into any process."""

    root: str
    """The bucket, as a URL: `s3://bucket`."""
    key: str
    """The parts of the key, with a slash between them; empty for the bucket itself."""

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
        """The location that this one is in."""
        return ObjectPath(self.root, self.key.rpartition("/")[0])


Location = Path | ObjectPath
"""Where something of a cache is."""


def as_location(name: str, text: str | Path | ObjectPath) -> Location:
    """The location that a user names, likewise; but a relative path stays one."""
    if isinstance(text, ObjectPath) or is_url(text):
        return parse_location(name, text)
    if isinstance(text, str):
        refuse_almost_url(name, text)
    return Path(text)


def absolute(location: Location) -> Location:
    """The same location, for a process whose working directory may be another."""
    return location.absolute() if isinstance(location, Path) else location


def is_url(text: object) -> bool:
    """Whether a text, or a path that was made of one, is a URL."""
    given = os.fspath(text) if isinstance(text, (str, os.PathLike)) else ""
    match = _URL.match(given) if isinstance(given, str) else None
    # `Path("s3://bucket")` has one slash left; a text with one slash is the path of an odd folder.
    return match is not None and (not isinstance(text, str) or given.startswith("/", match.end()))


def parse_location(name: str, text: str | Path | ObjectPath) -> Location:
    """The location that a user names; a relative path is made absolute, since the working directory may change.

    Args:
        name: The argument's name, for messages.
        text: A path, or a URL of one of `SCHEMES`.

    Raises:
        ArgumentError: It is a URL of another kind, without a bucket, with what may be a secret, or was made a `Path`.
    """
    if isinstance(text, ObjectPath):
        return text
    if isinstance(text, str):
        refuse_almost_url(name, text)
    if not is_url(text):
        return Path(text).absolute()
    refuse_secrets(name, str(text))
    if not isinstance(text, str):
        raise ArgumentError(f"{name}: {text} is a Path made of a URL: give the URL as text")
    scheme, _, rest = text.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme not in SCHEMES:
        known = listing(f"{scheme}://" for scheme in SCHEMES[:3])
        raise ArgumentError(f"{name}: {text}: a cache is in a folder, or has a URL that begins with {known}")
    parts = [part for part in key.split("/") if part]
    if not bucket or {".", ".."} & {*parts}:
        raise ArgumentError(f"{name}: {text} names no location in a bucket: give {scheme}://BUCKET/FOLDER")
    return ObjectPath(f"{scheme}://{bucket}", "/".join(parts))


def desk_of(location: ObjectPath) -> Path:
    """The folder of this machine in which is made what is then written to an object store, below the temporary one
    (`TMPDIR`): of this user alone, and for everything that writes there the same. It need not exist."""
    key = hashlib.sha256(str(location).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"featcache-{os.getuid()}", key)


def make_desk(desk: Path) -> None:
    """Make such a folder, if it is missing. Raises StoreError if it cannot be made, or is somebody else's."""
    try:
        desk.parent.mkdir(mode=0o700, exist_ok=True)
        found = desk.parent.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise StoreError(f"{desk.parent}: is not this user's folder: set TMPDIR to a folder of your own")
        desk.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{desk}: cannot be written: {error.strerror}: set TMPDIR to another folder") from error
