"""The manifest minus what is in the version = the shards still to make. Pure: nothing here reads audio or writes.

The manifest is partitioned once, by its rows alone, into ranges of about a shard each. A range without any
extracted row is one task, whatever happened to the others: so a run that was killed and resumed makes exactly
the shards of an uninterrupted run. The missing rows of partly extracted ranges (retried failures, changed
rows, a grown manifest) are gathered into tasks of a shard's size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from featcache.manifest import Manifest, Utterance
from featcache.store.index import Index, Place
from featcache.store.join import RowKeys, join
from featcache.store.runs import Failure

MAX_ITEMS = 100_000
"""Utterances in a shard, at most: short clips are many to a megabyte."""


@dataclass(frozen=True)
class Todo:
    """What a version lacks of a manifest; all arrays have one entry a row.

    Attributes:
        present: bool, rows whose features are there, as the row now is; unless its file has changed since, and has
            failed.
        failed: bool, rows that failed in an earlier run and need not be tried again.
        replaces: int64, position in the index of the item of the same id that another row (other path,
            start, duration or channel) or another file made; -1 where there is none.
        wanted: bool, rows that are to be done at all.
    """

    present: NDArray[np.bool_]
    failed: NDArray[np.bool_]
    replaces: NDArray[np.int64]
    wanted: NDArray[np.bool_]

    @property
    def missing(self) -> NDArray[np.bool_]:
        """bool `[rows]`: what is to be done."""
        return self.wanted & ~self.present & ~self.failed


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One shard to make: small, picklable, and done by whoever has the manifest's root and the configs.

    Attributes:
        name: of the work: a hash of the utterances asked for.
        row: manifest row of the first utterance.
        utterances: to extract, in the manifest's order.
        seconds: of audio, of each utterance: known or estimated.
        replaces: the item that an utterance replaces, by its id.
    """

    name: str
    row: int
    utterances: tuple[Utterance, ...]
    seconds: tuple[float, ...]
    replaces: dict[str, Place]

    def supersedes(self, extracted: Iterable[str]) -> dict[str, list[int]]:
        """The items that are obsolete once these ids are extracted: shard name -> item numbers there.

        Not those of utterances that failed: what there is of them stays, and the ledger says that it is older.
        """
        obsolete: dict[str, list[int]] = {}
        for place in (self.replaces[id_] for id_ in extracted if id_ in self.replaces):
            obsolete.setdefault(place.shard, []).append(place.item)
        return obsolete

    def only(self, numbers: Set[int]) -> ShardTask:
        """The task without the utterances whose numbers are not given."""
        keep = sorted(numbers)
        return replace(
            self,
            utterances=tuple(self.utterances[i] for i in keep),
            seconds=tuple(self.seconds[i] for i in keep),
        )


def compare(
    manifest: Manifest,
    index: Index,
    failures: Mapping[str, Failure],
    is_unchanged: Callable[[Failure], bool] = lambda _: True,
) -> Todo:
    """Hold a manifest against what a version has.

    Args:
        manifest: what is wanted.
        index: of the version.
        failures: those that stand, by id.
        is_unchanged: whether a failed utterance's file is still the one that failed; else it is tried again.
    """
    joined = join(index, RowKeys.of(manifest), failures)
    present = (joined.positions >= 0) & ~joined.is_changed
    failed = np.zeros(len(manifest), bool)
    for row, failure in joined.failures.items():
        failed[row] = is_unchanged(failure)
    return Todo(present, failed, np.where(present, -1, joined.positions), np.ones(len(manifest), bool))


def partition(seconds: NDArray[np.float64], seconds_per_shard: float) -> NDArray[np.int64]:
    """The number of the range that each row is in, int64 `[rows]`, from the rows' durations alone."""
    weight = np.clip(seconds / seconds_per_shard, 1 / MAX_ITEMS, 1)  # at most 1: a row fills no more than its shard
    begins = np.zeros(len(weight))
    np.cumsum(weight[:-1], out=begins[1:])
    ranges: NDArray[np.int64] = np.floor(begins).astype(np.int64)
    return ranges


def tasks(
    manifest: Manifest, index: Index, todo: Todo, seconds: NDArray[np.float64], seconds_per_shard: float
) -> Iterator[ShardTask]:
    """The shards to make, in the manifest's order as far as can be.

    Args:
        manifest: what is wanted.
        index: of the version.
        todo: what is missing.
        seconds: float64 `[rows]`, durations, known or estimated; they decide only which shard a row is in.
        seconds_per_shard: of audio, about.
    """
    rows = np.flatnonzero(todo.missing)
    if not len(rows):
        return
    ranges = partition(seconds, seconds_per_shard)
    partly_there = np.zeros(int(ranges[-1]) + 1, bool)
    partly_there[ranges[todo.present]] = True
    partly = partly_there[ranges[rows]]
    whole, gathered = rows[~partly], rows[partly]
    for group, shard in ((whole, ranges[whole]), (gathered, partition(seconds[gathered], seconds_per_shard))):
        for members in np.split(group, np.flatnonzero(np.diff(shard)) + 1):
            if len(members):
                yield _task(manifest, index, todo, seconds, members)


def _task(
    manifest: Manifest, index: Index, todo: Todo, seconds: NDArray[np.float64], rows: NDArray[np.int64]
) -> ShardTask:
    utterances = tuple(manifest[row] for row in rows.tolist())
    name = hashlib.sha256("\n".join(map(repr, utterances)).encode()).hexdigest()[:12]
    replaces = {
        utterance.id: index.place(position)
        for utterance, position in zip(utterances, todo.replaces[rows].tolist(), strict=True)
        if position >= 0
    }
    return ShardTask(name, int(rows[0]), utterances, tuple(seconds[rows].tolist()), replaces)
