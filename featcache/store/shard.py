"""One shard as it is on disk: a folder that never changes, with a Zarr array for its features and for each column.

`COLUMNS` describes the arrays, once: whoever writes, reads, checks or repairs a shard goes by it, and so does
docs/format.md. Side arrays, an extractor's outputs besides the features, have two columns each.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, ExtractorError, StoreError, listing
from featcache.manifest import Utterance
from featcache.spec import QUANTIZATION, FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.chunk_file import ChunkFile, reading_error
from featcache.strings import Strings

SIDE_DTYPES = ("float16", "float32", "float64", "uint8", "uint16", "uint32", "uint64", "int32", "int64")
_SIDE_NAME = re.compile("[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Column:
    """One of a shard's arrays."""

    name: str
    """The array's folder in the shard's."""
    dtype: str
    """The name of its dtype; empty if the version's spec decides, until `columns_of` fills it in."""
    length: str
    """How many entries it has, in terms of `n` items, `f` frames, `e` side entries and bytes."""
    meaning: str
    """What it holds, for docs/format.md."""
    entry_shape: tuple[int, ...] = ()
    """The shape of one entry."""
    delimits: str = ""
    """The array whose entries these offsets deal out to items; empty if it holds no offsets."""
    min_entries: int = 1
    """How many entries of that array an item has at least."""
    is_optional: bool = False
    """Whether shards that earlier code has written lack it."""
    fill: int = 0
    """What stock Zarr reads of an array of integers whose chunk is missing; of floats, it reads NaN."""

    def metadata(self, length: int) -> bytes:
        """The `zarr.json` of the array with that many entries."""
        return zarr3.array_metadata((length, *self.entry_shape), np.dtype(self.dtype), self._dimensions, self.fill)

    def is_metadata(self, checksum: str | None, length: int) -> bool:
        """Whether a `zarr.json` of that checksum is the array's with that many entries, in a form of any time."""
        first = zarr3.first_array_metadata((length, *self.entry_shape), np.dtype(self.dtype))
        return any(zarr3.hex_crc32c(form) == checksum for form in (self.metadata(length), first))

    @property
    def _dimensions(self) -> list[str]:
        """The names of the array's dimensions: in all arrays of a shard, equal names have equal lengths.

        None of them is the name of an array, because xarray would take that for the dimension's coordinates.
        """
        names = [f"{self.name}_dim_{axis}" for axis in range(1 + len(self.entry_shape))]
        return [_DIMENSIONS.get(self.length, names[0]), *names[1:]]


_DIMENSIONS = {"n": "item", "n + 1": "item_edge", "f": "frame"}
"""The names of first dimensions that several arrays may share."""

FEATURES = Column("features", "", "f", "the frames of all items, one item after another")

COLUMNS = (
    Column(
        "offsets",
        "uint64",
        "n + 1",
        "item `i` is `features[offsets[i]:offsets[i + 1]]`; strictly increasing from 0 to `f`",
        delimits="features",
    ),
    Column("crc32c", "uint32", "n", "CRC-32C of each item's bytes in `features`"),
    Column("num_samples", "uint64", "n", "number of samples given to the extractor, at its own rate"),
    Column("ids", "uint8", "bytes", "the ids of all items, one after another"),
    Column("id_offsets", "uint64", "n + 1", "id `i` is `ids[id_offsets[i]:id_offsets[i + 1]]`", delimits="ids"),
    Column("paths", "uint8", "bytes", "each row's path, as in the manifest"),
    Column("path_offsets", "uint64", "n + 1", "likewise", delimits="paths"),
    Column("segments", "float64", "n", "the row's start and duration in seconds; NaN if not given", (2,)),
    Column("channels", "int32", "n", "the row's channel; -1 if not given"),
    Column(
        "sources",
        "int64",
        "n",
        "the audio file when it was decoded: size in bytes, mtime in ns since 1970, sample rate in Hz",
        (3,),
    ),
    Column(
        "source_hashes",
        "uint64",
        "n",
        "XXH3-64 of the audio file's bytes when it was decoded; 0 if unknown. Shards may lack this array",
        is_optional=True,
    ),
)
"""The arrays of every shard besides the features."""

SIDE_COLUMNS = (
    Column("side_<name>", "", "e", "the entries of all items, one item after another"),
    Column(
        "side_<name>_offsets",
        "uint64",
        "n + 1",
        "item `i` has `side_<name>[offsets[i]:offsets[i + 1]]`; non-decreasing from 0 to `e`",
        delimits="side_<name>",
        min_entries=0,
    ),
)
"""The two arrays of a side array, its entries and their offsets."""


def side_names(name: str) -> tuple[str, str]:
    """The names of a side array's two columns: its entries, and their offsets."""
    entries, offsets = (column.name.replace("<name>", name) for column in SIDE_COLUMNS)
    return entries, offsets


def _side_columns(spec: SideSpec) -> tuple[Column, Column]:
    entries, offsets = SIDE_COLUMNS
    entries_name, offsets_name = side_names(spec.name)
    return (
        replace(entries, name=entries_name, dtype=spec.dtype, entry_shape=spec.item_shape),
        replace(offsets, name=offsets_name, delimits=entries_name, min_entries=int(spec.name == QUANTIZATION)),
    )


def columns_of(spec: FeatureSpec, there: Collection[str]) -> dict[str, Column]:
    """The arrays of a version's shard, by name, the features first; optional ones only if they are among `there`."""
    fill = _no_code(spec)
    features = replace(FEATURES, dtype=spec.stored_dtype, entry_shape=spec.item_shape, fill=fill)
    of_side_arrays = (column for side in spec.side for column in _side_columns(side))
    columns = (features, *COLUMNS, *of_side_arrays)
    return {column.name: column for column in columns if not column.is_optional or column.name in there}


