"""Many strings in two flat arrays, and the 64-bit hash that finds one among them.

A Python list of 10^7 ids takes over a gigabyte, and every forked worker gets a copy of it
page by page. Here the strings are one blob of UTF-8 bytes and one array of offsets: half
the memory, shared by all processes, and mapped from disk."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_FNV_PRIME = np.uint64(0x100000001B3)
_BLOCK = 1 << 16  # so many strings are handled at once
_SEARCHED = 1_000_000
_SLOTS = 1 << 18

Hashes = NDArray[np.uint64]


class Strings(Sequence[str]):
    """An immutable sequence of strings, stored flat. What is not UTF-8, as in a forged
    index, reads as U+FFFD.

    Args:
        blob: The strings' UTF-8 bytes, one string after the other, uint8 `[bytes]`.
        offsets: Where each string begins, integers `[n + 1]`: string `i` is
            `blob[offsets[i]:offsets[i + 1]]`.
    """

    __slots__ = ("blob", "offsets")

    def __init__(self, blob: NDArray[np.uint8], offsets: NDArray[Any]) -> None:
        self.blob = blob
        self.offsets = offsets

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Pack strings, which are consumed once, and never held as a list."""
        rest, packed = iter(strings), GrowingStrings()
        while block := list(islice(rest, _BLOCK)):
            packed.extend(block)
        return packed.strings()

    @classmethod
    def concatenate(cls, parts: Sequence[Strings]) -> Strings:
        """Join sequences, one after the other."""
        if not parts:
            return cls.of([])
        lengths = np.concatenate([part.byte_lengths() for part in parts])
        return cls(np.concatenate([part.utf8() for part in parts]), _offsets_of(lengths))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"no string at {index}: there are {len(self)}")
        start, end = self.offsets[index : index + 2].tolist()
        return self.blob[start:end].tobytes().decode(errors="replace")

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _BLOCK):  # copies one block at a time
            offsets = self.offsets[first : first + _BLOCK + 1]
            data: Any = self.blob[offsets[0] : offsets[-1]].tobytes()
            is_ascii = data.isascii()
            if is_ascii:  # takes half the time
                data = data.decode()
            ends = (offsets - offsets[0]).tolist()
            parts = map(data.__getitem__, map(slice, ends, ends[1:]))
            if is_ascii:
                yield from parts
            else:
                yield from (part.decode(errors="replace") for part in parts)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings):
            has_same_lengths = np.array_equal(self.byte_lengths(), other.byte_lengths())
            return has_same_lengths and np.array_equal(self.utf8(), other.utf8())
        if isinstance(other, Sequence) and not isinstance(other, str):
            return len(self) == len(other) and all(map(operator.eq, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        head = ", ".join(map(repr, self[:3]))
        return f"Strings([{head}{', …' if len(self) > 3 else ''}], {len(self)} in all)"

    def are_utf8(self) -> bool:
        """Tell whether every string is valid UTF-8."""
        try:
            self.utf8().tobytes().decode()
        except UnicodeDecodeError:
            return False
        starts = self.offsets[:-1][self.byte_lengths() > 0]
        # none begins within a character
        return not bool((self.blob[starts] & 0xC0 == 0x80).any())

    def equal_at(
        self, at: NDArray[Any], other: Strings, at_other: NDArray[Any]
    ) -> NDArray[np.bool_]:
        """Tell for each `i` whether string `at[i]` equals string `at_other[i]` of the
        other sequence; bool `[n]`."""
        lengths = other.offsets[at_other + 1] - other.offsets[at_other]
        equal: NDArray[np.bool_] = self.byte_lengths()[at] == lengths
        mine, others = self.take(at[equal]), other.take(at_other[equal])
        differs = np.flatnonzero(mine.blob != others.blob)
        equal[np.flatnonzero(equal)[np.searchsorted(mine.offsets, differs, "right") - 1]] = False
        return equal

    def byte_lengths(self) -> NDArray[np.int64]:
        """Return the length of each string in bytes, int64 `[n]`."""
        return np.diff(self.offsets).astype(np.int64, copy=False)

    def take(self, positions: NDArray[Any]) -> Strings:
        """Return the strings at `positions` `[m]`, in that order."""
        starts = self.offsets[positions].astype(np.int64, copy=False)
        lengths = self.offsets[positions + 1].astype(np.int64, copy=False) - starts
        offsets = _offsets_of(lengths)
        blob = np.empty(offsets[-1], np.uint8)
        # the arrays that find the bytes are several times larger
        for first in range(0, len(lengths), _BLOCK):
            block = slice(first, first + _BLOCK)
            start, stop = offsets[first], offsets[min(first + _BLOCK, len(lengths))]
            moves = np.repeat(starts[block] - offsets[:-1][block], lengths[block])
            blob[start:stop] = self.blob[moves + np.arange(start, stop)]
        return Strings(blob, offsets)

    def texts(self, positions: NDArray[Any]) -> list[str]:
        """Return the strings at `positions` `[m]`; faster than `take` for a batch."""
        starts, ends = self.offsets[positions].tolist(), self.offsets[positions + 1].tolist()
        data, spans = self.blob.data, zip(starts, ends, strict=True)
        return [str(data[start:end], "utf-8", "replace") for start, end in spans]

    def beginning_with(self, text: str, most: int) -> list[str]:
        """List at most so many strings that begin with a text, of the first million."""
        lengths = np.diff(self.offsets[: _SEARCHED + 1])
        at = np.arange(len(lengths))
        for place, byte in enumerate(text.encode(errors="replace")):
            at = at[lengths[at] > place]
            at = at[self.blob[self.offsets[at] + place] == byte]
        return self.texts(at[:most])

    def hashes(self) -> Hashes:
        """Hash the strings, uint64 `[n]`: 64-bit FNV-1a (Fowler, Noll, Vo,
        draft-eastlake-fnv, section 2)."""
        result = np.empty(len(self), np.uint64)
        for first in range(0, len(self), _BLOCK):  # which stays in the CPU's cache
            offsets = self.offsets[first : first + _BLOCK + 1].astype(np.int64, copy=False)
            lengths = np.diff(offsets)
            if (lengths == lengths[0]).all():  # half the time: no byte is looked up
                rows = self.blob[offsets[0] : offsets[-1]].reshape(len(lengths), -1)
                result[first : first + _BLOCK] = _FNV_OFFSET
                _extend(result[first : first + _BLOCK], rows)
                continue
            longest_first = np.argsort(-lengths, kind="stable")
            at, hashes = offsets[:-1][longest_first], np.full(len(lengths), _FNV_OFFSET)
            # step j hashes byte j of every string that has one: the first `count` of them
            shortest_first = lengths[longest_first][::-1]
            shorter = np.searchsorted(shortest_first, np.arange(lengths.max()), "right")
            for count in (len(at) - shorter).tolist():
                hashes[:count] ^= self.blob[at[:count]]
                hashes[:count] *= _FNV_PRIME
                at[:count] += 1
            result[first : first + _BLOCK][longest_first] = hashes
        return result

    def utf8(self) -> NDArray[np.uint8]:
        """Return the bytes of all strings, one after the other, uint8 `[bytes]`."""
        return self.blob[int(self.offsets[0]) : int(self.offsets[-1])]


class GrowingStrings:
    """Strings to which more are added, in buffers that grow in place."""

    def __init__(self) -> None:
        self._blob = bytearray()
        self._offsets = array("q", [0])

    def extend(self, strings: Sequence[str]) -> None:
        """Add strings at the end."""
        if isinstance(strings, Strings):
            lengths, blob = strings.byte_lengths(), strings.utf8().tobytes()
        else:
            blob = "".join(strings).encode()
            parts = strings if blob.isascii() else map(str.encode, strings)
            lengths = np.fromiter(map(len, parts), np.int64, len(strings))
        self._offsets.frombytes((len(self._blob) + np.cumsum(lengths)).tobytes())
        self._blob += blob

    def strings(self) -> Strings:
        """Return all strings. No string can be added afterwards."""
        return Strings(np.frombuffer(self._blob, np.uint8), np.frombuffer(self._offsets, np.int64))


def hash_of(string: str) -> int:
    """Hash one string as `Strings.hashes` does, a hundred times faster."""
    value = int(_FNV_OFFSET)
    # a lone surrogate, which no Strings hold, has one too
    for byte in string.encode(errors="surrogatepass"):
        value = (value ^ byte) * int(_FNV_PRIME) & 0xFFFFFFFFFFFFFFFF
    return value


def extend_hashes(hashes: Hashes, values: NDArray[Any]) -> Hashes:
    """Continue each FNV-1a hash `[n]` over the little-endian bytes of its number in
    `values` `[n]`."""
    little = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    rows = little.view(np.uint8).reshape(len(values), little.itemsize)
    extended = hashes.copy()
    for first in range(0, len(values), _BLOCK):
        _extend(extended[first : first + _BLOCK], rows[first : first + _BLOCK])
    return extended


def _extend(hashes: Hashes, rows: NDArray[np.uint8]) -> None:
    for column in rows.T:
        hashes ^= column
        hashes *= _FNV_PRIME


def are_distinct(hashes: Hashes) -> bool:
    """Tell whether no hash occurs twice."""
    if len(hashes) <= _BLOCK:
        # Each takes a slot, by its low bits. Few lose theirs, and are sorted.
        numbers = np.arange(len(hashes), dtype=np.int32)
        slots = hashes.astype(np.int64) & (_SLOTS - 1)
        taken_by = np.empty(_SLOTS, np.int32)
        taken_by[slots] = numbers
        winners = taken_by[slots]
        losers = np.flatnonzero(winners != numbers)
        if (hashes[losers] == hashes[winners[losers]]).any():
            return False
        hashes = hashes[losers]
    ordered = np.sort(hashes)
    return not bool((ordered[1:] == ordered[:-1]).any())


def _offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
