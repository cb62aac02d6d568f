"""The index, which makes opening 10^7 items fast: flat arrays, memory-mapped and shared by all processes.

It is derived from the shards, and lies in `index/<signature>/`. The signature is a hash of the version's fingerprint
and the shards' names. Shards never change, so an index whose signature fits the names in `shards/` is right, and after
any change there is another signature. Deleting an index loses nothing; if anything is wrong with it, it is built anew.

    index.json      the fingerprint, the shards' names in the version's order, and a CRC-32C of each file; sealed
    <array>.npy     the arrays of an `Index`; the ids are in `ids.npy` and `id_offsets.npy`

Items are in the version's order: by the manifest row of the run that wrote their shard.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location, ObjectPath
from featcache.storage.objects import Objects, in_parallel
from featcache.storage.store import store_of
from featcache.store.commits import recorded_entries
from featcache.store.documents import UNSEALED, is_sealed, parse_object, read_bytes, seal
from featcache.store.fields import MOST
from featcache.store.files import folder_to_write, publish_folder, remove_from_version
from featcache.store.index_files import read_arrays, write_array
from featcache.store.index_shards import MOST_DESCRIBED, describe, items_in
from featcache.store.shard import Shard, are_rising
from featcache.store.shard_items import AllItems, ShardItems, joined_columns, read_items
from featcache.store.tags import read_tag, tag_names
from featcache.store.version import Version
from featcache.strings import Strings, hash_of

_ARRAYS = {
    "shard": np.uint32,
    "item": np.uint32,
    "first_frame": np.int64,
    "num_frames": np.int64,
    "row_hash": np.uint64,
    "id_hash": np.uint64,
    "by_hash": np.uint32,
}
_FILES = ("ids", "id_offsets", *_ARRAYS)
_KEPT = 3


class Place(NamedTuple):
    """Where an item is, and what it was extracted from."""

    shard: str
    """The name of its shard."""
    item: int
    """Its number in that shard."""
    row_hash: int
    """The hash of the row that it was extracted from."""


@dataclass(frozen=True)
class Index:
    """All items of a version that count: those that no later extraction has superseded."""

    shards: list[str]
    """The shards' names."""
    runs: list[str]
    """The names of the runs that extracted each shard's items; empty where a shard does not say."""
    ids: Strings
    """The ids of the items, `[items]`."""
    shard: NDArray[np.uint32]
    """The position of each item's shard in `shards`, uint32 `[items]`."""
    item: NDArray[np.uint32]
    """Each item's number in its shard, uint32 `[items]`."""
    first_frame: NDArray[np.int64]
    """Each item's first frame in its shard's features, int64 `[items]`."""
    num_frames: NDArray[np.int64]
    """Each item's number of frames, int64 `[items]`."""
    row_hash: NDArray[np.uint64]
    """The hash of the row that each item was extracted from, uint64 `[items]`; see `SegmentColumns.hashes`."""
    id_hash: NDArray[np.uint64]
    """FNV-1a hashes of the ids, sorted, uint64 `[items]`."""
    by_hash: NDArray[np.uint32]
    """The positions of the items in the order of `id_hash`, uint32 `[items]`."""
    described: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What else was said of the shards when it was built, not checked yet; empty if nothing was. `describe_shards` has
    it."""

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, position: int) -> Place:
        """Where the item at a position is, and what it was extracted from."""
        return Place(self.shards[self.shard[position]], int(self.item[position]), int(self.row_hash[position]))

    def find(self, ids: Strings) -> NDArray[np.int64]:
        """The position of each id, int64 `[n]`; -1 for those that are not there."""
        wanted = ids.hashes()
        at = np.searchsorted(self.id_hash, wanted)
        positions = np.full(len(ids), -1, np.int64)
        pending = np.flatnonzero(at < len(self))
        while len(pending):  # one round, unless hashes collide
            pending = pending[self.id_hash[at[pending]] == wanted[pending]]
            candidates = self.by_hash[at[pending]].astype(np.int64)
            same = _equal(ids, pending, self.ids, candidates)
            positions[pending[same]] = candidates[same]
            pending = pending[~same]
            at[pending] += 1
            pending = pending[at[pending] < len(self)]
        return positions

    def find_one(self, id: str) -> int:  # noqa: A002
        """The position of an id, -1 if it is not there; for a single id, faster than `find`."""
        wanted = np.uint64(hash_of(id))
        at = int(np.searchsorted(self.id_hash, wanted))
        while at < len(self) and self.id_hash[at] == wanted:
            if self.ids[position := int(self.by_hash[at])] == id:
                return position
            at += 1
        return -1


def open_index(version: Version, names: Sequence[str] | None = None, *, keep: bool = False) -> Index:
    """The index of the version's shards: the one on disk if it fits; else it is built, and kept on disk if possible; in
    an object store, only with `keep`. With the names of the shards that count, it is of the version as it was, and not
    kept in an object store; by default, of all that are there now.

    Raises:
        DamagedError: A shard's metadata or columns are damaged, or a shard of these names is gone.
    """
    if isinstance(version.path, Path):
        if names is None:
            return version.reading(lambda: _open_index(version, version.shard_names()))
        return _open_index(version, names)
    if names is None:
        return _open_in_store(version, version.listed_shards(), keep)
    index = load_index(version, names) or build_index(map(version.shard, names))
    version.take_for_whole(index.shards)
    return index


def keep_index(version: Version) -> tuple[Index, bool]:
    """The index of all shards of a version, which is on disk; and whether it had to be built.

    Raises:
        DamagedError: A shard's metadata or columns are damaged.
        StoreError: It cannot be kept.
    """
    listed = version.listed_shards()
    if (index := load_index(version, listed)) is not None:
        return index, False
    index = open_index(version) if isinstance(version.path, Path) else _open_in_store(version, listed, keep=True)
    if load_index(version, index.shards) is None:
        raise StoreError(f"{version.path / 'index'}: cannot be written, or is a link: the index has not been kept")
    return index, True


def _open_in_store(version: Version, listed: Sequence[str], keep: bool) -> Index:
    if (index := load_index(version, listed)) is None:
        index = _index_of_whole(version, listed)
        if keep and load_index(version, index.shards) is None:
            _put(index, version)
    version.take_for_whole(index.shards)  # they were when it was built
    return index


def _index_of_whole(version: Version, names: Sequence[str]) -> Index:
    """The index of those shards in an object store that are there as a whole: one that is kept, if all others are what
    killed runs have left; else no request is made only to ask whether they are there, or for what a kept one says.
    """
    entries, known = recorded_entries(version), dict[str, ShardItems]()
    if (older := latest_index(version, names)) is not None:
        others = [*{*names}.difference(older.shards)]
        if not any(name in entries for name in others) and not any(in_parallel(version.has_shard, others)):
            return older
        known = {one.shard.name: one for one in items_in(older, version)}

    def read(name: str) -> ShardItems | None:
        if name in known:
            return known[name]
        try:
            return ShardItems.read(version.shard(name), entries.get(name, ""))
        except DamagedError:
            if version.has_shard(name):
                raise
            return None

    return index_of(one for one in in_parallel(read, names) if one is not None)


def _open_index(version: Version, names: Sequence[str]) -> Index:
    if (index := load_index(version, names)) is not None:
        return index
    index = build_index(map(version.shard, names))
    with suppress(OSError, StoreError):  # a read-only cache, a full disk, a link in place of a folder
        folder_to_write(version.folder, "index")
        version.sweep_work()
        with version.claim("index") as claim:
            if claim.take():
                if (kept := load_index(version, names)) is not None:  # by another process, in the meantime
                    return kept
                _save(index, version, version.folder / "index" / index_folder(version, names).name)
                index = load_index(version, names) or index
    return index


def index_folder(version: Version, names: Iterable[str]) -> Location:
    """The folder for the index of these shards."""
    signature = hashlib.sha256("\n".join([version.info.fingerprint, *sorted(names)]).encode()).hexdigest()
    return version.path / "index" / signature[:12]


def build_index(shards: Iterable[Shard]) -> Index:
    """Build an index from the shards' columns.

    Raises:
        DamagedError: A shard's metadata or columns are damaged.
    """
    return index_of(read_items(shards))


def index_of(shards: Iterable[ShardItems]) -> Index:
    """The index of some shards' items."""
    items = AllItems(shards)
    counts = ~items.superseded
    # Two runs that did not know of each other may have extracted an id twice: the last one counts.
    counts[[earlier for earlier, _ in items.duplicates()]] = False
    columns: dict[str, Any] = {
        "shard": np.repeat(np.arange(len(items.of_shards), dtype=np.uint32), items.counts),
        "item": items.item.astype(np.uint32),
        "first_frame": joined_columns([one.offsets[:-1] for one in items.of_shards], np.int64),
        "num_frames": joined_columns([np.diff(one.offsets) for one in items.of_shards], np.int64),
        "row_hash": items.row_hash,
    }
    ids, id_hash, by_hash = items.ids, items.id_hash, items.by_hash
    if not counts.all():
        keep = np.flatnonzero(counts)
        ids, id_hash = ids.take(keep), id_hash[keep]
        columns = {name: column[keep] for name, column in columns.items()}
        by_hash = np.argsort(id_hash, kind="stable")
    names = [shard.name for shard in items.shards]
    runs = [shard.run for shard in items.shards]
    at: dict[str, Any] = {"id_hash": id_hash[by_hash], "by_hash": by_hash.astype(np.uint32)}
    return Index(names, runs, ids, **columns, **at, described=describe(shard.info for shard in items.shards))


