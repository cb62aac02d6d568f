"""Copies of containers that cannot be read where they are: those at URLs, and compressed tars, which are unpacked.

A copy is a file without a name on the disk of `TMPDIR`, made once for all threads of a process when it is first needed,
or ahead of that. A container at a URL is fetched whole, and a compressed tar unpacked from beginning to end: manifests
mostly have the members of a container next to each other, and all of them. So the copies that were used last are kept.

A server is asked once a minute whether a container at a URL is still what was fetched.
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
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import xxhash

from featcache.audio.kept import Kept
from featcache.audio.remote import TRIES, Fetched, FileStamp, fetch_to_disk, kept_on_disk, stamp_of
from featcache.audio.tables import pyarrow
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import Url, is_compressed, suffix_of

_UNPACKED_PIECE = 64 << 10  # is unpacked at a time; with .tar.zst, up to so much before a cut is lost

_COPIES_BYTES, _MOST_COPIES = 16 << 30, 128
"""Copies that are kept, unless a single one takes more; each is an open file."""

_LARGEST_AHEAD = _COPIES_BYTES // 4  # of a container that is fetched ahead, so that it takes no place of those in use
_LEFT_FREE = 1 << 30  # bytes of a disk that copies leave for others

_MOST_TIMES, _ALWAYS_ALLOWED = 100, 1 << 30
"""A tar may unpack to so many times its size, or to so many bytes: audio is never compressed so far."""

_ASKED_SECONDS = 60.0  # for so long it is believed that a container at a URL is what the server said

_COPIES: Kept[Fetched] = Kept(_COPIES_BYTES, lambda copy: max(copy.stamp.size, _COPIES_BYTES // _MOST_COPIES))
_STAMPS: Kept[FileStamp] = Kept(4096, seconds=_ASKED_SECONDS)


@contextmanager
def opened(
    container: Path | Url, wait: Callable[[float], object] = time.sleep
) -> Iterator[tuple[io.FileIO, tuple[Hashable, ...], int]]:
    """A container, open: itself, or a copy if it is compressed or at a URL; what tells whether the container has
    changed; the mtime of members. Raises AudioError if there is none, or no copy can be made; also within the block, if
    it cannot be read.

    `wait` is called with seconds to wait, also with none while it is unpacked, and may raise to give up."""
    state: tuple[Hashable, ...]
    try:
        with ExitStack() as stack:
            if isinstance(container, Url):
                stamp = _asked(container, wait)
                state, mtime_ns = (container, *stamp), _mtime(stamp)

                def fetch() -> Fetched:
                    return _COPIES.get(state, lambda: _fetched(container, stamp, wait))

                def unpack() -> Fetched:
                    with fetch().open() as file:
                        return _unpacked(file, suffix_of(container), wait)

                # What was fetched is needed no more when it is unpacked: it makes room first, and is not fetched again.
                copy = _COPIES.get((*state, "unpacked"), unpack) if is_compressed(container) else fetch()
                file = stack.enter_context(copy.open())
            else:
                file = stack.enter_context(open_file(container, "container")[0])
                status = os.fstat(file.fileno())
                state, mtime_ns = state_of(status), status.st_mtime_ns
                if is_compressed(container):
                    packed = file
                    copy = _COPIES.get(state, lambda: _unpacked(packed, container.suffix, wait))
                    file = stack.enter_context(copy.open())
            yield file, state, mtime_ns
    except OSError as error:
        raise AudioError(Reason.FILE_UNREADABLE, f"the container cannot be read: {error.strerror}") from error


def fetch_ahead(container: Url, wait: Callable[[float], object]) -> None:
    """Fetch a container that will be needed soon, if there is room for it beside those in use."""
    stamp = _asked(container, wait)
    if stamp.size <= _LARGEST_AHEAD and _has_room(stamp.size):
        _COPIES.get((container, *stamp), lambda: _fetched(container, stamp, wait))


def member_mtime(container: Url) -> int:
    """What stands for the mtime of the members of a container at a URL: it follows from the container's size and ETag.
    Raises AudioError if there is no such container, or the server does not answer."""
    return _mtime(_asked(container))


def open_file(path: Path | str, what: str = "file") -> tuple[io.FileIO, os.stat_result]:
    """An audio file or a container of this machine, open, and what it was before it was opened. Raises AudioError if
    there is none, or it is empty or cannot be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise AudioError(Reason.FILE_MISSING, f"the path is {kind}")
        if status.st_size == 0:
            raise AudioError(Reason.EMPTY if what == "file" else Reason.TRUNCATED, f"the {what} holds 0 bytes")
        return io.FileIO(path), status
    except (FileNotFoundError, NotADirectoryError) as error:
        raise AudioError(Reason.FILE_MISSING, f"there is no such {what}") from error
    except OSError as error:
        raise AudioError(Reason.FILE_UNREADABLE, f"the {what} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, say
        raise AudioError(Reason.FILE_MISSING, f"not a valid path: {error}") from error


def state_of(status: os.stat_result) -> tuple[int, ...]:
    """What tells whether a container of this machine has changed."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _asked(container: Url, wait: Callable[[float], object] = time.sleep) -> FileStamp:
    """What a server says of a container, or has said in the last minute."""

    def ask() -> FileStamp:
        try:
            return stamp_of(container, TRIES, wait)
        except AudioError as fault:
            raise type(fault)(fault.reason, f"the container: {fault}") from None

    return _STAMPS.get(container, ask)


def _mtime(stamp: FileStamp) -> int:
    return -(xxhash.xxh3_64_intdigest(b"%d %d" % stamp) >> 1) - 1


def _fetched(container: Url, stamp: FileStamp, wait: Callable[[float], object]) -> Fetched:
    """A copy of a container at a URL, as it is."""
    if stamp.size == 0:
        raise AudioError(Reason.TRUNCATED, "the container holds 0 bytes")
    _make_room(stamp.size, f"it has {stamp.size / 1e9:,.1f} GB")
    return fetch_to_disk(container, stamp, wait)


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


def _unpacked(packed: io.FileIO, suffix: str, wait: Callable[[float], object]) -> Fetched:
    """A copy of a compressed tar, unpacked; of one that was cut short, what is left."""
    status = os.fstat(packed.fileno())
    beginning, unpacker = _UNPACKERS[suffix]
    if not re.match(beginning, os.pread(packed.fileno(), 8, 0)):
        raise AudioError(Reason.NOT_AUDIO, "the container is not compressed as its name says")
    limit = max(_ALWAYS_ALLOWED, _MOST_TIMES * status.st_size)
    file = kept_on_disk(_unpacked_pieces(unpacker(packed), limit, wait))
    unpacked = Fetched(FileStamp(os.fstat(file.fileno()).st_size, status.st_mtime_ns), file=file)
    if state_of(os.fstat(packed.fileno())) != state_of(status):
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")
    return unpacked


def _unpacked_pieces(stream: Any, limit: int, wait: Callable[[float], object]) -> Iterator[bytes]:
    """The bytes of a stream of at most `limit` bytes, as long as they leave others room on the disk."""
    size = 0
    while piece := _next_piece(stream):
        wait(0.0)
        size += len(piece)
        if size > limit:
            message = f"the container unpacks to more than {limit:,} bytes, so it is hardly audio: unpack it yourself"
            raise AudioError(Reason.FILE_UNREADABLE, message)
        _make_room(len(piece), "")
        yield piece


def _make_room(count: int, why: str) -> None:
    """See to it that so many bytes may be written to the disk of `TMPDIR`, and others have room left, if need be by
    forgetting the copies that are kept."""
    if not _has_room(count):
        _COPIES.forget()
    if not _has_room(count):
        left = f"{_LEFT_FREE / 1e9:.0f} GB would not be left free there: set TMPDIR to a disk with more room"
        message = f"the container cannot be copied to {tempfile.gettempdir()}: {why and why + ', and '}{left}"
        raise AudioError(Reason.FILE_UNREADABLE, message)


def _has_room(count: int) -> bool:
    """Whether so many bytes may still be written to the disk of `TMPDIR`."""
    disk = os.statvfs(tempfile.gettempdir())
    return disk.f_bavail * disk.f_frsize >= _LEFT_FREE + count


def _next_piece(stream: Any) -> bytes:
    """What a stream gives next; nothing at its end, also if it was cut short. Raises AudioError if it is damaged, or
    compressed in a way that is not read: nothing of it is used then, since checksums stand at the end."""
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
