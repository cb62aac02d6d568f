"""The index, which makes opening 10^7 items fast: flat arrays shared by all processes.

It is derived from the shards, and lies in `index/<signature>/`, where the signature is a hash of the
shards' names: shards never change, so an index that matches the folder's listing is right, and one that
does not is another folder. Deleting it loses nothing.

    index.json            the shards' names in the cache's order, and a CRC-32C of each array
    ids.npy, id_offsets.npy
                          the ids, in the cache's order: by manifest row of the run that wrote them
    shard.npy, item.npy   uint32 `[items]`: where an item is: number of the shard, number in the shard
    first_frame.npy       int64 `[items]`: its first frame in the shard's features
    num_frames.npy        int64 `[items]`
    row_hash.npy          uint64 `[items]`: hash of the row's path, start, duration and channel
    id_hash.npy           uint64 `[items]`: FNV-1a of the ids, sorted
    by_hash.npy           uint32 `[items]`: the positions in that order
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from featcache.manifest import row_hashes
from featcache.store import zarr3
from featcache.store.shard import Shard
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


class Place(NamedTuple):
    """Where an item is, and what it is of.

    Attributes:
        shard: the name of the shard that holds it.
        item: its number in that shard.
        row_hash: the hash of the row that it was extracted from.
    """

    shard: str
    item: int
    row_hash: int


@dataclass(frozen=True)
class Index:
    """All items of a version that are current: not superseded by a later extraction.

    Attributes:
        shards: the shards' names; `shard` points into it.
        ids: the items' ids.
        shard: uint32 `[items]`, number of the item's shard.
        item: uint32 `[items]`, number of the item in its shard.
        first_frame: int64 `[items]`, its first frame in the shard's features.
        num_frames: int64 `[items]`, how many it has.
        row_hash: uint64 `[items]`, see `featcache.manifest.row_hashes`.
        id_hash: uint64 `[items]`, FNV-1a of the ids, sorted.
        by_hash: uint32 `[items]`, positions in the order of `id_hash`.
    """

    shards: list[str]
    ids: Strings
    shard: NDArray[np.uint32]
    item: NDArray[np.uint32]
    first_frame: NDArray[np.int64]
    num_frames: NDArray[np.int64]
    row_hash: NDArray[np.uint64]
    id_hash: NDArray[np.uint64]
    by_hash: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.ids)

    def place(self, position: int) -> Place:
        """Where the item at a position is."""
        return Place(self.shards[self.shard[position]], int(self.item[position]), int(self.row_hash[position]))

    def find(self, ids: Strings) -> NDArray[np.int64]:
        """The position of each id, -1 where there is none; int64 `[n]`."""
        wanted = ids.hashes()
        at = np.searchsorted(self.id_hash, wanted)
        positions = np.full(len(ids), -1, np.int64)
        pending = np.flatnonzero(at < len(self))
        while len(pending):  # one round, but where hashes collide
            pending = pending[self.id_hash[at[pending]] == wanted[pending]]
            candidates = self.by_hash[at[pending]].astype(np.int64)
            same = _equal(ids, pending, self.ids, candidates)
            positions[pending[same]] = candidates[same]
            pending = pending[~same]
            at[pending] += 1
            pending = pending[at[pending] < len(self)]
        return positions

    def find_one(self, id: str) -> int:  # noqa: A002
        """The position of one id, -1 where there is none: `find` without the price of arrays."""
        wanted = np.uint64(hash_of(id))
        at = int(np.searchsorted(self.id_hash, wanted))
        while at < len(self) and self.id_hash[at] == wanted:
            if self.ids[position := int(self.by_hash[at])] == id:
                return position
            at += 1
        return -1


def open_index(version: Version, names: Sequence[str] | None = None) -> Index:
    """The index of the version's shards: the one on disk where it matches, else built, and kept if it can be.

    Args:
        version: whose shards.
        names: of those that count, to see a version as it was; all that are there now by default.

    Raises:
        DamagedError: a shard's metadata or columns are damaged.
    """
    names = version.shard_names() if names is None else names
    folder = index_folder(version, names)
    if (index := load_if_sound(folder)) is not None:
        return index
    index = build_index(map(version.shard, names))
    with suppress(OSError):  # a read-only cache, a full disk: it does without
        (version.path / "work").mkdir(exist_ok=True)  # a copy of a version may have come without it
        with version.claim("index") as claim:
            if claim.take():
                if (kept := load_if_sound(folder)) is not None:  # by another process, in the meantime
                    return kept
                if claim.locked:
                    for left in (version.path / "work").glob("index.*/"):  # by a killed process
                        shutil.rmtree(left, ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
                _save(index, folder, version.work_folder("index"))
                return load_index(folder)
    return index


def index_folder(version: Version, names: Iterable[str]) -> Path:
    """Where the index of shards of these names belongs."""
    signature = hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()
    return version.path / "index" / signature[:12]


def build_index(shards: Iterable[Shard]) -> Index:
    """Read the shards' columns and put them together.

    Raises:
        DamagedError: a shard's metadata or columns are damaged.
    """
    every = _Items(shards)
    current = ~every.superseded
    # Two runs that did not know of each other may have extracted an id twice: the last one counts.
    current[[earlier for earlier, _ in every.twice()]] = False
    columns = {
        "shard": np.repeat(np.arange(len(every.shards), dtype=np.uint32), every.counts),
        "item": every.item.astype(np.uint32),
        "first_frame": _joined([shard.offsets[:-1] for shard in every.shards], np.int64),
        "num_frames": _joined([np.diff(shard.offsets) for shard in every.shards], np.int64),
        "row_hash": every.row_hash,
    }
    ids, id_hash = every.ids, every.id_hash
    if not current.all():
        keep = np.flatnonzero(current)
        ids, id_hash = ids.take(keep), id_hash[keep]
        columns = {name: column[keep] for name, column in columns.items()}
    by_hash = np.argsort(id_hash, kind="stable").astype(np.uint32)
    names = [shard.name for shard in every.shards]
    return Index(names, ids, **columns, id_hash=id_hash[by_hash], by_hash=by_hash)


@dataclass(frozen=True)
class Repeat:
    """An utterance that two shards hold, neither of which supersedes the other's.

    Attributes:
        id: the utterance's.
        shards: the names of both; the second one's counts.
        alike: whether both come from the same row: then they are equal, and one merely costs space.
    """

    id: str
    shards: tuple[str, str]
    alike: bool


def find_repeats(shards: Iterable[Shard]) -> list[Repeat]:
    """The utterances that are in the shards more than once."""
    every = _Items(shards)
    shard = np.repeat([shard.name for shard in every.shards], every.counts)
    return [
        Repeat(
            every.ids[later],
            (str(shard[earlier]), str(shard[later])),
            bool(every.row_hash[earlier] == every.row_hash[later]),
        )
        for earlier, later in every.twice()
    ]


class _Items:
    """All items of some shards, in the cache's order, current or not."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self.shards = sorted(shards, key=lambda shard: (shard.info.row, shard.name))
        self.counts = np.array([shard.info.items for shard in self.shards], np.int64)
        starts = np.cumsum(self.counts) - self.counts
        self.item = np.arange(self.counts.sum()) - np.repeat(starts, self.counts)
        self.ids = Strings.concatenate([shard.ids for shard in self.shards])
        self.id_hash = self.ids.hashes()
        self.row_hash = _joined([_row_hashes(shard) for shard in self.shards], np.uint64)
        self.superseded = np.zeros(len(self.ids), bool)
        start_of = {shard.name: start for shard, start in zip(self.shards, starts.tolist(), strict=True)}
        for shard in self.shards:
            for other, items in shard.info.supersedes.items():
                if other in start_of:
                    self.superseded[start_of[other] + np.array(items)] = True

    def twice(self) -> list[tuple[int, int]]:
        """Positions of items that are not superseded and have the same id: the earlier and the next one, by the
        time of the runs that wrote them.
        """
        order = np.argsort(self.id_hash, kind="stable")
        order = order[~self.superseded[order]]
        same = np.flatnonzero(self.id_hash[order][1:] == self.id_hash[order][:-1])
        pairs, last = [], dict[str, int]()
        shard = np.repeat(np.arange(len(self.shards)), self.counts)
        run = [shard.info.made_by.get("run", "") for shard in self.shards]  # runs are named by their time
        for position in sorted({*order[same].tolist(), *order[same + 1].tolist()}, key=lambda at: (run[shard[at]], at)):
            if (earlier := last.get(self.ids[position])) is not None:
                pairs.append((earlier, position))
            last[self.ids[position]] = position
        return pairs


