"""Selects utterances for statistics, cuts them into pieces, and reads these in threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, ManifestError, StoreError, did_you_mean, listing
from featcache.loader.cache import Cache
from featcache.loader.choices import Choices
from featcache.loader.corpus import Corpus
from featcache.loader.utterances import find_utterances, versions_of
from featcache.manifest.copies import copies_of
from featcache.manifest.read import read_manifest
from featcache.manifest.utterances import Manifest
from featcache.spec import Ints

PIECE_FRAMES = 256

_VALUES_AT_ONCE = 1 << 20
_AT_ONCE = 32  # `ShardPieces` in memory for each thread


@dataclass(frozen=True)
class ShardPieces:
    """Pieces of one shard, in its order: up to 256 frames each, counted from an utterance's
    beginning. Arrays are int64 `[pieces]`."""

    cache: Cache
    shard: int
    starts: Ints
    """The first frame of each piece in the shard's features."""
    counts: Ints
    """The number of frames of each piece."""
    positions: Ints
    """The positions of the pieces' utterances in the index."""
    groups: Ints
    """The numbers of the pieces' groups."""

    @property
    def first(self) -> int:
        """The first frame of the first piece in the shard's features."""
        return int(self.starts[0])

    def read(self) -> NDArray[Any]:
        """Read the shard's features from the first piece to the end of the last, `[frames,
        dims]`, read-only. Raises DamagedError if the shard is damaged."""
        if self.cache.check:
            begins = self.starts == self.cache.index.first_frame[self.positions]
            for position in self.positions[begins].tolist():
                self.cache.item(position, raw=True)
        end = int(self.starts[-1] + self.counts[-1])
        frames = self.cache.shard_frames(self.shard, self.first, end - self.first)
        return frames.reshape(len(frames), -1)


@dataclass(frozen=True)
class Selection:
    """The utterances of statistics, in groups. Iterating gives each part with the positions
    in its index and the groups' numbers, int64 `[utterances]`."""

    parts: list[Cache]
    """One cache, or the parts of a corpus that have utterances."""
    positions: Ints | None = None
    """The positions in the only cache; None for all utterances of all parts."""
    groups: Ints | None = None
    """The numbers of the groups; None for a single group."""
    names: Sequence[str] = ("",)
    """The groups' names, sorted."""

    def __iter__(self) -> Iterator[tuple[Cache, Ints, Ints]]:
        for part in self.parts:
            positions = np.arange(len(part)) if self.positions is None else self.positions
            groups = np.zeros(len(positions), np.int64) if self.groups is None else self.groups
            yield part, positions, groups

    def frames_and_utterances(self) -> tuple[Ints, Ints]:
        """Count the frames and utterances of each group, int64 `[groups]`."""
        frames, utterances = np.zeros((2, len(self.names)), np.int64)
        for part, positions, groups in self:
            np.add.at(frames, groups, part.lengths[positions])
            utterances += np.bincount(groups, minlength=len(utterances))
        return frames, utterances

    def for_each(
        self, work: Callable[[ShardPieces], object], threads: int, report: Callable[[int], object]
    ) -> None:
        """Call `work` for all pieces, in threads, until one call raises; `report` is
        called with the frames of each."""
        pending = chain.from_iterable(starmap(pieces_by_shard, self))
        with ThreadPoolExecutor(threads) as pool:
            while batch := list(islice(pending, _AT_ONCE * threads)):
                # an error cancels those that wait
                for pieces, _ in zip(batch, pool.map(work, batch), strict=True):
                    report(int(pieces.counts.sum()))


def parts_of(cache: Cache) -> list[Cache]:
    """List the caches of a corpus's parts, or the cache alone."""
    if isinstance(cache, Corpus):
        return [cache.part(name) for name in cache.parts]
    return [cache]


