"""Selecting rows of a manifest: by the values of columns, by a function of a row, or by an
expression, such as `mos > 3 and split == "train"`.

    expression = both {"or" both}
    both       = one {"and" one}
    one        = "not" one | "(" expression ")" | comparison | a column of booleans
    comparison = value sign value | value ["not"] "in" "(" value {"," value} ")"
    sign       = "==" | "!=" | "<" | "<=" | ">" | ">="
    value      = 3 | -0.5 | "text" | 'text' | true | false
               | column | column "[" 0 "]" | column "[" "name" "]"

A column whose name is no word stands in backticks. Numbers are compared with numbers, and
text with text. A cell without a number fits `!=` alone.

A version may lack rows of the manifest: their value is not known, and a comparison with it
may be true or false (Kleene's logic). Rows that may fit are selected too, so that whoever
reads their features reports them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, did_you_mean, listing
from featcache.manifest.columns import Types, Values, records_of
from featcache.manifest.utterances import Manifest
from featcache.strings import Strings

Where = str | Mapping[str, object] | Callable[[dict[str, Any]], object]
"""The rows to select: an expression, values of columns, or a function of a row."""

Rows = NDArray[np.int64]

_Fits = NDArray[np.bool_]
"""The rows that fit, and the rows that fit or may fit, bool `[2, rows]`."""

_LONGEST = 10_000
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKEN = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?!\w)"
    r"""|(?P<text>"[^"]*"|'[^']*')"""
    r"|(?P<word>[^\W\d]\w*)|`(?P<column>[^`]+)`"
    r"|(?P<sign>==|!=|<=|>=|[<>()\[\],])"
)
_EXAMPLE = 'write mos > 3 and split == "train", for example'


class JoinedColumn(NamedTuple):
    """A column whose values come from a version, which may lack rows."""

    values: NDArray[Any]
    """One value for each row, `[rows, *item_shape]`; any value if it is not known."""
    is_known: NDArray[np.bool_]
    """Whether the version has the row, bool `[rows]`."""
    names: Sequence[str] = ()
    """The names of a vector's values, if they have some."""


def select_rows(
    manifest: Manifest, where: Where, types: Types, joined: Mapping[str, JoinedColumn]
) -> Rows:
    """Select the rows that fit, rising, int64 `[n]`; also those that may fit. Raises
    ManifestError if there are none, or a column is missing; ArgumentError for an expression
    that cannot be read.

    Args:
        types: The types of the manifest's columns; others have the types of their cells.
        joined: Further columns, by their names."""
    if isinstance(where, str):
        expression = _Expression(where, manifest, types, joined)
        rows, what = np.flatnonzero(expression.read()[1]), f"fits {where}"
    elif isinstance(where, Mapping):
        rows = _with_values(manifest, where, joined)
        what = f"has all of {', '.join(f'{name} {value}' for name, value in where.items())}"
    else:
        rows = _by_function(manifest, where, types, joined)
        if not len(rows):
            raise ManifestError(
                f"{manifest.source}: where= is true for none of {len(manifest):,} rows"
            )
    if not len(rows):
        raise ManifestError(f"{manifest.source}: no row {what}")
    return rows


def _unknown_column(manifest: Manifest, name: str, known: Iterable[str]) -> ManifestError:
    return ManifestError(
        f"{manifest.source}: has no column {name!r}{did_you_mean(name, known)} for where=; it has "
        f"{listing(map(repr, known))}"
    )


def _with_values(
    manifest: Manifest, where: Mapping[str, object], joined: Mapping[str, JoinedColumn]
) -> Rows:
    """Select the rows whose columns (or `id`) have certain values, or one of several,
    compared as text."""
    columns = {"id": manifest.ids, **manifest.available()}
    columns |= {name: column.values for name, column in joined.items()}
    is_kept = np.ones(len(manifest), bool)
    for name, value in where.items():
        if name not in columns:
            raise _unknown_column(manifest, name, columns)
        column = columns[name]
        texts = column if isinstance(column, Strings) else [*map(str, column.tolist())]
        several = isinstance(value, Iterable) and not isinstance(value, str)
        values = [*cast("Iterable[object]", value)] if several else [value]
        if not values:
            raise ManifestError(
                f"{manifest.source}: {name} has an empty list in where=, which matches no row"
            )
        wanted = set().union(*map(_texts_of, values))
        matches = np.fromiter((text in wanted for text in texts), bool, len(texts))
        if name in joined:
            matches |= ~joined[name].is_known
        if not matches.any():
            raise ManifestError(
                f"{manifest.source}: no row has {name} {listing(map(str, values))}; there "
                f"are {listing(map(repr, sorted(set(texts))))}"
            )
        is_kept &= matches
    return np.flatnonzero(is_kept)


