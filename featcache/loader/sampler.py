"""The batches of an epoch: utterances of similar length together, shuffled, dealt to
ranks, resumed in the middle.

The utterances are sorted by their lengths, each stretched at random by up to `SPREAD`,
and cut into batches in this order: new combinations in each epoch. Batches are dealt in
rounds, one to each rank. A round is cut from neighbours in the order, so that no rank
waits for another. The rounds come in random order. With windows, the shards are shuffled
and cut into windows of a few, and all this is done for one window after the other.

`batches_of` is a pure function, and the same on every machine. Its random numbers are
PCG64's raw ones, seeded by a SeedSequence, which numpy has promised not to change (NEP
19; not so `Generator.permutation`). Its arithmetic is of integers and of single IEEE
operations. Sorting takes the most memory: some 18 bytes for each utterance."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from featcache.errors import MOST_COUNTED, ArgumentError, require_int
from featcache.spec import Ints

Random = np.random.PCG64 | None
"""Random numbers; None without shuffling."""

SPREAD = 1 / 32
"""The largest stretch of a length when the utterances are sorted."""

_CHUNK = 1 << 16
_MOST_SHARDS = 1 << 24

_NO_STATE = "this is not the state of a BucketBatchSampler: give what its state_dict returned"


class Batching(TypedDict, total=False):
    """The arguments of `BucketBatchSampler` that do not follow from the dataset."""

    max_frames: int | None
    batch_size: int | None
    shuffle: bool
    seed: int
    rank: int
    world_size: int
    drop_last: bool
    shards_in_memory: int | None


class BucketBatchSampler(Sampler[list[int]]):
    """Batches of utterances of similar length, as lists of positions; torch's DataLoader
    takes it as `batch_sampler`.

    Every utterance is in exactly one batch of an epoch, over all ranks, and every rank gets
    the same number of batches. If needed, the batches with the most rows are halved. If
    fewer utterances are left than ranks, the last batch of some ranks is the empty list. In
    each step, the ranks' batches are similar in length. The batches and their order are
    drawn again in each epoch, and depend only on the arguments and the epoch, on every
    machine.

    Args:
        lengths: The length of each utterance, in frames; integers `[utterances]`. int64
            is not copied. `dataset.lengths` also tells a state whose they are.
        shards: The number of each utterance's shard, from 0: `dataset.shards`. Needed
            with `shards_in_memory`.
        max_frames: The limit on a batch's frames with padding: rows × longest. An
            utterance without any counts as one.
        batch_size: The limit on the rows of a batch. At least one of the two limits must
            be given.
        shuffle: By default true. If false, the longest batches come first, in the same
            order in every epoch.
        seed: The seed of the order; not negative, by default 0.
        rank: The rank whose batches to yield, by default 0. All other arguments must be
            the same for all ranks.
        world_size: The number of ranks, by default 1.
        drop_last: Drop batches that do not make a whole round over the ranks, drawn in each
            epoch, instead of halving others; with `batch_size` alone, also utterances that
            do not make a whole batch.
        shards_in_memory: Take the utterances of that many shards at a time, drawn again in
            each epoch: for data that fits neither into memory nor into `copy_limit`. Then
            an epoch reads each shard once, and utterances of other shards do not share a
            batch. Rounds over the ranks, and dropped batches, belong to each window.

    Raises:
        ArgumentError: The arguments contradict each other, or utterances exceed
            `max_frames`; also a ValueError.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[Any] | torch.Tensor,
        *,
        shards: Sequence[int] | NDArray[Any] | None = None,
        max_frames: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        shards_in_memory: int | None = None,
    ) -> None:
        self.rank = require_int("rank", rank, 0)
        self.rules = Rules(
            max_frames, batch_size, shuffle, seed, world_size, drop_last, shards_in_memory
        )
        count = self.rules.world_size
        if self.rank >= count:
            raise ArgumentError(
                f"rank is {self.rank}; with world_size={count} ranks are 0 to {count - 1}"
            )
        self.lengths = _checked(lengths, self.rules.max_frames)
        self.shards = _checked_shards(shards, self.rules.shards_in_memory, len(self.lengths))
        self.rows_digest = getattr(lengths, "digest", "")
        self._pass = _Pass(self, 0)
        self.has_epoch = False

    def __len__(self) -> int:
        """Return the number of this rank's batches in the epoch, also before a resume."""
        return sum(rounds for _, rounds in self._pass.before) + len(self._pass.batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin with the epoch's first batch, or the first unseen one of a loaded state. Until
        its first batch is read, a pass follows `set_epoch` and `load_state_dict`."""
        # With workers, torch's DataLoader asks for two iterators, and uses the second.
        last, self._pass = self._pass, _Pass(self, self.epoch)
        if not last.has_begun:
            self._pass.restart(last.epoch, last.before, last.first)
        if self._pass.before == last.before:
            self._pass.made = last.batches
        return self._pass

    def __repr__(self) -> str:
        rules = ", ".join(f"{name}={value}" for name, value in asdict(self.rules).items())
        return (
            f"BucketBatchSampler(<{len(self.lengths):,} lengths>, {rules}, "
            f"rank={self.rank}) in epoch {self.epoch}"
        )

    @property
    def sampler(self) -> BucketBatchSampler:
        """The sampler itself, on which Lightning and Fabric call `set_epoch`."""
        return self

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._pass.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; setting the current one keeps a loaded state. Random crops follow
        from then on, also in torch's DataLoader."""
        self.has_epoch = True
        epoch = require_int("epoch", epoch, 0)
        if epoch != self.epoch:
            self._turn_to(epoch, [], 0)

    @property
    def given(self) -> int:
        """The number of batches that this rank has received in the current pass."""
        return self._pass.done - self._pass.first

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return the state of the epoch, of plain numbers and text. If all ranks are at the
        same step, as in synchronous training, it is the state of each of them.

        Args:
            consumed: The number of batches of this pass that training has consumed; by default
                all that were yielded. A DataLoader's workers take more than training. Raises
                ArgumentError if the pass has yielded fewer.
        """
        now = self._pass
        consumed = self.given if consumed is None else require_int("consumed", consumed, 0)
        if consumed > self.given:
            raise ArgumentError(
                f"consumed is {consumed}; this pass has given {self.given} batches to this rank"
            )
        seen = [*now.before, (self.rules, now.first + consumed)]
        parts = [{"rules": asdict(rules), "rounds": rounds} for rules, rounds in seen]
        return {"rows": self._digest, "epoch": now.epoch, "parts": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass yield what was left when the state was taken: exactly the
        batches that would have followed, if all arguments except the rank are the same.
        With another `world_size` or `max_frames`, new batches are made of the remaining
        utterances. Raises ArgumentError if `state` is not such a sampler's, or is for other
        utterances."""
        try:
            epoch = require_int("epoch", state["epoch"], 0)
            parts = [
                (Rules(**part["rules"]), require_int("rounds", part["rounds"], 0))
                for part in state["parts"]
            ]
            digest = state["rows"] if "rows" in state else state["lengths"]
        except (KeyError, TypeError, AttributeError, ArgumentError) as error:
            raise ArgumentError(_NO_STATE) from error
        if "rows" not in state:
            raise ArgumentError(
                f"the state is of an earlier release, which did not record its rows: "
                f"begin the epoch again, with set_epoch({epoch})"
            )
        if digest != self._digest:
            raise ArgumentError(other_rows(len(self.lengths)))
        first = parts.pop()[1] if parts and parts[-1][0] == self.rules else 0
        self._turn_to(epoch, parts, first)
        self.has_epoch = True

    def _turn_to(self, epoch: int, before: list[tuple[Rules, int]], first: int) -> None:
        if self._pass.has_begun:  # otherwise, Lightning may have the pass already
            self._pass = _Pass(self, epoch)
        self._pass.restart(epoch, before, first)

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(self.lengths.astype("<i8", copy=False).data)
        digest.update(self.rows_digest.encode())
        if self.shards is not None:
            digest.update(self.shards.astype("<u4", copy=False).data)
        return digest.hexdigest()


class Rows(list[int]):
    """The rows of a batch, with the epoch of its pass."""

    def __init__(self, rows: Iterable[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch


class RowLengths(np.ndarray[Any, np.dtype[np.int64]]):
    """The lengths of a dataset's rows, in frames, int64 `[rows]`, with the digest of the
    rows. A selection or a sum has no digest."""

    digest = ""

    @classmethod
    def of(cls, lengths: Ints, digest: str) -> RowLengths:
        """Return lengths with the digest of their rows."""
        known = lengths.view(cls)
        known.digest = digest
        return known

    def __getitem__(self, at: Any) -> Any:
        return np.asarray(self)[at]

    def __reduce__(self) -> tuple[Any, ...]:
        return RowLengths.of, (np.asarray(self), self.digest)


class _Pass(Iterator[list[int]]):
    """A pass through an epoch, or through the rest of it."""

    def __init__(self, sampler: BucketBatchSampler, epoch: int) -> None:
        self.sampler = sampler
        self.restart(epoch, [], 0)

    def restart(self, epoch: int, before: list[tuple[Rules, int]], first: int) -> None:
        """Begin at the round `first` of an epoch."""
        self.epoch = epoch
        self.before = before
        """For each part of the epoch that was seen under other rules, these rules and the
        number of its rounds."""
        self.first = self.done = first
        self.has_begun = False
        self.made: Batches | None = None

    def __next__(self) -> list[int]:
        self.has_begun = True
        if self.done >= len(self.batches):
            raise StopIteration
        self.done += 1
        rows = self.batches.batch(self.done - 1, self.sampler.rank)
        return Rows(rows, self.epoch) if self.sampler.has_epoch else rows

    @property
    def has_windows(self) -> bool:
        """True if the utterances of a few shards are taken at a time."""
        return self.sampler.shards is not None

    @property
    def window(self) -> int:
        """The number of the latest batch's window of shards."""
        return int(self.batches.windows[self.done - 1])

    @property
    def batches(self) -> Batches:
        """The batches under the current rules, for all ranks."""
        if self.made is None:
            remaining = None
            for rules, rounds in self.before:
                remaining = self._make(rules, remaining, rounds).after(rounds)
            self.made = self._make(self.sampler.rules, remaining, self.first)
        return self.made

    def _make(self, rules: Rules, positions: Ints | None, num_seen: int) -> Batches:
        """Make the epoch's batches. Raises ArgumentError if a state has seen more rounds."""
        batches = batches_of(
            self.sampler.lengths, positions, rules, self.epoch, self.sampler.shards
        )
        if num_seen > len(batches):
            raise ArgumentError(_NO_STATE)
        return batches


def other_rows(count: int) -> str:
    """Return the message about a state over other rows."""
    return (
        f"the state is for other utterances than these {count:,}, or for other shards: resume "
        "with the same dataset, in the same order, or begin the epoch again"
    )


def _checked(lengths: Sequence[int] | NDArray[Any] | torch.Tensor, max_frames: int | None) -> Ints:
    array = np.asarray(lengths)
    if not array.size:
        raise ArgumentError("lengths is empty: there are no utterances to make batches of")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ArgumentError(
            f"lengths is {array.dtype} {list(array.shape)}: it must be one integer for each "
            "utterance, in frames, such as dataset.lengths"
        )
    array = np.ascontiguousarray(array, np.int64)
    if array.min() < 0:
        raise ArgumentError(
            f"lengths has {array.min()} at {array.argmin()}: lengths cannot be negative"
        )
    if max_frames is not None and array.max() > max_frames:
        raise ArgumentError(
            f"max_frames is {max_frames}, and {(array > max_frames).sum():,} of {len(array):,} "
            f"utterances are longer: the longest has {array.max()} frames, at position "
            f"{array.argmax()}; raise it to that, or leave them out"
        )
    return array


def _checked_shards(
    shards: Sequence[int] | NDArray[Any] | None, most: int | None, count: int
) -> NDArray[Any] | None:
    if (shards is None) != (most is None):
        raise ArgumentError(
            "shards and shards_in_memory go together: give both, shards=dataset.shards, or neither"
        )
    if shards is None:
        return None
    array = np.asarray(shards)
    is_numbers = array.shape == (count,) and array.dtype.kind in "iu"
    if not is_numbers or array.min() < 0 or array.max() >= _MOST_SHARDS:
        raise ArgumentError(
            f"shards is {array.dtype} {list(array.shape)}: it must be the number of a shard, "
            f"from 0, for each of the {count:,} utterances, such as dataset.shards"
        )
    return np.ascontiguousarray(array, np.uint32)


@dataclass(frozen=True)
class Rules:
    """The checked arguments of `BucketBatchSampler` that are the same for all ranks."""

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
        values = vars(self)
        values["seed"] = require_int("seed", self.seed, 0)
        values["world_size"] = require_int("world_size", self.world_size, 1, 1 << 20)
        for name in ("max_frames", "batch_size", "shards_in_memory"):
            if values[name] is not None:
                values[name] = require_int(name, values[name], 1, MOST_COUNTED)
        values["shuffle"] = bool(self.shuffle)
        values["drop_last"] = bool(self.drop_last)


@dataclass(frozen=True)
class Batches:
    """The batches of an epoch, or of the rest of one."""

    order: Ints
    """The positions of utterances, int64 `[utterances]`; a batch is a range of this."""
    starts: Ints
    """The begin of each batch in `order`; int64 `[rounds, world_size]`."""
    ends: Ints
    """The end of each batch in `order`, of the same shape."""
    windows: Ints
    """The number of each round's window of shards, rising; int64 `[rounds]`."""

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, number: int, rank: int) -> list[int]:
        """Return the positions of a rank's batch in one round."""
        begin, end = self.starts[number, rank], self.ends[number, rank]
        positions: list[int] = self.order[begin:end].tolist()
        return positions

    def after(self, rounds: int) -> Ints:
        """Return the positions of the utterances behind the first rounds, sorted."""
        starts = self.starts[rounds:].ravel().tolist()
        ends = self.ends[rounds:].ravel().tolist()
        batches = [self.order[begin:end] for begin, end in zip(starts, ends, strict=True)]
        return np.sort(np.concatenate([self.order[:0], *batches]))


def batches_of(
    lengths: Ints, positions: Ints | None, rules: Rules, epoch: int, shards: NDArray[Any] | None
) -> Batches:
    """Make an epoch's batches of the utterances at `positions`, None for all. `lengths` and
    `shards` cover all utterances, integers `[utterances]`; `shards` with
    `rules.shards_in_memory`."""
    random = _random(rules, epoch)
    if shards is None or rules.shards_in_memory is None:
        return _make_batches(lengths, positions, rules, random)
    parts: list[tuple[Ints, Ints, Ints, Ints]] = []
    first = 0
    for number, inside in enumerate(_windows(shards, positions, rules.shards_in_memory, random)):
        part = _make_batches(lengths, inside, rules, _random(rules, epoch, number))
        windows = np.full(len(part), number)
        parts.append((part.order, part.starts + first, part.ends + first, windows))
        first += len(part.order)
    return Batches(*map(np.concatenate, zip(*parts, strict=True)))


def _random(rules: Rules, *numbers: int) -> Random:
    if not rules.shuffle:
        return None
    return np.random.PCG64(np.random.SeedSequence([rules.seed, *numbers]))


def _windows(
    shards: NDArray[Any], positions: Ints | None, most: int, random: Random
) -> Iterator[Ints]:
    """Cut positions into windows of up to `most` shards, as evenly as possible. The shards
    of a window do not depend on the positions: the rest of an epoch has the same windows."""
    numbers = np.flatnonzero(np.bincount(shards))
    num_windows = -(-len(numbers) // most)
    window_of = np.empty(int(numbers[-1]) + 1, np.int64)
    if random is not None:
        numbers = numbers[np.argsort(random.random_raw(len(numbers)), kind="stable")]
    for window, inside in enumerate(np.array_split(numbers, num_windows)):
        window_of[inside] = window
    positions = np.arange(len(shards)) if positions is None else positions
    windows = window_of[shards[positions]]
    order = np.argsort(windows, kind="stable")
    ends = np.searchsorted(windows[order], np.arange(num_windows), side="right")
    return iter(np.split(positions[order], ends[:-1]))


def _make_batches(lengths: Ints, positions: Ints | None, rules: Rules, random: Random) -> Batches:
    order = _sorted(lengths, positions, random)
    if rules.drop_last and rules.max_frames is None and rules.batch_size is not None:
        order = _without(order, len(order) % rules.batch_size, random)
    sizes = _sizes(lengths, order, rules)
    missing = -len(sizes) % rules.world_size
    if rules.drop_last and missing:
        kept = _without(np.arange(len(sizes)), len(sizes) % rules.world_size, random)
        order = order[np.repeat(np.isin(np.arange(len(sizes)), kept), sizes)]
        sizes = sizes[kept]
    elif missing:
        sizes = _split(sizes, missing)
    ends = np.cumsum(sizes).reshape(-1, rules.world_size)
    starts = ends - sizes.reshape(ends.shape)
    if random is not None and len(ends):
        keys = random.random_raw(len(ends))
        if (sizes == 0).any():
            keys[-1] = np.iinfo(np.uint64).max  # the round with empty batches stays the last
        rounds = np.argsort(keys, kind="stable")
        starts, ends = starts[rounds], ends[rounds]
    return Batches(order, starts, ends, windows=np.zeros(len(ends), np.int64))


def _sorted(lengths: Ints, positions: Ints | None, random: Random) -> Ints:
    """Sort the positions by length, the longest first; with `random`, each length is
    stretched. Keys of 16 bits are sorted in one pass over memory: the floats from 1 to
    2³², to a part in 2,048."""
    count = len(lengths if positions is None else positions)
    keys = np.empty(count, np.uint16)
    one = np.float32(1)
    for first in range(0, count, _CHUNK):
        chunk = slice(first, first + _CHUNK)
        frames = lengths[chunk] if positions is None else lengths[positions[chunk]]
        stretched = np.maximum(frames, 1).astype(np.float32)
        if random is not None:
            drawn = (random.random_raw(len(stretched)) >> 40).astype(np.float32) / (1 << 24)
            stretched *= 1 + np.float32(SPREAD) * drawn
        bits = stretched.view(np.uint32) - one.view(np.uint32)
        keys[chunk] = ~(bits >> 12).astype(np.uint16)
    order = np.argsort(keys, kind="stable")
    return order if positions is None else positions[order]


def _sizes(lengths: Ints, order: Ints, rules: Rules) -> Ints:
    """Return how many utterances each batch takes, at most, in an order of falling lengths."""
    most = len(order) if rules.batch_size is None else rules.batch_size
    # The most rows of a batch that begins at each place.
    rows: Ints = np.broadcast_to(most, len(order))
    if rules.max_frames is not None:
        rows = lengths[order].astype(np.int64, copy=False)  # overwritten by each step
        np.maximum.accumulate(rows[::-1], out=rows[::-1])  # the longest from there on
        np.floor_divide(rules.max_frames, np.maximum(rows, 1, out=rows), out=rows)
        np.minimum(rows, most, out=rows)
    changes = np.flatnonzero(rows[1:] != rows[:-1]) + 1
    begins = [np.arange(0)]
    begin = 0
    for end in [*changes.tolist(), len(order)]:
        if begin < end:
            begins.append(np.arange(begin, end, rows[begin]))
            begin = int(begins[-1][-1] + rows[begin])
    return np.diff(np.append(np.concatenate(begins), len(order)))


def _split(sizes: Ints, missing: int) -> Ints:
    """Make more batches by halving the largest; empty batches if all have one row."""
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


def _without(values: Ints, count: int, random: Random) -> Ints:
    """Leave out `count` neighbours in a circle, at a random place, or the last values."""
    if not count:
        return values
    first = len(values) - count if random is None else int(random.random_raw()) % len(values)
    return np.delete(values, (first + np.arange(count)) % len(values))
