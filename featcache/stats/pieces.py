"""The utterances that statistics are of, cut into pieces, and read by threads in the order of the shards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, MissingItemError, StoreError, listing
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.manifest import Manifest, read_manifest
from featcache.manifest.copies import copies_of, expand
from featcache.version.index import Index
from featcache.version.join import RowKeys, describe_changed, join_version

PIECE_FRAMES = 256

_VALUES_AT_ONCE = 1 << 20

_WAITING = 2
"""How many `ShardPieces` wait for each thread: those of 10^7 utterances are never all in memory."""


@dataclass(frozen=True)
class Selection:
    """Some utterances of a version, in groups."""

    positions: NDArray[np.int64]
    """The utterances' positions in the index, int64 `[utterances]`."""
    groups: NDArray[np.int64]
    """The number of each utterance's group, int64 `[utterances]`."""
    names: list[str]
    """The groups' names, sorted; without groups, a single empty name."""


@dataclass(frozen=True)
class ShardPieces:
    """Pieces of one shard, in its order. A piece is up to 256 frames, counted from an utterance's beginning."""

    shard: int
    starts: NDArray[np.int64]
    """The first frame of each piece in the shard's features, int64 `[pieces]`."""
    counts: NDArray[np.int64]
    """The number of frames of each piece, int64 `[pieces]`."""
    positions: NDArray[np.int64]
    """The position in the index of each piece's utterance, int64 `[pieces]`."""
    groups: NDArray[np.int64]
    """The number of the group of each piece's utterance, int64 `[pieces]`."""

    @property
    def first(self) -> int:
        """The first frame of the first piece in the shard's features."""
        return int(self.starts[0])

    def read(self, cache: Cache) -> NDArray[Any]:
        """The shard's features from the first piece to the end of the last, `[frames, dims]`, read-only; a DamagedError
        if it is damaged."""
        if cache.check:
            begins = self.starts == cache.index.first_frame[self.positions]
            for position in self.positions[begins].tolist():
                cache.item(position, raw=True)
        frames = cache.shard_frames(self.shard, self.first, int(self.starts[-1] + self.counts[-1]) - self.first)
        return frames.reshape(len(frames), -1)


@dataclass(frozen=True)
class SelectedParts:
    """The caches that statistics are of, and the utterances selected in each: found as they are iterated over."""

    parts: list[Cache]
    """One cache, or the parts of a corpus that have utterances."""
    selection: Selection | None
    """What is selected of the only cache; None for everything."""

    def __iter__(self) -> Iterator[tuple[Cache, Selection]]:
        return ((part, self.selection or select(part, None, None)) for part in self.parts)

    @property
    def names(self) -> list[str]:
        """The groups' names; without groups, a single empty name."""
        return [""] if self.selection is None else self.selection.names


def select_parts(cache: Cache, manifest: str | Path | Manifest | None, by: str | None) -> SelectedParts:
    """What `select` selects of a cache, or all utterances of a corpus, for which an ArgumentError refuses a manifest
    and `by`."""
    if not isinstance(cache, Corpus):
        return SelectedParts([cache], select(cache, manifest, by))
    if manifest is not None or by is not None:
        raise ArgumentError("statistics of a corpus are of all its utterances: for a manifest, name one of its parts")
    parts = [part for part in map(cache.part, cache.parts) if len(part)]
    if not parts:
        raise StoreError(f"{cache.version.path}: holds no utterances")
    return SelectedParts(parts, None)


def select(cache: Cache, manifest: str | Path | Manifest | None, by: str | None) -> Selection:
    """The utterances of a manifest, or all of a cache; in groups by a column of the manifest, or in a single group.

    Raises ManifestError if the manifest cannot be read, has faults, or no such column, or the cache has the features of
    another row under an id; MissingItemError if the cache lacks utterances; StoreError if there are none."""
    if manifest is None:
        if by is not None:
            raise ManifestError(f"to group by {by!r} takes a manifest, whose column that is")
        positions = np.arange(len(cache))
    else:
        if not isinstance(manifest, Manifest):
            manifest = read_manifest(manifest, audio=False, carry=by is not None)
        manifest = expand(manifest, copies_of(cache.config))  # the copies that training uses
        rows = RowKeys.of(manifest)
        status = join_version(cache.version, cache.index, rows, manifest)
        if status.changed.any():
            raise ManifestError(
                f"{describe_changed(manifest, rows, cache.version, cache.index, status)}; or a manifest without paths, "
                "to go by ids alone"
            )
        positions = status.positions
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
    number_of = {name: number for number, name in enumerate(names)}
    return Selection(positions, np.fromiter((number_of[name] for name in column), np.int64, len(column)), names)


def pieces_by_shard(index: Index, selection: Selection, dims: int) -> Iterator[ShardPieces]:
    """All pieces of the utterances, shard by shard, in portions of about a million values, `dims` in each frame."""
    max_frames = max(_VALUES_AT_ONCE // dims, PIECE_FRAMES)
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
        cuts = np.flatnonzero(np.diff((counts.cumsum() - counts) // max_frames)) + 1
        for part in zip(*(np.split(column, cuts) for column in columns), strict=True):
            yield ShardPieces(number, *part)


def for_each(
    all_pieces: Iterator[ShardPieces],
    work: Callable[[ShardPieces], object],
    threads: int,
    report: Callable[[int], object],
) -> None:
    """Call `work` for all pieces in threads, until one call raises; `report` is called with the frames of each call."""
    waiting: deque[tuple[Future[object], int]] = deque()

    def finish_first() -> None:
        future, frames = waiting.popleft()
        future.result()
        report(frames)

    with ThreadPoolExecutor(threads) as pool:
        try:
            for pieces in all_pieces:
                if len(waiting) == _WAITING * threads:
                    finish_first()
                waiting.append((pool.submit(work, pieces), int(pieces.counts.sum())))
            while waiting:
                finish_first()
        finally:
            pool.shutdown(cancel_futures=True)
