"""Progress on stderr: a bar on a terminal, elsewhere a line now and then; of a run, also JSON.
What commands do is shown in one form: how much of how much, the time left, the speed."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Never, Self

import click

from featcache.cli.common import note
from featcache.cli.process import terminal_columns
from featcache.errors import counted, hours, listing, real_time

if TYPE_CHECKING:
    from tqdm import tqdm

    from featcache.extraction.jobs import Progress
    from featcache.extraction.plan import ExtractionPlan

_FIRST_SECONDS = 5.0
"""The time before the first line where stderr is no terminal."""
_LINE_SECONDS = 30.0
_BAR_SECONDS = 0.1
_JSON_SECONDS = 60.0
_TICK_SECONDS = 1.0
_PATIENCE_SECONDS = 60.0
"""The time without a finished utterance after which a line names those in progress."""

_BAR_COLUMNS = 16
"""The columns of a terminal that the bar and the percentage get at least."""

_STAGES = {
    "decode": "decoding",
    "resample": "resampling",
    "extract": "the device",
    "write": "writing",
    "wait": "waiting",
}


class Line:
    """A line of progress: a bar and some words on a terminal, or lines of words at intervals.
    Nothing is shown of a total of 0; a total of None is unknown. Use it as a context
    manager."""

    def __init__(self, total: float | None, is_shown: bool = True) -> None:
        self._total = total
        self._done = 0.0
        self._started = self._next = monotonic()
        self._bar: tqdm[Never] | None = None
        if not is_shown or total == 0:
            self._next = math.inf
        elif not terminal_columns():
            self._next += _FIRST_SECONDS
        else:
            from tqdm import tqdm

            form = "{desc}" if total is None else "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = tqdm(
                total=total,
                bar_format=form,
                dynamic_ncols=True,
                miniters=0,
                mininterval=0,
                leave=False,
                file=sys.stderr,
            )

    def _parts(self) -> Sequence[str]:
        """Return the text, of which a terminal shows the first parts for which it has room."""
        raise NotImplementedError

    def show(self, done: float) -> None:
        """Show how much is done, at intervals. This may be called for each of many things."""
        self._done = done
        if monotonic() < self._next:
            return
        if self._bar is None:
            self._next = monotonic() + _LINE_SECONDS
            note(", ".join(self._parts()))
        else:
            self._next = monotonic() + _BAR_SECONDS
            text, *others = self._parts()
            room = terminal_columns() - _BAR_COLUMNS
            for part in others:
                if len(text) + len(part) + 2 <= room:
                    text += f", {part}"
            self._bar.set_description_str(text, refresh=False)
            self._bar.update(min(done, self._total or math.inf) - self._bar.n)

    def _speed(self, amount: float) -> float:
        """Return an amount per second since the beginning."""
        return amount / (monotonic() - self._started or math.inf)

    def _time_left(self, total: float) -> str:
        """Return the time that the rest will take, at the speed so far: `00:37 left`."""
        from tqdm import tqdm

        if not 0 < self._done <= total:
            return "…"
        elapsed = monotonic() - self._started
        return f"{tqdm.format_interval((total - self._done) / self._done * elapsed)} left"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


class Steps(Line):
    """The progress of counted things, such as shards."""

    def __init__(self, total: int | None, things: str) -> None:
        super().__init__(total)
        self._things = things

    def update(self, count: float = 1) -> None:
        """Show that so many more are done. One thread may call this at a time."""
        self.show(self._done + count)

    def _parts(self) -> list[str]:
        speed = f"{self._speed(self._done):,.1f} {self._things}/s"
        if self._total is None:
            return [f"{int(self._done):,} {self._things}", speed]
        amount = f"{int(self._done):,} of {self._total:,} {self._things}"
        return [amount, self._time_left(self._total), speed]


class Shards(Steps):
    """The progress of a command that goes through shards, some `passes` times."""

    def __init__(self, total: int, passes: int = 1) -> None:
        super().__init__(total, "shards")
        self._passes = passes
        self._utterances, self._seconds, self._damaged = 0, 0.0, 0

    def done(self, utterances: int, seconds: float, is_damaged: bool) -> None:
        """Show that a shard is done, as an `OnShard` of `featcache.version.progress`."""
        self._utterances += utterances
        self._seconds += seconds
        self._damaged += is_damaged
        self.update(1 / self._passes)

    def _parts(self) -> list[str]:
        amount, left, _ = super()._parts()
        speed = real_time(self._speed(self._seconds))
        parts = [amount, left, f"{self._damaged:,} damaged", speed]
        return [*parts, hours(self._seconds), counted(self._utterances, "utterance")]


def _tried(progress: Progress) -> int:
    """Count the utterances that were extracted or have failed; of several versions, of the
    one with most."""
    counts = progress.versions.values()
    return max((version.extracted + version.failed for version in counts), default=0)


class Display(Line):
    """Shows the progress of a run as a bar, lines or JSON.

    Args:
        kind: `bar` (without a terminal, lines at intervals), `json` or `none`.
    """

    def __init__(self, plan: ExtractionPlan, kind: str = "bar") -> None:
        from featcache.extraction.jobs import Progress

        self._plan, self._seconds_in_all = plan, plan.seconds_to_decode
        super().__init__(self._seconds_in_all, kind == "bar")
        self._kind = kind
        self._next_document = self._started + _JSON_SECONDS
        self._latest = Progress()
        self._printed = Progress()
        """The progress as of the last line of JSON."""
        self._finished = (0.0, 0)
        self._finished_at, self._patience = self._started, _PATIENCE_SECONDS
        self._showing = threading.Lock()
        self._ended = threading.Event()

    def update(self, progress: Progress | None = None) -> None:
        """Show the progress, or the latest again."""
        with self._showing:
            progress = self._latest = progress or self._latest
            self.show(progress.computed_seconds)
            if self._kind == "json" and monotonic() >= self._next_document:
                self._next_document = monotonic() + _JSON_SECONDS
                self._print_document(self._printed)
                self._printed = progress

    def _parts(self) -> list[str]:
        progress = self._latest
        parts = [
            f"{hours(self._done)} of {hours(self._seconds_in_all)}",
            self._time_left(self._seconds_in_all),
            f"{sum(progress.failures.values()):,} failed",
            real_time(self._speed(self._done)),
        ]
        if any(progress.stages.values()):
            slowest = max(progress.stages, key=progress.stages.__getitem__)
            parts.append(f"most time: {_STAGES[slowest]}")
        return [*parts, counted(_tried(progress), "utterance")]

    def _print_document(self, before: Progress, is_end: bool = False) -> None:
        """Print the line of `--progress json`, with shares and speeds of stages since the
        progress `before`."""
        progress = self._latest
        done, speed = progress.computed_seconds, self._speed(progress.computed_seconds)
        seconds_left = None
        if speed:
            seconds_left = round(max(0.0, self._seconds_in_all - done) / speed)
        spent = {
            stage: seconds - before.stages.get(stage, 0.0)
            for stage, seconds in progress.stages.items()
        }
        total = sum(spent.values())
        shares = {}
        if total:
            shares = {stage: round(seconds / total, 4) for stage, seconds in spent.items()}
        document = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "is_end": is_end,
            "elapsed_seconds": round(monotonic() - self._started, 1),
            "audio_seconds": round(done, 1),
            "audio_seconds_in_all": round(self._seconds_in_all, 1),
            "times_real_time": round(speed, 1),
            "seconds_left": seconds_left,
            "utterances": _tried(progress),
            "failed": sum(progress.failures.values()),
            "shards": progress.shards,
            "stages": shares,
            "stages_times_real_time": {
                stage: round((done - before.computed_seconds) / seconds, 1)
                for stage, seconds in spent.items()
                if seconds and stage != "wait"
            },
            "bottleneck": max(shares, key=shares.__getitem__, default=None),
        }
        click.echo(json.dumps(document), err=True)

    def _tick(self) -> None:
        """Show a line in time even if nothing is done: a file server may hang."""
        while not self._ended.wait(_TICK_SECONDS):
            self.update()
            self._note_hang()

    def _note_hang(self) -> None:
        """Name the utterances in progress, if none was finished for long; the next time
        after twice as long."""
        now, finished = monotonic(), (self._latest.computed_seconds, _tried(self._latest))
        if finished != self._finished:
            self._finished, self._finished_at = finished, now
        elif now - self._finished_at >= self._patience:
            from featcache.storage.opening import open_store
            from featcache.version.in_flight import in_progress

            ids = dict.fromkeys(
                id_
                for version in self._plan.versions
                for id_ in in_progress(open_store(version.path))
            )
            if ids:
                what = f"no utterance was finished for {now - self._finished_at:.0f} s: in progress"
                note(f"{what}: {listing(ids)}")
            self._patience *= 2

    def __enter__(self) -> Self:
        from featcache.extraction.jobs import PROGRESS_THREAD

        if self._kind != "none":
            threading.Thread(target=self._tick, name=PROGRESS_THREAD, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        super().__exit__(*error)
        if error[0] is None and self._kind == "json":
            from featcache.extraction.jobs import Progress

            with self._showing:
                self._print_document(Progress(), is_end=True)
