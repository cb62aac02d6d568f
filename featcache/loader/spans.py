"""What is asked for of some utterances: which of them, which span of time, which
codebooks; or a window in each.

Windows are of a fixed length, and drawn anew in each epoch. The place of an utterance's
window is a hash of the seed, the epoch and the utterance's position: it does not depend
on the rest of the batch, on the number of ranks or workers, or on whether training was
resumed in between."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
from numpy.typing import NDArray

from featcache.errors import MOST_COUNTED, ArgumentError, is_number, require_int
from featcache.spec import Axis, FeatureSpec, Ints

Where = Literal["random", "start", "center"]
Short = Literal["pad", "drop", "error"]


@dataclass(frozen=True)
class Spans:
    """Some frames of some utterances of a version."""

    positions: Ints
    """The positions of the utterances."""
    firsts: Ints
    """The first frame of each."""
    counts: Ints
    """The number of frames of each."""


def positions_in(name: str, values: Any, count: int, where: str, wanted: str) -> Ints:
    """Positions in a sequence of `count`, int64 `[values]`, counted from its beginning;
    negative values from its end.

    `name`, `where` and `wanted` are for messages: the argument, what has the sequence,
    and what to give instead. Raises IndexError if there is no such position;
    ArgumentError if the values are not whole numbers of Python, numpy or torch, or not in
    a sized sequence."""
    try:
        positions = np.asarray(values) if len(values) else np.empty(0, np.int64)
    except (
        TypeError,
        ValueError,
    ):  # without a length, which one number has not either; lists of several lengths
        raise ArgumentError(f"{name} is {values!r}: give {wanted}") from None
    if positions.dtype.kind not in "iu" or positions.ndim != 1:
        raise ArgumentError(f"{name} are {positions.dtype} {list(positions.shape)}: give {wanted}")
    if len(outside := positions[(positions < -count) | (positions >= count)]):
        raise IndexError(f"no utterance at {outside[0]}: {where} has {count:,}")
    return positions.astype(np.int64) % max(1, count)


def check_codebooks(spec: FeatureSpec, codebooks: int | None) -> int | None:
    """How many codebooks to read, None for all of them; ArgumentError if there are not so
    many, or none."""
    if codebooks is None:
        return None
    there = len(spec.codebook_sizes)
    if not there or spec.item_shape != (there,):
        raise ArgumentError(
            f"codebooks is {codebooks}, but these features are {spec.units}, not codes of codebooks"
        )
    if isinstance(codebooks, SupportsIndex) and 1 <= operator.index(codebooks) <= there:
        return operator.index(codebooks)
    raise ArgumentError(
        f"codebooks is {codebooks!r}: there are {there}, so it must be 1 to {there}"
    )


def check_padding(spec: FeatureSpec, value: float) -> None:
    """Refuse, by an ArgumentError, a padding value that the features' dtype cannot hold."""
    dtype = np.dtype(spec.dtype)
    if not is_number(value):
        raise ArgumentError(f"padding_value is {value!r}: give a number")
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        if largest < abs(value) < np.inf:
            raise ArgumentError(
                f"padding_value is {value}: these features are {dtype}, which ends at {largest:g}"
            )
    elif not (limits := np.iinfo(dtype)).min <= value <= limits.max or int(value) != value:
        remedy = (
            f"so it must be a whole number from {limits.min} to {limits.max}; lengths tell "
            "where padding begins"
        )
        raise ArgumentError(f"padding_value is {value}: these features are {dtype}, {remedy}")


@dataclass(frozen=True)
class Crop:
    """A window in each utterance. Raises ArgumentError if the arguments contradict each
    other, or are out of range."""

    frames: int | None = None
    """The window's length, in frames of the dataset's first version along time."""
    seconds: float | None = None
    """The window's length in seconds; give either this or `frames`."""
    where: Where = "random"
    """The place of the window: random, at the start, or in the center."""
    short: Short = "pad"
    """What to do with utterances shorter than the window: `pad` keeps them, padded as in
    any batch; `drop` leaves them out of the dataset; `error` raises an error."""
    seed: int = 0
    """The seed of the random windows; not negative."""

    def __post_init__(self) -> None:
        if (self.frames is None) == (self.seconds is None):
            raise ArgumentError(
                "a crop has either frames or seconds: Crop(frames=200), or Crop(seconds=2.0)"
            )
        if self.frames is not None:
            object.__setattr__(
                self, "frames", require_int("crop: frames", self.frames, 1, MOST_COUNTED)
            )
        if self.seconds is not None and not (is_number(self.seconds) and 0 < self.seconds < 1e9):
            raise ArgumentError(
                f"crop: seconds is {self.seconds!r}: it must be a number above 0, and less than 1e9"
            )
        for name, value, allowed in (
            ("where", self.where, get_args(Where)),
            ("short", self.short, get_args(Short)),
        ):
            if value not in allowed:
                raise ArgumentError(
                    f"crop: {name} is {value!r}: it must be one of {', '.join(allowed)}"
                )
        require_int("crop: seed", self.seed, 0)


