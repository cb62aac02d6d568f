"""The cells of a manifest: a parser for each column, whose ValueError says what is wrong."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import partial
from reprlib import repr as shown
from typing import Any, NamedTuple

import numpy as np

from featcache.strings import Strings

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def _text(cell: Any) -> str:
    if not isinstance(cell, str):
        raise ValueError(f"is not text: {shown(cell)}")
    return cell


def _id(cell: Any) -> str:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return str(cell)
    if not _text(cell).isprintable() and _CONTROL.search(cell):
        raise ValueError(f"has a control character: {shown(cell)}")
    return _text(cell)


def _path(cell: Any) -> str:
    if _text(cell).rstrip().endswith("|"):
        raise ValueError(f"is a pipe, and pipes are never run: {shown(cell)}")
    if "\0" in cell:
        raise ValueError(f"has a NUL character: {shown(cell)}")
    return _text(cell)


def _number(cell: Any) -> float:
    try:
        if isinstance(cell, bool):
            raise TypeError
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"is not a number: {shown(cell)}") from None
    if not math.isfinite(value):
        raise ValueError(f"is not finite: {value}")
    return value


def _start(cell: Any) -> float:
    seconds = _number(cell)
    if seconds < 0:
        raise ValueError(f"is negative: {seconds}")
    return seconds


def _duration(cell: Any) -> float:
    seconds = _start(cell)
    if seconds == 0:
        raise ValueError("is zero: leave it empty to read to the end of the file")
    return seconds


def _channel(cell: Any) -> int:
    value = _number(cell)
    if not (value.is_integer() and 0 <= value < 2**31):
        raise ValueError(f"is not a whole number from 0 up: {shown(cell)}")
    return int(value)


def carried(cell: Any) -> str:
    """A cell of a column that is carried: its text, or what JSON makes of it; empty where it is `null`, not given."""
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, separators=(",", ":"))


class Column(NamedTuple):
    """A column that an `Utterance` has.

    Attributes:
        name: of it.
        parse: gives a cell's value; raises a ValueError where there is none.
        not_given: the value of an empty cell.
        pack: makes one flat array of values.
    """

    name: str
    parse: Callable[[Any], Any]
    not_given: Any
    pack: Callable[[list[Any]], Any]


COLUMNS = (
    Column("id", _id, "", Strings.of),
    Column("path", _path, "", Strings.of),
    Column("start", _start, math.nan, partial(np.array, dtype=np.float64)),
    Column("duration", _duration, math.nan, partial(np.array, dtype=np.float64)),
    Column("channel", _channel, -1, partial(np.array, dtype=np.int32)),
)
