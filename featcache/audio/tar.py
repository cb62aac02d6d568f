"""Where the members of a tar lie in it, by their headers alone, which tarfile reads.

Whatever a header says, what is read of it is bounded, and a name leads nowhere but to a
place in the tar. Of a member, tarfile keeps a kilobyte, and this 24 bytes."""

from __future__ import annotations

import io
import os
import tarfile
from array import array
from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import xxhash

from featcache.errors import AudioError, Reason

# the most bytes of a member's headers: a file may have attributes, and a sparse one many
# holes
_LONGEST = 1 << 20
_LONG = 5 << 10  # the most bytes of a header that tells a name
_LARGEST = 1 << 62
_SPARSE_KEYS = (
    b"GNU.sparse.%b" % key for key in (b"map", b"size", b"major", b"minor", b"name", b"realsize")
)
_KEYS = frozenset({b"path", b"linkpath", b"size", *_SPARSE_KEYS})
_END = bytes(tarfile.BLOCKSIZE)

_FILES = frozenset({tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE})
_REFUSED = {
    tarfile.SYMTYPE: "is a symbolic link, which is not followed",
    tarfile.GNUTYPE_SPARSE: "is a sparse file, which is not read: pack it anew without --sparse",
    tarfile.LNKTYPE: "is a link to what is not in the tar before it",
}


class ByteRange(NamedTuple):
    """Where some bytes lie in a file."""

    offset: int
    size: int


def range_within(container_size: int, what: str, offset: int, size: int) -> ByteRange:
    """Where a member's bytes lie in a container. Raises AudioError if that was cut short
    before their end."""
    if (held := max(0, container_size - offset)) < size:
        raise AudioError(
            Reason.TRUNCATED,
            f"the {what} was cut short: it has {held:,} of the member's {size:,} bytes",
        )
    return ByteRange(offset, size)


class TarIndex:
    """The places of a tar's members. Raises AudioError if it is no tar.

    Of members of the same name, the last one counts, as for tar. Hard links lead to the
    member that they name."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._fault = ""
        hashes, offsets, sizes, links = array("Q"), array("q"), array("q"), []
        try:
            for member in _members(descriptor):
                if member.islnk():
                    links.append((len(hashes), member.linkname))
                kind = tarfile.GNUTYPE_SPARSE if member.issparse() else member.type
                hashes.append(_hash(member.name))
                # why it is refused
                offsets.append(member.offset_data if kind in _FILES else -ord(kind))
                sizes.append(member.size)
        except _DamagedError as fault:
            if not hashes and not isinstance(fault, _CutError):
                raise AudioError(Reason.NOT_AUDIO, f"the container is no tar: {fault}") from None
            self._fault = str(fault)
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
        self._hashes = np.frombuffer(hashes, np.uint64)[order]
        self._ranges = np.array([offsets, sizes], np.int64)[:, order]
        place = np.argsort(order)
        for number, target in links:
            if (found := self._find(_hash(target))) is not None:
                self._ranges[:, place[number]] = self._ranges[:, found]
        self.num_bytes = 24 * len(order)  # the memory that it takes

    def find(self, name: str) -> ByteRange:
        """Where a member's bytes lie. Raises AudioError if there is none, it is no file,
        or is cut off."""
        place = self._find(_hash(name))
        if place is None and self._fault:
            raise AudioError(
                Reason.TRUNCATED, f"the tar {self._fault}, and what is left has no such member"
            )
        if place is None:
            raise AudioError(Reason.FILE_MISSING, "the tar has no such member")
        offset, size = self._ranges[:, place].tolist()
        if offset < 0:
            why = _REFUSED.get(bytes([-offset]), "is a folder or a device, not a file")
            raise AudioError(Reason.FILE_MISSING, f"the member {why}")
        return range_within(self._size, "tar", offset, size)

    def _find(self, key: int) -> int | None:
        place = int(np.searchsorted(self._hashes, np.uint64(key), "right")) - 1
        return place if place >= 0 and int(self._hashes[place]) == key else None


class _DamagedError(Exception):
    """From some place on, a tar is none. The message is the end of a sentence."""


class _CutError(_DamagedError):
    """A tar was cut short."""


class _Headers(io.FileIO):
    """What tarfile reads of a tar: before `left` is set again, so many bytes at most, and
    none behind the end."""

    left = _LONGEST

    def read(self, size: int | None = -1, /) -> bytes:
        """So many bytes."""
        count = -1 if size is None else size
        if not 0 <= count <= self.left:
            raise _DamagedError(
                f"has a header of more than {_LONGEST:,} bytes before byte {self.tell():,}"
            )
        self.left -= count
        data = super().read(count)
        if len(data) < count:
            raise _CutError(
                f"ends after {os.fstat(self.fileno()).st_size:,} bytes without the mark of an end"
            )
        return data if count <= _LONG else _short_records(data)


def _short_records(data: bytes) -> bytes:
    """The records of a PAX header, `<length> <key>=<value>` and a newline, that tell
    names and sizes: of each key the last, and no long one. Before Python 3.12.6, tarfile
    takes the square of a record's bytes in time and memory."""
    kept, at = {}, 0
    while (digits := data[at : at + 20].partition(b" ")[0]).isdigit() and int(digits):
        record = data[at : at + int(digits)]
        at += len(record)
        key, equals, _ = record[len(digits) + 1 :].partition(b"=")
        if equals and key in _KEYS and len(record) <= _LONG and record.endswith(b"\n"):
            kept[key] = record
    return b"".join(kept.values()).ljust(len(data), b"\0")


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """A member by its header. Where ustar has the beginning of a name, tars of GNU's
        with `--listed-incremental` have times, which tarfile takes for it, too."""
        member = super().frombuf(buf, encoding, errors)
        if buf[257:263] != b"ustar\0":
            member.name = buf[:100].partition(b"\0")[0].decode(encoding, errors)
        return member


def _members(descriptor: int) -> Iterator[tarfile.TarInfo]:
    """The members of a tar, in their order. What is not whole raises _DamagedError."""
    file = _Headers(descriptor, closefd=False)
    at = 0
    try:
        file.seek(at)
        tar = tarfile.TarFile(fileobj=file, encoding="utf-8")
        while os.pread(descriptor, len(_END), at) != _END:
            file.seek(at)
            file.left = _LONGEST
            # TarFile.next keeps members, and takes a damaged one for the end
            member = _Member.fromtarfile(tar)
            at = tar.offset
            if not (0 <= member.size < _LARGEST and member.offset_data <= at < _LARGEST):
                raise ValueError(member.size)
            tar.pax_headers = {
                key: tar.pax_headers[key] for key in tar.pax_headers.keys() & tarfile.PAX_FIELDS
            }
            yield member
    except (tarfile.TarError, ValueError, RecursionError):
        raise _DamagedError(f"is damaged before byte {file.tell():,}") from None


def _hash(name: str) -> int:
    while name.startswith("./"):
        name = name[2:]
    return xxhash.xxh3_64_intdigest(name.rstrip("/").encode(errors="surrogateescape"))
