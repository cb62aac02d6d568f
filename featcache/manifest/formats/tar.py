"""The members of a tar, by their headers alone, which tarfile reads up to a limit."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import BinaryIO, Self

_LONGEST = 1 << 20  # bytes of a member's headers, with attributes or the holes of a file
_LONG = 5 << 10  # the most bytes of a header that tells a name
_LARGEST = 1 << 62
_SPARSE_KEYS = (
    b"GNU.sparse.%b" % key for key in (b"map", b"size", b"major", b"minor", b"name", b"realsize")
)
_KEYS = frozenset({b"path", b"linkpath", b"size", *_SPARSE_KEYS})
_END = bytes(tarfile.BLOCKSIZE)


class DamagedTarError(Exception):
    """A tar is damaged. The message is the end of a sentence."""


class CutTarError(DamagedTarError):
    """A tar was cut short."""


class _EndError(Exception):
    """The mark of a tar's end."""


class _Headers:
    """A tar for tarfile, which may read `left` bytes, and none behind the end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self.left = _LONGEST

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.left:
            what = f"has a header of more than {_LONGEST:,} bytes"
            raise DamagedTarError(f"{what} before byte {self.tell():,}")
        self.left -= size
        data = self._file.read(size)
        if len(data) < size:
            held = self.seek(0, os.SEEK_END)
            raise CutTarError(f"ends after {held:,} bytes without the mark of an end")
        if size > _LONG:
            return _short_records(data)
        return data


def _short_records(data: bytes) -> bytes:
    """Keep the records of a PAX header that tell names and sizes: the last of each key, and
    no long one. Before Python 3.12.6, tarfile takes the square of a record's bytes in time
    and memory."""
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
        if buf == _END:
            raise _EndError
        member = super().frombuf(buf, encoding, errors)
        if buf[257:263] != b"ustar\0":
            member.name = buf[:100].partition(b"\0")[0].decode(encoding, errors)
        return member


def members_of(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """List the members of a tar, in their order. The file may be read between two members.
    Raises DamagedTarError for damage."""
    headers = _Headers(file)
    offset = 0
    try:
        headers.seek(offset)
        tar = tarfile.TarFile(fileobj=headers, encoding="utf-8")  # type: ignore[arg-type]
        while True:
            headers.seek(offset)
            headers.left = _LONGEST
            # TarFile.next keeps members, and takes a damaged one for the end
            member = _Member.fromtarfile(tar)
            offset = tar.offset
            if not (0 <= member.size < _LARGEST and member.offset_data <= offset < _LARGEST):
                raise ValueError(member.size)
            fields = tar.pax_headers.keys() & tarfile.PAX_FIELDS
            tar.pax_headers = {key: tar.pax_headers[key] for key in fields}
            yield member
    except _EndError:
        if headers.tell() != offset + len(_END):
            raise _damaged(headers) from None
    except (tarfile.TarError, ValueError, RecursionError):
        raise _damaged(headers) from None


def _damaged(headers: _Headers) -> DamagedTarError:
    return DamagedTarError(f"is damaged before byte {headers.tell():,}")
