"""Specs of features: tracks with their shape and dtype, and the axes that their entries
are along.

Rooms outside `extractors/` never ask for a frame rate. They ask an axis how many frames a
number of samples gives, which frames a span of seconds has, and how long they last."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta, Struct, json, to_builtins
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, did_you_mean, listing

QUANTIZATION = "quantization"
"""The track that every version of quantised features has, and no other version: see
`featcache.spec.quantize`."""

BFLOAT16 = "bfloat16"
"""A dtype that numpy lacks: stored as its bits, uint16, and read by numpy as float32."""

DTYPES = (
    "float16",
    "float32",
    "float64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int32",
    "int64",
    BFLOAT16,
)
"""What stored arrays may be of."""

Shape = Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 22)], ...], Meta(max_length=8)]
Dtype = Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")]
"""The types of the fields say what documents of strangers may hold; see
`featcache.version.version`."""

CodebookSizes = Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 24)], ...], Meta(max_length=4096)]
Kind = Literal["frames", "clip", "events", "unknown"]
STORED_KINDS = ("frames", "clip", "events")
"""The kinds of the main tracks of versions."""


_MOST_VALUES = 1 << 22
"""The most values of an entry."""

_MOST_CODES = 1 << 24
"""The most codes of all codebooks together."""

_BLOCK = 1 << 20
"""The number of values that `all_finite` looks at in one step."""

_REPEATED = 4096
"""Half the number of values that numpy's buffer holds."""

Ints = NDArray[np.int64]
"""Positions of utterances, or numbers of entries; int64 `[n]`."""

Flags = NDArray[np.bool_]
_Floats = NDArray[np.float32]

MAIN = "features"
"""The name of a version's main track."""

LABELS = "labels"
"""The name of the track that has the labels of the main track's events."""

_MOST_UNITS = 1000
"""The characters of units that are searched for names."""

_EDGE_FRAMES = 2
"""Frames that an extractor may have more or less than its rate says: one at either end."""

_LEAST_SECONDS = 1e-9
"""Less time is the rounding of decimal seconds: 1.1 + 2.2 is above 3.3."""

_Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]
_Samples = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Axis(Struct, frozen=True):
    """The base of axes: what the entries of a track are along. An item may have any number
    of entries; those who know more override this."""

    is_ragged: ClassVar[bool] = True
    """Whether items may have different numbers of entries."""
    kind: ClassVar[Kind] = "unknown"
    """The name of the axis in documents."""
    fewest: ClassVar[int] = 0
    """The fewest entries of an item."""
    dimensions: ClassVar[tuple[str, ...]] = ("entries",)
    """The names of the dimensions of an item that come before the dimensions of an
    entry."""
    has_times: ClassVar[bool] = False
    """Whether the values of an entry are its times, so that a span of seconds changes
    them; see `Events.cut`."""

    @property
    def exact_rate(self) -> Fraction:
        """The entries per second as a fraction, so that several rates have exact ratios; 0
        if entries are not along time."""
        return Fraction(0)

    def __str__(self) -> str:
        return "any number for each utterance"

    def seconds(self, num_entries: Any) -> Any:
        """Return the seconds of audio that so many entries stand for; arrays give arrays.
        NaN if entries do not stand for time."""
        return num_entries * math.nan

    def expected_entries(self, seconds: float, num_items: int) -> float:
        """Return about how many entries so much audio in so many items gives; 0 if there is
        no limit."""
        return 0.0

    def fits(self, num_entries: NDArray[Any], num_samples: NDArray[Any], sample_rate: int) -> Flags:
        """Tell which items can have so many entries, from so many samples; bool `[items]`."""
        return num_entries >= self.fewest

    def span(
        self,
        lengths: Ints,
        start: ArrayLike,
        duration: ArrayLike | None,
        id_of: Any = "number {}".format,
    ) -> tuple[Ints, Ints]:
        """Return the first entry and the number of entries of a span of time in each
        utterance, int64 `[n]` each: all of them, if entries are not along time.

        Args:
            lengths: The utterances' numbers of entries, int64 `[n]`.
            start: Where the spans begin, in seconds: one number, or one for each utterance.
            duration: How long they are, in seconds, in the same form. None for all that
                follows.
            id_of: Names an utterance, by its number.

        Raises:
            ArgumentError: A span is negative, not a number, or begins where its utterance
                has ended.
        """
        _seconds("start", start, len(lengths))
        if duration is not None:
            _seconds("duration", duration, len(lengths))
        return np.zeros_like(lengths), lengths

    def shape_item(self, entries: Any) -> Any:
        """Return an item as users know it, of its entries `[entries, *item_shape]`."""
        return entries

    def as_entries(self, item: Any) -> Any:
        """Return the entries `[entries, *item_shape]` of an item as users know it."""
        return item


