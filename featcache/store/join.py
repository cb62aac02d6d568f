"""A manifest's rows joined with the items of the same ids, and which of these are not what the rows ask for.

An id alone does not say what an item was extracted from: two manifests may use it for different files, a row's `start`
may have been edited since, or a file been exchanged and the new one be unreadable. So whatever joins a manifest with a
version does it here.
"""

from __future__ import annotations

import filecmp
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.errors import MissingItemError, listing
from featcache.manifest import Manifest, Segment, SegmentColumns, Utterance, row_hashes, rows_at_even_steps
from featcache.store.index import Index
from featcache.store.runs import Failure, outdated_items, roots
from featcache.store.shard import Item
from featcache.store.version import Version
from featcache.strings import Strings

_LOOKED_AT = 256
"""Files of a manifest that are looked at."""

_COMPARED = 16
"""Files that are compared byte by byte, of those."""


@dataclass(frozen=True)
class Rows:
    """What decides which item a row of a manifest has.

    Attributes:
        ids: `[rows]`.
        hashes: uint64 `[rows]`, of path, start, duration and channel; see `featcache.manifest.row_hashes`.
        has_path: bool `[rows]`, whether a row says what it is of. Of others, nothing but the id is compared.
    """

    ids: Strings
    hashes: NDArray[np.uint64]
    has_path: NDArray[np.bool_]

    @classmethod
    def of(cls, manifest: Manifest, ids: Strings | None = None) -> Rows:
        """The rows of a manifest; or of the copies of its utterances, beside each other, with these ids."""
        has_path = manifest.paths.byte_lengths() > 0
        hashes = manifest.row_hashes() if has_path.any() else np.zeros(len(manifest), np.uint64)
        if ids is None:
            return cls(manifest.ids, hashes, has_path)
        copies = len(ids) // max(1, len(manifest))
        return cls(ids, np.repeat(hashes, copies), np.repeat(has_path, copies))

    @classmethod
    def of_utterances(cls, utterances: Sequence[Utterance]) -> Rows:
        """The rows of some utterances, all of which have a path."""
        ids = Strings.of(utterance.id for utterance in utterances)
        return cls(ids, row_hashes(*SegmentColumns.of(utterances)), np.ones(len(ids), bool))


@dataclass(frozen=True)
class Joined:
    """Rows and the items of the same ids.

    Attributes:
        positions: int64 `[rows]`, of the item of each row's id in the index; -1 where there is none.
        is_another: bool `[rows]`, whether that item was extracted from another path, start, duration or channel.
        failures: the standing failure of the very row, by the row's number, for rows that have one.
        other_files: numbers of rows whose file was found to be another, of the same path; see `with_other_files`.
    """

    positions: NDArray[np.int64]
    is_another: NDArray[np.bool_]
    failures: Mapping[int, Failure]
    other_files: Sequence[int] = ()

    @property
    def is_changed(self) -> NDArray[np.bool_]:
        """bool `[rows]`: there is an item of the id, but of another row, or of what the row's file was before."""
        changed = self.is_another.copy()
        failed = np.fromiter(self.failures, np.int64, len(self.failures))
        changed[failed[self.positions[failed] >= 0]] = True
        changed[np.array(self.other_files, np.int64)] = True
        return changed


def join(index: Index, rows: Rows, failures: Mapping[str, Failure]) -> Joined:
    """Join rows with the items of the same ids.

    Args:
        index: of a version.
        rows: of a manifest.
        failures: those that stand, by id.
    """
    positions = index.find(rows.ids)
    found = np.flatnonzero((positions >= 0) & rows.has_path)
    is_another = np.zeros(len(positions), bool)
    is_another[found] = index.row_hash[positions[found]] != rows.hashes[found]
    failed = {}
    if failures:
        failed_row = dict(zip(failures, row_hashes(*SegmentColumns.of(failures.values())).tolist(), strict=True))
        may_have_failed = np.isin(rows.ids.hashes(), Strings.of(failures).hashes()) & rows.has_path
        for row in np.flatnonzero(may_have_failed).tolist():
            if failed_row.get(id_ := rows.ids[row]) == int(rows.hashes[row]):
                failed[row] = failures[id_]
    return Joined(positions, is_another, failed)


def join_version(version: Version, index: Index, rows: Rows, manifest: Manifest) -> Joined:
    """A version's items for a manifest's rows, and which of them are of another row or file than the rows ask for."""
    if not rows.has_path.any():
        return join(index, rows, {})
    return with_other_files(join(index, rows, outdated_items(version, index)), rows, manifest, version, index)


