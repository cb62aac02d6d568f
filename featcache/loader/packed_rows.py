"""The rows of a mixture: drawn and packed one window after the other, dealt to ranks, resumed
anywhere.

A window is made of the documents that the sources owe until its end. No document is held
back for the next window. So a place in the sequence of rows is the begin of a window, two
numbers for each source, and the number of a row in it."""

from __future__ import annotations

import hashlib
import math
import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import get_worker_info

from featcache.errors import MOST_COUNTED, ArgumentError, listing, require_int
from featcache.loader.documents import Budget, Documents, Packing, Source, frame_versions
from featcache.loader.mixture import Mixture
from featcache.loader.packing import best_fit, in_balance
from featcache.loader.sampler import other_rows
from featcache.spec import Ints

_NO_STATE = "this is not the state of a PackedLoader: give what its state_dict returned"

_AT_ONCE = 64
"""The fewest utterances to draw from a source at once."""


class Position(NamedTuple):
    """A place in the sequence of rows."""

    epoch: int
    window: int
    """The number of windows before."""
    drawn: Sequence[int]
    """The utterances of each source that were drawn for the windows before."""
    amounts: Sequence[int]
    """Their amounts: tokens, or utterances."""
    row: int = 0
    """The rows of the window that were given."""
    batches: int = 0
    """The batches that each rank got in this epoch."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Position:
        """Return the place that a state has. Raises ArgumentError, AttributeError or TypeError if
        it has none."""
        numbers: dict[str, Any] = {}
        for name, value in state.items():
            if name in ("drawn", "amounts"):
                numbers[name] = [require_int(name, number, 0, MOST_COUNTED) for number in value]
            else:
                numbers[name] = require_int(name, value, 0, MOST_COUNTED)
        return cls(**numbers)


class Window(NamedTuple):
    """The rows of a window."""

    documents: Documents
    """The documents, from row to row."""
    starts: Ints
    """The first document of each row, and the end of the last row, `[rows + 1]`."""
    amounts: Ints
    """What each row has of each source, `[rows, sources]`."""
    end: Position | None
    """The begin of the next window; None at the end of an epoch."""

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return len(self.amounts)

    def documents_of(self, rows: range) -> tuple[Documents, Ints]:
        """Return the documents of some rows, and how many each row has."""
        starts = self.starts[rows.start : rows.stop : rows.step]
        ends = self.starts[rows.start + 1 : rows.stop + 1 : rows.step]
        counts = ends - starts
        if len(rows) and rows.step == 1:
            return self.documents.take(slice(starts[0], ends[-1])), counts
        before = np.cumsum(counts) - counts
        numbers = np.repeat(starts - before, counts) + np.arange(counts.sum())
        return self.documents.take(numbers), counts


class Batch(NamedTuple):
    """The documents of a rank's batch."""

    documents: Documents
    row_of: Ints
    """The row of each, rising."""


