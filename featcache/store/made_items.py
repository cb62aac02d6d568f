"""How many items of a version each run has made: those that count, and those that prune has taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from featcache.store.index import Index
from featcache.store.run_records import ManifestKey, RunRecord, read_run
from featcache.store.version import Version


class MadeItems:
    """The items of a version, by the runs that made them.

    `runs` is what its runs have recorded, as far as it has been read; others are read when they are asked for.
    """

    def __init__(self, version: Version, index: Index, runs: Sequence[RunRecord]) -> None:
        self._version = version
        self._index = index
        self._runs = runs
        self._known = {run.name: run for run in runs}

    def beside(self, manifest: ManifestKey, items: Mapping[str, int] | None = None, after: str = "") -> int:
        """The number of items that runs over other manifests have made, or runs of which that is not known; only runs
        later than one of that name. `items` are how many each has made; by default, those that count.
        """
        items = self.counts if items is None else items
        return sum(count for run, count in items.items() if run > after and self.manifest_of(run) != manifest)

    def counts_since(self, run: str) -> Counter[str]:
        """The number of items that count, or have been pruned after a run began, by the run that made them."""
        items = Counter(self.counts)
        for pruned_by, made_by, count in self._pruned:
            if pruned_by > run:
                items[made_by] += count
        return items

    def num_pruned_since(self, run: str) -> int:
        """The number of items that have been pruned after a run began."""
        return sum(count for pruned_by, _, count in self._pruned if pruned_by > run)

    @cached_property
    def _pruned(self) -> list[tuple[str, str, int]]:
        """What went with each shard that was pruned: the run that pruned it, the run that had made the items, and how
        many. A shard that is still there was not.
        """
        latest = {
            event.shard: (run.name, event.made_by or "", event.pruned)
            for run in self._runs
            for event in run.events()
            if event.pruned
        }
        version = self._version
        there = {*version.listed_shards()} if latest else ()
        # In an object store, a kill may have left files of one that is gone.
        return [pruned for shard, pruned in latest.items() if shard not in there or not version.has_shard(shard)]

    @cached_property
    def counts(self) -> Counter[str]:
        """The number of items that count, by the run that made them."""
        items: Counter[str] = Counter()
        counts = np.bincount(self._index.shard, minlength=len(self._index.shards))
        for run, count in zip(self._index.runs, counts.tolist(), strict=True):
            items[run] += count
        return items

    def manifest_of(self, name: str) -> ManifestKey | None:
        """The manifest of a run, by its name; None if there is no record of what it was to do."""
        if name not in self._known and (run := read_run(self._version, name)) is not None:  # it is not of the latest
            self._known[name] = run
        run = self._known.get(name)
        return run.manifest if run is not None and run.is_known else None
