"""Flat strings: a sequence like any other, and its hashes."""

import struct
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from featcache.manifest.strings import Strings, are_distinct, extend_hashes

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TEXTS = st.lists(TEXT, max_size=30)


def fnv(data: bytes) -> int:
    """The 64-bit FNV-1a hash, as its authors wrote it down."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


@given(TEXTS)
def test_it_is_the_sequence_that_went_in(texts):
    """Iterated, indexed from either end, sliced, counted, compared."""
    strings = Strings.of(texts)
    assert list(strings) == texts
    assert len(strings) == len(texts)
    assert [strings[i] for i in range(-len(texts), len(texts))] == texts + texts
    assert strings[1:7:2] == texts[1:7:2]
    assert strings == Strings.of(iter(texts))
    assert strings == texts == strings
    assert strings == tuple(texts)
    assert strings != [*texts, ""]
    assert strings not in (["", *texts], "", None, 3)
    assert strings.byte_lengths().tolist() == [len(text.encode()) for text in texts]
    for beyond in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError):
            strings[beyond]


@given(st.lists(TEXTS, max_size=5), st.data())
def test_parts_of_it_are_sequences_too(parts, data):
    """Concatenated and taken apart: what lies before or after in the blob does not matter."""
    texts = list(chain.from_iterable(parts))
    strings = Strings.concatenate([Strings.of(part) for part in parts])
    assert list(strings) == texts
    positions = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=20)) if texts else []
    taken = strings.take(np.array(positions, np.int64))
    assert list(taken) == [texts[position] for position in positions]
    assert strings.texts(np.array(positions, np.int64)) == list(taken)
    first = data.draw(st.integers(0, len(texts)))
    view = Strings(strings.blob, strings.offsets[first:])
    assert list(view) == texts[first:]
    assert view == Strings.of(texts[first:])
    assert (view.hashes() == Strings.of(texts[first:]).hashes()).all()
    assert list(Strings.concatenate([view, view])) == texts[first:] * 2


@given(TEXTS, TEXTS)
def test_equality_is_that_of_the_strings(one, other):
    """Also where the bytes are the same, and cut at other places."""
    assert (Strings.of(one) == Strings.of(other)) == (one == other)
    assert Strings.of(["ab", "c"]) != Strings.of(["a", "bc"])


@given(TEXTS)
def test_hashes_are_fnv_1a(texts):
    """Held to the algorithm, one byte after the other."""
    assert Strings.of(texts).hashes().tolist() == [fnv(text.encode()) for text in texts]


def test_hashes_are_those_that_are_published():
    """Test vectors of draft-eastlake-fnv, appendix C."""
    published = {"": 0xCBF29CE484222325, "a": 0xAF63DC4C8601EC8C, "foobar": 0x85944171F73967E8}
    assert Strings.of(published).hashes().tolist() == list(published.values())


@given(
    st.lists(
        st.tuples(TEXT, st.integers(-(2**31), 2**31 - 1), st.floats(allow_nan=False)), max_size=20
    )
)
def test_hashes_go_on_over_numbers(rows):
    """As if their little-endian bytes stood after the string's."""
    hashes = Strings.of(text for text, _, _ in rows).hashes()
    hashes = extend_hashes(hashes, np.array([number for _, number, _ in rows], np.int32))
    hashes = extend_hashes(hashes, np.array([number for _, _, number in rows], ">f8"))
    assert hashes.tolist() == [
        fnv(text.encode() + struct.pack("<id", whole, real)) for text, whole, real in rows
    ]


def test_beginning_with_a_text():
    strings = Strings.of(["anna-1", "ann", "ben-1", "günther-3", ""])
    assert strings.beginning_with("ann", 10) == ["anna-1", "ann"]
    assert strings.beginning_with("ann", 1) == ["anna-1"]
    assert strings.beginning_with("gü", 10) == ["günther-3"]
    assert len(strings.beginning_with("", 10)) == 5
    assert Strings.of([]).beginning_with("", 10) == []


@given(st.lists(st.builds(lambda low, high: low + (high << 18), *[st.integers(0, 5)] * 2)))
def test_a_hash_that_occurs_twice_is_found_among_hashes_that_end_alike(hashes):
    distinct = len({*hashes}) == len(hashes)
    assert are_distinct(np.array(hashes, np.uint64)) == distinct


@pytest.mark.parametrize("count", [2, 1 << 16, (1 << 16) + 1, 300_000])
def test_a_hash_that_occurs_twice_is_found_among_many(count):
    hashes = np.random.default_rng(0).integers(0, 2**64, count, np.uint64)
    assert are_distinct(hashes)
    hashes[-1] = hashes[0]
    assert not are_distinct(hashes)
