"""Checks of the arguments of a call; what does not fit raises an `ArgumentError` of one line."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Sized
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError

__all__ = ["is_number", "positions_in", "refuse_url", "require_int", "require_number"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches a URL as text (`s3://bucket`) and as pathlib shortens it (`s3:/bucket`)."""


def require_int(name: str, value: Any, least: int | None = None) -> int:
    """Return a whole number as an int: Python's, numpy's or torch's are accepted, a bool is not.

    Args:
        name: The argument's name, for the message.
        value: The argument's value.
        least: The smallest value allowed.

    Raises:
        ArgumentError: The value is not a whole number, or is less than `least`.
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


def positions_in(name: str, values: Any, count: int, where: str, wanted: str) -> NDArray[np.int64]:
    """Return positions in a sequence, int64 `[values]`, counted from its beginning.

    Args:
        name: The argument's name, for messages.
        values: A sized sequence of whole numbers of Python, numpy or torch; negative ones count from the end.
        count: The length of the sequence.
        where: What has the sequence, for messages.
        wanted: What to give instead, for messages.

    Raises:
        ArgumentError: The values are not whole numbers, or not in a sequence.
        IndexError: There is no such position.
    """
    if not isinstance(values, Sized):
        raise ArgumentError(f"{name} is {values!r}: give {wanted}")
    positions = np.asarray(values) if len(values) else np.empty(0, np.int64)
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise ArgumentError(f"{name} are {positions.dtype} {list(positions.shape)}: give {wanted}")
    outside = positions[(positions < -count) | (positions >= count)]
    if len(outside):
        raise IndexError(f"no utterance at {outside[0]}: {where} has {count:,}")
    return positions.astype(np.int64) % count if len(positions) else positions.astype(np.int64)


def require_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return a number as a float, whether whole or not; a bool is not accepted.

    Args:
        name: The argument's name, for the message.
        value: The argument's value.
        low: The smallest value allowed.
        high: The largest value allowed.

    Raises:
        ArgumentError: The value is not a number, is NaN, or is not within `low` and `high`.
    """
    if not (is_number(value) and low <= value <= high):
        limits = "" if low == -math.inf else f", {low:g} or more" if high == math.inf else f" from {low:g} to {high:g}"
        raise ArgumentError(f"{name} is {value!r}: it must be a number{limits}")
    return float(value)


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python or numpy; a bool is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def refuse_url(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a URL where a path is wanted: as a path it would name a folder called `s3:`.

    Args:
        name: The argument's name, for the message.
        path: The argument's value.

    Raises:
        ArgumentError: The path is a URL.
    """
    given = os.fspath(path)
    if (match := _URL.match(given)) and (not isinstance(path, str) or given.startswith("/", match.end())):
        raise ArgumentError(f"{name}: {given} is a URL: mount or copy what is there, and give a path on this machine")
