"""Histograms and scatters: many values as the few numbers that a chart draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.strings import Strings

_BINS = 32
_DECADES = 6
_PER_DECADE = 4
_POINTS = 2000
_TEXTS_AT_ONCE = 1 << 16

Values = NDArray[Any]


@dataclass(frozen=True)
class Histogram:
    """Counts of values in bins. Values below the first edge count in the first bin."""

    name: str
    unit: str
    edges: list[float]
    counts: list[int]
    minimum: float
    median: float
    maximum: float
    is_log: bool = False
    """True if each bin is larger than the last by the same factor."""
    zeros: int = 0
    """The values that are zero, which no bin of a logarithmic histogram counts."""
    beyond: int = 0
    """The values above the last edge."""


@dataclass(frozen=True)
class Marked:
    """A point of a scatter that has a name."""

    id: str
    x: float
    y: float


@dataclass(frozen=True)
class Scatter:
    """Points of utterances: some drawn at random, and all that are marked."""

    points: list[tuple[float, float]]
    marked: list[Marked]
    total: int
    """The number of points to draw from."""


def round_step(span: float, count: int) -> float:
    """Return the step of 1, 2 or 5 times a power of ten that cuts a span into at most so
    many parts."""
    if not span > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    for factor in (1, 2, 5, 10, 20):
        if span / (factor * power) <= count:
            return factor * power
    return 50 * power


def by_steps(name: str, unit: str, values: Values) -> Histogram:
    """Count values in bins of a round width. If a few values are far above all others, the
    bins end before them."""
    if not len(values):
        return Histogram(name, unit, [0.0, 1.0], [0], 0.0, 0.0, 0.0)
    low, high = float(values.min()), float(values.max())
    most = float(np.percentile(values, 99.5))
    if low >= 0 and 0 < 3 * most < high:
        high = most
    step = round_step(high - low, _BINS)
    first = math.floor(low / step + 1e-9)
    count = max(1, math.ceil(high / step - 1e-6) - first)
    edges = (first + np.arange(count + 1)) * step
    # an edge may be rounded below the highest value
    edges[-1] = max(edges[-1], high)
    counts, _ = np.histogram(values.astype(np.float64), edges)
    beyond = int((values > edges[-1]).sum())
    return Histogram(name, unit, edges.tolist(), counts.tolist(), *_middle(values), beyond=beyond)


def by_decades(name: str, unit: str, values: Values) -> Histogram:
    """Count values of 0 or more in bins that are multiples of each other; zeros apart."""
    positive = values[values > 0]
    zeros = len(values) - len(positive)
    if not len(positive):
        return Histogram(name, unit, [0.1, 1.0], [0], *_middle(values), is_log=True, zeros=zeros)
    top = math.ceil(math.log10(float(positive.max())) - 1e-6)
    bottom = math.floor(math.log10(float(positive.min())) + 1e-6)
    bottom = min(top - 1, max(bottom, top - _DECADES))
    edges = np.logspace(bottom, top, (top - bottom) * _PER_DECADE + 1)
    counts, _ = np.histogram(positive.clip(edges[0], edges[-1]), edges)
    columns = edges.tolist(), counts.tolist()
    return Histogram(name, unit, *columns, *_middle(values), is_log=True, zeros=zeros)


def _middle(values: Values) -> tuple[float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0
    return float(values.min()), float(np.median(values)), float(values.max())


def scatter(x: Values, y: Values, marked: NDArray[np.int64], ids: Strings, seed: int) -> Scatter:
    """Draw points at random, the same for the same seed; those at `marked` are always
    among them."""
    others = np.setdiff1d(np.arange(len(x)), marked)
    count = max(0, min(_POINTS - len(marked), len(others)))
    drawn = np.random.default_rng(seed).choice(others, count, replace=False)
    points = zip(x[drawn].tolist(), y[drawn].tolist(), strict=True)
    named = zip(ids.texts(marked), x[marked].tolist(), y[marked].tolist(), strict=True)
    return Scatter([*points], [Marked(*point) for point in named], len(x))


def characters_of(texts: Strings) -> NDArray[np.int64]:
    """Count the characters of each text, int64 `[n]`."""
    counts = np.empty(len(texts), np.int64)
    for first in range(0, len(texts), _TEXTS_AT_ONCE):
        offsets = texts.offsets[first : first + _TEXTS_AT_ONCE + 1].astype(np.int64)
        data = texts.blob[offsets[0] : offsets[-1]]
        begins = np.zeros(len(data) + 1, np.int64)
        np.cumsum(data & 0xC0 != 0x80, out=begins[1:])
        counts[first : first + _TEXTS_AT_ONCE] = np.diff(begins[offsets - offsets[0]])
    return counts