def _no_code(spec: FeatureSpec) -> int:
    """The largest value of the dtype of codes if it is none, else 0."""
    dtype = np.dtype(spec.stored_dtype)
    if dtype.kind == "f" or not spec.codebook_sizes or max(spec.codebook_sizes) > np.iinfo(dtype).max:
        return 0
    return int(np.iinfo(dtype).max)


def check_side_specs(specs: Sequence[SideSpec]) -> None:
    """Refuse side arrays that cannot be stored beside each other.

    Raises:
        ExtractorError: Says which name, dtype or shape is wrong.
    """
    for spec in specs:
        if not _SIDE_NAME.fullmatch(spec.name):
            raise ExtractorError(f"side array {spec.name!r}: a name is lower-case letters, digits and _")
        if spec.dtype not in SIDE_DTYPES:
            raise ExtractorError(f"side array {spec.name}: {spec.dtype!r} is none of {', '.join(SIDE_DTYPES)}")
        if min(spec.item_shape, default=1) < 1:
            raise ExtractorError(f"side array {spec.name}: entries of shape {list(spec.item_shape)} hold no value")
    names = [name for spec in specs for name in side_names(spec.name)]
    if len(set(names)) < len(names):
        raise ExtractorError(
            f"side arrays {listing(spec.name for spec in specs)}: two of them have the same name on disk"
        )


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

    @classmethod
    def of(cls, utterance: Utterance, num_samples: int, file: Sequence[int], content_hash: int = 0) -> Item:
        """The item that an utterance becomes; `file` is the size, mtime in ns and sample rate of its audio file."""
        size, mtime_ns, sample_rate = file
        return cls(
            **utterance.row(),
            num_samples=num_samples,
            size=size,
            mtime_ns=mtime_ns,
            sample_rate=sample_rate,
            content_hash=content_hash,
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
    its array whenever it is asked for.

    Args:
        folder: The shard's folder.
        fingerprint: The fingerprint of the version that it must belong to; None to read it whatever it belongs to.

    Raises:
        DamagedError: From every property and method but `stated_version`, if the files are not what was written, or
            the shard belongs to another version. The message names the remedy.
        StoreError: The files may not be read.
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
        """The group's attributes, checked against their seal."""
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
        except StoreError:
            return None
        return None if stated is None else str(stated)

    @property
    def features(self) -> NDArray[Any]:
        """All items' frames, one after the other, memory-mapped: `[frames, *item_shape]`."""
        return self._map("features")

    def open_features(self) -> ChunkFile:
        """All items' frames, one after the other, to be read from the file."""
        features = self.features  # which says what they are; nothing is read from the map
        path = zarr3.chunk_path(self.folder / "features", features.ndim)
        with self._naming_remedy():
            return ChunkFile(path, features.shape, features.dtype, self.folder.parent.parent)

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

    @property
    def source_hashes(self) -> NDArray[np.uint64]:
        """XXH3-64 of each item's audio file when it was decoded, uint64 `[items]`; 0 if unknown."""
        if "source_hashes" not in self.info.metadata:
            return np.zeros(self.info.items, np.uint64)
        return self.column("source_hashes")

    def column(self, name: str) -> NDArray[Any]:
        """Any array but the features, read whole and held against its checksum."""
        self._require_own()
        with self._naming_remedy():
            array, checksum = zarr3.read_array(self.folder / name)
            if zarr3.crc32c(array) != checksum:
                raise DamagedError(f"{self.folder / name}: damaged: its checksum does not match")
        return array

    def side(self, name: str, check: bool = False) -> SideArray:
        """One of the version's side arrays. Its entries are memory-mapped, or with `check`, read and held against
        their checksum.
        """
        entries_name, offsets_name = side_names(name)
        entries = self.column(entries_name) if check else self._map(entries_name)
        offsets = self.column(offsets_name).astype(np.int64)
        with self._naming_remedy():
            if offsets[-1] != len(entries):
                raise DamagedError(f"{self.folder / offsets_name}: damaged: does not end at {len(entries)} entries")
        return SideArray(entries, offsets)

    def num_bytes(self, spec: FeatureSpec) -> int:
        """The stored bytes of features and of side arrays' entries; everything else is small beside them."""
        entries = (self._map(side_names(side.name)[0]).nbytes for side in spec.side)
        return self.info.frames * spec.bytes_per_frame + sum(entries)

    def items(self, numbers: Sequence[int] | None = None) -> Iterator[Item]:
        """The items, or those of the given numbers, without their features."""
        ids, paths = self.ids, self.paths
        names = ("segments", "channels", "num_samples", "sources")
        segments, channels, num_samples, sources = (self.column(name) for name in names)
        hashes = self.source_hashes
        for number in range(len(ids)) if numbers is None else numbers:
            start, duration = segments[number].tolist()
            row = Utterance.of_columns(ids[number], paths[number], start, duration, int(channels[number]))
            yield Item.of(row, int(num_samples[number]), sources[number].tolist(), int(hashes[number]))

    def _map(self, name: str) -> NDArray[Any]:
        self._require_own()
        with self._naming_remedy():
            return zarr3.map_array(self.folder / name)

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
            if not os.path.lexists(self.folder):
                raise DamagedError(
                    f"{self.folder}: is no longer there: the version was repaired since it was opened, or somebody has "
                    "removed this shard: open it again"
                ) from error
            raise DamagedError(error.what, version=self.folder.parent.parent) from error
        except OSError as error:
            raise reading_error(error, self.folder, self.folder.parent.parent) from error
