"""One shard as it is on disk: a folder that never changes, with a Zarr array for its features and for each column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.manifest import Utterance
from featcache.spec import FeatureSpec
from featcache.storage.location import Location, folder_of
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.checksums import crc32c, hex_crc32c
from featcache.store.chunk_file import Chunk, open_chunk, reading_error
from featcache.store.columns import COLUMNS, Column, side_names
from featcache.store.documents import read_bytes
from featcache.store.fields import any_of, fields, listed, mapped, number, optional, text, whole
from featcache.strings import Strings

_TEXT_BYTES = 4096
"""The longest id or path, on the average over a shard. Linux opens no file with a longer path."""


_BY_NAME = {column.name: column for column in COLUMNS}


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
    content_hash: int = 0
    """XXH3-64 of the audio file's bytes, when it was decoded; 0 if unknown."""
    by_ffmpeg: bool = False
    """Whether FFmpeg decoded the audio file."""

    @classmethod
    def of(
        cls,
        utterance: Utterance,
        num_samples: int,
        file: Sequence[int],
        content_hash: int = 0,
        by_ffmpeg: bool = False,
    ) -> Item:
        """The item that an utterance becomes; `file` is the size, mtime in ns and sample rate of its audio file."""
        size, mtime_ns, sample_rate = file
        return cls(
            **utterance.row(),
            num_samples=num_samples,
            size=size,
            mtime_ns=mtime_ns,
            sample_rate=sample_rate,
            content_hash=content_hash,
            by_ffmpeg=by_ffmpeg,
        )


@dataclass(frozen=True)
class ShardInfo:
    """The attributes of a shard's group."""

    items: int
    """The number of items."""
    frames: int
    """The number of frames of all items."""
    seconds: float
    """The seconds of audio of all items."""
    digest: str
    """SHA-256 over the items and `supersedes`; the shard's name is its first 12 hex digits."""
    row: int
    """The manifest row of the first item, in the run that wrote the shard; it orders the version's shards."""
    supersedes: dict[str, list[int]] = field(default_factory=dict)
    """The items of other shards that this shard's replace: shard name -> item numbers there."""
    metadata: dict[str, str] = field(default_factory=dict)
    """CRC-32C of each array's `zarr.json`, by array, as eight hex digits."""
    made_by: dict[str, Any] = field(default_factory=dict)
    """Library versions, device and run that wrote the shard, and the `fingerprint` of its version, which the shards of
    0.1.0 lack.
    """

    @classmethod
    def of(cls, attributes: dict[str, Any]) -> ShardInfo:
        """The attributes as JSON has them, checked.

        Raises:
            ValueError: Says which of them is not what format 1 allows.
        """
        return cls(**_SHARD(attributes))


_ITEMS = 2**32 - 1
_MADE_BY = fields(
    {},
    or_not={
        "run": text(),
        "fingerprint": text(),
        "batching": optional(text()),
        "mismatch": optional(number(0, 1)),
        "attempt": text(r"[0-9a-f]{12}\.[0-9a-f]{16}"),
    },
    others=optional(any_of(text(), number())),
)
_SHARD = fields(
    {
        "items": whole(1, _ITEMS),
        "frames": whole(),
        "seconds": number(0),
        "digest": text("[0-9a-f]{64}"),
        "row": whole(),
    },
    or_not={
        "supersedes": mapped(text("[0-9a-f]{12}"), listed(whole(0, _ITEMS), _ITEMS)),
        "metadata": mapped(text(), text("[0-9a-f]{8}")),
        "made_by": _MADE_BY,
    },
)
"""The attributes of a shard's group."""


@dataclass(frozen=True)
class SideArray:
    """One side array of a shard."""

    entries: NDArray[Any]
    """The entries of all items, `[entries, *item_shape]`."""
    offsets: NDArray[np.int64]
    """Item `i` has `entries[offsets[i]:offsets[i + 1]]`; int64 `[items + 1]`."""

    def item(self, number: int) -> NDArray[Any]:
        """The entries of one item, `[n, *item_shape]`; a view."""
        return self.entries[self.offsets[number] : self.offsets[number + 1]]


