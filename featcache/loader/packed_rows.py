"""The rows of an epoch, or of a mixture without an end: drawn and packed one window after
the other, dealt to ranks, resumed anywhere.

A window is made of the documents that the sources owe until its end, and of nothing else: no
document is held back for the next one. So a place in the sequence of rows is the begin of a
window, which is two numbers for each source, and the number of a row in it."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
from torch.utils.data import get_worker_info

from featcache.errors import MOST_COUNTED, ArgumentError, counted, listing, require_int
from featcache.loader.documents import Budget, Documents, Source
from featcache.loader.mixture import Mixture
from featcache.loader.packing import best_fit, in_balance
from featcache.loader.sampler import other_rows
from featcache.spec import Ints

_NO_STATE = "this is not the state of a PackedLoader: give what its state_dict returned"

_AT_ONCE = 64
"""The fewest utterances to draw from a source at once."""


class Share(NamedTuple):
    """The share of a source."""

    asked: float
    """The share that the weights give."""
    reached: float
    """The share in the rows so far, of all ranks; NaN before the first row."""
    amount: float
    """The amount in these rows, in the mixture's unit."""


@dataclass(frozen=True)
class Position:
    """A place in the sequence of rows."""

    epoch: int
    window: int
    """The number of windows before."""
    drawn: tuple[int, ...]
    """The utterances of each source that were drawn for the windows before."""
    amounts: tuple[int, ...]
    """Their amounts: tokens, or utterances."""
    row: int = 0
    """The rows of the window that were given."""


@dataclass(frozen=True)
class _Window:
    """The rows of a window."""

    documents: Documents
    rows: list[Ints]
    """The numbers of the documents in each row; none in an empty row."""
    amounts: Ints
    """What each row has of each source, `[rows, sources]`."""
    end: Position | None
    """The begin of the next window; None if there is none."""


class Batch(NamedTuple):
    """The documents of a batch of a rank."""

    documents: Documents
    row_of: Ints
    """The row of each, rising."""

    @classmethod
    def of(cls, rows: list[tuple[_Window, Ints]], window: _Window) -> Self:
        """Return the batch of some rows of windows; `window` is any window."""
        row_of = np.repeat(np.arange(len(rows)), [len(row) for _, row in rows])
        parts = [window.documents.take(np.arange(0))]
        for _, group in groupby(rows, lambda pair: id(pair[0])):
            pairs = [*group]
            numbers = np.concatenate([row for _, row in pairs])
            parts.append(pairs[0][0].documents.take(numbers))
        return cls(Documents.joined(parts), row_of)


