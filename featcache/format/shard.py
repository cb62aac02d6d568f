"""A shard: the features of some items, and what is known of each. It never changes, and
its name says what is in it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from featcache.errors import DamagedError, listing
from featcache.format.documents import Count, Hash
from featcache.format.group import (
    CHECKSUM_BYTES,
    NAME_DIGITS,
    Group,
    GroupInfo,
    checksum_of,
    digest_of,
    rise,
)
from featcache.manifest.segments import SegmentColumns, Utterance
from featcache.spec import QUANTIZATION, FeatureSpec, all_finite
from featcache.storage.base import MARK, Opened, Store
from featcache.strings import are_distinct

COLUMNS = {
    **dict.fromkeys(
        ["frame_offset", "id_offset", "path_offset", "id_hash", "row_hash", "generation"], "uint64"
    ),
    **dict.fromkeys(["item_crc32c", "num_samples", "sample_rate", "source_size"], "uint64"),
    **{"source_mtime_ns": "int64", "source_hash": "uint64", "decoder": "uint64"},
    **{"start": "float64", "duration": "float64", "channel": "int64"},
}
"""The columns of a shard's table, in their order, and their dtypes; docs/format.md says
what they hold."""

ITEM_COLUMNS = {
    **{
        "generation": "generation",
        "num_samples": "num_samples",
        "sample_rate": "sample_rate",
        "size": "source_size",
    },
    **{"mtime_ns": "source_mtime_ns", "content_hash": "source_hash", "decoder": "decoder"},
}
"""What an `Item` knows besides its row, and the columns that have it."""

_Floats: TypeAlias = NDArray[np.float32]

_READ_AT_ONCE = 256
"""Items that are fetched together."""

_REPEATED = 4096
"""Half the number of values that numpy's buffer holds."""


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
    decoder: int = 0
    """What decoded the audio file: see docs/format.md."""
    generation: int = 1
    """Of the items of an id, that of the highest generation counts."""


class ShardInfo(GroupInfo, kw_only=True, frozen=True):
    """The document of a shard, besides the keys of every group."""

    frames: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    row: Count
    """The manifest row of its first item: shards are in the order of these, then of their
    names."""
    manifest: Hash
    """The name of the wanted set that it was made for."""
    made_by: dict[str, str | int | float | bool | None]
    """The libraries, the device and the run that made it."""


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


class Frames:
    """The frames of a shard, read from where they lie and not mapped, as an `Opened` is,
    and with the same errors: what the disk refuses is no SIGBUS. Safe to use from several
    threads.

    Args:
        file: The file, which begins with their bytes.
        shape, dtype: Their shape, `[frames, *item_shape]`, and their dtype.
        where: Names the file in messages.
        version: The place of the version, which messages name as what is to be repaired.
    """

    def __init__(
        self, file: Opened, shape: tuple[int, ...], dtype: Any, where: str, version: object
    ) -> None:
        self._file = file
        self.shape = shape
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.where = where
        self._version = version
        self._frame_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self.num_bytes = shape[0] * self._frame_bytes
        """The bytes of all frames."""

    def read_into(self, out: NDArray[Any], first: int) -> None:
        """Fill a C-contiguous array with frames, from `first` on."""
        self.require_within([first], [len(out)])
        with self._naming_remedy():
            self._file.read_into(out.reshape(-1).view(np.uint8).data, first * self._frame_bytes)

    def read_ranges(self, firsts: Sequence[int], counts: Sequence[int]) -> list[NDArray[Any]]:
        """Several stretches of frames, `counts` of each from `firsts` on, read side by
        side; read-only."""
        self.require_within(firsts, counts)
        starts = [first * self._frame_bytes for first in firsts]
        sizes = [count * self._frame_bytes for count in counts]
        with self._naming_remedy():
            ranges = self._file.read_ranges(starts, sizes)
        return [np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:]) for data in ranges]

    @contextmanager
    def _naming_remedy(self) -> Iterator[None]:
        try:
            yield
        except DamagedError as error:
            raise DamagedError(error.what, self._version) from error

    def require_within(self, firsts: Sequence[int], counts: Sequence[int]) -> None:
        """Refuse frames beyond the end: memory is asked for by what there is."""
        last = max((first + count for first, count in zip(firsts, counts, strict=True)), default=0)
        if last > self.shape[0] or min(firsts, default=0) < 0:
            raise DamagedError(f"{self.where}: damaged: it ends before frame {last}", self._version)


