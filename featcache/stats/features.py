"""Mean and variance of every dimension of a version's features: of all frames, and of each group of utterances.

One pass over the cache, in the order of its shards. An utterance is cut into pieces of 256 frames, counted from its own
beginning; of each piece, the sums of x - c and of (x - c)² are taken in float64, where c is about the mean; and these
are added without any rounding (`featcache.stats.exact`). So the same utterances give the same bits, however they are
spread over shards, in whatever order they are read, and with any number of threads.

The shift c is for the variance of features whose mean is far from zero, which would lose its digits (Chan, Golub and
LeVeque 1983, "Algorithms for computing the sample variance", The American Statistician 37). It is the mean of the
beginnings of a few utterances, taken in the order of their ids' hashes, so that it is always the same too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.loader import Cache
from featcache.manifest import Manifest
from featcache.quantize import dequantize_array
from featcache.stats.exact import LOWEST, ExactSums, in_units
from featcache.stats.pieces import PIECE_FRAMES, Selection, Task, run, select, tasks
from featcache.stats.result import Stats

_BLOCK_VALUES = 1 << 15  # 256 kB as float64, which stay in a core's cache; torch takes no threads of its own for them
_BLOCK_COLUMNS = _BLOCK_VALUES // PIECE_FRAMES
_SHIFT_UTTERANCES = 16

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
        cache: of features, not of codes.
        manifest: whose utterances count; all of the cache's without one.
        by: a column of the manifest: statistics of each of its values, too.
        threads: to read and compute with. They change no bit.
        report: called now and then with how many more frames have been done.

    Raises:
        StoreError: the cache holds codes, no utterances, or NaN or infinity.
        ManifestError: the manifest cannot be read, has faults, or no column `by`.
        MissingItemError: it has utterances that the cache has not; names up to ten.
        DamagedError: a shard is damaged.
    """
    spec = cache.spec
    if spec.codebook_sizes or np.dtype(spec.dtype).kind != "f":
        raise StoreError(
            f"{cache.version.path}: holds codes, {spec.dtype}: they have no mean; featcache.stats.usage counts them"
        )
    selection = select(cache, manifest, by)
    summing = _Sums(cache)
    shift = _shift(summing, selection)
    sums, squares = (ExactSums(len(selection.names), len(shift)) for _ in range(2))
    adding = Lock()

    def work(task: Task) -> None:
        of_pieces = summing.sums(task, shift)
        with adding:
            sums.add(task.groups, of_pieces[0])
            squares.add(task.groups, of_pieces[1])

    run(work, tasks(cache.index, selection, len(shift)), threads, report)

    lengths = cache.lengths[selection.positions]
    frames = np.zeros(len(selection.names), np.int64)
    np.add.at(frames, selection.groups, lengths)
    of_groups = sums.totals(), squares.totals()
    of_all = [[[sum(column) for column in zip(*of_each, strict=True)]] for of_each in of_groups]
    mean, variance = _finish(of_all[0], of_all[1], [int(frames.sum())], shift)
    group_mean, group_variance = _finish(*of_groups, frames.tolist(), shift)
    shape = spec.item_shape
    stats = Stats(
        version=cache.version.path.name,
        fingerprint=cache.version.info.fingerprint,
        units=spec.units,
        frames=int(frames.sum()),
        utterances=len(selection.positions),
        mean=mean.reshape(shape),
        variance=variance.reshape(shape),
    )
    if by is None:
        return stats
    return replace(
        stats,
        by=by,
        groups=selection.names,
        group_frames=frames,
        group_utterances=np.bincount(selection.groups, minlength=len(frames)),
        group_mean=group_mean.reshape(-1, *shape),
        group_variance=group_variance.reshape(-1, *shape),
    )


def _shift(summing: _Sums, selection: Selection) -> Array:
    """About the mean of every dimension, a value of the features' dtype: float64 `[dims]`.

    Differences of float16 values fit into float64 whole, so that means of float16 features are exact to the last bit.
    """
    index = summing.cache.index
    selected = np.zeros(len(index), bool)
    selected[selection.positions] = True
    by_hash = index.by_hash[selected[index.by_hash]][:_SHIFT_UTTERANCES].astype(np.int64)
    total, frames = np.zeros(summing.columns), 0
    for position in by_hash:
        count = index.num_frames[position, None].clip(max=PIECE_FRAMES)
        task = Task(int(index.shard[position]), index.first_frame[position, None], count, position[None], count)
        total += summing.sums(task, np.zeros(summing.columns))[0][0]
        frames += int(count[0])
    return (total / frames).astype(summing.dtype).astype(np.float64)


