"""The arrays that a shard consists of: described once, for whoever writes, reads, checks or repairs a shard, and for
docs/format.md. Side arrays, an extractor's outputs besides the features, have two columns each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from featcache.errors import ExtractorError, listing
from featcache.spec import QUANTIZATION, FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.checksums import hex_crc32c

SIDE_NAME = "[a-z][a-z0-9_]*"
"""The names that side arrays may have, as a pattern."""


@dataclass(frozen=True)
class Column:
    """One of a shard's arrays."""

    name: str
    """The array's folder in the shard's."""
    dtype: str
    """The name of its dtype; empty if the version's spec decides, until `columns_of` fills it in."""
    length: str
    """How many entries it has, in terms of `n` items, `f` frames, `e` side entries and bytes."""
    meaning: str
    """What it holds, for docs/format.md."""
    entry_shape: tuple[int, ...] = ()
    """The shape of one entry."""
    delimits: str = ""
    """The array whose entries these offsets deal out to items; empty if it holds no offsets."""
    min_entries: int = 1
    """How many entries of that array an item has at least."""
    missing: int | None = None
    """What stands for each entry in a shard that lacks the array; None if no shard does."""
    fill: int = 0
    """What stock Zarr reads of an array of integers whose chunk is missing; of floats, it reads NaN."""

    def metadata(self, length: int) -> bytes:
        """The `zarr.json` of the array with that many entries."""
        return self._metadata(length, self._dimensions, self.fill)

    def is_metadata(self, checksum: str | None, length: int) -> bool:
        """Whether a `zarr.json` of that checksum is the array's with that many entries, in a form of any time."""
        return any(hex_crc32c(form) == checksum for form in self._forms(length))

    def _metadata(self, length: int, dimensions: list[str] | None, fill: int = 0) -> bytes:
        return zarr3.array_metadata((length, *self.entry_shape), np.dtype(self.dtype), dimensions, fill)

    def is_like(self, metadata: bytes, length: int) -> bool:
        """Whether stock Zarr finds the array with that many entries by a `zarr.json`: another fill value, names of
        dimensions, attributes, and another form of the JSON do not matter to it.
        """
        return any(_essence(metadata) == _essence(form) for form in self._forms(length))

    def _forms(self, length: int) -> tuple[bytes, bytes]:
        return self.metadata(length), self._metadata(length, None)

    @property
    def _dimensions(self) -> list[str]:
        """The names of the array's dimensions: in all arrays of a shard, equal names have equal lengths.

        None of them is the name of an array, because xarray would take that for the dimension's coordinates.
        """
        names = [f"{self.name}_dim_{axis}" for axis in range(1 + len(self.entry_shape))]
        return [_DIMENSIONS.get(self.length, names[0]), *names[1:]]


def _essence(metadata: bytes) -> dict[str, Any]:
    left_out = ("fill_value", "dimension_names", "attributes")
    return {key: value for key, value in json.loads(metadata).items() if key not in left_out}


_DIMENSIONS = {"n": "item", "n + 1": "item_edge", "f": "frame"}
"""The names of first dimensions that several arrays may share."""

FEATURES = Column("features", "", "f", "the frames of all items, one item after another")

