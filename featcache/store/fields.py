"""What the values of a JSON document may be: checks that are declared, field by field, where the document is parsed.

A check takes a value and returns it; if the value is not allowed, it raises a ValueError that says what it must be. The
documents are a cache's, which may be a stranger's, so every number and every length has a limit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from reprlib import repr as shown
from typing import Any

Check = Callable[[Any], Any]

MOST = 2**53
"""The largest whole number that every reader of JSON takes as it is."""


def anything(value: Any) -> Any:
    """Any value: nobody goes by it, or somebody else checks it."""
    return value


def whole(low: int = 0, high: int = MOST) -> Check:
    """A whole number from `low` to `high`."""

    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"it must be a whole number from {low:,} to {high:,}")
        return value

    return check


def number(low: float = -1e15, high: float = 1e15) -> Check:
    """A number from `low` to `high`, whole or not; never NaN."""

    def check(value: Any) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"it must be a number from {low:g} to {high:g}")
        return value

    return check


def text(pattern: str = ".*", at_most: int = 4096) -> Check:
    """Text that matches the whole of a pattern, and that UTF-8 can hold."""
    of_any_kind = any_text(at_most, pattern)

    def check(value: Any) -> str:
        of_any_kind(value).encode()  # half of a surrogate pair raises a ValueError
        return str(value)

    return check


def any_text(at_most: int, pattern: str = ".*") -> Check:
    """Text likewise, also with halves of surrogate pairs: a file's name may hold bytes that are not UTF-8."""
    matches = re.compile(pattern, re.DOTALL)

    def check(value: Any) -> str:
        if not isinstance(value, str) or len(value) > at_most or not matches.fullmatch(value):
            what = "text" if pattern == ".*" else f"text like {pattern}"
            raise ValueError(f"it must be {what}, of at most {at_most:,} characters")
        return value

    return check


def one_of(names: Iterable[str]) -> Check:
    """One of some names."""
    known = (*names,)

    def check(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"it must be one of {', '.join(known)}")
        return value

    return check


def listed(item: Check, at_most: int) -> Check:
    """A list of values that pass a check."""

    def check(value: Any) -> list[Any]:
        if not isinstance(value, list) or len(value) > at_most:
            raise ValueError(f"it must be a list of at most {at_most:,} values")
        try:
            return [item(inner) for inner in value]
        except ValueError as error:
            raise ValueError(f"one of its values is wrong: {error}") from error

    return check


def mapped(key: Check, item: Check) -> Check:
    """An object with any keys that pass one check, and values that pass another."""

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("it must be an object")
        return {_checked("a key", name, key): _checked(f"its {name!r}", inner, item) for name, inner in value.items()}

    return check


def optional(item: Check) -> Check:
    """Null, or a value that passes a check."""
    return lambda value: None if value is None else item(value)


def any_of(*checks: Check) -> Check:
    """A value that passes one of some checks."""

    def check(value: Any) -> Any:
        faults = []
        for one in checks:
            try:
                return one(value)
            except ValueError as error:
                faults.append(str(error))
        raise ValueError(", or ".join(faults))

    return check


def fields(needed: Mapping[str, Check], *, or_not: Mapping[str, Check] = {}, others: Check | None = None) -> Check:
    """An object with the `needed` fields, and maybe those of `or_not`, each of which passes its check.

    `others` is the check of any other field; None to allow no other.
    """

    def check(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("it must be an object")
        if missing := [name for name in needed if name not in value]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        known = {**or_not, **needed}
        checked = {}
        for name, inner in value.items():
            if (item := known.get(name, others)) is None:
                raise ValueError(f"it has no field {shown(name)}")
            checked[name] = _checked(name, inner, item)
        return checked

    return check


def _checked(name: str, value: Any, check: Check) -> Any:
    try:
        return check(value)
    except ValueError as error:
        given = "" if isinstance(value, dict) else f" is {shown(value)}"
        raise ValueError(f"{name}{given}: {error}") from error
