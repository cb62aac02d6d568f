"""Checks of arguments, numbers and paths: anything else is refused with a one-line error."""

from __future__ import annotations

import math
import operator
import os
import re
from numbers import Real
from typing import Any

from featcache.errors import ArgumentError

__all__ = ["is_number", "local", "number", "whole"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""As text, and as pathlib shortens it: `s3://bucket` and `s3:/bucket`."""


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


def local(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a URL where a path is wanted: as a path, it would be a folder called `s3:`.

    Args:
        name: of the argument.
        path: that was given.

    Raises:
        ArgumentError: it is a URL.
    """
    given = os.fspath(path)
    if (match := _URL.match(given)) and (not isinstance(path, str) or given.startswith("/", match.end())):
        raise ArgumentError(f"{name}: {given} is a URL: mount or copy what is there, and give a path on this machine")
