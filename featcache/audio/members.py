"""Audio inside containers: tars, and tables of Parquet and Arrow. Nothing is unpacked.

What is in a container is found once in each process, from headers alone (`tar.py`, `tables.py`), and kept in memory;
the threads that decode then read the bytes of one member after the other. As with a file at a URL, what they decode is
a copy without a name: in memory, or if the member is large, on the disk of `TMPDIR`.

What tells whether a member has changed is its size, and when its container was last modified.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from featcache.audio.kept import Kept
from featcache.audio.remote import IN_MEMORY, Fetched, FileStamp, kept_on_disk
from featcache.audio.tables import ArrowIndex, ParquetIndex
from featcache.audio.tar import ByteRange, TarIndex
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import Member

_INDEX_BYTES = 512 << 20
"""What is kept of where the members of containers lie: those of 20 million members of tars."""

_MOST_LARGE = 2
"""Copies of large members that are kept, for segments that other threads cut from them."""

_PIECE = 4 << 20

_Index = TarIndex | ArrowIndex | ParquetIndex

_KINDS: dict[str, type[_Index]] = {".tar": TarIndex, ".arrow": ArrowIndex, ".parquet": ParquetIndex}

_INDEXES: Kept[_Index] = Kept(_INDEX_BYTES, lambda index: index.num_bytes)
_LARGE: Kept[Fetched] = Kept(_MOST_LARGE)


def read_member(member: Member) -> Fetched:
    """A copy of a member.

    Raises:
        AudioError: There is no such container or member, or it cannot be read.
        MissingDependencyError: pyarrow is needed, and not installed.
    """
    with _opened(member.container) as (file, status):
        found = _find(member, file, status)
        stamp = FileStamp(found.size, status.st_mtime_ns)
        if not isinstance(found, ByteRange):
            return Fetched(stamp, found)
        if found.size > IN_MEMORY:
            pieces = _pieces(file, status, found)
            return _LARGE.get((member, *_state(status)), lambda: Fetched(stamp, file=kept_on_disk(pieces, found.size)))
        return Fetched(stamp, b"".join(_pieces(file, status, found)))


def stamp_of_member(member: Member) -> FileStamp:
    """What tells whether a member has changed. For a row of Parquet, its row group is read.

    Raises:
        AudioError: There is no such container or member, or it cannot be read.
    """
    with _opened(member.container) as (file, status):
        return FileStamp(_find(member, file, status).size, status.st_mtime_ns)


def check_container(container: Path) -> None:
    """Check that a container is there, and of a kind that is read.

    Raises:
        AudioError: It is not.
        MissingDependencyError: pyarrow is needed, and not installed.
    """
    with _opened(container):
        pass


@contextmanager
def _opened(container: Path) -> Iterator[tuple[io.FileIO, os.stat_result]]:
    """A container, open, and what it is."""
    if container.suffix not in _KINDS:
        raise AudioError(
            Reason.FILE_UNREADABLE,
            f"{container.name} is compressed, so a member can be reached only through all that precede it: unpack the "
            f"tar, not its members, and give its path ({container.stem if container.suffix != '.tgz' else '….tar'}/…)",
        )
    try:
        status = os.stat(container)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            raise AudioError(Reason.FILE_MISSING, "the container is not a regular file")
        if status.st_size == 0:
            raise AudioError(Reason.TRUNCATED, "the container holds 0 bytes")
        file = io.FileIO(container)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AudioError(Reason.FILE_MISSING, "there is no such container") from error
    except OSError as error:
        raise AudioError(Reason.FILE_UNREADABLE, f"the container cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, say
        raise AudioError(Reason.FILE_MISSING, f"not a valid path: {error}") from error
    with file:
        try:
            yield file, os.fstat(file.fileno())
        except OSError as error:
            raise AudioError(Reason.FILE_UNREADABLE, f"the container cannot be read: {error.strerror}") from error


def _state(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _find(member: Member, file: io.FileIO, status: os.stat_result) -> Any:
    """Where a member's bytes are in its container, or if they are compressed there, the bytes."""
    kind = _KINDS[member.container.suffix]
    index = _INDEXES.get((kind, *_state(status)), lambda: kind(file.fileno(), status.st_size))
    return index.find(member.name, file.fileno()) if isinstance(index, ParquetIndex) else index.find(member.name)


def _pieces(file: io.FileIO, status: os.stat_result, found: ByteRange) -> Iterator[bytes]:
    """The bytes of a member."""
    done = 0
    while done < found.size:
        piece = os.pread(file.fileno(), min(_PIECE, found.size - done), found.offset + done)
        if not piece:
            break
        done += len(piece)
        yield piece
    if done < found.size or _state(os.fstat(file.fileno())) != _state(status):
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")