def _texts_of(value: object) -> set[str]:
    """Return the texts that may stand for a value in a manifest: 3 also as 3.0."""
    if value is None:
        return {""}
    text = str(value)
    if isinstance(value, (bool, np.bool_)):
        return {text, text.lower(), text.upper()}
    if isinstance(value, (int, np.integer)):
        return {text, f"{text}.0"}
    if isinstance(value, float) and value.is_integer():
        return {text, str(int(value))}
    return {text}


def _by_function(
    manifest: Manifest,
    where: Callable[[dict[str, Any]], object],
    types: Types,
    joined: Mapping[str, JoinedColumn],
) -> Rows:
    """Select the rows for which a function is true, and the rows that a version lacks."""
    columns: dict[str, Any] = {"id": manifest.ids}
    for name in manifest.available():
        columns[name] = manifest.column(name, types)
    is_known = np.ones(len(manifest), bool)
    for name, column in joined.items():
        columns[name] = column.values
        is_known &= column.is_known
    records = records_of(columns, len(manifest))
    pairs = zip(records, is_known.tolist(), strict=True)
    fits = (not known or bool(where(record)) for record, known in pairs)
    return np.flatnonzero(np.fromiter(fits, bool, len(manifest)))


class _Value(NamedTuple):
    """A side of a comparison."""

    written: str
    """What it is called in the expression."""
    kind: str
    """`a number`, `text` or `a boolean`."""
    cells: Any
    """A number, text or boolean; or one for each row."""
    is_known: NDArray[np.bool_] | bool = True