class _Sums:
    """Sums pieces of a version's features, in any thread."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.columns = int(np.prod(cache.spec.item_shape))
        self.dtype = np.dtype(cache.spec.dtype)

    def sums(self, task: Task, shift: Array) -> tuple[Array, Array]:
        """The sums of x - shift and of (x - shift)² of each piece, float64 `[pieces, dims]`.

        Raises:
            StoreError: an utterance holds NaN or infinity.
        """
        features = task.read(self.cache)
        sums, squares = np.empty((2, len(task.starts), self.columns))
        with np.errstate(invalid="ignore"):
            for first in range(0, self.columns, _BLOCK_COLUMNS):
                columns = slice(first, first + _BLOCK_COLUMNS)
                width = len(shift[columns])
                blocks = _blocks(task, _BLOCK_VALUES // width)
                shifts = np.tile(shift[columns], (max(int(task.counts[block].sum()) for block in blocks), 1))
                for pieces in blocks:
                    offsets = task.starts[pieces] - task.starts[pieces.start]
                    first_row = int(task.starts[pieces.start]) - task.first
                    rows = slice(first_row, first_row + int(task.counts[pieces].sum()))
                    values = self._values(features[rows, columns], task, pieces, columns)
                    values -= shifts[: len(values)]  # in one loop, which a row at a time would not be
                    np.add.reduceat(values, offsets, axis=0, out=sums[pieces, columns])
                    np.square(values, out=values)
                    np.add.reduceat(values, offsets, axis=0, out=squares[pieces, columns])
        finite = np.isfinite(squares).all(axis=1)
        if not finite.all():
            utterance = self.cache.ids[int(task.positions[finite.argmin()])]
            raise StoreError(
                f"{utterance}: holds NaN or infinity in {self.cache.version.path}: `featcache verify` finds all such "
                "utterances"
            )
        return sums, squares

    def _values(self, stored: NDArray[Any], task: Task, pieces: slice, columns: slice) -> Array:
        """Stored frames as float64, an array of their own."""
        if self.cache.spec.is_quantized:
            parameters = self._parameters(task, pieces)[..., columns]
            stored = dequantize_array(stored, parameters[:, 0], parameters[:, 1])
        elif stored.dtype == np.float16:
            stored = torch.from_numpy(stored.copy()).float().numpy()  # ten times as fast as numpy
        return stored.astype(np.float64)

    def _parameters(self, task: Task, pieces: slice) -> NDArray[np.float32]:
        """Scale and offset of every frame, float32 `[frames, 2, dims]`."""
        of_pieces = self.cache.quantization(task.positions[pieces]).numpy()
        return np.repeat(of_pieces.reshape(len(of_pieces), 2, -1), task.counts[pieces], axis=0)


def _blocks(task: Task, max_frames: int) -> list[slice]:
    """Pieces that lie one behind the other, up to so many frames together."""
    ends = task.starts + task.counts
    block = (task.counts.cumsum() - 1) // max_frames
    cuts = np.flatnonzero((np.diff(block) > 0) | (ends[:-1] != task.starts[1:])) + 1
    bounds = [0, *cuts.tolist(), len(ends)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _finish(sums: list[list[int]], squares: list[list[int]], frames: list[int], shift: Array) -> tuple[Array, Array]:
    """Means and variances, float64 `[groups, dims]`, from exact sums about the shift: rounded once, at the end.

    With a unit of 2^-LOWEST, s = sum(x - c) and q = sum((x - c)²) of n frames,
    mean = c + s / n and variance = q / n - (s / n)².
    """
    mean, variance = np.empty((2, len(frames), len(shift)))
    centres = [in_units(centre) for centre in shift.tolist()]
    for group, n in enumerate(frames):
        for column, (centre, s, q) in enumerate(zip(centres, sums[group], squares[group], strict=True)):
            mean[group, column] = (centre * n + s) / (n << LOWEST)
            variance[group, column] = max((q * n << LOWEST) - s * s, 0) / (n * n << 2 * LOWEST)
    return mean, variance
