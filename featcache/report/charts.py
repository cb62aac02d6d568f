"""Charts as inline SVG with axes and units. Colours and fonts come from `page.css`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from featcache.report.values import Histogram, Scatter, round_step

_WIDTH, _HEIGHT = 360, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 340, 10, 172  # of what the axes enclose
_TICKS = 5
_MOST_POINTS = 400
_INSET = 4


def number(value: float, digits: int = 4) -> str:
    """Return a number for people: `0.05`, `1,200`, `−2.5e−6`."""
    text = f"{value:.{digits}g}"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


class _Scale:
    """An axis: `scale(value)` is the place of a value between two places."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._high = low, max(high, low + 1e-9)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        share = (value - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self, least: float = 0) -> list[tuple[float, str]]:
        """List the places of round values, and their labels; steps are at least `least`."""
        step = max(round_step(self._high - self._low, _TICKS), least)
        first = math.ceil(self._low / step - 1e-6)
        last = math.floor(self._high / step + 1e-6)
        values = [step * multiple for multiple in range(first, last + 1)]
        return [(self(value), number(value)) for value in values]


class _LogScale(_Scale):
    """A logarithmic axis."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        super().__init__(math.log10(low), math.log10(high), begin, end)

    def __call__(self, value: float) -> float:
        return super().__call__(math.log10(value))

    def ticks(self, least: float = 0) -> list[tuple[float, str]]:
        """List the places of powers of ten, and their labels."""
        exponents = range(round(self._low), round(self._high) + 1)
        values = [10.0**exponent for exponent in exponents[:: -(-len(exponents) // _TICKS)]]
        return [(self(value), number(value)) for value in values]


def _chart(
    title: str,
    what: str,
    x: Sequence[tuple[float, str]],
    y: Sequence[tuple[float, str]],
    units: tuple[str, str],
    marks: str,
) -> str:
    """Frame the marks of a chart with axes, ticks and units."""
    parts = []
    for at, label in y:
        parts.append(f'<path class="rule" d="M{_LEFT} {at:.1f}H{_RIGHT}"/>')
        parts.append(f'<text class="end" x="{_LEFT - 6}" y="{at + 4:.1f}">{label}</text>')
    parts.append(f'{marks}<path class="axis" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>')
    for at, label in x:
        parts.append(f'<path class="axis" d="M{at:.1f} {_BOTTOM}v4"/>')
        parts.append(f'<text x="{at:.1f}" y="{_BOTTOM + 17}">{label}</text>')
    across, up = map(escape, units)
    parts.append(f'<text x="{(_LEFT + _RIGHT) // 2}" y="{_HEIGHT - 4}">{across}</text>')
    place = f"translate(11 {(_TOP + _BOTTOM) // 2}) rotate(-90)"
    parts.append(f'<text transform="{place}">{up}</text>')
    return (
        f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}"><title>{escape(title)}</title>'
        f"<desc>{escape(what)}</desc>{''.join(parts)}</svg>"
    )


def draw_histogram(histogram: Histogram, title: str) -> str:
    """Draw a histogram as bars."""
    edges, counts = histogram.edges, histogram.counts
    scale = _LogScale if histogram.is_log else _Scale
    x = scale(edges[0], edges[-1], _LEFT, _RIGHT)
    y = _Scale(0, max(*counts, 1, 1), _BOTTOM, _TOP)
    bars = []
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            top = min(y(count), _BOTTOM - 1)  # a count of one is seen, too
            size = f'width="{max(x(right) - x(left) - 1, 0.8):.1f}" height="{_BOTTOM - top:.1f}"'
            what = f"{number(left)} to {number(right)}: {count:,}"
            bars.append(
                f'<rect class="bar" x="{x(left):.1f}" y="{top:.1f}" {size}>'
                f"<title>{what}</title></rect>"
            )
    what = f"Histogram of {sum(counts):,} utterances from {number(edges[0])} to "
    what += f"{number(edges[-1])} {histogram.unit}; median {number(histogram.median)}."
    units = histogram.unit, "utterances"
    return _chart(title, what, x.ticks(), y.ticks(least=1), units, "".join(bars))


def draw_scatter(scatter: Scatter, title: str, units: tuple[str, str]) -> str:
    """Draw a scatter as dots; marked ones name their utterance."""
    marked = [(x, y) for _, x, y in scatter.marked]
    points = np.array([*scatter.points, *marked] or [(0, 0)], np.float64)
    (_, low), (right, high) = points.min(axis=0).tolist(), points.max(axis=0).tolist()
    low = 0 if low > 0 else low  # only levels in dB are below zero
    x = _Scale(0, right, _LEFT + _INSET, _RIGHT - _INSET)
    y = _Scale(low, high, _BOTTOM - _INSET, _TOP + _INSET)
    dots = "".join(f"M{x(one):.1f} {y(other):.1f}h0" for one, other in scatter.points)
    marks = [f'<path class="dots" d="{dots}"/>']
    for id_, one, other in scatter.marked:
        label = escape(f"{id_[:80]}: {number(one)}, {number(other)}")
        at = f'cx="{x(one):.1f}" cy="{y(other):.1f}"'
        marks.append(f'<circle class="mark" {at} r="3.2"><title>{label}</title></circle>')
    what = f"{len(points):,} of {scatter.total:,} utterances as dots, {units[1]} against "
    what += f"{units[0]}; {len(marked)} are marked."
    return _chart(title, what, x.ticks(), y.ticks(), units, "".join(marks))


def draw_band(mean: Sequence[float], std: Sequence[float], title: str, unit: str) -> str:
    """Draw the mean of each dimension as a line, within a band of a standard deviation."""
    step = -(-len(mean) // _MOST_POINTS)
    numbers = range(0, len(mean), step)
    means, stds = np.array(mean)[::step], np.array(std)[::step]
    x = _Scale(0, max(len(mean) - 1, 1), _LEFT, _RIGHT)
    y = _Scale(float((means - stds).min()), float((means + stds).max()), _BOTTOM - _INSET, _TOP)

    def line(values: Sequence[float]) -> list[str]:
        places = zip(numbers, values, strict=True)
        return [f"{x(one):.1f} {y(other):.1f}" for one, other in places]

    band = "L".join([*line((means + stds).tolist()), *line((means - stds).tolist())[::-1]])
    marks = f'<path class="band" d="M{band}Z"/>'
    marks += f'<path class="line" d="M{"L".join(line(means.tolist()))}"/>'
    what = f"Mean of {len(mean):,} dimensions from {number(min(mean))} to {number(max(mean))}, "
    what += "within a band of one standard deviation."
    return _chart(title, what, x.ticks(least=1), y.ticks(), ("dimension", unit), marks)
