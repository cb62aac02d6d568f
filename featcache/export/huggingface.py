"""Parquet for Hugging Face datasets, with the types of its columns. Written by pyarrow
alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.export.rows import Rows
from featcache.loader.cache import Cache
from featcache.manifest.columns import TypedColumn, carried, to_arrow
from featcache.manifest.formats.tables import pyarrow
from featcache.manifest.strings import Strings

_GROUP_BYTES = 32 << 20
"""About so many bytes of features stand in a row group."""

_TYPES = {"string": "string", "int64": "int64", "double": "float64", "bool": "bool"}
"""The types of columns, in Arrow and in datasets."""


def load_arrow() -> Any:
    """Import pyarrow, and what its first array imports. Raises MissingDependencyError."""
    arrow = pyarrow("Parquet for Hugging Face datasets")
    arrow.array([0])
    return arrow


def write_datasets(rows: Rows, folder: Path, target: Path) -> list[str]:
    """Write `data.parquet`, with the columns `id` and `features`, and the manifest's.
    Features are nested lists, which datasets reads as arrays, or numbers."""
    rows.require_frames("Hugging Face datasets", 5)
    rows.refuse_columns("id", "features")
    arrow = load_arrow()
    columns = {name: _column(column, arrow) for name, column in rows.columns.items()}
    types: dict[str, Any] = {"id": _value("string"), "features": type_of_features(rows.cache)}
    types |= {name: _value(_TYPES[str(column.type)]) for name, column in columns.items()}
    writer = None
    for _, group in rows.groups(_GROUP_BYTES):
        written = [*group]
        part = slice(written[0].number, written[-1].number + 1)
        arrays = {
            "id": arrow.array([row.id for row in written], arrow.string()),
            "features": _nested([row.features for row in written], arrow),
        }
        arrays |= {name: column[part] for name, column in columns.items()}
        table = arrow.table(arrays)
        if writer is None:
            schema = _with_types(table.schema, types)
            writer = arrow.parquet.ParquetWriter(folder / "data.parquet", schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
    return []


def _value(dtype: str) -> dict[str, str]:
    return {"dtype": dtype, "_type": "Value"}


def type_of_features(cache: Cache) -> dict[str, Any]:
    """Return the type of a version's features in datasets, as JSON."""
    spec = cache.spec
    dtype = spec.values_dtype.name
    shape = [*(None for _ in spec.axis.dimensions), *spec.item_shape]
    if not shape:
        return _value(dtype)
    if len(shape) == 1:
        return {"feature": _value(dtype), "_type": "List"}
    return {"shape": shape, "dtype": dtype, "_type": f"Array{len(shape)}D"}


def _with_types(schema: Any, types: dict[str, Any]) -> Any:
    """Add the types that datasets reads to a schema. It knows arrays by an extension of Arrow."""
    array = types["features"]
    if "shape" in array:
        extension = {
            "ARROW:extension:name": f"datasets.features.features.{array['_type']}ExtensionType",
            "ARROW:extension:metadata": json.dumps([array["shape"], array["dtype"]]),
        }
        field = schema.field("features").with_metadata(extension)
        schema = schema.set(schema.get_field_index("features"), field)
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": types}})})


def _nested(arrays: Sequence[NDArray[Any]], arrow: Any) -> Any:
    """Make an array of Arrow of nested lists, one for each array; or of numbers."""
    if not np.ndim(arrays[0]):
        return arrow.array(np.stack(arrays))
    values = arrow.array(np.concatenate([array.reshape(-1) for array in arrays]))
    for size in reversed(arrays[0].shape[1:]):
        ends = np.arange(0, len(values) + 1, size, dtype=np.int32)
        values = arrow.ListArray.from_arrays(ends, values)
    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return arrow.ListArray.from_arrays(ends, values)


def as_arrow(column: TypedColumn, arrow: Any) -> Any:
    """Return a column as an array of Arrow, the module `arrow`; vectors `[rows, *shape]` as
    lists."""
    if isinstance(column, Strings):
        return arrow.array(column, arrow.string())
    if not isinstance(column, np.ndarray):
        return to_arrow(column, arrow)
    if column.ndim == 1:
        return arrow.array(column)
    values = as_arrow(column.reshape(-1, *column.shape[2:]), arrow)
    return arrow.FixedSizeListArray.from_arrays(values, column.shape[1])


def _column(column: TypedColumn, arrow: Any) -> Any:
    """Return a column as an array of Arrow; as text if datasets has no such plain type."""
    array = as_arrow(column, arrow)
    if str(array.type) in _TYPES:
        return array
    texts = [None if cell is None else carried(cell) for cell in column]
    return arrow.array(texts, arrow.string())
