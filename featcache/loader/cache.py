"""An opened version: utterances by id or by position, singly without a copy, or many
padded into one tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
from msgspec import UNSET
from numpy.typing import ArrayLike, NDArray

from featcache.errors import (
    ArgumentError,
    MissingItemError,
    StoreError,
    hours,
    is_number,
    megabytes,
)
from featcache.loader.buffers import (
    Buffers,
    Memory,
    as_bfloat16,
    bits_of,
    pad_into,
    tensor_in,
    tensor_of,
)
from featcache.loader.shards import Shards, Spans
from featcache.manifest.strings import Strings
from featcache.spec import (
    BFLOAT16,
    MAIN,
    FeatureSpec,
    Ints,
    as_values,
    bfloat16_bits,
    dequantize_array,
)
from featcache.version.index import Index, load_index
from featcache.version.version import Version

if TYPE_CHECKING:
    import torch

    from featcache.loader.events import EventReader
    from featcache.loader.places import PlaceOf
    from featcache.media.look import Shown
    from featcache.version.ledger import Failure

_Default = TypeVar("_Default")

Keys: TypeAlias = "Iterable[str] | Iterable[int] | NDArray[Any] | torch.Tensor"
"""Utterances: all by id, or all by position."""


class Cache:
    """The utterances of a version, as they were when it was opened, also if it is pickled
    into another process. Open the cache again to see shards that a run has added since.

    A cache is read as a mapping of ids to arrays, in the order of `ids`:
    `cache["utt-1"]`, `"utt-1" in cache`, `get`, `keys`, `values`, `items`, and a loop
    over ids. `cache[3]` is an array by its position. Nothing is read before it is
    accessed.

    `featcache.open` makes caches, and lists errors. `index` is by default the index of all
    shards; `places` are the places of local copies, the nearest first; `track_of` are a track's
    version and name."""

    spec: FeatureSpec
    """The description of the features: shape of a frame, dtype, frame rate, units."""
    stored_dtype: np.dtype[Any]
    """The dtype on disk: the same as in `spec`, unless the features are quantised."""

    def __init__(
        self,
        version: Version,
        *,
        check: bool = False,
        index: Index | None = None,
        places: Sequence[PlaceOf] = (),
        track_of: tuple[Cache, str] | None = None,
    ) -> None:
        self.version, self.check, self._places = version, check, places
        self.spec, self._track_of = version.info.spec, track_of
        if track_of is not None:
            of_version, name = track_of
            self.spec = FeatureSpec.of(self.spec.sample_rate, of_version.spec.track(name))
        self.stored_dtype = np.dtype(self.spec.stored_dtype)
        self._shards = self._open_shards(_index_of(version) if index is None else index)
        self.index = self._shards.index
        self._buffers = Buffers()
        self._tracks: dict[str, Cache] = {}

    def _open_shards(self, index: Index) -> Shards:
        if self._track_of is not None:
            from featcache.loader.track import TrackShards

            return TrackShards(self.version, index, self.track_name, self.check)
        if not self._places and isinstance(self.version.path, Path):
            return Shards(self.version, index, check=self.check)
        from featcache.loader.local_copies import open_copied

        return open_copied(self.version, index, self.check, self._places)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._track_of is not None:
            return Cache.track, self._track_of
        version = replace(self.version, shards=self.index.shards)
        return partial(Cache, check=self.check, places=self._places), (version,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.version.path.name}: {', '.join(self._facts())})"

    def _facts(self) -> list[str]:
        spec, num_frames = self.spec, int(self.lengths.sum())
        num_bytes = num_frames * math.prod(spec.item_shape) * self.stored_dtype.itemsize
        dtype = f"{spec.dtype} in uint8" if spec.is_quantized else spec.dtype
        facts = [f"{len(self):,} utterances"]
        seconds = spec.axis.seconds(num_frames)
        if not math.isnan(seconds):
            facts.append(f"{hours(seconds)} of frames")
        return [*facts, megabytes(num_bytes), f"{dtype} {spec.main.shape_text()}, {spec.axis}"]

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, id: object) -> bool:  # noqa: A002
        return isinstance(id, str) and self.index.find_one(id) >= 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __getitem__(self, key: str | SupportsIndex) -> NDArray[Any]:
        return self.item(key)

    def keys(self) -> Strings:
        """Return the ids."""
        return self.ids

    def values(self) -> Iterator[NDArray[Any]]:
        """Yield the arrays of all utterances, in the order of `ids`."""
        return map(self.item, range(len(self)))

    def items(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield each id with its array, in the order of `ids`."""
        return zip(self.ids, self.values(), strict=True)

    def get(
        self, key: str | SupportsIndex, default: _Default | None = None
    ) -> NDArray[Any] | _Default | None:
        """Return `cache[key]`, or the default if there is no such utterance."""
        if isinstance(key, str) and key not in self:
            return default  # at once: an error would look for similar ids
        try:
            return self.item(key)
        except (MissingItemError, IndexError):
            return default

    @property
    def silence(self) -> NDArray[np.float32]:
        """The frame that long silence settles on, `[*item_shape]`. Raises ArgumentError if
        the version keeps none."""
        info = self.version.info
        is_of_these = self.spec is info.spec and not self.spec.is_quantized
        if info.silence is UNSET or not is_of_these:
            raise ArgumentError(
                "padding_value is 'silence': this version keeps no value of silence; those of "
                "continuous latents do, unless they are quantised"
            )
        return np.array(info.silence, np.float32).reshape(self.spec.item_shape)

    def track(self, name: str) -> Cache:
        """Open one of the version's tracks as a cache: `codes.track("codes_24hz")`; later
        calls return the same. `spec.tracks` has their names. Raises ArgumentError if there
        is no such track."""
        if name == MAIN:
            return self
        if name not in self._tracks:
            self._tracks.setdefault(name, self._open_track(name))
        return self._tracks[name]

    def _open_track(self, name: str) -> Cache:
        return Cache(self.version, check=self.check, index=self.index, track_of=(self, name))

    @property
    def track_name(self) -> str:
        """The name of the track that is read, `features` for the main one."""
        return MAIN if self._track_of is None else self._track_of[1]

    @property
    def config(self) -> dict[str, Any]:
        """The config that made the version, with every default filled in."""
        return self.version.info.config

    @property
    def ids(self) -> Strings:
        """The utterances' ids, in the order of the manifest they were extracted from."""
        return self.index.ids

    @cached_property
    def lengths(self) -> Ints:
        """The number of frames of each utterance; int64 `[utterances]`, read-only."""
        lengths = np.asarray(self.index.num_frames).view()
        lengths.flags.writeable = False
        return lengths

    def identity(self) -> tuple[list[Strings], NDArray[np.uint64]]:
        """Return the ids, in parts, and the hashes of their sources, uint64 `[utterances]`."""
        return [self.index.ids], self.index.row_hash

    def find(self, ids: Iterable[str]) -> Ints:
        """Return the positions of utterances; int64 `[ids]`. Raises MissingItemError if ids
        are missing, as in `batch`."""
        if isinstance(ids, str):
            raise ArgumentError(f"ids is one id, {ids!r}: give a list of ids")
        try:
            wanted = ids if isinstance(ids, Strings) else Strings.of(ids)
        except (AttributeError, TypeError, UnicodeError):
            raise ArgumentError("ids are not all text: give a list of ids") from None
        positions = self.index.find(wanted)
        missing = np.flatnonzero(positions < 0)
        if len(missing):
            raise self.missing_error([*wanted.take(missing)], len(wanted))
        return positions

    def item(
        self,
        key: str | SupportsIndex,
        *,
        start: float | None = None,
        duration: float | None = None,
        codebooks: int | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> NDArray[Any]:
        """Return the features of one utterance by its id or position, as `cache[key]`; or a
        part of them. Arguments, dtypes and errors are as in `batch`.

        Returns `[frames, *item_shape]`, read-only and memory-mapped. It is a new array with
        `check`, or if the features are quantised or bfloat16. bfloat16 becomes float32, or
        with `raw` its bits, uint16. Events are a list of `Event`."""
        position, axis = self.position(key), self.spec.axis
        if axis.has_times:
            events = self.event_reader(check).item(position, start, duration)
            return cast("NDArray[Any]", events)
        frames = self._shards.utterance(position)
        first, count = 0, len(frames)
        if start is not None or duration is not None:
            (first,), (count,) = self._spans(np.array([position]), start, duration)
        codebooks = check_codebooks(self.spec, codebooks)
        is_checked = self.check if check is None else check
        is_dequantized = self.spec.is_quantized and not raw
        if is_checked or is_dequantized:
            stored = frames if is_checked else frames[first : first + count]
            item_shape, dtype = self._entry(codebooks, is_dequantized)
            frames = np.empty((count, *item_shape), dtype)
            self._load(frames, position, first, stored, is_checked, is_dequantized)
            frames.flags.writeable = is_dequantized
        elif count < len(frames) or codebooks is not None:
            (frames,) = _cut([frames[first : first + count]], codebooks)
        if not raw:
            frames = as_values(frames, self.spec.dtype)
        return cast("NDArray[Any]", axis.shape_item(frames))

    def batch(
        self,
        keys: Keys,
        *,
        start: ArrayLike | None = None,
        duration: ArrayLike | None = None,
        codebooks: int | None = None,
        padding_value: float | Literal["silence"] = 0,
        out: torch.Tensor | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the features of several utterances, or of a part of each, padded at their
        ends to the longest; vectors are stacked.

        Args:
            keys: Ids or positions, in any order; they may repeat, or be none.
            start: The beginnings of the parts, in seconds: one number, or one for each key;
                0 by default.
            duration: The length of the parts, in seconds; to the end by default.
            codebooks: Read only this many codebooks, from the first on.
            padding_value: The value of frames beyond an utterance's end; "silence" for
                `silence`.
            out: A contiguous CPU tensor of the batch's dtype and any shape that is large
                enough, to be overwritten.
            raw: Return quantised features as stored: levels, uint8, padded with 0, for
                `featcache.dequantize`.
            check: True to compare each utterance with its checksum; by default as the
                cache was opened.

        Returns:
            The features, `[batch, frames, *item_shape]` of `spec.dtype`, or with `raw` of
            the stored dtype; and the number of frames of each utterance, int64 `[batch]`.
            If an utterance is one vector: `[batch, *item_shape]`, and None. If it is
            events: an `EventBatch`, and the number of events of each.

        Raises:
            MissingItemError: Ids are missing; names up to ten, how many failed in
                extraction, or why one did.
            IndexError: There is no such position.
            ArgumentError: There are no such parts, or `out` or a key is invalid.
            DamagedError: A shard is damaged, or `check` found a wrong checksum.
            MissingDependencyError: torch is not installed: `item` needs only numpy.
        """
        codebooks = check_codebooks(self.spec, codebooks)
        padding = padding_of(self, padding_value)
        if raw and self.spec.is_quantized and padding_value != 0:
            raise ArgumentError(
                f"padding_value is {padding_value}: levels are padded with 0; give it to dequantize"
            )
        positions = self._positions(keys)
        if self.spec.axis.has_times:
            batch: Any = self.event_reader(check).batch(positions, start, duration, tensor_of)
            return batch, batch.lengths
        firsts, counts = self._spans(positions, start, duration)
        spans = Spans(positions, firsts, counts)
        features = self.gather(
            spans, codebooks=codebooks, padding_value=padding, out=out, raw=raw, check=check
        )
        return features, tensor_of(counts) if self.spec.axis.is_ragged else None

    def _spans(
        self, positions: Ints, start: ArrayLike | None, duration: ArrayLike | None
    ) -> tuple[Ints, Ints]:
        counts = self.index.num_frames[positions]
        if start is None and duration is None:
            return np.zeros_like(counts), counts
        start = 0 if start is None else start
        return self.spec.axis.span(counts, start, duration, lambda at: self.ids[int(positions[at])])

    def event_reader(self, check: bool | None = None) -> EventReader:
        """Return the reader of a version whose utterances are events."""
        from featcache.loader.events import EventReader

        return EventReader(self._shards, self.spec, partial(self.frames, check=check))

    def gather(
        self,
        spans: Spans,
        *,
        codebooks: int | None = None,
        padding_value: ArrayLike = 0,
        out: torch.Tensor | Memory | None = None,
        raw: bool = False,
        check: bool | None = None,
    ) -> torch.Tensor:
        """Return the features that `batch` returns, of existing frames. Only `out` is
        checked, which may also be memory; by default the cache's own buffers."""
        is_dequantized = self.spec.is_quantized and not raw
        is_checked = self.check if check is None else check
        # This finds the frames in files of their size, before memory is taken for them.
        mapped = self._map(spans, is_checked)
        item_shape, dtype = self._entry(codebooks, is_dequantized)
        shape = (len(mapped), int(spans.counts.max(initial=0)), *item_shape)
        is_bfloat16 = self.spec.dtype == BFLOAT16
        if is_bfloat16:
            padding_value, out = bfloat16_bits(padding_value), bits_of(out)
        padded = tensor_in(self._buffers.take if out is None else out, shape, dtype)
        rows = padded.numpy()
        with self.read_ahead(mapped):
            if is_checked or is_dequantized:
                columns = spans.positions.tolist(), spans.firsts.tolist(), spans.counts.tolist()
                utterances = zip(rows, mapped, *columns, strict=True)
                for row, stored, position, first, count in utterances:
                    self._load(row[:count], position, first, stored, is_checked, is_dequantized)
                    row[count:] = padding_value
            else:
                pad_into(rows, _cut(mapped, codebooks), padding_value)
        if is_bfloat16:
            padded = as_bfloat16(padded)
        if self.spec.axis.is_ragged:
            return padded
        return padded.view(len(padded), *padded.shape[2:])

    def frames(
        self, spans: Spans, codebooks: int | None = None, check: bool | None = None
    ) -> list[NDArray[Any]]:
        """Return existing frames of some utterances, each `[frames, *item_shape]`, those of
        bfloat16 as their bits: mapped; or new arrays, if they are checked or quantised."""
        is_checked = self.check if check is None else check
        is_dequantized = self.spec.is_quantized
        mapped = self._map(spans, is_checked)
        if not (is_checked or is_dequantized):
            return _cut(mapped, codebooks)
        item_shape, dtype = self._entry(codebooks, is_dequantized)
        loaded = [np.empty((count, *item_shape), dtype) for count in spans.counts.tolist()]
        with self.read_ahead(mapped):
            columns = mapped, spans.positions.tolist(), spans.firsts.tolist()
            for out, stored, position, first in zip(loaded, *columns, strict=True):
                self._load(out, position, first, stored, is_checked, is_dequantized)
        return loaded

    def _map(self, spans: Spans, is_checked: bool) -> list[NDArray[Any]]:
        """Map the frames of some spans; or whole utterances, which checksums cover."""
        if is_checked:
            whole = self.index.num_frames[spans.positions]
            spans = Spans(spans.positions, np.zeros_like(spans.firsts), whole)
        return self._shards.frames(spans)

    def _entry(
        self, codebooks: int | None, is_dequantized: bool
    ) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and the dtype of a frame, as it is read."""
        item_shape = self.spec.item_shape if codebooks is None else (codebooks,)
        return item_shape, self.spec.values_dtype if is_dequantized else self.stored_dtype

    def _load(
        self,
        out: NDArray[Any],
        position: int,
        first: int,
        stored: NDArray[Any],
        is_checked: bool,
        is_dequantized: bool,
    ) -> None:
        """Fill `out` with the frames of an utterance from `first` on, or with their first
        codebooks. `stored` are these frames, mapped; or to check them, all frames."""
        if is_checked:
            # Straight into its place, if that takes all of it as stored.
            takes_all = not is_dequantized and out.shape == stored.shape
            room = out if takes_all else np.empty_like(stored)
            stored = self._shards.load_checked(position, stored, room)
            if takes_all:
                return
            stored = stored[first:]
        if is_dequantized:
            scale, offset = self._shards.quantization(position)
            dequantize_array(stored[: len(out)], scale, offset, out)
        else:
            out[...] = stored[tuple(map(slice, out.shape))]

    def read_ahead(self, arrays: Sequence[NDArray[Any]]) -> AbstractContextManager[None]:
        """Return the context to read arrays in: from a disk, all are requested before the
        first is read."""
        return self._shards.read_ahead(arrays)

    def quantization(self, keys: Keys) -> torch.Tensor:
        """Return scale and offset of each utterance and dimension, float32 `[keys, 2,
        *item_shape]`, for `featcache.dequantize`: value = offset + scale * level. Raises
        StoreError if the features are not quantised, see `spec.is_quantized`; other errors
        as in `batch`."""
        if not self.spec.is_quantized:
            raise StoreError(
                f"{self.version.path}: its features are not quantised: `batch` returns their values"
            )
        return tensor_of(self.scales_and_offsets(self._positions(keys)))

    def scales_and_offsets(self, positions: Ints) -> NDArray[np.float32]:
        """Return the scales and offsets at positions, as an array."""
        parameters = [self._shards.quantization(position) for position in positions.tolist()]
        return np.array(parameters, np.float32).reshape(-1, 2, *self.spec.item_shape)

    def side(self, name: str, key: str | SupportsIndex) -> NDArray[Any]:
        """Return an utterance's entries of a side array in `spec.side`, such as scales:
        read-only, `[entries, *item_shape]`, maybe empty. With `check`, the shard's whole
        array is compared with its checksum. Raises StoreError if there is no such array;
        other errors as in `batch`."""
        return self._shards.side(name, self.position(key))

    def show(self, key: str | SupportsIndex) -> Shown:
        """Return an utterance as a picture and a sound, which a notebook shows. Sound is
        made of codes by the codec's own decoder, and of log mel spectrograms by
        Griffin-Lim. Errors as in `batch`."""
        from featcache.media.look import Shown

        position = self.position(key)
        tracks: dict[str, Any] = {MAIN: self.item(position)}
        for side in self.spec.outputs:
            tracks[side.name] = self.side(side.name, position)
        return Shown(self.version.info, self.spec, self.ids[position], tracks)

    def shard_frames(self, shard: int, first: int, count: int) -> NDArray[Any]:
        """Read stored frames of a shard by its number in the index, unchecked."""
        return self._shards.range(shard, first, count)

    def missing_error(self, ids: list[str], num_wanted: int) -> MissingItemError:
        """Return the error for missing ids, of `num_wanted` in all."""
        from featcache.version.join import missing_error

        return missing_error(self.version, self.index, self.failures, ids, num_wanted)

    @cached_property
    def failures(self) -> dict[str, Failure]:
        """The utterances that failed and have no newer item, by id."""
        from featcache.version.ledger import standing_failures

        return standing_failures(self.version, self.index)

    def position(self, key: str | SupportsIndex) -> int:
        """Return the position of an utterance by its id or position; errors as in `batch`."""
        if isinstance(key, str):
            position = self.index.find_one(key)
            if position < 0:
                raise self.missing_error([key], 1)
            return position
        try:
            position = operator.index(key)
        except TypeError:
            raise ArgumentError(
                f"{key!r}: give an id, or a position; cache.batch(range(3)) reads several"
            ) from None
        if not -len(self) <= position < len(self):
            raise IndexError(f"no utterance at {position}: {self.version.path} has {len(self):,}")
        return position % len(self)

    def _positions(self, keys: Any) -> Ints:
        is_single = isinstance(keys, str) or getattr(keys, "ndim", 1) == 0
        if is_single or not isinstance(keys, Iterable):
            raise ArgumentError(f"keys is {keys!r}: give a list of ids, or of positions")
        if not isinstance(keys, Sized):
            keys = [*keys]
        if len(keys) and isinstance(next(iter(keys)), str):
            return self.find(keys)
        return positions_in(
            "keys", keys, len(self), str(self.version.path), "all ids, or all positions"
        )


def _index_of(version: Version) -> Index:
    """Load a version's index, or build it, by code that few openings import."""
    index = load_index(version, version.shard_names())
    if index is not None:
        return index
    from featcache.version.indexing import make_index

    return make_index(version)


def _cut(arrays: list[NDArray[Any]], codebooks: int | None) -> list[NDArray[Any]]:
    if codebooks is None:
        return arrays
    return [frames[:, :codebooks] for frames in arrays]


def positions_in(name: str, values: Any, count: int, where: str, wanted: str) -> Ints:
    """Count positions in a sequence of `count` from its beginning, int64 `[values]`;
    negative values count from its end. `name`, `where` and `wanted` are for messages: the
    argument, the sequence, and what to give instead. Raises IndexError if there is no such
    position; ArgumentError if the values are not whole numbers in a sized sequence."""
    try:
        positions = np.asarray(values) if len(values) else np.empty(0, np.int64)
    except (TypeError, ValueError):  # a number, or lists of several lengths
        raise ArgumentError(f"{name} is {values!r}: give {wanted}") from None
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise ArgumentError(f"{name} are {positions.dtype} {list(positions.shape)}: give {wanted}")
    outside = positions[(positions < -count) | (positions >= count)]
    if len(outside):
        raise IndexError(f"no utterance at {outside[0]}: {where} has {count:,}")
    return positions.astype(np.int64) % max(1, count)


def check_codebooks(spec: FeatureSpec, codebooks: int | None) -> int | None:
    """Return the number of codebooks to read. Raises ArgumentError if there are fewer."""
    if codebooks is None:
        return None
    most = len(spec.codebook_sizes)
    if not most or spec.item_shape != (most,):
        raise ArgumentError(
            f"codebooks is {codebooks}, but these features are {spec.units}, not codes of codebooks"
        )
    if isinstance(codebooks, SupportsIndex) and 1 <= operator.index(codebooks) <= most:
        return operator.index(codebooks)
    raise ArgumentError(f"codebooks is {codebooks!r}: there are {most}, so it must be 1 to {most}")


def padding_of(cache: Cache, value: float | Literal["silence"]) -> Any:
    """Return the padding value that an argument stands for: a number, or an array
    `[*item_shape]`. Raises ArgumentError if the features' dtype cannot hold it."""
    if isinstance(value, str) and value == "silence":
        return cache.silence
    dtype = cache.spec.values_dtype
    if not is_number(value):
        raise ArgumentError(f'padding_value is {value!r}: give a number, or "silence"')
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        if largest < abs(value) < np.inf:
            raise ArgumentError(
                f"padding_value is {value}: these features are {dtype}, which ends at {largest:g}"
            )
        return value
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max or int(value) != value:
        raise ArgumentError(
            f"padding_value is {value}: these features are {dtype}, so it must be a whole "
            f"number from {limits.min} to {limits.max}; lengths tell where padding begins"
        )
    return value
