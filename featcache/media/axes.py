"""Axes of charts and pictures: round numbers, scales with ticks, and the frame around what is
drawn, as SVG. In a page, a style sheet chooses colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_TICKS = 5

Tick = tuple[float, str]
"""A place on an axis, and its label."""


class Box(NamedTuple):
    """The size of a drawing, and the edges of what its axes enclose."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int


CARD = Box(360, 210, 48, 340, 10, 172)


class Text(NamedTuple):
    """A text at the place of its baseline."""

    x: float
    y: float
    text: str
    anchor: str = "middle"
    is_upright: bool = False
    colour: str = ""


def round_step(span: float, count: int) -> float:
    """Return a step of 1, 2 or 5 times a power of ten, so that a span has at most so many
    steps."""
    if not span > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    unit = count * power * 1.001
    return next(step * power for step in (1, 2, 5, 10) if span <= step * unit)


def number(value: float, digits: int = 4) -> str:
    """Return a number for people: `0.05`, `1,200`, `−2.5e−6`."""
    text = f"{value:.{digits}g}"
    if value and math.isfinite(value) and not 1e-4 <= abs(value) < 1e6:
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


def texts_of(box: Box, x: Sequence[Tick], y: Sequence[Tick], units: tuple[str, str]) -> list[Text]:
    """List the labels of two axes' ticks, and their units."""
    across, up = units
    texts = [Text(at, box.bottom + 17, label) for at, label in x]
    texts += [Text(box.left - 6, at + 4, label, "end") for at, label in y]
    texts.append(Text((box.left + box.right) // 2, box.height - 4, across))
    return [*texts, Text(14, (box.top + box.bottom) // 2, up, is_upright=True)]


def draw_frame(
    title: str,
    what: str,
    x: Sequence[Tick],
    y: Sequence[Tick],
    units: tuple[str, str],
    marks: str,
    box: Box = CARD,
    more: Sequence[Text] = (),
) -> str:
    """Frame marks with axes, ticks and units, and add more texts."""
    line = 'stroke="#888" d='
    parts = [f'<path class="rule" {line}"M{box.left - 4} {at:.1f}H{box.right}"/>' for at, _ in y]
    parts.append(f'{marks}<path class="axis" {line}"M{box.left} {box.bottom}H{box.right}"/>')
    parts += [f'<path class="axis" {line}"M{at:.1f} {box.bottom}v4"/>' for at, _ in x]
    for text in [*texts_of(box, x, y, units), *more]:
        place = f'text-anchor="{text.anchor}" x="{text.x:.1f}" y="{text.y:.1f}"'
        if text.is_upright:
            place += f' transform="rotate(-90 {text.x:.1f} {text.y:.1f})"'
        if text.colour:
            place += f' fill="{text.colour}"'
        parts.append(f"<text {place}>{escape(text.text)}</text>")
    return (
        f'<svg role="img" viewBox="0 0 {box.width} {box.height}"><title>{escape(title)}</title>'
        f"<desc>{escape(what)}</desc>{''.join(parts)}</svg>"
    )
