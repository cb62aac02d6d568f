"""A shard: the features of some items, and what is known of each. It never changes, and
its name is a hash of its content."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import DamagedError, listing
from featcache.format.documents import Count, Hash, NotNegative
from featcache.format.group import (
    CHECKSUM_BYTES,
    NAME_DIGITS,
    Group,
    GroupInfo,
    checksum_of,
    digest_of,
    naming_remedy,
    rise,
)
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.manifest.strings import are_distinct
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite, as_values
from featcache.storage.base import MARK, Opened, Store

COLUMNS = {
    "frame_offset": "uint64",
    "id_offset": "uint64",
    "path_offset": "uint64",
    "id_hash": "uint64",
    "row_hash": "uint64",
    "generation": "uint64",
    "item_crc32c": "uint64",
    "num_samples": "uint64",
    "sample_rate": "uint64",
    "source_size": "uint64",
    "source_mtime_ns": "int64",
    "source_hash": "uint64",
    "decoder": "uint64",
    "start": "float64",
    "duration": "float64",
    "channel": "int64",
}
"""The columns of a shard's table, in order, and their dtypes; see docs/format.md."""

ITEM_COLUMNS = {
    "generation": "generation",
    "num_samples": "num_samples",
    "sample_rate": "sample_rate",
    "size": "source_size",
    "mtime_ns": "source_mtime_ns",
    "content_hash": "source_hash",
    "decoder": "decoder",
}
"""The fields of an `Item` that are not its row's, and their columns."""

_READ_AT_ONCE = 256
"""The items that are read together."""


class Item(Utterance, frozen=True, kw_only=True):
    """An utterance as a shard keeps it, except its features."""

    num_samples: int
    """The samples that the extractor was given, at its rate."""
    size: int
    """The size of the audio file in bytes, when it was decoded."""
    mtime_ns: int
    """When the audio file was last modified, in nanoseconds since 1970."""
    sample_rate: int
    """The sample rate of the audio file in Hz."""
    content_hash: int = 0
    """XXH3-64 of the audio file's bytes, when it was decoded; 0 if unknown."""
    decoder: int = 0
    """The decoder of the audio file: see docs/format.md."""
    generation: int = 1
    """The item of an id with the highest generation is current."""


class ShardInfo(GroupInfo, kw_only=True, frozen=True):
    """The document of a shard, besides the keys of every group."""

    frames: Count
    seconds: NotNegative
    row: Count
    """The manifest row of its first item, by which shards are ordered, then by name."""
    manifest: Hash
    """The name of the wanted set that it was made for."""
    made_by: dict[str, str | int | float | bool | None]
    """The libraries, the device and the run that made it."""
    finite: bool = False
    """True if no value of `features` was NaN or infinite when they were written; older
    shards do not say."""


@dataclass(frozen=True)
class SideArray:
    """One side array of a shard."""

    entries: NDArray[Any]
    """`[entries, *item_shape]`"""
    offsets: NDArray[np.int64]
    """The offsets of the items' entries, `[items + 1]`."""

    def item(self, number: int) -> NDArray[Any]:
        """View the entries of one item, `[n, *item_shape]`."""
        return self.entries[self.offsets[number] : self.offsets[number + 1]]


