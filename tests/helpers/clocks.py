"""Clocks that show what a test wants: runs and probes are named by their times."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from featcache.version import records


def set_clock(patch: pytest.MonkeyPatch, seconds: Iterator[float]) -> None:
    """Have each look at the clock show the next of these times, in seconds since the first of January 2026."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, tzinfo=tz) + timedelta(seconds=next(seconds))

    patch.setattr(records, "datetime", Clock)
