"""The rows that a run's versions should hold: a manifest's, or those of a partition; with the config's copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ManifestError
from featcache.extraction.audio_files import row_seconds
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.partition import Partition
from featcache.extraction.tasks import shard_ranges
from featcache.manifest import Manifest
from featcache.manifest.copies import Copies, expand
from featcache.store.partitions import PartitionRows, digest_of_rows


@dataclass(frozen=True, eq=False)
class WantedRows:
    """The rows that versions with the same copies should hold."""

    manifest: Manifest
    """The rows: those of the run's manifest, or of a partition of it, with the config's copies."""
    seconds: NDArray[np.float64]
    """Seconds of audio of each row, `[rows]`; those that the manifest does not say are estimates."""
    num_utterances: int
    """How many utterances of the manifest these are, without copies."""
    partition: PartitionRows | None = None
    """Which rows of the whole, with all copies, these are; None if the run is over all of it."""
    ranges: NDArray[np.int64] | None = None
    """If it is a partition: which shard-sized range of the whole each row is in, int64 `[rows]`."""


def all_rows(manifest: Manifest, copies: Copies, source: SourceVersion | None) -> WantedRows:
    """The manifest with its copies, and how long each lasts: by the manifest or the source, else by files' headers."""
    expanded, known, speed = _expanded(manifest, copies, source)
    return WantedRows(expanded, row_seconds(expanded, known, speed), len(manifest))


def rows_of_partition(
    manifest: Manifest, copies: Copies, source: SourceVersion | None, partition: Partition, seconds_per_shard: float
) -> WantedRows:
    """A partition of the manifest with its copies. Which rows it has depends on the manifest, and on nothing else that
    may differ between the jobs of an array, or between the times at which they begin: no audio file is looked at.

    A row without a duration counts as long as the mean of the others.

    Raises:
        ManifestError: No row has a duration.
    """
    expanded, known, _ = _expanded(manifest, copies, source)
    unknown = np.isnan(known)
    if unknown.all():
        raise ManifestError(
            f"{manifest.source}: no row has a duration, and partitions are cut by these: "
            f"featcache durations {manifest.source} -o FILE adds them, from the files' headers"
        )
    known = np.where(unknown, known[~unknown].mean(), known)
    ranges = shard_ranges(known, seconds_per_shard)
    rows = partition.rows(ranges)
    digest = digest_of_rows(expanded)
    own = PartitionRows(digest, rows.start, rows.stop, len(expanded), partition.number, partition.count)
    num_utterances = -(-rows.stop // len(copies)) - rows.start // len(copies)
    some = expanded.take(np.arange(rows.start, rows.stop))
    return WantedRows(some, known[rows], num_utterances, own, ranges[rows])


def _expanded(
    manifest: Manifest, copies: Copies, source: SourceVersion | None
) -> tuple[Manifest, NDArray[np.float64], NDArray[np.float64]]:
    """The manifest with its copies; the seconds of each row as far as they are known, else NaN; its speed."""
    expanded = expand(manifest, copies)
    speed = np.tile(copies.speeds, len(manifest))
    known = expanded.duration / speed  # a faster copy is shorter
    if source is not None:
        known = source.seconds(expanded, known)
    return expanded, known, speed
