"""Copies of audio, and audio inside containers: tars, tables of Parquet and Arrow, Kaldi's
archives; and the lines of a recording in a label file of many.

Each process indexes a container once, from headers alone (`tar.py`, `tables.py`). A copy
has no name: it is in memory, or if it is large, on the disk of `TMPDIR`. So are containers
at URLs and compressed tars; those that were used last are kept."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio.commands import run_command
from featcache.audio.content_hash import state_of
from featcache.audio.kept import Kept
from featcache.audio.remote import (
    IN_MEMORY,
    TRIES,
    Fetched,
    FileStamp,
    Wait,
    fetch,
    fetch_beginning,
    fetch_to_disk,
    kept_on_disk,
    negative_hash,
    os_errors_as,
    stamp_of,
)
from featcache.audio.tables import ArrowIndex, ParquetIndex, pyarrow
from featcache.audio.tar import ByteRange, TarIndex, range_within
from featcache.errors import AudioError, Reason, listing
from featcache.manifest.audio_locations import (
    Command,
    CopiedSource,
    LocalFile,
    Member,
    Url,
    is_compressed,
    other_spellings,
    suffix_of,
)

_INDEX_BYTES = 512 << 20  # of memory, for 20 million members of tars
_MOST_LARGE = 2  # copies of large members that are kept, for other segments of them
_PIECE = 4 << 20
_MATRIX = b"\0B"
"""The beginning of a matrix in an archive of Kaldi's."""

_OF_FEATURES = (".lca", ".h5")
_ENTRY_HEADER = 5 + 1 + 8
_UNFINISHED = 0x7F000000  # the least of the sizes that a program leaves that writes to a pipe


class LineIndex:
    """The lines of a label file by recording, which the given field of a line names, from 0."""

    def __init__(self, field: int, descriptor: int, size: int) -> None:
        lines: dict[str, list[bytes]] = {}
        data = b"".join(_pieces(descriptor, ByteRange(0, size)))
        for line in data.removeprefix(codecs.BOM_UTF8).splitlines(keepends=True):
            fields = line.split(None, field + 1)
            if len(fields) > field and not line.startswith(b";;"):
                lines.setdefault(fields[field].decode(errors="replace"), []).append(line)
        self._lines = {name: b"".join(several) for name, several in lines.items()}
        self.num_bytes = size + 200 * len(lines)

    def find(self, name: str) -> NDArray[np.uint8]:
        """Return the lines of a recording. Raises AudioError if there are none."""
        if name in self._lines:
            return np.frombuffer(self._lines[name], np.uint8)
        message = f"the file has no line of {name!r}, but of {listing(self._lines, 3) or 'nothing'}"
        raise AudioError(Reason.FILE_MISSING, message)


_KINDS: dict[str, Any] = {
    ".arrow": ArrowIndex,
    ".parquet": ParquetIndex,
    ".ctm": partial(LineIndex, 0),
    ".rttm": partial(LineIndex, 1),
}
"""The index of a container, by its suffix; else of a tar."""

_INDEXES: Kept[Any] = Kept(_INDEX_BYTES, lambda index: int(index.num_bytes))
_LARGE: Kept[Fetched] = Kept(_MOST_LARGE)

_UNPACKED_PIECE = 64 << 10  # bytes; of a .tar.zst, up to so much before a cut is lost
_COPIES_BYTES, _MOST_COPIES = 16 << 30, 128  # kept; each is an open file
_LARGEST_AHEAD = _COPIES_BYTES // 4  # so that containers in use keep their places
_LEFT_FREE = 1 << 30  # bytes of a disk that copies leave for others
_ASKED_SECONDS = 60.0  # until a server is asked about a container again

_MOST_TIMES, _ALWAYS_ALLOWED = 100, 1 << 30
"""A tar may unpack to so many times its size, or to so many bytes: audio is never
compressed so far."""

