"""Charts: many values as a few numbers, and these as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.manifest.strings import Strings
from featcache.media.axes import CARD, LogScale, Scale, draw_frame, number, round_step

_BINS = 32
_DECADES = 6
_POINTS = 2000
_MOST_POINTS = 400
_INSET = 4

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
    if not len(values):
        return _histogram(name, unit, values, np.array([0.0, 1.0]))
    low, end = float(values.min()), float(values.max())
    if low >= 0:
        most = float(np.percentile(values, 99.5))
        if 0 < 3 * most < end:
            end = most
    step = round_step(end - low, _BINS)
    first, last = math.floor(low / step + 1e-6), math.ceil(end / step - 1e-6)
    edges = np.arange(first, max(last, first + 1) + 1) * step
    return _histogram(name, unit, values, edges)


def by_decades(name: str, unit: str, values: Values) -> Histogram:
    """Count values of 0 or more in bins that are multiples of each other; zeros apart."""
    positive = values[values > 0]
    top, bottom = 0, -1
    if len(positive):
        top = math.ceil(math.log10(float(positive.max())) - 1e-6)
        bottom = math.floor(math.log10(float(positive.min())) + 1e-6)
        bottom = min(top - 1, max(bottom, top - _DECADES))
    edges = np.logspace(bottom, top, (top - bottom) * 4 + 1)
    return _histogram(name, unit, values, edges, is_log=True)


def _histogram(
    name: str, unit: str, values: Values, edges: Values, is_log: bool = False
) -> Histogram:
    """Count values between edges; with `is_log`, zeros apart."""
    counted = values
    if is_log:
        counted = values[values > 0]
    within = counted.astype(np.float64).clip(edges[0], edges[-1])
    counts: list[int] = np.histogram(within, edges)[0].tolist()
    low = median = high = math.nan
    if len(values):
        low, median, high = float(values.min()), float(np.median(values)), float(values.max())
    zeros = len(values) - len(counted)
    return Histogram(name, unit, edges.tolist(), counts, low, median, high, zeros, is_log)


def scatter(x: Values, y: Values, marked: NDArray[np.int64], ids: Strings, seed: int) -> Scatter:
    """Draw points at random, the same for the same seed; those at `marked` are always
    among them."""
    others = np.setdiff1d(np.arange(len(x)), marked)
    count = min(_POINTS - len(marked), len(others))
    drawn = np.random.default_rng(seed).choice(others, count, replace=False)
    points = zip(x[drawn].tolist(), y[drawn].tolist(), strict=True)
    named = zip(ids.texts(marked), x[marked].tolist(), y[marked].tolist(), strict=True)
    return Scatter(len(x), [*points], [*named])


def draw_histogram(histogram: Histogram, title: str) -> str:
    """Draw a histogram as bars."""
    edges, counts = histogram.edges, histogram.counts
    scale = LogScale if histogram.is_log else Scale
    x = scale(edges[0], edges[-1], CARD.left, CARD.right)
    y = Scale(0, max(*counts, 1, 1), CARD.bottom, CARD.top)
    bars = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            top = min(y(count), CARD.bottom - 1)  # a count of one is seen, too
            width, height = max(x(right) - x(left) - 1, 0.8), CARD.bottom - top
            size = f'width="{width:.1f}" height="{height:.1f}"'
            what = f"{number(left)} to {number(right)}: {count:,}"
            bars.append(
                f'<rect class="bar" x="{x(left):.1f}" y="{top:.1f}" {size}>'
                f"<title>{what}</title></rect>"
            )
    what = f"Histogram of {sum(counts):,} utterances from {number(edges[0])} to "
    what += f"{number(edges[-1])} {histogram.unit}; median {number(histogram.median)}."
    units = histogram.unit, "utterances"
    return draw_frame(title, what, x.ticks(), y.ticks(least=1), units, "".join(bars))


def draw_scatter(scatter: Scatter, title: str, units: tuple[str, str]) -> str:
    """Draw a scatter as dots; marked ones name their utterance."""
    marked = [(x, y) for _, x, y in scatter.marked]
    points = np.array([*scatter.points, *marked] or [(0, 0)], np.float64)
    right, high = points.max(axis=0).tolist()
    low = min(0, float(points[:, 1].min()))  # only levels in dB are below zero
    x = Scale(0, right, CARD.left + _INSET, CARD.right - _INSET)
    y = Scale(low, high, CARD.bottom - _INSET, CARD.top + _INSET)
    dots = "".join(f"M{x(one):.1f} {y(other):.1f}h0" for one, other in scatter.points)
    marks = [f'<path class="dots" d="{dots}"/>']
    for id_, one, other in scatter.marked:
        label = escape(f"{id_[:80]}: {number(one)}, {number(other)}")
        at = f'cx="{x(one):.1f}" cy="{y(other):.1f}"'
        marks.append(f'<circle class="mark" {at} r="3.2"><title>{label}</title></circle>')
    what = f"{len(points):,} of {scatter.total:,} utterances as dots, {units[1]} against "
    what += f"{units[0]}; {len(marked)} are marked."
    return draw_frame(title, what, x.ticks(), y.ticks(), units, "".join(marks))


def draw_band(
    mean: Sequence[float], std: Sequence[float], title: str, unit: str, other: Sequence[float] = ()
) -> str:
    """Draw the mean of each dimension as a line, within a band of a standard deviation; and
    the means of another version as a line alone."""
    step = -(-len(mean) // _MOST_POINTS)
    numbers = range(0, len(mean), step)
    means, stds = np.array(mean)[::step], np.array(std)[::step]
    others = np.array(other)[::step]
    low = min((means - stds).min(), others.min(initial=np.inf))
    high = max((means + stds).max(), others.max(initial=-np.inf))
    x = Scale(0, max(len(mean) - 1, 1), CARD.left, CARD.right)
    y = Scale(float(low), float(high), CARD.bottom - _INSET, CARD.top)

    def line(values: Sequence[float]) -> list[str]:
        return [f"{x(at):.1f} {y(value):.1f}" for at, value in zip(numbers, values, strict=True)]

    band = "L".join([*line((means + stds).tolist()), *line((means - stds).tolist())[::-1]])
    marks = f'<path class="band" d="M{band}Z"/>'
    marks += f'<path class="line" d="M{"L".join(line(means.tolist()))}"/>'
    if len(others):
        marks += f'<path class="line other" d="M{"L".join(line(others.tolist()))}"/>'
    what = f"Mean of {len(mean):,} dimensions from {number(min(mean))} to {number(max(mean))}, "
    what += "within a band of one standard deviation."
    return draw_frame(title, what, x.ticks(least=1), y.ticks(), ("dimension", unit), marks)
