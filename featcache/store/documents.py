"""The files of a cache that are JSON: read within bounds, and sealed when they are written.

A cache may come from a stranger, so nothing in such a file is trusted. Only regular files are opened: a pipe in place
of one would wait for its writer for ever, and a device never ends. Before a document is parsed, its size, its depth,
and the number of its lists and objects are bounded: so none takes more than some 500 MB of memory, and none ends the
process by Python's recursion. What is beyond these bounds, or is no JSON, is a `DamagedError` that names the file. What
its values may be, `featcache.store.fields` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from io import BufferedReader
from typing import Any, Never

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location
from featcache.storage.store import store_of
from featcache.storage.stream import open_stream
from featcache.store.checksums import hex_crc32c

DOCUMENT_BYTES = 32 << 20
"""The largest document. A shard that replaces two million items of other shards comes near it."""

LINE_BYTES = 4 << 20
"""The longest line of a file that has a document on each."""

UNSEALED = "00000000"
"""Stands for the checksum of a document that `seal` is to seal."""

_DEPTH = 64
"""How deep lists and objects are nested at most; those that featcache writes, less than ten."""

_CONTAINERS = 1 << 18
"""How many lists and objects a document has at most, counted by brackets, also those in text. Empty ones take the most
memory for their length."""

_BUFFER_BYTES = 64 << 10

_NO_BRACKETS = re.compile(r'"[^"]*"|[^][{}"]+')


def read_bytes(path: Location, at_most: int = DOCUMENT_BYTES) -> bytes:
    """All bytes of a regular file.

    Raises:
        DamagedError: It is not a regular file, or has more bytes than `at_most`.
        OSError: It is missing, or cannot be read.
    """

    def check(size: int) -> None:
        if size > at_most:
            raise DamagedError(f"{path}: damaged: {size:,} bytes, and at most {at_most:,} are expected")

    return store_of(path).get(path, check)


def read_lines(path: Location, at_most: int = LINE_BYTES) -> Iterator[bytes]:
    """The lines of a regular file, each with its newline; only the last may lack it.

    Raises:
        DamagedError: It is not a regular file, or a line has more bytes than `at_most`.
        OSError: It is missing, or cannot be read.
    """
    with open_stream(path) as file, BufferedReader(file, _BUFFER_BYTES) as lines:
        number = 0
        while line := lines.readline(at_most + 1):
            number += 1
            if len(line) > at_most:
                raise DamagedError(f"{path}: damaged: line {number} has more than {at_most:,} bytes")
            yield line


def parse_object(data: bytes, where: object) -> dict[str, Any]:
    """Parse the JSON object that a file, or a line of one, holds; `where` names it in messages.

    Raises:
        DamagedError: The bytes are not a JSON object within the bounds of this module.
    """
    try:
        text = data.decode()
        _refuse_too_deep(text)
        document = json.loads(text, parse_constant=_refuse_constant)
    except ValueError as error:  # also an integer of more digits than Python converts
        raise DamagedError(f"{where}: damaged: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise DamagedError(f"{where}: damaged: not a JSON object")
    return document


def _refuse_too_deep(text: str) -> None:
    """Raise ValueError if lists and objects are nested too deep, or are too many; linear in time and memory."""
    if text.count("[") + text.count("{") > _CONTAINERS:
        raise ValueError(f"more than {_CONTAINERS:,} lists and objects")
    depth = 0
    for bracket in _NO_BRACKETS.sub("", text.replace("\\\\", "").replace('\\"', "")):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEPTH:
            raise ValueError(f"nested more than {_DEPTH} deep")


def _refuse_constant(name: str) -> Never:
    raise ValueError(f"{name} is no JSON")


def to_json(value: dict[str, Any], indent: int | None = 2) -> bytes:
    """A document as the files of a cache hold it."""
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False).encode(
        errors="backslashreplace"  # a path may hold bytes that are not UTF-8: as JSON's escapes they come back
    )


def seal(document: dict[str, Any], indent: int | None = 2) -> bytes:
    """A document as JSON, in which the last `"checksum": "00000000"` is replaced by the CRC-32C of these bytes.

    Raises:
        StoreError: It is larger than what is read.
    """
    unsealed = to_json(document, indent)
    if len(unsealed) > DOCUMENT_BYTES:
        what = f"metadata of {len(unsealed):,} bytes cannot be stored, since at most {DOCUMENT_BYTES:,} are read"
        raise StoreError(f"{what}: extract with a smaller --shard-size")
    head, mark, tail = unsealed.rpartition(_entry(UNSEALED))
    assert mark
    return head + _entry(hex_crc32c(unsealed)) + tail


def is_sealed(data: bytes, checksum: str) -> bool:
    """Whether `data` is what `seal` gave, by the checksum that was found in it."""
    head, mark, tail = data.rpartition(_entry(checksum))
    return bool(mark) and hex_crc32c(head + _entry(UNSEALED) + tail) == checksum


def _entry(checksum: str) -> bytes:
    return f'"checksum": "{checksum}"'.encode()