_COPIES: Kept[Fetched] = Kept(
    _COPIES_BYTES, lambda copy: max(copy.stamp.size, _COPIES_BYTES // _MOST_COPIES)
)
_STAMPS: Kept[FileStamp] = Kept(4096, seconds=_ASKED_SECONDS)


def copy_of(source: CopiedSource, wait: Wait = time.sleep) -> Fetched:
    """Copy a file at a URL, a member of a container, or the output of a command. Raises
    AudioError if it does not exist, cannot be fetched or read, or the command fails."""
    if isinstance(source, Url):
        return fetch(source, wait)
    if isinstance(source, Command):
        return run_command(source, wait)
    with _opened(source.container, wait) as (container, state, mtime_ns):
        member = _find(source, container, state)
        stamp = FileStamp(member.size, mtime_ns)
        if not isinstance(member, ByteRange):
            return Fetched(stamp, member)
        pieces = _pieces(container.fileno(), member)
        if member.size <= IN_MEMORY:
            return Fetched(stamp, b"".join(pieces))
        key = source, *state
        return _LARGE.get(key, lambda: Fetched(stamp, file=kept_on_disk(pieces, member.size)))


def beginning_of(source: CopiedSource) -> Fetched:
    """Copy audio as `copy_of` does; of a file at a URL, only the bytes of its header."""
    if isinstance(source, Url):
        return fetch_beginning(source)
    return copy_of(source)


def stamp_now(source: Url | Member) -> tuple[int | None, int]:
    """Return the size in bytes and the mtime (see `FileStamp`) of a file at a URL, or of a
    member; the size is None if its container is at a URL. Raises AudioError if it does not
    exist, or cannot be read."""
    if isinstance(source, Url):
        return stamp_of(source)
    if isinstance(source.container, Url):
        return None, negative_hash(b"%d %d" % _asked(source.container))
    with _opened(source.container) as (container, state, mtime_ns):
        if _holds_features(source, container.fileno()):
            return os.fstat(container.fileno()).st_size, mtime_ns
        return _find(source, container, state).size, mtime_ns


def _holds_features(member: Member, descriptor: int) -> bool:
    """Tell whether a member is features, and no audio: its size is the container's."""
    suffix = suffix_of(member.container)
    if suffix == ".ark":
        return os.pread(descriptor, 2, int(member.name)) == _MATRIX
    return suffix in _OF_FEATURES


def check_container(container: LocalFile | Url) -> None:
    """Raise AudioError if a container is missing, or cannot be opened."""
    if isinstance(container, Url):
        _asked(container)
    else:
        open_file(container, "container")[0].close()


def fetch_ahead(container: Url, wait: Wait) -> None:
    """Fetch a container that will be needed soon, if it fits next to those in use."""
    stamp = _asked(container, wait)
    if stamp.size <= _LARGEST_AHEAD and _has_room(stamp.size):
        _open_fetched(container, stamp, wait).close()


def open_file(path: Path | str, what: str = "file") -> tuple[io.FileIO, FileStamp]:
    """Open an audio file or a container of this machine. Returns also its stamp from
    before. Raises AudioError if it does not exist, is empty, or cannot be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise AudioError(Reason.FILE_MISSING, f"the path is {kind}")
        if status.st_size == 0:
            reason = Reason.EMPTY if what == "file" else Reason.TRUNCATED
            raise AudioError(reason, f"the {what} holds 0 bytes")
        return io.FileIO(path), FileStamp(status.st_size, status.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError) as error:
        similar = ""
        for difference, others in other_spellings(os.fspath(path)).items():
            for other in others:
                if not similar and other != os.fspath(path) and os.path.exists(other):
                    similar = f"; there is {other!a}, which {difference}"
        raise AudioError(Reason.FILE_MISSING, f"there is no such {what}{similar}") from error
    except OSError as error:
        what = f"the {what} cannot be read: {error.strerror}"
        raise AudioError(Reason.FILE_UNREADABLE, what) from error
    except ValueError as error:  # a zero byte, say
        raise AudioError(Reason.FILE_MISSING, f"not a valid path: {error}") from error


def changed(what: str) -> AudioError:
    """Return the error of a file or a container that changed while it was read."""
    return AudioError(Reason.FILE_UNREADABLE, f"the {what} changed while it was read")


def _find(member: Member, container: io.FileIO, state: tuple[Hashable, ...]) -> Any:
    """Find a member's bytes: their range in the container, or the bytes of a Parquet row."""
    descriptor, suffix = container.fileno(), suffix_of(member.container)
    size = os.fstat(descriptor).st_size
    if suffix == ".ark":
        return _entry(descriptor, int(member.name), size)
    kind = _KINDS.get(suffix, TarIndex)
    index = _INDEXES.get((kind, *state), lambda: kind(descriptor, size))
    if isinstance(index, ParquetIndex):
        return index.find(member.name, descriptor)
    return index.find(member.name)


def _entry(descriptor: int, offset: int, archive_size: int) -> ByteRange:
    """Find the audio of the entry at an offset of an archive of Kaldi's.

    Kaldi's `wav-copy` writes a WAV. `kaldiio` writes `AUDIO`, the number of bytes of the
    length, the length (little-endian), and a file, mostly FLAC: see `_read_length_header`
    in https://github.com/nttcslab-sp/kaldiio/blob/master/kaldiio/matio.py."""
    header = os.pread(descriptor, _ENTRY_HEADER, offset) if offset < archive_size else b""
    if header[:4] == b"RIFF":
        size = 8 + int.from_bytes(header[4:8], "little")
        if not 8 < size < _UNFINISHED:
            what = "the WAV in the archive does not say its size: wav-copy corrects it"
            raise AudioError(Reason.NOT_AUDIO, what)
    elif header[:5] == b"AUDIO" and len(header) == _ENTRY_HEADER and header[5] <= 8:
        width = header[5]
        size = int.from_bytes(header[6 : 6 + width], "little")
        offset += 6 + width
    elif not header:
        what = f"the archive was cut short after {archive_size:,} bytes, before the entry"
        raise AudioError(Reason.TRUNCATED, what)
    else:
        what = f"at byte {offset:,} of the archive is no audio: features, perhaps"
        raise AudioError(Reason.NOT_AUDIO, what)
    return range_within(archive_size, "archive", offset, size)


def _pieces(descriptor: int, member: ByteRange) -> Iterator[bytes]:
    done = 0
    while done < member.size:
        piece = os.pread(descriptor, min(_PIECE, member.size - done), member.offset + done)
        if not piece:
            break
        done += len(piece)
        yield piece
    if done < member.size:
        raise changed("container")


@contextmanager
def _opened(
    container: LocalFile | Url, wait: Wait = time.sleep
) -> Iterator[tuple[io.FileIO, tuple[Hashable, ...], int]]:
    """Open a container, or its copy if it is compressed or at a URL. Yields the file, its
    state, and the mtime of members. Raises AudioError, within the block too, and at its end
    if the container has changed meanwhile."""
    state: tuple[Hashable, ...]
    with os_errors_as("the container cannot be read"), ExitStack() as stack:
        if isinstance(container, Url):
            stamp = _asked(container, wait)
            state, mtime_ns = (container, *stamp), negative_hash(b"%d %d" % stamp)
            open_packed = partial(_open_fetched, container, stamp, wait)
        else:
            packed = stack.enter_context(open_file(container, "container")[0])
            status = os.fstat(packed.fileno())
            state, mtime_ns = state_of(status), status.st_mtime_ns
            open_packed = partial(stack.enter_context, packed)
        if is_compressed(container):
            unpack = partial(_unpacked, open_packed, suffix_of(container), wait)
            file = _COPIES.get((*state, "unpacked"), unpack).open()
        else:
            file = open_packed()
        yield stack.enter_context(file), state, mtime_ns
        is_copy = isinstance(container, Url) or is_compressed(container)
        if not is_copy and state_of(os.fstat(file.fileno())) != state:
            raise changed("container")


def _asked(container: Url, wait: Wait = time.sleep) -> FileStamp:
    """Ask a server about a container, at most once a minute."""

    def ask() -> FileStamp:
        try:
            return stamp_of(container, TRIES, wait)
        except AudioError as fault:
            raise type(fault)(fault.reason, f"the container: {fault}") from None

    return _STAMPS.get(container, ask)


def _open_fetched(container: Url, stamp: FileStamp, wait: Wait) -> io.FileIO:

    def fetch_whole() -> Fetched:
        if stamp.size == 0:
            raise AudioError(Reason.TRUNCATED, "the container holds 0 bytes")
        _make_room(stamp.size, f"it has {stamp.size / 1e9:,.1f} GB, and ")
        return fetch_to_disk(container, stamp, wait)

    return _COPIES.get((container, *stamp), fetch_whole).open()


def _zstd(file: io.FileIO) -> Any:
    arrow = pyarrow()
    packed = arrow.PythonFile(io.FileIO(file.fileno(), closefd=False), "r")
    return arrow.CompressedInputStream(packed, "zstd")


_UNPACKERS: dict[str, tuple[bytes, Callable[[io.FileIO], Any]]] = {
    **dict.fromkeys((".gz", ".tgz"), (rb"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file))),
    ".bz2": (rb"BZh", bz2.BZ2File),
    ".xz": (rb"\xfd7zXZ\0", lzma.LZMAFile),
    ".zst": (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _zstd),
}
"""By the suffix of a compressed tar: a pattern of its beginning, and a reader."""


def _unpacked(open_packed: Callable[[], io.FileIO], suffix: str, wait: Wait) -> Fetched:
    """Unpack a compressed tar; if it was cut short, as far as it goes."""
    beginning, unpacker = _UNPACKERS[suffix]
    with open_packed() as packed:
        status = os.fstat(packed.fileno())
        if not re.match(beginning, os.pread(packed.fileno(), 8, 0)):
            raise AudioError(Reason.NOT_AUDIO, "the container is not compressed as its name says")
        limit = max(_ALWAYS_ALLOWED, _MOST_TIMES * status.st_size)
        file = kept_on_disk(_unpacked_pieces(unpacker(packed), limit, wait))
        stamp = FileStamp(os.fstat(file.fileno()).st_size, status.st_mtime_ns)
        if state_of(os.fstat(packed.fileno())) != state_of(status):
            raise changed("container")
        return Fetched(stamp, file=file)


def _unpacked_pieces(stream: Any, limit: int, wait: Wait) -> Iterator[bytes]:
    """Read a stream to its end, or to where it was cut short. Raises AudioError if it has
    more than `limit` bytes, the disk has no room for them, or it is damaged."""
    size = 0
    try:
        while piece := bytes(stream.read1(_UNPACKED_PIECE)):
            wait(0.0)
            size += len(piece)
            if size > limit:
                what = f"the tar unpacks to over {limit:,} bytes: unpack it yourself"
                raise AudioError(Reason.FILE_UNREADABLE, what)
            _make_room(len(piece), "")
            yield piece
    except EOFError:
        return
    except (OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        if "Truncated compressed stream" not in str(error):  # Arrow's EOFError
            what = f"the container cannot be unpacked: {error}"
            raise AudioError(Reason.TRUNCATED, what) from None


def _make_room(count: int, why: str) -> None:
    """Make room for so many bytes on the disk of `TMPDIR`, if need be by forgetting kept
    copies. Raises AudioError if others would have no room left."""
    if not _has_room(count):
        _COPIES.forget()
    if not _has_room(count):
        what = f"the container cannot be copied to {tempfile.gettempdir()}: {why}"
        left = f"{_LEFT_FREE / 1e9:.0f} GB would not be left free there"
        remedy = "set TMPDIR to a disk with more room"
        raise AudioError(Reason.FILE_UNREADABLE, f"{what}{left}: {remedy}")


def _has_room(count: int) -> bool:
    return shutil.disk_usage(tempfile.gettempdir()).free >= _LEFT_FREE + count
