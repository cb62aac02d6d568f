"""Finds the differences of two copies of a version that were both extracted into.

Each copy counts generations by itself, so these do not tell which features are newer. A
copy has seen an item of the other copy if it knows the run that made it. If neither copy
has seen the other's item, and the items differ, `copy` wants the utterance once more."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from featcache.spec import Flags
from featcache.version.index import Index
from featcache.version.join import columns_of
from featcache.version.records import run_names
from featcache.version.version import Version
from featcache.version.wanted import Wanted

_Columns = NDArray[np.uint64]

VALUE_COLUMNS = ("row_hash", "item_crc32c", "source_hash")
"""The columns that tell whether two items of an id are alike."""


def are_alike(ours: _Columns, theirs: _Columns) -> Flags:
    """Compare items by their `VALUE_COLUMNS`, `[3, n]`: items of one row are alike if their
    features or files are equal. Returns bool `[n]`."""
    same_row, same_features, same_file = ours == theirs
    alike: Flags = same_row & (same_features | (same_file & (ours[2] > 0)))
    return alike


@dataclass(frozen=True)
class Copy:
    """A copy of a version, with its index and wanted sets."""

    version: Version
    index: Index
    wanted: Sequence[Wanted]

    @property
    def runs(self) -> Set[str]:
        """The names of the runs that have a record or a shard in the copy."""
        return {*run_names(self.version.store), *(maker.run for maker in self.index.makers)}

    def claims(self, runs: Set[str]) -> _Columns:
        """List the ids that the copy has or wants, for another copy that knows `runs`:
        uint64 `[5, ids]`, sorted. The rows are the hashes of id and row, the generation,
        1 + the position of the item (0 if it is missing), and 1 if the other copy has seen
        it."""
        index = self.index
        items = np.stack([index.row_hash, index.generation])[:, index.by_hash]
        held = np.concatenate([index.id_hash[None], items])
        rows = np.concatenate([held, *(wanted.rows for wanted in self.wanted)], axis=1)
        rows = rows[:, np.lexsort(rows[[2, 0]])]
        rows = rows[:, np.flatnonzero(np.diff(rows[0], append=rows[0, -1:] + np.uint64(1)))]
        place = index.find_hashes(rows[0]) + 1
        is_seen = np.full(len(place), self.runs <= runs)
        if len(index):
            place[index.generation[place - 1] < rows[2]] = 0
            run_of_shard = [index.makers[shard.made_by].run for shard in index.summaries]
            is_known = np.array([run in runs for run in run_of_shard])
            is_seen = np.where(place, is_known[index.shard[place - 1]], is_seen)
        return np.concatenate([rows, np.stack([place, is_seen]).astype(np.uint64)])


def find_diverged(source: Copy, target: Copy) -> dict[int, int]:
    """Find the utterances whose newer features are not known: the hash of each id, with a
    generation above both."""
    ours, theirs = source.claims(target.runs), target.claims(source.runs)
    _, in_ours, in_theirs = np.intersect1d(ours[0], theirs[0], True, return_indices=True)
    ours, theirs = ours[:, in_ours], theirs[:, in_theirs]
    is_ahead = (theirs[4] > 0) & ((ours[4] > 0) | (ours[2] > theirs[2]))
    is_behind = (ours[4] > 0) & (theirs[2] > ours[2])
    is_open = ~is_ahead & ~is_behind
    ours, theirs = ours[:, is_open], theirs[:, is_open]
    # if one of them lacks it, the other may have been the first to extract it
    is_alike = (ours[1] == theirs[1]) & (ours[2] == 1) & (theirs[2] == 1)
    both = np.flatnonzero((ours[3] > 0) & (theirs[3] > 0))
    is_alike[both] = are_alike(_values(source, ours[:, both]), _values(target, theirs[:, both]))
    above = np.maximum(ours[2], theirs[2])[~is_alike] + np.uint64(1)
    return dict(zip(ours[0, ~is_alike].tolist(), above.tolist(), strict=True))


def _values(copy: Copy, claims: _Columns) -> _Columns:
    positions = claims[3].astype(np.int64) - 1
    return columns_of(copy.version, copy.index, positions, VALUE_COLUMNS)