def _row_hashes(shard: Shard) -> NDArray[np.uint64]:
    segments = shard.column("segments")
    return row_hashes(shard.paths, segments[:, 0], segments[:, 1], shard.column("channels"))


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype)


def _equal(a: Strings, at_a: NDArray[np.int64], b: Strings, at_b: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether string `at_a[i]` of `a` is string `at_b[i]` of `b`, for each `i`."""
    equal: NDArray[np.bool_] = a.byte_lengths()[at_a] == b.offsets[at_b + 1] - b.offsets[at_b]
    one, other = a.take(at_a[equal]), b.take(at_b[equal])
    differs = np.flatnonzero(one.blob != other.blob)
    equal[np.flatnonzero(equal)[np.searchsorted(one.offsets, differs, "right") - 1]] = False
    return equal


def _save(index: Index, folder: Path, work: Path) -> None:
    """Write the index in `work` and rename it to `folder`, unless there is one by now."""
    work.mkdir()
    try:
        arrays = {"ids": index.ids.blob, "id_offsets": index.ids.offsets}
        arrays |= {name: getattr(index, name) for name in _ARRAYS}
        for name, array in arrays.items():
            np.save(work / f"{name}.npy", array, allow_pickle=False)
        checksums = {name: f"{zarr3.crc32c(array):08x}" for name, array in arrays.items()}
        (work / "index.json").write_text(json.dumps({"shards": index.shards, "crc32c": checksums}, indent=1))
        zarr3.sync_tree(work)
        folder.parent.mkdir(exist_ok=True)
        if not folder.is_dir():
            work.rename(folder)
        # Training may still have an older index mapped, so the latest few stay.
        by_age = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for old in by_age[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def load_index(folder: Path) -> Index:
    """The index that `open_index` kept in `folder`, memory-mapped."""
    meta = json.loads((folder / "index.json").read_text())
    arrays = {path.stem: np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)) for path in folder.glob("*.npy")}
    ids = Strings(arrays.pop("ids"), arrays.pop("id_offsets"))
    return Index(meta["shards"], ids, **arrays)


def damaged_arrays(folder: Path) -> list[str]:
    """The names of an index's arrays whose bytes are not what was written.

    They are read and not mapped, so that looking at 10^7 items does not leave them in a process's memory.
    """
    expected = json.loads((folder / "index.json").read_text())["crc32c"]
    return [name for name in _FILES if _checksum(folder / f"{name}.npy") != expected[name]]


def _checksum(path: Path) -> str:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    crc, block = 0, np.empty(_BLOCK_BYTES, np.uint8)
    with path.open("rb", buffering=0) as file:
        file.seek(array.offset)
        while got := file.readinto(block.data):
            crc = zarr3.crc32c(block[:got], crc)
    return f"{crc:08x}"


def load_if_sound(folder: Path) -> Index | None:
    """The index in `folder`; None where there is none, or it is damaged."""
    try:
        if damaged_arrays(folder):
            return None
        index = load_index(folder)
    except Exception:  # noqa: BLE001 (a garbled header makes numpy raise whatever its parser meets)
        return None
    expected = [(len(index), dtype) for dtype in _ARRAYS.values()]
    found = [(len(array), array.dtype) for array in (getattr(index, name) for name in _ARRAYS)]
    return index if found == expected else None