class Frames(_Axis, frozen=True, tag="frames", omit_defaults=True):
    """Steps along time, at a constant rate: frame `i` covers the time from `i / rate` to
    `(i + 1) / rate` seconds."""

    rate: _Rate
    """The number of frames per second."""
    length: _Samples = 0
    """The number of samples that one frame depends on; 0 if it is unlimited or unknown."""
    padded_to: _Samples = 0
    """The number of samples to which shorter clips are padded; 0 if they are not."""

    kind: ClassVar[Kind] = "frames"
    fewest: ClassVar[int] = 1
    dimensions: ClassVar[tuple[str, ...]] = ("frames",)

    def __str__(self) -> str:
        return f"{self.rate:g} frames/s"

    @property
    def exact_rate(self) -> Fraction:
        return Fraction(self.rate).limit_denominator(1 << 20)

    def seconds(self, num_entries: Any) -> Any:
        return num_entries / self.rate

    def expected_entries(self, seconds: float, num_items: int) -> float:
        return seconds * self.rate

    def fits(self, num_entries: NDArray[Any], num_samples: NDArray[Any], sample_rate: int) -> Flags:
        per_sample = self.rate / sample_rate
        expected = np.maximum(num_samples, self.padded_to) * per_sample
        tolerance = self.length * per_sample + _EDGE_FRAMES
        is_near: Flags = np.abs(num_entries - expected) <= tolerance
        return is_near

    def span(
        self,
        lengths: Ints,
        start: ArrayLike,
        duration: ArrayLike | None,
        id_of: Any = "number {}".format,
    ) -> tuple[Ints, Ints]:
        """Return the first frame and the number of frames of a span of time in each
        utterance; see the base. A span begins within half a frame of the same time at
        every rate. The number of frames is rounded, but at least 1, and ends with the
        utterance."""
        starts = _seconds("start", start, len(lengths))
        late = np.flatnonzero(starts * self.rate >= lengths)
        if len(late):
            spans = [
                f"{starts[i]:g} s of {lengths[i] / self.rate:g} s ({id_of(i)})"
                for i in late.tolist()
            ]
            raise ArgumentError(
                f"start lies beyond the end of {len(late)} of {len(lengths)} utterances: "
                f"{listing(spans)}"
            )
        # a start half a frame before the end is rounded to the last frame
        firsts = np.minimum(np.rint(starts * self.rate).astype(np.int64), lengths - 1)
        counts = lengths - firsts
        if duration is not None:
            durations = _seconds("duration", duration, len(lengths))
            asked = np.maximum(np.rint(durations * self.rate), durations > 0)
            counts = np.minimum(counts, asked).astype(np.int64)
        return firsts, counts


class Clip(_Axis, frozen=True, tag="clip"):
    """The whole utterance: it has one entry, such as the vector of its speaker."""

    is_ragged: ClassVar[bool] = False
    kind: ClassVar[Kind] = "clip"
    fewest: ClassVar[int] = 1
    dimensions: ClassVar[tuple[str, ...]] = ()

    def __str__(self) -> str:
        return "one for each utterance"

    def expected_entries(self, seconds: float, num_items: int) -> float:
        return num_items

    def fits(self, num_entries: NDArray[Any], num_samples: NDArray[Any], sample_rate: int) -> Flags:
        is_one: Flags = num_entries == 1
        return is_one

    def shape_item(self, entries: Any) -> Any:
        return entries[0]

    def as_entries(self, item: Any) -> Any:
        return item[None]


