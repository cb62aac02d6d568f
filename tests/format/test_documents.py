"""The JSON of a cache is sealed, read within bounds, and whatever is odd is a
DamagedError."""

import re
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.errors import DamagedError, StoreError
from featcache.format.documents import (
    AT_MOST_BYTES,
    UNSEALED,
    encode_line,
    parse,
    read_document,
    seal,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda some: st.lists(some, max_size=4) | st.dictionaries(TEXT, some, max_size=4),
    max_leaves=10,
)


class Document(msgspec.Struct):
    a: int


class Anything(msgspec.Struct):
    value: object = None


def read(line, kind):
    """The document in a file `store/x` of these bytes."""
    return read_document(SimpleNamespace(read=lambda *_: line, location="store"), "x", kind)


@given(JSON)
def test_a_document_comes_back(value):
    """Also where it holds keys and text like a seal."""
    line = encode_line({"value": value})
    assert line.count(b"\n") == 1
    assert read(line, Anything).value == value


def test_every_flipped_bit_is_noticed():
    line = encode_line({"a": 1, "text": "\u00fc", "checksum of": '"checksum": "00000000"'})
    assert read(line, Document).a == 1
    for bit in range(8 * len(line)):
        spoilt = bytearray(line)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedError, match=r"^store/x: damaged: "):
            read(bytes(spoilt), Document)
    for end in range(len(line)):
        with pytest.raises(DamagedError, match=r"^store/x: damaged: "):
            read(line[:end], Document)


def sealed(inner: bytes) -> bytes:
    return seal(inner + b'"checksum": "%b"}' % UNSEALED.encode())


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "it has no checksum"),
        (b'{"a": 1}', "it has no checksum"),
        (b'{"a": 1, "checksum": "00000000"}', "its checksum does not match"),
        (b"[" * 300_000, "more than 262,144 lists and objects"),
        (sealed(b'{"a": "1", '), "Expected `int`, got `str`"),
        (sealed(b'{"b": 1, '), "missing required field `a`"),
        (sealed(b'{"a": NaN, '), "JSON is malformed"),
        (sealed(b'{"a": ' + b"1" * 5000 + b", "), "out of range"),
        (sealed(b'{"b": ' + b"[" * 100_000 + b"]" * 100_000 + b', "a": 1, '), "recursion"),
        (seal(b'["checksum", {"checksum": "00000000"}]'), "Expected `object`, got `array`"),
    ],
    ids=range(10),
)
def test_what_is_no_document_is_damaged_and_named(data, what):
    with pytest.raises(DamagedError, match=f"(?i)^here/zarr.json: damaged: .*{re.escape(what)}"):
        parse(data, Document, "here/zarr.json")


def test_what_nobody_would_read_is_not_written():
    with pytest.raises(
        StoreError, match="at most 33,554,432 are read: extract with a larger --shard-size"
    ):
        encode_line({"a": "x" * AT_MOST_BYTES})
