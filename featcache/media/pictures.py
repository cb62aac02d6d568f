"""Pictures of one utterance's features: spectrograms, maps of codes, bars of a vector, events
in time. A picture is a raster with axes, as SVG, as PNG, or as the lines of a terminal."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.errors import MissingDependencyError
from featcache.media.axes import Box, Scale, Text, Tick, draw_frame, number, texts_of
from featcache.spec import FeatureSpec

Shades = NDArray[np.uint8]
"""An image, `[rows, columns]`, from the top left, of the palette's shades from 0 on."""

SHADES = 64
_COLOURS = (
    (8, 6, 30),
    (72, 18, 106),
    (150, 42, 112),
    (222, 90, 82),
    (250, 164, 96),
    (252, 244, 200),
)
"""The palette, from low to high values; other shades lie between these."""

_ANCHORS = np.linspace(0, 1, len(_COLOURS))
_LEVELS = np.linspace(0, 1, SHADES)
PALETTE = np.stack(
    [np.interp(_LEVELS, _ANCHORS, channel) for channel in zip(*_COLOURS, strict=True)], axis=1
).round()
"""The colours of the shades, 0 to 255, `[SHADES, 3]`."""

_LOWEST, _HIGHEST = 2, 99.5
"""The percentiles of values that are darkest and brightest."""

_CURVE_ROWS = 80
_BAR_SHADE = SHADES * 3 // 4

CERTAIN = 0.5
"""The confidence from which a frame is voiced, and the probability from which it is speech."""

_EVENT_SHADES = range(12, 40)
"""The shades of events, on which white text can be read."""

_LANE_ROWS, _MOST_LANES = 8, 32

TERMINAL_ROWS = 40
"""The most rows of a picture in a terminal, two in a line."""

_LONGEST = 100  # characters of a text
_MOST_LABELS = 200


@dataclass(frozen=True)
class Axis:
    """An axis of a picture, from one edge to the other."""

    unit: str
    low: float
    """The value at the left, or at the bottom."""
    high: float
    """The value at the right, or at the top."""
    is_counted: bool = False
    """True if values number whole rows or columns, and stand at the middle of each."""

    def ticks(self, begin: float, end: float) -> list[Tick]:
        """List the places of ticks between two places, and their labels."""
        low, high = self.low, self.high
        if low == high:  # there is no scale
            return []
        if low > high:  # it counts from the top down, as codebooks do
            low, high, begin, end = high, low, end, begin
        scale = Scale(low, high, begin, end)
        if not self.is_counted:
            return scale.ticks()
        half = (scale(1) - scale(0)) / 2
        ticks = [(place + half, label) for place, label in scale.ticks(least=1)]
        return [tick for tick in ticks if min(begin, end) < tick[0] < max(begin, end)]


