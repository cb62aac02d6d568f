"""Segments: what tells rows apart is their path, start, duration and channel."""

from __future__ import annotations

import math
import struct

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from featcache.manifest import SegmentColumns
from featcache.strings import Strings


def slow_row_hash(path: str, start: float, duration: float, channel: int) -> int:
    def seconds(value: float) -> bytes:
        return struct.pack("<d", math.nan if math.isnan(value) else 0.0 if value == 0 else value)

    result = 0xCBF29CE484222325
    for byte in path.encode() + seconds(start) + seconds(duration) + struct.pack("<i", channel):
        result = (result ^ byte) * 0x100000001B3 % 2**64
    return result


def hashes_of(rows) -> list[int]:
    paths, start, duration, channel = zip(*rows, strict=True)
    columns = SegmentColumns(Strings.of(paths), np.array(start), np.array(duration), np.array(channel, np.int32))
    return columns.hashes().tolist()


text = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
OTHER_NAN = struct.unpack("<d", b"\x01\0\0\0\0\0\xf8\xff")[0]


@given(st.lists(st.tuples(text, st.floats(), st.floats(), st.integers(-1, 2**31 - 1)), min_size=1))
@example([("a", math.nan, OTHER_NAN, -1), ("a", -0.0, 0.0, 0), ("", 1.5, 2.5, 1)])
def test_row_hashes_equal_the_slow_reference(rows):
    assert hashes_of(rows) == [slow_row_hash(*row) for row in rows]


def test_row_hashes_tell_rows_apart_by_each_column():
    row = ("a.wav", 0.0, 1.0, 0)
    others = [
        ("b.wav", 0.0, 1.0, 0),
        ("a.wav", math.nan, 1.0, 0),
        ("a.wav", 0.0, 2.0, 0),
        ("a.wav", 0.0, 1.0, -1),
    ]
    assert len(set(hashes_of([row, *others]))) == 5
    assert len(set(hashes_of([row, ("a.wav", -0.0, 1.0, 0)]))) == 1
    assert len(set(hashes_of([("a", OTHER_NAN, math.nan, -1), ("a", math.nan, -OTHER_NAN, -1)]))) == 1
