"""What `extract` and `repair` print about a run: the plan before it, the summary after it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcache.cli.common import hours, megabytes, say
from featcache.errors import counted

if TYPE_CHECKING:
    from featcache.extraction.extraction import ExtractionPlan
    from featcache.extraction.summary import Summary, VersionSummary

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
            "hours": round(version.expected_seconds / 3600, 4),
            "bytes": round(version.expected_bytes),
        }
        for version in plan.versions
    ]
    for row in versions if prints else ():
        changed = f", {row['changed']:,} of them changed" if row["changed"] else ""
        amount = f": about {hours(row['hours'] * 3600)} of audio, {megabytes(row['bytes'])} of features"
        say(
            f"{row['path']}: {row['missing']:,} of {counted(row['utterances'], 'utterance')} to extract{changed}"
            f"{amount if row['missing'] else ''}; {row['present']:,} are there, {row['failed']:,} have failed before"
        )
        if row["failed_before"]:
            say(f"  {_not_tried_again(row['failed_before'])}")
    return {"dry_run": True, "versions": versions}


def print_summary(summary: Summary) -> None:
    """Print what a run did, for people."""
    for version in summary.versions:
        say(version.path)
        say(f"  {_outcome(version, summary.interrupted)}")
        if version.failed_before:
            say(f"  {_not_tried_again(version.failed_before)}")
    if not_looked_at := max(version.not_looked_at for version in summary.versions):
        audio = "its audio was" if not_looked_at == 1 else "their audio was"
        say(f"{not_looked_at:,} already there: {audio} not looked at (--check-sources does)")
    if summary.elsewhere:
        say(counted(summary.elsewhere, "utterance was", "utterances were") + " done by another run in the meantime")
    if summary.resampled:
        resampled = counted(summary.resampled, "utterance was", "utterances were")
        say(f"{resampled} resampled to the config's rate")
    if summary.failures:
        say(f"failures: {_by_reason(summary.failures)}")
    if summary.stages and summary.audio_hours:
        with_copies = any(version.utterances != summary.utterances for version in summary.versions)
        say(
            f"{hours(summary.audio_hours * 3600)} of audio{', with its copies,' if with_copies else ''} in "
            f"{summary.seconds:.1f} s: {summary.times_real_time:,.0f} × real time on "
            f"{f'{summary.processes} × ' if summary.processes > 1 else ''}{summary.device}, "
            f"{counted(summary.threads, 'thread')}"
        )
        if summary.seconds >= _TELLING_SECONDS:
            _print_stages(summary)
    if with_failures := [version.path for version in summary.versions if version.failed]:
        where = with_failures[0] if len(with_failures) == 1 else str(Path(with_failures[0]).parent)
        _print_first_failure(with_failures[0])
        say(f"why utterances failed: featcache info {shlex.quote(where)} --failures")
    left = max(version.left for version in summary.versions) - summary.elsewhere
    if summary.interrupted and left > 0:
        kept = counted(sum(version.extracted for version in summary.versions), "extracted utterance")
        how = "stopped" if summary.too_many_failures else "interrupted"
        say(f"{how}: {kept} kept, {left:,} left: run the same command again")


def _print_first_failure(version: str) -> None:
    """Print what the latest run recorded first, if anything: most often all have failed for one reason."""
    from featcache.storage.location import parse_location
    from featcache.store.runs import failures_of, run_names
    from featcache.store.version import Version

    opened = Version.open(parse_location("path", version))
    for failure in islice((failure for run in run_names(opened)[-1:] for failure in failures_of(opened, run)), 1):
        say(f"the first is {failure.id}: {failure.path}: {failure.message[:200]}")


def _outcome(version: VersionSummary, interrupted: bool) -> str:
    if not (version.extracted or version.failed or version.left or interrupted):
        if version.utterances == 1:
            return "nothing to do: the utterance is already there"
        return f"nothing to do: all {version.utterances:,} utterances are already there"
    size = f" ({megabytes(version.num_bytes)})" if version.extracted else ""
    return (
        f"{counted(version.utterances, 'utterance')}: {version.extracted:,} extracted{size}, "
        f"{version.present:,} already there, {version.failed:,} failed"
    )


def _not_tried_again(failed: Mapping[str, int]) -> str:
    count = sum(failed.values())
    not_tried = "was not tried" if count == 1 else "were not tried"
    return f"{count:,} failed before and {not_tried} again (--retry-failed does): {_by_reason(failed)}"


def _by_reason(failed: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in failed.items())


def _print_stages(summary: Summary) -> None:
    """Print where the time went, and what would help."""
    shares = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.stages.items() if share >= 0.005)
    say(f"time in stages: {shares}; bottleneck: {_remedy(summary)}")
    if len(summary.versions) > 1:
        parts = ", ".join(f"{version.name} {version.seconds:.1f} s" for version in summary.versions)
        say(f"threads' time in extracting: {parts}")


def _remedy(summary: Summary) -> str:
    """The slowest stage of a run, and what would help."""
    on_cpu = summary.device == "cpu"
    remedy = {
        "decode": "more threads, or a faster disk",
        "resample": "more threads" + (", or files at the config's rate" if summary.resampled else ""),
        "extract": "a GPU, or more threads" if on_cpu else "a faster GPU",
        "write": "a faster disk",
        "wait": "a faster disk" if on_cpu else "a faster GPU, or disk",
    }
    return f"{summary.bottleneck} ({remedy[summary.bottleneck]} would help)"
