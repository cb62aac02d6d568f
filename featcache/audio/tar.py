"""The places of a tar's members, by their headers alone, which tarfile reads up to a limit.
tarfile keeps a kilobyte of a member, this index 24 bytes."""

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

_LONGEST = 1 << 20  # bytes of a member's headers, with attributes or the holes of a file
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
    """A range of bytes in a file."""

    offset: int
    size: int


def range_within(container_size: int, what: str, offset: int, size: int) -> ByteRange:
    """Return the range of a member. Raises AudioError if its container was cut short before
    the member's end."""
    held = max(0, container_size - offset)
    if held < size:
        has = f"it has {held:,} of the member's {size:,} bytes"
        raise AudioError(Reason.TRUNCATED, f"the {what} was cut short: {has}")
    return ByteRange(offset, size)


class TarIndex:
    """The places of a tar's members: of several with the same name, the last, as by tar.
    Hard links lead to the member that they name. Raises AudioError for other files."""

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
                # a negative offset tells why it is refused
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
            linked = self._find(_hash(target))
            if linked is not None:
                self._ranges[:, place[number]] = self._ranges[:, linked]
        self.num_bytes = 24 * len(order)

    def find(self, name: str) -> ByteRange:
        """Find the bytes of a member. Raises AudioError if it does not exist, is not a
        file, or is cut off."""
        place = self._find(_hash(name))
        if place is None and self._fault:
            what = f"the tar {self._fault}, and what is left has no such member"
            raise AudioError(Reason.TRUNCATED, what)
        if place is None:
            raise AudioError(Reason.FILE_MISSING, "the tar has no such member")
        offset, size = self._ranges[:, place].tolist()
        if offset < 0:
            why = _REFUSED.get(bytes([-offset]), "is a folder or a device, not a file")
            raise AudioError(Reason.FILE_MISSING, f"the member {why}")
        return range_within(self._size, "tar", offset, size)

    def _find(self, key: int) -> int | None:
        place = int(np.searchsorted(self._hashes, np.uint64(key), "right")) - 1
        if place < 0 or int(self._hashes[place]) != key:
            return None
        return place


class _DamagedError(Exception):
    """A tar is damaged. The message is the end of a sentence."""


class _CutError(_DamagedError):
    """A tar was cut short."""


class _Headers(io.FileIO):
    """A tar for tarfile, which may read `left` bytes, and none behind the end."""

    left = _LONGEST

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= self.left:
            what = f"has a header of more than {_LONGEST:,} bytes"
            raise _DamagedError(f"{what} before byte {self.tell():,}")
        self.left -= size
        data = super().read(size)
        if len(data) < size:
            held = os.fstat(self.fileno()).st_size
            raise _CutError(f"ends after {held:,} bytes without the mark of an end")
        if size > _LONG:
            return _short_records(data)
        return data


def _short_records(data: bytes) -> bytes:
    """Keep the records of a PAX header, `<length> <key>=<value>` and a newline, that tell
    names and sizes: the last of each key, and no long one. Before Python 3.12.6, tarfile
    takes the square of a record's bytes in time and memory."""
    records = {}
    offset = 0
    while True:
        digits = data[offset : offset + 20].partition(b" ")[0]
        if not digits.isdigit() or not int(digits):
            break
        record = data[offset : offset + int(digits)]
        offset += len(record)
        key, equals, _ = record[len(digits) + 1 :].partition(b"=")
        if equals and key in _KEYS and len(record) <= _LONG and record.endswith(b"\n"):
            records[key] = record
    return b"".join(records.values()).ljust(len(data), b"\0")


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Read a member's header. GNU tar with `--listed-incremental` writes times where
        ustar has the beginning of a name, and tarfile takes them for it."""
        member = super().frombuf(buf, encoding, errors)
        if buf[257:263] != b"ustar\0":
            member.name = buf[:100].partition(b"\0")[0].decode(encoding, errors)
        return member


def _members(descriptor: int) -> Iterator[tarfile.TarInfo]:
    """List the members of a tar, in their order. Raises _DamagedError for damage."""
    file = _Headers(descriptor, closefd=False)
    offset = 0
    try:
        file.seek(offset)
        tar = tarfile.TarFile(fileobj=file, encoding="utf-8")
        while os.pread(descriptor, len(_END), offset) != _END:
            file.seek(offset)
            file.left = _LONGEST
            # TarFile.next keeps members, and takes a damaged one for the end
            member = _Member.fromtarfile(tar)
            offset = tar.offset
            if not (0 <= member.size < _LARGEST and member.offset_data <= offset < _LARGEST):
                raise ValueError(member.size)
            fields = tar.pax_headers.keys() & tarfile.PAX_FIELDS
            tar.pax_headers = {key: tar.pax_headers[key] for key in fields}
            yield member
    except (tarfile.TarError, ValueError, RecursionError):
        raise _DamagedError(f"is damaged before byte {file.tell():,}") from None


def _hash(name: str) -> int:
    while name.startswith("./"):
        name = name[2:]
    return xxhash.xxh3_64_intdigest(name.rstrip("/").encode(errors="surrogateescape"))
