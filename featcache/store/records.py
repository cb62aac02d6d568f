"""Sealed records: JSON documents, and files of one record a line, to which lines are only ever added.

A flipped bit in JSON may leave JSON. So every document and every line ends with a seal of its own, the key `checksum`;
see `zarr3.seal`. What an earlier featcache wrote has no seals. A flip in the key `checksum` does not make a sealed
document look like one of those: it says `"sealed": true` too, and the document of a run speaks for its lines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featcache.errors import DamagedError, StoreError
from featcache.store import zarr3
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


def write_document(path: Path, document: Record) -> None:
    """Write a document, sealed, so that it appears whole or not at all.

    Raises:
        StoreError: It cannot be written. If there was one of this name, it is still there.
    """
    write_file(path, zarr3.seal({"sealed": True, **document, "checksum": zarr3.UNSEALED}))


def read_document(path: Path) -> Record:
    """What `write_document` wrote, or an earlier featcache without a seal. It has `sealed` if it was sealed.

    Raises:
        FileNotFoundError: There is none.
        DamagedError: It is not what was written.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedError(f"{path}: damaged: cannot be read: {error.strerror}") from error
    document = _parse(data)
    if document is None:
        raise DamagedError(f"{path}: damaged: not JSON")
    if ("sealed" in document or "checksum" in document) and not _is_sealed(data, document):
        raise DamagedError(f"{path}: damaged: its checksum does not match")
    return document


def append_lines(path: Path, records: Iterable[Record]) -> int:
    """Add records to a file, sealed, and flush it to disk. Returns how many.

    Raises:
        StoreError: They cannot be written; none of them has been added.
    """
    lines = [zarr3.seal({**record, "checksum": zarr3.UNSEALED}, indent=None) + b"\n" for record in records]
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


def read_lines(path: Path, sealed: bool) -> Lines:
    """What `append_lines` wrote; nothing if there is no file.

    Args:
        path: The file.
        sealed: Whether every line must be sealed. Otherwise lines without a seal count, and what is no record is
            passed over, as in the ledgers of an earlier featcache.

    Raises:
        DamagedError: The file cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Lines()
    except OSError as error:
        raise DamagedError(f"{path}: damaged: cannot be read: {error.strerror}") from error
    found = Lines()
    *whole, last = data.split(b"\n")
    for number, line in enumerate(whole, 1):
        if (record := _record(line, sealed)) is not None:
            found.records.append(record)
        elif b"\0\0" in line:  # a power cut may keep a file's size and not its content; a flipped bit makes one zero
            found.torn.append(number)
        elif sealed or b'"checksum": "' in line:
            found.damaged.append(number)
    if last and (record := _record(last, sealed)) is not None:  # but for the line break, it is whole
        found.records.append(record)
        found.torn.append(len(whole) + 1)
    elif last and (record := _record(last[:-1], sealed)) is not None:  # a bit of the line break has flipped
        found.records.append(record)
        found.damaged.append(len(whole) + 1)
    elif last:
        found.torn.append(len(whole) + 1)
    return found


def _record(line: bytes, sealed: bool) -> Record | None:
    """The record on a line; None if it is not what was written."""
    if not sealed and b'"checksum": "' not in line:
        return _parse(line.decode(errors="replace"))
    record = _parse(line)
    return record if record is not None and _is_sealed(line, record) else None


def _parse(data: bytes | str) -> Record | None:
    """The JSON object in a text; None if it is none."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _is_sealed(data: bytes, record: Record) -> bool:
    checksum = record.get("checksum")
    return isinstance(checksum, str) and zarr3.is_sealed(data, checksum)
