"""Side arrays: an extractor's outputs besides the features, with any number of entries for each item of a shard.

    side_<name>/           [entries, *item_shape] of the spec's dtype: the items' entries, one item after the other
    side_<name>_offsets/   uint64 [items + 1]: item i has entries[offsets[i]:offsets[i + 1]]

They are small compared with the features: a writer keeps them in memory until its shard is committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ExtractorError, listing
from featcache.spec import SideSpec

DTYPES = ("float16", "float32", "float64", "uint8", "uint16", "uint32", "uint64", "int32", "int64")
_NAME = re.compile("[a-z][a-z0-9_]*")

SideData = Mapping[str, tuple[NDArray[Any], Sequence[int]]]
"""By name: the entries of some items, one item after the other, and how many each item has."""


@dataclass(frozen=True)
class Side:
    """One side array of a shard.

    Attributes:
        entries: of all items, `[entries, *item_shape]`.
        offsets: int64 `[items + 1]`.
    """

    entries: NDArray[Any]
    offsets: NDArray[np.int64]

    def item(self, number: int) -> NDArray[Any]:
        """The entries of one item, `[n, *item_shape]`; a view."""
        return self.entries[self.offsets[number] : self.offsets[number + 1]]


class SideWriter:
    """Gathers the side arrays of one shard."""

    def __init__(self, specs: Iterable[SideSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._entries = {name: [np.empty((0, *spec.item_shape), spec.dtype)] for name, spec in self._specs.items()}
        self._offsets = {name: [0] for name in self._specs}

    def check(self, side: SideData, num_items: int) -> None:
        """Hold the data of some items against the specs.

        Raises:
            ExtractorError: another name, dtype, shape or number of entries.
        """
        if side.keys() != self._specs.keys():
            raise ExtractorError(f"side arrays are {_named(side)}; this version's are {_named(self._specs)}")
        for name, (entries, counts) in side.items():
            spec = self._specs[name]
            if len(counts) != num_items or min(counts, default=0) < 0:
                raise ExtractorError(f"side array {name} has {list(counts)} entries for {num_items} items")
            found, expected = (entries.dtype, entries.shape), (np.dtype(spec.dtype), (sum(counts), *spec.item_shape))
            if found != expected:
                raise ExtractorError(
                    f"side array {name} is {found[0]} {list(found[1])}; "
                    f"this version's is {expected[0]} {list(expected[1])}"
                )

    def append(self, side: SideData) -> None:
        """Add the data of some items, which `check` has found to do; copied."""
        for name, (entries, counts) in side.items():
            self._entries[name].append(entries.copy())
            offsets = self._offsets[name]
            for count in counts:
                offsets.append(offsets[-1] + count)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries so far."""
        return sum(self._offsets[name][-1] * spec.bytes_per_entry for name, spec in self._specs.items())

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays, by their names in the shard."""
        columns: dict[str, NDArray[Any]] = {}
        for name in self._specs:
            entries, offsets = column_names(name)
            columns[entries] = np.concatenate(self._entries[name])
            columns[offsets] = np.array(self._offsets[name], np.uint64)
        return columns


def column_names(name: str) -> tuple[str, str]:
    """What the two arrays of a side array are called in a shard: its entries, their offsets."""
    return f"side_{name}", f"side_{name}_offsets"


def check_specs(specs: Sequence[SideSpec]) -> None:
    """Whether arrays like these can be stored side by side.

    Raises:
        ExtractorError: a name, a dtype or a shape will not do.
    """
    for spec in specs:
        if not _NAME.fullmatch(spec.name):
            raise ExtractorError(f"side array {spec.name!r}: a name is lower-case letters, digits and _")
        if spec.dtype not in DTYPES:
            raise ExtractorError(f"side array {spec.name}: {spec.dtype!r} is none of {', '.join(DTYPES)}")
        if min(spec.item_shape, default=1) < 1:
            raise ExtractorError(f"side array {spec.name}: entries of shape {list(spec.item_shape)} hold no value")
    columns = [column for spec in specs for column in column_names(spec.name)]
    if len(set(columns)) < len(columns):
        raise ExtractorError(
            f"side arrays {listing(spec.name for spec in specs)}: two of them have the same name on disk"
        )


def _named(names: Iterable[str]) -> str:
    return listing(sorted(names)) or "none"
