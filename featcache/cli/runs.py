"""What `extract` and `repair` say of a run: the plan before it, its progress, the summary
after it.

Progress is a bar as wide as the terminal, or plain lines at intervals elsewhere; or JSON
for programs."""

from __future__ import annotations

import json
import math
import shlex
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Never

import click

from featcache.cli.common import FAILURES_LEFT, complain, count_are, note, printing, say
from featcache.cli.process import INTERRUPTED, progress_bar, terminal_columns
from featcache.errors import counted, hours, megabytes
from featcache.storage.location import as_location

if TYPE_CHECKING:
    from tqdm import tqdm

    from featcache.extraction.extraction import Summary, VersionSummary
    from featcache.extraction.jobs import Progress
    from featcache.extraction.plan import ExtractionPlan
    from featcache.extraction.trial import Trial

_FIRST_SECONDS = 5.0
"""The time before the first line of progress if stderr is not a terminal: shorter work is
done silently."""
_LINE_SECONDS = 30.0
"""The time between two such lines."""
_JSON_SECONDS = 60.0
_TICK_SECONDS = 1.0

_TELLING_SECONDS = 5.0
"""The time that a run must take at least for the shares of its stages to say what would
make it faster."""


class Display:
    """Shows hours of audio done, time left, failures and times real time; use it as a
    context manager.

    Args:
        kind: `bar`, `json` or `none`.
    """

    def __init__(self, plan: ExtractionPlan, kind: str = "bar") -> None:
        from featcache.extraction.jobs import Progress

        self._total = plan.seconds_to_decode
        self._kind = kind
        self._bar: tqdm[Never] | None = None
        if kind == "bar" and self._total and terminal_columns():
            # The bar takes the space that the text leaves; on a narrow terminal, the end
            # of the text is cut.
            form = "{percentage:3.0f}%|{bar}| {desc}"
            self._bar = progress_bar(
                self._total, "s", bar_format=form, dynamic_ncols=True, miniters=0
            )
        self._started = monotonic()
        self._next_line = self._started + (_JSON_SECONDS if kind == "json" else _FIRST_SECONDS)
        self._latest = Progress()
        self._told: tuple[float, dict[str, float]] = (0.0, {})
        """Seconds of audio, and those of each stage, that the last line of JSON has
        counted."""
        self._showing = threading.Lock()
        self._ended = threading.Event()

    def update(self, progress: Progress | None = None) -> None:
        """Show the progress, or the latest again, unless it was shown a moment ago: of a
        bar, tqdm knows."""
        with self._showing:
            progress = self._latest = progress or self._latest
            now = monotonic()
            if self._bar is not None:
                self._bar.set_description_str(self._text(progress, now), refresh=False)
                self._bar.update(min(progress.computed_seconds, self._total) - self._bar.n)
            if now >= self._next_line:
                self._next_line = now + (_JSON_SECONDS if self._kind == "json" else _LINE_SECONDS)
                self._show_line(progress, now)

    def _show_line(self, progress: Progress, now: float, is_end: bool = False) -> None:
        if self._kind == "json":
            click.echo(json.dumps(self._document(progress, now, is_end)), err=True)
        elif self._kind == "bar" and self._bar is None and not is_end:
            note(self._text(progress, now))

    def _text(self, progress: Progress, now: float) -> str:
        from tqdm import tqdm

        done, seconds = progress.computed_seconds, now - self._started
        speed = done / seconds if seconds else 0.0
        left = (
            f"{tqdm.format_interval((self._total - done) / speed)} left"
            if 0 < done <= self._total
            else "…"
        )
        failed = sum([*progress.failures.values()])
        return (
            f"{hours(done)} of {hours(self._total)}, {left}, {failed:,} failed, "
            f"{speed:,.0f} × real time"
        )

    def _document(self, progress: Progress, now: float, is_end: bool) -> dict[str, Any]:
        """The line of `--progress json`: shares and speeds of stages since the line
        before; at the end, of it all."""
        done, elapsed = progress.computed_seconds, now - self._started
        speed = done / elapsed if elapsed else 0.0
        before, stages_before = (0.0, {}) if is_end else self._told
        self._told = (done, dict(progress.stages))
        spent = {
            stage: seconds - stages_before.get(stage, 0.0)
            for stage, seconds in self._told[1].items()
        }
        total = sum(spent.values())
        stages = (
            {stage: round(seconds / total, 4) for stage, seconds in spent.items()} if total else {}
        )
        speeds = {
            stage: round((done - before) / took, 1)
            for stage, took in spent.items()
            if took and stage != "wait"
        }
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
            "stages_times_real_time": speeds,
            "bottleneck": max(stages, key=stages.__getitem__) if stages else None,
        }

    def _tick(self) -> None:
        """Show a line in time even if nothing is done: a file server may hang."""
        while not self._ended.wait(_TICK_SECONDS):
            self.update()

    def __enter__(self) -> Display:
        if self._kind == "json":
            threading.Thread(target=self._tick, daemon=True).start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            with self._showing:
                self._show_line(self._latest, monotonic(), is_end=True)


