"""One shard: written beside its place, flushed, and renamed into it; from then on it never changes.

<name>/
  zarr.json       attributes.featcache: what `ShardInfo` holds, sealed
  features/       [frames, *item_shape]; one chunk
  offsets/        uint64 [items + 1]: item i is features[offsets[i]:offsets[i + 1]]
  crc32c/         uint32 [items]: CRC-32C of each item's bytes
  num_samples/    uint64 [items]: samples that the extractor was given, at its rate
  ids/            uint8 [bytes]: the ids' UTF-8 bytes, one after the other; id i is
  id_offsets/     uint64 [items + 1]: ids[id_offsets[i]:id_offsets[i + 1]]
  paths/          uint8 [bytes], likewise: each row's path, as the manifest had it
  path_offsets/   uint64 [items + 1]
  segments/       float64 [items, 2]: the row's start and duration in seconds, NaN where it had none
  channels/       int32 [items]: the row's channel, -1 where it had none
  sources/        int64 [items, 3]: the file's bytes, mtime in ns, and sample rate in Hz, when decoded
  side_…/         two for each side array of the version; see `featcache.store.side`
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, ExtractorError, StoreError
from featcache.spec import SideSpec
from featcache.store import zarr3
from featcache.store.side import Side, SideWriter, column_names
from featcache.strings import Strings

COLUMNS = (
    "offsets",
    "crc32c",
    "num_samples",
    "ids",
    "id_offsets",
    "paths",
    "path_offsets",
    "segments",
    "channels",
    "sources",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """What a shard keeps of an utterance besides its features.

    Attributes:
        id: the utterance's.
        path: of its audio file, as the manifest had it.
        start: seconds, None where the row had none.
        duration: seconds, None where the row had none.
        channel: None where the row had none.
        num_samples: samples that the extractor was given, at the extractor's rate.
        size: of the audio file, in bytes.
        mtime_ns: of the audio file, in nanoseconds.
        sample_rate: of the audio file, in Hz.
    """

    id: str
    path: str
    start: float | None
    duration: float | None
    channel: int | None
    num_samples: int
    size: int
    mtime_ns: int
    sample_rate: int


@dataclass(frozen=True)
class ShardInfo:
    """The attributes of a shard's group.

    Attributes:
        items: how many.
        frames: of all items.
        seconds: of audio, of all items.
        digest: SHA-256 over the items and `supersedes`; the shard's name is its first 12 hex digits.
        row: manifest row of the first item, in the run that wrote the shard: orders the cache.
        supersedes: items of other shards that this shard's replace: shard name -> item numbers there.
        metadata: CRC-32C of each array's `zarr.json`, by array, as eight hex digits.
        made_by: versions, device and run that wrote the shard.
    """

    items: int
    frames: int
    seconds: float
    digest: str
    row: int
    supersedes: dict[str, list[int]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


class ShardWriter:
    """Writes one shard into `folder`, item by item; `commit` makes it visible.

    Args:
        folder: where to write; on the file system of the final place. Emptied first.
        item_shape: of one frame.
        dtype: of the stored features.
        side: the version's side arrays.

    Raises:
        OSError: from every method, where the disk is full or broken.
    """

    def __init__(
        self, folder: Path, item_shape: tuple[int, ...], dtype: np.dtype[Any], side: Sequence[SideSpec] = ()
    ) -> None:
        shutil.rmtree(folder, ignore_errors=True)
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
        """Bytes of features so far."""
        return self._offsets[-1] * math.prod(self._item_shape) * self._dtype.itemsize

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
        Returns the shard's name.
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
            digest=self._digest(supersedes),
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
            if Shard(place).info.digest != info.digest:
                raise StoreError(
                    f"{place}: holds other items under the same name: move it away and run again"
                ) from None
            shutil.rmtree(self._folder)
        zarr3.sync(shards)
        return place.name

    def discard(self) -> None:
        """Leave nothing behind."""
        self._features.discard()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _columns(self) -> dict[str, NDArray[Any]]:
        ids = Strings.of(item.id for item in self._items)
        paths = Strings.of(item.path for item in self._items)
        return {
            "offsets": np.array(self._offsets, np.uint64),
            "crc32c": np.array(self._crcs, np.uint32),
            "num_samples": np.array([item.num_samples for item in self._items], np.uint64),
            "ids": ids.blob,
            "id_offsets": ids.offsets.astype(np.uint64),
            "paths": paths.blob,
            "path_offsets": paths.offsets.astype(np.uint64),
            "segments": np.array([(_or_nan(item.start), _or_nan(item.duration)) for item in self._items]),
            "channels": np.array([-1 if item.channel is None else item.channel for item in self._items], np.int32),
            "sources": np.array([(item.size, item.mtime_ns, item.sample_rate) for item in self._items], np.int64),
        }

    def _digest(self, supersedes: Mapping[str, list[int]]) -> str:
        digest = hashlib.sha256()
        for item in self._items:
            digest.update(repr((item.id, item.path, item.start, item.duration, item.channel)).encode())
            digest.update(repr((item.num_samples, item.size, item.mtime_ns)).encode())
        digest.update(repr(sorted(supersedes.items())).encode())
        return digest.hexdigest()


class Shard:
    """A committed shard. Opening it reads nothing; each property reads what it needs, time and again.

    Raises:
        DamagedError: from every property and method, where the files are not what was written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @cached_property
    def info(self) -> ShardInfo:
        """The group's attributes, checked against their seal."""
        try:
            return ShardInfo(**zarr3.read_group(self.folder))
        except FileNotFoundError as error:
            raise DamagedError(f"{error.filename}: damaged: the file is missing") from error
        except TypeError as error:
            raise DamagedError(f"{self.folder / 'zarr.json'}: damaged: not a shard of format 1 ({error})") from error

    @property
    def features(self) -> NDArray[Any]:
        """All items' frames, one after the other, memory-mapped: `[frames, *item_shape]`."""
        return zarr3.map_array(self.folder / "features")

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 `[items + 1]`: item `i` is `features[offsets[i]:offsets[i + 1]]`."""
        return self.column("offsets").astype(np.int64)

    @property
    def ids(self) -> Strings:
        """The items' ids."""
        return Strings(self.column("ids"), self.column("id_offsets").astype(np.int64))

    @property
    def paths(self) -> Strings:
        """The paths of the items' audio files, as the manifest had them."""
        return Strings(self.column("paths"), self.column("path_offsets").astype(np.int64))

    def column(self, name: str) -> NDArray[Any]:
        """Any array but the features, read whole and held against its checksum."""
        array, checksum = zarr3.read_array(self.folder / name)
        if zarr3.crc32c(array) != checksum:
            raise DamagedError(f"{self.folder / name}: damaged: its checksum does not match")
        return array

    def side(self, name: str, check: bool = False) -> Side:
        """One of the version's side arrays, its entries memory-mapped; or with `check`, read and held against
        their checksum.
        """
        entries_name, offsets_name = column_names(name)
        entries = self.column(entries_name) if check else zarr3.map_array(self.folder / entries_name)
        offsets = self.column(offsets_name).astype(np.int64)
        if offsets[-1] != len(entries):
            raise DamagedError(f"{self.folder / offsets_name}: damaged: does not end at {len(entries)} entries")
        return Side(entries, offsets)

    def items(self, numbers: Sequence[int] | None = None) -> Iterator[Item]:
        """What the shard keeps of its items (of those of the given numbers) besides their features."""
        ids, paths = self.ids, self.paths
        names = ("segments", "channels", "num_samples", "sources")
        segments, channels, num_samples, sources = (self.column(name) for name in names)
        for number in range(len(ids)) if numbers is None else numbers:
            start, duration = segments[number].tolist()
            size, mtime_ns, sample_rate = sources[number].tolist()
            yield Item(
                id=ids[number],
                path=paths[number],
                start=None if math.isnan(start) else start,
                duration=None if math.isnan(duration) else duration,
                channel=None if channels[number] < 0 else int(channels[number]),
                num_samples=int(num_samples[number]),
                size=size,
                mtime_ns=mtime_ns,
                sample_rate=sample_rate,
            )


def _or_nan(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds


def _crc_of(data: bytes) -> int:
    return zarr3.crc32c(np.frombuffer(data, np.uint8))
