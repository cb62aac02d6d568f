"""Damaged shards: which of their items are sound, what is to be done with each shard, and a shard of the sound items.

Items of a damaged shard can be kept if its seal, every column and its name are whole. Then each item is sound or not,
by its own checksum. The `zarr.json` of an array is not needed: its content follows from the version's spec and the size
of the chunk file, and the sealed checksum of that `zarr.json` proves it. The checksum at the end of the features is not
needed either.

A shard of another version may lie in a version by mistake. It is in the place of this version's shard, which is lost,
or it is one too many. If the index on disk is of these shards' names, it knows this version's items of that shard. If
not, the ids in the other version's shard are all there is to go by: a shard's name follows from its items.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.spec import FeatureSpec, all_finite
from featcache.storage.folder import open_file
from featcache.storage.location import Location
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.check import check_columns
from featcache.store.checksums import crc32c
from featcache.store.columns import Column, columns_of
from featcache.store.commits import Committed, commit_shard
from featcache.store.documents import read_bytes
from featcache.store.index import Index, build_index, load_index
from featcache.store.shard import Shard
from featcache.store.shard_writer import ShardWriter, digest_of
from featcache.store.version import Version
from featcache.strings import Strings

_READ_AT_ONCE = 256
"""Items of a shard in an object store that are fetched together."""


class DamagedShard(Shard):
    """A damaged shard, read without the metadata of its arrays; the version's spec says what these are.

    Raises:
        DamagedError: From every property and method, if the seal or a column is not what was written.
    """

    def __init__(self, folder: Location, fingerprint: str | None, spec: FeatureSpec) -> None:
        super().__init__(folder, fingerprint)
        self._spec = spec

    @property
    def _columns(self) -> dict[str, Column]:
        return columns_of(self._spec, self.info.metadata)

    def _read_column(self, name: str) -> NDArray[Any]:
        """The size of the array's chunk file tells its length."""
        entry_shape = self._columns[name].entry_shape
        dtype = np.dtype(self._columns[name].dtype).newbyteorder("<")
        chunk = zarr3.chunk_path(self.folder / name, 1 + len(entry_shape))
        try:
            data = read_bytes(chunk, self._most_bytes(name, dtype.itemsize * math.prod(entry_shape)))
        except FileNotFoundError:
            data = bytes(zarr3.CHECKSUM_BYTES)  # right if the array has no value, which its metadata proves
        values = max(0, len(data) - zarr3.CHECKSUM_BYTES) // dtype.itemsize
        length = values // math.prod(entry_shape)
        array = np.frombuffer(data, dtype, length * math.prod(entry_shape)).reshape(length, *entry_shape)
        self._check_form(name, length)
        checksum = data[array.nbytes :]
        if checksum != crc32c(array).to_bytes(zarr3.CHECKSUM_BYTES, "little"):
            raise DamagedError(f"{chunk}: damaged: its checksum does not match")
        return array

    def check(self) -> set[str]:
        """Check that everything but the features is what was written, and of this shard.

        Returns:
            The ids of items that make no sense all the same; see `check_columns`.

        Raises:
            DamagedError: It is not.
            OSError: It cannot be read.
        """
        self._check_form("features", self.info.frames)
        arrays = {name: self.column(name) for name in self._columns if name != "features"}
        problems, _ = check_columns(self, self._spec, arrays)
        for problem in problems:
            if problem.id is None:
                raise DamagedError(problem.message)
        digest = digest_of(self.items(), self.info.supersedes, self.info.made_by.get("attempt"))
        if digest != self.info.digest or digest[:12] != self.name:
            raise DamagedError(f"{self.folder}: damaged: holds items of another shard")
        return {problem.id for problem in problems if problem.id is not None}

    def sound_items(self, numbers: Sequence[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Those of some items whose features are what was written: number, and features `[frames, *item_shape]`.

        Items that lie beyond the end of the file, or on a bad sector, are not among them.
        """
        dtype = np.dtype(self._spec.stored_dtype).newbyteorder("<")
        frame_bytes = math.prod(self._spec.item_shape) * dtype.itemsize
        offsets, checksums = self.offsets.tolist(), self.column("crc32c")
        chunk = zarr3.chunk_path(self.folder / "features", 1 + len(self._spec.item_shape))
        starts = [offsets[number] * frame_bytes for number in numbers]
        sizes = [(offsets[number + 1] - offsets[number]) * frame_bytes for number in numbers]
        for number, size, data in zip(numbers, sizes, _read(chunk, starts, sizes), strict=False):
            if len(data) < size:
                continue
            features = np.frombuffer(data, dtype).reshape(-1, *self._spec.item_shape)
            if crc32c(features) == checksums[number] and all_finite(features):
                yield number, features

    def _most_bytes(self, name: str, entry_bytes: int) -> int:
        """The most bytes that the chunk file of a column can have."""
        form = self.form(name)
        length = None if form is None else form.length or form.at_most
        if length is None:  # of the entries of a side array, their offsets say how many there are
            length = int(self.column(f"{name}_offsets")[-1])
        return length * entry_bytes + zarr3.CHECKSUM_BYTES

    def _check_form(self, name: str, length: int) -> None:
        """Prove by the sealed checksum of its metadata that the array was written with this length."""
        column = self._columns[name]
        if not column.is_metadata(self.info.metadata.get(name), length):
            shape = [length, *column.entry_shape]
            raise DamagedError(f"{self.folder / name}: damaged: {column.dtype} {shape} is not what was written")


@dataclass(frozen=True)
class RepairPlan:
    """What is to be done with the items of one damaged shard.

    Items that do not count, because others replace them, are neither kept nor extracted again.
    """

    shard: Shard
    """The damaged shard; a `DamagedShard` if everything but its features is whole."""
    kept: list[int]
    """The numbers of the sound items, rising. There are none if the shard is not a `DamagedShard`."""
    again: Strings | None
    """The ids of the other items, to be extracted again; None if nothing tells which they were."""
    was_held: bool = True
    """Whether the version is known to have held the items to be extracted again. It is not if only another version's
    shard names them.
    """


def plan_repairs(
    version: Version, damaged: Sequence[str], stopped: Callable[[], bool] = lambda: False
) -> list[RepairPlan]:
    """Hold every item of the damaged shards, which are named, against its own checksum.

    Shards that have gone in the meantime are left out. Once `stopped` returns True, no more are read, and the result is
    empty.

    Raises:
        DamagedError: Another shard than these is damaged.
    """
    names = version.shard_names()
    opened = {name: _open(version.shard(name), version.info.spec) for name in damaged if name in names}
    index = load_index(version, names)
    if index is None:
        shards = (opened[name][0] if name in opened else version.shard(name) for name in names)
        index = build_index(shard for shard in shards if shard.name not in opened or isinstance(shard, DamagedShard))
    plans = []
    for name, (shard, faulty) in opened.items():
        if stopped():
            return []
        plans.append(_plan(shard, faulty, index, name))
    return plans


def copy_sound_items(version: Version, damaged: DamagedShard, numbers: Sequence[int]) -> Committed:
    """Commit sound items of a damaged shard as a shard of their own, bit for bit; the damaged shard stays.

    The new shard replaces these items of the damaged one, which has passed its `check`, and whatever the damaged one
    had replaced. It is returned, and has another name even if it holds all the items. It takes over the damaged
    shard's provenance. The items' numbers rise.

    Raises:
        StoreError: The new shard cannot be written.
        DamagedError: An item is no longer what it was when it was found to be sound.
    """
    there = {*version.shard_names()}
    supersedes = {name: items for name, items in damaged.info.supersedes.items() if name in there}

    def features() -> Iterator[NDArray[Any]]:
        sound = damaged.sound_items(numbers)
        for number in numbers:
            found, features = next(sound, (None, None))
            if found != number or features is None:
                raise DamagedError(
                    f"{damaged.folder}: {damaged.ids[number]} was intact before and is damaged now: is the disk "
                    "failing? Nothing has been removed"
                )
            yield features

    try:
        return _write_again(version, damaged, numbers, features(), {**supersedes, damaged.name: list(numbers)})
    except OSError as error:
        raise StoreError(
            f"{version.path}: cannot be written: {error.strerror}. Nothing has been removed: the sound utterances of "
            f"{damaged.name} are copied first. Free some space or repair the disk, and run the same command again"
        ) from error


def put_back(version: Version, taken: DamagedShard, index: Index) -> bool:
    """Commit a damaged shard that has been taken away again, bit for bit as it was, if what the version now has of the
    utterances that were damaged in it is just that.

    Args:
        version: The version, in a folder.
        taken: The shard where it is now, which has passed its `check` in its place.
        index: The items that the version has now.

    Returns:
        Whether the shard is there again. If another one of the same items is there, it stays.

    Raises:
        OSError: It cannot be written.
        StoreError: Likewise.
    """
    ids, checksums = taken.ids, taken.column("crc32c")
    again = index.find(ids)

    def features() -> Iterator[NDArray[Any]]:
        sound = taken.sound_items(range(len(ids)))
        found, held = next(sound, (None, None))
        for number in range(len(ids)):
            if number == found and held is not None:
                yield held
                found, held = next(sound, (None, None))
                continue
            if (at := int(again[number])) < 0:
                raise DamagedError(f"{taken.folder}: {ids[number]} is gone")
            shard = version.shard(index.shards[int(index.shard[at])])
            first = int(index.first_frame[at])
            extracted = shard.features[first : first + int(index.num_frames[at])]
            if crc32c(extracted) != checksums[number]:
                raise DamagedError(f"{taken.folder}: {ids[number]} is another now")
            yield extracted

    try:
        _write_again(version, taken, range(len(ids)), features(), taken.info.supersedes)
    except DamagedError:
        return False
    return True


def _write_again(
    version: Version,
    damaged: DamagedShard,
    numbers: Sequence[int],
    features: Iterable[NDArray[Any]],
    supersedes: Mapping[str, list[int]],
) -> Committed:
    """Commit items of a damaged shard, with these features, in a shard of the same provenance."""
    spec, info = version.info.spec, damaged.info
    sides = {side.name: damaged.side(side.name, check=True) for side in spec.side}
    writer = ShardWriter(version.work_folder("repair"), spec)
    try:
        for number, item, own in zip(numbers, damaged.items(numbers), features, strict=True):
            entries = {name: side.item(number) for name, side in sides.items()}
            writer.append([item], own, [len(own)], {name: (array, [len(array)]) for name, array in entries.items()})
        return commit_shard(
            writer,
            version,
            sample_rate=spec.sample_rate,
            row=info.row,
            supersedes=supersedes,
            made_by=info.made_by,
        )
    except BaseException:
        writer.discard()
        raise


def _open(shard: Shard, spec: FeatureSpec) -> tuple[Shard, set[str]]:
    """A shard, as a `DamagedShard` if all but its features is whole; and the ids of items that make no sense."""
    damaged = DamagedShard(shard.folder, shard.fingerprint, spec)
    try:
        return damaged, damaged.check()
    except (DamagedError, OSError):
        return shard, set()


def _plan(shard: Shard, faulty: set[str], index: Index, name: str) -> RepairPlan:
    if name not in index.shards:
        return _plan_by_own_ids(shard, index)
    inside = np.flatnonzero(index.shard == index.shards.index(name))
    ids = index.ids.take(inside)
    if not isinstance(shard, DamagedShard):
        return RepairPlan(shard, [], ids)
    numbers = index.item[inside].tolist()
    candidates = sorted(number for number, id_ in zip(numbers, ids, strict=True) if id_ not in faulty)
    kept = [number for number, _ in shard.sound_items(candidates)]
    return RepairPlan(shard, kept, ids.take(np.flatnonzero(~np.isin(numbers, kept))))


def _plan_by_own_ids(shard: Shard, index: Index) -> RepairPlan:
    """The plan for a shard of which nothing can be kept and which is not in the index: the shard's own ids decide."""
    other = Shard(shard.folder, None)
    try:
        ids = other.ids
        if shard.stated_version in (None, shard.fingerprint):
            return RepairPlan(shard, [], ids)
        # If it supersedes items, so did the shard whose place it took, and what the index has of these ids is outdated.
        again = ids if other.info.supersedes else ids.take(np.flatnonzero(index.find(ids) < 0))
        return RepairPlan(shard, [], again, was_held=False)
    except (DamagedError, OSError):
        return RepairPlan(shard, [], None)


def _read(chunk: Location, starts: Sequence[int], sizes: Sequence[int]) -> Iterator[bytes | memoryview]:
    """Stretches of a file's bytes; fewer bytes if the file ends, or cannot be read any further, and nothing without it.

    Raises:
        StoreError: The object store refuses, or cannot be reached.
    """
    if not isinstance(chunk, Path):
        with suppress(FileNotFoundError):
            end = store_of(chunk).size(chunk)
            there = [at for at, (start, size) in enumerate(zip(starts, sizes, strict=True)) if start + size <= end]
            for at in range(0, len(there), _READ_AT_ONCE):
                some = there[at : at + _READ_AT_ONCE]  # they rise, as items do: those that are not are the last
                yield from store_of(chunk).get_ranges(chunk, [starts[i] for i in some], [sizes[i] for i in some])
        return
    try:
        file = open_file(chunk)
    except (OSError, DamagedError):
        return
    with file:
        for start, size in zip(starts, sizes, strict=True):
            yield _read_stretch(file.fileno(), size, start)


def _read_stretch(descriptor: int, size: int, offset: int) -> bytes:
    parts = []
    with suppress(OSError):  # a bad sector: the caller finds that bytes are missing, and leaves the item out
        while size and (part := os.pread(descriptor, size, offset)):
            parts.append(part)
            size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
