"""Mean and variance of every dimension of a version's features: of all frames, and of each group of utterances.

The cache is read in one pass, in the order of its shards. An utterance is cut into pieces of 256 frames, counted from
its own beginning. For each piece, the sums of x - c and of (x - c)² are computed in float64, where c is close to the
mean. These are added without any rounding (`ExactSums`). So the same utterances give the same bits, however they are
spread over shards, in whatever order they are read, and with any number of threads.

The shift c preserves the digits of the variance when the mean is far from zero (Chan, Golub and LeVeque 1983,
"Algorithms for computing the sample variance", The American Statistician 37). It is the mean of the beginnings of a few
utterances, chosen in the order of their ids' hashes, so that it is always the same too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.format.shard import dequantize_array
from featcache.loader.cache import Cache
from featcache.manifest import Manifest
from featcache.stats.pieces import PIECE_FRAMES, SelectedParts, ShardPieces, for_each, pieces_by_shard, select_parts
from featcache.stats.result import Stats

_BLOCK_VALUES = 1 << 15
"""Values that are summed at once: 256 kB as float64 stay in a core's cache, and torch starts no threads for them."""

_BLOCK_COLUMNS = _BLOCK_VALUES // PIECE_FRAMES
_SHIFT_UTTERANCES = 16

_PART_BITS = 32

LOWEST = 992
"""The last bit of any value is worth at least 2^-992."""

Array = NDArray[np.float64]


def moments(
    cache: Cache,
    manifest: str | Path | Manifest | None = None,
    *,
    by: str | None = None,
    threads: int = 1,
    report: Callable[[int], object] = lambda frames: None,
) -> Stats:
    """Mean and variance of every dimension of a version's features.

    Args:
        cache: A cache of features, not of codes; or a corpus of them.
        manifest: A manifest to whose utterances the statistics are limited; by default all of the cache's count.
        by: A column of the manifest; each of its values gets statistics too.
        threads: The number of threads to read and compute with; it does not change the result.
        report: A function that is called now and then with the number of frames that have been done since.

    Raises:
        StoreError: The cache holds codes, no utterances, or NaN or infinity.
        ManifestError: The manifest cannot be read, has faults, or no column `by`.
        MissingItemError: The manifest has utterances that the cache does not have; up to ten are listed.
        DamagedError: A shard is damaged.
    """
    spec = cache.spec
    if spec.codebook_sizes or np.dtype(spec.dtype).kind != "f":
        raise StoreError(
            f"{cache.version.path}: holds codes, {spec.dtype}: they have no mean; featcache.stats.usage counts them"
        )
    chosen = select_parts(cache, manifest, by)
    names = chosen.names
    shift = _shift(chosen)
    sums, squares = (ExactSums(len(names), len(shift)) for _ in range(2))
    adding = Lock()

    def add(summing: _PieceSums, pieces: ShardPieces) -> None:
        piece_sums, piece_squares = summing.sums(pieces, shift)
        with adding:
            sums.add(pieces.groups, piece_sums)
            squares.add(pieces.groups, piece_squares)

    frames, utterances = np.zeros((2, len(names)), np.int64)
    for part, selection in chosen:
        all_pieces = pieces_by_shard(part.index, selection, len(shift))
        for_each(all_pieces, partial(add, _PieceSums(part)), threads, report)
        np.add.at(frames, selection.groups, part.lengths[selection.positions])
        utterances += np.bincount(selection.groups, minlength=len(names))
    group_totals = sums.totals(), squares.totals()
    total, total_squares = ([[sum(column) for column in zip(*groups, strict=True)]] for groups in group_totals)
    mean, variance = _finish(total, total_squares, [int(frames.sum())], shift)
    group_mean, group_variance = _finish(*group_totals, frames.tolist(), shift)
    shape = spec.item_shape
    stats = Stats(
        version=cache.version.path.name,
        fingerprint=cache.version.info.fingerprint,
        units=spec.units,
        frames=int(frames.sum()),
        utterances=int(utterances.sum()),
        mean=mean.reshape(shape),
        variance=variance.reshape(shape),
    )
    if by is None:
        return stats
    return replace(
        stats,
        by=by,
        groups=names,
        group_frames=frames,
        group_utterances=utterances,
        group_mean=group_mean.reshape(-1, *shape),
        group_variance=group_variance.reshape(-1, *shape),
    )


