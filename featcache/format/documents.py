"""The JSON of a cache: sealed when it is written, bounded and checked when it is read.

A seal is the CRC-32C of a document, eight hex digits in it: so one flipped bit anywhere is
noticed. A cache may come from a stranger: a document is parsed only if it is not too large
and has not too many lists and objects, and must be what a msgspec Struct declares."""

from __future__ import annotations

import os
import re
import threading
from typing import Annotated, Any, TypeVar

import msgspec
from crc32c import crc32c

from featcache.errors import DamagedError, StoreError
from featcache.storage.base import Store

AT_MOST_BYTES = 32 << 20
"""The size of the largest document that is read."""

_AT_MOST_CONTAINERS = 1 << 18
"""The most lists and objects of a document, counted by brackets: two bytes of JSON become
70 in memory."""

_SEAL = re.compile(rb'"checksum": ?"([0-9a-f]{8})"')

UNSEALED = "00000000"
"""The value of the key `checksum` until the document is sealed."""

Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
Positive = Annotated[int, msgspec.Meta(ge=1, lt=1 << 48)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Hex = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
"""A SHA-256."""
Hash = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""64 bits, such as the names of shards."""

_T = TypeVar("_T")

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.RLock()  # held while the process forks, or the child might never get it
os.register_at_fork(
    before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release
)


def seal(data: bytes, where: object = "") -> bytes:
    """Put the seal of a document into its last `"checksum": "00000000"`. Raises StoreError
    if the document is too large to read."""
    if len(data) > AT_MOST_BYTES:
        held = f"{len(data):,} bytes of metadata, and at most {AT_MOST_BYTES:,} are read"
        raise StoreError(f"{where}: {held}: extract with a larger --shard-size")
    at = _place_of_seal(data)
    return b"%b%08x%b" % (data[:at], crc32c(data), data[at + 8 :])


def encode_line(document: dict[str, Any]) -> bytes:
    """Encode a document as one sealed line of JSON. Bytes of paths that are not UTF-8
    become escapes."""
    return seal(msgspec.json.encode({**_in_utf8(document), "checksum": UNSEALED})) + b"\n"


def _in_utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _in_utf8(one) for key, one in value.items()}
    return [_in_utf8(one) for one in value] if isinstance(value, list) else value


def parse(data: bytes, kind: type[_T], where: object) -> _T:
    """Parse a sealed document, which must be what the Struct `kind` declares. Raises
    DamagedError, which names `where` it is, if its seal does not match, it is too large, or
    it is not what was declared."""
    try:
        if data.count(b"[") + data.count(b"{") > _AT_MOST_CONTAINERS:
            raise ValueError(f"more than {_AT_MOST_CONTAINERS:,} lists and objects")
        at = _place_of_seal(data)
        crc = crc32c(data[at + 8 :], crc32c(UNSEALED.encode(), crc32c(data[:at])))
        if data[at : at + 8] != b"%08x" % crc:
            raise ValueError("its checksum does not match")
        return decoder_of(kind).decode(data)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise DamagedError(f"{where}: damaged: {error}") from error


def put_document(store: Store, key: str, document: object) -> None:
    """Write a Struct or dict as a file of one sealed line."""
    store.put(key, encode_line(msgspec.to_builtins(document)))


def read_document(store: Store, key: str, kind: type[_T]) -> _T:
    """Read the file that `put_document` wrote; see `parse`."""
    data, where = store.read(key, AT_MOST_BYTES), f"{store.location}/{key}"
    if not data.endswith(b"\n"):
        raise DamagedError(f"{where}: damaged: it is cut off")
    return parse(data[:-1], kind, where)


def decoder_of(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    """Return the parser of JSON that must be what `kind` declares. One thread at a time
    makes parsers, since msgspec crashes if two threads first look at a Struct."""
    if kind not in _decoders:
        with _making:
            _decoders[kind] = msgspec.json.Decoder(kind)
    return _decoders[kind]


def _place_of_seal(data: bytes) -> int:
    """Find the digits of a document's seal. Text in JSON has no plain quotes, so this is
    a key."""
    seal_found = _SEAL.match(data, max(0, data.rfind(b'"checksum"')))
    if seal_found is None:
        raise ValueError("it has no checksum")
    return seal_found.start(1)
