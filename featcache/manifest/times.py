"""Columns of time, by their names: `onset`, `start_ms`, `Begin Time (s)`, `xmax`,
`num_samples`. Without a unit, they are seconds."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

UNITS = {
    "seconds": "|s|secs?|seconds?",
    "ms": "ms|msecs?|millis|milliseconds?",
    "samples": "samples?",
    "": "frames?",
}
"""The units of times, with their spellings. Frames have no fixed length."""

_UNIT = "|".join(UNITS.values()).strip("|")
_NAME = re.compile(
    rf"(?:time_|(?P<before>{_UNIT})_)?"
    r"(?P<word>(?P<start>start|begin|beg|onset|t_?start|t_?begin|[tx]_?min|t_?0)"
    r"|(?P<end>end|stop|offset|finish|t_?end|t_?stop|[tx]_?max|t_?[12])"
    r"|duration|dur|length|len|n(?:um)?(?=_?(?:sample|frame)))"
    rf"(?:_?time(?:stamp)?)?(?:_in)?(?:_?(?!s$)(?P<after>{_UNIT})|_(?P<s>s))?"
)
_MAYBE = re.compile(
    r"(?!original)(?:.*_)?(?:start|begin|onset|offset|end|stop|from|to)(?:_.*)?", re.DOTALL
)
_STARTS_ALONE = {"offset": "onset", "t1": "t0"}
"""Words for an end that mean a start without a column of the other word."""


class Time(NamedTuple):
    """A column of times, by its name."""

    role: str
    """`start`, `end` or `duration`."""
    unit: str
    """A key of `UNITS`; empty if the times cannot be turned into seconds."""
    is_explicit: bool
    """True if the unit is in the name."""


def times_of(names: Iterable[str]) -> dict[str, Time]:
    """Find the columns of time."""
    plain_names = {name: _plain(name) for name in names}
    is_box = not {"ymin", "y_min"}.isdisjoint(plain_names.values())
    matches = {}
    for name, plain in plain_names.items():
        match = _NAME.fullmatch(plain)
        if match and not (is_box and match["word"][0] == "x"):
            matches[name] = match
    words = {name: match["word"].replace("_", "") for name, match in matches.items()}
    times = {}
    for name, match in matches.items():
        word, role = words[name], "duration"
        if match["start"] or _STARTS_ALONE.get(word, word) not in words.values():
            role = "start"
        elif match["end"]:
            role = "end"
        unit_word = match["before"] or match["after"] or match["s"] or ""
        unit = next(unit for unit, spelled in UNITS.items() if re.fullmatch(spelled, unit_word))
        if not unit_word and word in ("stop", "length", "len"):
            unit = ""  # as often samples or frames as seconds
        times[name] = Time(role, unit, bool(unit_word))
    return times


def may_be_time(name: str) -> bool:
    """Tell whether a name has a word of times in it."""
    return _MAYBE.fullmatch(_plain(name)) is not None


def _plain(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return re.sub(r"[\W_]+", "_", words).strip("_").lower()
