"""Columns of time: what their names say.

A name says a role and perhaps a unit: `onset`, `start_ms`, `Begin Time (s)`, `xmax`,
`num_samples`. Where it says no unit, seconds are meant."""

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
"""The units of times, and how names say them. Frames have no fixed length."""

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
"""Words for an end that mean a start where no column has the other word."""


class Time(NamedTuple):
    """What the name of a column of times says."""

    role: str
    """`start`, `end` or `duration`."""
    unit: str
    """A key of `UNITS`; empty if the times cannot be turned into seconds."""
    is_explicit: bool
    """Whether the name says the unit."""


def times_of(names: Iterable[str]) -> dict[str, Time]:
    """The columns whose names say times."""
    plain = {name: _plain(name) for name in names}
    is_box = not {"ymin", "y_min"}.isdisjoint(plain.values())
    matches = {name: _NAME.fullmatch(text) for name, text in plain.items()}
    words = {name: match["word"].replace("_", "") for name, match in matches.items() if match}
    times = {}
    for name, word in words.items():
        match = matches[name]
        if match is None or (is_box and word in ("xmin", "xmax")):
            continue
        role = "start" if match["start"] else "end" if match["end"] else "duration"
        if word in _STARTS_ALONE and _STARTS_ALONE[word] not in words.values():
            role = "start"
        said = match["before"] or match["after"] or match["s"] or ""
        unit = next(unit for unit, spelled in UNITS.items() if re.fullmatch(spelled, said))
        # these count samples or frames as often as seconds
        if not said and word in ("stop", "length", "len"):
            unit = ""
        times[name] = Time(role, unit, bool(said))
    return times


def may_be_time(name: str) -> bool:
    """Whether a name has a word of times in it."""
    return _MAYBE.fullmatch(_plain(name)) is not None


def _plain(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return re.sub(r"[\W_]+", "_", words).strip("_").lower()
