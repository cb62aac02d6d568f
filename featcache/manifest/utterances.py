"""Utterances: one of them, and a manifest of them as flat columns."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.manifest.audio_locations import AudioLocation, AudioSource, Url, have_urls, locate, url_of
from featcache.strings import Strings, extend_hashes


def nearest_sample(seconds: float, rate: float) -> int:
    """The number of samples nearest to some seconds; half a sample counts as one, as Lhotse and Kaldi count it.

    It is Lhotse's `compute_num_samples`: what is off by less than 1e-8 samples, as binary fractions are, is a half too.
    """
    return math.floor(round(seconds * rate, 8) + 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of one channel of an audio file, in Kaldi's sense: what a row of a manifest asks for.

    Features belong to their segment: rows ask for the same features if their segments are equal. Among many segments,
    `SegmentColumns.hashes` tells which are.
    """

    path: str
    """The audio file, as the manifest has it; `Manifest.resolve` gives its place."""
    start: float | None = None
    """Seconds from the beginning of the file; None if the row does not give it."""
    duration: float | None = None
    """Seconds; None if the row does not give it."""
    channel: int | None = None
    """The number of the file's channel, from 0; None if the row does not give it."""

    @property
    def segment(self) -> Segment:
        """The segment alone, to be compared, without what an utterance or an item has besides."""
        return Segment(path=self.path, start=self.start, duration=self.duration, channel=self.channel)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Utterance(Segment):
    """One row of a manifest."""

    id: str
    """The id, unique in its manifest."""

    @classmethod
    def of_columns(cls, id: str, path: str, start: float, duration: float, channel: int) -> Utterance:  # noqa: A002
        """An utterance from the values of flat columns, in which NaN and -1 stand for what is not given."""
        return Utterance(
            id=id,
            path=path,
            start=None if math.isnan(start) else start,
            duration=None if math.isnan(duration) else duration,
            channel=None if channel < 0 else channel,
        )

    def __repr__(self) -> str:
        # In the order of a manifest's columns. The names of shard tasks are hashes of this text.
        segment = f"path={self.path!r}, start={self.start!r}, duration={self.duration!r}, channel={self.channel!r}"
        return f"Utterance(id={self.id!r}, {segment})"

    def row(self) -> dict[str, Any]:
        """The id and the segment's four values by name, in the order of a manifest's columns."""
        return {
            "id": self.id,
            "path": self.path,
            "start": self.start,
            "duration": self.duration,
            "channel": self.channel,
        }

    def document(self) -> dict[str, Any]:
        """All values by name, for JSON: the row first, then what an item or a failure has besides."""
        return {**self.row(), **asdict(self)}


class SegmentColumns(NamedTuple):
    """Segments as flat columns."""

    paths: Strings
    """The paths `[rows]`."""
    start: NDArray[np.float64]
    """Seconds, float64 `[rows]`; NaN if not given."""
    duration: NDArray[np.float64]
    """Seconds, float64 `[rows]`; NaN if not given."""
    channel: NDArray[np.int32]
    """Numbers of channels, int32 `[rows]`; -1 if not given."""

    @classmethod
    def of(cls, segments: Collection[Segment]) -> SegmentColumns:
        """The columns of some segments, in their order."""
        return cls(
            Strings.of(segment.path for segment in segments),
            np.array([math.nan if segment.start is None else segment.start for segment in segments], np.float64),
            np.array([math.nan if segment.duration is None else segment.duration for segment in segments], np.float64),
            np.array([-1 if segment.channel is None else segment.channel for segment in segments], np.int32),
        )

    @classmethod
    def of_arrays(cls, paths: Strings, segments: NDArray[np.float64], channels: NDArray[np.int32]) -> SegmentColumns:
        """The columns as a shard has them: starts and durations in one array, `[rows, 2]`."""
        return cls(paths, segments[:, 0], segments[:, 1], channels)

    def hashes(self) -> NDArray[np.uint64]:
        """Hashes that tell rows apart by their segments: equal for equal path, start, duration and channel.

        It is the 64-bit FNV-1a hash of the path's bytes, start and duration (little-endian float64, one NaN, one
        zero) and channel (little-endian int32).

        Returns:
            uint64 `[rows]`.
        """
        hashes = self.paths.hashes()
        for seconds in (self.start, self.duration):
            hashes = extend_hashes(hashes, np.where(np.isnan(seconds), np.nan, seconds + 0.0))
        return extend_hashes(hashes, self.channel.astype(np.int32))


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """A table of utterances, by column; `manifest[row]` is an `Utterance`."""

    source: str
    """What was read, for messages: the file as it was named, or `<stdin>`."""
    root: AudioLocation
    """What relative paths are relative to: a folder, absolute, or the beginning of URLs."""
    ids: Strings
    """The ids `[rows]`, all different."""
    paths: Strings
    """The paths `[rows]`, as written; empty if not given, which only `audio=False` allows."""
    start: NDArray[np.float64]
    """Seconds, float64 `[rows]`; NaN if not given."""
    duration: NDArray[np.float64]
    """Seconds, float64 `[rows]`; NaN if not given."""
    channel: NDArray[np.int32]
    """Numbers of channels, int32 `[rows]`; -1 if not given."""
    columns: dict[str, Strings]
    """Every other column `[rows]`, as text, by its own name."""
    format: str = "csv"
    """The format that it was read in: a name of `featcache.manifest.FORMATS`."""
    notes: tuple[str, ...] = ()
    """What to tell the user about what was read."""
    placeholders: frozenset[str] = frozenset()
    """The names of the placeholders in its paths and other columns, with a value or without."""

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> Utterance:
        start, duration, channel = float(self.start[row]), float(self.duration[row]), int(self.channel[row])
        return Utterance.of_columns(self.ids[row], self.paths[row], start, duration, channel)

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

    def resolve(self, path: str) -> AudioSource:
        """Where the audio of one of the `paths` is: under `root`, unless the path is absolute or a URL."""
        return locate(self.root, path)

    @property
    def has_urls(self) -> bool:
        """Whether files have to be fetched."""
        return isinstance(self.root, Url) or have_urls(self.paths)

    def row_hashes(self) -> NDArray[np.uint64]:
        """The hash of each row's segment, uint64 `[rows]`."""
        return SegmentColumns(self.paths, self.start, self.duration, self.channel).hashes()


class CallersUrls:
    """The URLs that a user's own manifest names, and no others.

    Paths in a cache are a stranger's, if the cache is: they alone must not make this machine send a request, since that
    may be to a service that trusts this machine. A file at a URL is fetched if a manifest names it, too.

    Args:
        manifest: The manifest; None if the user has given none.
    """

    def __init__(self, manifest: Manifest | None) -> None:
        self._urls: frozenset[str] = frozenset()
        if manifest is not None and manifest.has_urls:
            self._urls = frozenset(filter(None, map(url_of, map(manifest.resolve, manifest.paths))))

    def __contains__(self, url: Url) -> bool:
        return url in self._urls

    def __bool__(self) -> bool:
        return bool(self._urls)


def rows_at_even_steps(count: int, at_most: int) -> NDArray[np.int64]:
    """A sample of the rows 0 to `count` - 1 from the first to the last, rising; int64, all rows if they are few."""
    return np.unique(np.linspace(0, count - 1, min(count, at_most)).astype(np.int64))
