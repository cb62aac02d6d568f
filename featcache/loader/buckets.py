"""One epoch's batches of utterances of similar length, as flat arrays, dealt to the ranks of a job.

The utterances are sorted by their lengths, each stretched at random by up to `SPREAD`, and the sorted row is cut
into batches. So neighbours in length share a batch, other ones in each epoch. Batches are dealt in rounds: one to
each rank, and since a round is cut from one piece, its batches are alike in length, and no rank waits for another.
The rounds come in random order.

Everything is a pure function of its arguments, the same on every machine: the random numbers are PCG64's raw ones,
seeded by a SeedSequence, which numpy has promised not to change (NEP 19; `Generator.permutation` and its like have no
such promise), and the arithmetic is of integers and of single IEEE operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPREAD", "Batches", "Rules", "make_batches"]

SPREAD = 1 / 32
"""How much longer than it is an utterance may count as, where it finds its place among the others."""


@dataclass(frozen=True)
class Rules:
    """How batches are made; the arguments of `BucketBatchSampler`, which explains them, but for the rank."""

    max_frames: int | None
    batch_size: int | None
    shuffle: bool
    seed: int
    world_size: int
    drop_last: bool


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, or of what is left of one.

    Attributes:
        order: positions of utterances, int64 `[utterances]`; a batch is a range of it.
        starts: where each batch begins in it, int64 `[rounds, world_size]`.
        ends: and where it ends; an empty batch ends where it begins.
    """

    order: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, number: int, rank: int) -> list[int]:
        """What a rank gets in one round: positions."""
        positions: list[int] = self.order[self.starts[number, rank] : self.ends[number, rank]].tolist()
        return positions

    def after(self, rounds: int) -> NDArray[np.int64]:
        """The utterances of all rounds but the first ones: positions, sorted."""
        ranges = zip(self.starts[rounds:].ravel().tolist(), self.ends[rounds:].ravel().tolist(), strict=True)
        pieces = [self.order[start:end] for start, end in ranges]
        return np.sort(np.concatenate(pieces)) if pieces else self.order[:0]


def make_batches(lengths: NDArray[Any], positions: NDArray[np.int64] | None, rules: Rules, epoch: int) -> Batches:
    """Make an epoch's batches.

    Args:
        lengths: of all utterances, in frames; integers `[utterances]`. None is longer than `rules.max_frames`.
        positions: of those that are to be in the batches; all of them by default.
        rules: how batches are made.
        epoch: which one; another one has other batches, where `rules.shuffle`.
    """
    random = np.random.PCG64(np.random.SeedSequence([rules.seed, epoch]))
    chosen = lengths if positions is None else lengths[positions]
    order = _sorted(chosen, random if rules.shuffle else None)
    if rules.drop_last and rules.max_frames is None and rules.batch_size is not None:
        order = _without(order, len(order) % rules.batch_size, random if rules.shuffle else None)
    sizes = _sizes(chosen[order], rules)
    missing = -len(sizes) % rules.world_size
    if rules.drop_last and missing:
        left_over = len(sizes) % rules.world_size
        kept = _without(np.arange(len(sizes)), left_over, random if rules.shuffle else None)
        order = order[np.repeat(np.isin(np.arange(len(sizes)), kept), sizes)]
        sizes = sizes[kept]
    elif missing:
        sizes = _split(sizes, missing)
    ends = np.cumsum(sizes).reshape(-1, rules.world_size)
    starts = ends - sizes.reshape(ends.shape)
    if rules.shuffle and len(ends):
        keys = random.random_raw(len(ends))
        if (sizes == 0).any():
            keys[-1] = np.iinfo(np.uint64).max  # the round with empty batches stays the last
        rounds = np.argsort(keys, kind="stable")
        starts, ends = starts[rounds], ends[rounds]
    return Batches(order if positions is None else positions[order], starts, ends)


def _sorted(lengths: NDArray[Any], random: np.random.PCG64 | None) -> NDArray[np.int64]:
    """Indices of lengths, the longest first; with `random`, each stretched at random.

    Keys of 16 bits are sorted in one pass over memory: the floats from 1 to 2³², to a part in 2,048.
    """
    stretched = np.maximum(lengths, 1).astype(np.float32)
    if random is not None:
        stretched *= 1 + np.float32(SPREAD) * ((random.random_raw(len(lengths)) >> 40).astype(np.float32) / (1 << 24))
    keys = (stretched.view(np.uint32) - np.float32(1).view(np.uint32)) >> 12
    return np.argsort(~keys.astype(np.uint16), kind="stable")


def _sizes(lengths: NDArray[Any], rules: Rules) -> NDArray[np.int64]:
    """How many of these lengths, which roughly fall, each batch takes, as many as it may; int64 `[batches]`."""
    count = len(lengths)
    rows = np.full(count, count if rules.batch_size is None else rules.batch_size)
    if rules.max_frames is not None:
        longest = np.maximum.accumulate(lengths[::-1])[::-1]  # of all that follow: of a batch that begins here
        rows = np.minimum(rows, rules.max_frames // np.maximum(longest, 1))
    starts = [np.arange(0)]
    start = 0
    for end in np.append(np.flatnonzero(np.diff(rows)) + 1, count).tolist():
        if start < end:  # batches that begin between two ends have the same number of rows
            starts.append(np.arange(start, end, rows[start]))
            start = int(starts[-1][-1] + rows[start])
    begins = np.concatenate(starts)
    return np.append(begins[1:], count) - begins if count else begins


def _split(sizes: NDArray[np.int64], missing: int) -> NDArray[np.int64]:
    """Make more batches of the same utterances, halving the largest; empty ones, where all have one row."""
    while missing:
        halved = np.argsort(-sizes, kind="stable")[:missing]
        halved = halved[sizes[halved] > 1]
        if not len(halved):
            return np.append(sizes, np.zeros(missing, np.int64))
        halves = sizes[halved] // 2
        sizes = sizes.copy()
        sizes[halved] -= halves
        sizes = np.insert(sizes, halved + 1, halves)
        missing -= len(halved)
    return sizes


def _without(values: NDArray[np.int64], count: int, random: np.random.PCG64 | None) -> NDArray[np.int64]:
    """Leave out `count` neighbours, at a random place, or the last ones; the last is a neighbour of the first."""
    if not count:
        return values
    first = len(values) - count if random is None else int(random.random_raw()) % len(values)
    return np.delete(values, (first + np.arange(count)) % len(values))
