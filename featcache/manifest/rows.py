"""A manifest in memory: rows of utterances, as flat columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.strings import Strings, extend_hashes


@dataclass(frozen=True, slots=True)
class Utterance:
    """One row of a manifest.

    Attributes:
        id: unique in its manifest.
        path: the audio file, as written; `Manifest.resolve` says where it is.
        start: seconds from the beginning of the file; None where not given.
        duration: seconds; None where not given.
        channel: which channel of the file, from 0; None where not given.
    """

    id: str
    path: str
    start: float | None
    duration: float | None
    channel: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A table of utterances, by column; `manifest[row]` is an `Utterance`.

    Attributes:
        source: what was read, for messages: the file as it was named, or `<stdin>`.
        root: the folder that relative paths are relative to; absolute.
        ids: `[rows]`, all different.
        paths: `[rows]`, as written; empty where not given, which only `audio=False` allows.
        start: float64 `[rows]`, seconds; NaN where not given.
        duration: float64 `[rows]`, seconds; NaN where not given.
        channel: int32 `[rows]`; -1 where not given.
        columns: every other column `[rows]`, as text, by its own name.
    """

    source: str
    root: Path
    ids: Strings
    paths: Strings
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    channel: NDArray[np.int32]
    columns: dict[str, Strings]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Utterance:
        start, duration, channel = float(self.start[row]), float(self.duration[row]), int(self.channel[row])
        return Utterance(
            id=self.ids[row],
            path=self.paths[row],
            start=None if math.isnan(start) else start,
            duration=None if math.isnan(duration) else duration,
            channel=None if channel < 0 else channel,
        )

    def take(self, rows: NDArray[np.int64]) -> Manifest:
        """The manifest of some of the rows, in that order."""
        return replace(
            self,
            ids=self.ids.take(rows),
            paths=self.paths.take(rows),
            start=self.start[rows],
            duration=self.duration[rows],
            channel=self.channel[rows],
            columns={name: column.take(rows) for name, column in self.columns.items()},
        )

    def resolve(self, path: str) -> Path:
        """Where the file of one of the `paths` is: under `root`, unless the path is absolute."""
        return self.root / path

    def row_hashes(self) -> NDArray[np.uint64]:
        """What tells the rows apart, uint64 `[rows]`: the function of that name, of these columns."""
        return row_hashes(self.paths, self.start, self.duration, self.channel)


def row_hashes(
    paths: Strings, start: NDArray[np.float64], duration: NDArray[np.float64], channel: NDArray[np.int32]
) -> NDArray[np.uint64]:
    """What tells rows apart: equal for rows with equal path, start, duration and channel.

    It is the 64-bit FNV-1a hash of the path's bytes, start and duration (little-endian float64, one NaN, one
    zero) and channel (little-endian int32).

    Args:
        paths: `[rows]`.
        start: `[rows]`, seconds; NaN where not given.
        duration: `[rows]`, seconds; NaN where not given.
        channel: `[rows]`; -1 where not given.

    Returns:
        uint64 `[rows]`.
    """
    hashes = paths.hashes()
    for seconds in (start, duration):
        hashes = extend_hashes(hashes, np.where(np.isnan(seconds), np.nan, seconds + 0.0))
    return extend_hashes(hashes, channel.astype(np.int32))
