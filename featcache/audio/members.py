"""Copies of audio, and audio inside containers: tars, tables of Parquet and Arrow,
Kaldi's archives.

What is in a container is found once in each process, from headers alone (`tar.py`,
`tables.py`), and kept in memory; the threads that decode then read the bytes of one
member after the other. As with a file at a URL, what they decode is a copy without a
name: in memory, or if the member is large, on the disk of `TMPDIR`.

Containers that cannot be read where they are, those at URLs, and compressed tars, are
copied as a whole: to a file without a name on the disk of `TMPDIR`, once for all threads
of a process, when one is first needed or ahead of that. Manifests mostly have the members
of a container next to each other, and all of them, so the copies that were used last are
kept. A server is asked once a minute whether a container is still what was fetched.

Whether a member has changed, its size and its container's mtime tell; at a URL, its
container's size and ETag."""

from __future__ import annotations

import bz2
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

import xxhash

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
    stamp_of,
)
from featcache.audio.tables import ArrowIndex, ParquetIndex, pyarrow
from featcache.audio.tar import ByteRange, TarIndex, range_within
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import (
    Command,
    CopiedSource,
    Member,
    Url,
    is_compressed,
    suffix_of,
)
from featcache.strings import other_spellings

# of where the members of containers lie: those of 20 million members of tars
_INDEX_BYTES = 512 << 20
# copies of large members that are kept, for segments that other threads cut from them
_MOST_LARGE = 2
_PIECE = 4 << 20

_ENTRY_HEADER = 5 + 1 + 8
# a program that writes a WAV to a pipe leaves the largest size, or one near it
_UNFINISHED = 0x7F000000

_KINDS: dict[str, Any] = {".arrow": ArrowIndex, ".parquet": ParquetIndex}
"""What finds the members of a container, by its suffix. The others are tars, compressed
or not, and Kaldi's archives, whose entries say themselves how long they are."""

_INDEXES: Kept[Any] = Kept(_INDEX_BYTES, lambda index: int(index.num_bytes))
_LARGE: Kept[Fetched] = Kept(_MOST_LARGE)

# is unpacked at a time; with .tar.zst, up to so much before a cut is lost
_UNPACKED_PIECE = 64 << 10

_COPIES_BYTES, _MOST_COPIES = 16 << 30, 128
"""Copies that are kept, unless a single one takes more; each is an open file."""

# of a container that is fetched ahead, so that it takes no place of those in use
_LARGEST_AHEAD = _COPIES_BYTES // 4
_LEFT_FREE = 1 << 30  # bytes of a disk that copies leave for others

_MOST_TIMES, _ALWAYS_ALLOWED = 100, 1 << 30
"""A tar may unpack to so many times its size, or to so many bytes: audio is never
compressed so far."""

# for so long it is believed that a container at a URL is what the server said
_ASKED_SECONDS = 60.0

