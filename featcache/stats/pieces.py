"""A version's utterances, cut into pieces and read by threads, in the order of the shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ManifestError, MissingItemError, StoreError, listing
from featcache.loader import Cache
from featcache.manifest import Manifest, read_manifest
from featcache.manifest.copies import copies_of, expand
from featcache.store.index import Index
from featcache.store.join import RowKeys, describe_changed, join_version
from featcache.strings import Strings

PIECE_FRAMES = 256

_TASK_VALUES = 1 << 20

_WAITING = 2
"""Tasks that wait for each thread: those of 10^7 utterances are not held all at once."""


@dataclass(frozen=True)
class Selection:
    """Some utterances of a version, in groups.

    Attributes:
        positions: int64 `[utterances]`, in the index.
        groups: int64 `[utterances]`, the number of each one's group.
        names: of the groups, sorted; one empty name where there are none.
    """

    positions: NDArray[np.int64]
    groups: NDArray[np.int64]
    names: list[str]


@dataclass(frozen=True)
class Task:
    """Pieces of one shard, in its order. A piece is up to 256 frames, counted from an utterance's beginning.

    Attributes:
        shard: number of the shard in the index.
        starts: int64 `[pieces]`, the first frame of each in the shard's features.
        counts: int64 `[pieces]`, how many frames it has.
        positions: int64 `[pieces]`, whose piece it is: the utterance's position in the index.
        groups: int64 `[pieces]`, the number of the utterance's group.
    """

    shard: int
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    positions: NDArray[np.int64]
    groups: NDArray[np.int64]

    @property
    def first(self) -> int:
        """Where the first piece begins in the shard's features."""
        return int(self.starts[0])

    def read(self, cache: Cache) -> NDArray[Any]:
        """The shard's features from the first piece to the end of the last, `[frames, dims]`, read-only.

        Args:
            cache: says whether utterances are to be held against their checksums.

        Raises:
            DamagedError: the shard is damaged.
        """
        if cache.check:
            begins = self.starts == cache.index.first_frame[self.positions]
            for position in self.positions[begins].tolist():
                cache.item(position, raw=True)
        frames = cache.shard_frames(self.shard, self.first, int(self.starts[-1] + self.counts[-1]) - self.first)
        return frames.reshape(len(frames), -1)


def select(cache: Cache, manifest: str | Path | Manifest | None, by: str | None) -> Selection:
    """The utterances of a manifest, or all, in groups by one of its columns, or in one.

    Raises:
        ManifestError: the manifest cannot be read, has faults, or no such column; or the cache has features of other
            rows than those of its rows that have a path.
        MissingItemError: it has utterances that the cache has not; names up to ten.
        StoreError: there are no utterances.
    """
    if manifest is None:
        if by is not None:
            raise ManifestError(f"to group by {by!r} takes a manifest, whose column that is")
        positions = np.arange(len(cache))
    else:
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(manifest, audio=False, carry=by is not None)
        manifest = expand(manifest, copies_of(cache.config))  # what training has of them
        rows = RowKeys.of(manifest)
        joined = join_version(cache.version, cache.index, rows, manifest)
        if joined.is_changed.any():
            raise ManifestError(
                f"{describe_changed(manifest, rows, cache.version, cache.index, joined)}; or a manifest without paths, "
                "to go by ids alone"
            )
        positions = joined.positions
        missing = np.flatnonzero(positions < 0).tolist()
        if missing:
            error = cache.missing_error([manifest.ids[row] for row in missing], len(manifest))
            raise MissingItemError(f"{manifest.source}: {error}")
    if not len(positions):
        raise StoreError(f"{cache.version.path}: holds no utterances")
    if by is None or manifest is None:
        return Selection(positions, np.zeros(len(positions), np.int64), [""])
    column = manifest.columns.get(by, manifest.paths if by == "path" and len(manifest.paths.blob) else None)
    if column is None:
        there = listing(map(repr, manifest.columns)) or "none but id"
        raise ManifestError(f"{manifest.source}: has no column {by!r}; it has {there}")
    names = sorted(set(column))
    return Selection(positions, _numbers(column, names), names)


def _numbers(column: Strings, names: list[str]) -> NDArray[np.int64]:
    number = {name: at for at, name in enumerate(names)}
    return np.fromiter((number[name] for name in column), np.int64, len(column))


def tasks(index: Index, selection: Selection, dims: int) -> Iterator[Task]:
    """All pieces of the utterances, shard by shard, in tasks of about a million values, `dims` in each frame."""
    task_frames = max(_TASK_VALUES // dims, PIECE_FRAMES)
    shard, first = index.shard[selection.positions], index.first_frame[selection.positions]
    order = np.lexsort((first, shard))
    numbers, bounds = np.unique(shard[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, bounds[1:]), strict=True):
        positions = selection.positions[rows]
        lengths = index.num_frames[positions]
        pieces = -(-lengths // PIECE_FRAMES)
        item = np.repeat(np.arange(len(rows)), pieces)
        begin = (np.arange(len(item)) - (pieces.cumsum() - pieces)[item]) * PIECE_FRAMES
        counts = np.minimum(lengths[item] - begin, PIECE_FRAMES)
        columns = first[rows][item] + begin, counts, positions[item], selection.groups[rows][item]
        cuts = np.flatnonzero(np.diff((counts.cumsum() - counts) // task_frames)) + 1
        for part in zip(*(np.split(column, cuts) for column in columns), strict=True):
            yield Task(number, *part)


def run(work: Callable[[Task], object], given: Iterator[Task], threads: int, report: Callable[[int], object]) -> None:
    """Do all tasks in threads; what one of them raises ends it. `report` is called with the frames of each."""
    waiting: deque[tuple[Future[object], int]] = deque()

    def finish_one() -> None:
        future, frames = waiting.popleft()
        future.result()
        report(frames)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for task in given:
                if len(waiting) == _WAITING * threads:
                    finish_one()
                waiting.append((pool.submit(work, task), int(task.counts.sum())))
            while waiting:
                finish_one()
        finally:
            pool.shutdown(cancel_futures=True)
