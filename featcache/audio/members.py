"""Copies of audio, and audio inside containers: tars, tables of Parquet and Arrow, Kaldi's archives.

What is in a container is found once in each process, from headers alone (`tar.py`, `tables.py`), and kept in memory;
the threads that decode then read the bytes of one member after the other. As with a file at a URL, what they decode is
a copy without a name: in memory, or if the member is large, on the disk of `TMPDIR`.

What tells whether a member has changed is its size, and when its container was last modified; at a URL, its container's
size and ETag.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from featcache.audio.commands import run_command
from featcache.audio.container_copies import member_mtime, open_file, opened, state_of
from featcache.audio.kept import Kept
from featcache.audio.remote import IN_MEMORY, Fetched, FileStamp, fetch, fetch_beginning, kept_on_disk, stamp_of
from featcache.audio.tables import ArrowIndex, ParquetIndex
from featcache.audio.tar import ByteRange, TarIndex
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import Command, CopiedSource, Member, Url, suffix_of

_INDEX_BYTES = 512 << 20  # of where the members of containers lie: those of 20 million members of tars
_MOST_LARGE = 2  # copies of large members that are kept, for segments that other threads cut from them
_PIECE = 4 << 20

_ENTRY_HEADER = 5 + 1 + 8
_UNFINISHED = 0x7F000000  # a program that writes a WAV to a pipe leaves the largest size, or one near it

_KINDS: dict[str, Any] = {".arrow": ArrowIndex, ".parquet": ParquetIndex}
"""What finds the members of a container, by its suffix. The others are tars, compressed or not, and Kaldi's archives,
whose entries say themselves how long they are."""

_INDEXES: Kept[Any] = Kept(_INDEX_BYTES, lambda index: int(index.num_bytes))
_LARGE: Kept[Fetched] = Kept(_MOST_LARGE)


def copy_of(source: CopiedSource, wait: Callable[[float], object] = time.sleep) -> Fetched:
    """A copy of a file at a URL, of a member of a container, or of what a command prints. Raises AudioError if there is
    none, it cannot be fetched or read, or the command fails.

    `wait` is called with seconds to wait, also with none while a container is copied or a command runs, and may raise
    to give up."""
    if isinstance(source, Url):
        return fetch(source, wait)
    if isinstance(source, Command):
        return run_command(source, wait)
    with opened(source.container, wait) as (container, state, mtime_ns):
        found = _find(source, container, state)
        stamp = FileStamp(found.size, mtime_ns)
        if not isinstance(found, ByteRange):
            return Fetched(stamp, found)
        pieces = _pieces(container, found)
        if found.size > IN_MEMORY:
            return _LARGE.get((source, *state), lambda: Fetched(stamp, file=kept_on_disk(pieces, found.size)))
        return Fetched(stamp, b"".join(pieces))


def beginning_of(source: CopiedSource) -> Fetched:
    """The same; of a file at a URL, with the bytes alone in which its header is."""
    return fetch_beginning(source) if isinstance(source, Url) else copy_of(source)


def stamp_now(source: Url | Member) -> tuple[int | None, int]:
    """What tells whether a file at a URL, or a member, has changed: its size in bytes, and the mtime, see `FileStamp`.
    Raises AudioError if there is none, or it cannot be read.

    Of a container at a URL nothing is fetched, and the size is None: the other number tells. For a row of Parquet, its
    row group is read."""
    if isinstance(source, Url):
        return stamp_of(source)
    if isinstance(source.container, Url):
        return None, member_mtime(source.container)
    with opened(source.container) as (container, state, mtime_ns):
        return _find(source, container, state).size, mtime_ns


def check_container(container: Path | Url) -> None:
    """Raise AudioError if a container is not there, or is of no kind that is read."""
    if isinstance(container, Url):
        member_mtime(container)
    else:
        open_file(container, "container")[0].close()


def _find(member: Member, container: io.FileIO, state: tuple[Hashable, ...]) -> Any:
    """Where a member's bytes are in its container, or if they are compressed there, the bytes."""
    descriptor, suffix = container.fileno(), suffix_of(member.container)
    size = os.fstat(descriptor).st_size
    if suffix == ".ark":
        return _entry(descriptor, int(member.name), size)
    kind = _KINDS.get(suffix, TarIndex)
    index = _INDEXES.get((kind, *state), lambda: kind(descriptor, size))
    return index.find(member.name, descriptor) if isinstance(index, ParquetIndex) else index.find(member.name)


def _entry(descriptor: int, offset: int, archive_size: int) -> ByteRange:
    """Where the bytes of the audio lie whose entry begins at some byte of an archive of Kaldi's.

    `wav-copy` of Kaldi writes an entry as a WAV file; `kaldiio`, with which ESPnet dumps audio, as `AUDIO`, how many
    bytes tell the length, the length (little-endian), and a file of any format, mostly FLAC. See `read_kaldi` and
    `_read_length_header` in https://github.com/nttcslab-sp/kaldiio/blob/master/kaldiio/matio.py."""
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


def _pieces(container: io.FileIO, found: ByteRange) -> Iterator[bytes]:
    """The bytes of a member."""
    descriptor, done = container.fileno(), 0
    before = state_of(os.fstat(descriptor))
    while done < found.size and (piece := os.pread(descriptor, min(_PIECE, found.size - done), found.offset + done)):
        done += len(piece)
        yield piece
    if done < found.size or state_of(os.fstat(descriptor)) != before:
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")
