"""What `extract` and `repair` print of a run: its plan, its progress, its summary.

Progress is a bar on a terminal, plain lines at intervals elsewhere, or JSON for programs."""

from __future__ import annotations

import json
import math
import shlex
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Never

import click

from featcache.cli.common import FAILURES_LEFT, complain, count_are, note, printing, say
from featcache.cli.process import INTERRUPTED, progress_bar, terminal_columns
from featcache.errors import counted, hours, megabytes
from featcache.storage.location import Location, as_location

if TYPE_CHECKING:
    from tqdm import tqdm

    from featcache.extraction.extraction import Summary, VersionSummary
    from featcache.extraction.jobs import Progress
    from featcache.extraction.plan import ExtractionPlan
    from featcache.extraction.trial import Trial

_FIRST_SECONDS = 5.0
"""The time before the first line of progress where stderr is not a terminal."""
_LINE_SECONDS = 30.0
_JSON_SECONDS = 60.0
_TICK_SECONDS = 1.0

_TELLING_SECONDS = 5.0
"""The time after which the shares of stages show what would make a run faster."""


class Display:
    """Shows hours of audio done, time left, failures and times real time; use it as a
    context manager.

    Args:
        kind: `bar`, `json` or `none`.
    """

    def __init__(self, plan: ExtractionPlan, kind: str = "bar") -> None:
        from featcache.extraction.jobs import Progress

        self._total = plan.seconds_to_decode
        self._is_json = kind == "json"
        self._has_lines = kind == "bar"
        self._bar: tqdm[Never] | None = None
        if kind == "bar" and self._total and terminal_columns():
            # The bar takes the space that the text leaves. A narrow terminal cuts the text.
            form = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = progress_bar(
                self._total, "s", bar_format=form, dynamic_ncols=True, miniters=0
            )
            self._has_lines = False
        self._started = monotonic()
        self._interval = _LINE_SECONDS
        self._next_line = self._started + _FIRST_SECONDS
        if self._is_json:
            self._interval = _JSON_SECONDS
            self._next_line = self._started + _JSON_SECONDS
        self._latest = Progress()
        self._printed = Progress()
        """The progress as of the last line of JSON."""
        self._showing = threading.Lock()
        self._ended = threading.Event()

    def update(self, progress: Progress | None = None) -> None:
        """Show the progress, or the latest again. Lines are shown at intervals, and tqdm
        limits how often the bar changes."""
        with self._showing:
            progress = self._latest = progress or self._latest
            now = monotonic()
            if self._bar is not None:
                self._bar.set_description_str(self._text(progress, now), refresh=False)
                self._bar.update(min(progress.computed_seconds, self._total) - self._bar.n)
            if now < self._next_line:
                return
            self._next_line = now + self._interval
            if self._is_json:
                self._print_document(progress, self._printed, now)
                self._printed = progress
            elif self._has_lines:
                note(self._text(progress, now))

    def _text(self, progress: Progress, now: float) -> str:
        from tqdm import tqdm

        done = progress.computed_seconds
        speed = self._speed(done, now)
        left = "…"
        if 0 < done <= self._total:
            left = f"{tqdm.format_interval((self._total - done) / speed)} left"
        failed = sum(progress.failures.values())
        return (
            f"{hours(done)} of {hours(self._total)}, {left}, {failed:,} failed, "
            f"{speed:,.0f} × real time"
        )

    def _speed(self, done: float, now: float) -> float:
        return done / (now - self._started or math.inf)

    def _print_document(
        self, progress: Progress, before: Progress, now: float, is_end: bool = False
    ) -> None:
        """Print the line of `--progress json`, with shares and speeds of stages since the
        progress `before`."""
        done = progress.computed_seconds
        speed = self._speed(done, now)
        spent = {
            stage: seconds - before.stages.get(stage, 0.0)
            for stage, seconds in progress.stages.items()
        }
        total = sum(spent.values())
        shares, speeds = {}, {}
        for stage, seconds in spent.items():
            if total:
                shares[stage] = round(seconds / total, 4)
            if seconds and stage != "wait":
                speeds[stage] = round((done - before.computed_seconds) / seconds, 1)
        seconds_left = None
        if speed:
            seconds_left = round(max(0.0, self._total - done) / speed)
        document = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "is_end": is_end,
            "elapsed_seconds": round(now - self._started, 1),
            "audio_seconds": round(done, 1),
            "audio_seconds_in_all": round(self._total, 1),
            "times_real_time": round(speed, 1),
            "seconds_left": seconds_left,
            "failed": sum(progress.failures.values()),
            "shards": progress.shards,
            "stages": shares,
            "stages_times_real_time": speeds,
            "bottleneck": max(shares, key=shares.__getitem__, default=None),
        }
        click.echo(json.dumps(document), err=True)

    def _tick(self) -> None:
        """Show a line in time even if nothing is done: a file server may hang."""
        while not self._ended.wait(_TICK_SECONDS):
            self.update()

    def __enter__(self) -> Display:
        if self._is_json:
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()
        if kind is None and self._is_json:
            from featcache.extraction.jobs import Progress

            with self._showing:
                self._print_document(self._latest, Progress(), monotonic(), is_end=True)


