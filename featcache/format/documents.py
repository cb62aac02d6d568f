"""The JSON of a cache: sealed when it is written, bounded and checked when it is read.

A seal is the CRC-32C of all bytes of a document, of which eight hex digits are the seal
itself: so one flipped bit is noticed, wherever it is. And a cache may come from a
stranger: a document is parsed only if it is not too large and has not too many lists and
objects, and then must be what a msgspec Struct declares."""

from __future__ import annotations

import json
import os
import re
import threading
from typing import Annotated, Any, TypeVar

import msgspec
from crc32c import crc32c

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location

AT_MOST_BYTES = 32 << 20
"""The largest document that is read."""

AT_MOST_NAME = 232
"""The longest name of a version, in characters: with its fingerprint its folder's is
longer, and 255 bytes may be."""

_AT_MOST_CONTAINERS = 1 << 18
"""How many lists and objects a document has at most, counted by brackets: empty ones take
70 bytes for two."""

_SEAL = re.compile(rb'"checksum": ?"([0-9a-f]{8})"')

UNSEALED = "00000000"
"""Stands for the seal in the key `checksum`, until the document is sealed."""

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A SHA-256."""
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""64 bits; names of shards too."""

_T = TypeVar("_T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.RLock()  # held while the process forks, or the child might never get it
os.register_at_fork(
    before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release
)


def seal(data: bytes, where: object = "") -> bytes:
    """The document with its seal in the last `"checksum": "00000000"`. Raises StoreError
    if it is too large to read."""
    if len(data) > AT_MOST_BYTES:
        held = f"{len(data):,} bytes of metadata, and at most {AT_MOST_BYTES:,} are read"
        raise StoreError(f"{where}: {held}: extract with a larger --shard-size")
    at = _place_of_seal(data)
    return b"%b%08x%b" % (data[:at], crc32c(data), data[at + 8 :])


def encode_line(document: dict[str, Any]) -> bytes:
    """A document of its own: one sealed line of JSON. Bytes of paths that are not UTF-8
    are escapes in it."""
    return seal(msgspec.json.encode({**_in_utf8(document), "checksum": UNSEALED})) + b"\n"


def _in_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _in_utf8(one) for key, one in value.items()}
    return [_in_utf8(one) for one in value] if isinstance(value, list) else value


def parse(data: bytes, kind: type[_T], where: Location | str, version: object = None) -> _T:
    """The sealed document in some JSON, which must be what `kind` declares.

    Args:
        kind: A Struct; of a Zarr group, one that has the group's keys.
        where: Names the document in messages.
        version: The place of the version that `featcache repair` can repair it in, if it can.

    Raises DamagedError if its seal does not match, it is too large, or it is not what was
    declared."""
    try:
        if data.count(b"[") + data.count(b"{") > _AT_MOST_CONTAINERS:
            raise ValueError(f"more than {_AT_MOST_CONTAINERS:,} lists and objects")
        at = _place_of_seal(data)
        if data[at : at + 8] != b"%08x" % crc32c(
            data[at + 8 :], crc32c(UNSEALED.encode(), crc32c(data[:at]))
        ):
            raise ValueError("its checksum does not match")
        return decoder_of(kind).decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise DamagedError(f"{where}: damaged: {error}", version) from error


def parse_line(data: bytes, kind: type[_T], where: Location | str) -> _T:
    """The document that `encode_line` made, likewise."""
    if not data.endswith(b"\n"):
        raise DamagedError(f"{where}: damaged: it is cut off")
    return parse(data[:-1], kind, where)


def decoder_of(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    """Return the parser of JSON that must be what `kind` declares. One thread at a time
    makes a parser: msgspec crashes if two threads look at the declarations of a Struct
    for the first time."""
    if kind not in _decoders:
        with _making:
            _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def _place_of_seal(data: bytes) -> int:
    """Find the eight digits of a document's seal. Text in JSON has no plain quotes, so
    this is a key."""
    seal_found = _SEAL.match(data, max(0, data.rfind(b'"checksum"')))
    if seal_found is None:
        raise ValueError("it has no checksum")
    return seal_found.start(1)


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted paths at which two resolved configs differ, with both values:
    `params.low_freq: 20.0 -> 0.0`."""

    def shown(config: dict[str, Any]) -> str:
        return json.dumps(config[key]) if key in config else "not given"

    # two extractors' parameters cannot be compared
    if not prefix and old.get("extractor") != new.get("extractor"):
        return [
            f"extractor: {json.dumps(old.get('extractor'))} -> {json.dumps(new.get('extractor'))}"
        ]
    lines = []
    for key in sorted({*old, *new}):
        path, was, now = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differing_keys(was, now, f"{path}.")
        elif was != now:
            lines.append(f"{path}: {shown(old)} -> {shown(new)}")
    return lines
