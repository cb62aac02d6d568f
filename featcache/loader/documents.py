"""The documents of packed rows: utterances, or parts of them, as each source gives them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError, listing, require_int
from featcache.loader.dataset import FeatureDataset
from featcache.loader.packing import shuffled
from featcache.loader.utterances import DatasetVersion
from featcache.spec import Ints

Overflow = Literal["error", "split", "drop"]
"""The treatment of utterances that are longer than a row."""

_CHUNK = 1 << 16
_MOST_ROWS = 1 << 20
_MOST_FRAMES = (1 << 31) - 1
"""The most frames of a batch, which int32 counts."""
_SHUFFLED = 1 << 14
"""How many rows to shuffle at once, at least."""


@dataclass
class Packing:
    """The checked arguments of `PackedLoader` about its rows."""

    tokens: int
    rows: int
    overflow: Overflow
    window: int
    spare: int
    seed: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.overflow not in get_args(Overflow):
            raise ArgumentError(
                f"overflow is {self.overflow!r}: choose {listing(map(repr, get_args(Overflow)))}"
            )
        self.tokens = require_int("tokens", self.tokens, 1, 1 << 30)
        self.spare = require_int("spare", self.spare, 0, self.tokens - 1)
        self.seed = require_int("seed", self.seed, 0)
        self.rows = require_int("rows", self.rows, 1, _MOST_ROWS)
        self.window = require_int("window", self.window, 1, _MOST_ROWS)
        self.world_size = require_int("world_size", self.world_size, 1, _MOST_ROWS)
        self.rank = require_int("rank", self.rank, 0, self.world_size - 1)

    @property
    def rows_of_step(self) -> int:
        """The rows of all ranks in a step."""
        return self.rows * self.world_size


class Documents(NamedTuple):
    """Utterances, or parts of utterances, in some order."""

    sources: Ints
    """The number of the source of each, `[documents]`."""
    rows: Ints
    """The row of each in its source's dataset, `[documents]`."""
    parts: Ints
    """The number of the part; 0 for the first part, and for whole utterances, `[documents]`."""
    are_last: NDArray[np.bool_]
    """True for the last part, and for whole utterances, `[documents]`."""
    sizes: Ints
    """The tokens that each takes in a row, `[documents]`."""
    firsts: Ints
    """The first frame of each in each version of frames, `[versions, documents]`."""
    counts: Ints
    """The frames of each in each version of frames, `[versions, documents]`."""

    def take(self, numbers: Ints | slice) -> Documents:
        """Return some documents, in their order."""
        return Documents._make(column[..., numbers] for column in self)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Documents:
        """Join several, one after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls._make(np.concatenate(column, axis=-1) for column in zip(*parts, strict=True))


class Budget:
    """The room of a row in each version of frames. Raises ArgumentError if there is none.

    Attributes:
        packing: The arguments.
        names: The names of the versions of frames.
        ratios: The frame rate of each, relative to the first one's.
        rooms: The frames of a row in each, and the frames that stay free after a document.
        most: The most tokens of a document.
    """

    def __init__(self, dataset: FeatureDataset, packing: Packing) -> None:
        axes = {version.name: version.cache.spec.axis for version in dataset.versions}
        for name, axis in axes.items():
            if axis.is_ragged and not axis.exact_rate and not axis.has_times:
                raise ArgumentError(f"the entries of {name!r} have no rate: they fit into no row")
        rates = {name: axis.exact_rate for name, axis in axes.items() if axis.exact_rate}
        if not rates:
            raise ArgumentError("no version has frames, which rows are filled with")
        self.packing, self.names = packing, [*rates]
        self.ratios = [rate / rates[self.names[0]] for rate in rates.values()]
        tokens, spare = packing.tokens, packing.spare
        self.rooms = [(math.ceil(tokens * r), math.floor(spare * r)) for r in self.ratios]
        self.most = tokens - spare
        largest = packing.rows * max(room for room, _ in self.rooms)
        if largest > _MOST_FRAMES:
            raise ArgumentError(
                f"a batch of {packing.rows:,} rows has {largest:,} frames: cu_seqlens counts to "
                f"{_MOST_FRAMES:,}; give fewer rows or tokens"
            )

    def sizes(self, counts: Ints) -> Ints:
        """Return the tokens of documents with these frames, int64 `[versions, documents]`: as
        many as last as long as the longest version."""
        columns = zip(counts, self.ratios, strict=True)
        tokens = [-(-count * ratio.denominator // ratio.numerator) for count, ratio in columns]
        sizes: Ints = np.maximum.reduce(tokens)
        return sizes


class Source:
    """A dataset of a mixture, whose utterances become documents.

    Attributes:
        long: The number of utterances that are longer than a row, and their tokens.
        longest: The tokens of the longest utterance.
        kept: The number of utterances that are not dropped.
        tokens: Their tokens.
        sizes: The tokens that they take in rows.
        digest: A hash of the lengths of all utterances.
    """

    def __init__(self, number: int, dataset: FeatureDataset, budget: Budget) -> None:
        self.number, self.dataset, self._budget = number, dataset, budget
        self._latest: tuple[tuple[int, ...], int, Ints] = (), 0, np.empty(0, np.int64)
        """The latest rows that were shuffled: their pass, and the place of the first."""
        self.kept = self.tokens = self.sizes = self.longest = 0
        long = np.zeros(2, np.int64)
        digest = hashlib.sha256()
        for first in range(0, len(dataset), _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, len(dataset)))
            counts = self._counts(rows)
            digest.update(np.ascontiguousarray(counts, "<i8").data)
            sizes = budget.sizes(counts)
            long_tokens = counts[0][sizes > budget.most]
            long += len(long_tokens), long_tokens.sum()
            documents, _ = self._documents(rows, counts)
            self.longest = max(self.longest, int(sizes.max()))
            self.kept += int((documents.parts == 0).sum())
            self.tokens += int(documents.counts[0].sum())
            self.sizes += int(documents.sizes.sum())
        self.long = tuple(long.tolist())
        self.digest = digest.hexdigest()

    def draw(self, first: int, most: int, seeds: tuple[int, ...]) -> tuple[Documents, Ints]:
        """Draw up to `most` utterances from a place on: a shuffled pass of all utterances,
        then another. Returns the documents, and the number of the utterance of each."""
        number, place = divmod(first, len(self.dataset))
        end = min(place + most, len(self.dataset))
        rows = self._shuffled(place, end, (*seeds, self.number, number))
        return self._documents(rows, self._counts(rows))

    def _shuffled(self, place: int, end: int, seeds: tuple[int, ...]) -> Ints:
        """Return the rows at some places of a shuffled pass: many at once take less time."""
        latest, first, rows = self._latest
        if latest != seeds or not first <= place <= end <= first + len(rows):
            first = place
            last = min(max(end, place + _SHUFFLED), len(self.dataset))
            rows = shuffled(np.arange(first, last), len(self.dataset), seeds)
            self._latest = seeds, first, rows
        return rows[place - first : end - first]

    def _documents(self, rows: Ints, counts: Ints) -> tuple[Documents, Ints]:
        most, packing = self._budget.most, self._budget.packing
        sizes = self._budget.sizes(counts)
        num_parts = np.maximum(1, -(-sizes // most))
        if packing.overflow == "drop":
            num_parts[sizes > most] = 0
        numbers = np.repeat(np.arange(len(rows)), num_parts)
        parts = np.arange(len(numbers)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        are_last = parts + 1 == num_parts[numbers]
        firsts, ends = np.empty((2, len(counts), len(numbers)), np.int64)
        for version, ratio in enumerate(self._budget.ratios):
            whole, step = counts[version][numbers], most * ratio.numerator
            firsts[version] = np.minimum(parts * step // ratio.denominator, whole)
            ends[version] = np.minimum((parts + 1) * step // ratio.denominator, whole)
            ends[version][are_last] = whole[are_last]
        # A part may have a frame more than its time; a full one has a row of its own.
        sizes = np.minimum(self._budget.sizes(ends - firsts), most) + packing.spare
        sources = np.full(len(numbers), self.number)
        columns = sources, rows[numbers], parts, are_last, sizes, firsts, ends - firsts
        return Documents(*columns), numbers

    def _counts(self, rows: Ints) -> Ints:
        """Return the frames of some rows in each version of frames, `[versions, rows]`."""
        counts = [
            version.cache.lengths[version.positions_of(rows)]
            for version in frame_versions(self.dataset)
        ]
        return np.array(counts, np.int64)


def frame_versions(dataset: FeatureDataset) -> list[DatasetVersion]:
    """List the versions of frames."""
    return [version for version in dataset.versions if version.cache.spec.axis.exact_rate]