class PackedRows:
    """The batches of a `PackedLoader`."""

    def __init__(self, mixture: Mixture, packing: Packing) -> None:
        self.mixture, self.packing = mixture, packing
        self.budget = budget = Budget(mixture.first, packing)
        datasets = enumerate(mixture.sources.values())
        self.sources = [Source(number, dataset, budget) for number, dataset in datasets]
        for name, source in zip(mixture.sources, self.sources, strict=True):
            if packing.overflow == "error" and source.long[0]:
                raise ArgumentError(
                    f"{source.long[0]:,} utterances of {name!r} are longer than {budget.most:,} "
                    f"tokens, the longest has {source.longest:,}: raise tokens=, or choose "
                    'overflow="split" or "drop"'
                )
            if not source.tokens:
                raise ArgumentError(f"no utterance of {name!r} fits into {budget.most:,} tokens")
        for name, share in zip(mixture.sources, self.shares, strict=True):
            if not share:
                raise ArgumentError(
                    f"the share of {name!r} is 0 at temperature={mixture.temperature:g}: raise "
                    "temperature or its weight, or leave the source out"
                )
        self.remembered = 1
        """The number of latest batches for which `position` is known."""
        self._pass = _Pass(self, self._begin(0))

    def __iter__(self) -> Iterator[Batch]:
        """Begin where the epoch does, or at the place of a loaded state. Until its first batch
        is read, a pass follows `set_epoch` and `load_state_dict`."""
        position = self._pass.start
        if self._pass.has_begun:
            # Of workers, some may have ended a pass that training has left: all begin the next.
            is_worker = get_worker_info() is not None
            position = self._begin(self.epoch + 1 if is_worker else self.epoch)
        self._pass = _Pass(self, position)
        return self._pass

    def __len__(self) -> int:
        """Return the number of batches of the epoch, also if some were seen before a resume.
        Raises TypeError for a mixture without an end."""
        if self.mixture.is_endless:
            raise TypeError("a weighted mixture has no end, and so no number of batches")
        return self._pass.start.batches + self._pass.num_batches

    def __repr__(self) -> str:
        ranks = f"rank={self.packing.rank}, world_size={self.packing.world_size}"
        return f"PackedRows({self._rules}, {ranks})"

    @property
    def sampler(self) -> PackedRows | None:
        """The rows of a union, on which Lightning calls `set_epoch`. It would begin a weighted
        mixture again."""
        return None if self.mixture.is_endless else self

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
        epoch = require_int("epoch", epoch, 0, MOST_COUNTED)
        if epoch != self.epoch:
            self.go_to(self._begin(epoch))

    def go_to(self, position: Position) -> None:
        """Let the next pass begin at a place."""
        if self._pass.has_begun:  # otherwise, Lightning may have the pass already
            self._pass = _Pass(self, position)
        self._pass.restart(position)

    def remember(self, count: int) -> None:
        """Know the places behind so many of the latest batches."""
        self.remembered = count
        self.go_to(self._pass.start)

    def position(self, consumed: int | None = None) -> Position:
        """Return the place behind the batches of this pass that training has consumed, by
        default all. Raises ArgumentError if there were fewer, or if it is not remembered."""
        places = self._pass.places
        behind = 0 if consumed is None else self.given - consumed
        if not 0 <= behind < len(places):
            raise ArgumentError(
                f"consumed is {consumed}; this pass has given {self.given} batches to this rank"
            )
        return places[-1 - behind]

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return the state, of plain numbers and text, for all ranks at the same step."""
        place = self.position(consumed)._asdict()
        for name in ("drawn", "amounts"):
            place[name] = [*place[name]]
        return {"rows": self._digest, "rules": self._rules, "position": place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where the state was taken. Raises ArgumentError if `state`
        is not a state, or one of other utterances or rules."""
        try:
            digest, rules = state["rows"], state["rules"]
            position = Position.of(state["position"])
            own_rules = self._rules
            changed = [
                f"{name} was {rules.get(name)!r} and is {own_rules.get(name)!r}"
                for name in {**own_rules, **rules}
                if rules.get(name) != own_rules.get(name)
            ]
        except (KeyError, TypeError, AttributeError, ArgumentError) as error:
            raise ArgumentError(_NO_STATE) from error
        if digest != self._digest:
            raise ArgumentError(other_rows(sum(len(source.dataset) for source in self.sources)))
        if changed:
            raise ArgumentError(f"the state is of other rows: {listing(changed)}")
        if not self._has(position):
            raise ArgumentError(_NO_STATE)
        self.go_to(position)

    def _has(self, position: Position) -> bool:
        """Return True if there is such a place: a state may be of another release."""
        counts = [len(source.dataset) for source in self.sources]
        if not len(position.drawn) == len(position.amounts) == len(counts):
            return False
        if not self.mixture.is_endless and any(map(operator.gt, position.drawn, counts)):
            return False
        return position.row <= self.make(position).num_rows

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, source in zip(self.mixture.sources, self.sources, strict=True):
            digest.update(f"{name!r} {source.dataset.digest} {source.digest} ".encode())
        return digest.hexdigest()

    @property
    def _rules(self) -> dict[str, Any]:
        """The arguments on which the sequence of rows depends, next to the utterances."""
        mixture = self.mixture
        names = ["tokens", "spare", "overflow", "window", "seed"]
        if mixture.one_source:
            names.append("rows")  # which are packed together
        rules: dict[str, Any] = {name: getattr(self.packing, name) for name in names}
        if mixture.is_endless:
            rules |= {"by": mixture.by, "shares": [*self.shares]}
        return rules

    @cached_property
    def _sizes(self) -> list[int]:
        """The amount of each source."""
        if self.mixture.by == "utterances":
            return [source.kept for source in self.sources]
        return [source.tokens for source in self.sources]

    @cached_property
    def _units(self) -> list[float]:
        """The seconds of a token of each source, if shares count seconds; otherwise 1."""
        if self.mixture.by != "seconds":
            return [1.0] * len(self.sources)
        axes = [frame_versions(source.dataset)[0].cache.spec.axis for source in self.sources]
        return [1 / float(axis.exact_rate) for axis in axes]

    @cached_property
    def shares(self) -> list[float]:
        """The share that each source shall have."""
        pairs = zip(self._sizes, self._units, strict=True)
        weights = [size * unit for size, unit in pairs]
        if self.mixture.weights is not None:
            weights = [float(self.mixture.weights[name]) for name in self.mixture.sources]
        largest = max(weights)
        powers = [(weight / largest) ** (1 / self.mixture.temperature) for weight in weights]
        # The last digits of a power may differ between machines.
        return [float(f"{power / math.fsum(powers):.9g}") for power in powers]

    def reached(self, position: Position) -> list[float]:
        """Return what the rows before a place have of each source, in the mixture's unit."""
        amounts = np.array(position.amounts)
        if position.row:
            amounts += self.make(position).amounts[: position.row].sum(0)
        reached: list[float] = (amounts * self._units).tolist()
        return reached

    def _begin(self, epoch: int) -> Position:
        nothing = [0] * len(self.sources)
        return Position(epoch, 0, nothing, nothing)

    @cached_property
    def _pace(self) -> tuple[list[float], float]:
        """The amount of each source per unit of time, and the duration of a window. An epoch
        takes 1."""
        speeds = [float(size) for size in self._sizes]
        if self.mixture.is_endless:
            pairs = zip(self.shares, self._units, strict=True)
            speeds = [share / unit for share, unit in pairs]
        triples = zip(speeds, self.sources, self._sizes, strict=True)
        tokens = math.fsum(speed * source.sizes / size for speed, source, size in triples)
        windows = tokens / (self.packing.window * self.packing.tokens)
        return speeds, 1 / windows if self.mixture.is_endless else 1 / max(1, round(windows))

    def make(self, position: Position) -> Window:
        """Draw and pack the window of a place."""
        duration = self._pace[1]
        limit = (position.window + 1) * duration
        is_last = not self.mixture.is_endless and limit > 1 - duration / 2
        if is_last:
            limit = math.inf
        numbers = range(len(self.sources))
        parts, times, drawn, amounts = zip(
            *(self._draw(position, number, limit) for number in numbers), strict=True
        )
        order = np.argsort(np.concatenate(times), kind="stable")
        documents = Documents.joined(parts).take(order)
        row_of, num_rows = self._packed(documents, (self.packing.seed, *position[:2]))
        cells = row_of * len(self.sources) + documents.sources
        sums = np.bincount(cells, self._amounts(documents), num_rows * len(self.sources))
        of_rows = sums.astype(np.int64).reshape(num_rows, len(self.sources))
        if len(self.sources) > 1:
            together = self.packing.rows if self.mixture.one_source else 1
            groups = in_balance(of_rows.reshape(-1, together, len(self.sources)).sum(1))
            order = np.arange(num_rows).reshape(-1, together)[groups].ravel()
            of_rows, row_of = of_rows[order], np.argsort(order)[row_of]
        end = Position(position.epoch, position.window + 1, [*drawn], [*amounts])
        return Window(
            documents.take(np.argsort(row_of, kind="stable")),
            np.append(0, np.cumsum(np.bincount(row_of, minlength=num_rows))),
            of_rows,
            None if is_last else end,
        )

    def _draw(
        self, position: Position, number: int, limit: float
    ) -> tuple[Documents, Any, int, int]:
        """Draw the documents that a source owes until a time. Returns also the time of each,
        the number of utterances drawn so far, and their amount."""
        source, speed = self.sources[number], self._pace[0][number]
        drawn, amount = position.drawn[number], position.amounts[number]
        count = len(source.dataset)
        parts, times = [], []
        while True:
            owed = (limit - amount / speed) * speed * count / self._sizes[number]
            # Below 0 behind a long utterance, which reaches beyond the window.
            most = int(min(_AT_ONCE + max(0, owed), count - drawn % count))
            if not self.mixture.is_endless:
                most = min(most, count - drawn)
            documents, utterances = source.draw(drawn, most, (self.packing.seed, position.epoch))
            ends = amount + np.cumsum(self._amounts(documents))
            begins = (ends - self._amounts(documents)) / speed
            firsts = np.flatnonzero(documents.parts == 0)
            taken = int(np.searchsorted(begins[firsts], limit))
            is_enough = taken < len(firsts)
            if is_enough:
                first = firsts[taken]
                documents = documents.take(np.arange(first))
                most = int(utterances[first])
            parts.append(documents)
            times.append(begins[: len(documents.rows)])
            drawn += most
            amount += int(self._amounts(documents).sum())
            if is_enough or (drawn == count and not self.mixture.is_endless):
                return Documents.joined(parts), np.concatenate(times), drawn, amount

    def _amounts(self, documents: Documents) -> Ints:
        amounts: Ints = documents.counts[0]
        if self.mixture.by == "utterances":
            amounts = (documents.parts == 0).astype(np.int64)
        return amounts

    def _packed(self, documents: Documents, seeds: tuple[int, ...]) -> tuple[Ints, int]:
        """Pack documents into rows, in a random order. If a batch has one source, pack each
        source's documents into full batches of rows. Returns the row of each, and the
        number of rows."""
        random = np.random.PCG64(np.random.SeedSequence(seeds))
        groups = [np.arange(len(documents.rows))]
        if self.mixture.one_source:
            numbers = range(len(self.sources))
            groups = [np.flatnonzero(documents.sources == number) for number in numbers]
        row_of = np.empty(len(documents.rows), np.int64)
        num_rows = 0
        for group in groups:
            packed = best_fit(documents.sizes[group], self.packing.tokens)
            count = int(packed.max(initial=-1)) + 1
            order = np.argsort(random.random_raw(count), kind="stable")
            row_of[group] = num_rows + np.argsort(order)[packed]
            num_rows += count
            if self.mixture.one_source:
                num_rows += -count % self.packing.rows
        return row_of, num_rows

    @cached_property
    def rows_of_rank(self) -> range:
        """The numbers of this rank's rows among the rows of a step."""
        packing = self.packing
        if self.mixture.one_source:
            first = packing.rank * packing.rows
            return range(first, first + packing.rows)
        return range(packing.rank, packing.rows_of_step, packing.world_size)


