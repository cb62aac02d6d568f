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
import io
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.manifest import SegmentColumns
from featcache.storage.location import Location, folder_of
from featcache.storage.objects import Objects, in_parallel
from featcache.storage.store import store_of
from featcache.storage.stream import open_stream
from featcache.store import zarr3
from featcache.store.commits import committed_columns
from featcache.store.documents import parse_object, read_bytes
from featcache.store.fields import MOST
from featcache.store.files import folder_to_write, publish_folder, remove_from_version
from featcache.store.shard import Shard, are_rising
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
_BLOCK_BYTES = 1 << 20
_PUT_ENTRIES = 1 << 20
"""Entries of an array that are sent together."""


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
    an object store, only with `keep`.

    With the names of the shards that count, it is of the version as it was; by default, of all that are there now.

    Raises:
        DamagedError: A shard's metadata or columns are damaged, or a shard of these names is gone.
    """
    if isinstance(version.path, Path):
        if names is None:
            return version.reading(lambda: _open_index(version, version.shard_names()))
        return _open_index(version, names)
    listed = version.listed_shards() if names is None else names
    if (index := load_index(version, listed)) is None:
        index = _index_of_whole(version, listed) if names is None else build_index(map(version.shard, names))
        if keep and load_index(version, index.shards) is None:
            _put(index, version)
    version.take_for_whole(index.shards)  # they were when it was built
    return index


def _index_of_whole(version: Version, names: Sequence[str]) -> Index:
    """The index of those shards in an object store that are there as a whole. No request is made only to ask that."""

    def read(name: str) -> ShardItems | None:
        try:
            return ShardItems.read(version.shard(name))
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


@dataclass(frozen=True, eq=False)
class ShardItems:
    """The items of one shard, as an index needs them."""

    shard: Shard
    """The shard. Nothing more is read of it than its attributes."""
    ids: Strings
    """The items' ids, `[items]`."""
    id_hash: NDArray[np.uint64]
    """FNV-1a hashes of the ids, uint64 `[items]`."""
    row_hash: NDArray[np.uint64]
    """The hash of the row that each item was extracted from, uint64 `[items]`; see `SegmentColumns.hashes`."""
    offsets: NDArray[np.int64]
    """Where each item's frames begin, and the last one's end, int64 `[items + 1]`."""

    @classmethod
    def of(cls, shard: Shard, ids: Strings, rows: SegmentColumns, offsets: NDArray[np.int64]) -> ShardItems:
        """The items that a shard's columns describe."""
        return cls(shard, ids, ids.hashes(), rows.hashes(), offsets)

    @classmethod
    def read(cls, shard: Shard) -> ShardItems:
        """Read a shard's items.

        Raises:
            DamagedError: The shard's metadata or columns are damaged.
        """
        if (known := committed_columns(shard)) is not None:
            return cls(shard, known.ids, known.ids.hashes(), known.row_hash, known.offsets)
        ids = shard.ids  # first: if there are as many as the shard says, memory for that many is no more than theirs
        rows = SegmentColumns.of_arrays(shard.paths, shard.column("segments"), shard.column("channels"))
        return cls.of(shard, ids, rows, shard.offsets)


def build_index(shards: Iterable[Shard]) -> Index:
    """Build an index from the shards' columns.

    Raises:
        DamagedError: A shard's metadata or columns are damaged.
    """
    return index_of(read_items(shards))


def read_items(shards: Iterable[Shard]) -> Iterable[ShardItems]:
    """The items of some shards, which of an object store are fetched side by side."""
    shards = list(shards)
    are_near = all(isinstance(shard.folder, Path) for shard in shards)
    return map(ShardItems.read, shards) if are_near else in_parallel(ShardItems.read, shards)


def index_of(shards: Iterable[ShardItems]) -> Index:
    """The index of some shards' items."""
    items = _Items(shards)
    counts = ~items.superseded
    # Two runs that did not know of each other may have extracted an id twice: the last one counts.
    counts[[earlier for earlier, _ in items.duplicates()]] = False
    columns = {
        "shard": np.repeat(np.arange(len(items.of_shards), dtype=np.uint32), items.counts),
        "item": items.item.astype(np.uint32),
        "first_frame": _joined([one.offsets[:-1] for one in items.of_shards], np.int64),
        "num_frames": _joined([np.diff(one.offsets) for one in items.of_shards], np.int64),
        "row_hash": items.row_hash,
    }
    ids, id_hash, by_hash = items.ids, items.id_hash, items.by_hash
    if not counts.all():
        keep = np.flatnonzero(counts)
        ids, id_hash = ids.take(keep), id_hash[keep]
        columns = {name: column[keep] for name, column in columns.items()}
        by_hash = np.argsort(id_hash, kind="stable")
    names = [shard.name for shard in items.shards]
    runs = [_run_of(shard) for shard in items.shards]
    return Index(names, runs, ids, **columns, id_hash=id_hash[by_hash], by_hash=by_hash.astype(np.uint32))


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


