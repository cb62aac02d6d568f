"""Selecting rows of a manifest: by the values of columns, by a function of a row, or by an
expression, such as `mos > 3 and split == "train"`.

An expression is written as in Python: columns, numbers, text in quotes, `true` and `false`;
values of vectors, `scores[0]` or `scores["sig"]`; comparisons by `==`, `!=`, `<`, `<=`, `>`,
`>=`, `in` and `not in`; and `and`, `or`, `not` and brackets. Nothing else is, and nothing is
run. Numbers are compared with numbers, and text with text. A cell without a number fits `!=`
alone.

A version may lack rows of the manifest: their value is not known, and a comparison with it
may be true or false (Kleene's logic). Rows that may fit are selected too, so that whoever
reads their features reports them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, repeat
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, did_you_mean, listing
from featcache.manifest.columns import Types, Values, records_of
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest

Where = str | Mapping[str, object] | Callable[[dict[str, Any]], object]
"""The rows to select: an expression, values of columns, or a function of a row."""

Rows = NDArray[np.int64]

_Fits = NDArray[np.bool_]
"""The rows that fit, and the rows that fit or may fit, bool `[2, rows]`."""

_LONGEST = 10_000

_SIGNS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


class NoRowError(ManifestError):
    """A selection that no row of a manifest fits."""


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
    """Select the rows that fit, rising, int64 `[n]`; also the rows that may fit. Raises
    NoRowError if there are none; ManifestError if a column is missing; ArgumentError for an
    expression that cannot be read.

    Args:
        types: The types of the manifest's columns; others have the types of their cells.
        joined: Further columns, by their names."""
    if isinstance(where, str):
        rows = _Expression(where, manifest, types, joined).rows()
        what = f"fits {where}"
    elif isinstance(where, Mapping):
        rows = _with_values(manifest, where, joined)
        values = (f"{name} {value}" for name, value in where.items())
        what = f"has all of {', '.join(values)}"
    else:
        rows = _by_function(manifest, where, types, joined)
        what = "fits the function of where="
    if not len(rows):
        raise NoRowError(f"{manifest.source}: no row {what}")
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
        values = _values_of(value)
        if not values:
            raise ManifestError(
                f"{manifest.source}: {name} has an empty list in where=, which matches no row"
            )
        wanted = set().union(*map(_texts_of, values))
        matches = np.fromiter((text in wanted for text in texts), bool, len(texts))
        if name in joined:
            matches |= ~joined[name].is_known
        if not matches.any():
            raise NoRowError(
                f"{manifest.source}: no row has {name} {listing(map(str, values))}; there "
                f"are {listing(map(repr, sorted(set(texts))))}"
            )
        is_kept &= matches
    return np.flatnonzero(is_kept)


def texts_of(value: object) -> list[str]:
    """List the texts that fit a value, or one of several values, sorted."""
    return sorted(set().union(*map(_texts_of, _values_of(value))))


def _values_of(value: object) -> list[object]:
    is_one = isinstance(value, str) or not isinstance(value, Iterable)
    return [value] if is_one else [*cast("Iterable[object]", value)]


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
    names = ["id", *manifest.available()]
    columns: dict[str, Any] = {name: manifest.column(name, types) for name in names}
    columns |= {name: column.values for name, column in joined.items()}
    is_known = np.ones(len(manifest), bool)
    for column in joined.values():
        is_known &= column.is_known
    pairs = zip(records_of(columns, len(manifest)), is_known.tolist(), strict=True)
    fits = (not known or bool(where(record)) for record, known in pairs)
    return np.flatnonzero(np.fromiter(fits, bool, len(manifest)))


_EXAMPLE = 'mos > 3 and split == "train"'


class _Value(NamedTuple):
    """A side of a comparison."""

    kind: str
    """`a number`, `text` or `a boolean`."""
    cells: Any
    """A number, text or boolean; or one for each row."""
    is_known: NDArray[np.bool_] | bool = True


@dataclass
class _Expression:
    """An expression, which is computed for all rows at once."""

    text: str
    manifest: Manifest
    types: Types
    joined: Mapping[str, JoinedColumn]

    def rows(self) -> Rows:
        """Compute the rows that fit, or may fit."""
        try:
            if len(self.text) > _LONGEST:
                raise SyntaxError(f"it is longer than {_LONGEST:,} characters")
            expression = ast.parse(self.text.strip(), mode="eval")
            _, may_fit = self.fits(expression.body)
            return np.flatnonzero(may_fit)
        except ArgumentError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            what = getattr(error, "msg", None) or "it is no text, or has too many brackets"
            raise ArgumentError(
                f"where is {self.text[:200]!r}: {what}: write {_EXAMPLE}, for example"
            ) from None

    def fits(self, node: ast.expr) -> _Fits:
        """Compute the rows that fit a part of the expression."""
        match node:
            case ast.BoolOp(op=ast.And()):
                return reduce(operator.and_, map(self.fits, node.values))
            case ast.BoolOp():
                return reduce(operator.or_, map(self.fits, node.values))
            case ast.UnaryOp(op=ast.Not()):
                return ~self.fits(node.operand)[::-1]
            case ast.Compare():
                sides = pairwise([node.left, *node.comparators])
                compared = zip(node.ops, sides, strict=True)
                fits = [self._compare(op, *pair) for op, pair in compared]
                return reduce(operator.and_, fits)
        if self._value(node).kind != "a boolean":
            raise self._fault(node, "is no comparison")
        return self._compare(ast.Eq(), node, ast.Constant(True))

    def _compare(self, op: ast.cmpop, left: ast.expr, right: ast.expr) -> _Fits:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List) or not right.elts:
                raise self._fault(right, "is no list: write in (1, 2)")
            equal = [self._compare(ast.Eq(), left, value) for value in right.elts]
            fits = reduce(operator.or_, equal)
            return ~fits[::-1] if isinstance(op, ast.NotIn) else fits
        a, b = self._value(left), self._value(right)
        if type(op) not in _SIGNS:
            raise self._fault(left, "is compared by is: write == or !=")
        if a.kind != b.kind:
            raise self._fault(left, f"is {a.kind}, and {ast.unparse(right)} is {b.kind}")
        sign, count = _SIGNS[type(op)], len(self.manifest)
        if a.kind == "text":
            texts = [repeat(c, count) if isinstance(c, str) else c for c in (a.cells, b.cells)]
            is_true = np.fromiter(map(sign, *texts), bool, count)
        else:
            is_true = np.broadcast_to(sign(a.cells, b.cells), count)
        is_known = np.broadcast_to(np.logical_and(a.is_known, b.is_known), count)
        return np.stack([is_true & is_known, is_true | ~is_known])

    def _value(self, node: ast.expr) -> _Value:
        match node:
            case ast.Constant(str() as text):
                return _Value("text", text)
            case ast.Constant(bool() as truth):
                return _Value("a boolean", truth)
            case ast.Constant(int() | float() as number):
                return _Value("a number", number)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(int() | float() as number)):
                return _Value("a number", -number)
            case ast.Name("true" | "false" as name):
                return _Value("a boolean", name == "true")
            case ast.Name(name):
                return self._column(name)
            case ast.Subscript(ast.Name(name), ast.Constant(key)) if name in self._vectors:
                return self._element(node, name, key)
        raise self._fault(node, "is no column, number or text in quotes")

    @property
    def _vectors(self) -> list[str]:
        return [name for name, column in self.joined.items() if column.values.ndim > 1]

    def _column(self, name: str) -> _Value:
        if name in self.joined:
            column = self.joined[name]
            if name in self._vectors:
                raise self._no_value(ast.Name(name), name, "is a vector")
            return _numbers(column.values, column.is_known)
        names = ["id", *self.manifest.available()]
        if name not in names:
            raise _unknown_column(self.manifest, name, [*names, *self.joined])
        cells = self.manifest.column(name, self.types)
        if isinstance(cells, np.ndarray):
            return _numbers(cells)
        # values of several types, or with null among them, are compared as they are written
        return _Value("text", cells.texts if isinstance(cells, Values) else cells)

    def _element(self, node: ast.expr, name: str, key: Any) -> _Value:
        column = self.joined[name]
        names = [*column.names]
        number = names.index(key) if key in names else key
        are_vectors = column.values.ndim == 2 and type(number) is int
        if not are_vectors or number not in range(column.values.shape[-1]):
            raise self._no_value(node, name, "is no value")
        return _numbers(column.values[:, number], column.is_known)

    def _no_value(self, node: ast.expr, name: str, what: str) -> ArgumentError:
        """Return the error for what is no value of a vector, which names its values."""
        column = self.joined[name]
        example = f"{name}[0]"
        places = f"0 to {column.values.shape[-1] - 1}"
        if column.names:
            example = f'{name}["{column.names[0]}"]'
            places = listing(map(repr, column.names))
        return self._fault(node, f"{what}; its values are {places}", f"{example} > 0")

    def _fault(self, node: ast.AST, what: str, example: str = _EXAMPLE) -> ArgumentError:
        return ArgumentError(
            f"where is {self.text!r}: {ast.unparse(node)} {what}: write {example}, for example"
        )


def _numbers(cells: NDArray[Any], is_known: NDArray[np.bool_] | bool = True) -> _Value:
    return _Value("a boolean" if cells.dtype == bool else "a number", cells, is_known)
