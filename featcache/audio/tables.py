"""Audio in tables: the bytes in a column of a Parquet or Arrow file, by their row. Row
groups of Parquet, which compresses them, stay in memory for a while."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio.kept import Kept
from featcache.audio.tar import ByteRange
from featcache.errors import AudioError, Reason, did_you_mean, first_line
from featcache.manifest.formats import tables as manifests

_KEPT_BYTES = 512 << 20  # of row groups in memory, unless a single one takes more
_LARGEST_GROUP = 1 << 30  # the most bytes of audio in a row group
_ROWS_AT_ONCE = 16  # rows that are unpacked before their bytes are counted


pyarrow = partial(manifests.pyarrow, "audio in Parquet, Arrow or .tar.zst")
"""Import the package that reads tables and Zstandard. Raises MissingDependencyError."""


class ArrowIndex:
    """The places of values in an Arrow file or stream. Raises AudioError for others."""

    def __init__(self, descriptor: int, size: int) -> None:
        arrow = pyarrow()
        self._fault = ""
        places: dict[str, list[NDArray[np.int64]]] = {}
        try:
            whole = arrow.py_buffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
            # a file holds a stream after its mark
            start = 8 if whole[:6].to_pybytes() == b"ARROW1" else 0
            stream = arrow.ipc.open_stream(whole.slice(start))
            fields = _fields_with_bytes(stream.schema)
            places = {name: [np.empty((2, 0), np.int64)] for name in fields}
            for batch in manifests.mapped_batches(stream, descriptor):
                for name in fields:
                    places[name].append(_places(batch.column(name), whole))
        except (arrow.ArrowException, OSError, ValueError) as error:
            if not places:
                what = f"the container is no Arrow file: {first_line(error)}"
                raise AudioError(Reason.NOT_AUDIO, what) from None
            self._fault = f"was cut short, or is damaged: {first_line(error)}"
        self._columns = {name: np.concatenate(parts, axis=1) for name, parts in places.items()}
        self.num_bytes = sum(places.nbytes for places in self._columns.values())

    def find(self, name: str) -> ByteRange:
        """Find the bytes of a column's row. Raises AudioError if there are none."""
        column, row = _column_and_row(name, self._columns)
        places = self._columns[column].T
        if row >= len(places) and self._fault:
            what = f"the table {self._fault}; it has {len(places):,} rows left"
            raise AudioError(Reason.TRUNCATED, what)
        _check_row(row, len(places))
        offset, size = places[row].tolist()
        _check_size(size)
        return ByteRange(offset, size)


