"""Copies of audio, and audio inside containers: tars, tables of Parquet and Arrow, Kaldi's archives.

What is in a container is found once in each process, from headers alone (`tar.py`, `tables.py`), and kept in memory;
the threads that decode then read the bytes of one member after the other. As with a file at a URL, what they decode is
a copy without a name: in memory, or if the member is large, on the disk of `TMPDIR`. Of what is at a URL, and of
compressed tars, this is done with a copy: see `container_copies.py`.

What tells whether a member has changed is its size, and when its container was last modified; at a URL, its container's
size and ETag.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from featcache.audio.commands import run_command
from featcache.audio.container_copies import member_mtime, opened_copy, opened_file, state_of
from featcache.audio.kept import Kept
from featcache.audio.remote import IN_MEMORY, Fetched, FileStamp, fetch, fetch_beginning, kept_on_disk, stamp_of
from featcache.audio.tables import ArrowIndex, ParquetIndex
from featcache.audio.tar import ByteRange, TarIndex
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import (
    Command,
    CopiedSource,
    Member,
    Url,
    is_compressed,
    is_copied,
    suffix_of,
)

_INDEX_BYTES = 512 << 20
"""What is kept of where the members of containers lie: those of 20 million members of tars."""

_MOST_LARGE = 2
"""Copies of large members that are kept, for segments that other threads cut from them."""

_PIECE = 4 << 20

_Index = TarIndex | ArrowIndex | ParquetIndex

_KINDS: dict[str, type[_Index] | None] = {
    ".tar": TarIndex,
    ".arrow": ArrowIndex,
    ".parquet": ParquetIndex,
    ".ark": None,
}
"""What finds the members of a container, by its suffix; an entry of Kaldi's archives says itself how long it is."""

_ENTRY_HEADER = 5 + 1 + 8
_UNFINISHED = 0x7F000000
"""A program that writes a WAV to a pipe leaves the largest size, or one near it."""

_INDEXES: Kept[_Index] = Kept(_INDEX_BYTES, lambda index: index.num_bytes)
_LARGE: Kept[Fetched] = Kept(_MOST_LARGE)


def copy_of(source: CopiedSource, wait: Callable[[float], object] = time.sleep) -> Fetched:
    """A copy of a file at a URL, of a member of a container, or of what a command prints. Raises AudioError if there is
    none, it cannot be fetched or read, or the command fails.

    `wait` is called with seconds to wait, also with none while a container is copied or a command runs, and may raise
    to give up.
    """
    return fetch(source, wait) if isinstance(source, Url) else _made_here(source, wait)


def beginning_of(source: CopiedSource, wait: Callable[[float], object] = time.sleep) -> Fetched:
    """The same; of a file at a URL, with the bytes alone in which its header is."""
    return fetch_beginning(source) if isinstance(source, Url) else _made_here(source, wait)


def _made_here(source: Member | Command, wait: Callable[[float], object]) -> Fetched:
    return run_command(source, wait) if isinstance(source, Command) else read_member(source, wait)


def read_member(member: Member, wait: Callable[[float], object] = time.sleep) -> Fetched:
    """A copy of a member; `wait` as for `copy_of`. Raises AudioError if there is no such container or member, or it
    cannot be read."""
    with _opened(member.container, wait) as container:
        found = _find(member, container)
        stamp = FileStamp(found.size, container.mtime_ns)
        if not isinstance(found, ByteRange):
            return Fetched(stamp, found)
        pieces = _pieces(container, found)
        if found.size > IN_MEMORY:
            key = (member, *container.state)
            return _LARGE.get(key, lambda: Fetched(stamp, file=kept_on_disk(pieces, found.size)))
        return Fetched(stamp, b"".join(pieces))


def stamp_now(source: Url | Member) -> tuple[int | None, int]:
    """What tells whether a file at a URL, or a member, has changed: its size in bytes, and the mtime, see `FileStamp`.
    Raises AudioError if there is none, or it cannot be read.

    Of a container at a URL nothing is fetched, and the size is None: the other number tells. For a row of Parquet, its
    row group is read.
    """
    if isinstance(source, Url):
        return stamp_of(source)
    if isinstance(source.container, Url):
        return None, member_mtime(source.container)
    with _opened(source.container) as container:
        return _find(source, container).size, container.mtime_ns


