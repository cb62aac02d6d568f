"""The batches of an epoch: utterances of similar length together, dealt to ranks; a pure function, without torch.

The utterances are sorted by their lengths, each stretched at random by up to `SPREAD`, and cut into batches in this
order. So utterances of similar length share a batch, in new combinations in each epoch. Batches are dealt in rounds,
one to each rank; since a round is cut from neighbours in the order, its batches are similar in length, and no rank
waits for another. The rounds come in random order.

With windows, the shards are shuffled and cut into windows of a few, and all this is done for one window after the
other: an epoch then needs the shards of one window at a time, and each of them once.

`make_batches` is the same on every machine: the random numbers are PCG64's raw ones, seeded by a SeedSequence, which
numpy has promised not to change (NEP 19; `Generator.permutation` and its like have no such promise), and the arithmetic
is of integers and of single IEEE operations. What it computes for each utterance, it computes in chunks, so that
sorting takes the most memory: some 18 bytes for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from featcache.errors import MOST_COUNTED, ArgumentError, require_int

SPREAD = 1 / 32
"""How much longer than it is an utterance may count as when the utterances are sorted."""

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Rules:
    """How batches are made: the arguments of `BucketBatchSampler` that are the same for all ranks, checked."""

    max_frames: int | None
    batch_size: int | None
    shuffle: bool
    seed: int
    world_size: int
    drop_last: bool
    shards_in_memory: int | None = None

    def __post_init__(self) -> None:
        if self.max_frames is None and self.batch_size is None:
            raise ArgumentError("batches have no limit: give max_frames, batch_size or both")
        limits = ("max_frames", "batch_size", "shards_in_memory")  # each of which may be None
        counts: list[tuple[str, int, int | None]] = [(limit, 1, MOST_COUNTED) for limit in limits]
        for name, least, most in (*counts, ("seed", 0, None), ("world_size", 1, 1 << 20)):
            value = getattr(self, name)
            if value is not None or name not in limits:
                object.__setattr__(self, name, require_int(name, value, least, most))
        for name in ("shuffle", "drop_last"):
            object.__setattr__(self, name, bool(getattr(self, name)))


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, or of what is left of one."""

    order: NDArray[np.int64]
    """The positions of utterances, int64 `[utterances]`; a batch is a range of this."""
    starts: NDArray[np.int64]
    """Where each batch begins in `order`; int64 `[rounds, world_size]`."""
    ends: NDArray[np.int64]
    """Where each batch ends in `order`; int64 `[rounds, world_size]`."""
    windows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The round with which each window of shards begins, but the first; int64 `[windows - 1]`."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """The batches of some parts, one after the other; there is at least one."""
        before = np.cumsum([0, *(len(part.order) for part in parts)])
        return cls(
            np.concatenate([part.order for part in parts]),
            np.concatenate([part.starts + first for part, first in zip(parts, before[:-1], strict=True)]),
            np.concatenate([part.ends + first for part, first in zip(parts, before[:-1], strict=True)]),
            np.cumsum([len(part) for part in parts])[:-1],
        )

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, number: int, rank: int) -> list[int]:
        """The positions of a rank's batch in one round."""
        positions: list[int] = self.order[self.starts[number, rank] : self.ends[number, rank]].tolist()
        return positions

    def window(self, number: int) -> int:
        """Which window of shards the round of this number is of; they rise."""
        return int(np.searchsorted(self.windows, number, side="right"))

    def after(self, rounds: int) -> NDArray[np.int64]:
        """The positions of the utterances of all rounds but the first ones, sorted."""
        ranges = zip(self.starts[rounds:].ravel().tolist(), self.ends[rounds:].ravel().tolist(), strict=True)
        batches = [self.order[start:end] for start, end in ranges]
        return np.sort(np.concatenate(batches)) if batches else self.order[:0]


def make_batches(
    lengths: NDArray[Any],
    positions: NDArray[np.int64] | None,
    rules: Rules,
    epoch: int,
    shards: NDArray[Any] | None = None,
) -> Batches:
    """Make an epoch's batches.

    Args:
        lengths: The lengths of all utterances, in frames; integers `[utterances]`. None is longer than
            `rules.max_frames`.
        positions: The positions of the utterances that are to be in the batches; all of them by default.
        epoch: The epoch; with `rules.shuffle`, each has other batches.
        shards: The number of each utterance's shard, from 0, integers `[utterances]`; with `rules.shards_in_memory`.
    """
    random = np.random.PCG64(np.random.SeedSequence([rules.seed, epoch]))
    if shards is None or rules.shards_in_memory is None:
        return _make_batches(lengths, positions, rules, random)
    parts: list[Batches] = []
    for number, inside in enumerate(
        _windows(shards, positions, rules.shards_in_memory, random if rules.shuffle else None)
    ):
        if len(inside) or not parts:
            own = np.random.PCG64(np.random.SeedSequence([rules.seed, epoch, number]))
            parts.append(_make_batches(lengths, inside, rules, own))
    return Batches.joined(parts)


def _windows(
    shards: NDArray[Any], positions: NDArray[np.int64] | None, most: int, random: np.random.PCG64 | None
) -> Iterator[NDArray[np.int64]]:
    """Positions by window: each has up to `most` shards, as evenly as may be, and with `random` other ones each time.

    Which shards a window has does not depend on the positions, so that what is left of an epoch has the same windows.
    """
    there = np.flatnonzero(np.bincount(shards))
    shuffled = there if random is None else there[np.argsort(random.random_raw(len(there)), kind="stable")]
    windows = np.array_split(shuffled, -(-len(there) // most))
    window_of = np.empty(int(there[-1]) + 1, np.int64)
    for number, inside in enumerate(windows):
        window_of[inside] = number
    if positions is None:
        positions = np.arange(len(shards))
    of_each = window_of[shards[positions]]
    order = np.argsort(of_each, kind="stable")
    ends = np.searchsorted(of_each[order], np.arange(len(windows)), side="right")
    return iter(np.split(positions[order], ends[:-1]))


def _make_batches(
    lengths: NDArray[Any], positions: NDArray[np.int64] | None, rules: Rules, random: np.random.PCG64
) -> Batches:
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
    """The positions sorted by length, the longest first; with `random`, each length is stretched at random.

    Keys of 16 bits are sorted in one pass over memory: the floats from 1 to 2³², to a part in 2,048."""
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
    """How many utterances each batch takes, as many as it may, in an order of falling lengths, int64 `[batches]`."""
    starts = [np.arange(0)]
    start = 0
    for end, rows in reversed(list(_rows_from_the_end(lengths, order, rules))):
        if start < end:
            starts.append(np.arange(start, end, rows))
            start = int(starts[-1][-1] + rows)
    begins = np.concatenate(starts)
    return np.append(begins[1:], len(order)) - begins if len(order) else begins


def _rows_from_the_end(lengths: NDArray[Any], order: NDArray[np.int64], rules: Rules) -> Iterator[tuple[int, int]]:
    """Pairs (end, rows): a batch that begins before `end`, and not before the next end, may have so many rows."""
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
    """Make more batches of the same utterances, halving the largest; empty ones if all have one row."""
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
