"""Charts as inline SVG: each a figure with a title, axes and units, readable in both themes.

Colours and fonts come from `page.css`, by classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from featcache.report.values import Histogram, Scatter, round_step

WIDTH, HEIGHT = 360, 210
"""The size of a chart in its own units."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 340, 10, 172
_TICKS = 5
_MOST_POINTS = 400


def number(value: float, digits: int = 4) -> str:
    """Return a number for an axis: `0.05`, `1,200`, `2.5`."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{digits}g}"
    return text.replace("-", "\N{MINUS SIGN}")


class Scale:
    """An axis: positions of values between two ends, and its ticks."""

    def __init__(
        self,
        low: float,
        high: float,
        begin: float,
        end: float,
        *,
        is_log: bool = False,
        is_whole: bool = False,
    ) -> None:
        self.is_log, self._is_whole = is_log, is_whole
        self._low, self._high = self._map(low), self._map(high)
        if not self._high > self._low:
            self._high = self._low + 1
        self._begin, self._end = begin, end

    def _map(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def __call__(self, value: float) -> float:
        share = (self._map(value) - self._low) / (self._high - self._low)
        return self._begin + min(max(share, 0.0), 1.0) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        """List round values along the axis."""
        if self.is_log:
            exponents = range(math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9) + 1)
            every = -(-len(exponents) // _TICKS)
            return [10.0**exponent for exponent in exponents[::every]]
        step = round_step(self._high - self._low, _TICKS)
        if self._is_whole:
            step = max(step, 1.0)
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [step * multiple for multiple in range(first, last + 1)]


def _chart(title: str, what: str, x: Scale, y: Scale, units: tuple[str, str], marks: str) -> str:
    """Frame the marks of a chart with axes, ticks and units."""
    parts = []
    for value in y.ticks():
        at = y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{number(value)}</text>')
    parts.append(marks)
    parts.append(f'<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>')
    for value in x.ticks():
        at = x(value)
        parts.append(f'<path class="axis" d="M{at:.1f} {_BOTTOM}v4"/>')
        parts.append(f'<text class="mid" x="{at:.1f}" y="{_BOTTOM + 17}">{number(value)}</text>')
    middle = (_LEFT + _RIGHT) / 2
    unit, other = map(escape, units)
    parts.append(f'<text class="mid unit" x="{middle}" y="{HEIGHT - 4}">{unit}</text>')
    half = (_TOP + _BOTTOM) / 2
    turned = f'transform="rotate(-90 11 {half})"'
    parts.append(f'<text class="mid unit" x="11" y="{half}" {turned}>{other}</text>')
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(title)}</title>'
        f"<desc>{escape(what)}</desc>{''.join(parts)}</svg>"
    )


def draw_histogram(histogram: Histogram, title: str) -> str:
    """Draw a histogram as bars."""
    edges, counts = histogram.edges, histogram.counts
    x = Scale(edges[0], edges[-1], _LEFT, _RIGHT, is_log=histogram.is_log)
    y = Scale(0, max([*counts, 1]), _BOTTOM, _TOP, is_whole=True)
    bars = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if not count:
            continue
        begin, end = x(left), x(right)
        # even a count of one is seen
        top = min(y(count), _BOTTOM - 1)
        width = max(end - begin - 1, 0.8)
        bars.append(
            f'<rect class="bar" x="{begin:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{_BOTTOM - top:.1f}"><title>{number(left)} to {number(right)}: '
            f"{count:,}</title></rect>"
        )
    what = f"Histogram of {sum(counts):,} values in {len(counts)} bins from {number(edges[0])} to "
    what += f"{number(edges[-1])} {histogram.unit}; median {number(histogram.median)}."
    return _chart(title, what, x, y, (histogram.unit, "utterances"), "".join(bars))


def draw_scatter(scatter: Scatter, title: str, units: tuple[str, str]) -> str:
    """Draw a scatter as dots; marked ones name their utterance."""
    marked = scatter.marked
    points = np.array([*scatter.points, *((one.x, one.y) for one in marked)])
    points = points.reshape(-1, 2)
    if not len(points):
        points = np.zeros((1, 2))
    (left, low), (right, high) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    x = Scale(min(left, 0), right, _LEFT + 4, _RIGHT - 4)
    y = Scale(low if low < 0 else 0, high, _BOTTOM - 4, _TOP + 4)
    dots = "".join(f"M{x(one):.1f} {y(other):.1f}h0" for one, other in scatter.points)
    marks = [f'<path class="dots" d="{dots}"/>']
    for one in marked:
        label = escape(f"{one.id[:80]}: {number(one.x)}, {number(one.y)}")
        at = f'cx="{x(one.x):.1f}" cy="{y(one.y):.1f}"'
        marks.append(f'<circle class="mark" {at} r="3.2"><title>{label}</title></circle>')
    what = f"{len(scatter.points) + len(marked):,} of {scatter.total:,} utterances as dots: "
    what += f"{units[1]} against {units[0]}; {len(marked)} are marked."
    return _chart(title, what, x, y, units, "".join(marks))


def draw_band(mean: Sequence[float], std: Sequence[float], title: str, unit: str) -> str:
    """Draw the mean of each dimension as a line, within a band of a standard deviation."""
    means, stds = np.asarray(mean), np.asarray(std)
    step = -(-len(means) // _MOST_POINTS)
    numbers = np.arange(0, len(means), step)
    lower, upper = (means - stds)[::step], (means + stds)[::step]
    x = Scale(0, max(len(means) - 1, 1), _LEFT, _RIGHT, is_whole=True)
    y = Scale(float(lower.min()), float(upper.max()), _BOTTOM - 4, _TOP)

    def line(xs: Sequence[int], ys: Sequence[float]) -> str:
        places = zip(xs, ys, strict=True)
        return "L".join(f"{x(one):.1f} {y(other):.1f}" for one, other in places)

    there, back = numbers.tolist(), numbers[::-1].tolist()
    band = f"M{line(there, upper.tolist())}L{line(back, lower[::-1].tolist())}Z"
    marks = f'<path class="band" d="{band}"/>'
    marks += f'<path class="line" d="M{line(there, means[::step].tolist())}"/>'
    what = f"Mean of {len(means):,} dimensions, from {number(float(means.min()))} to "
    what += f"{number(float(means.max()))}, within a band of one standard deviation."
    return _chart(title, what, x, y, ("dimension", unit), marks)


def draw_bars(values: Sequence[float], title: str, unit: str) -> str:
    """Draw one bar for each number, from 0 to 1."""
    x = Scale(-0.5, len(values) - 0.5, _LEFT, _RIGHT, is_whole=True)
    y = Scale(0, 1, _BOTTOM, _TOP)
    bars = []
    for place, value in enumerate(values):
        begin, end = x(place - 0.4), x(place + 0.4)
        size = f'width="{end - begin:.1f}" height="{_BOTTOM - y(value):.1f}"'
        bars.append(
            f'<rect class="bar" x="{begin:.1f}" y="{y(value):.1f}" {size}>'
            f"<title>{place}: {number(value)}</title></rect>"
        )
    what = f"{len(values)} bars from {number(min(values))} to {number(max(values))}."
    return _chart(title, what, x, y, ("codebook", unit), "".join(bars))
