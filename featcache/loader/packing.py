"""Rows of a fixed number of tokens that hold whole documents, as full as possible.

All functions are pure, and give the same on every machine: their arithmetic is of
integers."""

from __future__ import annotations

from bisect import bisect_left, insort
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.loader.windows import mixed
from featcache.spec import Ints

_ROW_BITS = 32
"""The low bits of an open row, which are its number; its free tokens are above them."""

_ROUNDS = 6


def best_fit(sizes: Ints, tokens: int) -> Ints:
    """Put documents of up to `tokens` tokens into rows of that many. Returns the row of each
    document, int64 `[documents]`.

    The largest documents come first. Each goes into the row with the least free tokens that
    are enough, or into a new row."""
    # numpy sorts the smallest dtype several times as fast.
    free = (tokens - sizes).astype(np.min_scalar_type(tokens))
    largest_first = np.argsort(free, kind="stable")
    falling = sizes[largest_first]
    # Documents of one size, as many as fit, go into a row together: so would one by one.
    firsts = np.flatnonzero(np.diff(falling, prepend=-1))
    counts = np.diff(firsts, append=len(sizes))
    chosen: list[int] = []
    num_documents: list[int] = []
    open_rows: list[int] = []
    num_rows = 0
    for size, count in zip((falling[firsts] << _ROW_BITS).tolist(), counts.tolist(), strict=True):
        missing = count
        while missing:
            place = bisect_left(open_rows, size)
            if place < len(open_rows):
                row = open_rows.pop(place)
            else:
                row = tokens << _ROW_BITS | num_rows
                num_rows += 1
            fitting = min(missing, row // size) if size else missing
            chosen.append(row)
            num_documents.append(fitting)
            insort(open_rows, row - fitting * size)
            missing -= fitting
    row_of = np.empty(len(sizes), np.int64)
    row_of[largest_first] = np.repeat(np.array(chosen, np.int64), num_documents)
    return row_of & ((1 << _ROW_BITS) - 1)


def in_balance(amounts: Ints) -> Ints:
    """Order rows so that the sum of the first rows, however many, is close to their share of
    the sum of all. Equally good rows stay in their order. `amounts` are what each row holds
    of each source, int64 `[rows, sources]`."""
    surplus = amounts * len(amounts) - amounts.sum(0)
    left = np.arange(len(amounts))
    reached = np.zeros(amounts.shape[1], np.int64)
    order = np.empty(len(amounts), np.int64)
    for place in range(len(amounts)):
        best = int(np.abs(surplus[left] + reached).max(1).argmin())
        order[place] = left[best]
        reached += surplus[left[best]]
        left = np.delete(left, best)
    return order


def shuffled(numbers: Ints, count: int, seeds: tuple[int, ...]) -> Ints:
    """Return where a shuffle of `count` rows puts the rows of these numbers, int64
    `[numbers]`, without a list of all rows.

    Source: a Feistel network over 4^h ≥ `count` numbers, applied again to what falls
    outside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains")."""
    half = max(1, (int(count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = np.random.SeedSequence(seeds).generate_state(_ROUNDS, np.uint64)
    # The function of each round, for all numbers that it may get: to look up is faster.
    halves = np.arange(1 << half, dtype=np.uint64)
    tables = [(mixed(halves ^ key) & np.uint64(mask)).astype(np.int64) for key in keys]
    places = numbers.astype(np.int64)
    outside = np.arange(len(places))
    while len(outside):
        left, right = places[outside] >> half, places[outside] & mask
        for table in tables:
            left, right = right, left ^ table[right]
        places[outside] = left << half | right
        outside = outside[places[outside] >= count]
    return places


class Layout(NamedTuple):
    """Where documents stand in flattened rows. A sequence is a document with tokens, or the
    padding at the end of a row."""

    starts: Ints
    """Where each document begins, `[documents]`; they rise."""
    bounds: NDArray[np.int32]
    """Where the sequences begin, and the end of the last, `[sequences + 1]`."""
    documents: NDArray[np.int32]
    """The document of each sequence, -1 for padding, `[sequences]`."""

    @classmethod
    def of(cls, row_of: Ints, lengths: Ints, num_rows: int, row_length: int) -> Layout:
        """Put documents of these lengths next to each other into their rows, which rise."""
        # First a sequence for each document and each row's padding, even if it is empty.
        numbers, rows = np.arange(len(row_of)), np.arange(num_rows)
        places = numbers + row_of
        ends_of_rows = np.searchsorted(row_of, rows, "right")
        counts = np.empty(len(numbers) + num_rows, np.int64)
        counts[places] = lengths
        counts[ends_of_rows + rows] = row_length - np.bincount(row_of, lengths, num_rows)
        documents = np.full(len(counts), -1, np.int32)
        documents[places] = numbers
        ends = np.cumsum(counts)
        starts = (ends - counts)[places]
        if not counts.all():
            has_tokens = counts > 0
            ends, documents = ends[has_tokens], documents[has_tokens]
        bounds = np.zeros(len(ends) + 1, np.int32)
        bounds[1:] = ends
        return cls(starts, bounds, documents)

    def write(self, ids: NDArray[np.int32], positions: NDArray[np.int32]) -> None:
        """Write the document of each token, -1 where there is none, and the token's number in
        it, 0 where there is none."""
        lengths = self.bounds[1:] - self.bounds[:-1]
        ids[:] = np.repeat(self.documents, lengths)
        np.subtract(_counting(len(ids)), np.repeat(self.bounds[:-1], lengths), out=positions)
        for sequence in np.flatnonzero(self.documents < 0).tolist():
            positions[self.bounds[sequence] : self.bounds[sequence + 1]] = 0


@lru_cache(maxsize=8)
def _counting(count: int) -> NDArray[np.int32]:
    """Return the numbers from 0 up, int32 `[count]`."""
    return np.arange(count, dtype=np.int32)