def select(
    cache: Cache, manifest: str | Path | Manifest | Ints | None, by: str | None
) -> Selection:
    """Select the utterances of a manifest, those at some positions, or all of a cache; in
    groups by a column of the manifest, or in a single group. Raises as `moments` does."""
    if isinstance(cache, Corpus) and (manifest is not None or by is not None):
        what = "statistics of a corpus are of all its utterances"
        raise ArgumentError(f"{what}: for a manifest, name one of its parts")
    if isinstance(manifest, np.ndarray):
        chosen = Selection([cache], manifest)
    elif manifest is not None:
        chosen = _of_manifest(cache, manifest, by)
    elif by is not None:
        raise ManifestError(f"to group by {by!r} takes a manifest with that column")
    else:
        chosen = Selection([part for part in parts_of(cache) if len(part)])
    if not any(part.lengths[positions].any() for part, positions, _ in chosen):
        raise StoreError(f"{cache.version.path}: holds no utterances with frames")
    return chosen


def _of_manifest(cache: Cache, manifest: str | Path | Manifest, by: str | None) -> Selection:
    if not isinstance(manifest, Manifest):
        manifest = read_manifest(manifest, audio=False, carry=by is not None)
    utterances, _ = find_utterances(versions_of(cache, None, 0), manifest, Choices(columns=()))
    positions = utterances.versions[0].positions
    assert positions is not None  # there is a manifest
    _, firsts = np.unique(positions, return_index=True)  # a clip may have several rows
    if by is None:
        return Selection([cache], positions[firsts])
    column = manifest.columns.get(by)
    if column is None and by == "path" and len(manifest.paths.blob):
        column = manifest.paths
    if column is None:
        columns = listing(map(repr, manifest.columns)) or "none but id"
        meant = did_you_mean(by, manifest.columns)
        raise ManifestError(f"{manifest.source}: has no column {by!r}{meant}; it has {columns}")
    names = sorted(set(column))
    numbers = {name: number for number, name in enumerate(names)}
    groups = np.fromiter(map(numbers.__getitem__, column), np.int64, len(column))
    groups = np.repeat(groups, len(copies_of(cache.config)))
    pairs = np.unique(np.stack([positions, groups]), axis=1)
    if pairs.shape[1] > len(firsts):
        raise ManifestError(f"{manifest.source}: rows of one clip have several values of {by!r}")
    return Selection([cache], positions[firsts], groups[firsts], names)


def stretches(starts: Ints, counts: Ints) -> Ints:
    """Return the numbers in stretches, one after the other, int64: 3, 4, 9 for the starts 3
    and 9 and the counts 2 and 1."""
    before = counts.cumsum() - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def pieces_by_shard(cache: Cache, positions: Ints, groups: Ints) -> Iterator[ShardPieces]:
    """Cut the utterances into pieces, shard by shard, in portions of about a million values."""
    index = cache.index
    max_frames = max(_VALUES_AT_ONCE // math.prod(cache.spec.item_shape), PIECE_FRAMES)
    with_frames = index.num_frames[positions] > 0  # in a track, some may have none
    positions, groups = positions[with_frames], groups[with_frames]
    if not len(positions):
        return
    shard, first = index.shard[positions], index.first_frame[positions]
    order = np.lexsort((first, shard))
    numbers, bounds = np.unique(shard[order], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(order, bounds[1:]), strict=True):
        lengths = index.num_frames[positions[rows]]
        pieces = -(-lengths // PIECE_FRAMES)
        item = np.repeat(rows, pieces)
        begin = PIECE_FRAMES * stretches(np.zeros_like(pieces), pieces)
        counts = np.minimum(np.repeat(lengths, pieces) - begin, PIECE_FRAMES)
        columns = first[item] + begin, counts, positions[item], groups[item]
        cuts = np.flatnonzero(np.diff((counts.cumsum() - counts) // max_frames)) + 1
        for part in zip(*(np.split(column, cuts) for column in columns), strict=True):
            yield ShardPieces(cache, number, *part)
