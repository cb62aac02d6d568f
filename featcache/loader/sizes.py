"""Amounts of memory as users write them: "4GB", "512MiB", "4G", 4e9, or a number of bytes."""

from __future__ import annotations

import math
import re

from featcache.arguments import is_number
from featcache.errors import ArgumentError

__all__ = ["parse_size"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)", re.ASCII)


def parse_size(name: str, value: str | float) -> int:
    """A size in bytes.

    Args:
        name: of the argument, for the message.
        value: a positive number of bytes; or text: a number and kB, MB, GB, TB (powers of 1000), or KiB, MiB, GiB, TiB
            (powers of 1024), in upper or lower case, with or without the B.

    Raises:
        ArgumentError: it is neither, or less than a byte.
    """
    num_bytes = _parsed(value) if isinstance(value, str) else value
    if not is_number(num_bytes) or not math.isfinite(num_bytes):
        raise ArgumentError(f'{name} is {value!r}: give a size like "4GB" or "512MiB", or a number of bytes')
    if num_bytes < 1:
        raise ArgumentError(f"{name} is {value!r}: it must be at least one byte; leave it out for none")
    return int(num_bytes)


def _parsed(text: str) -> float:
    """Bytes; NaN where the text is no size."""
    found = _SIZE.fullmatch(text.strip().lower())
    return float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else math.nan
