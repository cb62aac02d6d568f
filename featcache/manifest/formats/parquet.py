"""Manifests in Parquet: read a few thousand rows at a time, and only the columns that are wanted.

pyarrow reads them, the reference implementation of the format, which pandas, datasets and Spark use too.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, BinaryIO

from featcache.errors import ManifestError, MissingDependencyError

_ROWS_PER_BATCH = 8192


class ParquetTable:
    """A table in a Parquet file, of which nothing but the footer has been read.

    Args:
        stream: The file's bytes. If they come from a pipe, all are read into memory.

    Raises:
        ManifestError: It is not a Parquet file, or a damaged one.
        MissingDependencyError: pyarrow is not installed.
    """

    names: list[str]
    """The names of the columns that hold values a table of text could hold: not those with bytes, as of images."""

    def __init__(self, stream: BinaryIO) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise MissingDependencyError("pyarrow", "a manifest in Parquet", "parquet") from error
        self._fault: type[Exception] = pyarrow.ArrowException
        source = stream if stream.seekable() else io.BytesIO(stream.read())
        self._file = self._checked(lambda: pyarrow.parquet.ParquetFile(source))
        schema = self._file.schema_arrow
        self.names = [field.name for field in schema if not _holds_bytes(field.type)]

    def batches(self, columns: Collection[str]) -> Iterator[tuple[range, dict[str, Sequence[Any]]]]:
        """The number of each of some rows, from 1, and their cells in these columns.

        Raises:
            ManifestError: The file is damaged.
        """
        found = self._file.iter_batches(_ROWS_PER_BATCH, columns=[*columns], use_threads=False)
        done = 0
        while (batch := self._checked(lambda: next(found, None))) is not None:
            yield range(done + 1, done + 1 + batch.num_rows), self._checked(batch.to_pydict)
            done += batch.num_rows

    def _checked(self, read: Callable[[], Any]) -> Any:
        """What a function of pyarrow returns. Its errors, of many kinds, have several lines."""
        try:
            return read()
        except (self._fault, OSError, ValueError) as error:
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise ManifestError(f"not Parquet, or damaged: {what}") from error


def _holds_bytes(arrow_type: Any) -> bool:
    """Whether values of a type of Arrow's are bytes, or have bytes in them."""
    from pyarrow import types

    if any(of(arrow_type) for of in (types.is_binary, types.is_large_binary, types.is_fixed_size_binary)):
        return True
    if types.is_dictionary(arrow_type):
        return _holds_bytes(arrow_type.value_type)
    return any(_holds_bytes(arrow_type.field(number).type) for number in range(arrow_type.num_fields))