class Frames:
    """The frames of a shard, `[frames, *item_shape]`, at the beginning of a file. They are
    read without mapping them: what a disk cannot read is an error, and no SIGBUS. Safe in
    threads. Messages name the `version` to repair."""

    def __init__(
        self, file: Opened, shape: tuple[int, ...], dtype: Any, version: object = None
    ) -> None:
        self._file = file
        self.shape = shape
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._version = version
        self._frame_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self.num_bytes = shape[0] * self._frame_bytes

    def read_into(self, out: NDArray[Any], first: int) -> None:
        """Fill a C-contiguous array with frames, from `first` on."""
        self.require_within([first], [len(out)])
        with naming_remedy(self._version):
            self._file.read_into(out.reshape(-1).view(np.uint8).data, first * self._frame_bytes)

    def read_ranges(self, firsts: Sequence[int], counts: Sequence[int]) -> list[NDArray[Any]]:
        """Read stretches of frames, `counts` of each from `firsts` on, side by side; they
        are read-only."""
        self.require_within(firsts, counts)
        starts = [first * self._frame_bytes for first in firsts]
        sizes = [count * self._frame_bytes for count in counts]
        with naming_remedy(self._version):
            ranges = self._file.read_ranges(starts, sizes)
        return [np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:]) for data in ranges]

    def require_within(self, firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Refuse frames beyond the end, before memory is allocated."""
        last = max((first + count for first, count in zip(firsts, counts, strict=True)), default=0)
        if last > self.shape[0] or min(firsts, default=0) < 0:
            raise DamagedError(
                f"{self._file.path}: damaged: it ends before frame {last}", self._version
            )


def columns_of(spec: FeatureSpec) -> dict[str, str]:
    """Return the columns of a version's shards. Each side array has one more, of offsets."""
    return COLUMNS | {f"side_{side.name}_offset": "uint64" for side in spec.side}


class Shard(Group):
    """A shard in a store, of a version with this fingerprint and spec; see `Group`."""

    info: ShardInfo

    def __init__(self, store: Store, name: str, fingerprint: str, spec: FeatureSpec) -> None:
        super().__init__(store, f"shards/{name}", fingerprint, ShardInfo, columns_of(spec))
        self.name = name
        self.spec = spec
        rows = max(1, self.info.frames)  # no array is empty: see docs/format.md
        self._features = "features", (rows, *spec.item_shape), spec.stored_dtype
        self.features_path, _ = self._chunk(*self._features)
        """The path of the features' file in the shard."""
        if self.info.digest[:NAME_DIGITS] != name:
            raise self._damaged(MARK, f"holds the shard {self.info.digest[:NAME_DIGITS]}")

    @property
    def features(self) -> NDArray[Any]:
        """The frames of all items, mapped and read-only, `[frames, *item_shape]`."""
        return self.map(*self._features)

    def open_features(self) -> Frames:
        """Open the same frames to be read without mapping them. Their file must have the
        size and checksum of the document."""
        path, num_bytes = self._chunk(*self._features)
        with self._missing_is_damage(path):
            file = self.store.open(f"{self.key}/{path}", num_bytes + CHECKSUM_BYTES)
            (end,) = file.read_ranges([num_bytes], [CHECKSUM_BYTES])
        self._require(path, file.num_bytes, checksum_of(path, end))
        return self._frames_in(file)

    def _frames_in(self, file: Opened) -> Frames:
        return Frames(file, *self._features[1:], self.store.location)

    def feature_blocks(self, copy: Path | None = None) -> Iterator[memoryview]:
        """Yield the file of the features, or a copy of it; see `checked_blocks`."""
        return self.checked_blocks(self.features_path, copy)

    @property
    def run(self) -> str:
        """The name of the run that extracted the items; empty if it is not recorded."""
        return str(self.info.made_by.get("run", ""))

    def side(self, name: str, *, check: bool = False) -> SideArray:
        """Map one of the version's side arrays; with `check`, compare it with its
        checksum."""
        (spec,) = (side for side in self.spec.side if side.name == name)
        offsets = self.table.offsets(f"side_{name}")
        last = int(offsets[-1])
        if not rise(offsets, 0, last):
            raise self._damaged("items/c/0/0", f"the offsets of {name} do not rise")
        shape = (last, *spec.item_shape)
        return SideArray(self.map(f"side_{name}", shape, spec.dtype, check=check), offsets)

    @property
    def quantization(self) -> NDArray[np.float32]:
        """The scale and offset of each item with quantised features, mapped, float32
        `[items, 2, *item_shape]`."""
        return self.side(QUANTIZATION).entries

    @property
    def num_bytes(self) -> int:
        """The stored bytes of features and of side arrays."""
        return sum(
            size - CHECKSUM_BYTES
            for path, (size, _) in self.info.files.items()
            if path.startswith(("features/", "side_")) and "/c/" in path
        )

    def items(self, numbers: Iterable[int] | None = None) -> Iterator[Item]:
        """Yield all items, or those of these numbers, without features."""
        table = self.table
        ids, paths = table.ids, table.paths
        segments = [table[name] for name in ("start", "duration", "channel")]
        columns = {name: table[column] for name, column in ITEM_COLUMNS.items()}
        for at in range(len(table)) if numbers is None else numbers:
            if at >= len(table):  # the index is sealed, but wrong
                raise self._damaged("items", f"there is no item {at}")
            own = {name: column.item(at) for name, column in columns.items()}
            segment = (column.item(at) for column in segments)
            yield Item(**Utterance.of_columns(ids[at], paths[at], *segment).row(), **own)

    def check_table(self) -> None:
        """Raise DamagedError if the table is not what was written, or contradicts itself."""
        for fault in self.faults():
            raise self._damaged("items/c/0/0", fault)

    def faults(self, *, has_hashes: bool = True) -> Iterator[str]:
        """Yield the faults of the table, even if its checksums hold. So no offset leads out
        of the shard, and with `has_hashes`, no item is taken for another row's item. Where
        the checksums hold, only a faulty writer, or a stranger, has recorded other hashes."""
        table = self.table
        if not len(table):
            yield "there are no items"
            return
        ids_end = int(table.offsets("id")[-1])
        ends = {
            "frame": (0, self.info.frames, self.spec.axis.fewest),
            "id": (0, ids_end, 1),
            "path": (ids_end, table.text.size, 0),
        }
        arrays = [self._features]
        for side in self.spec.side:
            name = f"side_{side.name}"
            last = int(table.offsets(name)[-1])
            arrays.append((name, (last, *side.item_shape), side.dtype))
            ends[name] = 0, last, int(side.name == QUANTIZATION)
        wrong = [name for name, end in ends.items() if not rise(table.offsets(name), *end)]
        if wrong or ids_end > table.text.size:  # the paths' steps may overflow
            yield f"the offsets of {listing(wrong) or 'ids'} do not rise to their ends"
            return
        for path, num_bytes in (self._chunk(*array) for array in arrays):
            if num_bytes and self.info.files.get(path, (0, 0))[0] != num_bytes + CHECKSUM_BYTES:
                yield f"{path} has another size than follows from the offsets"
        ids, paths = table.ids, table.paths
        if not (ids.are_utf8() and paths.are_utf8()):
            yield "ids or paths are not UTF-8"
        if not are_distinct(table["id_hash"]):
            yield "an id is there twice"
        if not has_hashes:
            return
        rows = SegmentColumns(
            paths, table["start"], table["duration"], table["channel"].astype(np.int32)
        )
        are_theirs = np.array_equal(ids.hashes(), table["id_hash"])
        if not (are_theirs and np.array_equal(rows.hashes(), table["row_hash"])):
            yield "the hashes of some rows are not theirs"
        if digest_of(dict(sorted(self.info.files.items())), table) != self.info.digest:
            yield "its name does not follow from what is in it"

    def sound_items(self, numbers: Sequence[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield the numbers of undamaged items among some, and their features
        `[frames, *item_shape]`; call it once the table has been checked. Items beyond the
        end of the file or on a bad sector are left out."""
        checksums, offsets = self.table["item_crc32c"], self.table.offsets("frame")
        counts = np.diff(offsets)
        try:
            frames = self._frames_in(self.store.open(f"{self.key}/{self.features_path}", None))
        except (FileNotFoundError, DamagedError):
            return
        for first in range(0, len(numbers), _READ_AT_ONCE):
            some = numbers[first : first + _READ_AT_ONCE]
            stretches = _read(frames, offsets[some].tolist(), counts[some].tolist())
            for number, features in zip(some, stretches, strict=True):
                if features is None or crc32c(features) != checksums[number]:
                    continue
                if all_finite(as_values(features, self.spec.dtype)):
                    yield number, features


def _read(frames: Frames, firsts: list[int], counts: list[int]) -> list[NDArray[Any] | None]:
    try:
        return [*frames.read_ranges(firsts, counts)]
    except DamagedError:
        if len(firsts) == 1:
            return [None]
    pairs = zip(firsts, counts, strict=True)
    return [_read(frames, [first], [count])[0] for first, count in pairs]
