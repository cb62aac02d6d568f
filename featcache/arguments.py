"""Checks of the arguments of a call; what does not fit raises an `ArgumentError` of one line."""

from __future__ import annotations

import math
import operator
import os
import re
from numbers import Real
from typing import Any

from featcache.errors import ArgumentError

__all__ = ["is_number", "refuse_url", "require_int", "require_number"]

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
