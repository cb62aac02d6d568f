"""Manifests in Parquet and Arrow: read a few thousand rows at a time, and only the columns that are wanted.

pyarrow reads them, the reference implementation of the formats, which pandas, datasets and Spark use too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, BinaryIO

from featcache.errors import ManifestError, MissingDependencyError, first_line

_ROWS_PER_BATCH = 8192


class ParquetTable:
    """A table in a Parquet file, of which nothing but the footer has been read; a ManifestError if it is not one, or is
    damaged."""

    names: list[str]
    """The names of the columns that hold values a table of text could hold: not those with bytes, as of images."""

    audio: list[str]
    """The names of the columns that hold audio as Hugging Face does, as bytes and paths."""

    def __init__(self, stream: BinaryIO) -> None:
        arrow = pyarrow()
        self._file = _checked(lambda: arrow.parquet.ParquetFile(stream))
        self.names, self.audio = _columns(self._file.schema_arrow)

    def paths_outside(self, audio: str) -> dict[int, Any]:
        """The paths in a column of audio of the rows, from 0, that have no bytes there. Bytes are read only where the
        footer does not say that a row group has them all, or none."""
        paths: dict[int, Any] = _checked(lambda: dict(self._paths_outside(f"{audio}.bytes", f"{audio}.path")))
        return paths

    def _paths_outside(self, data: str, path: str) -> Iterator[tuple[int, Any]]:
        metadata, first = self._file.metadata, 0
        for group in range(metadata.num_row_groups):
            rows = metadata.row_group(group)
            chunks = {rows.column(number).path_in_schema: rows.column(number) for number in range(rows.num_columns)}
            known = chunks[data].statistics
            lacking = known.null_count if known is not None and known.has_null_count else None
            if lacking != 0:
                leaves = [path] if lacking == rows.num_rows else [path, data]
                yield from _without_bytes(self._file.iter_batches(16, [group], leaves, use_threads=False), first)
            first += rows.num_rows

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """The number of each of some rows, from 1, and their cells in these columns; a ManifestError if the file is
        damaged."""
        return _numbered(self._file.iter_batches(_ROWS_PER_BATCH, columns=[*columns], use_threads=False), columns)


class ArrowTable:
    """A table in an Arrow file, as `save_to_disk` of datasets writes it; as `ParquetTable` is."""

    def __init__(self, stream: BinaryIO) -> None:
        arrow = pyarrow()
        self._descriptor, self._name = stream.fileno(), stream.name
        self._reader = _checked(lambda: arrow.ipc.open_stream(arrow.memory_map(self._name)))
        self.names, self.audio = _columns(self._reader.schema)

    def paths_outside(self, audio: str) -> dict[int, Any]:
        """As those of `ParquetTable`."""
        with pyarrow().ipc.open_stream(pyarrow().memory_map(self._name)) as reader:
            batches = (batch.select([audio]) for batch in mapped_batches(reader, self._descriptor))
            paths: dict[int, Any] = _checked(lambda: dict(_without_bytes(batches)))
            return paths

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """As those of `ParquetTable`."""
        return _numbered(mapped_batches(self._reader, self._descriptor), columns)


def mapped_batches(reader: Any, descriptor: int) -> Iterator[Any]:
    """The batches of an Arrow file that is mapped; a ValueError if the file becomes shorter, since to touch what is
    mapped behind the end of a file ends the process by SIGBUS."""
    size = os.fstat(descriptor).st_size

    def next_batch() -> Any:
        batch = None if os.fstat(descriptor).st_size < size else next(reader, None)
        if os.fstat(descriptor).st_size < size:
            raise ValueError("it became shorter while it was read")
        return batch

    yield from iter(next_batch, None)


def _without_bytes(batches: Iterable[Any], row: int = 0) -> Iterator[tuple[int, Any]]:
    """The paths in the one column of some batches for which there are no bytes beside them, with their rows."""
    for batch in batches:
        audio = batch.column(0)
        fields = dict(zip([field.name for field in audio.type], audio.flatten(), strict=True))
        lacking = fields["bytes"].is_null().to_pylist() if "bytes" in fields else [True] * batch.num_rows
        if any(lacking):
            paths = zip(lacking, fields["path"].to_pylist(), strict=True)
            yield from (
                (row + number, path) for number, (lacks, path) in enumerate(paths) if lacks and path is not None
            )
        row += batch.num_rows


def _numbered(batches: Iterator[Any], columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
    """The numbers of each batch's rows, and their cells. NaN is no value, as in tables in memory: what is missing among
    numbers."""
    types, done = pyarrow().types, 0
    while (batch := _checked(lambda: next(batches, None))) is not None:
        batch = batch.select([*columns])
        cells: dict[str, Sequence[Any]] = _checked(batch.to_pydict)
        for field in batch.schema:
            if types.is_floating(field.type):
                cells[field.name] = [None if cell != cell else cell for cell in cells[field.name]]
        yield range(done + 1, done + 1 + batch.num_rows), cells
        done += batch.num_rows


def pyarrow(needed_for: str = "a manifest in Parquet or Arrow") -> Any:
    """The package that reads tables, and what Zstandard has compressed; a MissingDependencyError says what needs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", needed_for, "parquet") from error
    return pyarrow


def _checked(read: Callable[[], Any]) -> Any:
    """What a function of pyarrow returns. Its errors, of many kinds, have several lines."""
    try:
        return read()
    except (pyarrow().ArrowException, OSError, ValueError) as error:
        raise ManifestError(f"not Parquet or Arrow, or damaged: {first_line(error)}") from error


def _columns(schema: Any) -> tuple[list[str], list[str]]:
    """The names of a schema's columns without bytes, and those of its columns of audio."""
    structs = [field for field in schema if pyarrow().types.is_struct(field.type)]
    audio = [field.name for field in structs if {"bytes", "path"} <= {part.name for part in field.type}]
    return [field.name for field in schema if not _holds_bytes(field.type)], audio


def _holds_bytes(arrow_type: Any) -> bool:
    """Whether values of a type of Arrow's are bytes, or have bytes in them."""
    types = pyarrow().types
    if any(of(arrow_type) for of in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)):
        return True
    if types.is_dictionary(arrow_type):
        return _holds_bytes(arrow_type.value_type)
    return any(_holds_bytes(arrow_type.field(number).type) for number in range(arrow_type.num_fields))