def say_plan(plan: ExtractionPlan) -> dict[str, Any]:
    """Print what a run would do; returns it as one document."""
    versions: list[dict[str, Any]] = [
        {
            "name": version.config.name,
            "path": str(version.path),
            "fingerprint": version.info.fingerprint,
            "utterances": len(version.manifest),
            "present": int(version.rows.present.sum()),
            "failed": int(version.rows.failed.sum()),
            "failed_before": version.failed_before,
            "changed": version.num_replaced,
            "missing": version.num_missing,
            "audio_seconds": round(version.expected_seconds, 3),
            "bytes": round(version.expected_bytes),
        }
        for version in plan.versions
    ]
    for row in versions:
        left = f"{row['missing']:,} of {counted(row['utterances'], 'utterance')} to extract"
        if row["changed"]:
            left += f", {row['changed']:,} of them changed"
        if row["missing"]:
            left += (
                f": about {hours(row['audio_seconds'])} of audio, {megabytes(row['bytes'])} "
                "of features"
            )
        say(
            f"{row['path']}: {left}; {row['present']:,} are there, {row['failed']:,} have "
            "failed before"
        )
        if row["failed_before"]:
            say(f"  {not_tried_again(row['failed_before'])}")
    return {"dry_run": True, "versions": versions}


def say_trial(trials: Sequence[Trial]) -> dict[str, Any]:
    """Print how long a run would take; returns it as one document."""
    seconds = sum(trial.expected_seconds for trial in trials)
    span: dict[str, float | None] = {}
    for name in ("at_least", "at_most"):
        ends = [getattr(trial, name) for trial in trials]
        span[name] = None if None in ends else sum(ends)
    for trial in trials:
        failed = f"; {counted(trial.failed, 'utterance')} of it failed" if trial.failed else ""
        audio = f"{hours(trial.audio_seconds)} of audio, drawn at random,"
        say(f"a trial of {', '.join(trial.versions)}: {audio} {_speed(trial)}{failed}")
    if math.isnan(seconds):
        say("nothing of the sample was extracted, so nobody can say how long all of it would take")
    elif trials:
        ends = [hours(end) for end in span.values() if end is not None]
        far = (
            f"({' to '.join(ends)})"
            if len(ends) == 2
            else "(too little was measured to say how far off that is)"
        )
        say(f"all of it would take about {hours(seconds)} {far}")
    return {"tried": [asdict(trial) for trial in trials], "expected_seconds": seconds, **span}


def _speed(run: Summary | Trial) -> str:
    devices = f"{run.processes} × {run.device}" if run.processes > 1 else run.device
    speed = f"{run.elapsed_seconds:.1f} s: {run.times_real_time:,.0f} × real time"
    return f"in {speed} on {devices}, {counted(run.threads, 'thread')}"


