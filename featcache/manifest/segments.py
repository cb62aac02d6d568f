"""Segments of audio files, and utterances: rows of a manifest or of a version."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.manifest.strings import Strings, extend_hashes

Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""Seconds in documents, whose readers check types."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of one channel of an audio file, as in Kaldi. Equal segments have the same
    features."""

    path: str
    """The audio file, as in the manifest; `Manifest.resolve` locates it."""
    start: Seconds | None = None
    """Seconds from the beginning of the file."""
    duration: Seconds | None = None
    """Seconds."""
    channel: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    """The number of the file's channel, from 0."""


class Utterance(Segment, frozen=True, kw_only=True):
    """One row of a manifest."""

    id: str
    """The id, unique in its manifest."""

    @classmethod
    def of_columns(
        cls, id_: str, path: str, start: float, duration: float, channel: int
    ) -> Utterance:
        """Make an utterance from values of flat columns: NaN and -1 are None."""
        return Utterance(
            id=id_,
            path=path,
            start=None if math.isnan(start) else start,
            duration=None if math.isnan(duration) else duration,
            channel=None if channel < 0 else channel,
        )

    def row(self) -> dict[str, Any]:
        """Return the id and the segment's values by name."""
        names = ("id", "path", "start", "duration", "channel")
        return {name: getattr(self, name) for name in names}

    def document(self) -> dict[str, Any]:
        """Return all values by name, for JSON: the row first."""
        return {**self.row(), **msgspec.structs.asdict(self)}


@dataclass(frozen=True, eq=False)
class SegmentColumns:
    """Segments as flat columns `[rows]`."""

    paths: Strings
    """The paths, as written; empty if not given, which needs `audio=False`."""
    start: NDArray[np.float64]
    """Seconds; NaN if not given."""
    duration: NDArray[np.float64]
    """Seconds; NaN if not given."""
    channel: NDArray[np.int32]
    """Numbers of channels; -1 if not given."""

    @classmethod
    def of(cls, segments: Collection[Segment]) -> SegmentColumns:
        """Return the columns of some segments."""
        channels = [-1 if segment.channel is None else segment.channel for segment in segments]
        return cls(
            Strings.of(segment.path for segment in segments),
            np.array([segment.start for segment in segments], np.float64),  # None becomes NaN
            np.array([segment.duration for segment in segments], np.float64),
            np.array(channels, np.int32),
        )

    def segments(self, rows: NDArray[np.int64]) -> SegmentColumns:
        """Return the segments of some rows."""
        columns = self.start[rows], self.duration[rows], self.channel[rows]
        return SegmentColumns(self.paths.take(rows), *columns)

    def hashes(self) -> NDArray[np.uint64]:
        """Hash each segment, uint64 `[rows]`: the 64-bit FNV-1a hash of the path's bytes,
        start and duration (little-endian float64, one NaN, one zero) and channel
        (little-endian int32)."""
        hashes = self.paths.hashes()
        for seconds in (self.start, self.duration):
            with_one_nan = np.where(np.isnan(seconds), np.nan, seconds + 0.0)
            hashes = extend_hashes(hashes, with_one_nan)
        return extend_hashes(hashes, self.channel.astype(np.int32))

    def read_again(self, hashes: Any = None) -> NDArray[np.int64]:
        """Return the rows with the same segment as another row, int64 `[n]`: first all of
        one segment. `hashes` may be known."""
        if hashes is None:
            hashes = self.hashes()
        rows = repeated_rows(hashes)
        return rows[np.argsort(hashes[rows] != hashes[rows[:1]], kind="stable")]


def repeated_rows(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the rows with the same hash as another row, rising."""
    ordered = np.sort(hashes)
    return np.flatnonzero(np.isin(hashes, ordered[1:][ordered[1:] == ordered[:-1]]))
