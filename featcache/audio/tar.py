"""The places of a tar's members. tarfile keeps a kilobyte of a member, this index 24 bytes."""

from __future__ import annotations

import io
import tarfile
from array import array
from typing import NamedTuple

import numpy as np
import xxhash

from featcache.errors import AudioError, Reason
from featcache.manifest.formats.tar import CutTarError, DamagedTarError, members_of

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
    """The places of a tar's members; of several with the same name, the last. Raises
    AudioError for other files."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._fault = ""
        hashes, offsets, sizes, links = array("Q"), array("q"), array("q"), []
        try:
            for member in members_of(io.FileIO(descriptor, closefd=False)):
                if member.islnk():
                    links.append((len(hashes), member.linkname))
                kind = tarfile.GNUTYPE_SPARSE if member.issparse() else member.type
                hashes.append(_hash(member.name))
                # a negative offset tells why it is refused
                offsets.append(member.offset_data if kind in _FILES else -ord(kind))
                sizes.append(member.size)
        except DamagedTarError as fault:
            if not hashes and not isinstance(fault, CutTarError):
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


def _hash(name: str) -> int:
    while name.startswith("./"):
        name = name[2:]
    return xxhash.xxh3_64_intdigest(name.rstrip("/").encode(errors="surrogateescape"))
