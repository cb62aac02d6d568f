"""Where audio files are: on this machine, or at a URL."""

from __future__ import annotations

import re
from os.path import isabs
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from featcache.errors import ArgumentError
from featcache.strings import Strings

AUDIO_SCHEMES = ("s3", "gs", "az", "https", "http")
"""How URLs may begin whose files are fetched."""

_FETCHED = re.compile(rf"(?:{'|'.join(AUDIO_SCHEMES)})://", re.IGNORECASE)
_LOCAL = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_ANY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SECRET = re.compile(
    r"(?:x-amz-|x-goog-|awsaccesskeyid$|googleaccessid$|signature$|sig$|key-pair-id$|policy$|.*token$|.*password$|"
    r".*secret$|(?:.*[_-])?api[_-]?key$|auth(?:orization)?$)",
    re.IGNORECASE,
)
"""The names of a query's parameters that give access to whoever has them."""


class Url(str):
    """The URL of a file that is fetched, or, as a root, the beginning of such URLs."""

    __slots__ = ()


AudioLocation = Path | Url
"""Where a file is, or what relative paths are relative to."""


def is_audio_url(path: str) -> bool:
    """Whether a path is the URL of a file that is fetched."""
    return "://" in path and _FETCHED.match(path) is not None


def is_other_url(path: str) -> bool:
    """Whether a path is a URL of a kind that is not read."""
    return _ANY.match(path) is not None and not (_FETCHED.match(path) or _LOCAL.match(path))


def have_urls(paths: Strings) -> bool:
    """Whether one of the paths is the URL of a file that is fetched."""
    return re.search(rb"://", paths.blob.data) is not None and any(map(is_audio_url, paths))


def locate(root: AudioLocation, path: str) -> AudioLocation:
    """Where the file of a path is: below `root`, unless the path is absolute or a URL."""
    if "://" in path:
        if _FETCHED.match(path):
            return Url(path)
        if local := _LOCAL.match(path):
            return Path(unquote(path[local.end() :]))
    if isinstance(root, Url) and not isabs(path):
        return Url(f"{root.rstrip('/')}/{path.removeprefix('./')}")
    return Path(root, path)


def as_root(text: str) -> AudioLocation:
    """A root as it is written on a command line or in a record: a folder, or the beginning of URLs.

    Raises:
        ArgumentError: It is a URL with a secret in it, or with a query.
    """
    if not is_audio_url(text):
        return Path(text)
    if fault := secret_in(text) or ("has a query" if "?" in text else None):
        raise ArgumentError(f"--root: {without_secrets(text)} {fault}")
    return Url(text)


def secret_in(path: str) -> str | None:
    """What is secret in a URL, as the end of a message; None if nothing is known to be.

    A path is stored with its features and in failure ledgers, so it must not give access to anything.
    """
    if not is_audio_url(path):
        return None
    try:
        parts = urlsplit(path)
    except ValueError:
        return "is not a valid URL"
    if "@" in parts.netloc:
        return "has a user or a password, which would be stored in the cache"
    if any(_SECRET.match(name) for name, _ in parse_qsl(parts.query, keep_blank_values=True)):
        return (
            "is signed: its signature or token would be stored in the cache, and expire. Give the URL without it, "
            "and credentials by the environment (s3://, gs://, az://)"
        )
    return None


def without_secrets(url: str) -> str:
    """A URL for messages: without user, password, query and fragment."""
    scheme, _, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