class Windows:
    """The windows of a crop in several versions, at the same times.

    A window's length is counted in frames of the first version along time. In the others
    it begins at the same time, and has as many frames as last as long: exactly, if the
    versions' frames begin together at least once a second, and windows then begin there;
    otherwise within half a frame.

    Versions that are not along time are read whole, and limit no window; `longest`, the
    frames of the longest utterance in each, tells them: see `_along_time`."""

    def __init__(
        self, crop: Crop, axes: Sequence[Axis], longest: Sequence[int] | None = None
    ) -> None:
        self.crop = crop
        rates = [axis.exact_rate for axis in axes]
        if not any(rates):
            raise ArgumentError("crop: no version is along time: vectors cannot be cropped")
        for first in [number for number, rate in enumerate(rates) if rate]:
            window = crop.frames or max(1, round((crop.seconds or 0) * float(rates[first])))
            counts = [max(1, round(window * (rate / rates[first]))) for rate in rates]
            timed = _along_time(longest, rates, counts)
            if first in timed:
                break
        self._window, self._counts = window, counts
        self.length = counts[0]
        """The length of a window, in frames of the first version."""
        # of whole utterances, 0: all windows begin where the utterance does
        self._ratios = [
            rates[version] / rates[first] if version in timed else Fraction(0)
            for version in range(len(rates))
        ]
        step = math.lcm(*(ratio.denominator for ratio in self._ratios))
        self._step = step if step <= rates[first] else 1

    def short(self, lengths: Sequence[Ints]) -> Ints:
        """Which utterances, by their lengths in each version, are shorter than a window
        in any; int64 `[short]`."""
        return np.flatnonzero(self._common(lengths) < self._window)

    def ranges(
        self, lengths: Sequence[Ints], positions: Ints, epoch: int
    ) -> tuple[list[Ints], list[Ints]]:
        """For each version, the first frames of the utterances' windows, and their
        numbers of frames.

        `lengths` are the utterances' in each version, in frames; `positions` are those in
        the first version."""
        firsts = self._firsts(self._common(lengths), positions, epoch)
        begins = [np.rint(firsts * float(ratio)).astype(np.int64) for ratio in self._ratios]
        rooms = [length - first for length, first in zip(lengths, begins, strict=True)]
        return begins, [
            np.clip(room, 0, most) for room, most in zip(rooms, self._counts, strict=True)
        ]

    def _firsts(self, lengths: Ints, positions: Ints, epoch: int) -> Ints:
        """The first frame of each window; 0 if the utterance is no longer than the window."""
        # that a window may begin at
        places = np.maximum(lengths - self._window, 0) // self._step + 1
        if self.crop.where == "start":
            return np.zeros_like(lengths)
        if self.crop.where == "center":
            return places // 2 * self._step
        drawn = _hashes(self.crop.seed, epoch, positions) >> np.uint64(32)
        return ((drawn * places.astype(np.uint64)) >> np.uint64(32)).astype(np.int64) * self._step

    def _common(self, lengths: Sequence[Ints]) -> Ints:
        """The lengths that the utterances have in every version along time, in whole frames
        of the first."""
        timed = [
            length * ratio.denominator // ratio.numerator
            for length, ratio in zip(lengths, self._ratios, strict=True)
            if ratio
        ]
        common: Ints = np.minimum.reduce(timed)
        return common


def _along_time(
    longest: Sequence[int] | None, rates: Sequence[Fraction], counts: Sequence[int]
) -> list[int]:
    """The numbers of the versions that are along time: in which some utterance has more
    frames than a window, or one of several frames lasts half as long as in any other."""
    versions = [version for version, rate in enumerate(rates) if rate]
    if longest is None:
        return versions
    lasting = [
        most / rate if most > 1 and rate else 0 for most, rate in zip(longest, rates, strict=True)
    ]
    return [
        version
        for version in versions
        if longest[version] > counts[version] or 2 * lasting[version] >= max(lasting)
    ]


@lru_cache(4)
def _state(seed: int, epoch: int) -> np.uint64:
    return np.uint64(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def _hashes(seed: int, epoch: int, positions: Ints) -> NDArray[np.uint64]:
    """64 well-mixed bits for each position.

    Source: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators"), whose state is drawn for each epoch from numpy's SeedSequence."""
    z = _state(seed, epoch) + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
