"""Checks of numeric arguments: anything else is refused with a one-line error."""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

from featcache.errors import ArgumentError

__all__ = ["is_number", "number", "whole"]


def whole(name: str, value: Any, least: int | None = None) -> int:
    """An argument as an int: one of Python's, numpy's or torch's whole numbers, and no bool.

    Args:
        name: of the argument.
        value: that was given.
        least: that is allowed.

    Raises:
        ArgumentError: it is no whole number, or less.
    """
    try:
        given = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        given = None
    if given is None or (least is not None and given < least):
        raise ArgumentError(
            f"{name} is {value!r}: it must be a whole number{'' if least is None else f', {least} or more'}"
        )
    return given


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """An argument that is a number, whole or not, and no bool.

    Args:
        name: of the argument.
        value: that was given.
        low: the smallest that is allowed.
        high: the largest.

    Raises:
        ArgumentError: it is no number, NaN, or not from `low` to `high`.
    """
    if not (is_number(value) and low <= value <= high):
        limits = "" if low == -math.inf else f", {low:g} or more" if high == math.inf else f" from {low:g} to {high:g}"
        raise ArgumentError(f"{name} is {value!r}: it must be a number{limits}")
    return float(value)


def is_number(value: object) -> bool:
    """Whether something is one of Python's or numpy's real numbers, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)
