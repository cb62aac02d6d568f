"""Windows of a fixed length in utterances, drawn again in each epoch.

The place of an utterance's window is a hash of the seed, the epoch and the utterance's
position. It does not depend on the other utterances of the batch, on the number of ranks
or workers, or on whether training was resumed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from featcache.errors import MOST_COUNTED, ArgumentError, is_number, require_int
from featcache.spec import Axis, Ints

Where = Literal["random", "start", "center"]
Short = Literal["pad", "drop", "error"]


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
    """The treatment of utterances shorter than the window: `pad` keeps them, padded as in
    any batch; `drop` leaves them out of the dataset; `error` raises an error."""
    seed: int = 0
    """The seed of the random windows; not negative."""

    def __post_init__(self) -> None:
        if (self.frames is None) == (self.seconds is None):
            raise ArgumentError(
                "a crop has either frames or seconds: Crop(frames=200), or Crop(seconds=2.0)"
            )
        if self.frames is not None:
            frames = require_int("crop: frames", self.frames, 1, MOST_COUNTED)
            object.__setattr__(self, "frames", frames)
        if self.seconds is not None and not (is_number(self.seconds) and 0 < self.seconds < 1e9):
            raise ArgumentError(
                f"crop: seconds is {self.seconds!r}: it must be a number above 0, and less than 1e9"
            )
        _require_one_of("where", self.where, get_args(Where))
        _require_one_of("short", self.short, get_args(Short))
        require_int("crop: seed", self.seed, 0)


def _require_one_of(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ArgumentError(f"crop: {name} is {value!r}: it must be one of {', '.join(allowed)}")


class Windows:
    """The windows of a crop in several versions, at the same times.

    A window's length is counted in frames of the first version along time. In the other
    versions it begins at the same time, and its frames last as long. This is exact if the
    versions' frames begin together at least once a second; windows then begin at such
    times. Otherwise it is right to half a frame.

    Versions that are not along time are read whole, and limit no window: see
    `_along_time`. `longest` is the number of frames of the longest utterance in each."""

    def __init__(self, crop: Crop, axes: Sequence[Axis], longest: Sequence[int]) -> None:
        self.crop = crop
        rates = [axis.exact_rate for axis in axes]
        if not any(rates):
            raise ArgumentError(
                "crop: no version is along time: vectors cannot be cropped, and events only "
                "beside frames"
            )
        for first in [number for number, rate in enumerate(rates) if rate]:
            window = crop.frames or max(1, round((crop.seconds or 0) * float(rates[first])))
            ratios = [rate / rates[first] for rate in rates]
            counts = [max(1, round(window * ratio)) if ratio else MOST_COUNTED for ratio in ratios]
            timed = _along_time(longest, rates, counts)
            if first in timed:
                break
        self._counts, self._first, self._rate = counts, first, float(rates[first])
        self.window = window
        """The length of a window, in frames of the first version along time."""
        self.length = counts[0]
        """The length of a window, in frames of the first version."""
        # A ratio of 0 puts all windows at the utterance's beginning.
        self._ratios = [
            rate / rates[first] if version in timed else Fraction(0)
            for version, rate in enumerate(rates)
        ]
        step = math.lcm(*(ratio.denominator for ratio in self._ratios))
        self._step = step if step <= rates[first] else 1

    def short(self, lengths: Sequence[Ints]) -> Ints:
        """List the utterances shorter than a window in any version, by the lengths in
        each; int64 `[short]`."""
        return np.flatnonzero(self._common(lengths) < self.window)

    def ranges(
        self, lengths: Sequence[Ints], positions: Ints, epoch: int
    ) -> tuple[list[Ints], list[Ints]]:
        """Return, for each version, the windows' first frames and numbers of frames.

        `lengths` are the utterances' in each version, in frames; `positions` are those in
        the first version."""
        places = self._firsts(self._common(lengths), positions, epoch)
        firsts = [np.rint(places * float(ratio)).astype(np.int64) for ratio in self._ratios]
        counts = [
            np.clip(length - first, 0, most)
            for length, first, most in zip(lengths, firsts, self._counts, strict=True)
        ]
        return firsts, counts

    def times(self, firsts: Sequence[Ints]) -> tuple[NDArray[np.float64], float]:
        """Return where windows with these first frames begin, in seconds, float64 `[n]`, and
        how long they are."""
        return firsts[self._first] / self._rate, self.window / self._rate

    def seconds(self, counts: Sequence[Ints]) -> NDArray[np.float64]:
        """Return how much of each utterance the windows with these numbers of frames hold,
        in seconds, float64 `[n]`."""
        return np.asarray(counts[self._first] / self._rate)

    def _firsts(self, lengths: Ints, positions: Ints, epoch: int) -> Ints:
        """Return each window's first frame."""
        if self.crop.where == "start":
            return np.zeros_like(lengths)
        num_places = np.maximum(lengths - self.window, 0) // self._step + 1
        if self.crop.where == "center":
            return num_places // 2 * self._step
        drawn = _hashes(self.crop.seed, epoch, positions) >> np.uint64(32)
        places = (drawn * num_places.astype(np.uint64)) >> np.uint64(32)
        return places.astype(np.int64) * self._step

    def _common(self, lengths: Sequence[Ints]) -> Ints:
        """Return the lengths common to all versions along time, in frames of the first."""
        timed = [
            length * ratio.denominator // ratio.numerator
            for length, ratio in zip(lengths, self._ratios, strict=True)
            if ratio
        ]
        common: Ints = np.minimum.reduce(timed)
        return common


def _along_time(
    longest: Sequence[int], rates: Sequence[Fraction], counts: Sequence[int]
) -> list[int]:
    """List the versions that are along time, by number. In these, some utterance has more
    frames than a window, or one of several frames lasts half as long as in any other."""
    seconds = [
        most / rate if most > 1 and rate else 0 for most, rate in zip(longest, rates, strict=True)
    ]
    return [
        version
        for version, rate in enumerate(rates)
        if rate and (longest[version] > counts[version] or 2 * seconds[version] >= max(seconds))
    ]


@lru_cache(4)
def _state(seed: int, epoch: int) -> np.uint64:
    return np.uint64(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])


def _hashes(seed: int, epoch: int, positions: Ints) -> NDArray[np.uint64]:
    """Return 64 well-mixed bits for each position, from a state that is drawn for each epoch."""
    return mixed(
        _state(seed, epoch)
        + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    )


def mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of each number.

    Source: splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
    generators")."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
