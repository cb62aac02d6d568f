"""Axes of charts and pictures: round numbers, scales with ticks, and the frame around them, as
SVG. Colours and fonts come from a style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT = 360, 210
LEFT, RIGHT, TOP, BOTTOM = 48, 340, 10, 172
"""The edges of what the axes enclose."""

_TICKS = 5

Tick = tuple[float, str]
"""A place on an axis, and its label."""


def round_step(span: float, count: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, of which a span has at most so many."""
    if not span > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    return next(step * power for step in (1, 2, 5, 10) if span <= count * step * power * 1.001)


def number(value: float, digits: int = 4) -> str:
    """Return a number for people: `0.05`, `1,200`, `−2.5e−6`."""
    text = f"{value:.{digits}g}"
    if value and not 1e-4 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    elif abs(value) >= 1000:
        text = f"{value:,.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


class Scale:
    """An axis: `scale(value)` is the place of a value between two places."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self._low, self._high = low, max(high, low + 1e-9)
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        """Return the place of a value."""
        share = (value - self._low) / (self._high - self._low)
        return self._begin + share * (self._end - self._begin)

    def ticks(self, least: float = 0) -> list[Tick]:
        """List the places of round values, and their labels; steps are at least `least`."""
        step = max(round_step(self._high - self._low, _TICKS), least)
        first = math.ceil(self._low / step - 1e-6)
        last = math.floor(self._high / step + 1e-6)
        values = [step * multiple for multiple in range(first, last + 1)]
        return [(self(value), number(value)) for value in values]


class LogScale(Scale):
    """A logarithmic axis."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        super().__init__(math.log10(low), math.log10(high), begin, end)

    def __call__(self, value: float) -> float:
        """Return the place of a value above 0."""
        return super().__call__(math.log10(value))

    def ticks(self, least: float = 0) -> list[Tick]:
        """List the places of powers of ten, and their labels."""
        exponents = range(round(self._low), round(self._high) + 1)
        values = [10.0**exponent for exponent in exponents[:: -(-len(exponents) // _TICKS)]]
        return [(self(value), number(value)) for value in values]


def draw_frame(
    title: str, what: str, x: Sequence[Tick], y: Sequence[Tick], units: tuple[str, str], marks: str
) -> str:
    """Frame the marks of a chart with axes, ticks and units."""
    parts = []
    for at, label in y:
        parts.append(f'<path class="rule" d="M{LEFT} {at:.1f}H{RIGHT}"/>')
        parts.append(f'<text class="end" x="{LEFT - 6}" y="{at + 4:.1f}">{label}</text>')
    parts.append(f'{marks}<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>')
    for at, label in x:
        parts.append(f'<path class="axis" d="M{at:.1f} {BOTTOM}v4"/>')
        parts.append(f'<text x="{at:.1f}" y="{BOTTOM + 17}">{label}</text>')
    across, up = map(escape, units)
    parts.append(f'<text x="{(LEFT + RIGHT) // 2}" y="{HEIGHT - 4}">{across}</text>')
    place = f"translate(11 {(TOP + BOTTOM) // 2}) rotate(-90)"
    parts.append(f'<text transform="{place}">{up}</text>')
    return (
        f'<svg role="img" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(title)}</title>'
        f"<desc>{escape(what)}</desc>{''.join(parts)}</svg>"
    )