def say_plan(plan: ExtractionPlan) -> dict[str, Any]:
    """Print what a run would do. Returns it as one document."""
    versions: list[dict[str, Any]] = []
    for version in plan.versions:
        utterances, present = len(version.manifest), int(version.rows.present.sum())
        missing, changed = version.num_missing, version.num_replaced
        failed = int(version.rows.failed.sum())
        seconds, num_bytes = version.expected_seconds, version.expected_bytes
        versions.append(
            {
                "name": version.config.name,
                "path": str(version.path),
                "fingerprint": version.info.fingerprint,
                "utterances": utterances,
                "present": present,
                "failed": failed,
                "failed_before": version.failed_before,
                "changed": changed,
                "missing": missing,
                "audio_seconds": round(seconds, 3),
                "bytes": round(num_bytes),
            }
        )
        work = f"{missing:,} of {counted(utterances, 'utterance')} to extract"
        if changed:
            work += f", {changed:,} of them changed"
        if missing:
            work += f": about {hours(seconds)} of audio, {megabytes(num_bytes)} of features"
        say(f"{version.path}: {work}; {present:,} are there, {failed:,} have failed before")
        if version.failed_before:
            say(f"  {not_tried_again(version.failed_before)}")
    return {"dry_run": True, "versions": versions}


def say_trial(trials: Sequence[Trial]) -> dict[str, Any]:
    """Print how long a run would take. Returns it as one document."""
    for trial in trials:
        failed = f"; {counted(trial.failed, 'utterance')} of it failed" if trial.failed else ""
        audio = f"{hours(trial.audio_seconds)} of audio, drawn at random,"
        say(f"a trial of {', '.join(trial.versions)}: {audio} {_speed(trial)}{failed}")
    seconds = sum(trial.expected_seconds for trial in trials)
    at_least = _total(trial.at_least for trial in trials)
    at_most = _total(trial.at_most for trial in trials)
    if math.isnan(seconds):
        say("nothing of the sample was extracted, so nobody can say how long all of it would take")
    elif trials:
        span = "too little was measured to say how far off that is"
        if at_least is not None and at_most is not None:
            span = f"{hours(at_least)} to {hours(at_most)}"
        say(f"all of it would take about {hours(seconds)} ({span})")
    return {
        "tried": [asdict(trial) for trial in trials],
        "expected_seconds": seconds,
        "at_least": at_least,
        "at_most": at_most,
    }


def _total(values: Iterable[float | None]) -> float | None:
    total: float = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _speed(run: Summary | Trial) -> str:
    devices = f"{run.processes} × {run.device}" if run.processes > 1 else run.device
    speed = f"{run.elapsed_seconds:.1f} s: {run.times_real_time:,.0f} × real time"
    return f"in {speed} on {devices}, {counted(run.threads, 'thread')}"


