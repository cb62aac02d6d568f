"""Parquet for Hugging Face datasets, with the types of its columns. Written by pyarrow
alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, listing
from featcache.export.rows import FILE_BYTES, Rows
from featcache.manifest.columns import TypedColumn, carried, to_arrow
from featcache.manifest.formats.tables import pyarrow
from featcache.strings import Strings

_GROUP_BYTES = 32 << 20
"""About so many bytes of features stand in a row group."""

_OWN = ("id", "features")
_TYPES = {"string": "string", "int64": "int64", "double": "float64", "bool": "bool"}
"""The types of columns, in Arrow and in datasets."""


def write_datasets(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write `data-N.parquet`, with the columns `id` and `features`, and the manifest's.
    Features are nested lists, which datasets reads as arrays."""
    rows.require_frames("Hugging Face datasets", 5)
    clashing = [repr(name) for name in _OWN if name in rows.columns]
    if clashing:
        raise ArgumentError(f"the manifest's {listing(clashing)} would hide ours: rename it")
    arrow = pyarrow("Parquet for Hugging Face datasets")
    columns = {name: _column(column, arrow) for name, column in rows.columns.items()}
    types: dict[str, Any] = {"id": _value("string"), "features": _type_of_features(rows)}
    types |= {name: _value(_TYPES[str(column.type)]) for name, column in columns.items()}
    metadata = {"huggingface": json.dumps({"info": {"features": types}})}
    with closing(_Tables(folder, columns, metadata, arrow)) as tables:
        for row in rows:
            tables.add(row.id, row.features)
    return []


class _Tables:
    """Writes rows into row groups, and these into files of about `FILE_BYTES`."""

    def __init__(
        self, folder: Path, columns: Mapping[str, Any], metadata: Mapping[str, str], arrow: Any
    ) -> None:
        self._folder, self._columns, self._metadata = folder, columns, metadata
        self._arrow = arrow
        self._ids: list[str] = []
        self._features: list[NDArray[Any]] = []
        self._num_bytes = self._num_bytes_in_file = self._num_files = self._num_written = 0
        self._writer: Any = None

    def add(self, id_: str, features: NDArray[Any]) -> None:
        """Add a row, whose other cells are next in the columns."""
        self._ids.append(id_)
        self._features.append(features)
        self._num_bytes += features.nbytes
        if self._num_bytes >= _GROUP_BYTES:
            self._write_group()

    def close(self) -> None:
        """Write the last rows, and complete the last file."""
        if self._ids:
            self._write_group()
        if self._writer is not None:
            self._writer.close()

    def _write_group(self) -> None:
        arrow, first = self._arrow, self._num_written
        last = first + len(self._ids)
        arrays = {"id": arrow.array(self._ids, arrow.string())}
        arrays["features"] = _nested(self._features, arrow)
        arrays |= {name: column[first:last] for name, column in self._columns.items()}
        table = arrow.table(arrays).replace_schema_metadata(self._metadata)
        if self._writer is None:
            path = self._folder / f"data-{self._num_files:05d}.parquet"
            self._writer = arrow.parquet.ParquetWriter(path, table.schema)
            self._num_files += 1
        self._writer.write_table(table)
        self._num_bytes_in_file += self._num_bytes
        self._ids, self._features, self._num_bytes = [], [], 0
        self._num_written = last
        if self._num_bytes_in_file >= FILE_BYTES:
            self._writer.close()
            self._writer, self._num_bytes_in_file = None, 0


def _value(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "_type": "Value"}


def _type_of_features(rows: Rows) -> dict[str, Any]:
    spec = rows.spec
    shape: list[int | None] = [*spec.item_shape]
    if spec.axis.dimensions:
        shape = [None, *shape]
    if len(shape) == 1:
        return {"feature": _value(spec.dtype), "_type": "List"}
    return {"shape": shape, "dtype": spec.dtype, "_type": f"Array{len(shape)}D"}


def _nested(arrays: Sequence[NDArray[Any]], arrow: Any) -> Any:
    """Make an array of Arrow of nested lists, one for each array."""
    values = arrow.array(np.concatenate([array.reshape(-1) for array in arrays]))
    for size in reversed(arrays[0].shape[1:]):
        ends = np.arange(0, len(values) + 1, size, dtype=np.int32)
        values = arrow.ListArray.from_arrays(ends, values)
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return arrow.ListArray.from_arrays(ends, values)


def _column(column: TypedColumn, arrow: Any) -> Any:
    """Return a column as an array of Arrow; as text if datasets has no such plain type."""
    if isinstance(column, np.ndarray):
        array = arrow.array(column)
    elif isinstance(column, Strings):
        array = arrow.array(column, arrow.string())
    else:
        array = to_arrow(column, arrow)
    if str(array.type) in _TYPES:
        return array
    texts = [None if cell is None else carried(cell) for cell in column]
    return arrow.array(texts, arrow.string())