def extend_index(version: Version, older: Index, newer: Index) -> Index:
    """An index with the items of another, of shards that were added since, behind its own; in no particular order."""
    if not len(newer):
        return older
    numbers = {name: number for number, name in enumerate(older.shards)}
    counts = np.ones(len(older), bool)
    for name in newer.shards:
        for shard, items in version.shard(name).info.supersedes.items():
            if shard in numbers:
                counts &= ~((older.shard == numbers[shard]) & np.isin(older.item, np.array(items, np.int64)))
    # What two runs that did not know of each other have extracted: the later one's counts.
    at = older.find(newer.ids)
    same = np.flatnonzero(at >= 0)
    runs_of_both = np.array(newer.runs, str)[newer.shard[same]], np.array(older.runs, str)[older.shard[at[same]]]
    is_later = runs_of_both[0] >= runs_of_both[1]
    counts[at[same[is_later]]] = False
    takes = np.ones(len(newer), bool)
    takes[same[~is_later]] = False
    parts = [(older, np.flatnonzero(counts), 0), (newer, np.flatnonzero(takes), len(older.shards))]
    ids = Strings.concatenate([index.ids.take(keep) for index, keep, _ in parts])
    columns: dict[str, NDArray[Any]] = {
        name: np.concatenate([getattr(index, name)[keep] for index, keep, _ in parts])
        for name in ("item", "first_frame", "num_frames", "row_hash")
    }
    columns["shard"] = np.concatenate([index.shard[keep] + np.uint32(first) for index, keep, first in parts])
    id_hash = ids.hashes()
    by_hash = np.argsort(id_hash, kind="stable").astype(np.uint32)
    names, runs = [*older.shards, *newer.shards], [*older.runs, *newer.runs]
    return Index(names, runs, ids, **columns, id_hash=id_hash[by_hash], by_hash=by_hash)


@dataclass(frozen=True)
class DuplicateItem:
    """An utterance that two shards hold, neither of which supersedes the other's."""

    id: str
    """The utterance's id."""
    shards: tuple[str, str]
    """The names of both shards; the item of the second one counts."""
    same_row: bool
    """Whether both were extracted from the same row. Then they are equal, and cost nothing but space."""


def find_duplicates(shards: Iterable[ShardItems]) -> list[DuplicateItem]:
    """The utterances that are in the shards more than once."""
    items = _Items(shards)
    shard = np.repeat([shard.name for shard in items.shards], items.counts)
    return [
        DuplicateItem(
            items.ids[later],
            (str(shard[earlier]), str(shard[later])),
            bool(items.row_hash[earlier] == items.row_hash[later]),
        )
        for earlier, later in items.duplicates()
    ]


class _Items:
    """All items of some shards, in the version's order, whether they count or not."""

    def __init__(self, of_shards: Iterable[ShardItems]) -> None:
        self.of_shards = sorted(of_shards, key=lambda one: (one.shard.info.row, one.shard.name))
        self.shards = [one.shard for one in self.of_shards]
        self.ids = Strings.concatenate([one.ids for one in self.of_shards])
        self.counts = np.array([shard.info.items for shard in self.shards], np.int64)
        starts = np.cumsum(self.counts) - self.counts
        self.item = np.arange(self.counts.sum()) - np.repeat(starts, self.counts)
        self.id_hash = _joined([one.id_hash for one in self.of_shards], np.uint64)
        self.by_hash = np.argsort(self.id_hash, kind="stable")
        self.row_hash = _joined([one.row_hash for one in self.of_shards], np.uint64)
        self.superseded = np.zeros(len(self.ids), bool)
        number_of = {shard.name: number for number, shard in enumerate(self.shards)}
        for shard in self.shards:
            for other, numbers in shard.info.supersedes.items():
                if (at := number_of.get(other)) is not None:
                    items = np.array(numbers, np.int64)
                    self.superseded[starts[at] + items[items < self.counts[at]]] = True

    def duplicates(self) -> list[tuple[int, int]]:
        """Pairs of items that have the same id and are not superseded: an earlier one and the next, by position, in the
        order in time of the runs that wrote them.
        """
        order = self.by_hash if not self.superseded.any() else self.by_hash[~self.superseded[self.by_hash]]
        hashes = self.id_hash[order]
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        if not len(same):
            return []
        pairs, last = [], dict[str, int]()
        shard = np.repeat(np.arange(len(self.shards)), self.counts)
        run = [_run_of(shard) for shard in self.shards]  # the order of their names is an order in time
        for position in sorted({*order[same].tolist(), *order[same + 1].tolist()}, key=lambda at: (run[shard[at]], at)):
            if (earlier := last.get(self.ids[position])) is not None:
                pairs.append((earlier, position))
            last[self.ids[position]] = position
        return pairs


