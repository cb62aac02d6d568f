"""What is known of each item, besides its features: a matrix of 64-bit numbers, and the text of ids and paths.

A row of the matrix is a column of the table. It has one entry more than there are items: columns whose names end in
`_offset` say where each item's part of something begins, and the entry behind the last item's says where that one ends.
In all others, it is 0. A shard has such a table of its items, and an index has one of all items that count; both are
read from mapped memory, and nothing is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.strings import Strings


class Table:
    """The columns of some items; `table["row_hash"]` is one of them, `[items]`.

    Args:
        matrix: uint64 `[columns, items + 1]`.
        text: The bytes of the strings, uint8 `[bytes]`.
        columns: The names of the columns, and the dtypes of 64 bits that they are of.
    """

    def __init__(self, matrix: NDArray[np.uint64], text: NDArray[np.uint8], columns: Sequence[tuple[str, str]]) -> None:
        self.matrix = matrix
        self.text = text
        self.columns = [(name, dtype) for name, dtype in columns]
        self._rows: dict[str, NDArray[Any]] = {
            name: matrix[number].view(dtype) for number, (name, dtype) in enumerate(columns)
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], dtypes: Mapping[str, str], text: NDArray[np.uint8]) -> Table:
        """A table of these columns, in the order of `dtypes`: `[items + 1]` of offsets, else `[items]`."""
        items = max((len(values[name]) - is_offset(name) for name in dtypes), default=0)
        matrix = np.zeros((len(dtypes), items + 1), np.uint64)
        for row, (name, dtype) in zip(matrix, dtypes.items(), strict=True):
            row.view(dtype)[: items + is_offset(name)] = values[name]
        return cls(matrix, text, [*dtypes.items()])

    def __len__(self) -> int:
        return int(self.matrix.shape[1]) - 1

    def __getitem__(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = self._rows[name][:-1]
        return column

    def offsets(self, of: str) -> NDArray[np.int64]:
        """Where the parts of the items begin, int64 `[items + 1]`: of `frame`, `id`, `path`, `side_<name>`."""
        offsets: NDArray[np.int64] = self._rows[f"{of}_offset"].view(np.int64)
        return offsets

    @property
    def ids(self) -> Strings:
        """The ids, `[items]`."""
        return Strings(self.text, self.offsets("id"))

    @property
    def paths(self) -> Strings:
        """The paths, `[items]`, as the manifest had them. (An index has none.)"""
        return Strings(self.text, self.offsets("path"))

    def take(self, items: NDArray[np.int64], of: Sequence[str] = ("id", "path")) -> tuple[dict[str, Any], NDArray[Any]]:
        """The columns of some items, and their text; `of` are the offsets of strings in it, in their order. The other
        columns of offsets are made anew from the items' sizes."""
        values: dict[str, Any] = {}
        for name, _ in self.columns:
            if not is_offset(name):
                values[name] = self[name][items]
            elif (what := name.removesuffix("_offset")) not in of:
                sizes = np.diff(self.offsets(what))[items]
                values[name] = np.concatenate(([0], np.cumsum(sizes)))
        texts, begin = [], 0
        for what in of:
            strings = Strings(self.text, self.offsets(what)).take(items)
            values[f"{what}_offset"] = strings.offsets + begin
            texts.append(strings.blob)
            begin += len(strings.blob)
        return values, np.concatenate(texts)


def is_offset(column: str) -> bool:
    """Whether a column says where things begin."""
    return column.endswith("_offset")


def rise(offsets: NDArray[np.int64], first: int, last: int, at_least: int = 0) -> bool:
    """Whether offsets go from `first` to `last`, in steps of `at_least` so many."""
    return bool(offsets[0] == first and offsets[-1] == last and (np.diff(offsets) >= at_least).all())