class Events(_Axis, frozen=True, tag="events"):
    """Events: an entry is the start and the end of one, in seconds from the utterance's
    start. They are sorted by start, then by end, and may overlap. The end of a point in
    time is its start.

    Times are float64, which is exact to a nanosecond for 97 days. (From 17 minutes on,
    the steps of float32 are longer than a sample at 16 kHz.)"""

    kind: ClassVar[Kind] = "events"
    dimensions: ClassVar[tuple[str, ...]] = ("events",)
    has_times: ClassVar[bool] = True
    dtype: ClassVar[str] = "float64"

    def __str__(self) -> str:
        return "any number of events for each utterance"

    def expected_entries(self, seconds: float, num_items: int) -> float:
        return 10.0 * seconds  # phones; words are a third of that

    def cut(
        self, times: NDArray[np.float64], start: ArrayLike, duration: ArrayLike
    ) -> tuple[NDArray[np.float64], Ints]:
        """Return the events `[events, 2]` of which a span of seconds has some time, cut to
        it, in seconds from its start; and their numbers, int64 `[n]`. A point at the end of a
        span belongs to the next span. Times that differ by less than a nanosecond are equal.
        `start` and `duration` are one number, maybe infinity, or one for each event."""
        firsts = np.broadcast_to(np.asarray(start, np.float64), len(times))
        lasts = firsts + np.asarray(duration, np.float64)
        starts, ends = times.T
        least = _LEAST_SECONDS
        is_point = ends - starts <= least
        is_after_start = (ends > firsts + least) | (is_point & (starts >= firsts - least))
        taken = np.flatnonzero(is_after_start & (starts < lasts - least) & (firsts < lasts))
        origin = firsts[taken, None]
        return np.clip(times[taken], origin, lasts[taken, None]) - origin, taken


class Unknown(_Axis, frozen=True, tag="unknown"):
    """Nothing that is known: the entries of side arrays that do not say more."""


Axis = Frames | Clip | Events | Unknown

_UNKNOWN = Unknown()
_UNTIMED: dict[str, Axis] = {axis.kind: axis for axis in (Clip(), Events(), _UNKNOWN)}


def _seconds(name: str, value: ArrayLike, count: int) -> NDArray[np.float64]:
    try:
        array: NDArray[Any] = np.asarray(value, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} is {value!r}: it must be seconds, 0 or more") from error
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise ArgumentError(
            f"{name} has shape {list(array.shape)}: give one number, or one for each of "
            f"{count} keys"
        )
    array = np.broadcast_to(array, count)
    if len(wrong := np.flatnonzero(~(np.isfinite(array) & (array >= 0)))):
        raise ArgumentError(f"{name} is {array[wrong[0]]:g}: it must be seconds, 0 or more")
    return array.clip(max=1e300)  # times a rate, that is still finite