def latest_index(version: Version, names: Sequence[str]) -> Index | None:
    """Of the indexes on disk whose shards are all among these names, the one of the most shards; None without one."""
    there, found = {*names}, list[list[str]]()
    folder = version.path / "index"
    with suppress(OSError):
        for name in store_of(folder).names(folder):
            with suppress(OSError, ValueError, KeyError, TypeError, DamagedError):
                path = folder / name / "index.json"
                shards = parse_object(read_bytes(path), path)["shards"]
                if there.issuperset(shards) and name == index_folder(version, shards).name:
                    found.append(shards)
    loaded = (load_index(version, shards) for shards in sorted(found, key=len, reverse=True))
    return next((index for index in loaded if index is not None), None)


def take_seen_for_whole(version: Version) -> None:
    """In an object store, take the shards for committed that a run has recorded, or an index has: without `zarr.json`,
    such a shard is damaged, and not one that was never completed.
    """
    if isinstance(version.path, ObjectPath):
        version.take_for_whole(recorded_entries(version))
        if (index := latest_index(version, version.listed_shards())) is not None:
            version.take_for_whole(index.shards)


def _equal(a: Strings, at_a: NDArray[np.int64], b: Strings, at_b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether string `at_a[i]` of `a` is string `at_b[i]` of `b`, for each `i`."""
    equal: NDArray[np.bool_] = a.byte_lengths()[at_a] == b.offsets[at_b + 1] - b.offsets[at_b]
    some_a, some_b = a.take(at_a[equal]), b.take(at_b[equal])
    differs = np.flatnonzero(some_a.blob != some_b.blob)
    equal[np.flatnonzero(equal)[np.searchsorted(some_a.offsets, differs, "right") - 1]] = False
    return equal


def _save(index: Index, version: Version, folder: Path) -> None:
    """Write the index in `work/` and rename it to `folder`, in place of a damaged one that may be there."""
    work = version.work_folder("index")
    work.mkdir()
    try:
        (work / "index.json").write_bytes(_write(index, version, work))
        written = {path.name: path.stat().st_size for path in work.iterdir()}
        remove_from_version(version.folder, "index", folder.name)
        publish_folder(work, folder, written)
        # Training may still have an older index mapped, so the latest few stay.
        tagged = _of_tags(version)
        others = [entry for entry in os.scandir(folder.parent) if entry.name not in {folder.name, *tagged}]
        by_age = sorted(others, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime_ns)
        for old in by_age[: 1 - _KEPT]:
            remove_from_version(version.folder, "index", old.name)
    finally:
        remove_from_version(version.folder, "work", work.name)


def _put(index: Index, version: Version) -> None:
    """Write the index into an object store, its document last. Whoever reads one has it in memory; the latest few stay
    for those that are reading now.
    """
    folder, store = index_folder(version, index.shards), Objects()
    store.put(folder / "index.json", _write(index, version, folder))
    tagged = _of_tags(version)
    others = [name for name in store.names(folder.parent) if name not in {folder.name, *tagged}]
    by_age = sorted(others, key=lambda name: store.last_change(folder.parent / name) or 0.0)
    for old in by_age[: 1 - _KEPT]:
        store.delete_folder(folder.parent / old)


def _of_tags(version: Version) -> set[str]:
    """The names of the indexes of a version's tags, which stay as long as these."""
    found = set()
    for name in tag_names(version):
        with suppress(StoreError):
            found.add(index_folder(version, read_tag(version, name).shards).name)
    return found


def _write(index: Index, version: Version, folder: Location) -> bytes:
    """Write the arrays of an index; returns the document about them, which is to be written last."""
    arrays = {"ids": index.ids.blob, "id_offsets": index.ids.offsets}
    arrays |= {name: getattr(index, name) for name in _ARRAYS}
    document = {
        "fingerprint": version.info.fingerprint,
        "shards": index.shards,
        "runs": index.runs,
        "described": dict(index.described) if len(index.shards) <= MOST_DESCRIBED else {},
        "crc32c": {name: write_array(folder / f"{name}.npy", array) for name, array in arrays.items()},
        "checksum": UNSEALED,
    }
    return seal(document, indent=None)


def load_index(version: Version, names: Sequence[str]) -> Index | None:
    """The index of these shards on disk, memory-mapped; None if there is none, or if anything is wrong with it."""
    folder = index_folder(version, names)
    if isinstance(folder, Path) and (folder.is_symlink() or folder.parent.is_symlink()):
        return None  # nothing is kept there, see `featcache.store.files`
    try:
        data = read_bytes(folder / "index.json")
        document = parse_object(data, folder / "index.json")
        if not is_sealed(data, document["checksum"]) or document["fingerprint"] != version.info.fingerprint:
            return None
        if sorted(document["shards"]) != sorted(names):
            return None
        arrays = read_arrays(folder, {name: document["crc32c"][name] for name in _FILES})
        if arrays is None:
            return None
        runs = document["runs"] if "runs" in document else _runs_of(version, document["shards"])
        ids, described = Strings(arrays.pop("ids"), arrays.pop("id_offsets")), document.get("described", {})
        index = Index(document["shards"], runs, ids, **arrays, described=described)
        return index if _fits_together(index) else None
    except DamagedError:
        return None
    except StoreError:  # an object store that cannot be reached is no reason to read all shards
        raise
    except Exception:  # noqa: BLE001 (parsers of a garbled file raise all kinds)
        return None


def _runs_of(version: Version, names: Iterable[str]) -> list[str]:
    """The run of each shard, for an index that does not say it; empty for a damaged shard, which reading notices."""
    runs = []
    for name in names:
        try:
            runs.append(version.shard(name).run)
        except (StoreError, OSError):
            runs.append("")
    return runs


def _fits_together(index: Index) -> bool:
    """Whether the arrays have the dtypes and lengths of an index, and point only to existing shards and items.

    It does not look into `item`, `first_frame` and `num_frames`: reading notices if these point beyond a shard.
    """
    ids, offsets, count = index.ids.blob, index.ids.offsets, len(index.shard)
    found = [(ids.dtype, ids.ndim), (offsets.dtype, offsets.shape)]
    found += [(array.dtype, array.shape) for array in (getattr(index, name) for name in _ARRAYS)]
    expected = [(np.dtype(np.uint8), 1), (np.dtype(np.int64), (count + 1,))]
    expected += [(np.dtype(dtype), (count,)) for dtype in _ARRAYS.values()]
    return found == expected and bool(
        are_rising(offsets, len(ids), 0)
        and index.first_frame.min(initial=0) >= 0
        and index.num_frames.min(initial=1) >= 1
        and max(index.first_frame.max(initial=0), index.num_frames.max(initial=0)) <= MOST
        and [type(run) for run in index.runs] == [str] * len(index.shards)
        and index.shard.max(initial=0) < max(1, len(index.shards))
        and index.by_hash.max(initial=0) < max(1, count)
    )