def columns_of(spec: FeatureSpec) -> dict[str, str]:
    """The columns of the shards of a version: each side array has one more, of offsets."""
    return COLUMNS | {f"side_{side.name}_offset": "uint64" for side in spec.side}


class Shard(Group[ShardInfo]):
    """A shard that is there, of a version with this fingerprint and spec; see `Group`."""

    def __init__(self, store: Store, name: str, fingerprint: str, spec: FeatureSpec) -> None:
        super().__init__(store, f"shards/{name}", fingerprint, ShardInfo, columns_of(spec))
        self.name = name
        self.spec = spec
        self._faults: list[str] | None = None
        rows = max(1, self.info.frames)  # no array is empty: see docs/format.md
        self._features = "features", (rows, *spec.item_shape), spec.stored_dtype
        self.features_path, _ = self._chunk(*self._features)
        """The path of their file, in the shard."""
        if self.info.digest[:NAME_DIGITS] != name:
            raise self._damaged(MARK, f"holds the shard {self.info.digest[:NAME_DIGITS]}")

    @property
    def features(self) -> NDArray[Any]:
        """The frames of all items, mapped and read-only, `[frames, *item_shape]`."""
        return self.map(*self._features)

    def open_features(self) -> Frames:
        """The same, to be read from where they lie; their file's size and checksum are
        those that follow, likewise."""
        path, num_bytes = self._chunk(*self._features)
        with self._missing_is_damage(path):
            file = self.store.open(f"{self.key}/{path}", num_bytes + CHECKSUM_BYTES)
            (end,) = file.read_ranges([num_bytes], [CHECKSUM_BYTES])
        self._require(path, file.num_bytes, checksum_of(path, end))
        return self._frames_in(file)

    def _frames_in(self, file: Opened) -> Frames:
        return Frames(
            file, *self._features[1:], f"{self}/{self.features_path}", self.store.location
        )

    def feature_blocks(self, copy: Path | None = None) -> Iterator[memoryview]:
        """The file of the same, or a copy of it; see `checked_blocks`."""
        return self.checked_blocks(self.features_path, copy)

    @property
    def run(self) -> str:
        """The name of the run that extracted the items; empty if the shard does not say."""
        return str(self.info.made_by.get("run", ""))

    def side(self, name: str, *, check: bool = False) -> SideArray:
        """One of the version's side arrays; its entries are mapped, and with `check`
        compared with their checksum."""
        (spec,) = (side for side in self.spec.side if side.name == name)
        offsets = self.table.offsets(f"side_{name}")
        last = int(offsets[-1])
        if not rise(offsets, 0, last):
            raise self._damaged("items/c/0/0", f"the offsets of {name} do not rise")
        return SideArray(
            self.map(f"side_{name}", (last, *spec.item_shape), spec.dtype, check=check), offsets
        )

    @property
    def quantization(self) -> NDArray[np.float32]:
        """The scale and offset of each item with quantised features, float32 `[items, 2,
        *item_shape]`; mapped."""
        return self.side(QUANTIZATION).entries

    @property
    def num_bytes(self) -> int:
        """The stored bytes of features and of side arrays' entries."""
        chunks = [
            path
            for path in self.info.files
            if path.startswith(("features/c/", "side_")) and "/c/" in path
        ]
        return sum(self.info.files[path][0] - CHECKSUM_BYTES for path in chunks)

    def items(self, numbers: Iterable[int] | None = None) -> Iterator[Item]:
        """The items, or those of these numbers, without their features."""
        table = self.table
        ids, paths = table.ids, table.paths
        segments = [table[name] for name in ("start", "duration", "channel")]
        columns = {name: table[column] for name, column in ITEM_COLUMNS.items()}
        for at in range(len(table)) if numbers is None else numbers:
            if at >= len(table):  # an index that is sealed, and wrong all the same
                raise self._damaged("items", f"there is no item {at}")
            own = {name: column.item(at) for name, column in columns.items()}
            segment = (column.item(at) for column in segments)
            yield Item(**Utterance.of_columns(ids[at], paths[at], *segment).row(), **own)

    def check_table(self) -> None:
        """Raise DamagedError if the table is not what was written, or contradicts itself."""
        for fault in self.faults():
            raise self._damaged("items/c/0/0", fault)

    def faults(self) -> list[str]:
        """List what is wrong with the table, even if its checksums hold. So no offset
        leads out of the shard, and no item is taken for that of another row. The search
        is made once: whoever maps the table compares its bytes."""
        if self._faults is None:
            self._faults = [*self._find_faults()]
        return self._faults

    def _find_faults(self) -> Iterator[str]:
        table, frames, ids_end = self.table, self.info.frames, 0
        if not len(table):
            yield "there are no items"
            return
        ids_end = int(table.offsets("id")[-1])
        ends = {
            "frame": (0, frames, self.spec.axis.fewest),
            "id": (0, ids_end, 1),
            "path": (ids_end, table.text.size, 0),
        }
        arrays = [self._features]
        for side in self.spec.side:
            last = int(table.offsets(f"side_{side.name}")[-1])
            arrays.append((f"side_{side.name}", (last, *side.item_shape), side.dtype))
            ends[f"side_{side.name}"] = 0, last, int(side.name == QUANTIZATION)
        wrong = [name for name, end in ends.items() if not rise(table.offsets(name), *end)]
        if wrong or ids_end > table.text.size:
            yield f"the offsets of {listing(wrong) or 'ids'} do not rise to their ends"
            return
        for path, num_bytes in (self._chunk(*array) for array in arrays):
            if num_bytes and self.info.files.get(path, (0, 0))[0] != num_bytes + CHECKSUM_BYTES:
                yield f"{path} has another size than follows from the offsets"
        ids, paths = table.ids, table.paths
        if not (ids.are_utf8() and paths.are_utf8()):
            yield "ids or paths are not UTF-8"
        rows = SegmentColumns(
            paths, table["start"], table["duration"], table["channel"].astype(np.int32)
        )
        if not np.array_equal(ids.hashes(), table["id_hash"]) or not np.array_equal(
            rows.hashes(), table["row_hash"]
        ):
            yield "the hashes of some rows are not theirs"
        if not are_distinct(table["id_hash"]):
            yield "an id is there twice"
        if digest_of(dict(sorted(self.info.files.items())), table) != self.info.digest:
            yield "its name does not follow from what is in it"

    def sound_items(self, numbers: Sequence[int]) -> Iterator[tuple[int, NDArray[Any]]]:
        """Those of some items whose features are what was written, once the table has
        been checked: their numbers, and features `[frames, *item_shape]`. Items beyond
        the end of the file, or on a bad sector, are not among them."""
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
                if (
                    features is not None
                    and crc32c(features) == checksums[number]
                    and all_finite(features)
                ):
                    yield number, features


