"""Joins a manifest's rows with the items of the same ids, and finds the items that are not
the rows'.

An id alone does not tell what an item was extracted from: another manifest may use it for
another file, a row's `start` may have been edited, or a file replaced. So whatever joins a
manifest with a version does it here."""

from __future__ import annotations

import filecmp
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, ManifestError, MissingItemError, did_you_mean, listing
from featcache.format.shard import Item, Shard
from featcache.manifest.audio_locations import AudioSource, LocalFile, other_spellings
from featcache.manifest.copies import copies_of
from featcache.manifest.segments import Segment, SegmentColumns, Utterance
from featcache.manifest.strings import Hashes, Strings, hash_of
from featcache.manifest.utterances import Manifest, rows_at_even_steps
from featcache.spec import Flags, Ints
from featcache.storage.base import in_parallel
from featcache.version.index import Index
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, RowFailures, failures_of_rows, standing_failures
from featcache.version.records import began, manifest_roots, read_run
from featcache.version.version import Version

_SizesOf = Callable[[Sequence[AudioSource]], Sequence[int | None]]

_FEW = 0.05

_REMEDY = "give it its own cache with -o. To replace the features that are there, add --replace"

_FILES_CHECKED = 256
"""The files of a manifest whose size and mtime are compared with the extracted files'."""

_FILES_COMPARED = 16
"""The number of these files that are compared byte by byte."""


@dataclass(frozen=True)
class RowKeys:
    """The keys of a manifest's rows, which decide the item of each row, each `[rows]`."""

    ids: Strings
    id_hashes: Hashes
    hashes: Hashes
    """The hashes of the rows' segments; see `SegmentColumns.hashes`."""
    has_path: Flags
    """Of rows without a path, only the id is compared."""

    @classmethod
    def of(cls, manifest: Manifest, ids: Strings | None = None) -> RowKeys:
        """Return the keys of a manifest's rows; or, with `ids`, of all copies of each
        utterance, side by side."""
        ids = manifest.ids if ids is None else ids
        copies = len(ids) // max(1, len(manifest))
        has_path = manifest.paths.byte_lengths() > 0
        hashes = manifest.hashes() if has_path.any() else np.zeros(len(manifest), np.uint64)
        return cls(ids, ids.hashes(), np.repeat(hashes, copies), np.repeat(has_path, copies))

    @classmethod
    def of_ids(cls, ids: Strings) -> RowKeys:
        """Return the keys of rows without paths."""
        return cls(ids, ids.hashes(), np.zeros(len(ids), np.uint64), np.zeros(len(ids), bool))

    @classmethod
    def of_utterances(cls, utterances: Sequence[Utterance]) -> RowKeys:
        """Return the keys of some utterances, all of which have a path."""
        ids = Strings.of(utterance.id for utterance in utterances)
        hashes = SegmentColumns.of(utterances).hashes()
        return cls(ids, ids.hashes(), hashes, np.ones(len(ids), bool))


@dataclass(frozen=True)
class RowStatus:
    """The state of a manifest's rows in a version, each `[rows]`."""

    positions: Ints
    """The index position of the item of each row's id, whatever it was made from; else
    -1."""
    present: Flags
    """Whether that item is the row's: from the same path, start, duration and channel, and
    from a file that has not changed since, as far as is known."""
    failed: Flags
    """Whether a failure of the very row stands, so that it is not tried again."""
    wanted: Flags | bool = True
    """Whether the row may be extracted; True for all."""
    failures: Mapping[int, Failure] = field(default_factory=dict)
    """The failures of the very rows, by row number, tried again or not."""

    @property
    def changed(self) -> Flags:
        """The rows whose id has an item from another row or file, or to be made again."""
        return (self.positions >= 0) & ~self.present

    @property
    def missing(self) -> Flags:
        """The rows to extract."""
        return self.wanted & ~self.present & ~self.failed

    @property
    def again(self) -> Flags:
        """The rows to extract that replace an item of the same id."""
        return self.missing & self.changed


