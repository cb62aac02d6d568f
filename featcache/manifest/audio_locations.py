"""Where audio is: in a file, or inside a container; on this machine, or at a URL.

A path that names a container, a slash, and what is inside, is a `Member`:

    shards/audio_0.tar/anna-1.flac         a member of a tar; a leading `./` is left out
    shards/audio_0.tar.gz/anna-1.flac      the same in .tgz, .tar.gz, .tar.bz2, .tar.xz, .tar.zst
    train-00000.parquet/audio/123          column `audio` of a Parquet file, row 123, counted from 0
    data-00000-of-00002.arrow/audio/123    the same in Arrow, as `save_to_disk` of datasets writes
    dump/raw.1.ark:1234                    from byte 1234 of a Kaldi archive on, as in `wav.scp`

The column holds bytes, or structs with a field `bytes`. What a container is, its suffix
says, in lower case. A folder that is called like a container is a folder, but at a URL,
where there are no folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import lru_cache
from os.path import isabs
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from featcache.errors import refuse_secrets
from featcache.strings import Strings

# how URLs may begin whose files are fetched
AUDIO_SCHEMES = ("s3", "gs", "az", "https", "http")

_FETCHED = re.compile(rf"(?:{'|'.join(AUDIO_SCHEMES)})://", re.IGNORECASE)
_LOCAL = re.compile(r"file://(?:localhost)?(?=/)", re.IGNORECASE)
_ANY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_INSIDE = re.compile(r"\.(?:tar|parquet|arrow|tgz|tar\.(?:gz|bz2|xz|zst))/")
_IN_ARCHIVE = re.compile(r"\.ark:[0-9]{1,18}$")
_COMPRESSED = re.compile(r"\.(?:tgz|tar\.(?:gz|bz2|xz|zst))\Z")
_NEEDS_PYARROW = re.compile(rb"\.(?:parquet|arrow|tar\.zst)/")


class Url(str):
    """The URL of a file that is fetched, or, as a root, the beginning of such URLs."""

    __slots__ = ()


class Member(NamedTuple):
    """A part of a container that holds the bytes of an audio file."""

    container: Path | Url
    """The container: a tar, a table of Parquet or Arrow, or an archive of Kaldi's."""
    name: str
    """The name in a tar; in a table, column and row from 0, as `audio/123`; in an
    archive, the byte it begins at."""

    def __str__(self) -> str:
        return f"{self.container}{':' if suffix_of(self.container) == '.ark' else '/'}{self.name}"


class Command(str):
    """A command that prints audio, with the bar that ends it, as in Kaldi's `wav.scp`."""

    __slots__ = ()


AudioLocation = Path | Url
"""Where a file is, or what relative paths are relative to."""

AudioSource = AudioLocation | Member | Command
"""Where audio is: a file, a part of one, or what a command prints."""

CopiedSource = Url | Member | Command
"""Audio that is decoded from a copy of its bytes."""


def is_command(path: str) -> bool:
    """Whether a path is a command that prints audio."""
    return path.rstrip().endswith("|")


def is_audio_url(path: str) -> bool:
    """Whether a path is the URL of a file that is fetched."""
    return "://" in path and _FETCHED.match(path) is not None


def url_of(source: AudioSource) -> Url | None:
    """What is asked for at a server: a file, or the container that audio is in; None if
    it is on this machine."""
    location = source.container if isinstance(source, Member) else source
    return location if isinstance(location, Url) else None


def suffix_of(container: Path | Url) -> str:
    """What a container is: the last suffix of its name."""
    return os.path.splitext(container)[1]


def is_compressed(container: Path | Url) -> bool:
    """Whether a container is a tar that has to be unpacked before members can be reached."""
    return _COMPRESSED.search(os.fspath(container)) is not None


def need_pyarrow(paths: Strings) -> bool:
    """Whether one of the paths may be inside a table, or a tar compressed by Zstandard."""
    return _NEEDS_PYARROW.search(paths.blob.data) is not None


def locate(root: AudioLocation, path: str) -> AudioSource:
    """Where the audio of a path is: below `root`, unless the path is absolute, a URL or a
    command."""
    if is_command(path):
        return Command(path)
    if "://" in path:
        if _FETCHED.match(path):
            return _at_url(path)
        if local := _LOCAL.match(path):
            return _local(unquote(path[local.end() :]))
    if isinstance(root, Url) and not isabs(path):
        return _at_url(f"{root.rstrip('/')}/{path.removeprefix('./')}")
    return _local(path, root)


def why_no_file(path: str, root: AudioLocation) -> str | None:
    """Why a path below `root` names nothing that is read, whatever there is; None if it
    may name something."""
    # as `wav.scp` may have it
    if path.endswith("]") and _IN_ARCHIVE.search(path.rpartition("[")[0]):
        return "ranges of an archive's entries are not read, only whole ones"
    if _ANY.match(path) and not (_FETCHED.match(path) or _LOCAL.match(path)):
        return f"URLs are read that begin with {', '.join(AUDIO_SCHEMES)}"
    return (
        "~ stands for no folder in a manifest"
        if path.startswith("~") and not isinstance(root, Url)
        else None
    )


def names_container(path: str) -> bool:
    """Whether a path looks as if it led into a container."""
    return _INSIDE.search(path) is not None or _IN_ARCHIVE.search(path) is not None


def _at_url(url: str) -> Url | Member:
    path = url.find("/", url.find("://") + 3)  # a host may be called like a container
    found = _INSIDE.search(url, path) if path >= 0 else None
    if found and "?" not in url[: found.end()]:
        return Member(Url(url[: found.end() - 1]), url[found.end() :])
    return _in_archive(url, Url) or Url(url)


def _in_archive(path: str, of: Callable[[str], Path | Url]) -> Member | None:
    if path[-1:].isdigit() and _IN_ARCHIVE.search(path):
        archive, _, offset = path.rpartition(":")
        return Member(of(archive), offset)
    return None


def _local(path: str, root: AudioLocation = Path()) -> Path | Member:
    whole = path if isabs(path) else f"{root}/{path}"  # a root may be a container, too
    for found in _INSIDE.finditer(whole):
        container = Path(whole[: found.end() - 1])
        if not _is_folder(container):
            return Member(container, whole[found.end() :])
    return _in_archive(whole, Path) or Path(root, path)


@lru_cache(maxsize=1 << 14)
def _is_folder(container: Path) -> bool:
    return os.path.isdir(container)


def as_root(text: str) -> AudioLocation:
    """A root, as a command line or a record has it: a folder, or URLs' beginning; an
    ArgumentError for secrets."""
    refuse_secrets("--root", text)
    return Url(text) if is_audio_url(text) else Path(text)
