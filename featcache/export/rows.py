"""The utterances of an export, one after the other or in groups, and members of tars."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, counted, listing
from featcache.loader.cache import Cache
from featcache.loader.utterances import Columns, take
from featcache.manifest.columns import records_of
from featcache.manifest.strings import Strings

FILE_BYTES = 256 << 20
"""About so many bytes of features stand in a tar."""

_LONGEST_NAME = 250
"""The most bytes of a name that file systems take, with `.npy`."""


class Row(NamedTuple):
    """An utterance to export."""

    number: int
    """Its place among the utterances, from 0 on."""
    id: str
    features: NDArray[Any]
    """As `cache[id]`: `[frames, *item_shape]`, or `[*item_shape]` of a whole clip. Quantised
    features are float32."""
    columns: dict[str, Any]
    """The manifest's columns that have a value, with the row's path, start and so on."""


@dataclass(frozen=True)
class Rows:
    """The utterances to export, in order."""

    cache: Cache
    ids: Strings
    positions: NDArray[np.int64]
    """Their positions in the cache, `[utterances]`."""
    columns: Columns
    report: Callable[[int], object] = lambda _: None
    """Called with 1 after each utterance."""

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Row]:
        records = records_of(self.columns, len(self))
        numbered = enumerate(zip(self.ids, self.positions.tolist(), records, strict=True))
        for number, (id_, position, columns) in numbered:
            features = self.cache.item(position, check=True)
            yield Row(number, id_, features, without_missing(columns))
            self.report(1)

    def groups(self, num_bytes: int) -> Iterator[tuple[int, Iterator[Row]]]:
        """Number groups of utterances with about so many bytes of features each. A group is
        read while it is iterated."""
        total = 0

        def group_of(row: Row) -> int:
            nonlocal total
            total += row.features.nbytes
            return (total - row.features.nbytes) // num_bytes

        return enumerate(group for _, group in groupby(self, group_of))

    def sorted_by_id(self) -> Rows:
        """Return the same utterances, sorted by the bytes of their ids."""
        ids = [id_.encode() for id_ in self.ids]
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)
        columns = {name: take(column, order) for name, column in self.columns.items()}
        return replace(
            self, ids=self.ids.take(order), positions=self.positions[order], columns=columns
        )

    def refuse_ids(self, is_refused: Callable[[str], bool], why: str) -> None:
        """Raise ArgumentError if the format cannot hold some ids."""
        refused = [id_ for id_ in self.ids if is_refused(id_)]
        if refused:
            ids = listing(map(repr, refused), 3)
            fit = counted(len(refused), "id does not fit", "ids do not fit")
            raise ArgumentError(f"{why}; {fit}: {ids}")

    def refuse_names(self) -> None:
        """Raise ArgumentError if some ids are no paths of files below a folder."""
        self.refuse_ids(lambda id_: not _is_name(id_), "ids are names of files here")

    def refuse_columns(self, *own: str) -> None:
        """Raise ArgumentError if columns of the manifest have names that the format needs."""
        clashing = [repr(name) for name in own if name in self.columns]
        if clashing:
            raise ArgumentError(f"the manifest's {listing(clashing)} would hide ours: rename it")

    def require_frames(self, format_name: str, most_dimensions: int = 2) -> None:
        """Raise ArgumentError if an utterance has more dimensions than a format can hold."""
        spec = self.cache.spec
        dimensions = len(spec.axis.dimensions) + len(spec.item_shape)
        if dimensions > most_dimensions:
            what = f"and {format_name} holds at most {most_dimensions} dimensions"
            raise unfit(self.cache, f"{what}: --to numpy holds any")


def place_of(cache: Cache) -> str:
    """Name a version for messages, and its track if that is not the main one."""
    if cache.track_name == cache.spec.main.name:
        return str(cache.version.path)
    return f"{cache.version.path}: track {cache.track_name}"


def unfit(cache: Cache, why: str) -> ArgumentError:
    """Make the error for features that a format cannot hold."""
    return ArgumentError(f"{place_of(cache)}: has features {cache.spec.main.shape_text()}, {why}")


def encode_npy(array: NDArray[Any]) -> bytes:
    """Return an array as a file of NumPy's, without pickle."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def add_members(tar: tarfile.TarFile, members: Mapping[str, bytes]) -> None:
    """Add members to a tar, by their names."""
    for name, data in members.items():
        header = tarfile.TarInfo(name)
        header.size = len(data)
        tar.addfile(header, io.BytesIO(data))


def without_missing(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cells of a row that have a value, in types that JSON has."""
    kept = {}
    for name, cell in columns.items():
        if isinstance(cell, np.ndarray):
            kept[name] = cell.tolist()
        elif cell is not None and not (isinstance(cell, float) and math.isnan(cell)):
            kept[name] = cell
    return kept


def _is_name(id_: str) -> bool:
    """Tell whether an id is a path below a folder, in its only spelling."""
    path = PurePosixPath(id_)
    is_short = all(len(part.encode()) <= _LONGEST_NAME for part in path.parts)
    is_below = not {"..", "/"} & {*path.parts}
    return str(path) == id_ and is_short and is_below and "\0" not in id_
