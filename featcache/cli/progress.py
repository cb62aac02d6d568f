"""How `extract` tells of its progress: a bar as wide as the terminal, or plain lines at intervals elsewhere; JSON for
programs; and a log.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Never

import click

from featcache.cli import options
from featcache.cli.common import (
    FIRST_SECONDS,
    LINE_SECONDS,
    clock,
    keep_log,
    log,
    note,
    print_only_errors,
    terminal_columns,
)
from featcache.errors import hours

if TYPE_CHECKING:
    from tqdm import tqdm

    from featcache.extraction.jobs import Progress
    from featcache.extraction.plan import ExtractionPlan

_BAR_SECONDS = 0.1
_MOST_COLUMNS = 110
_JSON_SECONDS = 60.0
_TICK_SECONDS = 1.0


def progress_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--progress`, `--log` and `-q`, for a command that extracts; it gets the first alone, as `progress`."""

    @functools.wraps(command)
    def with_messages(*args: Any, log: Path | None, quiet: bool, progress: str, **kwargs: Any) -> Any:
        if log is not None:
            keep_log(log)
        if quiet:
            print_only_errors()
        return command(*args, progress="none" if quiet and progress == "bar" else progress, **kwargs)

    for option in (_QUIET, _LOG, _PROGRESS):
        with_messages = option(with_messages)
    return with_messages


_PROGRESS = click.option(
    "--progress",
    type=click.Choice(["bar", "json", "none"]),
    default="bar",
    show_default=True,
    help="On stderr: a bar, or lines now and then where stderr is no terminal; json: a document on a line, each minute "
    "and at the end (docs/json.md).",
)
_LOG = click.option(
    "--log",
    type=options.FILE,
    metavar="FILE",
    help="Also add messages and progress to FILE, each line with the time, in UTC.",
)
_QUIET = click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors, and what --json prints.")


@dataclass
class _Told:
    """What the last line of JSON has counted."""

    audio_seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)


class Display:
    """Shows hours of audio done, time left, failures and times real time; use it as a context manager.

    Args:
        plan: What is to be done.
        kind: `bar`, `json` or `none`. The log gets plain lines, whichever it is.
    """

    def __init__(self, plan: ExtractionPlan, kind: str = "bar") -> None:
        self._total = plan.seconds_to_decode
        self._kind = kind
        self._bar: tqdm[Never] | None = None
        if kind == "bar" and self._total and (columns := terminal_columns()):
            from tqdm import tqdm

            # The bar takes the space that the text leaves; on a narrow terminal, the end of the text is cut.
            form = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = tqdm(total=self._total, bar_format=form, ncols=min(columns, _MOST_COLUMNS), file=sys.stderr)
        self._started = monotonic()
        self._next_bar = self._started + _BAR_SECONDS
        self._next_line = self._started + (_JSON_SECONDS if kind == "json" else FIRST_SECONDS)
        self._latest: Progress | None = None
        self._told = _Told()
        self._showing = threading.Lock()
        self._ended = threading.Event()

    def update(self, progress: Progress) -> None:
        """Show the progress, unless it was shown a moment ago."""
        with self._showing:
            self._latest = progress
            now = monotonic()
            if self._bar is not None and now >= self._next_bar:
                self._next_bar = now + _BAR_SECONDS
                self._show_bar(self._bar, self._text(progress, now))
            if now >= self._next_line:
                self._next_line = now + (_JSON_SECONDS if self._kind == "json" else LINE_SECONDS)
                self._show_line(progress, now)

    def _show_bar(self, bar: tqdm[Never], text: str) -> None:
        assert self._latest is not None
        bar.ncols = min(terminal_columns() or _MOST_COLUMNS, _MOST_COLUMNS)  # its width may have changed
        bar.n = min(self._latest.audio_seconds, self._total)
        bar.set_description_str(text)

    def _show_line(self, progress: Progress, now: float, is_end: bool = False) -> None:
        text = self._text(progress, now)
        if self._kind == "bar" and self._bar is None and not is_end:
            note(text)  # which is in the log, too
        else:
            log(text)
        if self._kind == "json":
            document = self._document(progress, now, is_end)
            click.echo(json.dumps(document), err=True)

    def _text(self, progress: Progress, now: float) -> str:
        done, seconds = progress.audio_seconds, now - self._started
        speed = done / seconds if seconds else 0.0
        left = f"{clock((self._total - done) / speed)} left" if 0 < done <= self._total else "…"
        failed = sum([*progress.failures.values()])
        return f"{hours(done)} of {hours(self._total)}, {left}, {failed:,} failed, {speed:,.0f} × real time"

    def _document(self, progress: Progress, now: float, is_end: bool) -> dict[str, Any]:
        """The line of `--progress json`: shares and speeds of stages since the line before; at the end, of it all."""
        done, elapsed = progress.audio_seconds, now - self._started
        speed = done / elapsed if elapsed else 0.0
        before = _Told() if is_end else self._told
        self._told = _Told(done, dict(progress.stages))
        spent = {stage: seconds - before.stages.get(stage, 0.0) for stage, seconds in self._told.stages.items()}
        total = sum(spent.values())
        stages = {stage: round(seconds / total, 4) for stage, seconds in spent.items()} if total else {}
        return {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "is_end": is_end,
            "elapsed_seconds": round(elapsed, 1),
            "audio_seconds": round(done, 1),
            "audio_seconds_in_all": round(self._total, 1),
            "times_real_time": round(speed, 1),
            "seconds_left": round(max(0.0, self._total - done) / speed) if speed else None,
            "failed": sum([*progress.failures.values()]),
            "shards": progress.shards,
            "stages": stages,
            "stages_times_real_time": {
                stage: round((done - before.audio_seconds) / seconds, 1)
                for stage, seconds in spent.items()
                if seconds and stage != "wait"
            },
            "bottleneck": max(stages, key=stages.__getitem__) if stages else None,
        }

    def _tick(self) -> None:
        """Show a line in time even if nothing is done: a file server may hang."""
        while not self._ended.wait(_TICK_SECONDS):
            if self._latest is not None:
                self.update(self._latest)

    def __enter__(self) -> Display:
        if self._kind == "json":
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.leave = False
            self._bar.close()
        if kind is None:
            from featcache.extraction.jobs import Progress

            with self._showing:
                self._show_line(self._latest or Progress(), monotonic(), is_end=True)