class PackedRows:
    """The batches of a `PackedLoader`."""

    def __init__(
        self,
        mixture: Mixture,
        budget: Budget,
        *,
        rows: int,
        window: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self.mixture, self.budget = mixture, budget
        self.rows = require_int("rows", rows, 1, 1 << 20)
        self.window = require_int("window", window, 1, 1 << 20)
        self.seed = require_int("seed", seed, 0)
        self.world_size = require_int("world_size", world_size, 1, 1 << 20)
        self.rank = require_int("rank", rank, 0, self.world_size - 1)
        self.sources = [
            Source(number, dataset, budget)
            for number, dataset in enumerate(mixture.sources.values())
        ]
        for name, source in zip(mixture.sources, self.sources, strict=True):
            if budget.overflow == "error" and source.num_long:
                raise ArgumentError(
                    f"{counted(source.num_long, 'utterance')} of {name!r} are longer than a row's "
                    f"{budget.most:,} tokens; the longest has {source.longest:,}: raise tokens=, "
                    'or choose overflow="split" or "drop"'
                )
            if not source.tokens:
                raise ArgumentError(f"no utterance of {name!r} fits into {budget.most:,} tokens")
        self._kept = 1
        self._pass = _Pass(self, self._begin(0))

    def __iter__(self) -> Iterator[Batch]:
        """Begin where the epoch does, or at the place of a loaded state. Until its first batch
        is read, a pass follows `set_epoch` and `load_state_dict`."""
        last = self._pass
        position = self._begin(self.epoch) if last.has_begun else last.position
        self._pass = _Pass(self, position)
        return self._pass

    def __repr__(self) -> str:
        return f"PackedRows({self._rules}, rank={self.rank}, world_size={self.world_size})"

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._pass.epoch

    @property
    def given(self) -> int:
        """The number of batches that this rank has received in the current pass."""
        return self._pass.given

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; setting the current one keeps the place."""
        if require_int("epoch", epoch, 0, MOST_COUNTED) != self.epoch:
            self._turn_to(self._begin(epoch))

    def keep(self, count: int) -> None:
        """Remember the places behind so many of the latest batches, for `position`."""
        self._kept = count
        self._pass.restart(self._pass.position)

    def _turn_to(self, position: Position) -> None:
        """Let the next pass begin at a place."""
        if self._pass.has_begun:  # otherwise, Lightning may have the pass already
            self._pass = _Pass(self, position)
        self._pass.restart(position)

    def go_on(self, consumed: int) -> None:
        """Let the next pass begin behind the batches that training has consumed."""
        self._turn_to(self._pass.after(consumed))

    def position(self, consumed: int) -> Position:
        """Return the place behind the batches of this pass that training has consumed."""
        return self._pass.after(consumed)

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return the state, of plain numbers and text, for all ranks at the same step."""
        position = self.position(self.given if consumed is None else consumed)
        place = {
            name: [*value] if isinstance(value, tuple) else value
            for name, value in asdict(position).items()
        }
        return {"rows": self.digest, "rules": self._rules, "position": place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where the state was taken. Raises ArgumentError if `state`
        is not a state, or one of other rows or rules."""
        try:
            digest, rules, place = state["rows"], dict(state["rules"]), dict(state["position"])
            position = _position_of(place, len(self.sources))
        except (KeyError, TypeError, ValueError, ArgumentError) as error:
            raise ArgumentError(_NO_STATE) from error
        if digest != self.digest:
            raise ArgumentError(other_rows(sum(map(len, self.sources))))
        changed = [
            f"{name} was {rules.get(name)!r} and is {value!r}"
            for name, value in self._rules.items()
            if rules.get(name) != value
        ]
        if changed:
            raise ArgumentError(f"the state is of other rows: {listing(changed)}")
        self._turn_to(position)

    @cached_property
    def digest(self) -> str:
        """A hash of all rows of the mixture, and of their lengths."""
        lengths = " ".join(source.digest for source in self.sources)
        return hashlib.sha256(f"{self.mixture.digest} {lengths}".encode()).hexdigest()

    @cached_property
    def _rules(self) -> dict[str, Any]:
        """What the sequence of rows depends on, besides the utterances."""
        mixture, budget = self.mixture, self.budget
        rules: dict[str, Any] = {
            "tokens": budget.tokens,
            "spare": budget.spare,
            "overflow": budget.overflow,
            "window": self.window,
            "seed": self.seed,
            "one_source": mixture.one_source,
        }
        if mixture.one_source:
            rules["rows"] = self.rows  # which are packed together
        if mixture.is_endless:
            rules |= {"by": mixture.by, "shares": self.shares_asked}
        return rules

    @cached_property
    def shares_asked(self) -> list[float]:
        """The share of each source, in the mixture's unit."""
        weights = self._sizes
        if self.mixture.weights is not None:
            weights = [float(self.mixture.weights[name]) for name in self.mixture.sources]
        largest = max(weights)
        powers = [(weight / largest) ** (1 / self.mixture.temperature) for weight in weights]
        # The last digits of a power may differ between machines.
        return [float(f"{power / math.fsum(powers):.9g}") for power in powers]

    @property
    def _sizes(self) -> list[float]:
        """The size of each source, in the mixture's unit."""
        if self.mixture.by == "utterances":
            return [float(source.kept) for source in self.sources]
        pairs = zip(self.sources, self._seconds, strict=True)
        return [source.tokens * seconds for source, seconds in pairs]

    @property
    def _seconds(self) -> list[float]:
        """The amount of a token of each source, in the mixture's unit."""
        if self.mixture.by != "seconds":
            return [1.0] * len(self.sources)
        return [1 / float(source.rate) for source in self.sources]

    @cached_property
    def _pace(self) -> tuple[list[float], float, float]:
        """The amount of each source per unit of time; the time of a window; and the end."""
        tokens_of_window = self.window * self.budget.tokens
        if not self.mixture.is_endless:
            num_windows = sum(source.sizes for source in self.sources) / tokens_of_window
            return self._raw_sizes, 1 / max(1, round(num_windows)), 1.0
        pairs = zip(self.shares_asked, self._seconds, strict=True)
        speeds = [share / seconds for share, seconds in pairs]
        tokens = math.fsum(
            speed * source.sizes / size
            for speed, source, size in zip(speeds, self.sources, self._raw_sizes, strict=True)
        )
        return speeds, tokens_of_window / tokens, math.inf

    @property
    def _raw_sizes(self) -> list[float]:
        if self.mixture.by == "utterances":
            return [float(source.kept) for source in self.sources]
        return [float(source.tokens) for source in self.sources]

    def shares(self, consumed: int) -> dict[str, Share]:
        """Return the share of each source in the rows so far, of all ranks."""
        position = self.position(consumed)
        amounts = np.array(position.amounts)
        if position.row:
            amounts = amounts + self.made(position).amounts[: position.row].sum(0)
        units = amounts * self._seconds
        asked = self.shares_asked
        total = units.sum() or math.nan
        triples = zip(self.mixture.sources, asked, units.tolist(), strict=True)
        return {name: Share(share, unit / float(total), unit) for name, share, unit in triples}

    def count_rows(self) -> int:
        """Count the rows of the epoch, by packing all of them."""
        position: Position | None = self._begin(self.epoch)
        num_rows = 0
        while position is not None:
            window = self.made(position)
            num_rows += len(window.rows)
            position = window.end
        return num_rows

    def _begin(self, epoch: int) -> Position:
        nothing = (0,) * len(self.sources)
        return Position(epoch, 0, nothing, nothing)

    def made(self, position: Position) -> _Window:
        """Draw and pack the window of a position."""
        speeds, duration, end = self._pace
        limit = (position.window + 1) * duration
        is_last = limit > end - duration / 2
        documents, times, after = self._draw(position, speeds, math.inf if is_last else limit)
        documents = documents.take(np.argsort(times, kind="stable"))
        keys = (self.seed, position.epoch, position.window)
        rows = self._packed(documents, np.random.PCG64(np.random.SeedSequence(keys)))
        amounts = self._amounts(documents, rows)
        order = np.arange(len(rows))
        if len(self.sources) > 1:
            together = self.rows if self.mixture.one_source else 1
            groups = amounts.reshape(-1, together, len(self.sources)).sum(1)
            order = (in_balance(groups)[:, None] * together + np.arange(together)).ravel()
        rows = [rows[number] for number in order.tolist()]
        return _Window(documents, rows, amounts[order], None if is_last else after)

    def _draw(
        self, position: Position, speeds: list[float], limit: float
    ) -> tuple[Documents, Any, Position]:
        """Draw the documents that the sources owe until a time, with the time of each; and
        return the position after them."""
        drawn, amounts = [*position.drawn], [*position.amounts]
        documents, times = [], []
        for number, (source, speed) in enumerate(zip(self.sources, speeds, strict=True)):
            seeds = (self.seed, position.epoch)
            while True:
                owed = (limit - amounts[number] / speed) * speed
                mean = self._raw_sizes[number] / len(source)
                most = int(min(_AT_ONCE + owed / mean, len(source)))
                if not self.mixture.is_endless:
                    most = min(most, len(source) - drawn[number])
                rows, counts = source.drawn(drawn[number], most, seeds)
                units = source.kept_of(counts).astype(np.int64)
                if self.mixture.by != "utterances":
                    units *= counts[0]
                ends = amounts[number] + np.cumsum(units)
                begins = (ends - units) / speed
                taken = int(np.searchsorted(begins, limit))
                part, utterances = source.documents(rows[:taken], counts[:, :taken])
                documents.append(part)
                times.append(begins[utterances])
                drawn[number] += taken
                amounts[number] += int(units[:taken].sum())
                if taken < len(rows) or not len(rows):
                    break
        after = replace(
            position, window=position.window + 1, drawn=tuple(drawn), amounts=tuple(amounts), row=0
        )
        return Documents.joined(documents), np.concatenate(times), after

    def _packed(self, documents: Documents, random: np.random.PCG64) -> list[Ints]:
        """Pack documents into rows, in a random order."""
        groups = [np.arange(len(documents))]
        if self.mixture.one_source:
            numbers = range(len(self.sources))
            groups = [np.flatnonzero(documents.sources == number) for number in numbers]
        rows: list[Ints] = []
        for group in groups:
            row_of = best_fit(documents.sizes[group], self.budget.tokens)
            order = np.argsort(row_of, kind="stable")
            ends = np.cumsum(np.bincount(row_of))
            packed = np.split(group[order], ends[:-1]) if len(group) else []
            keys = random.random_raw(len(packed))
            rows += [packed[number] for number in np.argsort(keys, kind="stable").tolist()]
            if self.mixture.one_source:
                rows += [group[:0]] * (-len(packed) % self.rows)
        return rows

    def _amounts(self, documents: Documents, rows: list[Ints]) -> Ints:
        """Return what each row has of each source, int64 `[rows, sources]`."""
        units = documents.counts[0]
        if self.mixture.by == "utterances":
            units = (documents.parts == 0).astype(np.int64)
        amounts = np.zeros((len(rows), len(self.sources)), np.int64)
        numbers = np.repeat(np.arange(len(rows)), [*map(len, rows)])
        of_rows = np.concatenate([documents.rows[:0], *rows])
        np.add.at(amounts, (numbers, documents.sources[of_rows]), units[of_rows])
        return amounts

    def dealt(self, rows: list[Any]) -> list[Any]:
        """Return this rank's part of the rows of a step."""
        if self.mixture.one_source:
            return rows[self.rank * self.rows : (self.rank + 1) * self.rows]
        return rows[self.rank :: self.world_size]


def _position_of(place: Mapping[str, Any], num_sources: int) -> Position:
    epoch, window, row = (require_int(name, place[name], 0) for name in ("epoch", "window", "row"))
    drawn, amounts = (
        tuple(require_int(name, number, 0) for number in place[name])
        for name in ("drawn", "amounts")
    )
    if not len(drawn) == len(amounts) == num_sources:
        raise ArgumentError(_NO_STATE)
    return Position(epoch, window, drawn, amounts, row)


class _Pass(Iterator[Batch]):
    """A pass through the rows from a position on.

    In a worker of torch's DataLoader, it gives every so many batches: the workers take turns.
    A state of a worker is the place behind a whole turn of all workers."""

    def __init__(self, packed: PackedRows, position: Position) -> None:
        self._packed = packed
        self.restart(position)

    def restart(self, position: Position) -> None:
        """Begin at a position."""
        self.position = position
        self.epoch = position.epoch
        self.has_begun = False
        self.given = 0
        self._window: _Window | None = None
        self._places = deque([position], maxlen=self._packed._kept)
        """The places behind the latest batches."""

    def after(self, consumed: int) -> Position:
        """Return the place behind the first batches of the pass. Raises ArgumentError if there
        were fewer, or if it was forgotten."""
        behind = self.given - consumed
        if not 0 <= behind < len(self._places):
            raise ArgumentError(
                f"consumed is {consumed}; this pass has given {self.given} batches to this rank"
            )
        return self._places[-1 - behind]

    def __next__(self) -> Batch:
        self.has_begun = True
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        steps = [self._step() for _ in range(num_workers)]
        if not steps[number]:
            raise StopIteration
        self.given += 1
        self._places.append(self.position)
        return Batch.of(self._packed.dealt(steps[number]), steps[number][0][0])

    def _step(self) -> list[tuple[_Window, Ints]]:
        """Take the next rows of all ranks; fewer at the end of the epoch, and then none."""
        most = self._packed.rows * self._packed.world_size
        rows: list[tuple[_Window, Ints]] = []
        while len(rows) < most:
            if self._window is None:
                self._window = self._packed.made(self.position)
            window, first = self._window, self.position.row
            taken = window.rows[first : first + most - len(rows)]
            rows += [(window, row) for row in taken]
            self.position = replace(self.position, row=first + len(taken))
            if self.position.row < len(window.rows):
                continue
            if window.end is None:
                break
            self.position, self._window = window.end, None
        return rows