@dataclass(frozen=True)
class Track:
    """One array of a version: some entries for each utterance, along an axis."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*\Z", max_length=70)]

    item_shape: Shape
    """The shape of one entry; `()` for a number."""

    dtype: Dtype
    """The numpy name of the dtype."""

    units: str
    """What an entry means, for a reader: "log mel energy (natural log)"."""

    axis: Axis = _UNKNOWN
    """What the entries are along."""

    codebook_sizes: CodebookSizes = ()
    """The size of each codebook, for codes; empty for others."""

    def shape_text(self) -> str:
        """Return the shape of an item's entries, for a reader: "[frames, 80]"."""
        return f"[{', '.join(map(str, (*self.axis.dimensions, *self.item_shape)))}]"

    @property
    def entry_bytes(self) -> int:
        """The number of bytes of one entry."""
        return math.prod(self.item_shape) * np.dtype(stored_name(self.dtype)).itemsize

    def require_sound(self) -> None:
        """Raise ValueError for an entry, codes or events that cannot be."""
        num_values = math.prod(self.item_shape)
        if num_values > _MOST_VALUES:
            raise ValueError(
                f"one entry of {self.name} has {num_values:,} values, and may have {_MOST_VALUES:,}"
            )
        num_codes = sum(self.codebook_sizes)
        is_float = numpy_dtype(self.dtype).kind == "f"
        if num_codes > _MOST_CODES or (num_codes and is_float):
            raise ValueError(f"codes of {num_codes:,} values, of dtype {self.dtype}")
        is_pair = (self.dtype, self.item_shape) == (Events.dtype, (2,))
        if self.axis.has_times and not is_pair:
            raise ValueError(
                f"events of {self.name} are {self.dtype} {[*self.item_shape]}, and not a start "
                f"and an end: {Events.dtype} [2]"
            )


