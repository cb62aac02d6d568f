"""Progress on stderr: a bar as wide as the terminal, or plain lines at intervals elsewhere."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Never

from tqdm import tqdm

from featcache.cli.common import FIRST_SECONDS, LINE_SECONDS, clock, hours, note, terminal_columns
from featcache.extraction.extraction import ExtractionPlan
from featcache.extraction.jobs import Progress

_BAR_SECONDS = 0.1
_MOST_COLUMNS = 110


class Display:
    """Shows hours of audio done, time left, failures and times real time; use it as a context manager."""

    def __init__(self, plan: ExtractionPlan) -> None:
        self._total = plan.seconds_to_decode
        self._bar: tqdm[Never] | None = None
        if self._total and (columns := terminal_columns()):
            # The bar takes the space that the text leaves; on a narrow terminal, the end of the text is cut.
            form = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = tqdm(total=self._total, bar_format=form, ncols=min(columns, _MOST_COLUMNS), file=sys.stderr)
        self._started = monotonic()
        self._next = self._started + (FIRST_SECONDS if self._bar is None else _BAR_SECONDS)

    def update(self, progress: Progress) -> None:
        """Show the progress, unless it was shown a moment ago."""
        now = monotonic()
        if now < self._next:
            return
        self._next = now + (LINE_SECONDS if self._bar is None else _BAR_SECONDS)
        done, seconds = progress.audio_seconds, now - self._started
        speed = done / seconds
        left = f"{clock((self._total - done) / speed)} left" if 0 < done <= self._total else "…"
        failed = sum(progress.failures.values())
        text = f"{hours(done)} of {hours(self._total)}, {left}, {failed:,} failed, {speed:,.0f} × real time"
        if self._bar is not None:
            self._bar.ncols = min(terminal_columns() or _MOST_COLUMNS, _MOST_COLUMNS)  # its width may have changed
            self._bar.n = min(done, self._total)
            self._bar.set_description_str(text)
        else:
            note(text)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()