def say_summary(summary: Summary, where: str) -> int:
    """Print what a run did. Returns its exit code. `where` is the place of the features
    for the command that shows why too many failed."""
    versions = summary.versions
    for version in versions:
        say(version.path)
        say(f"  {_outcome(version, summary.interrupted)}")
        if version.failed_before:
            say(f"  {not_tried_again(version.failed_before)}")
    not_looked_at = max(version.not_looked_at for version in versions)
    if not_looked_at:
        audio = "its audio was" if not_looked_at == 1 else "their audio was"
        say(f"{not_looked_at:,} already there: {audio} not looked at (--check-sources does)")
    _print_resampled(summary)
    if summary.silent:
        say(f"{count_are(summary.silent, 'utterance')} silent, for example {summary.first_silent}")
    if summary.failed_by_reason:
        say(f"failures: {_by_reason(summary.failed_by_reason)}")
    if summary.stages and summary.audio_seconds:
        with_copies = any(version.utterances != summary.utterances for version in versions)
        copies = ", with its copies," if with_copies else ""
        say(f"{hours(summary.audio_seconds)} of audio{copies} {_speed(summary)}")
        if summary.elapsed_seconds >= _TELLING_SECONDS:
            _print_stages(summary)
    failing = [as_location("path", version.path) for version in versions if version.failed]
    if failing and not printing.as_json:
        _print_first_failure(failing)
    missing = max(version.missing for version in versions)
    if summary.interrupted and missing > 0:
        kept = sum(version.extracted for version in versions)
        how = "stopped" if summary.too_many_failures else "interrupted"
        say(
            f"{how}: {counted(kept, 'extracted utterance')} kept, {missing:,} left: run the "
            "same command again"
        )
    if summary.too_many_failures:
        why = summary.too_many_failures
        if summary.failed:
            why += f"; why: featcache info {shlex.quote(where)} --failures"
        complain("\n  ".join([why, *summary.traceback.splitlines()]))
        return 1
    if summary.interrupted:
        return INTERRUPTED
    return FAILURES_LEFT if summary.failed else 0


def _print_resampled(summary: Summary) -> None:
    for done, remark in (
        ("upsampled", ": there is nothing in them above half of their own rate"),
        ("downsampled", ""),
    ):
        count = getattr(summary, done)
        if count:
            rates = {version.sample_rate for version in summary.versions if getattr(version, done)}
            were = counted(count, "utterance was", "utterances were")
            listed = ", ".join(f"{rate:,}" for rate in sorted(rates))
            say(f"{were} {done} to {listed} Hz{remark}")


def _print_first_failure(failing: Sequence[Location]) -> None:
    """Print a failure of the latest run, since most often all failed for one reason."""
    from featcache.version.ledger import read_failures
    from featcache.version.records import run_names
    from featcache.version.version import Version

    opened = Version.open(failing[0])
    for latest in run_names(opened.store)[-1:]:
        for failure in read_failures(opened, run=latest)[:1]:
            say(f"the first is {failure.id}: {failure.path}: {failure.message[:200]}")
    place = failing[0] if len(failing) == 1 else failing[0].parent
    say(f"why utterances failed: featcache info {shlex.quote(str(place))} --failures")


def _outcome(version: VersionSummary, interrupted: bool) -> str:
    if not (version.extracted or version.failed or version.missing or interrupted):
        if not version.utterances:
            return "nothing to do: this partition has no utterances"
        return f"nothing to do: {count_are(version.utterances, 'utterance')} already there"
    size = f" ({megabytes(version.num_bytes)})" if version.extracted else ""
    return (
        f"{counted(version.utterances, 'utterance')}: {version.extracted:,} extracted{size}, "
        f"{version.present:,} already there, {version.failed:,} failed"
    )


def not_tried_again(failed: Mapping[str, int]) -> str:
    """Return for people that rows have failed before; `failed` counts them by reason."""
    count = sum(failed.values())
    were = "was" if count == 1 else "were"
    return (
        f"{count:,} failed before and {were} not tried again (--retry-failed does): "
        f"{_by_reason(failed)}"
    )


def _by_reason(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in failed.items())


def _print_stages(summary: Summary) -> None:
    """Print where the time went, and what would make the slowest stage faster."""
    slowest = summary.bottleneck
    remedies = {
        "decode": "more threads, or a faster disk",
        "resample": "more threads",
        "extract": "a faster GPU",
        "write": "a faster disk",
        "wait": "a faster GPU, or disk",
    }
    if summary.upsampled or summary.downsampled:
        remedies["resample"] += ", or files at the config's rate"
    busy = ""
    if summary.device == "cpu":
        remedies["extract"] = "a GPU, or more threads"
        remedies["wait"] = "a faster disk"
        # On a GPU, some more threads than the budget wait for it.
        threads = summary.stages[slowest] * summary.threads
        busy = f", {threads:.1f} of {counted(summary.threads, 'thread')}"
    shares = ", ".join(
        f"{stage} {share:.0%}" for stage, share in summary.stages.items() if share >= 0.005
    )
    say(f"time in stages: {shares}; bottleneck: {slowest}{busy} ({remedies[slowest]} would help)")
    if len(summary.versions) > 1:
        parts = ", ".join(
            f"{version.name} {version.worker_seconds:.1f} s" for version in summary.versions
        )
        say(f"threads' time in extracting: {parts}")