@dataclass(frozen=True)
class FeatureSpec:
    """A description of an extractor's features; it is stored with every version.

    Most of its fields describe the main track. `FeatureSpec.of` makes one of tracks, and
    `tracks` has all of them."""

    item_shape: Shape
    """The shape of one entry: `(80,)` for 80 mel bins, `(8,)` for 8 codebooks."""

    dtype: Dtype
    """The numpy name of the dtype: what `extract` returns (in an extractor's spec) or what is
    read (in a version's)."""

    frame_rate: Annotated[float, Meta(ge=0, le=1e9)]
    """The number of frames per second; 0 if the main track is not along time."""

    frame_length: _Samples
    """See `Frames.length`."""

    sample_rate: Annotated[int, Meta(ge=1, le=10**9)]
    """The sample rate in Hz of the waveforms that `extract` takes."""

    units: str
    """What a value means, for a reader: "log mel energy (natural log)"."""

    codebook_sizes: CodebookSizes = ()
    """The size of each codebook, for codes; empty for other features."""

    side: Annotated[tuple[Track, ...], Meta(max_length=64)] = ()
    """The tracks except the main one."""

    padded_to: _Samples = 0
    """See `Frames.padded_to`."""

    kind: Kind = "frames"
    """What the main track's entries are along: frames in time, the whole clip, or events."""

    @classmethod
    def of(cls, sample_rate: int, main: Track, *others: Track) -> FeatureSpec:
        """Describe features that have these tracks, of waveforms at this rate in Hz. The
        main track is called `features`, whatever its name."""
        axis = main.axis
        rate, length, padded_to = 0.0, 0, 0
        if isinstance(axis, Frames):
            rate, length, padded_to = axis.rate, axis.length, axis.padded_to
        return cls(
            item_shape=main.item_shape,
            dtype=main.dtype,
            frame_rate=rate,
            frame_length=length,
            sample_rate=sample_rate,
            units=main.units,
            codebook_sizes=main.codebook_sizes,
            side=others,
            padded_to=padded_to,
            kind=axis.kind,
        )

    def require_sound(self) -> None:
        """Raise ValueError if the spec contradicts itself, or no memory is enough for one
        entry."""
        if self.kind not in STORED_KINDS or (self.kind == "frames") != (self.frame_rate > 0):
            raise ValueError(f"{self.kind} with {self.frame_rate:g} frames per second")
        names = [track.name for track in self.side]
        if len({*names}) < len(names):
            raise ValueError(f"side arrays {listing(names)}: two of them have the same name")
        if self.is_quantized and self.dtype != "float32":
            raise ValueError(f"quantised features of dtype {self.dtype}")
        scales = [
            (track.dtype, track.item_shape) for track in self.side if track.name == QUANTIZATION
        ]
        if scales not in ([], [("float32", (2, *self.item_shape))]):
            raise ValueError("scales and offsets of another form than the features")
        if any(track.dtype == BFLOAT16 for track in self.side):
            raise ValueError(f"only features may be {BFLOAT16}, and no side array")
        for track in (self.main, *self.side):
            track.require_sound()

    def document(self) -> dict[str, Any]:
        """Return the JSON object that docs/format.md describes. Tracks leave out what they
        do not say, as those did that were written before there were axes."""
        plain: dict[str, Any] = to_builtins(self)
        unsaid = {"axis": to_builtins(_UNKNOWN), "codebook_sizes": ()}
        plain["side"] = [
            {key: value for key, value in track.items() if unsaid.get(key, ...) != value}
            for track in plain["side"]
        ]
        return plain

    @property
    def axis(self) -> Axis:
        """The axis of the main track."""
        if self.kind == "frames":
            return Frames(self.frame_rate, self.frame_length, self.padded_to)
        return _UNTIMED[self.kind]

    @property
    def main(self) -> Track:
        """The main track, as it is read."""
        return Track(MAIN, self.item_shape, self.dtype, self.units, self.axis, self.codebook_sizes)

    @property
    def named_units(self) -> dict[str, str]:
        """The name and the unit of each value, of a vector whose units are written as `level
        (dB), peak (dB)` or `ovrl, sig (1 to 5)`; empty for others."""
        units = self.units[:_MOST_UNITS]  # a stranger's text may be long
        named, unit = {}, ""
        for part in reversed(re.split(r", (?![^()]*\))", units)):
            name, bracket, unit_of_name = part.partition(" (")
            if bracket:
                unit = unit_of_name.removesuffix(")")
            named[name] = unit
        if self.kind != "clip" or self.item_shape != (len(named),):
            return {}
        if not all(map(str.isidentifier, named)):
            return {}
        return dict(reversed(named.items()))

    @property
    def is_pitch(self) -> bool:
        """True if a frame is a pitch in Hz and a confidence from 0 to 1."""
        is_pair = self.kind == "frames" and self.item_shape == (2,)
        return is_pair and self.units.startswith("pitch (Hz), ")

    @property
    def is_curve(self) -> bool:
        """True if a frame is a single number, such as a probability, and no code."""
        is_float = self.values_dtype.kind == "f"
        return is_float and self.kind == "frames" and math.prod(self.item_shape) == 1

    @property
    def tracks(self) -> tuple[Track, ...]:
        """All tracks that an extractor gives; the first is the main one."""
        return (self.main, *self.outputs)

    def track(self, name: str) -> Track:
        """Return the track of this name. Raises ArgumentError, which lists the tracks, if
        there is none."""
        tracks = {track.name: track for track in self.tracks}
        if name in tracks:
            return tracks[name]
        meant = did_you_mean(name, tracks)
        raise ArgumentError(f"there is no track {name!r}{meant}; there are {listing(tracks)}")

    @property
    def outputs(self) -> tuple[Track, ...]:
        """The tracks that the extractor gives besides the main one."""
        return tuple(track for track in self.side if track.name != QUANTIZATION)

    @property
    def has_labels(self) -> bool:
        """True if each event of the main track has a label."""
        tracks = [(track.name, track.dtype, track.item_shape) for track in self.side]
        return self.axis.has_times and (LABELS, "uint8", ()) in tracks

    @property
    def is_quantized(self) -> bool:
        """True if a version's features are stored as uint8, each item with a scale and an
        offset."""
        return any(track.name == QUANTIZATION for track in self.side)

    @property
    def stored_dtype(self) -> str:
        """The numpy name of the dtype on disk: `dtype`, unless the features are quantised, or
        the bits of bfloat16."""
        return "uint8" if self.is_quantized else stored_name(self.dtype)

    @property
    def values_dtype(self) -> np.dtype[Any]:
        """The dtype of the arrays that numpy reads: `dtype`, or float32 for bfloat16."""
        return numpy_dtype(self.dtype)

    def num_bytes(self, num_entries: Any, num_items: int = 0) -> Any:
        """Return the bytes on disk of so many entries of the main track, and of the scales
        and offsets of so many items if they are quantised; without other tracks. An array of
        numbers gives an array."""
        per_item = sum(track.entry_bytes for track in self.side if track.name == QUANTIZATION)
        per_entry = math.prod(self.item_shape) * np.dtype(self.stored_dtype).itemsize
        return num_entries * per_entry + num_items * per_item

    def expected_bytes(self, seconds: float, num_items: int = 0) -> float:
        """Return the bytes on disk that so much audio in so many items gives, about."""
        num_entries = self.axis.expected_entries(seconds, num_items)
        num_bytes = float(self.num_bytes(num_entries, num_items))
        for track in self.outputs:
            num_bytes += track.axis.expected_entries(seconds, num_items) * track.entry_bytes
        return num_bytes


