"""Charts as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from featcache.media.axes import CARD, LogScale, Scale, draw_frame, number
from featcache.report.values import Histogram, Scatter

_MOST_POINTS = 400
_INSET = 4


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
        places = zip(numbers, values, strict=True)
        return [f"{x(one):.1f} {y(other):.1f}" for one, other in places]

    band = "L".join([*line((means + stds).tolist()), *line((means - stds).tolist())[::-1]])
    marks = f'<path class="band" d="M{band}Z"/>'
    marks += f'<path class="line" d="M{"L".join(line(means.tolist()))}"/>'
    if len(others):
        marks += f'<path class="line other" d="M{"L".join(line(others.tolist()))}"/>'
    what = f"Mean of {len(mean):,} dimensions from {number(min(mean))} to {number(max(mean))}, "
    what += "within a band of one standard deviation."
    return draw_frame(title, what, x.ticks(least=1), y.ticks(), ("dimension", unit), marks)
