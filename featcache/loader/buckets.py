"""One epoch's batches of utterances of similar length, as flat arrays, dealt to the ranks of a job.

The utterances are sorted by their lengths, each stretched at random by up to `SPREAD`, and the sorted row is cut
into batches. So utterances of similar length share a batch, in new combinations in each epoch. Batches are dealt in
rounds, one to each rank; since a round is cut from one piece, its batches are similar in length, and no rank waits for
another.
The rounds come in random order.

Everything is a pure function of its arguments, the same on every machine: the random numbers are PCG64's raw ones,
seeded by a SeedSequence, which numpy has promised not to change (NEP 19; `Generator.permutation` and its like have no
such promise), and the arithmetic is of integers and of single IEEE operations.

What is computed of each utterance is computed in chunks, so that sorting takes the most memory: some 18 bytes of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPREAD", "Batches", "Rules", "make_batches"]

SPREAD = 1 / 32
"""How much longer than it is an utterance may count as, where it finds its place among the others."""

_CHUNK = 1 << 16


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
    order = _sorted(lengths, positions, random if rules.shuffle else None)
    if rules.drop_last and rules.max_frames is None and rules.batch_size is not None:
        order = _without(order, len(order) % rules.batch_size, random if rules.shuffle else None)
    sizes = _sizes(lengths, order, rules)
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
    return Batches(order, starts, ends)


def _sorted(
    lengths: NDArray[Any], positions: NDArray[np.int64] | None, random: np.random.PCG64 | None
) -> NDArray[np.int64]:
    """Positions (of these), the longest first; with `random`, each stretched at random.

    Keys of 16 bits are sorted in one pass over memory: the floats from 1 to 2³², to a part in 2,048.
    """
    count = len(lengths if positions is None else positions)
    keys = np.empty(count, np.uint16)
    for first in range(0, count, _CHUNK):
        chunk = slice(first, first + _CHUNK)
        stretched = np.maximum(lengths[chunk if positions is None else positions[chunk]], 1).astype(np.float32)
        if random is not None:
            drawn = (random.random_raw(len(stretched)) >> 40).astype(np.float32) / (1 << 24)
            stretched *= 1 + np.float32(SPREAD) * drawn
        keys[chunk] = ~((stretched.view(np.uint32) - np.float32(1).view(np.uint32)) >> 12).astype(np.uint16)
    order = np.argsort(keys, kind="stable")
    return order if positions is None else positions[order]


def _sizes(lengths: NDArray[Any], order: NDArray[np.int64], rules: Rules) -> NDArray[np.int64]:
    """How many utterances each batch takes in this order, in which lengths roughly fall, as many as it may.

    int64 `[batches]`.
    """
    starts = [np.arange(0)]
    start = 0
    for end, rows in reversed(list(_rows_from_the_end(lengths, order, rules))):
        if start < end:
            starts.append(np.arange(start, end, rows))
            start = int(starts[-1][-1] + rows)
    begins = np.concatenate(starts)
    return np.append(begins[1:], len(order)) - begins if len(order) else begins


def _rows_from_the_end(lengths: NDArray[Any], order: NDArray[np.int64], rules: Rules) -> Iterator[tuple[int, int]]:
    """How many rows a batch may have that begins before an end, and not before the next end to be yielded."""
    most = len(order) if rules.batch_size is None else rules.batch_size
    if rules.max_frames is None:
        yield len(order), most
        return
    longest, last = 1, 0
    for first in reversed(range(0, len(order), _CHUNK)):
        backwards = lengths[order[first : first + _CHUNK]][::-1]
        longest_after = np.maximum(np.maximum.accumulate(backwards), longest)  # of a batch that begins there
        rows = np.minimum(rules.max_frames // longest_after, most)
        for at in np.flatnonzero(np.diff(rows, prepend=last)).tolist():
            yield first + len(rows) - at, int(rows[at])
        longest, last = int(longest_after[-1]), int(rows[-1])


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
