"""Sealed records: JSON documents, and files of one record a line, to which lines are only ever added.

A flipped bit in JSON may leave JSON. So every document and every line ends with a seal of its own, the key `checksum`;
see `documents.seal`. What an earlier featcache wrote has no seals. A flip in the key `checksum` does not make a sealed
document look like one of those: it says `"sealed": true` too, and the document of a run speaks for its lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location
from featcache.store import documents
from featcache.store.documents import UNSEALED, is_sealed, seal
from featcache.store.files import sync, write_file

Record = dict[str, Any]


@dataclass(frozen=True)
class Lines:
    """What is in a file of one record a line."""

    records: list[Record] = field(default_factory=list)
    """The sound records, in order."""
    damaged: list[int] = field(default_factory=list)
    """The numbers of the lines, from 1, that are not what was written."""
    torn: list[int] = field(default_factory=list)
    """The numbers of the lines at the end that look as a kill or a power cut leaves what it interrupts."""


def write_document(location: Location, document: Record) -> None:
    """Write a document, sealed, so that it appears whole or not at all.

    Raises:
        StoreError: It cannot be written. If there was one of this name, it is still there.
    """
    write_file(location, sealed_document(document))


def sealed_document(document: Record) -> bytes:
    """A document as it is written."""
    return seal({"sealed": True, **document, "checksum": UNSEALED})


def read_document(path: Location) -> Record:
    """What `write_document` wrote, or an earlier featcache without a seal. It has `sealed` if it was sealed.

    Raises:
        FileNotFoundError: There is none.
        DamagedError: It is not what was written.
    """
    try:
        data = documents.read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path}: damaged: cannot be read: {error.strerror}") from error
    document = documents.parse_object(data, path)
    if ("sealed" in document or "checksum" in document) and not _is_sealed(data, document):
        raise DamagedError(f"{path}: damaged: its checksum does not match")
    return document


def append_lines(path: Path, records: Iterable[Record]) -> int:
    """Add records to a file, sealed, and flush it to disk. Returns how many.

    Raises:
        StoreError: They cannot be written; none of them has been added.
    """
    lines = _sealed_lines(records)
    if not lines:
        return 0
    try:
        with path.open("ab") as file:
            end = file.tell()
            try:
                file.write(b"".join(lines))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # what is added next must not continue a torn line
                    file.truncate(end)
                raise
        if end == 0:
            sync(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error
    return len(lines)


class LinesWriter:
    """Adds records to a file that nobody else writes, which is made with the first.

    Nothing can be added to an object: it is written again, as a whole. What may be lost is written when there are twice
    as many lines as were written last, so that all writes together are no more than twice the last one.

    Raises:
        StoreError: From every method: they cannot be written.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._lines: list[bytes] = []  # of an object
        self._written = 0
        self.count = 0

    def append(self, records: Iterable[Record], *, may_be_lost: bool = False) -> None:
        """Add records; unless they may be lost, they are there when the process dies, and after a power cut."""
        if isinstance(self._location, Path):
            self.count += append_lines(self._location, records)
            return
        self._lines += _sealed_lines(records)
        self.count = len(self._lines)
        if not may_be_lost or self.count >= 2 * self._written:
            self.flush()

    def flush(self) -> None:
        """Write what has not been written."""
        if self._written < len(self._lines):
            write_file(self._location, b"".join(self._lines))
            self._written = len(self._lines)


def rewrite_lines(location: Location, records: Iterable[Record]) -> None:
    """Put a file of these records, sealed, in the place of the one that is there.

    Raises:
        StoreError: It cannot be written. The file that was there still is.
    """
    write_file(location, b"".join(_sealed_lines(records)))


def _sealed_lines(records: Iterable[Record]) -> list[bytes]:
    return [seal({**record, "checksum": UNSEALED}, indent=None) + b"\n" for record in records]


def read_lines(path: Location, sealed: bool) -> Lines:
    """What `append_lines` wrote; nothing if there is no file.

    If not every line must be `sealed`, lines without a seal count, and what is no record is passed over, as in the
    ledgers of an earlier featcache.

    What is no file, a pipe for example, or has a line without end, is damaged from there on.

    Raises:
        DamagedError: The file cannot be read.
    """
    found, number = Lines(), 0
    try:
        for number, line in enumerate(documents.read_lines(path), 1):
            _add_line(found, number, line, sealed)
    except FileNotFoundError:
        return Lines()
    except DamagedError:
        found.damaged.append(number + 1)
    except OSError as error:
        raise DamagedError(f"{path}: damaged: cannot be read: {error.strerror}") from error
    return found


def _add_line(found: Lines, number: int, line: bytes, sealed: bool) -> None:
    is_last = not line.endswith(b"\n")  # only the last may lack the line break
    line = line.removesuffix(b"\n")
    if (record := _record(line, sealed)) is not None:
        found.records.append(record)
        if is_last:  # but for the line break, it is whole
            found.torn.append(number)
    elif is_last and (record := _record(line[:-1], sealed)) is not None:  # a bit of the line break has flipped
        found.records.append(record)
        found.damaged.append(number)
    elif is_last or b"\0\0" in line:  # a power cut may keep a file's size, and not what is in it; no flipped bit does
        found.torn.append(number)
    elif sealed or b'"checksum": "' in line:
        found.damaged.append(number)


def _record(line: bytes, sealed: bool) -> Record | None:
    """The record on a line; None if it is not what was written."""
    if not sealed and b'"checksum": "' not in line:
        return _parse(line.decode(errors="replace").encode())
    record = _parse(line)
    return record if record is not None and _is_sealed(line, record) else None


def _parse(line: bytes) -> Record | None:
    """The JSON object on a line; None if it is none."""
    try:
        return documents.parse_object(line, "")
    except DamagedError:
        return None


def _is_sealed(data: bytes, record: Record) -> bool:
    checksum = record.get("checksum")
    return isinstance(checksum, str) and is_sealed(data, checksum)
