"""Checks of the arguments of a call; what does not fit raises an `ArgumentError` of one line."""

from __future__ import annotations

import math
import operator
import os
import re
from numbers import Real
from typing import Any

from featcache.errors import ArgumentError, secret_in

__all__ = [
    "MOST_COUNTED",
    "MOST_THREADS",
    "is_number",
    "refuse_almost_url",
    "refuse_secrets",
    "refuse_url",
    "require_int",
    "require_number",
]

MOST_THREADS = 4096
"""The largest budget of threads that makes sense."""

MOST_COUNTED = 2**62
"""The largest number of frames, rows or epochs: what computes with 64 bits cannot hold many more."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""Matches a URL as text (`s3://bucket`) and as pathlib shortens it (`s3:/bucket`)."""

_ALMOST_URL = re.compile(r"(s3|gs|az|memory|https?):(?!//)/?(?=.)", re.IGNORECASE)


def require_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """Return the value of the argument of that name as an int: a whole number of Python, numpy or torch, and no bool.

    Raises:
        ArgumentError: The value is not a whole number, is less than `least` or greater than `most`.
    """
    try:
        given = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        given = None
    is_large = given is not None and most is not None and given > most
    if given is None or is_large or (least is not None and given < least):
        limits = ("" if least is None else f", {least} or more") + (f", at most {most}" if is_large else "")
        raise ArgumentError(f"{name} is {value!r}: it must be a whole number{limits}")
    return given


def require_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """Return the value of the argument of that name as a float: a number, whole or not, and no bool.

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


def refuse_secrets(name: str, url: str) -> None:
    """Refuse a URL that may give access to whoever reads it: with a user, a query or a fragment.

    Raises:
        ArgumentError: It is one; the message does not quote it.
    """
    if fault := secret_in(url):
        raise ArgumentError(f"{name} {fault}: give the URL without it, and credentials by the environment")


def refuse_almost_url(name: str, text: str) -> None:
    """Refuse a URL that lacks a slash or two, which would name a folder called `s3:`.

    Raises:
        ArgumentError: The text is one: the message says what was probably meant.
    """
    if match := _ALMOST_URL.match(text):
        meant = f"{match[1]}://{text[match.end() :]}"
        refuse_secrets(name, meant)
        raise ArgumentError(f"{name}: {text} is no URL: did you mean {meant}? A path of that name is ./{text}")


def refuse_url(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a URL where a path is wanted: as a path it would name a folder called `s3:`.

    Raises:
        ArgumentError: The path is a URL, or is almost one.
    """
    given = os.fspath(path)
    if isinstance(path, str):
        refuse_almost_url(name, path)
    if (match := _URL.match(given)) and (not isinstance(path, str) or given.startswith("/", match.end())):
        what = "it" if secret_in(given) else given
        raise ArgumentError(f"{name}: {what} is a URL: mount or copy what is there, and give a path on this machine")