@dataclass(frozen=True)
class Picture:
    """A raster with axes."""

    title: str
    shades: Shades
    across: Axis
    up: Axis
    span: tuple[str, str] | None = None
    """The values of the darkest and of the brightest shade, for people."""
    labels: Sequence[Text] = field(default_factory=list)

    def encode(self, suffix: str) -> bytes:
        """Encode a file of this suffix, `.svg` or `.png`. Raises MissingDependencyError for a
        PNG without Pillow."""
        return self.as_svg().encode() if suffix == ".svg" else _as_png(self)

    def as_svg(self) -> str:
        """Return the picture as SVG, which can stand alone or in a page."""
        marks = _image(self.shades, _BOX.left, _BOX.right - _BOX.left)
        if self.span is not None:
            marks += _image(_LEGEND, _BOX.right + 16, 14)
        what = "; ".join(self.legend())
        drawn = draw_frame(self.title, what, *self.axes(), marks, _BOX, self.texts())
        return drawn.replace("<svg", f"<svg {_STANDALONE}", 1)

    def axes(self) -> tuple[list[Tick], list[Tick], tuple[str, str]]:
        """List the ticks of both axes, and their units."""
        across = self.across.ticks(_BOX.left, _BOX.right)
        up = self.up.ticks(_BOX.bottom, _BOX.top)
        return across, up, (self.across.unit, self.up.unit)

    def texts(self) -> list[Text]:
        """List the title, the values of the legend, and the labels."""
        texts = [Text(_BOX.left, 22, self.title, "start")]
        if self.span is not None:
            low, high = self.span
            value, _, unit = high.partition(" ")
            texts.append(Text(_BOX.right + 35, _BOX.top + 12, value, "start"))
            texts.append(Text(_BOX.right + 35, _BOX.bottom, low, "start"))
            middle = (_BOX.top + _BOX.bottom) / 2
            texts.append(Text(_BOX.width - 12, middle, unit, is_upright=True))
        return [*texts, *self.labels]

    def as_lines(self, columns: int, colours: int = 0) -> list[str]:
        """Return the lines of a terminal of so many columns, and of 2**24, 256 or 0 colours.
        They have no text of the version's."""
        margin = 6
        width = max(columns - margin - 1, 8)
        height = min(max(self.shades.shape[0], 16), TERMINAL_ROWS) // 2 * 2
        shades = _resized(self.shades, height, width)
        height //= 2
        at_line = {int(place): label for place, label in self.up.ticks(height, 0)}
        lines = []
        for line in range(height):
            above, below = shades[2 * line : 2 * line + 2]
            label = at_line.get(line, "")
            lines.append(f"{label:>{margin - 1}} {_blocks(above, below, colours)}")
        below_picture = [" "] * columns
        for place, label in self.across.ticks(margin, margin + width - 1):
            start = max(0, min(int(place), columns - len(label)))  # the last one whole, too
            below_picture[start : start + len(label)] = label
        return [*lines, "".join(below_picture).rstrip()[:columns]]

    def legend(self) -> list[str]:
        """Return lines that tell what the axes and the shades mean."""
        lines = [f"to the right: {self.across.unit}; up: {self.up.unit}"]
        if self.span is not None:
            lines.append(f"dark: {self.span[0]}; bright: {self.span[1]}")
        return lines


