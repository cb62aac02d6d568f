"""Segments of audio files, and utterances: rows of a manifest, or what a version has of
them."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from featcache.strings import Strings, extend_hashes

Seconds = Annotated[float, msgspec.Meta(ge=0)]
"""What a document may say of them, as the other types of fields that documents hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one channel of an audio file, in Kaldi's sense: what a row of a
    manifest asks for.

    Features belong to their segment: rows ask for the same features if their segments are
    equal. Among many segments, `SegmentColumns.hashes` tells which are."""

    path: str
    """The audio file, as the manifest has it; `Manifest.resolve` gives its place."""
    start: Seconds | None = None
    """Seconds from the beginning of the file; None if the row does not give it."""
    duration: Seconds | None = None
    """Seconds; None if the row does not give it."""
    channel: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    """The number of the file's channel, from 0; None if the row does not give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance(Segment):
    """One row of a manifest."""

    id: str
    """The id, unique in its manifest."""

    @classmethod
    def of_columns(
        cls,
        id: str,  # noqa: A002
        path: str,
        start: float,
        duration: float,
        channel: int,
    ) -> Utterance:
        """An utterance from the values of flat columns, in which NaN and -1 stand for
        what is not given."""
        begin = None if math.isnan(start) else start
        seconds = None if math.isnan(duration) else duration
        return Utterance(
            id=id,
            path=path,
            start=begin,
            duration=seconds,
            channel=None if channel < 0 else channel,
        )

    def row(self) -> dict[str, Any]:
        """The id and the segment's four values by name, in the order of a manifest's
        columns."""
        return {
            name: getattr(self, name) for name in ("id", "path", "start", "duration", "channel")
        }

    def document(self) -> dict[str, Any]:
        """All values by name, for JSON: the row first, then what an item or a failure has
        besides."""
        return {**self.row(), **asdict(self)}


@dataclass(frozen=True, eq=False)
class SegmentColumns:
    """Segments as flat columns `[rows]`."""

    paths: Strings
    """The paths, as written; empty if not given, which only manifests that are read with
    `audio=False` may have."""
    start: NDArray[np.float64]
    """Seconds; NaN if not given."""
    duration: NDArray[np.float64]
    """Seconds; NaN if not given."""
    channel: NDArray[np.int32]
    """Numbers of channels; -1 if not given."""

    @classmethod
    def of(cls, segments: Collection[Segment]) -> SegmentColumns:
        """The columns of some segments, in their order."""
        return cls(
            Strings.of(segment.path for segment in segments),
            np.array([segment.start for segment in segments], np.float64),  # None becomes NaN
            np.array([segment.duration for segment in segments], np.float64),
            np.array(
                [-1 if segment.channel is None else segment.channel for segment in segments],
                np.int32,
            ),
        )

    def hashes(self) -> NDArray[np.uint64]:
        """Hashes that tell rows apart by segment, uint64 `[rows]`: equal for equal path,
        start, duration and channel.

        It is the 64-bit FNV-1a hash of the path's bytes, start and duration
        (little-endian float64, one NaN, one zero) and channel (little-endian int32)."""
        hashes = self.paths.hashes()
        for seconds in (self.start, self.duration):
            hashes = extend_hashes(hashes, np.where(np.isnan(seconds), np.nan, seconds + 0.0))
        return extend_hashes(hashes, self.channel.astype(np.int32))

    def read_again(self) -> NDArray[np.int64]:
        """The rows that read the same span of a file as another row, int64 `[n]`: first all
        of one span. Empty if there are none."""
        hashes = self.hashes()
        ordered = np.sort(hashes)
        again = ordered[1:][ordered[1:] == ordered[:-1]]
        rows = np.flatnonzero(np.isin(hashes, again))
        return rows[np.argsort(hashes[rows] != hashes[rows[:1]], kind="stable")]
