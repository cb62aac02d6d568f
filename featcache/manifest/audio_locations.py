"""Locations of audio: a file, or inside a container; on this machine, or at a URL.

A path that names a container, a slash, and what is inside, is a `Member`:

    shards/audio_0.tar/anna-1.flac         a member of a tar; a leading `./` is left out
    shards/audio_0.tar.gz/anna-1.flac      the same in .tgz, .tar.gz, .tar.bz2, .tar.xz, .tar.zst
    train-00000.parquet/audio/123          column `audio` of a Parquet file, row 123, from 0
    data-00000-of-00002.arrow/audio/123    the same in Arrow, as `save_to_disk` writes
    dump/raw.1.ark:1234                    from byte 1234 of a Kaldi archive on
    words.ctm/rec-1                        the lines of a recording in a CTM, or a .rttm
    feats.lca/0,4096                       features of Lhotse's, in chunks of lilcom, or in .h5

The column holds bytes, or structs with a field `bytes`. Suffixes are in lower case. On
this machine, a folder of such a name is only a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from os.path import isabs
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize
from urllib.parse import unquote

from featcache.errors import refuse_secrets
from featcache.manifest.strings import Strings

AUDIO_SCHEMES = ("s3", "gs", "az", "https", "http")
"""The beginnings of URLs that are fetched."""

_FETCHED = re.compile(rf"(?:{'|'.join(AUDIO_SCHEMES)})://", re.IGNORECASE)
_LOCAL = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_ANY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_INSIDE = re.compile(r"\.(?:tar|parquet|arrow|ctm|rttm|lca|h5|tgz|tar\.(?:gz|bz2|xz|zst))/")
_IN_ARCHIVE = re.compile(r"\.ark:[0-9]{1,18}$")
_COMPRESSED = (".tgz", ".gz", ".bz2", ".xz", ".zst")
_UNTIDY = re.compile(r"//|(?:^|/)\.(?:/|$)|/$")
_NEEDS_PYARROW = re.compile(rb"\.(?:parquet|arrow|tar\.zst)/")

_commands: frozenset[str] = frozenset()


class Url(str):
    """The URL of a file that is fetched, or a root of such URLs."""

    __slots__ = ()


class LocalFile(str):
    """The path of a file of this machine: text, as making a `Path` takes longer than opening."""

    __slots__ = ()


class Member(NamedTuple):
    """The bytes of an audio file inside a container."""

    container: LocalFile | Url
    """A tar, a table of Parquet or Arrow, or an archive of Kaldi."""
    name: str
    """The name in a tar; column and row in a table; the first byte in an archive."""

    def __str__(self) -> str:
        mark = ":" if suffix_of(self.container) == ".ark" else "/"
        return f"{self.container}{mark}{self.name}"


class Command(str):
    """A command that prints audio, with the bar at its end."""

    __slots__ = ()


AudioLocation = Path | Url
"""A root of relative paths."""

AudioSource = LocalFile | Url | Member | Command
"""A file, a part of one, or a command."""

CopiedSource = Url | Member | Command
"""Audio that is decoded from a copy of its bytes."""


def is_command(path: str) -> bool:
    """Tell whether a path is a command."""
    return path.rstrip().endswith("|")


def allow_commands(commands: Iterable[str]) -> None:
    """Let these commands, which print audio, run in the rest of the process, as
    `--allow-commands` lets a manifest's. A cache that names others runs none of them."""
    global _commands
    _commands |= frozenset(commands)


def allowed_commands() -> frozenset[str]:
    """The commands that `allow_commands` was called with."""
    return _commands


def is_audio_url(path: str) -> bool:
    """Tell whether a path is a URL that is fetched."""
    return "://" in path and _FETCHED.match(path) is not None


def url_of(source: AudioSource) -> Url | None:
    """Return the URL of a file or its container; None if it is on this machine."""
    location = source.container if isinstance(source, Member) else source
    return location if isinstance(location, Url) else None


def suffix_of(container: LocalFile | Url) -> str:
    """Return the suffix of a container."""
    return os.path.splitext(container)[1]


def is_compressed(container: LocalFile | Url) -> bool:
    """Tell whether a container is a compressed tar."""
    return suffix_of(container) in _COMPRESSED


def need_pyarrow(paths: Strings) -> bool:
    """Tell whether a path may be inside a table, or a tar compressed by Zstandard."""
    return _NEEDS_PYARROW.search(paths.blob.data) is not None


def locate(root: AudioLocation, path: str) -> AudioSource:
    """Locate a path's audio: below `root`, unless it is absolute, a URL or a command."""
    if is_command(path):
        return Command(path)
    if is_audio_url(path):
        return _at_url(path)
    local = _LOCAL.match(path)
    if local:
        return _local(unquote(path[local.end() :]))
    if isinstance(root, Url) and not isabs(path):
        return _at_url(f"{root.rstrip('/')}/{path.removeprefix('./')}")
    return _local(path, root)


def why_no_file(path: str, root: AudioLocation) -> str | None:
    """Say why a path below `root` can never be read; None if it may."""
    if path.endswith("]") and _IN_ARCHIVE.search(path.rpartition("[")[0]):
        return "ranges of an archive's entries are not read, only whole ones"
    if _ANY.match(path) and not (_FETCHED.match(path) or _LOCAL.match(path)):
        return f"URLs are read that begin with {', '.join(AUDIO_SCHEMES)}"
    if path.startswith("~") and not isinstance(root, Url):
        return "~ stands for no folder in a manifest"
    return None


def names_container(path: str) -> bool:
    """Tell whether a path seems to lead into a container."""
    return (_INSIDE.search(path) or _IN_ARCHIVE.search(path)) is not None


def _at_url(url: str) -> Url | Member:
    path = url.find("/", url.find("://") + 3)  # a host may be called like a container
    inside = _INSIDE.search(url, path) if path >= 0 else None
    if inside and "?" not in url[: inside.end()]:
        return Member(Url(url[: inside.end() - 1]), url[inside.end() :])
    return _in_archive(url, Url) or Url(url)


def _in_archive(path: str, of: Callable[[str], LocalFile | Url]) -> Member | None:
    if path[-1:].isdigit() and _IN_ARCHIVE.search(path):
        archive, _, offset = path.rpartition(":")
        return Member(of(archive), offset)
    return None


def _local(path: str, root: AudioLocation = Path()) -> LocalFile | Member:
    whole = os.path.join(root, path)  # a root may be a container too
    for inside in _INSIDE.finditer(whole):
        container = _local_file(whole[: inside.end() - 1])
        if not _is_folder(container):
            return Member(container, whole[inside.end() :])
    return _in_archive(whole, _local_file) or _local_file(whole)


def _local_file(path: str) -> LocalFile:
    return LocalFile(Path(path) if _UNTIDY.search(path) else path)


@lru_cache(maxsize=1 << 14)
def _is_folder(container: LocalFile) -> bool:
    return os.path.isdir(container)


def as_root(text: str) -> AudioLocation:
    """Read a root, a folder or a URL. Raises ArgumentError for secrets."""
    refuse_secrets("--root", text)
    if is_audio_url(text):
        return Url(text)
    return Path(text)


def other_spellings(text: str) -> dict[str, list[str]]:
    """List the ways in which an id or a path may be written elsewhere, by how they differ."""
    return {
        "is another Unicode form": [normalize("NFC", text), normalize("NFD", text)],
        "has other blanks": [text.strip(), f" {text}", f"{text} "],
        "has other slashes": [text.replace("\\", "/"), text.replace("/", "\\")],
    }
