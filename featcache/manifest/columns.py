"""The columns of a manifest that extraction ignores: flat, and each cell with its type.

A cell of JSON, Parquet or a table in memory has a type. A cell of a text format is written
text: only the whole column tells what is meant, a number for example. See `typed`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.strings import GrowingStrings, Strings

WRITTEN, TEXT, JSON = range(3)
"""The kinds of cells: written text; text; JSON of another value, empty if none is given."""

_TRUTH = {"": -1}
_TRUTH |= dict.fromkeys(("true", "True", "TRUE"), 1)
_TRUTH |= dict.fromkeys(("false", "False", "FALSE"), 0)
_WHOLE = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(
    rf"(?:(?!.{{25}})(?:{_WHOLE.pattern}(?:\.[0-9]*)?|[+-]?\.[0-9]+)(?:[eE][+-]?[0-9]+)?)?"
)
"""The longest float64 has 24 characters. What is empty is NaN."""


@dataclass(frozen=True, eq=False)
class Values(Sequence[Any]):
    """Cells of several types, or without a value: None."""

    texts: Strings
    """Each cell as `carried` gives it."""
    kinds: NDArray[np.uint8]

    @classmethod
    def of(cls, column: TypedColumn) -> Values:
        """The values of any column."""
        if isinstance(column, Values):
            return column
        if isinstance(column, Strings):
            return cls(column, np.full(len(column), TEXT, np.uint8))
        texts = Strings.of(map(carried, column.tolist()))
        return cls(texts, np.full(len(column), JSON, np.uint8))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: Any) -> Any:
        return _value(self.texts[row], self.kinds[row])

    def __iter__(self) -> Iterator[Any]:
        return map(_value, self.texts, self.kinds)

    def take(self, rows: NDArray[Any]) -> Values:
        """The values of some rows."""
        return Values(self.texts.take(rows), self.kinds[rows])

    def listed(self, rows: NDArray[Any]) -> list[Any]:
        """The values of some rows, as a list."""
        return [*map(_value, self.texts.texts(rows), self.kinds[rows])]


class GrowingValues:
    """Values that more are added to, in buffers that grow in place."""

    def __init__(self) -> None:
        self._texts, self._kinds, self._nothing = GrowingStrings(), bytearray(), WRITTEN

    def extend(self, cells: Sequence[Any], row: int, have_types: bool) -> None:
        """Add the cells of the rows from `row` on; the rows that lack before have none. A
        ValueError says why a cell cannot be stored."""
        self._nothing = JSON if have_types else WRITTEN
        self._fill(row)
        are_texts = set(map(type, cells)) == {str}
        self._texts.extend(cells if are_texts else [*map(carried, cells)])
        if have_types and not are_texts:
            self._kinds += bytes(map(kind_of, cells))
        else:
            self._kinds += bytes([TEXT if have_types else WRITTEN]) * len(cells)

    def values(self, rows: int) -> Values:
        """The values of that many rows; none can be added any more."""
        self._fill(rows)
        return Values(self._texts.strings(), np.frombuffer(self._kinds, np.uint8))

    def _fill(self, rows: int) -> None:
        lacking = rows - len(self._kinds)
        if not lacking:
            return
        self._texts.extend([""] * lacking)
        self._kinds += bytes([self._nothing]) * lacking


TypedColumn = Strings | Values | NDArray[Any]
"""One value for each utterance: text, any, or bool, int64 or float64."""


def typed(texts: Strings, kinds: NDArray[np.uint8] | None) -> TypedColumn:
    """The values of a column's cells. Without text among them they are booleans or
    numbers, if all are; written text is, if all of it can be read so."""
    if kinds is None:
        kinds = np.full(len(texts), WRITTEN, np.uint8)
    if not ((kinds == TEXT) & (texts.byte_lengths() > 0)).any():
        for read in (booleans, numbers):
            if (column := read(texts)) is not None:
                return column
    return Values(texts, kinds) if (kinds == JSON).any() else texts


def booleans(column: Strings) -> TypedColumn | None:
    """The values as booleans, None for empty ones; None if they are not all `true` or
    `false`, in small or capital letters, or with a capital."""
    with suppress(KeyError):
        truth = np.fromiter(map(_TRUTH.__getitem__, column), np.int8, len(column))
        if (truth >= 0).all():
            return truth.astype(bool) if len(column) else None
        if (truth >= 0).any():
            texts = Strings.of(("", "false", "true")[number + 1] for number in truth.tolist())
            return Values(texts, np.full(len(column), JSON, np.uint8))
    return None


def numbers(column: Strings) -> NDArray[Any] | None:
    """The values as int64 or float64, in which empty ones are NaN; None if they are not
    all numbers.

    A number is a text that can be had back from the value: not `007`, which is a name,
    and no whole number too large for int64, or among fractions for float64."""
    if not len(column.blob):
        return None
    for parse, dtype in ((_whole, np.int64), (_fraction, np.float64)):
        with suppress(ValueError, OverflowError):
            return np.fromiter(map(parse, column), dtype, len(column))
    return None


def _whole(text: str) -> int:
    if not _WHOLE.fullmatch(text):
        raise ValueError
    return int(text)


def _fraction(text: str) -> float:
    if not _FRACTION.fullmatch(text) or (text.lstrip("-").isdigit() and len(text) > 15):
        raise ValueError
    return float(text) if text else math.nan


def _value(text: str, kind: int) -> Any:
    if kind != JSON:
        return text
    return json.loads(text) if text else None


def holding(column: TypedColumn) -> str:
    """What a column holds, for messages; empty if it may be of several types."""
    if isinstance(column, np.ndarray):
        return "booleans" if column.dtype == bool else "numbers"
    if isinstance(column, Strings):
        return "text"
    return "" if booleans(column.texts) is None else "booleans"


def concatenate(columns: Sequence[TypedColumn]) -> TypedColumn:
    """Join columns, one after the other."""
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    if len(arrays) == len(columns):
        return np.concatenate(arrays)
    parts = [Values.of(column) for column in columns]
    texts = Strings.concatenate([part.texts for part in parts])
    return typed(texts, np.concatenate([part.kinds for part in parts]))


def cells_of(texts: Strings, kinds: NDArray[np.uint8] | None) -> Sequence[Any]:
    """Each cell as it is written in JSON, None if it is not given."""
    if kinds is not None and (kinds != WRITTEN).all():
        return Values(texts, kinds)
    column = typed(texts, kinds)
    if isinstance(column, np.ndarray):
        return [None if cell != cell else cell for cell in column.tolist()]
    return column


def to_arrow(cells: Sequence[Any], arrow: Any) -> Any:
    """Cells as an array of Arrow's, which is given; as text, if they have no type in common,
    or one that Parquet cannot hold."""
    with suppress(arrow.ArrowException, OverflowError):
        array = arrow.array([*cells])
        if "struct<>" not in str(array.type):
            return array
    texts = [None if cell is None else carried(cell) for cell in cells]
    return arrow.array(texts, arrow.string())


def _as_python(cell: Any) -> Any:
    """A value in a cell that JSON does not know: numpy's as Python's, others as text."""
    return cell.tolist() if isinstance(cell, (np.generic, np.ndarray)) else str(cell)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_python).encode


def carried(cell: Any) -> str:
    """A cell as text: text as it is, dates in ISO 8601, other values as JSON, null and NaN
    as nothing. A ValueError says why it cannot be stored."""
    if isinstance(cell, (float, Decimal)):
        number = float(cell)
        return "" if math.isnan(number) else _encode(number)
    try:
        text = "" if cell is None else _encode(cell) if kind_of(cell) == JSON else str(cell)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from None
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"cannot be stored: {error}") from None
    return text


def kind_of(cell: Any) -> int:
    """The kind of a cell that has a type."""
    is_other = cell is None or isinstance(cell, (int, float, Decimal, list, tuple, dict))
    return JSON if is_other else TEXT
