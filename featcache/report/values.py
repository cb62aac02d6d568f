"""Histograms and scatters: many values as the few numbers that a chart draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.manifest.strings import Strings
from featcache.media.axes import round_step

_BINS = 32
_DECADES = 6
_POINTS = 2000

Values = NDArray[Any]


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins. Values beyond an end count in the bin there."""

    name: str
    unit: str
    edges: list[float]
    counts: list[int]
    minimum: float
    """The least value; NaN, as the median and the maximum, if there are no values."""
    median: float
    maximum: float
    zeros: int = 0
    """The values that are zero, which no bin of a logarithmic histogram counts."""
    is_log: bool = False
    """True if each bin is larger than the last by the same factor."""


@dataclass(frozen=True)
class Scatter:
    """Points of utterances: some drawn at random, and all that are marked."""

    total: int
    """The number of utterances."""
    points: list[tuple[float, float]]
    marked: list[tuple[str, float, float]]
    """The id of each, and its point."""


def by_steps(name: str, unit: str, values: Values) -> Histogram:
    """Count values in bins of a round width. If a few values are far above all others, the
    bins end before them."""
    low, median, high = _middle(values)
    if not len(values):
        return Histogram(name, unit, [0.0, 1.0], [0], low, median, high)
    end = high
    if low >= 0:
        most = float(np.percentile(values, 99.5))
        end = most if 0 < 3 * most < high else high
    step = round_step(end - low, _BINS)
    first, last = math.floor(low / step + 1e-6), math.ceil(end / step - 1e-6)
    edges = np.arange(first, max(last, first + 1) + 1) * step
    return Histogram(name, unit, edges.tolist(), _count(values, edges), low, median, high)


def by_decades(name: str, unit: str, values: Values) -> Histogram:
    """Count values of 0 or more in bins that are multiples of each other; zeros apart."""
    positive = values[values > 0]
    zeros = len(values) - len(positive)
    top, bottom = 0, -1
    if len(positive):
        top = math.ceil(math.log10(float(positive.max())) - 1e-6)
        bottom = math.floor(math.log10(float(positive.min())) + 1e-6)
        bottom = min(top - 1, max(bottom, top - _DECADES))
    edges = np.logspace(bottom, top, (top - bottom) * 4 + 1)
    counts = _count(positive, edges)
    return Histogram(name, unit, edges.tolist(), counts, *_middle(values), zeros, is_log=True)


def _count(values: Values, edges: Values) -> list[int]:
    within = values.astype(np.float64).clip(edges[0], edges[-1])
    counts: list[int] = np.histogram(within, edges)[0].tolist()
    return counts


def _middle(values: Values) -> tuple[float, float, float]:
    if not len(values):
        return math.nan, math.nan, math.nan
    return float(values.min()), float(np.median(values)), float(values.max())


def scatter(x: Values, y: Values, marked: NDArray[np.int64], ids: Strings, seed: int) -> Scatter:
    """Draw points at random, the same for the same seed; those at `marked` are always
    among them."""
    others = np.setdiff1d(np.arange(len(x)), marked)
    count = min(_POINTS - len(marked), len(others))
    drawn = np.random.default_rng(seed).choice(others, count, replace=False)
    points = zip(x[drawn].tolist(), y[drawn].tolist(), strict=True)
    named = zip(ids.texts(marked), x[marked].tolist(), y[marked].tolist(), strict=True)
    return Scatter(len(x), [*points], [*named])


def characters_of(texts: Strings) -> NDArray[np.int64]:
    """Count the characters of each text, int64 `[n]`."""
    offsets = texts.offsets.astype(np.int64)
    begins_character = texts.blob[: offsets[-1]] & 0xC0 != 0x80
    is_filled = np.diff(offsets) > 0
    starts = offsets[:-1][is_filled]
    counts = np.zeros(len(texts), np.int64)
    counts[is_filled] = np.add.reduceat(begins_character, starts, dtype=np.int64)
    return counts
