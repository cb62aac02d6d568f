"""What `extract` and `repair` print of a run: its plan and its summary."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from featcache.cli.common import FAILURES_LEFT, Document, complain, count_are, printing, say
from featcache.cli.process import INTERRUPTED
from featcache.errors import counted, hours, megabytes, real_time
from featcache.storage.location import Location, as_location

if TYPE_CHECKING:
    from featcache.extraction.extraction import Summary, VersionSummary
    from featcache.extraction.plan import ExtractionPlan
    from featcache.extraction.trial import Trial

_TELLING_SECONDS = 5.0
"""The time after which the shares of stages show what would make a run faster."""


def say_plan(plan: ExtractionPlan) -> Document:
    """Print what a run would do. Returns it as one document."""
    versions: list[Document] = []
    for version in plan.versions:
        present, failed = int(version.rows.present.sum()), int(version.rows.failed.sum())
        document = {
            "name": version.config.name,
            "path": str(version.path),
            "fingerprint": version.info.fingerprint,
            "utterances": len(version.manifest),
            "present": present,
            "failed": failed,
            "failed_before": version.failed_before,
            "changed": version.num_replaced,
            "missing": version.num_missing,
            "audio_seconds": round(version.expected_seconds, 3),
            "bytes": round(version.expected_bytes),
        }
        versions.append(document)
        utterances = counted(len(version.manifest), "utterance")
        work = f"{version.num_missing:,} of {utterances} to extract"
        if version.num_replaced:
            work += f", {version.num_replaced:,} of them changed"
        if version.num_missing:
            audio = f"{hours(version.expected_seconds)} of audio, "
            if version.built.label_files is not None:  # their length is not known before
                audio = ""
            work += f": about {audio}{megabytes(version.expected_bytes)} of features"
        say(f"{version.path}: {work}; {present:,} are there, {failed:,} have failed before")
        say_failed_before(version.failed_before)
    return {"dry_run": True, "versions": versions}


def say_trial(trials: Sequence[Trial]) -> Document:
    """Print how long a run would take. Returns it as one document."""
    for trial in trials:
        what = f"{hours(trial.audio_seconds)} of audio, drawn at random, {_speed(trial)}"
        if trial.failed:
            what += f"; {counted(trial.failed, 'utterance')} of it failed"
        say(f"a trial of {', '.join(trial.versions)}: {what}")
    seconds = sum(trial.expected_seconds for trial in trials)
    total: Document = {"expected_seconds": seconds}
    for limit in ("at_least", "at_most"):
        limits = [getattr(trial, limit) for trial in trials]
        total[limit] = None if None in limits else sum(limits)
    if math.isnan(seconds):
        say("nothing of the sample was extracted, so nobody can say how long all of it would take")
    elif trials:
        span = "too little was measured to say how far off that is"
        if None not in total.values():
            span = f"{hours(total['at_least'])} to {hours(total['at_most'])}"
        say(f"all of it would take about {hours(seconds)} ({span})")
    return {"tried": [asdict(trial) for trial in trials], **total}


def _speed(run: Summary | Trial) -> str:
    devices = f"{run.processes} × {run.device}" if run.processes > 1 else run.device
    measured = f"{run.elapsed_seconds:.1f} s: {real_time(run.times_real_time)}"
    return f"in {measured} on {devices}, {counted(run.threads, 'thread')}"


def say_summary(summary: Summary, where: str, *, reads_audio: bool = True) -> int:
    """Print what a run did, into the cache or version `where`, with audio or with other
    files, such as those of labels. Returns its exit code."""
    versions = summary.versions
    for version in versions:
        say(version.path)
        say(f"  {_outcome(version, summary.interrupted)}")
        say_failed_before(version.failed_before)
    not_looked_at = max(version.not_looked_at for version in versions)
    if not_looked_at:
        one, several = "its file was", "their files were"
        if reads_audio:
            one, several = "its audio was", "their audio was"
        were = one if not_looked_at == 1 else several
        say(f"{not_looked_at:,} already there: {were} not checked for changes (--check-sources)")
    for done, remark in (
        ("upsampled", ": they have no sound above half of their own rate"),
        ("downsampled", ""),
    ):
        count = getattr(summary, done)
        if count:
            resampled = [version for version in versions if getattr(version, done)]
            rates = sorted({version.sample_rate for version in resampled})
            shown = ", ".join(f"{rate:,}" for rate in rates)
            were = counted(count, "utterance was", "utterances were")
            say(f"{were} {done} to {shown} Hz{remark}")
    if summary.silent:
        say(f"{count_are(summary.silent, 'utterance')} silent, for example {summary.first_silent}")
    if summary.failed_by_reason:
        say(f"failures: {by_reason(summary.failed_by_reason)}")
    if summary.stages and summary.audio_seconds:
        audio = f"{hours(summary.audio_seconds)} of audio"
        if any(version.utterances != summary.utterances for version in versions):
            audio += ", with its copies,"
        say(f"{audio} {_speed(summary)}")
        if summary.elapsed_seconds >= _TELLING_SECONDS:
            _print_stages(summary)
    failing = [as_location("path", version.path) for version in versions if version.failed]
    if failing and not printing.as_json:
        _print_first_failure(failing)
    missing = max(version.missing for version in versions)
    if summary.interrupted and missing > 0:
        extracted = sum(version.extracted for version in versions)
        how = "stopped" if summary.too_many_failures else "interrupted"
        say(
            f"{how}: {counted(extracted, 'extracted utterance')} kept, {missing:,} left: run the "
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


def _print_first_failure(failing: Sequence[Location]) -> None:
    from featcache.version.ledger import read_failures
    from featcache.version.records import run_names
    from featcache.version.version import Version

    place = failing[0]
    opened = Version.open(place)
    for latest in run_names(opened.store)[-1:]:
        for failure in read_failures(opened, run=latest)[:1]:
            say(f"the first is {failure.id}: {failure.path}: {failure.message[:200]}")
    if len(failing) > 1:
        place = place.parent
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


def say_failed_before(failed: Mapping[str, int]) -> None:
    """Print how many rows have failed before, by reason, if any."""
    count = sum(failed.values())
    if count:
        were = counted(count, "failed before and was", "failed before and were")
        say(f"  {were} not tried again (--retry-failed does): {by_reason(failed)}")


def by_reason(failed: Mapping[str, int]) -> str:
    """List counts by reason for people."""
    return ", ".join(f"{reason} {count:,}" for reason, count in failed.items())


def _print_stages(summary: Summary) -> None:
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
        remedies |= {"extract": "a GPU, or more threads", "wait": "a faster disk"}
        # On a GPU, some more threads than the budget wait for it.
        threads = summary.stages[slowest] * summary.threads
        busy = f", {threads:.1f} of {counted(summary.threads, 'thread')}"
    stages = summary.stages.items()
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in stages if share >= 0.005)
    say(f"time in stages: {shares}; bottleneck: {slowest}{busy} ({remedies[slowest]} would help)")
    if len(summary.versions) > 1:
        parts = [f"{version.name} {version.worker_seconds:.1f} s" for version in summary.versions]
        say(f"threads' time in extracting: {', '.join(parts)}")
