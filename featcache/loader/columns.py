"""A manifest's columns, ready to be joined with features: text as text, numbers as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, listing
from featcache.manifest import Manifest
from featcache.strings import Strings

Column = Strings | NDArray[Any]
"""One value for each utterance: text, float64 or int64."""

Names = Collection[str] | Mapping[str, type] | None
"""Which columns of a manifest to take, or also their types (`str`, `int`, `float`); None for all."""

Types = Mapping[str, type]
"""The types that columns are to have, by name: `str`, `int` or `float`. Others hold numbers if all their values are."""

Where = Mapping[str, object] | Callable[[dict[str, Any]], object]
"""Which rows of a manifest to take: values of columns, or a function of a row."""

_RESERVED = ("id", "ids", "features", "lengths")
"""The names that items and batches use themselves."""

_NUMBER_BYTES = np.frombuffer(b"0123456789+-.eE", np.uint8)
_CHUNK = 1 << 16


def columns_of(manifest: Manifest, names: Collection[str] | None, types: Types) -> dict[str, Column]:
    """A manifest's columns (those of these names), by name.

    Raises:
        ManifestError: There is no such column, its name is one that items and batches use themselves, or its values
            are of another type than `types` says.
    """
    available = _available(manifest)
    selected: dict[str, Column] = {}
    for name in available if names is None else names:
        if name == "id":  # which is there anyway
            continue
        if name not in available:
            there = listing(map(repr, available)) or "none but id"
            raise ManifestError(f"{manifest.source}: has no column {name!r}; it has {there}")
        if name in _RESERVED:
            raise ManifestError(
                f"{manifest.source}: the column {name!r} would hide the dataset's own: "
                "rename it, or leave it out of columns="
            )
        selected[name] = _typed(manifest, name, available[name], types)
    return selected


def rows_where(manifest: Manifest, where: Where, types: Types) -> NDArray[np.int64]:
    """The rows whose columns (or `id`) have certain values, or one of several; int64 `[rows]`.

    Values are compared as text; 3 is also 3.0, and True also true. A function gets each row as a dictionary: `id` and
    all columns, with values as items have them.

    Raises:
        ManifestError: There is no such column, no row has such a value, or no row has all of them.
    """
    if callable(where):
        return _rows_that_fit(manifest, where, types)
    kept = np.ones(len(manifest), bool)
    for name, value in where.items():
        column = manifest.ids if name == "id" else manifest.columns.get(name)
        if column is None:
            there = listing(map(repr, ["id", *manifest.columns]))
            raise ManifestError(f"{manifest.source}: has no column {name!r} for where=; it has {there}")
        values = [*value] if isinstance(value, Iterable) and not isinstance(value, str) else [value]
        wanted = {text for value in values for text in _texts_of(value)}
        if not wanted:
            raise ManifestError(f"{manifest.source}: {name} has an empty list in where=, which matches no row")
        found = np.fromiter((text in wanted for text in column), bool, len(column))
        if not found.any():
            there = listing(map(repr, sorted(set(column))))
            raise ManifestError(f"{manifest.source}: no row has {name} {listing(map(str, values))}; there are {there}")
        kept &= found
    if not kept.any():
        raise ManifestError(
            f"{manifest.source}: no row has all of {', '.join(f'{name} {value}' for name, value in where.items())}"
        )
    return np.flatnonzero(kept)


def _texts_of(value: object) -> set[str]:
    """What a value may be as text in a manifest."""
    if isinstance(value, (bool, np.bool_)):
        return {str(value), str(value).lower()}
    if isinstance(value, (int, np.integer)):
        return {str(value), f"{value}.0"}
    return {str(value), str(int(value))} if isinstance(value, float) and value.is_integer() else {str(value)}


def _rows_that_fit(manifest: Manifest, where: Callable[[dict[str, Any]], object], types: Types) -> NDArray[np.int64]:
    columns: dict[str, Iterable[Any]] = {"id": manifest.ids}
    for name, given in _available(manifest).items():
        column = _typed(manifest, name, given, types)
        columns[name] = column if isinstance(column, Strings) else column.tolist()
    values = zip(*columns.values(), strict=True)
    kept = [row for row, cells in enumerate(values) if where(dict(zip(columns, cells, strict=True)))]
    if not kept:
        raise ManifestError(f"{manifest.source}: where= is true for none of {len(manifest):,} rows")
    return np.array(kept, np.int64)


def numbered(column: Strings, labels: Sequence[str] | None, what: str) -> tuple[NDArray[np.int64], list[str]]:
    """The number of each label among all labels, int64 `[rows]`, and these: by default those that occur, sorted. `what`
    is the column, for messages.

    Raises:
        ManifestError: A row has no label, or one that is not among them.
        ArgumentError: `labels` are not different texts.
    """
    if labels is None:
        labels = sorted(set(column))
        if labels[:1] == [""]:
            raise ManifestError(f"{what} is empty in some rows, which have no class: leave them out with where=")
    elif isinstance(labels, str) or not all(isinstance(label, str) for label in labels):
        raise ArgumentError(f"classes: {what} has {labels!r}: give a list of labels as text, or classes= of a dataset")
    numbers = {label: number for number, label in enumerate(labels)}
    if len(numbers) < len(labels):
        raise ArgumentError(f"classes: {what} has the same label twice: {listing(map(repr, labels))}")
    if unknown := sorted(set(column) - numbers.keys()):
        raise ManifestError(
            f"{what} has labels that classes= has not: {listing(map(repr, unknown))}; leave these rows out "
            "with where=, or give the labels of both manifests to both datasets"
        )
    return np.fromiter((numbers[label] for label in column), np.int64, len(column)), list(labels)


def take(column: Column, rows: NDArray[np.int64]) -> Column:
    """The values of some rows."""
    return column.take(rows) if isinstance(column, Strings) else column[rows]


def _available(manifest: Manifest) -> dict[str, Column]:
    """All columns of a manifest but the ids: those with a meaning to featcache, if they are given, and the others."""
    available: dict[str, Column] = {}
    if len(manifest.paths.blob):
        available["path"] = manifest.paths
    if not np.isnan(manifest.start).all():
        available["start"] = manifest.start
    if not np.isnan(manifest.duration).all():
        available["duration"] = manifest.duration
    if (manifest.channel >= 0).any():
        available["channel"] = manifest.channel.astype(np.int64)
    return available | manifest.columns


def _typed(manifest: Manifest, name: str, column: Column, types: Types) -> Column:
    """A column as the type that is wanted; by default as numbers, if it holds numbers."""
    wanted, what = types.get(name), f"{manifest.source}: the column {name!r}"
    if wanted is str and isinstance(column, Strings):
        return column
    if wanted not in (None, int, float):
        kind = getattr(wanted, "__name__", wanted)
        raise ManifestError(f"{what} cannot be {kind}: choose str for text columns, int or float for numbers")
    numbers = _numbers(column) if isinstance(column, Strings) else column
    if wanted is None:
        return column if numbers is None else numbers
    if numbers is None or (wanted is int and numbers.dtype.kind != "i"):
        raise ManifestError(f"{what} should be {wanted.__name__}, but not all its values are")
    return numbers if wanted is int else numbers.astype(np.float64)


def _numbers(column: Strings) -> NDArray[Any] | None:
    """The values as int64 or float64, in which empty ones are NaN; None if they are not all numbers.

    A number is a text that can be had back from the value: not `007`, which is a name, and no whole number too large
    for int64, or among fractions for float64."""
    if not _look_like_numbers(column):
        return None
    is_whole = not np.isin(column.blob, np.frombuffer(b".eE", np.uint8)).any() and bool(column.byte_lengths().all())
    values = np.empty(len(column), np.int64 if is_whole else np.float64)
    try:
        for first in range(0, len(column), _CHUNK):
            texts = column[first : first + _CHUNK]
            values[first : first + _CHUNK] = list(map(int if is_whole else _fraction, texts))
    except (ValueError, OverflowError):
        return None
    return values


def _look_like_numbers(column: Strings) -> bool:
    """Whether the characters are those of numbers; a quick look at all values at once."""
    blob, lengths = column.blob, column.byte_lengths()
    if not len(blob) or lengths.max() > 24:  # the longest float64 has that many characters
        return False
    if not (np.isin(blob[:_CHUNK], _NUMBER_BYTES).all() and np.isin(blob, _NUMBER_BYTES).all()):
        return False
    starts = column.offsets[:-1].astype(np.int64)
    starts = starts[lengths > 0] + (blob[starts[lengths > 0]] == ord("-"))
    ends = column.offsets[1:].astype(np.int64)[lengths > 0]
    follows = blob[np.minimum(starts + 1, len(blob) - 1)]
    is_padded = (starts + 1 < ends) & (blob[np.minimum(starts, len(blob) - 1)] == ord("0")) & (follows >= ord("0"))
    is_padded &= follows <= ord("9")
    return not bool(is_padded.any())


def _fraction(text: str) -> float:
    if text.lstrip("-").isdigit() and len(text) > 15:
        raise ValueError("a whole number that float64 does not hold")
    return float(text) if text else math.nan
