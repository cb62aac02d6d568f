"""Which frames of utterances are read: spans of time, and windows of a fixed length, drawn anew in each epoch.

Frame `i` of a version with `rate` frames a second covers the time from `i / rate` to `(i + 1) / rate`. So a span of
time begins within half a frame of the same point in versions of different rates.

The place of an utterance's window is a hash of the seed, the epoch and the utterance's position: it does not depend on
the rest of the batch, on the number of ranks or workers, or on whether training was resumed in between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from featcache.arguments import is_number, require_int
from featcache.errors import ArgumentError, listing
from featcache.spec import FeatureSpec

__all__ = ["Crop", "Windows", "check_codebooks", "check_padding", "frames_between", "positions_in"]

Where = Literal["random", "start", "center"]
Short = Literal["pad", "drop", "error"]


@dataclass(frozen=True)
class Crop:
    """A window in each utterance.

    Raises:
        ArgumentError: The arguments contradict each other, or one is out of range.
    """

    frames: int | None = None
    """The window's length, in frames of the dataset's first version."""
    seconds: float | None = None
    """The window's length in seconds; give either this or `frames`."""
    where: Where = "random"
    """The place of the window: random, at the start, or in the center."""
    short: Short = "pad"
    """What to do with utterances shorter than the window: `pad` keeps them, padded as in any batch; `drop` leaves them
    out of the dataset; `error` raises an error."""
    seed: int = 0
    """The seed of the random windows; not negative."""

    def __post_init__(self) -> None:
        if (self.frames is None) == (self.seconds is None):
            raise ArgumentError("a crop has either frames or seconds: Crop(frames=200), or Crop(seconds=2.0)")
        if self.frames is not None:
            object.__setattr__(self, "frames", require_int("crop: frames", self.frames, 1))
        if self.seconds is not None and not (is_number(self.seconds) and 0 < self.seconds < np.inf):
            raise ArgumentError(f"crop: seconds is {self.seconds!r}: it must be a number above 0")
        for name, value, allowed in (("where", self.where, get_args(Where)), ("short", self.short, get_args(Short))):
            if value not in allowed:
                raise ArgumentError(f"crop: {name} is {value!r}: it must be one of {', '.join(allowed)}")
        require_int("crop: seed", self.seed, 0)

    def frames_at(self, rate: float) -> int:
        """The window's length, in frames of a version with `rate` frames a second; at least one."""
        if self.frames is not None:
            return self.frames
        assert self.seconds is not None
        return max(1, round(self.seconds * rate))

    def firsts(
        self, lengths: NDArray[np.int64], window: int, positions: NDArray[np.int64], epoch: int, step: int = 1
    ) -> NDArray[np.int64]:
        """The first frame of each window, int64 `[n]`; 0 if the utterance is no longer than the window.

        Args:
            lengths: The utterances' lengths, in frames; int64 `[n]`.
            window: The length of a window, in frames.
            positions: The utterances' positions, which decide what is drawn for them; int64 `[n]`.
            epoch: The epoch; each has other windows.
            step: Windows begin at multiples of this.
        """
        places = np.maximum(lengths - window, 0) // step + 1  # that a window may begin at
        if self.where == "start":
            return np.zeros_like(lengths)
        if self.where == "center":
            return places // 2 * step
        drawn = _hashes(self.seed, epoch, positions) >> np.uint64(32)
        return ((drawn * places.astype(np.uint64)) >> np.uint64(32)).astype(np.int64) * step


