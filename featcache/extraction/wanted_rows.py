"""The rows that a run's versions should hold: a manifest's, or those of a partition; with the config's copies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.extraction.audio_files import row_seconds
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.partition import Partition
from featcache.manifest import Manifest
from featcache.manifest.copies import Copies, expand
from featcache.version.index import Index
from featcache.version.version import Version
from featcache.version.wanted import RowKeys, Wanted, read_all_wanted, want

__all__ = ["WantedRows", "rows_of_run"]


@dataclass(frozen=True, eq=False)
class WantedRows:
    """The rows that versions with the same copies should hold."""

    manifest: Manifest
    """The rows that the run is about: those of its manifest, or of a partition of it, with the config's copies."""
    seconds: NDArray[np.float64]
    """Seconds of audio of each row, `[rows]`; those that the manifest does not say are estimates."""
    num_utterances: int
    """How many utterances of the manifest these are, without copies."""
    whole: RowKeys
    """The rows of the whole manifest, with all copies."""
    first: int = 0
    """The number of the first row in the whole."""

    def wanted(self, version: Version | None, index: Index, again: Sequence[int] | NDArray[np.int64]) -> Wanted:
        """What the whole manifest wants of a version; `again` are the numbers of rows, of these, that are to be
        extracted although there are items of their ids.
        """
        source = self.manifest.source
        if os.path.exists(source):
            source = os.path.realpath(source)  # however it was typed
        before = [] if version is None else [*read_all_wanted(version)]
        return want(source, self.whole, index, before, np.asarray(again, np.int64) + self.first)


def rows_of_run(
    manifest: Manifest, copies: Copies, source: SourceVersion | None, partition: Partition | None
) -> WantedRows:
    """The manifest with its copies, or a partition of it, and how long each row lasts: by the manifest or the source,
    else by files' headers.

    A partition depends on the manifest, and on nothing else that may differ between the jobs of an array: it is a slice
    of the utterances, cut by their durations if all have one, else by their number.
    """
    whole = expand(manifest, copies)
    keys = RowKeys(whole.ids.hashes(), whole.row_hashes())
    first, end = (0, len(manifest)) if partition is None else partition.span(manifest.duration)
    rows = whole
    if partition is not None:
        rows = whole.take(np.arange(first * len(copies), end * len(copies)))
    speed = np.tile(copies.speeds, end - first)
    known = rows.duration / speed  # a faster copy is shorter
    if source is not None:
        known = source.seconds(rows, known)
    return WantedRows(rows, row_seconds(rows, known, speed), end - first, keys, first * len(copies))