class Shard:
    """A committed shard. Opening it reads nothing. The group's attributes are read once; every other property reads
    its array whenever it is asked for. If the shard states another version's fingerprint than the given one, nothing is
    read of it; with None, it is read whatever it belongs to.

    Raises:
        DamagedError: From every property and method but `stated_version`, if the files are not what was written, or
            the shard belongs to another version. The message names the remedy.
        StoreError: The files may not be read.
    """

    def __init__(self, folder: Location, fingerprint: str | None) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self._info: ShardInfo | None = None
        self._seal = ""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def info(self) -> ShardInfo:
        """The group's attributes, checked against their seal."""
        # No `cached_property`: Python 3.11's has a lock for all shards, and a child forked while it is held hangs.
        if self._info is None:
            self._info = self._read_info()
        return self._info

    def take_metadata(self, data: bytes) -> None:
        """Take these bytes for those of the shard's `zarr.json`, which then is not read."""
        self._info = self._read_info(data)

    def take_info(self, info: ShardInfo) -> None:
        """Take these for the shard's attributes, which then are not read."""
        self._info = info

    @property
    def seal(self) -> str:
        """The seal of the group's `zarr.json`, eight hex digits. It tells a shard from those that other runs make of
        the same items, which have the same name: each says which run made it.
        """
        _ = self.info
        return self._seal

    def _read_info(self, data: bytes | None = None) -> ShardInfo:
        with self._naming_remedy():
            try:
                path = self.folder / "zarr.json"
                attributes, self._seal = zarr3.parse_group(read_bytes(path) if data is None else data, path)
                info = ShardInfo.of(attributes)
            except FileNotFoundError as error:
                raise DamagedError(f"{error.filename}: damaged: the file is missing") from error
            except ValueError as error:
                raise DamagedError(f"{path}: damaged: not a shard of format 1: {error}") from error
            stated = info.made_by.get("fingerprint")
            if stated is not None and self.fingerprint not in (None, stated):
                raise DamagedError(
                    f"{self.folder}: belongs to another version ({str(stated)[:12]}), not to this one "
                    f"({str(self.fingerprint)[:12]})"
                )
            return info

    @property
    def run(self) -> str:
        """The name of the run that extracted the items, which repair keeps; empty if the shard does not say."""
        return str(self.info.made_by.get("run", ""))

    @property
    def stated_version(self) -> str | None:
        """The fingerprint of the version that the shard says it belongs to; None if it says nothing, or is damaged."""
        try:
            stated = Shard(self.folder, None).info.made_by.get("fingerprint")
        except StoreError:
            return None
        return None if stated is None else str(stated)

    @property
    def features(self) -> NDArray[Any]:
        """All items' frames, one after the other, memory-mapped: `[frames, *item_shape]`.

        Raises:
            StoreError: The shard is in an object store.
        """
        self._require_own()
        with self._naming_remedy():
            return zarr3.map_array(folder_of(self.folder) / "features")

    def open_features(self) -> Chunk:
        """All items' frames, one after the other, to be read from where they lie; their file has the right size."""
        with read_ahead([self.folder / "zarr.json", self.folder / "features" / "zarr.json"]):
            found = self.find("features")
        with self._naming_remedy():
            assert found.chunk is not None  # a shard has frames
            return open_chunk(found.chunk, found.shape, found.dtype, self._version, found.checksum)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 `[items + 1]`: item `i` is `features[offsets[i]:offsets[i + 1]]`."""
        return self._offsets("offsets", self.info.frames)

    @property
    def ids(self) -> Strings:
        """The items' ids."""
        return self._strings("ids", "id_offsets")

    @property
    def paths(self) -> Strings:
        """The paths of the items' audio files, as the manifest had them."""
        return self._strings("paths", "path_offsets")

    def column(self, name: str) -> NDArray[Any]:
        """Any array but the features, read whole and held against its checksum; of one that the shard lacks, what
        stands for it.
        """
        column = _BY_NAME.get(name)
        if column is None or column.missing is None or name in self.info.metadata:
            return self._read_column(name)
        return np.full(self.info.items, column.missing, column.dtype)

    def _read_column(self, name: str) -> NDArray[Any]:
        self._require_own()
        with self._naming_remedy():
            array, checksum = zarr3.read_array(self.folder / name, self.form(name))
            if crc32c(array) != checksum:
                raise DamagedError(f"{self.folder / name}: damaged: its checksum does not match")
        return array

    def side(self, name: str, check: bool = False) -> SideArray:
        """One of the version's side arrays. Its entries are memory-mapped, if they are in a folder; or with `check`,
        read and held against their checksum.
        """
        entries_name, offsets_name = side_names(name)
        entries = self.column(entries_name) if check else self._entries(entries_name)
        return SideArray(entries, self._offsets(offsets_name, len(entries)))

    def files(self, columns: Iterable[Column]) -> Iterator[Location]:
        """The files of some columns, and the shard's own metadata."""
        yield self.folder / "zarr.json"
        for column in columns:
            array = self.folder / column.name
            yield array / "zarr.json"
            yield zarr3.chunk_path(array, 1 + len(column.entry_shape))

    def form(self, name: str) -> zarr3.Form | None:
        """What an array besides the features must be, by its name; None for the entries of side arrays."""
        items = self.info.items
        if name.startswith("side_"):
            return zarr3.Form("uint64", (), items + 1) if name.endswith("_offsets") else None
        column = _BY_NAME[name]
        length = {"n": items, "n + 1": items + 1}.get(column.length)
        at_most = items * _TEXT_BYTES if column.length == "bytes" else None
        return zarr3.Form(column.dtype, column.entry_shape, length, at_most)

    def _offsets(self, name: str, last: int) -> NDArray[np.int64]:
        """A column of offsets, which never fall, from 0 to `last`."""
        offsets = self.column(name)
        if not are_rising(offsets, last, min_entries=0):
            raise DamagedError(f"{self.folder / name}: damaged: does not rise from 0 to {last}", self._version)
        return offsets.astype(np.int64)

    def _strings(self, name: str, offsets_name: str) -> Strings:
        blob = self.column(name)
        strings = Strings(blob, self._offsets(offsets_name, len(blob)))
        if not strings.are_utf8():
            raise DamagedError(f"{self.folder / name}: damaged: not UTF-8", self._version)
        return strings

    def num_bytes(self, spec: FeatureSpec) -> int:
        """The stored bytes of features and of side arrays' entries; everything else is small beside them."""
        entries = (self.find(side_names(side.name)[0]).num_bytes for side in spec.side)
        return self.info.frames * spec.bytes_per_frame + sum(entries)

    def items(self, numbers: Sequence[int] | None = None) -> Iterator[Item]:
        """The items, or those of the given numbers, without their features."""
        ids, paths = self.ids, self.paths
        names = ("segments", "channels", "num_samples", "sources", "source_hashes", "decoders")
        segments, channels, num_samples, sources, hashes, decoders = (self.column(name) for name in names)
        for at in range(len(ids)) if numbers is None else numbers:
            if at >= len(ids):  # an index that is sealed, and wrong all the same
                raise DamagedError(f"{self.folder}: damaged: has no item {at}", self._version)
            start, duration = segments[at].tolist()
            row = Utterance.of_columns(ids[at], paths[at], start, duration, int(channels[at]))
            yield Item.of(row, int(num_samples[at]), sources[at].tolist(), int(hashes[at]), bool(decoders[at]))

    def _entries(self, name: str) -> NDArray[Any]:
        self._require_own()
        with self._naming_remedy():
            array = self.folder / name
            return zarr3.map_array(array) if isinstance(array, Path) else zarr3.read_array(array)[0]

    def find(self, name: str) -> zarr3.FoundArray:
        """What any array is; its file has the size that follows."""
        self._require_own()
        with self._naming_remedy():
            return zarr3.find_whole_array(self.folder / name)

    def values(self, spec: FeatureSpec) -> str:
        """A hash of the shard's values, eight hex digits, by which shards of the same items are compared.

        It is the CRC-32C of the checksums that are stored with the features, with their offsets, and with side arrays.
        """
        names = ["features", "offsets", *(name for side in spec.side for name in side_names(side.name))]
        chunks = [found for found in map(self.find, names) if found.chunk is not None]
        with self._naming_remedy():
            stored = [
                store_of(found.chunk).get_ranges(found.chunk, [found.num_bytes], [zarr3.CHECKSUM_BYTES])[0]
                for found in chunks
                if found.chunk is not None
            ]
        return hex_crc32c(b"".join(stored))

    def _require_own(self) -> None:
        """Read nothing of another version, whose values would be taken for this one's."""
        if self.fingerprint is not None:
            _ = self.info

    @contextmanager
    def _naming_remedy(self) -> Iterator[None]:
        """Name the version that is to be repaired in any DamagedError raised within; or say that the shard is gone."""
        try:
            yield
        except DamagedError as error:
            if not store_of(self.folder).exists(self.folder):
                raise DamagedError(
                    f"{self.folder}: is no longer there: the version was repaired or pruned since it was opened, or "
                    "somebody has removed this shard: open it again"
                ) from error
            raise DamagedError(error.what, self._version) from error
        except OSError as error:
            raise reading_error(error, self.folder, self._version) from error

    @property
    def _version(self) -> Location:
        return self.folder.parent.parent


def are_rising(offsets: NDArray[Any], last: int, min_entries: int) -> bool:
    """Whether offsets, `[n + 1]`, rise from 0 to `last`, by `min_entries` at least each time."""
    if not len(offsets) or int(offsets[0]) != 0 or int(offsets[-1]) != last:
        return False
    before, after = offsets[:-1], offsets[1:]
    return bool((before <= after).all() and (after - before >= min_entries).all())
