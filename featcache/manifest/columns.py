"""The columns of a manifest that extraction ignores: flat, and each cell with its type.

A cell of JSON, Parquet or a table in memory has a type. A cell of a text format is written
text: only the whole column tells whether numbers are meant."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.manifest.strings import GrowingStrings, Strings

WRITTEN, TEXT, JSON = range(3)
"""The kinds of cells: written text; text; another value as JSON, empty for None."""

_TRUTH = {"": -1, "true": 1, "True": 1, "TRUE": 1, "false": 0, "False": 0, "FALSE": 0}
_WHOLE = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_FRACTION = re.compile(
    rf"(?!.{{25}})(?:{_WHOLE.pattern}(?:\.[0-9]*)?|[+-]?\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
)
"""The longest float64 has 24 characters."""


@dataclass(frozen=True, eq=False)
class Values(Sequence[Any]):
    """Cells of any types, None if missing."""

    texts: Strings
    """Each cell as `carried` returns it."""
    kinds: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, row: Any) -> Any:
        return _value(self.texts[row], self.kinds[row])

    def __iter__(self) -> Iterator[Any]:
        return map(_value, self.texts, self.kinds)

    def take(self, rows: NDArray[Any]) -> Values:
        """Return the values of some rows."""
        return Values(self.texts.take(rows), self.kinds[rows])

    def listed(self, rows: NDArray[Any]) -> list[Any]:
        """List the values of some rows."""
        return [*map(_value, self.texts.texts(rows), self.kinds[rows])]

    def typed(self) -> TypedColumn:
        """Return booleans or numbers if all values are, or are written so; else text, or
        values of several types."""
        if not ((self.kinds == TEXT) & (self.texts.byte_lengths() > 0)).any():
            for read in (booleans, numbers):
                column = read(self.texts)
                if column is not None:
                    return column
        if (self.kinds == JSON).any():
            return self
        return self.texts

    def as_json(self) -> Sequence[Any]:
        """Return each cell as JSON has it, None if missing."""
        if (self.kinds != WRITTEN).all():
            return self
        column = self.typed()
        if isinstance(column, np.ndarray):
            return [None if cell != cell else cell for cell in column.tolist()]
        return column


class GrowingValues:
    """Values that grow in place."""

    def __init__(self) -> None:
        self._texts = GrowingStrings()
        self._kinds = bytearray()
        self._kind_of_missing = WRITTEN

    def extend(self, cells: Sequence[Any], row: int, have_types: bool) -> None:
        """Add the cells of the rows from `row` on; earlier rows without cells have none.
        Raises ValueError if a cell cannot be stored."""
        self._kind_of_missing = JSON if have_types else WRITTEN
        self._fill(row)
        kind, texts = TEXT if have_types else WRITTEN, cells
        kinds = bytes([kind]) * len(cells)
        if not isinstance(cells, Strings) and set(map(type, cells)) != {str}:
            texts = [*map(carried, cells)]
            if have_types:
                kinds = bytes(map(_kind_of, cells))
        self._texts.extend(texts)
        self._kinds += kinds

    def values(self, rows: int) -> Values:
        """Return the values of that many rows, and end growing."""
        self._fill(rows)
        return Values(self._texts.strings(), np.frombuffer(self._kinds, np.uint8))

    def _fill(self, rows: int) -> None:
        num_missing = rows - len(self._kinds)
        if num_missing:
            self._texts.extend([""] * num_missing)
            self._kinds += bytes([self._kind_of_missing]) * num_missing


TypedColumn = Strings | Values | NDArray[Any]
"""One value for each utterance: text, any, or bool, int64 or float64. In a dataset, also
values of another version, `[utterances, *item_shape]`."""

Types = Mapping[str, type]
"""The types of columns by name: `str`, `bool`, `int` or `float`. Other columns have the
types of their cells."""


def booleans(column: Strings) -> TypedColumn | None:
    """Read `true` and `false`, also `True` and `TRUE`, as booleans, and empty cells as
    None. Returns None if other cells exist, or all are empty."""
    try:
        truth = np.fromiter(map(_TRUTH.__getitem__, column), np.int8, len(column))
    except KeyError:
        return None
    if not (truth >= 0).any():
        return None
    if (truth >= 0).all():
        return truth.astype(bool)
    texts = Strings.of(("false", "true", "")[number] for number in truth.tolist())
    return Values(texts, np.full(len(column), JSON, np.uint8))


def numbers(column: Strings) -> NDArray[Any] | None:
    """Read numbers as int64 or float64, and empty cells as NaN. Returns None if other
    cells exist, or all are empty. `007` is a name, as is a whole number too large for
    int64, or for float64 among fractions, and `1e400`."""
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
    if not text:
        return math.nan
    if not _FRACTION.fullmatch(text) or (text.lstrip("-").isdigit() and len(text) > 15):
        raise ValueError
    number = float(text)
    if math.isinf(number):
        raise ValueError
    return number


def _value(text: str, kind: int) -> Any:
    if kind != JSON:
        return text
    return json.loads(text or "null")


def holding(column: TypedColumn) -> str:
    """Name a column's values for messages; empty for values of several types."""
    if isinstance(column, Strings):
        return "text"
    if isinstance(column, np.ndarray) and column.dtype != bool:
        return "numbers"
    if isinstance(column, Values) and booleans(column.texts) is None:
        return ""
    return "booleans"


