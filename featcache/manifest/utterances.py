"""A manifest: utterances as flat columns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from featcache.manifest.audio_locations import AudioLocation, AudioSource, Url, have_urls, locate, url_of
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.strings import Strings


def nearest_sample(seconds: float, rate: float) -> int:
    """The number of samples nearest to some seconds; half a sample counts as one, as Lhotse and Kaldi count it. It is
    Lhotse's `compute_num_samples`: what is off by less than 1e-8 samples, as binary fractions are, is a half too."""
    return math.floor(round(seconds * rate, 8) + 0.5)


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
    """Seconds `[rows]`; NaN if not given."""
    duration: NDArray[np.float64]
    """Seconds `[rows]`; NaN if not given."""
    channel: NDArray[np.int32]
    """Numbers of channels `[rows]`; -1 if not given."""
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
    """The URLs that a user's own manifest names, if he has given one, and no others.

    Paths in a cache are a stranger's, if the cache is: they alone must not make this machine send a request, since that
    may be to a service that trusts this machine. A file at a URL is fetched if a manifest names it, too.
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
