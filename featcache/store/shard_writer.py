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

from featcache.errors import ExtractorError, StoreError, listing
from featcache.manifest import SegmentColumns
from featcache.spec import FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.checksums import crc32c, hex_crc32c
from featcache.store.columns import COLUMNS, columns_of, side_names
from featcache.store.files import publish_folder, remove_from_version
from featcache.store.shard import Item, Shard, ShardInfo
from featcache.strings import Strings

SideData = Mapping[str, tuple[NDArray[Any], Sequence[int]]]
"""Side arrays of some items, by name: their entries, one item after another, and how many each item has."""


class ShardWriter:
    """Writes one shard of a version into `folder`, which is in its `work/` and does not exist yet, item by item;
    `commit` makes it visible.

    Raises:
        OSError: From every method, if the disk is full or broken.
    """

    def __init__(self, folder: Path, spec: FeatureSpec) -> None:
        self._folder = folder
        self._spec = spec
        self._item_shape = spec.item_shape
        self._dtype = np.dtype(spec.stored_dtype).newbyteorder("<")
        self._features = zarr3.ChunkWriter(zarr3.chunk_path(folder / "features", 1 + len(spec.item_shape)))
        self._items: list[Item] = []
        self._side = _SideArrays(spec.side)
        self._crcs: list[int] = []
        self._offsets = [0]

    @property
    def items(self) -> int:
        """The number of items so far."""
        return len(self._items)

    @property
    def ids(self) -> list[str]:
        """The ids of the items so far."""
        return [item.id for item in self._items]

    @property
    def num_samples(self) -> int:
        """The number of audio samples so far, at the extractor's rate."""
        return sum(item.num_samples for item in self._items)

    @property
    def num_bytes(self) -> int:
        """The bytes of features and of side arrays' entries so far."""
        return self._num_feature_bytes + self._side.num_bytes

    @property
    def _num_feature_bytes(self) -> int:
        return self._offsets[-1] * math.prod(self._item_shape) * self._dtype.itemsize

    def append(
        self,
        items: Sequence[Item],
        features: NDArray[Any],
        num_frames: Sequence[int],
        side: Mapping[str, tuple[NDArray[Any], Sequence[int]]] = {},
    ) -> None:
        """Add items, and the data that they have of every side array of the version.

        Their features are one item after another, each of `num_frames`: `[frames, *item_shape]` of the stored dtype,
        C-contiguous.

        Raises:
            ExtractorError: The data is not what the version holds. Nothing has been added.
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
            self._crcs.append(crc32c(features[start : start + count]))
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
        attempt: str = "",
    ) -> str:
        """Write the columns, flush everything to disk, and rename the folder to `shards/<name>`; returns the name.

        If another run has committed a shard of the very same items already, that shard stays.

        Args:
            shards: The version's folder of shards.
            sample_rate: The sample rate of the extractor's input, in Hz.
            row, supersedes, made_by: Recorded with the shard; see `ShardInfo`.
            attempt: Tells this attempt to make the shard from others, which get other names; empty if the name is to
                follow from the items alone.

        Raises:
            StoreError: There is a shard of other items, or of another version, under this name; or something has
                removed what was written.
        """
        self._features.close()
        arrays = {**self._columns(), **self._side.columns()}
        if attempt and (arrays["channels"] == -1).all():  # two requests less, where each file is one
            del arrays["channels"]
        columns = columns_of(self._spec, arrays)
        metadata = {"features": columns["features"].metadata(self._offsets[-1])}
        (self._folder / "features" / "zarr.json").write_bytes(metadata["features"])
        for name, array in arrays.items():
            metadata[name] = columns[name].metadata(len(array))
            zarr3.write_array(self._folder / name, array, metadata[name])
        made_by = {key: value for key, value in made_by.items() if key != "attempt"}
        if attempt:
            made_by["attempt"] = f"{digest_of(self._items, supersedes)[:12]}.{attempt}"
        info = ShardInfo(
            items=len(self._items),
            frames=self._offsets[-1],
            seconds=round(self.num_samples / sample_rate, 6),
            digest=digest_of(self._items, supersedes, made_by.get("attempt")),
            row=row,
            supersedes=dict(supersedes),
            metadata={name: hex_crc32c(data) for name, data in metadata.items()},
            made_by=made_by,
        )
        group = zarr3.group_metadata(asdict(info))
        (self._folder / "zarr.json").write_bytes(group)
        written = {"zarr.json": len(group), **{f"{name}/zarr.json": len(data) for name, data in metadata.items()}}
        chunks = {name: (array.ndim, array.nbytes) for name, array in arrays.items() if array.size}
        chunks["features"] = 1 + len(self._item_shape), self._num_feature_bytes
        for name, (num_dimensions, num_bytes) in chunks.items():
            chunk = zarr3.chunk_path(Path(name), num_dimensions)
            written[str(chunk)] = num_bytes + zarr3.CHECKSUM_BYTES
        place = shards / info.digest[:12]
        if not publish_folder(self._folder, place, written):
            if Shard(place, info.made_by.get("fingerprint")).info.digest != info.digest:
                raise StoreError(f"{place}: holds other items under the same name: move it away and run again")
            self._remove()
        return place.name

    def discard(self) -> None:
        """Leave nothing behind."""
        self._features.discard()
        self._remove()

    def _remove(self) -> None:
        remove_from_version(self._folder.parent.parent, self._folder.parent.name, self._folder.name)

    def _columns(self) -> dict[str, NDArray[Any]]:
        ids, rows = Strings.of(self.ids), SegmentColumns.of(self._items)
        values: dict[str, Any] = {
            "offsets": self._offsets,
            "crc32c": self._crcs,
            "num_samples": [item.num_samples for item in self._items],
            "ids": ids.blob,
            "id_offsets": ids.offsets,
            "paths": rows.paths.blob,
            "path_offsets": rows.paths.offsets,
            "segments": np.stack([rows.start, rows.duration], axis=1),
            "channels": rows.channel,
            "sources": [(item.size, item.mtime_ns, item.sample_rate) for item in self._items],
            "source_hashes": [item.content_hash for item in self._items],
        }
        if any(item.by_ffmpeg for item in self._items):
            values["decoders"] = [item.by_ffmpeg for item in self._items]
        columns = {column.name: column for column in COLUMNS}
        return {name: np.asarray(held, columns[name].dtype) for name, held in values.items()}


def digest_of(items: Iterable[Item], supersedes: Mapping[str, list[int]], attempt: str | None = None) -> str:
    """The hash that a shard of these items is named after: `ShardInfo.digest`; `attempt` is that of its `made_by`."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(repr(tuple(item.row().values())).encode())
        digest.update(repr((item.num_samples, item.size, item.mtime_ns)).encode())
    digest.update(repr(sorted(supersedes.items())).encode())
    if attempt is not None:
        digest.update(attempt.encode())
    return digest.hexdigest()