def _read(frames: Frames, firsts: list[int], counts: list[int]) -> list[NDArray[Any] | None]:
    """Stretches of frames; None for those that cannot be read."""
    try:
        return [*frames.read_ranges(firsts, counts)]
    except DamagedError:
        if len(firsts) == 1:
            return [None]
        return [
            some
            for first, count in zip(firsts, counts, strict=True)
            for some in _read(frames, [first], [count])
        ]


def dequantize_array(
    levels: NDArray[np.uint8], scale: _Floats, offset: _Floats, out: _Floats | None = None
) -> _Floats:
    """The values of features that are stored as uint8, with numpy alone;
    `featcache.quantize` says what the levels are.

    Args:
        levels: The stored levels, uint8 `[frames, *item_shape]`.
        scale: The scale, float32 `[*item_shape]`; or that of each frame, `[frames,
            *item_shape]`.
        offset: The offset, of the same shape as `scale`.
        out: A contiguous float32 array of the levels' shape to write to, instead of a new
            one.
    """
    values = np.empty(levels.shape, np.float32) if out is None else out
    values[...] = levels
    _with_frames(np.multiply, values, scale)
    _with_frames(np.add, values, offset)
    return values


def _with_frames(function: np.ufunc, frames: _Floats, parameter: _Floats) -> None:
    """Replace each frame by `function(frame, parameter)`.

    When numpy broadcasts an array over many rows, it copies the array into its buffer
    again for every 8,192 values, unless the array fills more than half the buffer. So for
    long items, the parameter is repeated once here and then applied to many frames at a
    time: a quarter less time for 12 s of 80 dimensions."""
    if parameter.ndim < frames.ndim and len(frames) >= 6 * (
        count := _REPEATED // parameter.size + 1
    ):
        repeated = np.empty((count, *parameter.shape), np.float32)
        repeated[...] = parameter
        in_blocks = len(frames) // count * count
        blocks = frames[:in_blocks].reshape(-1, repeated.size)
        function(blocks, repeated.reshape(-1), out=blocks)
        frames, parameter = frames[in_blocks:], repeated[: len(frames) - in_blocks]
    function(frames, parameter, out=frames)
