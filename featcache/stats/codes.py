"""How the codes of a version are used: how often each occurs, how many are used, and how evenly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from featcache.errors import StoreError
from featcache.loader import Cache
from featcache.manifest import Manifest
from featcache.stats.pieces import Task, run, select, tasks


@dataclass(frozen=True, eq=False)
class Usage:
    """How the codes of a version are used.

    Attributes:
        version: its folder's name.
        fingerprint: of the version.
        frames: that were counted.
        utterances: that they are of.
        counts: how often each code of each codebook occurs, int64 `[size]` for each.
    """

    version: str
    fingerprint: str
    frames: int
    utterances: int
    counts: list[NDArray[np.int64]]

    @property
    def used(self) -> list[int]:
        """How many codes of each codebook occur at all."""
        return [int((counts > 0).sum()) for counts in self.counts]

    @property
    def entropy(self) -> list[float]:
        """Of each codebook's codes, in bits: what an ideal code for single codes would need for one of them."""
        found = []
        for counts in self.counts:
            shares = counts[counts > 0] / self.frames
            found.append(float(-(shares * np.log2(shares)).sum()) + 0.0)
        return found

    @property
    def perplexity(self) -> list[float]:
        """Of each codebook: how many codes, all used equally often, would have its entropy."""
        return [2.0**bits for bits in self.entropy]


def usage(
    cache: Cache,
    manifest: str | Path | Manifest | None = None,
    *,
    threads: int = 1,
    report: Callable[[int], object] = lambda frames: None,
) -> Usage:
    """Count the codes of a version.

    Args:
        cache: of codes.
        manifest: whose utterances count; all of the cache's without one.
        threads: to read and count with.
        report: called now and then with how many more frames have been done.

    Raises:
        StoreError: the cache holds no codes, no utterances, or a code that its codebook has not.
        ManifestError: the manifest cannot be read, or has faults.
        MissingItemError: it has utterances that the cache has not; names up to ten.
        DamagedError: a shard is damaged.
    """
    spec, path = cache.spec, cache.version.path
    if not spec.codebook_sizes:
        raise StoreError(f"{path}: holds {spec.units}, {spec.dtype}: only codes are counted")
    selection = select(cache, manifest, None)
    counts = [np.zeros(size, np.int64) for size in spec.codebook_sizes]
    adding = Lock()

    def work(task: Task) -> None:
        codes = task.read(cache)
        steps = np.zeros(len(codes) + 1, np.int8)  # up and down where pieces begin and end
        np.add.at(steps, task.starts - task.first, 1)
        np.add.at(steps, task.starts - task.first + task.counts, -1)
        codes = codes[steps[:-1].cumsum() > 0]
        for number, column in enumerate(codes.T):
            found = np.bincount(column, minlength=len(counts[number]))
            if len(found) > len(counts[number]):
                raise StoreError(
                    f"{path}: holds code {len(found) - 1} of codebook {number}, which has {len(counts[number])}: "
                    "`featcache verify` says where"
                )
            with adding:
                counts[number] += found

    run(work, tasks(cache.index, selection, len(counts)), threads, report)
    frames = int(cache.lengths[selection.positions].sum())
    return Usage(path.name, cache.version.info.fingerprint, frames, len(selection.positions), counts)
