"""Copies of a version that have diverged: each was extracted into, and did not see what the
other one made.

Each counts generations by itself, so between them they do not tell which features of an
utterance are newer. A copy has seen an item of the other one if it knows the run that made
it. If neither has seen what the other has, and that is not alike, `copy` has the utterance
wanted once more, with a generation above both."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.version.index import Index
from featcache.version.join import columns_of
from featcache.version.records import run_names
from featcache.version.version import Version
from featcache.version.wanted import Wanted

_Columns = NDArray[np.uint64]

VALUE_COLUMNS = ("row_hash", "item_crc32c", "source_hash")
"""The columns that tell whether two items of an id are alike."""


def are_alike(ours: _Columns, theirs: _Columns) -> NDArray[np.bool_]:
    """Compare items by their `VALUE_COLUMNS`, `[3, n]`: alike are those of one row with
    equal features, or of equal files. Returns bool `[n]`."""
    same_row, same_features, same_file = ours == theirs
    alike: NDArray[np.bool_] = same_row & (same_features | (same_file & (ours[2] > 0)))
    return alike


@dataclass(frozen=True)
class Copy:
    """A copy of a version, and what is known of it."""

    version: Version
    index: Index
    wanted: Sequence[Wanted]

    @property
    def runs(self) -> Set[str]:
        """The runs that it knows, by their records or by a shard."""
        return {*run_names(self.version.store), *(maker.run for maker in self.index.makers)}

    def claims(self, runs: Set[str]) -> _Columns:
        """What it has or wants of each id, sorted, for a copy that knows some runs: uint64
        `[5, ids]`: the hashes of id and row, the generation, 1 + the position of its item
        (0 if it is missing), and 1 if the other copy has seen it."""
        index = self.index
        items = np.stack([index.row_hash, index.generation])[:, index.by_hash]
        held = np.concatenate([index.id_hash[None], items])
        rows = np.concatenate([held, *(one.rows for one in self.wanted)], axis=1)
        rows = rows[:, np.lexsort(rows[[2, 0]])]
        rows = rows[:, np.flatnonzero(np.diff(rows[0], append=rows[0, -1:] + np.uint64(1)))]
        place = index.find_hashes(rows[0]) + 1
        is_seen = np.full(len(place), self.runs <= runs)
        if len(index):
            place[index.generation[place - 1] < rows[2]] = 0
            is_known = np.array([index.makers[one.made_by].run in runs for one in index.summaries])
            is_seen = np.where(place, is_known[index.shard[place - 1]], is_seen)
        return np.concatenate([rows, np.stack([place, is_seen]).astype(np.uint64)])


def find_diverged(source: Copy, target: Copy) -> dict[int, int]:
    """Find the utterances of which nothing tells whose features are newer: by the hash of
    the id, a generation above both. Raises DamagedError if a shard is not what was
    written."""
    ours, theirs = source.claims(target.runs), target.claims(source.runs)
    _, at_ours, at_theirs = np.intersect1d(ours[0], theirs[0], True, return_indices=True)
    ours, theirs = ours[:, at_ours], theirs[:, at_theirs]
    is_ahead = (theirs[4] > 0) & ((ours[4] > 0) | (ours[2] > theirs[2]))
    is_behind = (ours[4] > 0) & (theirs[2] > ours[2])
    is_open = ~is_ahead & ~is_behind
    ours, theirs = ours[:, is_open], theirs[:, is_open]
    # what one of them lacks, the other one may have been the first to extract
    is_alike = (ours[1] == theirs[1]) & (ours[2] == 1) & (theirs[2] == 1)
    both = np.flatnonzero((ours[3] > 0) & (theirs[3] > 0))
    values = [
        columns_of(one.version, one.index, claims[3, both].astype(np.int64) - 1, VALUE_COLUMNS)
        for one, claims in ((source, ours), (target, theirs))
    ]
    is_alike[both] = are_alike(*values)
    above = np.maximum(ours[2], theirs[2])[~is_alike] + np.uint64(1)
    return dict(zip(ours[0, ~is_alike].tolist(), above.tolist(), strict=True))
