"""What features are: their shape and dtype, and the axis that their entries are along.

Rooms outside `extractors/` ask an axis, never for a frame rate: how many frames so many
samples give, which of them a span of seconds has, how long they last."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from featcache.errors import ArgumentError, listing

QUANTIZATION = "quantization"
"""The side array that every version of quantised features has, and no other version: see
`featcache.quantize`."""

DTYPES = ("float16", "float32", "float64", "uint8", "uint16", "uint32", "uint64", "int32", "int64")
"""What stored arrays may be of."""

Shape = Annotated[tuple[Annotated[int, Meta(ge=1, le=1 << 22)], ...], Meta(max_length=8)]
Dtype = Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")]
"""The types of the fields say what documents of strangers may hold; see
`featcache.version.version`."""

_BLOCK = 1 << 20
"""The number of values that `all_finite` looks at in one step."""


Ints: TypeAlias = NDArray[np.int64]
"""Positions of utterances, or numbers of frames; int64 `[n]`."""

_EDGE_FRAMES = 2
"""Frames that an extractor may have more or less than its rate says: one at either end."""


@dataclass(frozen=True)
class Frames:
    """Steps along time, at a constant rate: frame `i` covers the time from `i / rate` to
    `(i + 1) / rate` seconds."""

    rate: float
    """The number of frames per second."""
    length: int = 0
    """The number of samples that one frame depends on; 0 if it is unlimited or unknown."""
    padded_to: int = 0
    """The number of samples to which shorter clips are padded; 0 if they are not."""

    def __str__(self) -> str:
        return f"{self.rate:g} frames/s"

    @property
    def exact_rate(self) -> Fraction:
        """The rate as a fraction, so that several rates have exact ratios."""
        return Fraction(self.rate).limit_denominator(1 << 20)

    def seconds(self, num_frames: Any) -> Any:
        """Return the seconds of audio that so many frames stand for; arrays give arrays."""
        return num_frames / self.rate

    def frames_in(self, seconds: float) -> int:
        """Return the number of frames that stand for so many seconds, at least 1."""
        return max(1, round(seconds * self.rate))

    def fits(
        self, num_frames: NDArray[Any], num_samples: NDArray[Any], sample_rate: int
    ) -> NDArray[np.bool_]:
        """Tell which items can have so many frames, from so many samples; bool `[items]`."""
        per_sample = self.rate / sample_rate
        expected = np.maximum(num_samples, self.padded_to) * per_sample
        tolerance = self.length * per_sample + _EDGE_FRAMES
        is_near: NDArray[np.bool_] = np.abs(num_frames - expected) <= tolerance
        return is_near

    def span(
        self, lengths: Ints, start: ArrayLike, duration: ArrayLike | None
    ) -> tuple[Ints, Ints]:
        """Return the first frame and the number of frames of a span of time in each
        utterance, int64 `[n]` each.

        A span begins within half a frame of the same time at every rate.

        Args:
            lengths: The utterances' numbers of frames, int64 `[n]`.
            start: Where the spans begin, in seconds: one number, or one for each utterance.
            duration: How long they are, in seconds, in the same form. The number of frames
                is rounded, but at least 1, and ends with the utterance. None for all that
                follows.

        Raises:
            ArgumentError: A span is negative, not a number, or begins where its utterance
                has ended.
        """
        starts = _seconds("start", start, len(lengths))
        if len(late := np.flatnonzero(starts * self.rate >= lengths)):
            spans = [
                f"{starts[i]:g} s of {lengths[i] / self.rate:g} s (number {i})"
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
class SideSpec:
    """A side array: an output of an extractor besides the features, with some entries for
    each utterance."""

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]*\Z", max_length=70)]

    item_shape: Shape
    """The shape of one entry; `()` for a number."""

    dtype: Dtype
    """The numpy name of the dtype."""

    units: str
    """What an entry means, for a reader."""


@dataclass(frozen=True)
class FeatureSpec:
    """A description of an extractor's features; it is stored with every version."""

    item_shape: Shape
    """The shape of one frame: `(80,)` for 80 mel bins, `(8,)` for 8 codebooks."""

    dtype: Dtype
    """The numpy name of the dtype: what `extract` returns (in an extractor's spec) or
    what is read (in a version's)."""

    frame_rate: Annotated[float, Meta(ge=1e-6, le=1e9)]
    """The number of frames per second."""

    frame_length: Annotated[int, Meta(ge=0, le=1 << 40)]
    """The number of samples that one frame depends on; 0 if it is unlimited or unknown."""

    sample_rate: Annotated[int, Meta(ge=1, le=10**9)]
    """The sample rate in Hz of the waveforms that `extract` takes."""

    units: str
    """What a value means, for a reader: "log mel energy (natural log)"."""

    codebook_sizes: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1 << 24)], ...], Meta(max_length=4096)
    ] = ()
    """The size of each codebook, for codes; empty for other features."""

    side: Annotated[tuple[SideSpec, ...], Meta(max_length=64)] = ()
    """The arrays that are stored beside the features."""

    padded_to: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    """The number of samples to which the extractor pads shorter clips, so that all of
    these have equally many frames; 0 if it does not."""

    kind: Literal["frames"] = "frames"
    """What an item is: frames along time."""

    @property
    def outputs(self) -> tuple[SideSpec, ...]:
        """The side arrays that the extractor gives."""
        return tuple(side for side in self.side if side.name != QUANTIZATION)

    @property
    def is_quantized(self) -> bool:
        """Whether a version's features are stored as uint8, each item with a scale and an
        offset."""
        return any(side.name == QUANTIZATION for side in self.side)

    @property
    def stored_dtype(self) -> str:
        """The numpy name of the dtype on disk: `dtype`, unless the features are quantised."""
        return "uint8" if self.is_quantized else self.dtype

    @property
    def axis(self) -> Frames:
        """The axis of the features: what a frame is along."""
        return Frames(self.frame_rate, self.frame_length, self.padded_to)

    def num_bytes(self, num_frames: Any, num_items: int = 0) -> Any:
        """Return the bytes on disk of so many frames, and of the scales and offsets of so
        many items if features are quantised; without other side arrays. An array of
        numbers of frames gives an array."""
        scales = [side for side in self.side if side.name == QUANTIZATION]
        per_item = sum(_entry_bytes(side.item_shape, side.dtype) for side in scales)
        return num_frames * _entry_bytes(self.item_shape, self.stored_dtype) + num_items * per_item

    def expected_bytes(self, seconds: float, num_items: int = 0) -> float:
        """Return the bytes on disk that so much audio in so many items gives, about."""
        expected: float = self.num_bytes(seconds * self.axis.rate, num_items)
        return expected


def _entry_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def all_finite(array: NDArray[Any]) -> bool:
    """Whether no value of a C-contiguous array is NaN or infinite, at memory speed.

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
