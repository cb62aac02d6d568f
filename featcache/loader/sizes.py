"""Amounts of memory as users write them: "4GB", "512MiB", or a number of bytes."""

from __future__ import annotations

import re

from featcache.errors import ArgumentError

__all__ = ["parse_size"]

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)


def parse_size(name: str, value: str | int) -> int:
    """A size in bytes.

    Args:
        name: of the argument, for the message.
        value: a positive whole number of bytes, or text: a number and B, kB, MB, GB, TB (powers of 1000), or KiB,
            MiB, GiB, TiB (powers of 1024), in upper or lower case.

    Raises:
        ArgumentError: it is neither, or less than a byte.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        found = _SIZE.fullmatch(value.strip().lower()) if isinstance(value, str) else None
        if not found or found[2] not in _UNITS:
            raise ArgumentError(f'{name} is {value!r}: give a size like "4GB" or "512MiB", or a number of bytes')
        num_bytes = int(float(found[1]) * _UNITS[found[2]])
    if num_bytes < 1:
        raise ArgumentError(f"{name} is {value!r}: it must be at least one byte; leave it out to go without")
    return num_bytes
