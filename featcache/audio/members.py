"""Audio inside containers: tars, tables of Parquet and Arrow, Kaldi's archives. Only compressed tars are unpacked.

What is in a container is found once in each process, from headers alone (`tar.py`, `tables.py`), and kept in memory;
the threads that decode then read the bytes of one member after the other. As with a file at a URL, what they decode is
a copy without a name: in memory, or if the member is large, on the disk of `TMPDIR`.

A compressed tar is first unpacked from beginning to end, to a file without a name on the disk of `TMPDIR`. Manifests
mostly have the members of a tar next to each other, so the tars that were used last are kept.

What tells whether a member has changed is its size, and when its container was last modified.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from featcache.audio.kaldi_archive import ArchiveIndex
from featcache.audio.kept import Kept
from featcache.audio.remote import IN_MEMORY, Fetched, FileStamp, kept_on_disk
from featcache.audio.tables import ArrowIndex, ParquetIndex, pyarrow
from featcache.audio.tar import ByteRange, TarIndex
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import Member, is_compressed

_INDEX_BYTES = 512 << 20
"""What is kept of where the members of containers lie: those of 20 million members of tars."""

_MOST_LARGE = 2
"""Copies of large members that are kept, for segments that other threads cut from them."""

_PIECE = 4 << 20

_UNPACKED_PIECE = 64 << 10
"""What is unpacked at a time; with .tar.zst, up to so much before a cut is lost."""

_UNPACKED_BYTES, _MOST_UNPACKED = 16 << 30, 128
"""Compressed tars that are kept unpacked, unless a single one takes more; each is an open file."""

_LEFT_FREE = 1 << 30
"""The bytes of a disk that unpacking leaves free for others."""

_MOST_TIMES, _ALWAYS_ALLOWED = 100, 1 << 30
"""A tar may unpack to so many times its size, or to so many bytes: audio is never compressed so far."""

_Index = TarIndex | ArrowIndex | ParquetIndex | ArchiveIndex

_KINDS: dict[str, type[_Index]] = {
    ".tar": TarIndex,
    ".arrow": ArrowIndex,
    ".parquet": ParquetIndex,
    ".ark": ArchiveIndex,
}

_INDEXES: Kept[_Index] = Kept(_INDEX_BYTES, lambda index: index.num_bytes)
_LARGE: Kept[Fetched] = Kept(_MOST_LARGE)
_UNPACKED: Kept[Fetched] = Kept(
    _UNPACKED_BYTES, lambda unpacked: max(unpacked.stamp.size, _UNPACKED_BYTES // _MOST_UNPACKED)
)


def read_member(member: Member) -> Fetched:
    """A copy of a member.

    Raises:
        AudioError: There is no such container or member, or it cannot be read.
        MissingDependencyError: pyarrow is needed, and not installed.
    """
    with _opened(member.container) as container:
        found = _find(member, container)
        stamp = FileStamp(found.size, container.mtime_ns)
        if not isinstance(found, ByteRange):
            return Fetched(stamp, found)
        pieces = _pieces(container, found)
        if found.size > IN_MEMORY:
            key = (member, *container.state)
            return _LARGE.get(key, lambda: Fetched(stamp, file=kept_on_disk(pieces, found.size)))
        return Fetched(stamp, b"".join(pieces))


def stamp_of_member(member: Member) -> FileStamp:
    """What tells whether a member has changed. For a row of Parquet, its row group is read.

    Raises:
        AudioError: There is no such container or member, or it cannot be read.
    """
    with _opened(member.container) as container:
        return FileStamp(_find(member, container).size, container.mtime_ns)


def check_container(container: Path) -> None:
    """Check that a container is there, and of a kind that is read.

    Raises:
        AudioError: It is not.
        MissingDependencyError: pyarrow is needed, and not installed.
    """
    with _opened_packed(container):
        pass


class _Container(NamedTuple):
    """A container that is open."""

    file: io.FileIO
    """The container, or what a compressed tar holds."""
    kind: type[_Index]
    """What finds its members."""
    state: tuple[int, ...]
    """What tells whether the container has changed."""
    mtime_ns: int
    """When it was last modified, in nanoseconds since the epoch."""


@contextmanager
def _opened(path: Path) -> Iterator[_Container]:
    """A container, open; a compressed tar as it is when unpacked."""
    with _opened_packed(path) as file:
        status = os.fstat(file.fileno())
        state = _state(status)
        if not is_compressed(path):
            yield _Container(file, _KINDS[path.suffix], state, status.st_mtime_ns)
            return
        with _UNPACKED.get(state, lambda: _unpacked(file, path.suffix, status)).open() as unpacked:
            yield _Container(unpacked, TarIndex, state, status.st_mtime_ns)


@contextmanager
def _opened_packed(path: Path) -> Iterator[io.FileIO]:
    """A container, open, as it is."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise AudioError(Reason.FILE_MISSING, "the container is not a regular file")
        if status.st_size == 0:
            raise AudioError(Reason.TRUNCATED, "the container holds 0 bytes")
        file = io.FileIO(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AudioError(Reason.FILE_MISSING, "there is no such container") from error
    except OSError as error:
        raise AudioError(Reason.FILE_UNREADABLE, f"the container cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, say
        raise AudioError(Reason.FILE_MISSING, f"not a valid path: {error}") from error
    with file:
        try:
            yield file
        except OSError as error:
            raise AudioError(Reason.FILE_UNREADABLE, f"the container cannot be read: {error.strerror}") from error


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _find(member: Member, container: _Container) -> Any:
    """Where a member's bytes are in its container, or if they are compressed there, the bytes."""
    descriptor, kind = container.file.fileno(), container.kind
    key = (kind, *container.state)
    index = _INDEXES.get(key, lambda: kind(descriptor, os.fstat(descriptor).st_size))
    if isinstance(index, ParquetIndex | ArchiveIndex):
        return index.find(member.name, descriptor)
    return index.find(member.name)


def _pieces(container: _Container, found: ByteRange) -> Iterator[bytes]:
    """The bytes of a member."""
    descriptor, done = container.file.fileno(), 0
    before = _state(os.fstat(descriptor))
    while done < found.size:
        piece = os.pread(descriptor, min(_PIECE, found.size - done), found.offset + done)
        if not piece:
            break
        done += len(piece)
        yield piece
    if done < found.size or _state(os.fstat(descriptor)) != before:
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")


def _zstd(file: io.FileIO) -> Any:
    arrow = pyarrow()
    return arrow.CompressedInputStream(arrow.PythonFile(io.FileIO(file.fileno(), closefd=False), "r"), "zstd")


_UNPACKERS: dict[str, tuple[bytes, Callable[[io.FileIO], Any]]] = {
    ".gz": (rb"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    ".tgz": (rb"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": (rb"BZh", bz2.BZ2File),
    ".xz": (rb"\xfd7zXZ\0", lzma.LZMAFile),
    ".zst": (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _zstd),
}
"""By the suffix of a compressed tar: an expression for how it begins; and what reads it as it is when unpacked."""


def _unpacked(packed: io.FileIO, suffix: str, status: os.stat_result) -> Fetched:
    """A copy of a compressed tar, unpacked; of one that was cut short, what is left."""
    beginning, unpacker = _UNPACKERS[suffix]
    if not re.match(beginning, os.pread(packed.fileno(), 8, 0)):
        raise AudioError(Reason.NOT_AUDIO, "the container is not compressed as its name says")
    limit = max(_ALWAYS_ALLOWED, _MOST_TIMES * status.st_size)
    file = kept_on_disk(_unpacked_pieces(unpacker(packed), limit))
    unpacked = Fetched(FileStamp(os.fstat(file.fileno()).st_size, status.st_mtime_ns), file=file)
    if _state(os.fstat(packed.fileno())) != _state(status):
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")
    return unpacked


def _unpacked_pieces(stream: Any, limit: int) -> Iterator[bytes]:
    """The bytes of a stream of at most `limit` bytes, as long as they leave others room on the disk."""
    size = 0
    while piece := _next_piece(stream):
        size += len(piece)
        if size > limit:
            message = f"the container unpacks to more than {limit:,} bytes, so it is hardly audio: unpack it yourself"
            raise AudioError(Reason.FILE_UNREADABLE, message)
        if not _has_room(len(piece)):
            _UNPACKED.forget()
        if not _has_room(len(piece)):
            message = f"{_LEFT_FREE / 1e9:.0f} GB would not be left free there: set TMPDIR to a disk with more room"
            raise AudioError(Reason.FILE_UNREADABLE, f"cannot be unpacked in {tempfile.gettempdir()}: {message}")
        yield piece


def _has_room(count: int) -> bool:
    """Whether so many bytes may still be written to the disk of `TMPDIR`."""
    disk = os.statvfs(tempfile.gettempdir())
    return disk.f_bavail * disk.f_frsize >= _LEFT_FREE + count


def _next_piece(stream: Any) -> bytes:
    """What a stream gives next; nothing at its end, also if it was cut short.

    Raises:
        AudioError: It is damaged, or compressed in a way that is not read. Nothing of it is used then: checksums stand
            at the end.
    """
    try:
        data: bytes = stream.read1(_UNPACKED_PIECE)
        return data
    except EOFError:
        return b""
    except (OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        if "Truncated compressed stream" in str(error):  # Arrow's EOFError
            return b""
        raise AudioError(Reason.TRUNCATED, f"the container cannot be unpacked: {error}") from None
