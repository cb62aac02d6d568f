"""Writes one shard: in `work/`, flushed, and renamed into place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ExtractorError, StoreError
from featcache.manifest import SegmentColumns
from featcache.spec import SideSpec
from featcache.store import zarr3
from featcache.store.own_folders import remove_from_version
from featcache.store.shard import Item, Shard, ShardInfo
from featcache.store.side import SideWriter
from featcache.strings import Strings


class ShardWriter:
    """Writes one shard into `folder`, item by item; `commit` makes it visible.

    Args:
        folder: where to write, a folder in a version's `work/` that does not exist yet.
        item_shape: of one frame.
        dtype: of the stored features.
        side: the version's side arrays.

    Raises:
        OSError: from every method, where the disk is full or broken.
    """

    def __init__(
        self, folder: Path, item_shape: tuple[int, ...], dtype: np.dtype[Any], side: Sequence[SideSpec] = ()
    ) -> None:
        self._folder = folder
        self._item_shape = item_shape
        self._dtype = dtype.newbyteorder("<")
        self._features = zarr3.ChunkWriter(zarr3.chunk_path(folder / "features", 1 + len(item_shape)))
        self._items: list[Item] = []
        self._side = SideWriter(side)
        self._crcs: list[int] = []
        self._offsets = [0]

    @property
    def items(self) -> int:
        """How many items there are so far."""
        return len(self._items)

    @property
    def ids(self) -> list[str]:
        """Of the items so far."""
        return [item.id for item in self._items]

    @property
    def num_samples(self) -> int:
        """Samples of audio so far."""
        return sum(item.num_samples for item in self._items)

    @property
    def num_bytes(self) -> int:
        """Bytes of features so far, with the side arrays' entries."""
        return self._offsets[-1] * math.prod(self._item_shape) * self._dtype.itemsize + self._side.num_bytes

    def append(
        self,
        items: Sequence[Item],
        features: NDArray[Any],
        num_frames: Sequence[int],
        side: Mapping[str, tuple[NDArray[Any], Sequence[int]]] = {},
    ) -> None:
        """Add items: `features` `[frames, *item_shape]` of the stored dtype, C-contiguous, holds `num_frames`
        of the first, then those of the second, and so on. So does `side` for every side array of the version: by
        name, the entries, and how many each item has.

        Raises:
            ExtractorError: that is not what the version holds. Nothing has been added.
        """
        if features.dtype != self._dtype or features.shape[1:] != self._item_shape or len(features) != sum(num_frames):
            raise ExtractorError(
                f"features are {features.dtype} {list(features.shape)}; this version's are {self._dtype} "
                f"[{sum(num_frames)}, {', '.join(map(str, self._item_shape))}]"
            )
        self._side.check(side, len(items))
        self._features.append(features)
        self._side.append(side)
        start = 0
        for item, count in zip(items, num_frames, strict=True):
            self._items.append(item)
            self._crcs.append(zarr3.crc32c(features[start : start + count]))
            self._offsets.append(self._offsets[-1] + count)
            start += count

    def commit(
        self,
        shards: Path,
        *,
        sample_rate: int,
        row: int,
        supersedes: Mapping[str, list[int]],
        made_by: Mapping[str, Any],
    ) -> str:
        """Write the columns, flush everything to disk, and rename the folder to `shards/<name>`.

        Where a shard of these very items is there already, written by another run, that one stays.

        Args:
            shards: the version's folder of shards.
            sample_rate: of the extractor's input, in Hz.
            row: manifest row of the first item.
            supersedes: items of other shards that these replace, by the shard's name.
            made_by: what is recorded with the shard; `fingerprint` is that of its version.

        Returns:
            The shard's name.

        Raises:
            StoreError: there is a shard of other items, or of another version, under this name.
        """
        self._features.close()
        metadata = {"features": zarr3.array_metadata((self._offsets[-1], *self._item_shape), self._dtype)}
        (self._folder / "features" / "zarr.json").write_bytes(metadata["features"])
        for name, column in {**self._columns(), **self._side.columns()}.items():
            metadata[name] = zarr3.write_array(self._folder / name, column)
        info = ShardInfo(
            items=len(self._items),
            frames=self._offsets[-1],
            seconds=round(self.num_samples / sample_rate, 6),
            digest=digest_of(self._items, supersedes),
            row=row,
            supersedes=dict(supersedes),
            metadata={name: f"{_crc_of(data):08x}" for name, data in metadata.items()},
            made_by=dict(made_by),
        )
        (self._folder / "zarr.json").write_bytes(zarr3.group_metadata(asdict(info)))
        zarr3.sync_tree(self._folder)
        place = shards / info.digest[:12]
        try:
            self._folder.rename(place)
        except OSError:
            if not place.is_dir():
                raise
            if Shard(place, info.made_by.get("fingerprint")).info.digest != info.digest:
                raise StoreError(
                    f"{place}: holds other items under the same name: move it away and run again"
                ) from None
            self._remove()
        zarr3.sync(shards)
        return place.name

    def discard(self) -> None:
        """Leave nothing behind."""
        self._features.discard()
        self._remove()

    def _remove(self) -> None:
        remove_from_version(self._folder.parent.parent, self._folder.parent.name, self._folder.name)

    def _columns(self) -> dict[str, NDArray[Any]]:
        ids = Strings.of(item.id for item in self._items)
        rows = SegmentColumns.of(self._items)
        return {
            "offsets": np.array(self._offsets, np.uint64),
            "crc32c": np.array(self._crcs, np.uint32),
            "num_samples": np.array([item.num_samples for item in self._items], np.uint64),
            "ids": ids.blob,
            "id_offsets": ids.offsets.astype(np.uint64),
            "paths": rows.paths.blob,
            "path_offsets": rows.paths.offsets.astype(np.uint64),
            "segments": np.stack([rows.start, rows.duration], axis=1),
            "channels": rows.channel,
            "sources": np.array([(item.size, item.mtime_ns, item.sample_rate) for item in self._items], np.int64),
        }


def digest_of(items: Iterable[Item], supersedes: Mapping[str, list[int]]) -> str:
    """What a shard of these items is named after: `ShardInfo.digest`."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(tuple(item.row().values())).encode())
        digest.update(repr((item.num_samples, item.size, item.mtime_ns)).encode())
    digest.update(repr(sorted(supersedes.items())).encode())
    return digest.hexdigest()


def _crc_of(data: bytes) -> int:
    return zarr3.crc32c(np.frombuffer(data, np.uint8))