def _shift(chosen: SelectedParts) -> Array:
    """A value close to the mean of every dimension that the features' dtype can hold: float64 `[dims]`. Differences of
    float16 values are exact in float64, so means of float16 features are exact to the last bit."""
    found: list[tuple[int, int, NDArray[np.int64]]] = []
    for number, (part, selection) in enumerate(chosen):
        selected = np.zeros(len(part.index), bool)
        selected[selection.positions] = True
        first = np.flatnonzero(selected[part.index.by_hash])[:_SHIFT_UTTERANCES]
        positions = part.index.by_hash[first].astype(np.int64)
        found += [(hash_, number, at) for hash_, at in zip(part.index.id_hash[first].tolist(), positions, strict=True)]
    first_ones = sorted(found, key=lambda one: one[:2])[:_SHIFT_UTTERANCES]
    summing = [_PieceSums(part) for part in chosen.parts]
    total, frames = np.zeros(summing[0].columns), 0
    for _, number, position in first_ones:
        index = chosen.parts[number].index
        count = index.num_frames[position, None].clip(max=PIECE_FRAMES)
        start = index.first_frame[position, None]
        beginning = ShardPieces(int(index.shard[position]), start, count, position[None], np.zeros(1, np.int64))
        total += summing[number].sums(beginning, np.zeros(len(total)))[0][0]
        frames += int(count[0])
    return (total / frames).astype(summing[0].dtype).astype(np.float64)


