"""The sound items of a damaged shard, those whose bytes are as written, and a shard of just these.

The seal, every column and the name of the shard must be whole. Then each item is sound or not, by its own checksum. The
`zarr.json` of an array is not needed: what it said follows from the version's spec and the size of the chunk file, and
the sealed checksum of that `zarr.json` proves it. Nor is the checksum at the end of the features.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.spec import FeatureSpec, all_finite
from featcache.store import zarr3
from featcache.store.check import check_columns
from featcache.store.shard import Shard
from featcache.store.shard_writer import ShardWriter, digest_of
from featcache.store.side import column_names
from featcache.store.version import Version

_FORMS: dict[str, tuple[str, tuple[int, ...]]] = {
    "offsets": ("uint64", ()),
    "crc32c": ("uint32", ()),
    "num_samples": ("uint64", ()),
    "ids": ("uint8", ()),
    "id_offsets": ("uint64", ()),
    "paths": ("uint8", ()),
    "path_offsets": ("uint64", ()),
    "segments": ("float64", (2,)),
    "channels": ("int32", ()),
    "sources": ("int64", (3,)),
}
"""Each column's dtype, and the shape of one entry."""


class Remains(Shard):
    """A damaged shard, read without the metadata of its arrays.

    Args:
        folder: the shard's.
        fingerprint: the version's.
        spec: the version's.

    Raises:
        DamagedError: from every property and method, where the seal or a column is not what was written.
    """

    def __init__(self, folder: Path, fingerprint: str | None, spec: FeatureSpec) -> None:
        super().__init__(folder, fingerprint)
        self._spec = spec
        self._forms = dict(_FORMS)
        for side in spec.side:
            entries, offsets = column_names(side.name)
            self._forms |= {entries: (side.dtype, side.item_shape), offsets: ("uint64", ())}

    def column(self, name: str) -> NDArray[Any]:
        """Any array but the features, read whole; it is as long as its chunk file."""
        dtype, item_shape = np.dtype(self._forms[name][0]).newbyteorder("<"), self._forms[name][1]
        chunk = zarr3.chunk_path(self.folder / name, 1 + len(item_shape))
        try:
            data = chunk.read_bytes()
        except FileNotFoundError:
            data = bytes(zarr3.CHECKSUM_BYTES)  # right where the array has no value: its metadata tells
        values = max(0, len(data) - zarr3.CHECKSUM_BYTES) // dtype.itemsize
        count = values // math.prod(item_shape)
        array = np.frombuffer(data, dtype, count * math.prod(item_shape)).reshape(count, *item_shape)
        self._check_form(name, array.shape, dtype)
        checksum = data[array.nbytes :]
        if checksum != zarr3.crc32c(array).to_bytes(zarr3.CHECKSUM_BYTES, "little"):
            raise DamagedError(f"{chunk}: damaged: its checksum does not match")
        return array

    def check(self) -> set[str]:
        """Whether all but the features is what was written, and of this shard.

        Returns:
            The ids of items that make no sense all the same; see `check_columns`.

        Raises:
            DamagedError: it is not.
            OSError: it cannot be read.
        """
        self._check_form("features", (self.info.frames, *self._spec.item_shape), np.dtype(self._spec.stored_dtype))
        problems = list(check_columns(self, self._spec))
        for problem in problems:
            if problem.id is None:
                raise DamagedError(problem.message)
        digest = digest_of(self.items(), self.info.supersedes)
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
        try:
            file = zarr3.chunk_path(self.folder / "features", 1 + len(self._spec.item_shape)).open("rb", buffering=0)
        except OSError:
            return
        with file:
            for number in numbers:
                first, frames = offsets[number], offsets[number + 1] - offsets[number]
                data = _read(file.fileno(), frames * frame_bytes, first * frame_bytes)
                if len(data) < frames * frame_bytes:
                    continue
                features = np.frombuffer(data, dtype).reshape(frames, *self._spec.item_shape)
                if zarr3.crc32c(features) == checksums[number] and all_finite(features):
                    yield number, features

    def _check_form(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Whether an array of this shape and dtype was written under this name."""
        metadata = zarr3.array_metadata(shape, dtype)
        if f"{zarr3.crc32c(np.frombuffer(metadata, np.uint8)):08x}" != self.info.metadata.get(name):
            raise DamagedError(f"{self.folder / name}: damaged: {dtype.name} {list(shape)} is not what was written")


def keep(version: Version, remains: Remains, numbers: Sequence[int]) -> str:
    """Commit sound items of a damaged shard as a shard of their own, bit for bit; the damaged one stays.

    What the new shard replaces are these items of the damaged one, and whatever that one had replaced. So its name is
    another, also where it has all the items. Its provenance is the damaged one's.

    Args:
        version: that holds the shard.
        remains: of the shard, found to be whole but for its features.
        numbers: of the items to keep, rising.

    Returns:
        The new shard's name.

    Raises:
        StoreError: it cannot be written.
        DamagedError: an item is no longer what it was when it was found to be sound.
    """
    spec, info = version.info.spec, remains.info
    there = {*version.shard_names()}
    supersedes = {name: items for name, items in info.supersedes.items() if name in there}
    sides = {side.name: remains.side(side.name, check=True) for side in spec.side}
    try:
        writer = ShardWriter(version.work_folder("repair"), spec.item_shape, version.dtype, spec.side)
        try:
            sound = remains.sound_items(numbers)
            for number, item in zip(numbers, remains.items(numbers), strict=True):
                found, features = next(sound, (None, None))
                if found != number or features is None:
                    raise DamagedError(
                        f"{remains.folder}: {item.id} was intact before and is damaged now: is the disk failing? "
                        "Nothing has been removed"
                    )
                entries = {name: side.item(number) for name, side in sides.items()}
                side = {name: (array, [len(array)]) for name, array in entries.items()}
                writer.append([item], features, [len(features)], side)
            return writer.commit(
                version.path / "shards",
                sample_rate=spec.sample_rate,
                row=info.row,
                supersedes={**supersedes, remains.name: list(numbers)},
                made_by=info.made_by,
            )
        except BaseException:
            writer.discard()
            raise
    except OSError as error:
        raise StoreError(
            f"{version.path}: cannot be written: {error.strerror}. Nothing has been removed: the sound utterances of "
            "damaged shards are copied first. Free some space or repair the disk, and run the same command again"
        ) from error


def _read(descriptor: int, size: int, offset: int) -> bytes:
    """Bytes of a file; fewer, where the file ends or cannot be read any further."""
    parts = []
    with suppress(OSError):  # a bad sector: the caller finds that bytes are missing, and leaves the item out
        while size and (part := os.pread(descriptor, size, offset)):
            parts.append(part)
            size, offset = size - len(part), offset + len(part)
    return b"".join(parts)
