"""One shard, as it is on disk: it never changes.

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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError
from featcache.manifest import Utterance
from featcache.spec import FeatureSpec
from featcache.store import zarr3
from featcache.store.side import Side, column_names
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Item(Utterance):
    """An utterance as a shard keeps it, besides its features."""

    num_samples: int
    """The number of samples that the extractor was given, at the extractor's rate."""

    size: int
    """The size of the audio file in bytes, when it was decoded."""

    mtime_ns: int
    """When the audio file was last modified, in nanoseconds since 1970."""

    sample_rate: int
    """The sample rate of the audio file in Hz."""

    @classmethod
    def of(cls, utterance: Utterance, num_samples: int, file: Sequence[int]) -> Item:
        """The item that an utterance becomes; `file` is the size, mtime in ns and sample rate of its audio file."""
        size, mtime_ns, sample_rate = file
        return cls(**utterance.row(), num_samples=num_samples, size=size, mtime_ns=mtime_ns, sample_rate=sample_rate)


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
        made_by: versions, device and run that wrote the shard; and the `fingerprint` of the version that it was written
            for, which the shards of 0.1.0 lack.
    """

    items: int
    frames: int
    seconds: float
    digest: str
    row: int
    supersedes: dict[str, list[int]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    made_by: dict[str, Any] = field(default_factory=dict)


class Shard:
    """A committed shard. Opening it reads nothing; each property reads what it needs, time and again, and the group's
    attributes once.

    Args:
        folder: the shard's.
        fingerprint: of the version that it is to belong to; None to read it whatever it belongs to.

    Raises:
        DamagedError: from every property and method but `stated_version`, where the files are not what was written, or
            the shard belongs to another version; says what mends it.
    """

    def __init__(self, folder: Path, fingerprint: str | None) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self._info: ShardInfo | None = None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def info(self) -> ShardInfo:
        """The group's attributes, checked against their seal, and read once."""
        # No `cached_property`: Python 3.11's has a lock for all shards, and a child forked while it is held hangs.
        if self._info is None:
            self._info = self._read_info()
        return self._info

    def _read_info(self) -> ShardInfo:
        with self._naming_remedy():
            try:
                info = ShardInfo(**zarr3.read_group(self.folder))
            except FileNotFoundError as error:
                raise DamagedError(f"{error.filename}: damaged: the file is missing") from error
            except TypeError as error:
                path = self.folder / "zarr.json"
                raise DamagedError(f"{path}: damaged: not a shard of format 1 ({error})") from error
            stated = info.made_by.get("fingerprint")
            if stated is not None and self.fingerprint not in (None, stated):
                raise DamagedError(
                    f"{self.folder}: belongs to another version ({str(stated)[:12]}), not to this one "
                    f"({str(self.fingerprint)[:12]})"
                )
            return info

    @property
    def stated_version(self) -> str | None:
        """The fingerprint of the version that the shard says it belongs to; None if it says nothing, or is damaged."""
        try:
            stated = Shard(self.folder, None).info.made_by.get("fingerprint")
        except (DamagedError, OSError):
            return None
        return None if stated is None else str(stated)

    @property
    def features(self) -> NDArray[Any]:
        """All items' frames, one after the other, memory-mapped: `[frames, *item_shape]`."""
        return self._map("features")

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
        self._require_own()
        with self._naming_remedy():
            array, checksum = zarr3.read_array(self.folder / name)
            if zarr3.crc32c(array) != checksum:
                raise DamagedError(f"{self.folder / name}: damaged: its checksum does not match")
        return array

    def side(self, name: str, check: bool = False) -> Side:
        """One of the version's side arrays, its entries memory-mapped; or with `check`, read and held against
        their checksum.
        """
        entries_name, offsets_name = column_names(name)
        entries = self.column(entries_name) if check else self._map(entries_name)
        offsets = self.column(offsets_name).astype(np.int64)
        with self._naming_remedy():
            if offsets[-1] != len(entries):
                raise DamagedError(f"{self.folder / offsets_name}: damaged: does not end at {len(entries)} entries")
        return Side(entries, offsets)

    def num_bytes(self, spec: FeatureSpec) -> int:
        """Bytes of features as they are stored, with the side arrays' entries; all else is small beside them."""
        entries = (self._map(column_names(side.name)[0]).nbytes for side in spec.side)
        return self.info.frames * spec.bytes_per_frame + sum(entries)

    def items(self, numbers: Sequence[int] | None = None) -> Iterator[Item]:
        """What the shard keeps of its items (of those of the given numbers) besides their features."""
        ids, paths = self.ids, self.paths
        names = ("segments", "channels", "num_samples", "sources")
        segments, channels, num_samples, sources = (self.column(name) for name in names)
        for number in range(len(ids)) if numbers is None else numbers:
            start, duration = segments[number].tolist()
            row = Utterance.of_columns(ids[number], paths[number], start, duration, int(channels[number]))
            yield Item.of(row, int(num_samples[number]), sources[number].tolist())

    def _map(self, name: str) -> NDArray[Any]:
        """Any array, memory-mapped."""
        self._require_own()
        with self._naming_remedy():
            return zarr3.map_array(self.folder / name)

    def _require_own(self) -> None:
        """Read nothing of another version: its values would be taken for this one's."""
        if self.fingerprint is not None:
            _ = self.info

    @contextmanager
    def _naming_remedy(self) -> Iterator[None]:
        """Damage that is found within is said with the version that is to be repaired."""
        try:
            yield
        except DamagedError as error:
            raise DamagedError(error.what, version=self.folder.parent.parent) from error