class _Pass(Iterator[Batch]):
    """A pass through the rows from a place on.

    In a worker of torch's DataLoader, it gives every so many batches: the workers take turns.
    A state of a worker is the place behind a whole turn of all workers."""

    def __init__(self, packed: PackedRows, position: Position) -> None:
        self._packed = packed
        self.restart(position)

    def restart(self, position: Position) -> None:
        """Begin at a place."""
        self.start = self._position = position
        self.epoch = position.epoch
        self.has_begun = False
        self.given = 0
        self.places = deque([position], maxlen=self._packed.remembered)
        """The places behind the latest batches."""
        self._window: Window | None = None
        vars(self).pop("num_batches", None)

    @cached_property
    def num_batches(self) -> int:
        """The number of batches of the pass, for which all of its rows are packed."""
        num_rows = -self.start.row
        position: Position | None = self.start
        while position is not None:
            window = self._packed.make(position)
            num_rows += window.num_rows
            position = window.end
        return -(-num_rows // self._packed.packing.rows_of_step)

    def __next__(self) -> Batch:
        self.has_begun = True
        worker = get_worker_info()
        number, num_workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        steps = [self._step() for _ in range(num_workers)]
        if not steps[number]:
            raise StopIteration
        self.given += 1
        self.places.append(self._position)
        own = self._packed.rows_of_rank
        documents, rows, begin = [], [], 0
        for window, first, count in steps[number]:
            inside = slice(bisect_left(own, begin), bisect_left(own, begin + count))
            shift, numbers = first - begin, own[inside]
            in_window = range(numbers.start + shift, numbers.stop + shift, numbers.step)
            taken, counts = window.documents_of(in_window)
            documents.append(taken)
            rows.append(np.repeat(np.arange(inside.start, inside.stop), counts))
            begin += count
        return Batch(Documents.joined(documents), np.concatenate(rows))

    def _step(self) -> list[tuple[Window, int, int]]:
        """Take the next rows of all ranks; fewer at the end of the epoch, and then none.
        Returns the windows that they are in, and the first row and the number of rows in
        each."""
        pieces: list[tuple[Window, int, int]] = []
        position = self._position
        missing = self._packed.packing.rows_of_step
        while missing:
            if self._window is None:
                self._window = self._packed.make(position)
            window = self._window
            count = min(missing, window.num_rows - position.row)
            if count:
                pieces.append((window, position.row, count))
                missing -= count
                position = position._replace(row=position.row + count)
            if position.row == window.num_rows:
                if window.end is None:
                    break
                position = window.end._replace(batches=position.batches)
                self._window = None
        self._position = position._replace(batches=position.batches + bool(pieces))
        return pieces