class _SideArrays:
    """The side arrays of a shard, in memory until it is committed: they are small compared with its features."""

    def __init__(self, specs: Iterable[SideSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._entries = {name: [np.empty((0, *spec.item_shape), spec.dtype)] for name, spec in self._specs.items()}
        self._offsets = {name: [0] for name in self._specs}

    def check(self, side: SideData, num_items: int) -> None:
        """Refuse data of some items that has another name, dtype, shape or number of entries than the specs say."""
        if side.keys() != self._specs.keys():
            raise ExtractorError(f"side arrays are {_named(side)}; this version's are {_named(self._specs)}")
        for name, (entries, counts) in side.items():
            spec = self._specs[name]
            if len(counts) != num_items or min(counts, default=0) < 0:
                raise ExtractorError(f"side array {name} has {list(counts)} entries for {num_items} items")
            found, expected = (entries.dtype, entries.shape), (np.dtype(spec.dtype), (sum(counts), *spec.item_shape))
            if found != expected:
                raise ExtractorError(
                    f"side array {name} is {found[0]} {list(found[1])}; "
                    f"this version's is {expected[0]} {list(expected[1])}"
                )

    def append(self, side: SideData) -> None:
        """Add a copy of the data of some items, which `check` has let pass."""
        for name, (entries, counts) in side.items():
            self._entries[name].append(entries.copy())
            offsets = self._offsets[name]
            for count in counts:
                offsets.append(offsets[-1] + count)

    @property
    def num_bytes(self) -> int:
        """The bytes of all entries so far."""
        return sum(self._offsets[name][-1] * spec.bytes_per_entry for name, spec in self._specs.items())

    def columns(self) -> dict[str, NDArray[Any]]:
        """The arrays, by their names in the shard."""
        columns: dict[str, NDArray[Any]] = {}
        for name in self._specs:
            entries, offsets = side_names(name)
            columns[entries] = np.concatenate(self._entries[name])
            columns[offsets] = np.array(self._offsets[name], np.uint64)
        return columns


def _named(names: Iterable[str]) -> str:
    return listing(sorted(names)) or "none"