@dataclass
class _Expression:
    """An expression that is read from left to right, and computed for all rows at once."""

    text: str
    manifest: Manifest
    types: Types
    joined: Mapping[str, JoinedColumn]
    place: int = 0
    """The number of characters that have been read."""
    values: dict[str, _Value] = field(default_factory=dict)
    """The columns that have been read."""

    def read(self) -> _Fits:
        """Compute the whole expression."""
        if len(self.text) > _LONGEST:
            raise ArgumentError(f"where is longer than {_LONGEST:,} characters")
        try:
            fits = self._either()
        except RecursionError:
            raise ArgumentError("where has too many brackets in each other") from None
        if self.text[self.place :].strip():
            self._refuse("and, or, or the end")
        return fits

    def _either(self) -> _Fits:
        fits = self._both()
        while self._take("or"):
            fits = fits | self._both()
        return fits

    def _both(self) -> _Fits:
        fits = self._one()
        while self._take("and"):
            fits = fits & self._one()
        return fits

    def _one(self) -> _Fits:
        if self._take("not"):
            return ~self._one()[::-1]
        if self._take("("):
            fits = self._either()
            self._require(")")
            return fits
        left = self._value()
        if self._next() in _SIGNS:
            return self._compare(_SIGNS[self._advance()], left, self._value())
        is_negative = self._take("not")
        if self._take("in"):
            fits = self._is_one_of(left)
            return ~fits[::-1] if is_negative else fits
        if left.kind != "a boolean" or is_negative:
            self._refuse(f"a comparison of {left.written}, as ==, < or in")
        return self._compare(operator.eq, left, _Value("true", "a boolean", True))

    def _is_one_of(self, left: _Value) -> _Fits:
        self._require("(")
        fits = self._compare(operator.eq, left, self._value())
        while self._take(","):
            fits = fits | self._compare(operator.eq, left, self._value())
        self._require(")")
        return fits

    def _compare(self, sign: Callable[[Any, Any], Any], left: _Value, right: _Value) -> _Fits:
        if left.kind != right.kind:
            raise ArgumentError(
                f"where is {self.text!r}: {left.written} is {left.kind}, and {right.written} is "
                f"{right.kind}: text is in quotes, numbers are not"
            )
        count = len(self.manifest)
        if left.kind == "text":
            sides = [
                repeat(side.cells) if isinstance(side.cells, str) else side.cells
                for side in (left, right)
            ]
            pairs = zip(range(count), *sides, strict=False)
            is_true = np.fromiter((sign(a, b) for _, a, b in pairs), bool, count)
        else:
            is_true = np.broadcast_to(sign(left.cells, right.cells), count)
        is_known = np.broadcast_to(np.logical_and(left.is_known, right.is_known), count)
        return np.stack([is_true & is_known, is_true | ~is_known])

    def _value(self) -> _Value:
        match = self._match()
        if match is None or match["sign"] or match["word"] in ("and", "or", "not", "in"):
            self._refuse("a value or a column")
        written = self._advance()
        if match["number"]:
            number: float = float(written)
            if re.fullmatch(r"[+-]?\d+", written):
                number = int(written)
            return _Value(written, "a number", number)
        if match["text"]:
            return _Value(written, "text", written[1:-1])
        if written in ("true", "false"):
            return _Value(written, "a boolean", written == "true")
        name = match["column"] or written
        if self._take("["):
            return self._element(name)
        if name not in self.values:
            self.values[name] = self._column(name)
        return self.values[name]

    def _column(self, name: str) -> _Value:
        if name in self.joined:
            column = self.joined[name]
            if column.values.ndim > 1:
                elements = [*map(repr, column.names)] or range(column.values.shape[1])
                raise ArgumentError(
                    f"where is {self.text!r}: {name} is a vector: choose one of its values, as "
                    f"{name}[{next(iter(elements))}]; it has {listing(map(str, elements))}"
                )
            return _number_column(name, column.values, column.is_known)
        available = self.manifest.available()
        if name == "id":
            return _Value(name, "text", self.manifest.ids)
        if name not in available:
            raise _unknown_column(self.manifest, name, ["id", *available, *self.joined])
        cells = self.manifest.column(name, self.types)
        if isinstance(cells, np.ndarray):
            return _number_column(name, cells, True)
        # values of several types, or with null among them, are compared as they are written
        return _Value(name, "text", cells.texts if isinstance(cells, Values) else cells)

    def _element(self, name: str) -> _Value:
        match, written = self._match(), self._advance()
        self._require("]")
        column = self.joined.get(name)
        if column is None or column.values.ndim != 2 or match is None:
            raise ArgumentError(f"where is {self.text!r}: {name} is not a column of vectors")
        count = column.values.shape[1]
        number = -1
        if match["text"] and written[1:-1] in column.names:
            number = [*column.names].index(written[1:-1])
        elif match["number"] and written.isdecimal():
            number = int(written)
        if not 0 <= number < count:
            names = "".join(f", {place!r}" for place in column.names)
            raise ArgumentError(
                f"where is {self.text!r}: {name} has no value {written}; it has 0 to "
                f"{count - 1}{names}"
            )
        return _number_column(f"{name}[{written}]", column.values[:, number], column.is_known)

    def _match(self) -> re.Match[str] | None:
        """Find the next token."""
        while self.text[self.place : self.place + 1].isspace():
            self.place += 1
        return _TOKEN.match(self.text, self.place)

    def _next(self) -> str:
        """Return the next token; empty at the end, and before what is none."""
        match = self._match()
        return "" if match is None else match[0]

    def _advance(self) -> str:
        token = self._next()
        self.place += len(token)
        return token

    def _take(self, token: str) -> bool:
        if self._next() != token:
            return False
        self._advance()
        return True

    def _require(self, token: str) -> None:
        if not self._take(token):
            self._refuse(repr(token))

    def _refuse(self, wanted: str) -> NoReturn:
        rest = self.text[self.place :].strip()
        where = f"before {rest!r}" if rest else "at its end"
        raise ArgumentError(f"where is {self.text!r}: {where}, it needs {wanted}: {_EXAMPLE}")


def _number_column(written: str, cells: NDArray[Any], is_known: NDArray[np.bool_] | bool) -> _Value:
    kind = "a boolean" if cells.dtype == bool else "a number"
    return _Value(written, kind, cells, is_known)