class ParquetIndex:
    """The row groups of a Parquet file, which need not stay open. Raises AudioError for
    others."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._arrow = pyarrow()
        with self._checked():
            file = self._arrow.parquet.ParquetFile(f"/proc/self/fd/{descriptor}")
        self._metadata = file.metadata
        self._fields = _fields_with_bytes(file.schema_arrow)
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        counts = [group.num_rows for group in groups]
        if min(counts, default=0) < 0:
            what = "the table is damaged: a row group has fewer than no rows"
            raise AudioError(Reason.TRUNCATED, what)
        self._starts = [0, *accumulate(counts)]
        # approximately: its parts are objects
        self.num_bytes = 10 * int(self._metadata.serialized_size)

    def find(self, name: str, descriptor: int) -> Any:
        """Read the bytes of a column's row, as a buffer. Raises AudioError if there are
        none, or they cannot be read."""
        column, row = _column_and_row(name, self._fields)
        _check_row(row, self._starts[-1])
        group = bisect_right(self._starts, row) - 1
        key = self, column, group
        values = _ROW_GROUPS.get(key, lambda: self._unpacked(descriptor, column, group))
        value = values[row - self._starts[group]]
        _check_size(0 if value is None else value.size)
        return value

    def _unpacked(self, descriptor: int, column: str, group: int) -> Sequence[Any]:
        leaf = self._fields[column]
        num_bytes = 0
        values: list[Any] = []
        with self._checked():
            path = f"/proc/self/fd/{descriptor}"
            file = self._arrow.parquet.ParquetFile(path, metadata=self._metadata)
            options = {"row_groups": [group], "columns": [leaf], "use_threads": False}
            for batch in file.iter_batches(_ROWS_AT_ONCE, **options):
                rows = batch.column(0)
                if leaf != column:
                    rows = rows.field("bytes")
                values += [value.as_buffer() for value in rows]
                num_bytes += rows.nbytes
                if num_bytes > _LARGEST_GROUP:
                    most = f"{_LARGEST_GROUP >> 20:,} MiB"
                    what = f"its row group holds more than {most}: write it with smaller ones"
                    raise AudioError(Reason.OUT_OF_MEMORY, what)
        if len(values) != self._starts[group + 1] - self._starts[group]:
            what = "the table is damaged: a row group has fewer rows than its footer says"
            raise AudioError(Reason.TRUNCATED, what)
        return values

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            what = f"the table is damaged, or no Parquet: {first_line(error)}"
            raise AudioError(Reason.TRUNCATED, what) from None


_ROW_GROUPS: Kept[Sequence[Any]] = Kept(
    _KEPT_BYTES, lambda values: sum(value.size for value in values if value)
)


def _fields_with_bytes(schema: Any) -> dict[str, str]:
    """Map each column of bytes to itself, and each column of structs with such a field
    `bytes` to that field."""
    is_struct, is_bytes = pyarrow().types.is_struct, manifests.is_bytes
    leaves = {}
    for field in schema:
        parts = field.type if is_struct(field.type) else ()
        if is_bytes(field.type):
            leaves[field.name] = field.name
        elif any(part.name == "bytes" and is_bytes(part.type) for part in parts):
            leaves[field.name] = f"{field.name}.bytes"
    return leaves


def _places(column: Any, whole: Any) -> NDArray[np.int64]:
    """Return the offsets of a column's values in the file, and their sizes, int64
    `[2, rows]`. Raises ValueError if they are packed."""
    types = pyarrow().types
    values = column.field("bytes") if types.is_struct(column.type) else column
    if str(values.type) == "binary_view":
        raise ValueError("a column holds views, as Polars writes: write it as large_binary")
    count = len(values)
    _, ends, data = values.buffers()
    if count == 0 or data is None or data.size == 0:
        return np.zeros((2, count), np.int64)
    width = np.int64 if types.is_large_binary(values.type) else np.int32
    edges = np.frombuffer(ends, width)[values.offset : values.offset + count + 1].astype(np.int64)
    first = data.address - whole.address
    if not 0 <= first <= first + data.size <= whole.size:
        raise ValueError("its batches are compressed: write it without compression")
    sizes = np.diff(edges)
    if len(edges) != count + 1 or edges[0] < 0 or edges[-1] > data.size or (sizes < 0).any():
        raise ValueError("a row has no place in it")
    return np.stack([first + edges[:-1], sizes])


def _column_and_row(name: str, columns: Any) -> tuple[str, int]:
    column, _, row = name.rpartition("/")
    if column not in columns:
        meant = did_you_mean(column, columns)
        what = f"no such column of bytes{meant}; there are: {', '.join(columns) or 'none'}"
        raise AudioError(Reason.FILE_MISSING, what)
    if not (row.isascii() and row.isdigit()):
        what = "a path into a table ends in a column and a row, as in audio/123"
        raise AudioError(Reason.FILE_MISSING, what)
    return column, int(row)


def _check_row(row: int, count: int) -> None:
    if row >= count:
        raise AudioError(Reason.FILE_MISSING, f"the table has {count:,} rows, counted from 0")


def _check_size(size: int) -> None:
    if size == 0:
        raise AudioError(Reason.EMPTY, "the row holds no bytes")