def _run_of(shard: Shard) -> str:
    return str(shard.info.made_by.get("run", ""))


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


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
        document = _document(index, version, lambda name, array: _write(work / f"{name}.npy", array))
        (work / "index.json").write_bytes(document)
        written = {path.name: path.stat().st_size for path in work.iterdir()}
        remove_from_version(version.folder, "index", folder.name)
        publish_folder(work, folder, written)
        # Training may still have an older index mapped, so the latest few stay.
        others = [entry for entry in os.scandir(folder.parent) if entry.name != folder.name]
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

    def put(name: str, array: NDArray[Any]) -> str:
        def blocks() -> Iterator[memoryview]:
            yield memoryview(_header(array))
            yield from (array[at : at + _PUT_ENTRIES].view(np.uint8).data for at in range(0, len(array), _PUT_ENTRIES))

        store.put_blocks(folder / f"{name}.npy", blocks)
        return _npy_checksum(array)

    store.put(folder / "index.json", _document(index, version, put))
    others = [name for name in store.names(folder.parent) if name != folder.name]
    by_age = sorted(others, key=lambda name: store.last_change(folder.parent / name) or 0.0)
    for old in by_age[: 1 - _KEPT]:
        store.delete_folder(folder.parent / old)


def _document(index: Index, version: Version, write: Callable[[str, NDArray[Any]], str]) -> bytes:
    """Write the arrays with `write`, which returns a checksum; returns the document of them."""
    arrays = {"ids": index.ids.blob, "id_offsets": index.ids.offsets}
    arrays |= {name: getattr(index, name) for name in _ARRAYS}
    document = {"fingerprint": version.info.fingerprint, "shards": index.shards, "runs": index.runs}
    checksums = {name: write(name, array) for name, array in arrays.items()}
    return zarr3.seal({**document, "crc32c": checksums, "checksum": zarr3.UNSEALED})


def _write(path: Path, array: NDArray[Any]) -> str:
    """Write an array's `.npy` file; returns the CRC-32C of what was to be written, as eight hex digits."""
    with path.open("wb") as file:
        file.write(_header(array))
        array.tofile(file)
    return _npy_checksum(array)


def _header(array: NDArray[Any]) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    return header.getvalue()


def _npy_checksum(array: NDArray[Any]) -> str:
    return f"{zarr3.crc32c(array, zarr3.crc32c(np.frombuffer(_header(array), np.uint8))):08x}"


def load_index(version: Version, names: Sequence[str]) -> Index | None:
    """The index of these shards on disk, memory-mapped; None if there is none, or if anything is wrong with it."""
    folder = index_folder(version, names)
    if isinstance(folder, Path) and (folder.is_symlink() or folder.parent.is_symlink()):
        return None  # nothing is kept there, see `featcache.store.files`
    try:
        data = read_bytes(folder / "index.json")
        document = parse_object(data, folder / "index.json")
        if not zarr3.is_sealed(data, document["checksum"]) or document["fingerprint"] != version.info.fingerprint:
            return None
        if sorted(document["shards"]) != sorted(names):
            return None
        arrays = _arrays(folder, document["crc32c"])
        if arrays is None:
            return None
        runs = document["runs"] if "runs" in document else _runs_of(version, document["shards"])
        index = Index(document["shards"], runs, Strings(arrays.pop("ids"), arrays.pop("id_offsets")), **arrays)
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
            runs.append(_run_of(version.shard(name)))
        except (StoreError, OSError):
            runs.append("")
    return runs


def _arrays(folder: Location, checksums: dict[str, str]) -> dict[str, NDArray[Any]] | None:
    """The arrays of an index, by name: memory-mapped if they are in a folder; None if one is not what was written."""
    paths = {name: folder / f"{name}.npy" for name in _FILES}
    if isinstance(folder, Path):
        if any(_checksum(path) != checksums[name] for name, path in paths.items()):
            return None
        return {name: _map(folder_of(path)) for name, path in paths.items()}
    with ThreadPoolExecutor(len(paths)) as pool:
        files = dict(zip(paths, pool.map(_fetch, paths.values()), strict=True))
    if any(zarr3.hex_crc32c(data) != checksums[name] for name, data in files.items()):
        return None
    return {name: _loaded(data) for name, data in files.items()}


def _map(path: Path) -> NDArray[Any]:
    with open_stream(path) as file:
        _check_magic(file)
    array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")  # refuses dtypes that hold objects: no pickle
    return np.asarray(array)


def _fetch(location: Location) -> bytes:
    return store_of(location).get(location, lambda size: None)  # as large as it is; nothing in it says how large


def _loaded(data: bytes) -> NDArray[Any]:
    """The array of an `.npy` file's bytes, a view of them."""
    file = io.BytesIO(data)
    _check_magic(file)
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if dtype.hasobject or is_fortran or len(shape) != 1:
        raise ValueError("not as `_write` writes it")
    return np.frombuffer(data, dtype, shape[0], file.tell())


def _check_magic(file: Any) -> None:
    if np.lib.format.read_magic(file) != (1, 0):  # the header of other versions may be as long as 4 GB
        raise ValueError("not as `_write` writes it")


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


def _checksum(path: Location) -> str:
    """CRC-32C of a whole file. It is read and not mapped, so that 10^7 items do not stay in a process's memory."""
    crc, block = 0, np.empty(_BLOCK_BYTES, np.uint8)
    with open_stream(path) as file:
        while got := file.readinto(block.data):
            crc = zarr3.crc32c(block[:got], crc)
    return f"{crc:08x}"