_COPIES: Kept[Fetched] = Kept(
    _COPIES_BYTES, lambda copy: max(copy.stamp.size, _COPIES_BYTES // _MOST_COPIES)
)
_STAMPS: Kept[FileStamp] = Kept(4096, seconds=_ASKED_SECONDS)


def copy_of(source: CopiedSource, wait: Wait = time.sleep) -> Fetched:
    """A copy of a file at a URL, of a member of a container, or of what a command prints.
    Raises AudioError if there is none, it cannot be fetched or read, or the command
    fails."""
    if isinstance(source, Url):
        return fetch(source, wait)
    if isinstance(source, Command):
        return run_command(source, wait)
    with _opened(source.container, wait) as (container, state, mtime_ns):
        found = _find(source, container, state)
        stamp = FileStamp(found.size, mtime_ns)
        if not isinstance(found, ByteRange):
            return Fetched(stamp, found)
        pieces = _pieces(container, found)
        if found.size > IN_MEMORY:
            return _LARGE.get(
                (source, *state), lambda: Fetched(stamp, file=kept_on_disk(pieces, found.size))
            )
        return Fetched(stamp, b"".join(pieces))


def beginning_of(source: CopiedSource) -> Fetched:
    """The same; of a file at a URL, with the bytes alone in which its header is."""
    return fetch_beginning(source) if isinstance(source, Url) else copy_of(source)


def stamp_now(source: Url | Member) -> tuple[int | None, int]:
    """What tells whether a file at a URL, or a member, has changed: its size in bytes,
    and the mtime, see `FileStamp`. Raises AudioError if there is none, or it cannot be
    read.

    Of a container at a URL nothing is fetched, and the size is None: the other number
    tells. For a row of Parquet, its row group is read."""
    if isinstance(source, Url):
        return stamp_of(source)
    if isinstance(source.container, Url):
        return None, _mtime(_asked(source.container))
    with _opened(source.container) as (container, state, mtime_ns):
        return _find(source, container, state).size, mtime_ns


def check_container(container: Path | Url) -> None:
    """Raise AudioError if a container is not there, or is of no kind that is read."""
    if isinstance(container, Url):
        _asked(container)
    else:
        open_file(container, "container")[0].close()


def fetch_ahead(container: Url, wait: Wait) -> None:
    """Fetch a container that will be needed soon, if there is room for it beside those in
    use."""
    stamp = _asked(container, wait)
    if stamp.size <= _LARGEST_AHEAD and _has_room(stamp.size):
        _open_fetched(container, stamp, wait).close()


def open_file(path: Path | str, what: str = "file") -> tuple[io.FileIO, FileStamp]:
    """An audio file or a container of this machine, open, and its stamp before it was
    opened. Raises AudioError if there is none, or it is empty or cannot be read."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for its writer
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise AudioError(Reason.FILE_MISSING, f"the path is {kind}")
        if status.st_size == 0:
            raise AudioError(
                Reason.EMPTY if what == "file" else Reason.TRUNCATED, f"the {what} holds 0 bytes"
            )
        return io.FileIO(path), FileStamp(status.st_size, status.st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError) as error:
        similar = [
            f"; there is {other!a}, which {difference}"
            for difference, others in other_spellings(os.fspath(path)).items()
            for other in others
            if other != os.fspath(path) and os.path.exists(other)
        ]
        message = f"there is no such {what}{''.join(similar[:1])}"
        raise AudioError(Reason.FILE_MISSING, message) from error
    except OSError as error:
        raise AudioError(
            Reason.FILE_UNREADABLE, f"the {what} cannot be read: {error.strerror}"
        ) from error
    except ValueError as error:  # a zero byte, say
        raise AudioError(Reason.FILE_MISSING, f"not a valid path: {error}") from error


def _find(member: Member, container: io.FileIO, state: tuple[Hashable, ...]) -> Any:
    """Where a member's bytes are in its container, or if they are compressed there, the
    bytes."""
    descriptor, suffix = container.fileno(), suffix_of(member.container)
    size = os.fstat(descriptor).st_size
    if suffix == ".ark":
        return _entry(descriptor, int(member.name), size)
    kind = _KINDS.get(suffix, TarIndex)
    index = _INDEXES.get((kind, *state), lambda: kind(descriptor, size))
    return (
        index.find(member.name, descriptor)
        if isinstance(index, ParquetIndex)
        else index.find(member.name)
    )


def _entry(descriptor: int, offset: int, archive_size: int) -> ByteRange:
    """Where the bytes of the audio lie whose entry begins at some byte of an archive of
    Kaldi's.

    `wav-copy` of Kaldi writes an entry as a WAV file; `kaldiio`, with which ESPnet dumps
    audio, as `AUDIO`, how many bytes tell the length, the length (little-endian), and a
    file of any format, mostly FLAC. See `read_kaldi` and `_read_length_header` in
    https://github.com/nttcslab-sp/kaldiio/blob/master/kaldiio/matio.py."""
    header = os.pread(descriptor, _ENTRY_HEADER, offset) if offset < archive_size else b""
    if header[:4] == b"RIFF":
        size = 8 + int.from_bytes(header[4:8], "little")
        if not 8 < size < _UNFINISHED:
            raise AudioError(
                Reason.NOT_AUDIO,
                "the WAV in the archive does not say its size: wav-copy corrects it",
            )
    elif header[:5] == b"AUDIO" and len(header) == _ENTRY_HEADER and header[5] <= 8:
        width = header[5]
        size = int.from_bytes(header[6 : 6 + width], "little")
        offset += 6 + width
    elif not header:
        raise AudioError(
            Reason.TRUNCATED,
            f"the archive was cut short after {archive_size:,} bytes, before the entry",
        )
    else:
        raise AudioError(
            Reason.NOT_AUDIO, f"at byte {offset:,} of the archive is no audio: features, perhaps"
        )
    return range_within(archive_size, "archive", offset, size)


def _pieces(container: io.FileIO, found: ByteRange) -> Iterator[bytes]:
    """The bytes of a member."""
    descriptor, done = container.fileno(), 0
    before = state_of(os.fstat(descriptor))
    while done < found.size and (
        piece := os.pread(descriptor, min(_PIECE, found.size - done), found.offset + done)
    ):
        done += len(piece)
        yield piece
    if done < found.size or state_of(os.fstat(descriptor)) != before:
        raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")


@contextmanager
def _opened(
    container: Path | Url, wait: Wait = time.sleep
) -> Iterator[tuple[io.FileIO, tuple[Hashable, ...], int]]:
    """A container, open: itself, or a copy if compressed or at a URL; what tells whether
    it has changed; the mtime of members. Raises AudioError if there is none, or no copy
    can be made; within the block, if it cannot be read."""
    state: tuple[Hashable, ...]
    try:
        with ExitStack() as stack:
            if isinstance(container, Url):
                stamp = _asked(container, wait)
                state, mtime_ns = (container, *stamp), _mtime(stamp)
                open_packed = partial(_open_fetched, container, stamp, wait)
            else:
                packed = stack.enter_context(open_file(container, "container")[0])
                status = os.fstat(packed.fileno())
                state, mtime_ns = state_of(status), status.st_mtime_ns
                open_packed = partial(stack.enter_context, packed)
            unpack = partial(_unpacked, open_packed, suffix_of(container), wait)
            file = (
                _COPIES.get((*state, "unpacked"), unpack).open()
                if is_compressed(container)
                else open_packed()
            )
            yield stack.enter_context(file), state, mtime_ns
    except OSError as error:
        raise AudioError(
            Reason.FILE_UNREADABLE, f"the container cannot be read: {error.strerror}"
        ) from error


def _asked(container: Url, wait: Wait = time.sleep) -> FileStamp:
    """What a server says of a container, or has said in the last minute."""

    def ask() -> FileStamp:
        try:
            return stamp_of(container, TRIES, wait)
        except AudioError as fault:
            raise type(fault)(fault.reason, f"the container: {fault}") from None

    return _STAMPS.get(container, ask)


def _mtime(stamp: FileStamp) -> int:
    return -(xxhash.xxh3_64_intdigest(b"%d %d" % stamp) >> 1) - 1


def _open_fetched(container: Url, stamp: FileStamp, wait: Wait) -> io.FileIO:
    """A copy of a container at a URL, as it is."""

    def fetch_whole() -> Fetched:
        if stamp.size == 0:
            raise AudioError(Reason.TRUNCATED, "the container holds 0 bytes")
        _make_room(stamp.size, f"it has {stamp.size / 1e9:,.1f} GB, and ")
        return fetch_to_disk(container, stamp, wait)

    return _COPIES.get((container, *stamp), fetch_whole).open()


def _zstd(file: io.FileIO) -> Any:
    arrow = pyarrow()
    return arrow.CompressedInputStream(
        arrow.PythonFile(io.FileIO(file.fileno(), closefd=False), "r"), "zstd"
    )


_UNPACKERS: dict[str, tuple[bytes, Callable[[io.FileIO], Any]]] = {
    ".gz": (rb"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    ".tgz": (rb"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    ".bz2": (rb"BZh", bz2.BZ2File),
    ".xz": (rb"\xfd7zXZ\0", lzma.LZMAFile),
    ".zst": (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", _zstd),
}
"""By the suffix of a compressed tar: an expression for how it begins; and what reads it
as it is when unpacked."""


def _unpacked(open_packed: Callable[[], io.FileIO], suffix: str, wait: Wait) -> Fetched:
    """A copy of a compressed tar, unpacked; of one that was cut short, what is left."""
    beginning, unpacker = _UNPACKERS[suffix]
    with open_packed() as packed:
        status = os.fstat(packed.fileno())
        if not re.match(beginning, os.pread(packed.fileno(), 8, 0)):
            raise AudioError(Reason.NOT_AUDIO, "the container is not compressed as its name says")
        limit = max(_ALWAYS_ALLOWED, _MOST_TIMES * status.st_size)
        file = kept_on_disk(_unpacked_pieces(unpacker(packed), limit, wait))
        unpacked = Fetched(
            FileStamp(os.fstat(file.fileno()).st_size, status.st_mtime_ns), file=file
        )
        if state_of(os.fstat(packed.fileno())) != state_of(status):
            raise AudioError(Reason.FILE_UNREADABLE, "the container changed while it was read")
        return unpacked


def _unpacked_pieces(stream: Any, limit: int, wait: Wait) -> Iterator[bytes]:
    """The bytes of a stream of at most `limit` bytes, as long as they leave others room
    on the disk; if it was cut short, those that are left. Raises AudioError if it is
    damaged, or compressed in a way that is not read: nothing of it is used then, since
    checksums stand at the end."""
    size = 0
    try:
        while piece := bytes(stream.read1(_UNPACKED_PIECE)):
            wait(0.0)
            size += len(piece)
            if size > limit:
                raise AudioError(
                    Reason.FILE_UNREADABLE,
                    f"the tar unpacks to over {limit:,} bytes: unpack it yourself",
                )
            _make_room(len(piece), "")
            yield piece
    except EOFError:
        return
    except (OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        if "Truncated compressed stream" not in str(error):  # Arrow's EOFError
            raise AudioError(
                Reason.TRUNCATED, f"the container cannot be unpacked: {error}"
            ) from None


def _make_room(count: int, why: str) -> None:
    """See to it that so many bytes may be written to the disk of `TMPDIR`, and others
    have room left, if need be by forgetting the copies that are kept."""
    if not _has_room(count):
        _COPIES.forget()
    if not _has_room(count):
        what = (
            f"{why}{_LEFT_FREE / 1e9:.0f} GB would not be left free there: set TMPDIR to a "
            "disk with more room"
        )
        raise AudioError(
            Reason.FILE_UNREADABLE,
            f"the container cannot be copied to {tempfile.gettempdir()}: {what}",
        )


def _has_room(count: int) -> bool:
    """Whether so many bytes may still be written to the disk of `TMPDIR`."""
    return shutil.disk_usage(tempfile.gettempdir()).free >= _LEFT_FREE + count