def with_other_files(joined: Joined, rows: Rows, manifest: Manifest, version: Version, index: Index) -> Joined:
    """The same, with those rows whose files are another corpus's, of the same ids and paths, as far as some files tell.

    Args:
        joined: the rows and their items.
        rows: that were joined.
        manifest: that the rows are of.
        version: that has the items.
        index: of the version.
    """
    same = np.flatnonzero((joined.positions >= 0) & rows.has_path & ~joined.is_changed)
    copies = max(1, len(rows.ids) // max(1, len(manifest)))
    other, _ = find_other_files(manifest, same // copies, joined.positions[same], version, index)
    return replace(joined, other_files=same[other].tolist())


def find_other_files(
    manifest: Manifest, rows: NDArray[np.int64], positions: NDArray[np.int64], version: Version, index: Index
) -> tuple[NDArray[np.int64], int]:
    """Which of some rows have another file than the one of the same path that their item was extracted from.

    Some files are looked at, and none where the version was extracted under the manifest's root. A corpus that was
    moved has files of the same sizes, and no longer any under the old root; in one that was copied, they are equal.

    Args:
        manifest: that the rows are of.
        rows: int64 `[n]`, numbers of rows.
        positions: int64 `[n]`, of their items.
        version: that has the items.
        index: of the version.

    Returns:
        Numbers below n, rising, int64; and how many files were looked at.
    """
    if not len(rows) or str(manifest.root) in (known := roots(version)):
        return np.empty(0, np.int64), 0
    looked_at = rows_at_even_steps(len(rows), _LOOKED_AT)
    sources = sources_of(version, index, positions[looked_at])
    other, compared = [], 0
    for number, (size, mtime_ns, _) in zip(looked_at.tolist(), sources.tolist(), strict=True):
        path = manifest.paths[int(rows[number])]
        here = manifest.resolve(path)
        try:
            status = os.stat(here)
        except (OSError, ValueError):
            continue  # training needs no audio
        if status.st_size != size:
            other.append(number)
        elif status.st_mtime_ns != mtime_ns and compared < _COMPARED:
            compared += 1
            if any(_differs(Path(root, path), here) for root in known):
                other.append(number)
    return np.array(other, np.int64), len(looked_at)


def sources_of(version: Version, index: Index, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The audio files that items were extracted from: size in bytes, mtime in ns and sample rate in Hz.

    Args:
        version: that has the items.
        index: of the version.
        positions: int64 `[n]`, of the items.

    Returns:
        int64 `[n, 3]`.

    Raises:
        DamagedError: a shard is not what was written.
    """
    sources = np.empty((len(positions), 3), np.int64)
    shards = index.shard[positions]
    for number in np.unique(shards).tolist():
        inside = np.flatnonzero(shards == number)
        sources[inside] = version.shard(index.shards[number]).column("sources")[index.item[positions[inside]]]
    return sources


def _differs(old: Path, new: Path) -> bool:
    """Whether both files are there, and hold other bytes."""
    try:
        return not filecmp.cmp(old, new, shallow=False)
    except (OSError, ValueError):
        return False


def about_changed(manifest: Manifest, rows: Rows, version: Version, index: Index, joined: Joined) -> str:
    """What to say of rows whose items are not what they ask for: which, what is different of the first, what to do.

    Args:
        manifest: that the rows are of.
        rows: that were joined.
        version: that has the items.
        index: of the version.
        joined: the rows and the items; at least one is changed.

    Raises:
        DamagedError: the shard of the first one is not what was written.
    """
    changed = np.flatnonzero(joined.is_changed)
    first, copies = int(changed[0]), len(rows.ids) // len(manifest)
    item = item_at(version, index, int(joined.positions[first]))
    utterance = manifest[first // copies]
    if first in joined.other_files:
        what = f"{manifest.resolve(utterance.path)} is not the file that was extracted"
    else:
        what = what_changed(item, utterance, joined.failures.get(first))
    mended = " once what failed is mended" if joined.failures else ""
    return (
        f"{manifest.source}: for {len(changed):,} of {len(rows.ids):,} utterances, {version.path} has features of "
        f"another row or file: {listing(rows.ids.take(changed))}; {item.id}: {what}. "
        f"`featcache extract {manifest.source} …` extracts them again{mended}; or give the manifest that they were "
        "extracted from"
    )


def what_changed(item: Item, utterance: Utterance, failure: Failure | None) -> str:
    """What is different of an item and the row that asks for it: `path a.wav → c.wav`.

    Args:
        item: that there is.
        utterance: what is asked for.
        failure: of that, where it has failed.
    """
    found = differences(item, utterance)
    if failure is None:
        return found
    failed = f"failed: {failure.reason}: {failure.message}"
    if not found:
        return f"its file has changed since, and extracting the new one {failed}"
    return f"{found}, and extracting that {failed}"


def differences(item: Segment, utterance: Segment) -> str:
    """What a row has otherwise than the row that an item was extracted from; empty if nothing."""
    names = [field.name for field in fields(Segment)]
    pairs = [(name, getattr(item, name), getattr(utterance, name)) for name in names]
    return ", ".join(f"{name} {_shown(was)} → {_shown(now)}" for name, was, now in pairs if was != now)


def item_at(version: Version, index: Index, position: int) -> Item:
    """What the version keeps of an item besides its features.

    Raises:
        DamagedError: its shard is not what was written.
    """
    place = index.place(position)
    (item,) = version.shard(place.shard).items([place.item])
    return item


def missing_error(
    version: Version, index: Index, failures: Mapping[str, Failure], ids: Sequence[str], num_wanted: int
) -> MissingItemError:
    """The error for ids that have no item, of `num_wanted` in all; it says whether, and why, they failed.

    Args:
        version: The version.
        index: Its items.
        failures: The failures that its ledger has, by id.
        ids: The missing ids; at least one.
        num_wanted: How many ids were asked for.
    """
    failed = [failures[id_] for id_ in ids if id_ in failures]
    where = f"{version.path}, which holds {len(index):,}"
    if len(ids) == 1 and failed:
        reason = f"{failed[0].message} ({failed[0].reason})"
        return MissingItemError(f"{ids[0]}: failed in extraction: {reason}; not in {where}")
    if len(ids) == 1:
        example = f", like {index.ids[0]!r}" if len(index) else ""
        return MissingItemError(f"{ids[0]!r}: no such utterance in {where}{example}")
    reasons = Counter(failure.reason for failure in failed)
    why = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
    return MissingItemError(
        f"{len(ids):,} of {num_wanted:,} utterances are not in {where}: {listing(ids)}"
        + (f"; {len(failed):,} of them failed in extraction ({why})" if failed else "")
    )


def _shown(value: object) -> object:
    return "(none)" if value is None else value