class _PieceSums:
    """Sums over pieces of a version's features; for several threads at once."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.columns = int(np.prod(cache.spec.item_shape))
        self.dtype = np.dtype(cache.spec.dtype)

    def sums(self, pieces: ShardPieces, shift: Array) -> tuple[Array, Array]:
        """The sums of x - shift and of (x - shift)² over each piece, float64 `[pieces, dims]`; a StoreError if an
        utterance holds NaN or infinity."""
        features = pieces.read(self.cache)
        sums, squares = np.empty((2, len(pieces.starts), self.columns))
        with np.errstate(invalid="ignore"):
            for first in range(0, self.columns, _BLOCK_COLUMNS):
                columns = slice(first, first + _BLOCK_COLUMNS)
                width = len(shift[columns])
                blocks = _blocks(pieces, _BLOCK_VALUES // width)
                shifts = np.tile(shift[columns], (max(int(pieces.counts[block].sum()) for block in blocks), 1))
                for block in blocks:
                    offsets = pieces.starts[block] - pieces.starts[block.start]
                    first_row = int(pieces.starts[block.start]) - pieces.first
                    rows = slice(first_row, first_row + int(pieces.counts[block].sum()))
                    values = self._values(features[rows, columns], pieces, block, columns)
                    values -= shifts[: len(values)]  # faster than broadcasting one row, which is a loop for each row
                    np.add.reduceat(values, offsets, axis=0, out=sums[block, columns])
                    np.square(values, out=values)
                    np.add.reduceat(values, offsets, axis=0, out=squares[block, columns])
        finite = np.isfinite(squares).all(axis=1)
        if not finite.all():
            utterance = self.cache.ids[int(pieces.positions[finite.argmin()])]
            raise StoreError(
                f"{utterance}: holds NaN or infinity in {self.cache.version.path}: `featcache verify` finds all such "
                "utterances"
            )
        return sums, squares

    def _values(self, stored: NDArray[Any], pieces: ShardPieces, block: slice, columns: slice) -> Array:
        """Stored frames as a new float64 array."""
        if self.cache.spec.is_quantized:
            of_pieces = self.cache.scales_and_offsets(pieces.positions[block])
            of_frames = np.repeat(of_pieces.reshape(len(of_pieces), 2, -1), pieces.counts[block], axis=0)[..., columns]
            stored = dequantize_array(stored, of_frames[:, 0], of_frames[:, 1])
        return stored.astype(np.float64)


def _blocks(pieces: ShardPieces, max_frames: int) -> list[slice]:
    """Slices of the pieces: each of adjacent pieces, of up to `max_frames` frames together."""
    ends = pieces.starts + pieces.counts
    numbers = (pieces.counts.cumsum() - 1) // max_frames
    cuts = np.flatnonzero((np.diff(numbers) > 0) | (ends[:-1] != pieces.starts[1:])) + 1
    bounds = [0, *cuts.tolist(), len(ends)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _finish(sums: list[list[int]], squares: list[list[int]], frames: list[int], shift: Array) -> tuple[Array, Array]:
    """Means and variances, float64 `[groups, dims]`, from exact sums: rounded once, at the end.

    With s = sum(x - c) and q = sum((x - c)²) over n frames, mean = c + s / n and variance = q / n - (s / n)²; here c, s
    and q are in units of 2^-LOWEST."""
    mean, variance = np.empty((2, len(frames), len(shift)))
    centres = [in_units(centre) for centre in shift.tolist()]
    for group, n in enumerate(frames):
        for column, (centre, s, q) in enumerate(zip(centres, sums[group], squares[group], strict=True)):
            mean[group, column] = (centre * n + s) / (n << LOWEST)
            variance[group, column] = max((q * n << LOWEST) - s * s, 0) / (n * n << 2 * LOWEST)
    return mean, variance


class ExactSums:
    """Sums of floats for each group and column, without rounding: their bits do not depend on the order of additions.

    A float64 is cut at fixed powers of two, every 32 bits, into whole numbers; those of each power are added as int64,
    which is exact. R. M. Neal calls this a small superaccumulator (2015, "Fast exact summation using small and large
    superaccumulators", arXiv:1505.05571). Parts are at most 2^32, so 2^31 of them can be added before one would
    overflow, and no carry is ever moved."""

    def __init__(self, groups: int, columns: int) -> None:
        self._shape = groups, columns
        self._parts: dict[int, NDArray[np.int64]] = {}  # part n counts units of 2^(32 n)

    def add(self, groups: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add values, float64 `[n, columns]`, zeros or of sizes from 2^-900 to 2^900, to the group of each row, int64
        `[n]`, n at most 2^21."""
        order = np.argsort(groups, kind="stable")
        starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
        targets, rest = groups[order][starts], values[order]
        number = (int(np.frexp(np.abs(rest).max())[1]) - 1) // _PART_BITS
        while rest.any():
            unit = 2.0 ** (_PART_BITS * number)
            multiples = np.rint(rest * (1 / unit))
            rest -= multiples * unit
            if number not in self._parts:
                self._parts[number] = np.zeros(self._shape, np.int64)
            self._parts[number][targets] += np.add.reduceat(multiples, starts, axis=0).astype(np.int64)
            number -= 1

    def totals(self) -> list[list[int]]:
        """The sums, `[groups][columns]`, in units of 2^-LOWEST."""
        groups, columns = self._shape
        flat = [0] * (groups * columns)
        for number, part in self._parts.items():
            shift = _PART_BITS * number + LOWEST
            flat = [total + (units << shift) for total, units in zip(flat, part.ravel().tolist(), strict=True)]
        return [flat[first : first + columns] for first in range(0, len(flat), columns)]


def in_units(value: float) -> int:
    """A float as a whole number of units of 2^-LOWEST."""
    numerator, denominator = value.as_integer_ratio()
    return numerator * ((1 << LOWEST) // denominator)
