"""What `extract` and `repair` print about a run: the plan before it, the summary after it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcache.cli.common import as_document, complain, say
from featcache.errors import counted, hours, megabytes

if TYPE_CHECKING:
    from featcache.extraction.plan import ExtractionPlan
    from featcache.extraction.summary import Summary, VersionSummary
    from featcache.extraction.trial import Trial

_TELLING_SECONDS = 5.0
"""The time that a run must take at least for the shares of its stages to say what would make it faster."""


def plan_document(plan: ExtractionPlan, *, prints: bool) -> dict[str, Any]:
    """What a run would do, as one document; with `prints`, print it for people."""
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
    for row in versions if prints else ():
        changed = f", {row['changed']:,} of them changed" if row["changed"] else ""
        amount = f": about {hours(row['audio_seconds'])} of audio, {megabytes(row['bytes'])} of features"
        say(
            f"{row['path']}: {row['missing']:,} of {counted(row['utterances'], 'utterance')} to extract{changed}"
            f"{amount if row['missing'] else ''}; {row['present']:,} are there, {row['failed']:,} have failed before"
        )
        if row["failed_before"]:
            say(f"  {not_tried_again(row['failed_before'])}")
    return {"dry_run": True, "versions": versions}


def trial_document(trials: Sequence[Trial], *, prints: bool) -> dict[str, Any]:
    """How long a run would take; with `prints`, print it for people."""
    seconds = sum(trial.expected_seconds for trial in trials)
    lowest = [trial.at_least for trial in trials if trial.at_least is not None]
    highest = [trial.at_most for trial in trials if trial.at_most is not None]
    span = [sum(ends) if len(ends) == len(trials) else None for ends in (lowest, highest)]
    for trial in trials if prints else ():
        on = f"{_devices(trial.processes, trial.device)}, {counted(trial.threads, 'thread')}"
        failed = f"; {counted(trial.failed, 'utterance')} of it failed" if trial.failed else ""
        say(
            f"a trial of {', '.join(trial.versions)} on {on}: {hours(trial.audio_seconds)} of audio, drawn at random, "
            f"in {trial.elapsed_seconds:.1f} s: {trial.times_real_time:,.0f} × real time{failed}"
        )
    if prints and trials and math.isnan(seconds):
        say("nothing of the sample was extracted, so nobody can say how long all of it would take")
    elif prints and trials:
        ends = [hours(end) for end in span if end is not None]
        far = f"({' to '.join(ends)})" if len(ends) == 2 else "(too little was measured to say how far off that is)"
        say(f"all of it would take about {hours(seconds)} {far}")
    return {
        "tried": [asdict(trial) for trial in trials],
        "expected_seconds": seconds,
        "at_least": span[0],
        "at_most": span[1],
    }


def _devices(processes: int, model: str) -> str:
    return f"{processes} × {model}" if processes > 1 else model


def summary_document(summary: Summary) -> dict[str, Any]:
    """A run's summary as JSON."""
    return {**as_document(summary), "failed": summary.failed, "times_real_time": round(summary.times_real_time, 1)}


def print_summary(summary: Summary) -> None:
    """Print what a run did, for people."""
    for version in summary.versions:
        say(version.path)
        say(f"  {_outcome(version, summary.interrupted)}")
        if version.failed_before:
            say(f"  {not_tried_again(version.failed_before)}")
    if not_looked_at := max(version.not_looked_at for version in summary.versions):
        audio = "its audio was" if not_looked_at == 1 else "their audio was"
        say(f"{not_looked_at:,} already there: {audio} not looked at (--check-sources does)")
    _print_resampled(summary)
    if summary.silent:
        say(f"{counted(summary.silent, 'utterance is', 'utterances are')} silent, for example {summary.first_silent}")
    if summary.failed_by_reason:
        say(f"failures: {_by_reason(summary.failed_by_reason)}")
    if summary.stages and summary.audio_seconds:
        with_copies = any(version.utterances != summary.utterances for version in summary.versions)
        say(
            f"{hours(summary.audio_seconds)} of audio{', with its copies,' if with_copies else ''} in "
            f"{summary.elapsed_seconds:.1f} s: {summary.times_real_time:,.0f} × real time on "
            f"{_devices(summary.processes, summary.device)}, "
            f"{counted(summary.threads, 'thread')}"
        )
        if summary.elapsed_seconds >= _TELLING_SECONDS:
            _print_stages(summary)
    if with_failures := [version.path for version in summary.versions if version.failed]:
        where = with_failures[0] if len(with_failures) == 1 else str(Path(with_failures[0]).parent)
        _print_first_failure(with_failures[0])
        say(f"why utterances failed: featcache info {shlex.quote(where)} --failures")
    left = max(version.missing for version in summary.versions)
    if summary.interrupted and left > 0:
        kept = counted(sum(version.extracted for version in summary.versions), "extracted utterance")
        how = "stopped" if summary.too_many_failures else "interrupted"
        say(f"{how}: {kept} kept, {left:,} left: run the same command again")


