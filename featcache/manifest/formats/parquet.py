"""Manifests in Parquet and Arrow: read a few thousand rows at a time, and only the columns that are wanted.

pyarrow reads them, the reference implementation of the formats, which pandas, datasets and Spark use too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, BinaryIO

from featcache.errors import ManifestError, MissingDependencyError

_ROWS_PER_BATCH = 8192


class ParquetTable:
    """A table in a Parquet file, of which nothing but the footer has been read.

    Args:
        stream: The file's bytes.

    Raises:
        ManifestError: It is not a Parquet file, or a damaged one.
        MissingDependencyError: pyarrow is not installed.
    """

    names: list[str]
    """The names of the columns that hold values a table of text could hold: not those with bytes, as of images."""

    audio: str | None
    """The name of the column that holds audio as Hugging Face does, as bytes and paths; None if there is none."""

    def __init__(self, stream: BinaryIO) -> None:
        arrow = _pyarrow()
        self._file = _checked(lambda: arrow.parquet.ParquetFile(stream))
        self.names, self.audio = _columns(self._file.schema_arrow)

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """The number of each of some rows, from 1, and their cells in these columns.

        Raises:
            ManifestError: The file is damaged.
        """
        found = self._file.iter_batches(_ROWS_PER_BATCH, columns=[*columns], use_threads=False)
        done = 0
        while (batch := _checked(lambda: next(found, None))) is not None:
            yield range(done + 1, done + 1 + batch.num_rows), _cells(batch)
            done += batch.num_rows


class ArrowTable:
    """A table in an Arrow file, as `save_to_disk` of datasets writes it; as `ParquetTable` is.

    Args:
        stream: The file.
    """

    def __init__(self, stream: BinaryIO) -> None:
        arrow = _pyarrow()
        self._descriptor = stream.fileno()
        self._reader = _checked(lambda: arrow.ipc.open_stream(arrow.memory_map(stream.name)))
        self.names, self.audio = _columns(self._reader.schema)

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """As those of `ParquetTable`."""
        done = 0
        found = mapped_batches(self._reader, self._descriptor)
        while (batch := _checked(lambda: next(found, None))) is not None:
            yield range(done + 1, done + 1 + batch.num_rows), _cells(batch.select([*columns]))
            done += batch.num_rows


def mapped_batches(reader: Any, descriptor: int) -> Iterator[Any]:
    """The batches of an Arrow file that is mapped, as long as the file does not become shorter: to touch what is mapped
    behind the end of a file ends the process by SIGBUS.

    Raises:
        ValueError: The file has become shorter.
    """
    size = os.fstat(descriptor).st_size

    def next_batch() -> Any:
        batch = None if os.fstat(descriptor).st_size < size else next(reader, None)
        if os.fstat(descriptor).st_size < size:
            raise ValueError("it became shorter while it was read")
        return batch

    yield from iter(next_batch, None)


def _cells(batch: Any) -> dict[str, Sequence[Any]]:
    """The cells of a batch, by column. NaN is no value, as in tables in memory: what is missing among numbers."""
    from pyarrow import types

    cells: dict[str, Sequence[Any]] = _checked(batch.to_pydict)
    for field in batch.schema:
        if types.is_floating(field.type):
            cells[field.name] = [None if cell != cell else cell for cell in cells[field.name]]
    return cells


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingDependencyError("pyarrow", "a manifest in Parquet or Arrow", "parquet") from error
    return pyarrow


def _checked(read: Callable[[], Any]) -> Any:
    """What a function of pyarrow returns. Its errors, of many kinds, have several lines."""
    try:
        return read()
    except (_pyarrow().ArrowException, OSError, ValueError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise ManifestError(f"not Parquet or Arrow, or damaged: {what}") from error


def _columns(schema: Any) -> tuple[list[str], str | None]:
    """The names of a schema's columns without bytes, and that of its first column of audio."""
    names = [field.name for field in schema if not _holds_bytes(field.type)]
    return names, next((field.name for field in schema if _holds_audio(field.type)), None)


def _holds_audio(arrow_type: Any) -> bool:
    from pyarrow import types

    if not types.is_struct(arrow_type):
        return False
    return {"bytes", "path"} <= {arrow_type.field(number).name for number in range(arrow_type.num_fields)}


def _holds_bytes(arrow_type: Any) -> bool:
    """Whether values of a type of Arrow's are bytes, or have bytes in them."""
    from pyarrow import types

    if any(of(arrow_type) for of in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)):
        return True
    if types.is_dictionary(arrow_type):
        return _holds_bytes(arrow_type.value_type)
    return any(_holds_bytes(arrow_type.field(number).type) for number in range(arrow_type.num_fields))
