"""Progress on stderr: a bar on a terminal, a plain line every so often elsewhere."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Never

from tqdm import tqdm

from featcache.cli.common import clock, hours, note
from featcache.engines.progress import Progress
from featcache.extraction import Extraction

_BAR_SECONDS = 0.1
_LINE_SECONDS = 30.0


class Display:
    """Shows hours of audio done, times real time, time left, and failures; use it as a context manager."""

    def __init__(self, extraction: Extraction) -> None:
        self._total = max((extraction.expected_seconds(work) for work in extraction.work), default=0.0)
        self._is_terminal = sys.stderr.isatty()
        self._bar: tqdm[Never] | None = None
        if self._is_terminal and self._total:
            self._bar = tqdm(total=self._total, bar_format="{percentage:3.0f}%|{bar:30}| {desc}", file=sys.stderr)
        self._started = self._shown = monotonic()

    def update(self, progress: Progress) -> None:
        """Show the progress, unless it has just been shown."""
        now = monotonic()
        if now - self._shown < (_BAR_SECONDS if self._is_terminal else _LINE_SECONDS):
            return
        self._shown = now
        done, seconds = progress.audio_seconds, now - self._started
        speed = done / seconds
        left = f"{clock((self._total - done) / speed)} left" if 0 < done <= self._total else "…"
        failed = sum(progress.failures.values())
        text = f"{hours(done)} of {hours(self._total)}, {speed:,.0f} × real time, {left}, {failed:,} failed"
        if self._bar is not None:
            self._bar.n = min(done, self._total)
            self._bar.set_description_str(text)
        else:
            note(text)

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()