def complain_of_failures(summary: Summary, cache: str) -> None:
    """Say why a run was given up, with the traceback of an extractor that is the cause."""
    why = f"{summary.too_many_failures}; why: featcache info {shlex.quote(cache)} --failures"
    complain("\n  ".join([why, *summary.traceback.splitlines()]))


def _print_first_failure(version: str) -> None:
    """Print what the latest run recorded first, if anything: most often all have failed for one reason."""
    from featcache.storage.location import parse_location
    from featcache.version.ledger import read_failures
    from featcache.version.records import run_names
    from featcache.version.version import Version

    opened = Version.open(parse_location("path", version))
    latest = run_names(opened.store)[-1:]
    for failure in islice((failure for run in latest for failure in read_failures(opened, run=run)), 1):
        say(f"the first is {failure.id}: {failure.path}: {failure.message[:200]}")


def _outcome(version: VersionSummary, interrupted: bool) -> str:
    if not (version.extracted or version.failed or version.missing or interrupted):
        if not version.utterances:
            return "nothing to do: this partition has no utterances"
        if version.utterances == 1:
            return "nothing to do: the utterance is already there"
        return f"nothing to do: all {version.utterances:,} utterances are already there"
    size = f" ({megabytes(version.num_bytes)})" if version.extracted else ""
    return (
        f"{counted(version.utterances, 'utterance')}: {version.extracted:,} extracted{size}, "
        f"{version.present:,} already there, {version.failed:,} failed"
    )


def _print_resampled(summary: Summary) -> None:
    """Print how many files have other sample rates than the configs: that a part of the band is empty must be seen."""
    for done, count, remark in (
        ("upsampled", summary.upsampled, ": there is nothing in them above half of their own rate"),
        ("downsampled", summary.downsampled, ""),
    ):
        rates = sorted({version.sample_rate for version in summary.versions if getattr(version, done)})
        if count:
            were = counted(count, "utterance was", "utterances were")
            say(f"{were} {done} to {', '.join(f'{rate:,}' for rate in rates)} Hz{remark}")


def not_tried_again(failed: Mapping[str, int]) -> str:
    """That rows have failed before, for people; `failed` counts them by reason."""
    count = sum(failed.values())
    not_tried = "was not tried" if count == 1 else "were not tried"
    return f"{count:,} failed before and {not_tried} again (--retry-failed does): {_by_reason(failed)}"


def _by_reason(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in failed.items())


def _print_stages(summary: Summary) -> None:
    """Print where the time went, and what would help."""
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.stages.items() if share >= 0.005)
    say(f"time in stages: {shares}; bottleneck: {summary.bottleneck}{_busy(summary)} ({_remedy(summary)} would help)")
    if len(summary.versions) > 1:
        parts = ", ".join(f"{version.name} {version.worker_seconds:.1f} s" for version in summary.versions)
        say(f"threads' time in extracting: {parts}")


def _busy(summary: Summary) -> str:
    """How many threads the slowest stage has had; on a GPU, some more than the budget wait for it, so none is said."""
    if summary.device != "cpu":
        return ""
    return f", {summary.stages[summary.bottleneck] * summary.threads:.1f} of {counted(summary.threads, 'thread')}"


def _remedy(summary: Summary) -> str:
    """What would make the slowest stage of a run faster."""
    on_cpu = summary.device == "cpu"
    has_other_rates = summary.upsampled or summary.downsampled
    remedy = {
        "decode": "more threads, or a faster disk",
        "resample": "more threads" + (", or files at the config's rate" if has_other_rates else ""),
        "extract": "a GPU, or more threads" if on_cpu else "a faster GPU",
        "write": "a faster disk",
        "wait": "a faster disk" if on_cpu else "a faster GPU, or disk",
    }
    return remedy[summary.bottleneck]