class Windows:
    """The windows of a crop in several versions, at the same times.

    A window's length is counted in frames of the first version. In the others it begins at the same time, and has as
    many frames as last as long: exactly, if the versions' frames begin together at least once a second, and windows
    then begin there; otherwise within half a frame.
    """

    def __init__(self, crop: Crop, frame_rates: Sequence[float]) -> None:
        self.crop = crop
        rates = [Fraction(rate).limit_denominator(1 << 20) for rate in frame_rates]
        self.length = crop.frames_at(float(rates[0]))
        """The length of a window, in frames of the first version."""
        self._ratios = [rate / rates[0] for rate in rates]
        step = math.lcm(*(ratio.denominator for ratio in self._ratios))
        self._step = step if step <= rates[0] else 1

    def short(self, lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Which utterances, by their lengths in each version, are shorter than a window in any; int64 `[short]`."""
        return np.flatnonzero(self._common(lengths) < self.length)

    def ranges(
        self, lengths: Sequence[NDArray[np.int64]], positions: NDArray[np.int64], epoch: int
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """For each version, the first frames of the utterances' windows, and their numbers of frames; int64 `[n]` each.

        `lengths` are the utterances' in each version, in frames; `positions` are those in the first version.
        """
        firsts = self.crop.firsts(self._common(lengths), self.length, positions, epoch, self._step)
        begins = [np.rint(firsts * float(ratio)).astype(np.int64) for ratio in self._ratios]
        counts = [
            np.clip(available - first, 0, max(1, round(self.length * ratio)))
            for available, first, ratio in zip(lengths, begins, self._ratios, strict=True)
        ]
        return begins, counts

    def _common(self, lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """The lengths that the utterances have in every version, in whole frames of the first; int64 `[n]`."""
        shortest = lengths[0]
        for length, ratio in zip(lengths[1:], self._ratios[1:], strict=True):
            shortest = np.minimum(shortest, length * ratio.denominator // ratio.numerator)
        return shortest


def frames_between(
    lengths: NDArray[np.int64], rate: float, start: ArrayLike, duration: ArrayLike | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The frames of a span of time in each of some utterances.

    Args:
        lengths: The utterances' lengths, in frames; int64 `[n]`.
        rate: Frames a second.
        start: The span's start in seconds; one number, or one for each utterance `[n]`.
        duration: The span's duration in seconds, likewise; to the end by default.

    Returns:
        The first frame, and the number of frames: the duration's, rounded, but at least one, or as many as there are.
        int64 `[n]`, both.

    Raises:
        ArgumentError: A span is negative, not a number, or begins where its utterance has ended.
    """
    starts = _seconds("start", start, len(lengths))
    late = np.flatnonzero(starts * rate >= lengths)
    if len(late):
        spans = [f"{starts[i]:g} s of {lengths[i] / rate:g} s (number {i})" for i in late.tolist()]
        raise ArgumentError(f"start lies beyond the end of {len(late)} of {len(lengths)} utterances: {listing(spans)}")
    first = np.minimum(np.rint(starts * rate).astype(np.int64), lengths - 1)  # half a frame before the end is the last
    counts = lengths - first
    if duration is not None:
        durations = _seconds("duration", duration, len(lengths))
        wanted = np.maximum(np.rint(durations * rate), durations > 0).astype(np.int64)
        counts = np.minimum(counts, wanted)
    return first, counts


def positions_in(name: str, values: Any, count: int, where: str, wanted: str) -> NDArray[np.int64]:
    """Return positions in a sequence, int64 `[values]`, counted from its beginning.

    Args:
        name: The argument's name, for messages.
        values: A sized sequence of whole numbers of Python, numpy or torch; negative ones count from the end.
        count: The length of the sequence.
        where: What has the sequence, for messages.
        wanted: What to give instead, for messages.

    Raises:
        ArgumentError: The values are not whole numbers, or not in a sequence.
        IndexError: There is no such position.
    """
    if not isinstance(values, Sized):
        raise ArgumentError(f"{name} is {values!r}: give {wanted}")
    positions = np.asarray(values) if len(values) else np.empty(0, np.int64)
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise ArgumentError(f"{name} are {positions.dtype} {list(positions.shape)}: give {wanted}")
    outside = positions[(positions < -count) | (positions >= count)]
    if len(outside):
        raise IndexError(f"no utterance at {outside[0]}: {where} has {count:,}")
    return positions.astype(np.int64) % count if len(positions) else positions.astype(np.int64)


def check_codebooks(spec: FeatureSpec, codebooks: int | None) -> int | None:
    """How many codebooks to read; None for all of them.

    Raises:
        ArgumentError: The features are not codes of several codebooks, or there are not so many.
    """
    if codebooks is None:
        return None
    there = len(spec.codebook_sizes)
    if not there or spec.item_shape != (there,):
        raise ArgumentError(f"codebooks is {codebooks}, but these features are {spec.units}, not codes of codebooks")
    if not isinstance(codebooks, SupportsIndex) or not 1 <= operator.index(codebooks) <= there:
        raise ArgumentError(f"codebooks is {codebooks!r}: there are {there}, so it must be 1 to {there}")
    return operator.index(codebooks)


def check_padding(spec: FeatureSpec, value: float) -> None:
    """Refuse a padding value that the features' dtype cannot hold.

    Raises:
        ArgumentError: It is not a number, or none of that dtype.
    """
    dtype = np.dtype(spec.dtype)
    if not is_number(value):
        raise ArgumentError(f"padding_value is {value!r}: give a number")
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        if largest < abs(value) < np.inf:
            raise ArgumentError(
                f"padding_value is {value}: these features are {dtype}, whose largest value is {largest:g}"
            )
        return
    limits = np.iinfo(dtype)
    if not (limits.min <= value <= limits.max and int(value) == value):
        raise ArgumentError(
            f"padding_value is {value}: these features are {dtype}, so it must be a whole number from {limits.min} to "
            f"{limits.max}; lengths tell where padding begins"
        )


def _seconds(name: str, value: ArrayLike, count: int) -> NDArray[np.float64]:
    array: NDArray[Any] = np.asarray(value, np.float64)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != count):
        raise ArgumentError(
            f"{name} has shape {list(array.shape)}: give one number, or one for each of {count} utterances"
        )
    array = np.broadcast_to(array, count)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise ArgumentError(f"{name} is {array[wrong[0]]:g}: it must be seconds, 0 or more")
    return array


@lru_cache(4)
def _state(seed: int, epoch: int) -> np.uint64:
    return np.uint64(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def _hashes(seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 well-mixed bits for each position.

    Source: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), whose state is
    drawn for each epoch from numpy's SeedSequence.
    """
    z = _state(seed, epoch) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    hashes: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return hashes
