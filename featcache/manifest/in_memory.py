"""Manifests in memory: data frames of pandas and Polars, tables of Arrow, lists of dictionaries.

None of these packages is imported. All their tables have `len`, and give ranges of rows, columns by name, and lists of
a column's values, under names that differ little.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from featcache.errors import ArgumentError
from featcache.manifest.formats.source import ROWS_PER_BATCH, Reading
from featcache.manifest.formats.tables import json_batches, parquet_batches
from featcache.manifest.read import checked_manifest, gather
from featcache.manifest.utterances import Manifest

_NOT_GIVEN = ("NAType", "NaTType")
"""The types of what pandas has for values that are missing, besides NaN."""


class Table(Protocol):
    """A manifest in memory, as a type: `manifest_of` says what it may be."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: Any, /) -> Any: ...


def is_table(manifest: object) -> bool:
    """Whether a manifest is a table in memory, and no path, and no list of paths."""
    if isinstance(manifest, Sequence):
        return len(manifest) > 0 and isinstance(manifest[0], Mapping)
    return not isinstance(manifest, str | os.PathLike | Manifest)


def manifest_of(
    table: Any, *, audio: bool = False, carry: bool = True, root: str | os.PathLike[str] | None = None
) -> Manifest:
    """Check a table and take it as a manifest, with the columns and the rules of one in a file.

    `table` is a data frame of pandas or Polars, a table of Arrow, or a list of dictionaries, one for each utterance (an
    ArgumentError refuses others). None, NaN, NA and NaT are values that are not given. `audio` says whether paths are
    required, `carry` whether to keep the columns that an `Utterance` does not have, `root` what relative paths are
    relative to, a folder or a URL; None for the current folder. A ManifestError lists the first 20 faults, with rows
    counted from 1.
    """
    is_list = isinstance(table, Sequence) and not isinstance(table, (str, bytes))
    if not (is_list or (_names(table) is not None and hasattr(table, "__len__"))):
        raise ArgumentError(
            f"manifest is a {type(table).__name__}: give a file or a folder, a data frame, a table of Arrow, or a list "
            "of dictionaries"
        )
    reading = Reading(f"<{type(table).__name__}>", audio=audio, carry=carry)
    reading.faults.unit("row")
    batches = json_batches(_objects(table, reading), reading) if is_list else parquet_batches(_Table(table), reading)
    return checked_manifest(reading, *gather(batches, reading), os.fspath(root or os.curdir), "table")


class _Table:
    """A table with columns, as `featcache.manifest.formats.tables.Table`."""

    def __init__(self, table: Any) -> None:
        self._columns = _names(table) or []
        self.names = [str(name) for name in self._columns]
        self._table = table

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """The number of each of some rows, from 1, and their cells in these columns."""
        if len(set(self.names)) < len(self.names):  # which is a fault already
            return
        rows = getattr(self._table, "iloc", self._table)  # of pandas, a range otherwise means labels
        wanted = [(name, own) for name, own in zip(self.names, self._columns, strict=True) if name in columns]
        for first in range(0, len(self._table), ROWS_PER_BATCH):
            last = min(first + ROWS_PER_BATCH, len(self._table))
            part = rows[first:last]
            yield range(first + 1, last + 1), {name: [*map(_plain, part[own])] for name, own in wanted}


def _names(table: Any) -> list[Any] | None:
    """The names of a table's columns; None if it is no table."""
    names = getattr(table, "column_names", getattr(table, "columns", None))  # Arrow's `columns` are the values
    return None if names is None or callable(names) else [*names]


def _objects(rows: Sequence[Any], reading: Reading) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows that are dictionaries, each with its place; the others are faults."""
    for place, row in enumerate(rows, 1):
        if isinstance(row, Mapping):
            yield place, {str(name): _plain(cell) for name, cell in row.items()}
        else:
            reading.faults.add(place, f"is a {type(row).__name__}, not a dictionary")


def _plain(cell: Any) -> Any:
    """A cell as a reader of JSON would give it; None if it is not given."""
    if type(cell) is str:
        return cell
    if hasattr(cell, "as_py"):  # Arrow's
        return _plain(cell.as_py())
    if isinstance(cell, (np.generic, np.ndarray)):
        return _plain(cell.tolist())
    if isinstance(cell, os.PathLike):
        return os.fspath(cell)
    is_nan = isinstance(cell, float) and math.isnan(cell)
    return None if is_nan or type(cell).__name__ in _NOT_GIVEN else cell