def picture_of(title: str, spec: FeatureSpec, item: Any, columns: int, rows: int) -> Picture:
    """Draw the features of an utterance, as `Cache.item` returns them, with at most so many
    columns and rows: along time, to the right, the first dimension below, or the first
    codebook above; pitch in Hz, brighter the more certain it is; one number a frame as an area;
    a vector as bars; named values with their names; events as blocks with their labels."""
    title, unit = _one_line(title), _one_line(spec.units.partition(" (")[0])
    if spec.axis.has_times:
        return _of_events(title, item, columns)
    values = np.asarray(item)
    if spec.named_units:
        return _of_named(title, spec.named_units, values, columns)
    if spec.axis.kind == "clip":
        across = Axis("dimension", 0, max(values.size, 1), True)
        return _of_curve(title, unit, values.reshape(-1, 1), across, columns)
    count, size = len(values), int(np.prod(values.shape[1:]))
    values = values.reshape(count, size)
    across = Axis("seconds", 0, float(spec.axis.seconds(count)))
    if not across.high > 0:  # frames do not stand for time
        across = Axis("frame", 0, max(count, 1))
    if spec.is_pitch:
        return _of_pitch(title, spec.units, values, across, columns, rows)
    if spec.is_curve:
        return _of_curve(title, unit, values, across, columns)
    if len(spec.codebook_sizes) == size:
        shown = values[:: max(-(-count // columns), 1), :rows]
        shades = (shown * np.int64(SHADES) // np.array(spec.codebook_sizes[:rows])).T
        # of codebooks of several sizes, each has its last code brightest
        last, *others = {*spec.codebook_sizes}
        span = "0", "last code" if others else f"{last - 1:,} code"
        up = Axis("codebook", size, 0, True)
    else:
        pooled = _pool(_pool(values, columns).T, rows)[::-1]
        low, high = _limits(pooled)
        shades = (pooled - low) / max(high - low, 1e-9) * (SHADES - 1)
        span = number(low, 3), f"{number(high, 3)} {unit}"
        up = Axis("dimension", 0, size, True)
    return Picture(title, shades.clip(0, SHADES - 1).astype(np.uint8), across, up, span)


def _one_line(text: str) -> str:
    """Shorten a text of a version, and replace what is no character that can be seen."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text[:_LONGEST])


def _pool(values: NDArray[Any], most: int) -> NDArray[np.float32]:
    """Average adjacent rows, so that at most so many are left; 0 for what is not finite."""
    finite = np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0)
    if len(finite) <= most:
        return finite
    starts = np.arange(most) * len(finite) // most
    counts = np.diff(starts, append=len(finite))
    pooled = np.add.reduceat(finite, starts, axis=0) / counts[:, None]
    return pooled.astype(np.float32)


def _limits(pooled: NDArray[np.float32]) -> tuple[float, float]:
    """Return the values that are drawn darkest and brightest. A floor, as digital silence has
    it in a log mel spectrogram, takes no part."""
    if not pooled.size:
        return 0.0, 0.0
    floor, top = float(pooled.min()), float(pooled.max())
    above = pooled[pooled > floor + (top - floor) / 100]
    if not above.size:
        return floor, top
    low, high = np.percentile(above, (_LOWEST, _HIGHEST)).tolist()
    return (low, high) if low < high else (floor, high)


def _of_curve(title: str, unit: str, values: NDArray[Any], across: Axis, columns: int) -> Picture:
    """Draw numbers `[n, 1]` as bars from zero; numbers from 0 to 1 on that scale."""
    bars = _pool(values, columns)[:, 0]
    low, high = float(bars.min(initial=0)), float(bars.max(initial=0))
    is_share = not across.is_counted and low == 0 and high <= 1
    high = 1.0 if is_share or low == high else high
    levels = np.linspace(high, low, _CURVE_ROWS)[:, None]
    is_bar = ((levels > 0) & (levels <= bars)) | ((levels <= 0) & (levels >= bars))
    shades = np.where(is_bar, _BAR_SHADE, 0).astype(np.uint8)
    return Picture(title, shades, across, Axis(unit, low, high))


def _of_pitch(
    title: str, units: str, values: NDArray[Any], across: Axis, columns: int, rows: int
) -> Picture:
    """Draw pitch and confidence `[frames, 2]`: the pitch as a line from 0 Hz to above the
    highest certain pitch, its confidence as the shade."""
    pitch, confidence = np.nan_to_num(values.astype(np.float32), posinf=0, neginf=0).T
    shade = (confidence.clip(0, 1) * (SHADES - 1)).astype(np.uint8)
    certain = pitch[confidence >= CERTAIN]
    high = 1.1 * float(certain.max(initial=0)) or 500.0
    width, thickness = min(len(pitch), columns), max(rows // 40, 1)
    shades = np.zeros((rows, max(width, 1)), np.uint8)
    column = np.arange(len(pitch)) * width // max(len(pitch), 1)
    row = np.floor((1 - pitch / high) * rows).astype(int)
    for offset in range(thickness):
        inside = (row + offset >= 0) & (row + offset < rows)
        np.maximum.at(shades, (row[inside] + offset, column[inside]), shade[inside])
    of_confidence = _one_line(units.partition("), ")[2].partition(" (")[0])
    return Picture(title, shades, across, Axis("Hz", 0, high), ("0", f"1 {of_confidence}"))


def _of_named(title: str, units: dict[str, str], values: NDArray[Any], columns: int) -> Picture:
    """Draw named values, one below another: as bars if all have the same unit."""
    finite = np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)
    end = max(float(finite.max(initial=0)), 1e-9)
    unit, *others = {*units.values()}
    shades = np.zeros((len(units) * _LANE_ROWS, columns), np.uint8)
    labels = []
    for lane, (name, value) in enumerate(zip(units, values.tolist(), strict=True)):
        if not others:
            top, width = lane * _LANE_ROWS, max(round(finite[lane] / end * columns), 0)
            shades[top + 1 : top + _LANE_ROWS - 1, :width] = _EVENT_SHADES[14]
        text = _one_line(f"{name} {number(value)} {units[name]}".rstrip())
        labels.append(_label(0.0, (lane + 0.5) / len(units), 1.0, text))
    across = Axis("", 0, 0) if others else Axis(_one_line(unit), 0, end)
    return Picture(title, shades, across, Axis("", 0, 0), labels=labels)


def _of_events(title: str, events: Sequence[Any], columns: int) -> Picture:
    """Draw events in lanes, so that none covers another, as far as there are lanes. A label
    is in its event, or next to a point."""
    times = np.array([event[:2] for event in events], np.float64).reshape(-1, 2)
    times = np.nan_to_num(times, posinf=0, neginf=0).clip(0)
    end = float(times.max(initial=0))
    scale = end or 1.0
    edges = np.rint(times / scale * columns).astype(int)
    ends = np.zeros(_MOST_LANES)  # of the last event in each lane
    lanes = []
    for event, (start, last) in zip(events, times.tolist(), strict=True):
        text = _one_line(event.label or "")
        left, right = _room_of(text, start, last, scale)
        lane = int((ends > left).argmin())
        if ends[lane] > left:  # all lanes are full
            right = left
        ends[lane] = max(right, np.nextafter(start, np.inf))  # a point covers another
        lanes.append((lane, text, left / scale, (right - left) / scale))
    count = 1 + max((lane for lane, *_ in lanes), default=0)
    shades = np.zeros((count * _LANE_ROWS, columns), np.uint8)
    labels = []
    for (lane, text, left, width), (first, last) in zip(lanes, edges.tolist(), strict=True):
        first = min(first, columns - 1)  # a point may be at the end
        shade = _EVENT_SHADES[zlib.crc32(text.encode(errors="replace")) % len(_EVENT_SHADES)]
        top = lane * _LANE_ROWS
        shades[top + 1 : top + _LANE_ROWS - 1, first : max(last, first + 1)] = shade
        labels.append(_label(left, (lane + 0.5) / count, width, text))
    across, up = Axis("seconds", 0, end), Axis("lane", count, 0, True)
    return Picture(title, shades, across, up, labels=labels[:_MOST_LABELS])


def _label(left: float, middle: float, width: float, text: str) -> Text:
    """Place a text in a picture, by shares of the picture: where it begins, its distance from
    the top, and its room."""
    across, down = _BOX.right - _BOX.left, _BOX.bottom - _BOX.top
    shown = text[: int(width * across / _CHARACTER)]
    x, y = _BOX.left + left * across + 3, _BOX.top + middle * down + 5
    return Text(x, y, shown, "start", colour="#fff")


def _room_of(text: str, start: float, last: float, end: float) -> tuple[float, float]:
    """Return where an event's label begins and ends: a point's to its right, or else to its
    left."""
    if last > start:
        return start, last
    width = (len(text) * _CHARACTER + 6) / (_BOX.right - _BOX.left) * end if text else 0.0
    left = start if start + width <= end else max(0.0, start - width)
    return left, min(left + width, end)


def encode_png(shades: Shades) -> bytes:
    """Encode an image of the palette's shades, uint8 `[rows, columns]`."""
    rows, columns = shades.shape
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), shades], axis=1)
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0),
        b"PLTE": PALETTE.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(lines.tobytes(), 9),
        b"IEND": b"",
    }
    encoded = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks.items():
        checksum = zlib.crc32(name + data)
        encoded += struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)
    return encoded


