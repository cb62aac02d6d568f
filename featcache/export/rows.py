"""The utterances of an export, and the numbered files that it writes."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, counted, listing
from featcache.loader.cache import Cache
from featcache.loader.utterances import Columns, take
from featcache.manifest.columns import records_of
from featcache.spec import FeatureSpec
from featcache.strings import Strings

FILE_BYTES = 256 << 20
"""About so many bytes of features stand in a numbered file."""

_LONGEST_NAME = 250
"""The most bytes of a name that file systems take, with `.npy`."""


class Row(NamedTuple):
    """An utterance to export."""

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
        for id_, position, columns in zip(self.ids, self.positions.tolist(), records, strict=True):
            kept = {name: cell for name, cell in columns.items() if not _is_missing(cell)}
            yield Row(id_, self.cache.item(position, check=True), kept)
            self.report(1)

    @property
    def spec(self) -> FeatureSpec:
        """The description of the features."""
        return self.cache.spec

    @property
    def where(self) -> str:
        """The version, for messages."""
        return str(self.cache.version.path)

    def sorted_by_id(self) -> Rows:
        """Return the same utterances, sorted by the bytes of their ids."""
        ids = [id_.encode() for id_ in self.ids]
        order = np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)
        columns = {name: take(column, order) for name, column in self.columns.items()}
        return Rows(self.cache, self.ids.take(order), self.positions[order], columns, self.report)

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

    def require_frames(self, format_name: str, most_dimensions: int = 2) -> None:
        """Raise ArgumentError if an utterance has more dimensions than a format can hold."""
        dimensions = len(self.spec.axis.dimensions) + len(self.spec.item_shape)
        if dimensions > most_dimensions:
            shape = self.spec.main.shape_text()
            raise ArgumentError(
                f"{self.where}: has features {shape}, and {format_name} holds at most "
                f"{most_dimensions} dimensions: --to numpy holds any"
            )


def encode_npy(array: NDArray[Any]) -> bytes:
    """Return an array as a file of NumPy's, without pickle."""
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


class NumberedTars:
    """Writes members into tars of about `FILE_BYTES`, called by a pattern such as
    `features.%06d.tar`."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._tar: tarfile.TarFile | None = None
        self.count = 0
        """The number of tars so far."""

    @property
    def is_full(self) -> bool:
        """True if the next member begins a tar."""
        return self._tar is None or self._tar.offset >= FILE_BYTES

    def begin(self) -> None:
        """Begin the next tar."""
        self.close()
        self._tar = tarfile.open(self._folder / (self._pattern % self.count), "w")  # noqa: SIM115
        self.count += 1

    def add(self, members: Mapping[str, bytes]) -> None:
        """Add members, by their names."""
        if self._tar is None:
            self.begin()
        assert self._tar is not None
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            self._tar.addfile(header, io.BytesIO(data))

    def close(self) -> None:
        """Complete the last tar."""
        if self._tar is not None:
            self._tar.close()
        self._tar = None


def _is_name(id_: str) -> bool:
    """Tell whether an id is a path below a folder, in its only spelling."""
    path = PurePosixPath(id_)
    is_short = all(len(part.encode()) <= _LONGEST_NAME for part in path.parts)
    return str(path) == id_ and is_short and "\0" not in id_ and not {"..", "/"} & {*path.parts}


def _is_missing(cell: Any) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))
