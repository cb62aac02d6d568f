"""Windows of a fixed length in utterances, for training on crops: drawn anew in each epoch, the same on every machine.

The place of an utterance's window is a hash of the seed, the epoch and the utterance's position: it does not depend on
the rest of the batch, on the number of ranks or workers, or on whether training was resumed in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from featcache.arguments import is_number, require_int
from featcache.errors import ArgumentError

__all__ = ["Crop"]

Where = Literal["random", "start", "center"]
Short = Literal["pad", "drop", "error"]


@dataclass(frozen=True)
class Crop:
    """A window in each utterance.

    Attributes:
        frames: length of the window, in frames of the dataset's first version.
        seconds: length of the window in seconds; give either this or `frames`.
        where: the place of the window: random, at the start, or in the center.
        short: what to do with utterances shorter than the window: `pad` keeps them, padded as in any batch; `drop`
            leaves them out of the dataset; `error` raises an error.
        seed: seed of the random windows; not negative.

    Raises:
        ArgumentError: the arguments contradict each other, or one is out of range.
    """

    frames: int | None = None
    seconds: float | None = None
    where: Where = "random"
    short: Short = "pad"
    seed: int = 0

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
        """Where the windows begin.

        Args:
            lengths: of the utterances, in frames; int64 `[n]`.
            window: frames of a window.
            positions: of the utterances, which decide what is drawn for them; int64 `[n]`.
            epoch: another one has other windows.
            step: windows begin at multiples of it.

        Returns:
            The first frame of each; 0 where the utterance is no longer than the window; int64 `[n]`.
        """
        places = np.maximum(lengths - window, 0) // step + 1  # that a window may begin at
        if self.where == "start":
            return np.zeros_like(lengths)
        if self.where == "center":
            return places // 2 * step
        drawn = _hashes(self.seed, epoch, positions) >> np.uint64(32)
        return ((drawn * places.astype(np.uint64)) >> np.uint64(32)).astype(np.int64) * step


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