def _as_values(column: TypedColumn) -> Values:
    if isinstance(column, Values):
        return column
    if isinstance(column, Strings):
        return Values(column, np.full(len(column), TEXT, np.uint8))
    texts = Strings.of(map(carried, column.tolist()))
    return Values(texts, np.full(len(texts), JSON, np.uint8))


def concatenate(columns: Sequence[TypedColumn]) -> TypedColumn:
    """Join columns, one after the other."""
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    if len(arrays) == len(columns):
        return np.concatenate(arrays)
    parts = [*map(_as_values, columns)]
    texts = Strings.concatenate([part.texts for part in parts])
    return Values(texts, np.concatenate([part.kinds for part in parts])).typed()


def records_of(columns: Mapping[str, TypedColumn], count: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of some columns, with Python objects as values; vectors are arrays."""
    values = [
        np.ascontiguousarray(column).data
        if isinstance(column, np.ndarray) and column.ndim == 1
        else column
        for column in columns.values()
    ]
    rows = zip(*values, strict=True) if columns else repeat((), count)
    return (dict(zip(columns, row, strict=True)) for row in rows)


def to_arrow(cells: Sequence[Any], arrow: Any) -> Any:
    """Make an array of Arrow, the module `arrow`; of text if no type of Parquet fits."""
    with suppress(arrow.ArrowException, OverflowError):
        array = arrow.array([*cells])
        if "struct<>" not in str(array.type):
            return array
    texts = [None if cell is None else carried(cell) for cell in cells]
    return arrow.array(texts, arrow.string())


def _as_python(cell: Any) -> Any:
    if isinstance(cell, (np.generic, np.ndarray)):
        return cell.tolist()
    return str(cell)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_as_python).encode


def carried(cell: Any) -> str:
    """Return a cell as text: text unchanged, dates in ISO 8601, None and NaN as nothing,
    other values as JSON. Raises ValueError if it cannot be stored."""
    if isinstance(cell, (float, Decimal)):
        cell = None if math.isnan(cell) else float(cell)
    if cell is None:
        return ""
    try:
        text = _encode(cell) if _kind_of(cell) == JSON else str(cell)
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"is not UTF-8: {error}") from None
    except (RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"cannot be stored: {error}") from None
    return text


def json_line(row: Mapping[str, Any]) -> str:
    """Return a line of JSON, with null for NaN and infinity, which JSON does not have."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        finite = json.loads(json.dumps(row), parse_constant=lambda _: None)
        return json_line(finite)


def _kind_of(cell: Any) -> int:
    if cell is None or isinstance(cell, (int, float, Decimal, list, tuple, dict)):
        return JSON
    return TEXT