COLUMNS = (
    Column(
        "offsets",
        "uint64",
        "n + 1",
        "item `i` is `features[offsets[i]:offsets[i + 1]]`; strictly increasing from 0 to `f`",
        delimits="features",
    ),
    Column("crc32c", "uint32", "n", "CRC-32C of each item's bytes in `features`"),
    Column("num_samples", "uint64", "n", "number of samples given to the extractor, at its own rate"),
    Column("ids", "uint8", "bytes", "the ids of all items, one after another"),
    Column("id_offsets", "uint64", "n + 1", "id `i` is `ids[id_offsets[i]:id_offsets[i + 1]]`", delimits="ids"),
    Column("paths", "uint8", "bytes", "each row's path, as in the manifest"),
    Column("path_offsets", "uint64", "n + 1", "likewise", delimits="paths"),
    Column("segments", "float64", "n", "the row's start and duration in seconds; NaN if not given", (2,)),
    Column("channels", "int32", "n", "the row's channel; -1 if not given. Shards may lack this array", missing=-1),
    Column(
        "sources",
        "int64",
        "n",
        "the audio file when it was decoded: size in bytes, mtime in ns since 1970 (or see below), sample rate in Hz",
        (3,),
    ),
    Column(
        "source_hashes",
        "uint64",
        "n",
        "XXH3-64 of the audio file's bytes when it was decoded; 0 if unknown. Shards may lack this array",
        missing=0,
    ),
    Column(
        "decoders",
        "uint8",
        "n",
        "what decoded the audio file: 1 for FFmpeg, else 0. A shard of zeros alone lacks this array",
        missing=0,
    ),
)
"""The arrays of every shard besides the features."""

SIDE_COLUMNS = (
    Column("side_<name>", "", "e", "the entries of all items, one item after another"),
    Column(
        "side_<name>_offsets",
        "uint64",
        "n + 1",
        "item `i` has `side_<name>[offsets[i]:offsets[i + 1]]`; non-decreasing from 0 to `e`",
        delimits="side_<name>",
        min_entries=0,
    ),
)
"""The two arrays of a side array, its entries and their offsets."""


def side_names(name: str) -> tuple[str, str]:
    """The names of a side array's two columns: its entries, and their offsets."""
    entries, offsets = (column.name.replace("<name>", name) for column in SIDE_COLUMNS)
    return entries, offsets


def _side_columns(spec: SideSpec) -> tuple[Column, Column]:
    entries, offsets = SIDE_COLUMNS
    entries_name, offsets_name = side_names(spec.name)
    return (
        replace(entries, name=entries_name, dtype=spec.dtype, entry_shape=spec.item_shape),
        replace(offsets, name=offsets_name, delimits=entries_name, min_entries=int(spec.name == QUANTIZATION)),
    )


def columns_of(spec: FeatureSpec, there: Collection[str]) -> dict[str, Column]:
    """The arrays of a version's shard, by name, the features first; what may be missing only if it is among `there`."""
    fill = _no_code(spec)
    features = replace(FEATURES, dtype=spec.stored_dtype, entry_shape=spec.item_shape, fill=fill)
    of_side_arrays = (column for side in spec.side for column in _side_columns(side))
    columns = (features, *COLUMNS, *of_side_arrays)
    return {column.name: column for column in columns if column.missing is None or column.name in there}


def _no_code(spec: FeatureSpec) -> int:
    """The largest value of the dtype of codes if it is none, else 0."""
    dtype = np.dtype(spec.stored_dtype)
    if dtype.kind == "f" or not spec.codebook_sizes or max(spec.codebook_sizes) > np.iinfo(dtype).max:
        return 0
    return int(np.iinfo(dtype).max)


def check_side_specs(specs: Sequence[SideSpec]) -> None:
    """Refuse side arrays that cannot be stored beside each other.

    Raises:
        ExtractorError: Says which name, dtype or shape is wrong.
    """
    for spec in specs:
        if not re.fullmatch(SIDE_NAME, spec.name):
            raise ExtractorError(f"side array {spec.name!r}: a name is lower-case letters, digits and _")
        if spec.dtype not in zarr3.DTYPES:
            raise ExtractorError(f"side array {spec.name}: {spec.dtype!r} is none of {', '.join(zarr3.DTYPES)}")
        if min(spec.item_shape, default=1) < 1:
            raise ExtractorError(f"side array {spec.name}: entries of shape {list(spec.item_shape)} hold no value")
    names = [name for spec in specs for name in side_names(spec.name)]
    if len(set(names)) < len(names):
        raise ExtractorError(
            f"side arrays {listing(spec.name for spec in specs)}: two of them have the same name on disk"
        )