def say_summary(summary: Summary, where: str) -> int:
    """Print what a run did. Returns its exit code. If it was given up, what there is at
    `where` says why."""
    for version in summary.versions:
        say(version.path)
        say(f"  {_outcome(version, summary.interrupted)}")
        if version.failed_before:
            say(f"  {not_tried_again(version.failed_before)}")
    if not_looked_at := max(version.not_looked_at for version in summary.versions):
        audio = "its audio was" if not_looked_at == 1 else "their audio was"
        say(f"{not_looked_at:,} already there: {audio} not looked at (--check-sources does)")
    # That a part of the band is empty must be seen.
    for done, remark in (
        ("upsampled", ": there is nothing in them above half of their own rate"),
        ("downsampled", ""),
    ):
        if count := getattr(summary, done):
            rates = sorted(
                {version.sample_rate for version in summary.versions if getattr(version, done)}
            )
            were = counted(count, "utterance was", "utterances were")
            say(f"{were} {done} to {', '.join(f'{rate:,}' for rate in rates)} Hz{remark}")
    if summary.silent:
        say(f"{count_are(summary.silent, 'utterance')} silent, for example {summary.first_silent}")
    if summary.failed_by_reason:
        say(f"failures: {_by_reason(summary.failed_by_reason)}")
    if summary.stages and summary.audio_seconds:
        with_copies = any(version.utterances != summary.utterances for version in summary.versions)
        copies = ", with its copies," if with_copies else ""
        say(f"{hours(summary.audio_seconds)} of audio{copies} {_speed(summary)}")
        if summary.elapsed_seconds >= _TELLING_SECONDS:
            _print_stages(summary)
    failing = [as_location("path", version.path) for version in summary.versions if version.failed]
    if failing and not printing.as_json:
        from featcache.version.ledger import read_failures
        from featcache.version.records import run_names
        from featcache.version.version import Version

        place = str(failing[0] if len(failing) == 1 else failing[0].parent)
        opened = Version.open(failing[0])
        for latest in run_names(opened.store)[-1:]:
            # most often all have failed for one reason
            for failure in read_failures(opened, run=latest)[:1]:
                say(f"the first is {failure.id}: {failure.path}: {failure.message[:200]}")
        say(f"why utterances failed: featcache info {shlex.quote(place)} --failures")
    left = max(version.missing for version in summary.versions)
    if summary.interrupted and left > 0:
        kept = counted(
            sum(version.extracted for version in summary.versions), "extracted utterance"
        )
        how = "stopped" if summary.too_many_failures else "interrupted"
        say(f"{how}: {kept} kept, {left:,} left: run the same command again")
    if summary.too_many_failures:
        why = summary.too_many_failures
        if summary.failed:
            why += f"; why: featcache info {shlex.quote(where)} --failures"
        complain("\n  ".join([why, *summary.traceback.splitlines()]))
        return 1
    return INTERRUPTED if summary.interrupted else FAILURES_LEFT if summary.failed else 0


def _outcome(version: VersionSummary, interrupted: bool) -> str:
    if not (version.extracted or version.failed or version.missing or interrupted):
        if not version.utterances:
            return "nothing to do: this partition has no utterances"
        return f"nothing to do: {count_are(version.utterances, 'utterance')} already there"
    size = f" ({megabytes(version.num_bytes)})" if version.extracted else ""
    extracted = f"{counted(version.utterances, 'utterance')}: {version.extracted:,} extracted{size}"
    return f"{extracted}, {version.present:,} already there, {version.failed:,} failed"


def not_tried_again(failed: Mapping[str, int]) -> str:
    """That rows have failed before, for people; `failed` counts them by reason."""
    count = sum(failed.values())
    not_tried = "was not tried" if count == 1 else "were not tried"
    return (
        f"{count:,} failed before and {not_tried} again (--retry-failed does): {_by_reason(failed)}"
    )


def _by_reason(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in failed.items())


def _print_stages(summary: Summary) -> None:
    """Print where the time went, and what would make the slowest stage faster."""
    on_cpu = summary.device == "cpu"
    shares = ", ".join(
        f"{stage} {share:.0%}" for stage, share in summary.stages.items() if share >= 0.005
    )
    threads = summary.stages[summary.bottleneck] * summary.threads
    # On a GPU, some more threads than the budget wait for it.
    busy = f", {threads:.1f} of {counted(summary.threads, 'thread')}" if on_cpu else ""
    has_other_rates = summary.upsampled or summary.downsampled
    remedy = {
        "decode": "more threads, or a faster disk",
        "resample": "more threads" + (", or files at the config's rate" if has_other_rates else ""),
        "extract": "a GPU, or more threads" if on_cpu else "a faster GPU",
        "write": "a faster disk",
        "wait": "a faster disk" if on_cpu else "a faster GPU, or disk",
    }[summary.bottleneck]
    say(f"time in stages: {shares}; bottleneck: {summary.bottleneck}{busy} ({remedy} would help)")
    if len(summary.versions) > 1:
        parts = ", ".join(
            f"{version.name} {version.worker_seconds:.1f} s" for version in summary.versions
        )
        say(f"threads' time in extracting: {parts}")