def check_container(container: Path | Url) -> None:
    """Raise AudioError if a container is not there, or is of no kind that is read."""
    if isinstance(container, Url):
        member_mtime(container)
        return
    with opened_file(container):
        pass


class _Container(NamedTuple):
    """A container that is open, or what a compressed tar holds."""

    file: io.FileIO
    kind: type[_Index] | None
    """What finds its members; None for an archive of Kaldi's."""
    state: tuple[Hashable, ...]
    """What tells whether the container has changed."""
    mtime_ns: int
    """When it was last modified, in nanoseconds since the epoch."""


@contextmanager
def _opened(path: Path | Url, wait: Callable[[float], object] = time.sleep) -> Iterator[_Container]:
    """A container, open: itself, or a copy of it."""
    kind = TarIndex if is_compressed(path) else _KINDS[suffix_of(path)]
    if is_copied(path):
        with opened_copy(path, wait) as (file, state, mtime_ns):
            yield _Container(file, kind, state, mtime_ns)
    else:
        assert isinstance(path, Path)
        with opened_file(path) as file:
            status = os.fstat(file.fileno())
            yield _Container(file, kind, state_of(status), status.st_mtime_ns)


def _find(member: Member, container: _Container) -> Any:
    """Where a member's bytes are in its container, or if they are compressed there, the bytes."""
    descriptor, kind = container.file.fileno(), container.kind
    size = os.fstat(descriptor).st_size
    if kind is None:
        return _entry(descriptor, int(member.name), size)
    index = _INDEXES.get((kind, *container.state), lambda: kind(descriptor, size))
    return index.find(member.name, descriptor) if isinstance(index, ParquetIndex) else index.find(member.name)


def _entry(descriptor: int, offset: int, archive_size: int) -> ByteRange:
    """Where the bytes of the audio lie whose entry begins at some byte of an archive of Kaldi's.

    `wav-copy` of Kaldi writes an entry as a WAV file; `kaldiio`, with which ESPnet dumps audio, as `AUDIO`, how many
    bytes tell the length, the length (little-endian), and a file of any format, mostly FLAC. See `read_kaldi` and
    `_read_length_header` in https://github.com/nttcslab-sp/kaldiio/blob/master/kaldiio/matio.py.
    """
    header = os.pread(descriptor, _ENTRY_HEADER, offset) if offset < archive_size else b""
    if header[:4] == b"RIFF":
        size = 8 + int.from_bytes(header[4:8], "little")
        if not 8 < size < _UNFINISHED:
            raise AudioError(Reason.NOT_AUDIO, "the WAV in the archive does not say its size: wav-copy corrects it")
    elif header[:5] == b"AUDIO" and len(header) == _ENTRY_HEADER and header[5] <= 8:
        width = header[5]
        size = int.from_bytes(header[6 : 6 + width], "little")
        offset += 6 + width
    elif not header:
        held = f"the archive was cut short: it holds {archive_size:,} bytes, and the entry begins after {offset:,}"
        raise AudioError(Reason.TRUNCATED, held)
    else:
        raise AudioError(Reason.NOT_AUDIO, f"at byte {offset:,} of the archive is no audio: features, perhaps")
    if offset + size > archive_size:
        there = f"{max(0, archive_size - offset):,} of the entry's {size:,} bytes are there"
        raise AudioError(Reason.TRUNCATED, f"the archive was cut short: {there}")
    return ByteRange(offset, size)


def _pieces(container: _Container, found: ByteRange) -> Iterator[bytes]:
    """The bytes of a member."""
    descriptor, done = container.file.fileno(), 0
    before = state_of(os.fstat(descriptor))
    while done < found.size:
        piece = os.pread(descriptor, min(_PIECE, found.size - done), found.offset + done)
        if not piece:
            break
        done += len(piece)
        yield piece
    if done < found.size or state_of(os.fstat(descriptor)) != before:
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")
