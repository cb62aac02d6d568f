"""The documents of a packed batch: utterances, or parts of them, as they are drawn from each
source of a mixture."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.loader.dataset import FeatureDataset
from featcache.loader.packing import shuffled
from featcache.loader.utterances import DatasetVersion
from featcache.spec import Ints

Overflow = Literal["error", "split", "drop"]
"""The treatment of utterances that are longer than a row."""

_CHUNK = 1 << 16

_LINES = 5
"""The lines of documents before those of their versions."""


@dataclass(frozen=True)
class Budget:
    """The room of a row."""

    tokens: int
    """The tokens of a row: frames of the first version of frames."""
    spare: int
    """The tokens that stay free after each document."""
    overflow: Overflow
    rate: Fraction
    """The tokens of a second; of the first source."""
    ratios: tuple[Fraction, ...]
    """The frame rate of each version of frames, relative to the first one's."""

    @property
    def most(self) -> int:
        """The most tokens of a document."""
        return self.tokens - self.spare

    @property
    def row_lengths(self) -> list[int]:
        """The frames of a row in each version."""
        return [math.ceil(self.tokens * ratio) for ratio in self.ratios]

    @property
    def spare_frames(self) -> list[int]:
        """The frames that stay free after each document in each version."""
        return [math.floor(self.spare * ratio) for ratio in self.ratios]

    def sizes(self, counts: Ints) -> Ints:
        """Return the tokens of documents with these frames, int64 `[versions, documents]`: as
        many as last as long as the longest version."""
        columns = zip(counts, self.ratios, strict=True)
        tokens = [-(-count * ratio.denominator // ratio.numerator) for count, ratio in columns]
        sizes: Ints = np.maximum.reduce(tokens)
        return sizes


@dataclass(frozen=True)
class Documents:
    """Utterances, or parts of utterances, in some order."""

    table: Ints
    """All that is known of them, a line for each property, int64 `[properties, documents]`."""

    @classmethod
    def of(cls, *lines: Ints) -> Self:
        """Return documents by `sources`, `rows`, `parts`, `are_last` and `sizes`, the first
        `_LINES` lines, and then `firsts` and `counts`."""
        return cls(np.concatenate([np.atleast_2d(line) for line in lines]).astype(np.int64))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Join several, one after the other."""
        return cls(np.concatenate([part.table for part in parts], axis=1))

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, numbers: Ints) -> Documents:
        """Return some documents, in their order."""
        return Documents(self.table[:, numbers])

    @property
    def sources(self) -> Ints:
        """The number of the source of each, `[documents]`."""
        return self._line(0)

    @property
    def rows(self) -> Ints:
        """The row of each in its source's dataset, `[documents]`."""
        return self._line(1)

    @property
    def parts(self) -> Ints:
        """The number of the part; 0 for the first part, and for whole utterances, `[documents]`."""
        return self._line(2)

    @property
    def are_last(self) -> NDArray[np.bool_]:
        """True for the last part, and for whole utterances, `[documents]`."""
        return self._line(3).astype(bool)

    @property
    def sizes(self) -> Ints:
        """The tokens that each takes in a row, with those that stay free, `[documents]`."""
        return self._line(4)

    @property
    def firsts(self) -> Ints:
        """The first frame of each in each version of frames, `[versions, documents]`."""
        firsts: Ints = self.table[_LINES : (_LINES + len(self.table)) // 2]
        return firsts

    @property
    def counts(self) -> Ints:
        """The frames of each in each version of frames, `[versions, documents]`."""
        counts: Ints = self.table[(_LINES + len(self.table)) // 2 :]
        return counts

    def _line(self, number: int) -> Ints:
        line: Ints = self.table[number]
        return line


class Source:
    """A dataset of a mixture, whose utterances become documents.

    Attributes:
        num_long, long_tokens: The utterances that are longer than a row, and their tokens.
        longest: The tokens of the longest utterance.
        kept: The utterances that are read, without those that are dropped.
        tokens, sizes: Their tokens; the tokens that they take in rows.
        rate: The tokens per second.
        digest: A hash of the lengths of all utterances.
    """

    def __init__(self, number: int, dataset: FeatureDataset, budget: Budget) -> None:
        self.number, self.dataset, self.budget = number, dataset, budget
        self.rate = self._versions[0].cache.spec.axis.exact_rate
        self.num_long = self.long_tokens = self.longest = 0
        self.kept = self.tokens = self.sizes = 0
        digest = hashlib.sha256()
        for first in range(0, len(dataset), _CHUNK):
            rows = np.arange(first, min(first + _CHUNK, len(dataset)))
            counts = self._counts(rows)
            digest.update(np.ascontiguousarray(counts, "<i8").data)
            self._count(counts)
        self.digest = digest.hexdigest()

    def _count(self, counts: Ints) -> None:
        sizes = self.budget.sizes(counts)
        is_long = sizes > self.budget.most
        is_kept = ~is_long if self.budget.overflow == "drop" else np.ones(len(sizes), bool)
        num_parts = np.maximum(1, -(-sizes // self.budget.most))
        self.longest = max(self.longest, int(sizes.max()))
        self.num_long += int(is_long.sum())
        self.long_tokens += int(counts[0][is_long].sum())
        self.kept += int(is_kept.sum())
        self.tokens += int(counts[0][is_kept].sum())
        self.sizes += int((sizes + num_parts * self.budget.spare)[is_kept].sum())

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def _versions(self) -> list[DatasetVersion]:
        """The versions of frames."""
        return [version for version in self.dataset.versions if version.cache.spec.axis.exact_rate]

    def drawn(self, first: int, most: int, seeds: tuple[int, ...]) -> tuple[Ints, Ints]:
        """Draw up to `most` utterances of this source's shuffled passes, from a place on.
        Returns their rows, and their frames `[versions, utterances]`. A pass has each
        utterance once."""
        number, place = divmod(first, len(self))
        places = np.arange(place, min(place + most, len(self)))
        rows = shuffled(places, len(self), (*seeds, self.number, number))
        return rows, self._counts(rows)

    def kept_of(self, counts: Ints) -> NDArray[np.bool_]:
        """Tell which utterances with these frames are read."""
        if self.budget.overflow != "drop":
            return np.ones(counts.shape[1], bool)
        return self.budget.sizes(counts) <= self.budget.most

    def documents(self, rows: Ints, counts: Ints) -> tuple[Documents, Ints]:
        """Return the documents of some rows with these frames, and the number of the row of
        each."""
        most = self.budget.most
        sizes = self.budget.sizes(counts)
        num_parts = np.maximum(1, -(-sizes // most))
        if self.budget.overflow == "drop":
            num_parts[sizes > most] = 0
        numbers = np.repeat(np.arange(len(rows)), num_parts)
        begins = np.cumsum(num_parts) - num_parts
        parts = np.arange(len(numbers)) - np.repeat(begins, num_parts)
        is_last = parts + 1 == num_parts[numbers]
        of_versions = [*self._cut(parts, is_last, counts[:, numbers])]
        firsts, lengths = (np.array(column) for column in zip(*of_versions, strict=True))
        # A part may have a frame more than its time; a full one has a row of its own.
        sizes = np.minimum(self.budget.sizes(lengths), most) + self.budget.spare
        sources = np.full(len(numbers), self.number)
        documents = Documents.of(sources, rows[numbers], parts, is_last, sizes, firsts, lengths)
        return documents, numbers

    def _cut(
        self, parts: Ints, is_last: NDArray[np.bool_], counts: Ints
    ) -> Iterator[tuple[Ints, Ints]]:
        """Yield the first frames of parts in each version, and their numbers of frames."""
        for whole, ratio in zip(counts, self.budget.ratios, strict=True):
            most = self.budget.most * ratio.numerator
            firsts = np.minimum(parts * most // ratio.denominator, whole)
            ends = np.minimum((parts + 1) * most // ratio.denominator, whole)
            yield firsts, np.where(is_last, whole, ends) - firsts

    def _counts(self, rows: Ints) -> Ints:
        """Return the frames of some rows in each version of frames, `[versions, rows]`."""
        return np.array(
            [version.cache.lengths[version.positions_of(rows)] for version in self._versions],
            np.int64,
        )


def budget_of(dataset: FeatureDataset, tokens: int, spare: int, overflow: Overflow) -> Budget:
    """Return the budget of rows for a dataset's versions. Raises ArgumentError if none has
    frames."""
    axes = {version.name: version.cache.spec.axis for version in dataset.versions}
    for name, axis in axes.items():
        if axis.is_ragged and not axis.exact_rate and not axis.has_times:
            raise ArgumentError(f"the entries of {name!r} have no rate: they fit into no row")
    rates = [axis.exact_rate for axis in axes.values() if axis.exact_rate]
    if not rates:
        raise ArgumentError("no version has frames, which rows are filled with")
    return Budget(tokens, spare, overflow, rates[0], tuple(rate / rates[0] for rate in rates))