# A picture with its axes in a file

_BOX = Box(1000, 330, 70, 890, 34, 284)
_CHARACTER = 8
"""The width of a character, about."""

_LEGEND = np.arange(SHADES - 1, -1, -1, dtype=np.uint8)[:, None]
_STANDALONE = (
    f'xmlns="http://www.w3.org/2000/svg" width="{_BOX.width}" font-family="sans-serif" '
    'font-size="14" fill="#222" stroke="none" style="max-width:100%;background:#fff"'
)


def _image(shades: Shades, x: int, width: int) -> str:
    source = f"data:image/png;base64,{b64encode(encode_png(shades)).decode()}"
    return (
        f'<image x="{x}" y="{_BOX.top}" width="{width}" height="{_BOX.bottom - _BOX.top}" '
        f'href="{source}" preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    )


def _as_png(picture: Picture) -> bytes:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        needed_for = "a PNG with axes (an SVG needs nothing)"
        raise MissingDependencyError("pillow", needed_for, "plot") from error
    zoom = 2  # so that text is sharp
    canvas = Image.new("RGB", (_BOX.width * zoom, _BOX.height * zoom), "#fff")
    drawing, font = ImageDraw.Draw(canvas), ImageFont.load_default(14 * zoom)
    anchors = {"start": "ls", "middle": "ms", "end": "rs"}
    axes = picture.axes()
    left, bottom = _BOX.left * zoom, _BOX.bottom * zoom
    length = 4 * zoom
    for x, _ in axes[0]:
        drawing.line([x * zoom, bottom, x * zoom, bottom + length], "#888", 2)
    for y, _ in axes[1]:
        drawing.line([left - length, y * zoom, left, y * zoom], "#888", 2)

    def paste(shades: Shades, left: int, width: int) -> None:
        resized = _resized(shades, (_BOX.bottom - _BOX.top) * zoom, width * zoom)
        colours = PALETTE.astype(np.uint8)[resized]
        canvas.paste(Image.fromarray(colours), (left * zoom, _BOX.top * zoom))

    paste(picture.shades, _BOX.left, _BOX.right - _BOX.left)
    if picture.span is not None:
        paste(_LEGEND, _BOX.right + 16, 14)
    for text in [*texts_of(_BOX, *axes), *picture.texts()]:
        shown = text.text.replace("\N{MINUS SIGN}", "-")  # which the font lacks
        if not text.is_upright:
            place = text.x * zoom, text.y * zoom
            drawing.text(place, shown, text.colour or "#222", font, anchors[text.anchor])
            continue
        size = int(drawing.textlength(shown, font)) + 2, 20 * zoom
        turned = Image.new("RGB", size, "#fff")
        ImageDraw.Draw(turned).text((1, 15 * zoom), shown, "#222", font, "ls")
        place = int(text.x - 15) * zoom, int(text.y * zoom) - size[0] // 2
        canvas.paste(turned.transpose(Image.Transpose.ROTATE_90), place)
    data = io.BytesIO()
    canvas.save(data, "PNG")
    return data.getvalue()


# A picture in a terminal

_CHARACTERS = " .:-=+*#%@"


def _resized(shades: Shades, rows: int, columns: int) -> Shades:
    """Repeat or leave out rows and columns, so that there are so many."""
    row = np.arange(rows) * shades.shape[0] // rows
    column = np.arange(columns) * max(shades.shape[1], 1) // columns
    if not shades.size:
        return np.zeros((rows, columns), np.uint8)
    resized: Shades = shades[row[:, None], column]
    return resized


def _blocks(above: Shades, below: Shades, colours: int) -> str:
    """Return a line of half blocks, the upper half of each in the one colour and the lower
    half in the other; or of characters."""
    if not colours:
        darkness = (above.astype(int) + below) * len(_CHARACTERS) // (2 * SHADES)
        return "".join(_CHARACTERS[value] for value in darkness.tolist()).rstrip()
    blocks, before = [], ""
    for upper, lower in zip(above.tolist(), below.tolist(), strict=True):
        codes = f"\x1b[38;{_code(upper, colours)};48;{_code(lower, colours)}m"
        blocks.append("▀" if codes == before else f"{codes}▀")
        before = codes
    return f"{''.join(blocks)}\x1b[0m"


def _code(shade: int, colours: int) -> str:
    """Return the number of a colour for a terminal, of 24 bits or from its cube of 6 × 6 × 6."""
    red, green, blue = PALETTE[shade].astype(int).tolist()
    if colours > 256:
        return f"2;{red};{green};{blue}"
    steps = [round(value / 255 * 5) for value in (red, green, blue)]
    return f"5;{16 + 36 * steps[0] + 6 * steps[1] + steps[2]}"
