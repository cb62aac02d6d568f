"""Where the members of a tar lie in it: read from their headers alone.

Reads ustar, GNU's long names and PAX headers (POSIX.1-2017, `pax`, "Extended Description"). The standard library's
tarfile takes 37 µs for each member, and keeps a kilobyte of it; this takes a third of that, which counts where clips
are short. Whatever a header says, what is read is bounded, and a name leads nowhere but to a place in the tar."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import xxhash

from featcache.errors import AudioError, Reason

_BLOCK = 512
_EMPTY = bytes(_BLOCK)
_LONGEST = 1 << 20  # the most bytes of a header that holds a long name, or what PAX adds

_LARGEST = 1 << 62

_FILES = frozenset({b"0", b"\0", b"7"})
_WITHOUT_DATA = frozenset({b"1", b"2", b"3", b"4", b"5", b"6"})
_SPARSE, _LINK = b"S", b"1"
_SPARSE_BY_PAX = b"GNU.sparse"
_REFUSED = {
    b"2": "is a symbolic link, which is not followed",
    _SPARSE: "is a sparse file, which is not read: pack it anew without --sparse",
    _LINK: "is a link to what is not in the tar before it",
}


class ByteRange(NamedTuple):
    """Where some bytes lie in a file."""

    offset: int
    size: int


class TarIndex:
    """The places of a tar's members. Raises AudioError if it is no tar.

    Of members of the same name, the last one counts, as for tar. Hard links lead to the member that they name."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._fault = ""
        hashes, offsets, sizes, links = array("Q"), array("q"), array("q"), []
        try:
            for header in _headers(descriptor):
                if header.kind == _LINK:
                    links.append((len(hashes), header.link))
                hashes.append(_hash(header.name))
                offsets.append(header.data if header.kind in _FILES else -ord(header.kind))  # why it is refused
                sizes.append(header.size)
        except _DamagedError as fault:
            if not hashes and not isinstance(fault, _CutError):
                raise AudioError(Reason.NOT_AUDIO, f"the container is no tar: {fault}") from None
            self._fault = str(fault)
        order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
        self._hashes = np.frombuffer(hashes, np.uint64)[order]
        self._offsets, self._sizes = np.frombuffer(offsets, np.int64)[order], np.frombuffer(sizes, np.int64)[order]
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        for number, target in links:
            found = self._find(_hash(target))
            if found is not None:
                self._offsets[place[number]], self._sizes[place[number]] = self._offsets[found], self._sizes[found]
        self.num_bytes = 24 * len(order)  # the memory that it takes

    def find(self, name: str) -> ByteRange:
        """Where the bytes of a member lie. Raises AudioError if there is none, it is no file, or the tar was cut short
        before its end."""
        place = self._find(_hash(name.encode()))
        if place is None and self._fault:
            raise AudioError(Reason.TRUNCATED, f"the tar {self._fault}, and what is left has no such member")
        if place is None:
            raise AudioError(Reason.FILE_MISSING, "the tar has no such member")
        offset, size = int(self._offsets[place]), int(self._sizes[place])
        if offset < 0:
            why = _REFUSED.get(bytes([-offset]), "is a folder or a device, not a file")
            raise AudioError(Reason.FILE_MISSING, f"the member {why}")
        if offset + size > self._size:
            there = f"{max(0, self._size - offset):,} of the member's {size:,} bytes are there"
            raise AudioError(Reason.TRUNCATED, f"the tar was cut short: {there}")
        return ByteRange(offset, size)

    def _find(self, key: int) -> int | None:
        place = int(np.searchsorted(self._hashes, np.uint64(key), "right")) - 1
        return place if place >= 0 and int(self._hashes[place]) == key else None


class _Header(NamedTuple):
    kind: bytes
    name: bytes
    link: bytes
    data: int  # where the member's bytes begin
    size: int


class _DamagedError(Exception):
    """From some place on, a tar is none."""


class _CutError(_DamagedError):
    """A tar was cut short."""


def _headers(descriptor: int) -> Iterator[_Header]:
    """The headers of a tar's members, in their order. What is not whole raises _DamagedError, the end of a sentence."""
    at = 0
    of_all: dict[bytes, bytes] = {}
    of_next: dict[bytes, bytes] = {}
    while (block := _read(descriptor, _BLOCK, at)) != _EMPTY:
        if _number(block[148:156], at) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise _DamagedError(f"is damaged at byte {at:,}")
        kind, size = block[156:157], _number(block[124:136], at)
        at += _BLOCK
        if kind in b"LKgxX":
            if size > _LONGEST:
                raise _DamagedError(f"has a header of {size:,} bytes before byte {at:,}")
            data = _read(descriptor, size, at)
            at += -(-size // _BLOCK) * _BLOCK
            if kind in b"LK":
                of_next[b"path" if kind == b"L" else b"linkpath"] = data.partition(b"\0")[0]
            else:
                (of_all if kind == b"g" else of_next).update(_records(data, at))
            continue
        said = {**of_all, **of_next}
        of_next = {}
        if said.get(b"size"):  # an empty value takes back what an earlier record says
            size = _number(said[b"size"], at, base=10)
        if kind == _SPARSE:
            is_continued = block[482]
            while is_continued:
                is_continued = _read(descriptor, _BLOCK, at)[504]
                at += _BLOCK
        name, link = said.get(b"path") or _name(block), said.get(b"linkpath") or _text(block[157:257])
        if any(key.startswith(_SPARSE_BY_PAX) for key in said):
            kind, name = _SPARSE, said.get(b"GNU.sparse.name", name)
        is_folder = kind == b"\0" and name.endswith(b"/")  # of tars older than ustar
        yield _Header(b"5" if is_folder else kind, name, link, at, size)
        at += 0 if kind in _WITHOUT_DATA else -(-size // _BLOCK) * _BLOCK


def _read(descriptor: int, count: int, at: int) -> bytes:
    data = os.pread(descriptor, count, at)
    if len(data) < count:
        raise _CutError(f"ends after {at + len(data):,} bytes without the mark of an end")
    return data


def _number(field: bytes, at: int, base: int = 8) -> int:
    """A number of a header: digits, or as GNU writes large ones, its bytes after 0x80."""
    try:
        number = int.from_bytes(field[1:], "big") if field[:1] == b"\x80" else int(_text(field).strip() or b"0", base)
    except ValueError:
        number = -1
    if not 0 <= number < _LARGEST:
        raise _DamagedError(f"is damaged at byte {at:,}")
    return number


def _records(data: bytes, at: int) -> Mapping[bytes, bytes]:
    """What a PAX header says of names and sizes: records `<length> <key>=<value>` and a newline."""
    found, start = {}, 0
    while start < len(data) and data[start]:
        digits = data[start : start + 20].partition(b" ")[0]
        length = _number(digits, at, base=10)
        record = data[start + len(digits) + 1 : start + length - 1]
        key, equals, value = record.partition(b"=")
        if length <= len(digits) or not equals:  # a record of no length would never end
            raise _DamagedError(f"has a damaged header before byte {at:,}")
        if key in (b"path", b"linkpath", b"size", b"GNU.sparse.name"):
            found[key] = value
        elif key.startswith(_SPARSE_BY_PAX):  # of many such keys one is kept: a header may hold 10^5, for all members
            found[_SPARSE_BY_PAX] = value
        start += length
    return found


def _name(block: bytes) -> bytes:
    name, prefix = _text(block[:100]), _text(block[345:500])
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _hash(name: bytes) -> int:
    while name.startswith(b"./"):
        name = name[2:]
    return xxhash.xxh3_64_intdigest(name.rstrip(b"/"))