def join(rows: RowKeys, index: Index, failures: RowFailures) -> RowStatus:
    """Compare rows with the items of the same ids. A row with one of these `failures`,
    which stand, is not present: its item is older than its file."""
    positions = index.find(rows.ids, rows.id_hashes)
    present = positions >= 0
    compared = np.flatnonzero(present & rows.has_path)
    present[compared] = index.row_hash[positions[compared]] == rows.hashes[compared]
    of_rows = {
        row: failure
        for row, failure in failures_of_rows(failures, rows.id_hashes, rows.hashes).items()
        if rows.has_path[row] and failure.id == rows.ids[row]
    }
    failed = np.zeros(len(positions), bool)
    failed[[*of_rows]] = True
    present &= ~failed
    return RowStatus(positions, present, failed, failures=of_rows)


def with_other_files(
    status: RowStatus, manifest: Manifest, version: Version, index: Index
) -> RowStatus:
    """Mark rows as not present whose files are another corpus's, by `find_other_files`."""
    other, _ = find_other_files(manifest, status, version, index)
    present = status.present.copy()
    present[other] = False
    return replace(status, present=present)


def find_other_files(
    manifest: Manifest,
    status: RowStatus,
    version: Version,
    index: Index,
    sizes_of: _SizesOf | None = None,
) -> tuple[Ints, int]:
    """Find the rows whose file is not the one of the same path that their item was
    extracted from, by a sample of files; none if the version was extracted under the
    manifest's root. The files of a moved corpus have the same sizes, and are gone from the
    old root; those of a copied one are equal.

    `status` is of the manifest's rows, or of all copies of each, side by side. `sizes_of`
    asks servers and containers for files' sizes, in bytes; by default, only plain local
    files are checked. Returns the numbers of the rows or copies, rising, int64 `[n]`; and
    the number of files that were checked."""
    copies = max(1, len(status.present) // max(1, len(manifest)))
    rows = np.flatnonzero(status.present & np.repeat(manifest.paths.byte_lengths() > 0, copies))
    if not len(rows) or str(manifest.root) in (known := manifest_roots(version)):
        return np.empty(0, np.int64), 0
    checked = rows[rows_at_even_steps(len(rows), _FILES_CHECKED)]
    sources = sources_of(version, index, status.positions[checked])
    paths = [*manifest.paths.take(checked // copies)]
    files = [manifest.resolve(path) for path in paths]
    elsewhere = [file for file in files if not isinstance(file, LocalFile)]
    sizes = {} if sizes_of is None else dict(zip(elsewhere, sizes_of(elsewhere), strict=True))
    other, compared = [], 0
    for row, path, here, (size, mtime_ns) in zip(
        checked.tolist(), paths, files, sources[:, :2].tolist(), strict=True
    ):
        if not isinstance(here, LocalFile):
            if sizes.get(here) not in (size, None):
                other.append(row)
            continue
        try:
            now = os.stat(here)
        except (OSError, ValueError):
            continue  # training needs no audio
        if now.st_size != size:
            other.append(row)
        elif now.st_mtime_ns != mtime_ns and compared < _FILES_COMPARED:
            compared += 1
            if any(_differs(Path(root, path), here) for root in known):
                other.append(row)
    return np.array(other, np.int64), len(checked)


def are_few(count: int, utterances: int) -> bool:
    """Tell whether so many of a version's utterances may get other files, or go, without a
    question."""
    return count <= max(1.0, _FEW * utterances)


def refuse_paths(
    manifest: Manifest, status: RowStatus, version: Version, index: Index, remedy: str = _REMEDY
) -> None:
    """Raise ManifestError for a manifest with other paths for more than a few of the
    version's ids, which looks like another corpus. `remedy` says what to do if it is one,
    and if not."""
    copies = len(copies_of(version.info.config))
    rows, utterances = np.flatnonzero(status.again), len(index) // copies
    if are_few(len(np.unique(rows // copies)), utterances):
        return
    positions, differ = status.positions[rows], np.zeros(len(rows), bool)
    for inside, shard, items in by_shard(version, index, positions):
        extracted = shard.table.paths.take(items).hashes()
        differ[inside] = extracted != manifest.paths.take(rows[inside]).hashes()
    rows, positions = rows[differ], positions[differ]
    count = len(np.unique(rows // copies))
    if are_few(count, utterances):
        return
    row, item = manifest[int(rows[0])], item_at(version, index, int(positions[0]))
    what = f"names other files for {count:,} of the {utterances:,} utterances in {version.path}"
    example = f"for example {row.id}: path {item.path} → {row.path}"
    question = f"If this is another corpus with the same ids, {remedy}"
    raise ManifestError(f"{manifest.source}: {what}, {example}. {question}")


def sources_of(version: Version, index: Index, positions: Ints) -> Ints:
    """Read the sources of the items at some positions: the file's size in bytes, its mtime
    in ns, and the mark of the decoder; int64 `[n, 3]`."""
    names = ["source_size", "source_mtime_ns", "decoder"]
    return columns_of(version, index, positions, names).T.view(np.int64)


def columns_of(
    version: Version, index: Index, positions: Ints, names: Sequence[str]
) -> NDArray[np.uint64]:
    """Read columns of shards for the items at some positions, as bits: uint64 `[columns,
    n]`."""
    columns = np.empty((len(names), len(positions)), np.uint64)
    for inside, shard, items in by_shard(version, index, positions):
        for column, name in zip(columns, names, strict=True):
            column[inside] = shard.table[name][items].view(np.uint64)
    return columns


def by_shard(version: Version, index: Index, positions: Ints) -> Iterator[tuple[Ints, Shard, Ints]]:
    """Yield each shard with items at these positions, between their places in `positions`,
    rising, and their numbers in the shard."""
    shards = index.shard[positions]
    for number in np.unique(shards).tolist():
        inside = np.flatnonzero(shards == number)
        shard, items = version.shard(index.shards[number]), index.item[positions[inside]]
        if items.max() >= len(shard.table):  # the index is sealed, but wrong
            what = f"damaged: there is no item {items.max()}: remove this folder"
            raise DamagedError(f"{version.path / 'index'}: {what}")
        yield inside, shard, items


def _differs(old: Path, new: str) -> bool:
    try:
        return not filecmp.cmp(old, new, shallow=False)
    except (OSError, ValueError):  # one does not exist
        return False


def describe_changed(
    manifest: Manifest, rows: RowKeys, version: Version, index: Index, status: RowStatus
) -> str:
    """Describe the changed rows: which, how the first differs, what to do."""
    changed = np.flatnonzero(status.changed)
    first, copies = int(changed[0]), len(rows.ids) // len(manifest)
    item = item_at(version, index, int(status.positions[first]))
    utterance = manifest[first // copies]
    what = what_changed(item, utterance, status.failures.get(first))
    what = what or f"{manifest.resolve(utterance.path)} is not the file that was extracted"
    again = f"`featcache extract {manifest.source} …` extracts them again"
    if manifest.source.startswith("<"):  # in memory
        again = "Extract these rows again"
    condition = " once what failed is mended" if status.failures else ""
    count = f"for {len(changed):,} of {len(rows.ids):,} utterances"
    held = f"{version.path} has features of another row or file: {listing(rows.ids.take(changed))}"
    remedy = f"{again}{condition}; or give the manifest that they were extracted from"
    return f"{manifest.source}: {count}, {held}; {item.id}: {what}. {remedy}"


def what_changed(item: Item, utterance: Utterance, failure: Failure | None) -> str:
    """Describe how an item differs from its row, as in `path a.wav → c.wav`, and whether
    the row has failed."""
    change = differences(item, utterance)
    if failure is None:
        return change
    failed = f"failed: {failure.reason}: {failure.message}"
    if not change:
        return f"its file has changed since, and extracting the new one {failed}"
    return f"{change}, and extracting that {failed}"


def differences(old: Segment, new: Segment) -> str:
    """Describe how a segment differs from an older one; empty if they are equal."""
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in Segment.__struct_fields__]
    return ", ".join(
        f"{name} {_shown(was)} → {_shown(now)}" for name, was, now in pairs if was != now
    )


def _shown(value: object) -> object:
    return "(none)" if value is None else value


def item_at(version: Version, index: Index, position: int) -> Item:
    """Read the item at a position of the index, without features."""
    name, number = index.place(position)
    (item,) = version.shard(name).items([number])
    return item


def missing_error(
    version: Version,
    index: Index,
    failures: Mapping[str, Failure],
    ids: Sequence[str],
    num_wanted: int,
) -> MissingItemError:
    """Return the error for ids without an item, of `num_wanted` in all: why they failed, by
    the ledger's `failures`, or a similar id."""
    failed = [failures[id_] for id_ in ids if id_ in failures]
    where = f"{version.path}, which holds {len(index):,}"
    if len(ids) == 1 and failed:
        reason = f"{failed[0].message} ({failed[0].reason})"
        return MissingItemError(f"{ids[0]}: failed in extraction: {reason}; not in {where}")
    similar = next(filter(None, (_similar(id_, index) for id_ in ids[:_TRIED])), "")
    if len(ids) == 1:
        example = similar or did_you_mean(ids[0], _alike(ids[0], index))
        if not example and len(index):
            example = f", like {index.ids[0]!r}"
        return MissingItemError(f"{ids[0]!r}: no such utterance in {where}{example}")
    reasons = Counter(failure.reason for failure in failed)
    why = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
    known = f"; {len(failed):,} of them failed in extraction ({why})" if failed else similar
    return MissingItemError(
        f"{len(ids):,} of {num_wanted:,} utterances are not in {where}: {listing(ids)}{known}"
    )


_NO_DIGITS, _MOST_ALIKE = re.compile(r"\D"), 1000
_TRIED = 16  # ids whose other spellings are searched


def _similar(id_: str, index: Index) -> str:
    """Describe an item whose id is another spelling of this one; empty if there is none."""
    number = id_.removesuffix(".0").lstrip("0")
    spellings = other_spellings(id_) | {
        "has other leading zeros": [number.zfill(digits) for digits in range(17)],
        "has other capitals": [id_.lower(), id_.upper()],
    }
    for difference, others in spellings.items():
        for other in others:
            if other != id_ and index.find_one(other) >= 0:
                return f"; it has {other!a}, which {difference}"
    return ""


def _alike(id_: str, index: Index) -> list[str]:
    """List ids that begin like this one, as far as any does, and have the same digits."""
    digits, alike = _NO_DIGITS.sub("", id_), list[str]()
    for length in range(len(id_), 0, -1):
        alike = alike or index.ids.beginning_with(id_[:length], _MOST_ALIKE)
    return [other for other in alike if _NO_DIGITS.sub("", other) == digits]


def describe_origin(version: Version, utterance: str) -> dict[str, Any]:
    """Describe the row, the file and the shard of an utterance, and the run and libraries
    that made it. Raises MissingItemError if the version lacks it."""
    index = open_index(version)
    position = index.find_one(utterance)
    if position < 0:
        raise missing_error(version, index, standing_failures(version, index), [utterance], 1)
    name, number = index.place(position)
    shard = version.shard(name)
    (item,) = shard.items([number])
    record = read_run(version.store, shard.run) if shard.run else None
    asked = {} if record is None else record.asked
    started = began(shard.run)
    row_and_file = item.document()
    row_and_file["source_rate"] = row_and_file.pop("sample_rate")
    row_and_file["by_ffmpeg"] = item.decoder > 0
    return {
        "version": str(version.path),
        "shard": shard.name,
        **row_and_file,
        "run": shard.run or None,
        "run_began": None if started is None else started.isoformat(timespec="seconds"),
        **{name: asked.get(name) for name in ("manifest", "root", "host", "from")},
        "made_by": {name: value for name, value in shard.info.made_by.items() if name != "run"},
        "superseded": _superseded(version, index, item),
        "audio_seconds": item.num_samples / version.info.spec.sample_rate,
    }


def _superseded(version: Version, index: Index, item: Item) -> list[str]:
    if item.generation == 1:
        return []
    id_hash = np.uint64(hash_of(item.id))

    def generation(name: str) -> int:
        table = version.shard(name).table
        return int(table["generation"][table["id_hash"] == id_hash].max(initial=0))

    generations = dict(zip(index.shards, in_parallel(generation, index.shards), strict=True))
    older = [name for name, number in generations.items() if 0 < number < item.generation]
    return sorted(older, key=lambda name: -generations[name])
