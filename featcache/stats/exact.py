"""Sums of floats without rounding: the same bits in whatever order, and by however many threads, they are added.

A float64 is cut at fixed powers of two, every 32 bits, into whole numbers; those of each power are added as int64,
which is exact. R. M. Neal calls this a small superaccumulator (2015, "Fast exact summation using small and large
superaccumulators", arXiv:1505.05571). Parts are at most 2^32, so 2^31 of them fit before one would overflow, and no
carry is ever moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LOWEST = 992
"""The last bit of any value is worth 2^-992 at least."""

_BITS = 32


class ExactSums:
    """Sums for each of some groups and columns, exact for up to 2^31 values in each.

    Args:
        groups: how many.
        columns: how many.
    """

    def __init__(self, groups: int, columns: int) -> None:
        self._shape = groups, columns
        self._parts: dict[int, NDArray[np.int64]] = {}  # by number: part n counts units of 2^(32 n)

    def add(self, groups: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add values.

        Args:
            groups: int64 `[n]`, the group of each row; n is at most 2^21.
            values: float64 `[n, columns]`, zeros or of sizes from 2^-900 to 2^900.
        """
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        targets, rest = groups[order][starts], values[order]
        number = (int(np.frexp(np.abs(rest).max())[1]) - 1) // _BITS
        while rest.any():
            unit = 2.0 ** (_BITS * number)
            whole = np.rint(rest * (1 / unit))
            rest -= whole * unit
            if number not in self._parts:
                self._parts[number] = np.zeros(self._shape, np.int64)
            self._parts[number][targets] += np.add.reduceat(whole, starts, axis=0).astype(np.int64)
            number -= 1

    def totals(self) -> list[list[int]]:
        """The sums, `[groups][columns]`, in units of 2^-LOWEST."""
        groups, columns = self._shape
        flat = [0] * (groups * columns)
        for number, part in self._parts.items():
            shift = _BITS * number + LOWEST
            flat = [total + (one << shift) for total, one in zip(flat, part.ravel().tolist(), strict=True)]
        return [flat[first : first + columns] for first in range(0, len(flat), columns)]


def in_units(value: float) -> int:
    """A float in units of 2^-LOWEST."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << LOWEST) // denominator)
