"""The current state of a manifest's files: their length, whether they have changed since extraction, and whether they
are the files that a version was extracted from at all."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.audio.decode import probe_rate, probe_seconds
from featcache.config import AudioPolicy
from featcache.errors import ManifestError, Reason, counted
from featcache.extract.plan import Todo
from featcache.manifest import Manifest, rows_at_even_steps
from featcache.store.index import Index
from featcache.store.join import find_other_files, item_at, sources_of
from featcache.store.runs import Failure
from featcache.store.version import Version

_PROBED = 256
"""Files that are looked at where not all need to be."""

_STAT_THREADS = 16

_MAY_PASS = frozenset({Reason.FILE_UNREADABLE, Reason.NOT_IN_SOURCE, Reason.OUT_OF_MEMORY})
"""Reasons that are gone when the disk, the source version or the machine is another."""

_FEW = 0.05
"""Of a version's utterances: as many may get another file without a word from the user."""


def row_seconds(manifest: Manifest, known: NDArray[np.float64], speed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row's duration; where it is not known, being NaN, the mean of what some files' headers say.

    Args:
        manifest: `[rows]`.
        known: float64 `[rows]`, seconds.
        speed: float64 `[rows]`, at which each row's recording is to be.
    """
    seconds = known.copy()
    unknown = np.flatnonzero(np.isnan(seconds))
    if not len(unknown):
        return seconds
    probed = unknown[rows_at_even_steps(len(unknown), _PROBED)]
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        found = pool.map(lambda row: probe_seconds(manifest.resolve(manifest.paths[row])), probed.tolist())
    known = np.array([math.nan if one is None else one for one in found])
    known = (known - np.nan_to_num(manifest.start[probed])) / speed[probed]
    usable = known > 0
    seconds[unknown] = known[usable].mean() if usable.any() else 1.0
    seconds[probed[usable]] = known[usable]
    return seconds


def with_changed_sources(manifest: Manifest, todo: Todo, index: Index, version: Version) -> Todo:
    """Also miss the rows whose file's size or mtime is not what it was when it was decoded."""
    rows = np.flatnonzero(todo.present)
    positions = index.find(manifest.ids.take(rows))
    sources = sources_of(version, index, positions)[:, :2]

    def look(some: NDArray[np.int64]) -> list[tuple[int | None, int | None]]:
        return [stat_of(manifest.resolve(path)) for path in manifest.paths.take(some)]

    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        now = list(chain.from_iterable(pool.map(look, np.array_split(rows, 1 + len(rows) // 1024))))
    gone = None, None  # what is no more cannot be extracted again
    same = [stat in (gone, tuple(source)) for stat, source in zip(now, sources.tolist(), strict=True)]
    changed = ~np.array(same, bool)
    present, replaces = todo.present.copy(), todo.replaces.copy()
    present[rows[changed]] = False
    replaces[rows[changed]] = positions[changed]
    return replace(todo, present=present, replaces=replaces)


def refuse_another_corpus(manifest: Manifest, todo: Todo, index: Index, version: Version) -> None:
    """Refuse a manifest that has the version's ids and paths, and other files: another corpus, it seems.

    See `find_other_files` for what is looked at.

    Raises:
        ManifestError: says what to do in either case.
    """
    present = np.flatnonzero(todo.present)
    positions = index.find(manifest.ids.take(present))
    other, looked_at = find_other_files(manifest, present, positions, version, index)
    if len(other):
        row = manifest[int(present[other[0]])]
        raise ManifestError(
            f"{manifest.source}: {len(other):,} of {counted(looked_at, 'file')} checked are not what {version.path} "
            f"was extracted from, for example {manifest.resolve(row.path)}. If this is another corpus "
            "with the same ids and paths, give it its own cache with -o. If the audio has changed, --check-sources "
            "extracts it again"
        )


def refuse_other_files(manifest: Manifest, todo: Todo, index: Index, version: Version, copies: int) -> None:
    """Refuse to replace more than a few per cent of a version, and more than one utterance, by what other files hold:
    that is another corpus with the same ids, it seems.

    Args:
        manifest: `[rows]`.
        todo: what is missing of it, and what that replaces.
        index: of the version.
        version: that is to be filled.
        copies: how many rows there are of each utterance, which differ in speed and noise.

    Raises:
        ManifestError: says what to do in either case.
    """
    rows = np.flatnonzero(todo.missing & (todo.replaces >= 0))
    utterances = len(index) // copies
    most = max(1.0, _FEW * utterances)
    if len(np.unique(rows // copies)) <= most:
        return
    rows = rows[_have_other_paths(manifest, rows, todo.replaces[rows], index, version)]
    count = len(np.unique(rows // copies))
    if count <= most:
        return
    row = manifest[int(rows[0])]
    item = item_at(version, index, int(todo.replaces[rows[0]]))
    raise ManifestError(
        f"{manifest.source}: names other files for {count:,} of the {utterances:,} utterances in {version.path}, for "
        f"example {row.id}: path {item.path} → {row.path}. If this is another corpus with the same ids, such as dev "
        "beside train, give it its own cache with -o. If its features are to take the place of those there, --replace "
        "extracts them"
    )


def _have_other_paths(
    manifest: Manifest, rows: NDArray[np.int64], positions: NDArray[np.int64], index: Index, version: Version
) -> NDArray[np.bool_]:
    """Which rows have another path than the items at these positions were extracted from; bool `[rows]`."""
    differ = np.zeros(len(rows), bool)
    shards = index.shard[positions]
    for number in np.unique(shards).tolist():
        inside = np.flatnonzero(shards == number)
        paths = version.shard(index.shards[number]).paths.take(index.item[positions[inside]].astype(np.int64))
        differ[inside] = paths.hashes() != manifest.paths.take(rows[inside]).hashes()
    return differ


def would_fail_again(manifest: Manifest, failure: Failure, audio: AudioPolicy, max_seconds: float | None) -> bool:
    """Whether what failed would fail again: its file is still the same, and still refused if it was.

    Args:
        manifest: whose root the failure's path is relative to.
        failure: of an earlier run.
        audio: the config's policy now.
        max_seconds: the longest that the recording may be now; None for no limit.
    """
    path = manifest.resolve(failure.path)
    if failure.reason in _MAY_PASS or stat_of(path) != (failure.size, failure.mtime_ns):
        return False
    if failure.reason == Reason.RATE_REFUSED and audio.resample != "forbid":
        rate = probe_rate(path)
        return rate is not None and rate < audio.min_source_rate
    if failure.reason != Reason.TOO_LONG:
        return True
    held = math.inf if failure.duration else probe_seconds(path)  # infinite: at least its duration
    if max_seconds is None or held is None:
        return False
    return min(failure.duration or math.inf, held - (failure.start or 0.0)) > max_seconds


def stat_of(path: Path) -> tuple[int | None, int | None]:
    """A file's size in bytes and mtime in ns; None where there is no such file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns
