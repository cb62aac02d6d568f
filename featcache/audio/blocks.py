"""Samples in blocks, so that a long recording is never in memory whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
"""Samples, `[num_samples]` or `[num_samples, channels]`."""

_GROWTH = 1.25


class Joined:
    """Joins blocks into one array, of about `expected` samples. A single block is not
    copied."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self._array = np.empty(0, np.float32)
        self._filled = 0
        self._is_own = False  # if not, it is the caller's block

    def add(self, block: Samples) -> None:
        """Append a block, which must not change afterwards."""
        filled = self._filled + len(block)
        if not self._filled:
            self._array = block
        else:
            self._make_room(filled)
            self._array[self._filled : filled] = block
        self._filled = filled

    def finish(self) -> Samples:
        """Return all samples, contiguous."""
        if self._is_own:
            self._resize(self._filled)
        return self._array

    def _make_room(self, num_samples: int) -> None:
        if num_samples <= len(self._array):
            return
        room = max(self._expected, int(num_samples * _GROWTH))
        if self._is_own:
            self._resize(room)
            return
        first_block = self._array
        self._array = np.empty((room, *first_block.shape[1:]), np.float32)
        self._array[: len(first_block)] = first_block
        self._is_own = True

    def _resize(self, num_samples: int) -> None:
        # in place: the system moves pages
        self._array.resize((num_samples, *self._array.shape[1:]), refcheck=False)


class Collector(Protocol):
    """Takes the samples of a segment while it is decoded."""

    def add(self, samples: Samples, /) -> None:
        """Take a block, which must not change afterwards."""

    def finish(self) -> Any:
        """Return the result."""


class Segment:
    """Counts and checks the samples of a segment before its collector gets them. `wait` is
    called between blocks, and may raise to give up."""

    def __init__(
        self,
        collector: Collector,
        is_float: bool,
        most_samples: float,
        wait: Callable[[float], object],
    ) -> None:
        self.collector = collector
        self._is_float = is_float
        self._most_samples = most_samples
        self._wait = wait
        self.num_samples = 0
        self.not_finite: int | None = None
        """The first sample that is NaN or infinite, from the segment's start."""

    @property
    def is_full(self) -> bool:
        """True if it has more than `most_samples`."""
        return self.num_samples > self._most_samples

    def add(self, samples: Samples) -> None:
        """Take a block, `[num_samples, channels]`."""
        if self.num_samples:
            self._wait(0.0)
        if self._is_float and self.not_finite is None and not np.isfinite(samples).all():
            bad = int(np.isfinite(samples).all(axis=1).argmin())
            self.not_finite = self.num_samples + bad
        self.num_samples += len(samples)
        self.collector.add(samples)