def stored_name(dtype: str) -> str:
    """Return the numpy name of the dtype on disk of an array that is not quantised."""
    return "uint16" if dtype == BFLOAT16 else dtype


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the dtype of the arrays that numpy reads of a dtype's values."""
    return np.dtype("float32" if dtype == BFLOAT16 else dtype)


def as_values(stored: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return the values of a stored array as numpy reads them: for the bits of bfloat16 a new
    array of float32, which holds them exactly; else, or if it holds values already, the
    array itself."""
    if dtype != BFLOAT16 or stored.dtype.kind == "f":
        return stored
    return (stored.astype(np.uint32) << 16).view(np.float32)


def bfloat16_bits(values: ArrayLike) -> NDArray[np.uint16]:
    """Return the bits of values that are rounded to bfloat16, to the nearest, or to the even
    one of two. They are finite, or infinite."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return np.asarray(rounded >> 16, np.uint16)


def all_finite(array: NDArray[Any]) -> bool:
    """Tell whether no value of a C-contiguous array is NaN or infinite, at memory speed.

    NaN and infinity have all exponent bits set. So as signed integers, the positive ones
    are at least the bits of +inf; as unsigned integers, the negative ones are at least
    the bits of -inf. Two maxima over blocks take a tenth of the time of
    `np.isfinite(array).all()`, which converts each value of float16."""
    if array.dtype.kind != "f":
        return True
    positive, negative = _bits_of_infinity(array.dtype)
    flat = array.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        if (
            block.view(positive.dtype).max() >= positive
            or block.view(negative.dtype).max() >= negative
        ):
            return False
    return True


@cache
def _bits_of_infinity(
    dtype: np.dtype[Any],
) -> tuple[np.signedinteger[Any], np.unsignedinteger[Any]]:
    """The bits of +inf as a signed integer, and those of -inf as an unsigned one."""
    positive, negative = np.array([np.inf, -np.inf], dtype)[:, None]
    return positive.view(f"i{dtype.itemsize}")[0], negative.view(f"u{dtype.itemsize}")[0]


# msgspec resolves a class when it is first used, and crashes if two threads do that at once
json.Decoder(FeatureSpec)


def dequantize_array(
    levels: NDArray[np.uint8], scale: _Floats, offset: _Floats, out: _Floats | None = None
) -> _Floats:
    """Compute the values of features stored as uint8, with numpy alone; see
    `featcache.spec.quantize`.

    Args:
        levels: The stored levels, uint8 `[frames, *item_shape]`.
        scale, offset: float32 `[*item_shape]`; or those of each frame, `[frames,
            *item_shape]`.
        out: A contiguous float32 array of the levels' shape to write to.
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
    long items, the parameter is repeated once here: a quarter less time for 12 s of 80
    dimensions."""
    count = _REPEATED // max(1, parameter.size) + 1
    if parameter.ndim < frames.ndim and len(frames) >= 6 * count:
        repeated = np.empty((count, *parameter.shape), np.float32)
        repeated[...] = parameter
        in_blocks = len(frames) // count * count
        blocks = frames[:in_blocks].reshape(-1, repeated.size)
        function(blocks, repeated.reshape(-1), out=blocks)
        frames, parameter = frames[in_blocks:], repeated[: len(frames) - in_blocks]
    function(frames, parameter, out=frames)
