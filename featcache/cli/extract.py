"""`featcache extract`: the main job."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import hours, megabytes, note, print_json
from featcache.errors import counted

if TYPE_CHECKING:
    from featcache.extraction import Extraction
    from featcache.summary import Summary

INTERRUPTED = 130
FAILURES_LEFT = 3


@click.command(short_help="Extract the features of a manifest's utterances.")
@click.argument("manifest")
@click.option(
    "-c",
    "--config",
    "configs",
    multiple=True,
    default=("fbank80",),
    show_default=True,
    metavar="CONFIG",
    help="A YAML file, or a packaged config's name. Give several: each file is then decoded once.",
)
@options.cache("The cache: a folder, made where there is none.", default="features", show_default=True)
@options.root()
@options.device()
@options.threads("One budget for decoding, computing and writing.  [default: every core; on the CPU at most 8]")
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=128.0,
    show_default=True,
    metavar="MB",
    help="Size of a shard, about. What a kill costs; values do not depend on it.",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Try failures of earlier runs again, though their files are the same.",
)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="CACHE[/VERSION]",
    help="Make units from features that are there already, instead of from audio.",
)
@click.option(
    "--batching",
    type=click.Choice(["single", "equal_length", "padded"]),
    help="How clips share a model's batch.  [default: what the extractor declares, unless `probe` found a difference]",
)
@click.option("--allow-mismatch", is_flag=True, help="Take that --batching, though it may change values.")
@click.option("--check-sources", is_flag=True, help="Extract again where a file's size or mtime has changed.")
@options.trust_remote_code
@click.option("--dry-run", is_flag=True, help="Say what would be done, how many hours and bytes, and do nothing.")
@options.as_json("Print the summary as one JSON document.")
@click.pass_context
def extract(
    ctx: click.Context,
    manifest: str,
    configs: tuple[str, ...],
    cache: Path,
    root: Path | None,
    device: str | None,
    threads: int | None,
    shard_size: float,
    retry_failed: bool,
    source: Path | None,
    batching: str | None,
    allow_mismatch: bool,
    check_sources: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Extract the features of the MANIFEST's utterances into a cache.

    MANIFEST is a CSV, TSV or JSONL file with the columns id and path, and, where wanted, start and
    duration (seconds) and channel; - is standard input.

    Run it again, and only what is missing is done: after a crash, for a longer manifest, for rows whose
    path, start, duration or channel has changed. Another config makes another version beside the first.
    Utterances that cannot be extracted are named, with the reason, in the version's failure ledger.

    \b
    Examples:
      featcache extract train.csv
      featcache extract train.csv -c mfcc13 -o /data/features --threads 4
      featcache extract train.csv -c encodec24k-6kbps -c fbank80
      featcache extract train.csv -c units.yaml --from features/hubert-base-l6-3f9c21ab04de
      featcache extract segments.jsonl -c my-config.yaml --root /corpora/audio --dry-run
    """
    _limit_libraries(threads)
    from featcache.config import load_config
    from featcache.extraction import Extraction
    from featcache.manifest import read_manifest
    from featcache.work import Options

    chosen = Options(device, threads, shard_size, retry_failed, check_sources, source, batching, allow_mismatch)
    loaded = [load_config(config) for config in configs]
    if sys.stderr.isatty():
        for config in loaded:
            if weights := getattr(config.params, "weights", None):
                note(f"loading {config.name}: {weights}")
    extraction = Extraction(read_manifest(manifest, root=root, carry=False), loaded, cache, chosen)
    for line in extraction.notes:
        note(line)
    if dry_run:
        _print_plan(extraction, as_json)
        return
    from featcache.cli.progress import Display

    with Display(extraction) as display, stoppable() as stop:
        summary = extraction.run(display.update, stop)
    if as_json:
        print_json({**asdict(summary), "times_real_time": round(summary.times_real_time, 1)})
    else:
        print_summary(summary)
    ctx.exit(INTERRUPTED if summary.interrupted else FAILURES_LEFT if summary.failed else 0)


def _limit_libraries(threads: int | None) -> None:
    """Hold OpenMP and MKL to the budget before torch starts them; torch's own pools follow in `Device`."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one ends the process at once."""
    stop = threading.Event()
    signals = count()  # not asked of the event: the second one may come while the first is setting it, in this thread

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(signals):
            os._exit(INTERRUPTED)  # what is half written is in work/, and swept by the next run
        stop.set()
        note("interrupted: committing the shards that are whole (once more to stop at once)")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_plan(extraction: Extraction, as_json: bool) -> None:
    plan: list[dict[str, Any]] = [
        {
            "name": work.config.name,
            "path": str(work.path),
            "utterances": len(work.manifest),
            "present": int(work.todo.present.sum()),
            "failed": int(work.todo.failed.sum()),
            "changed": work.replaced,
            "missing": int(work.todo.missing.sum()),
            "hours": round(extraction.expected_seconds(work) / 3600, 4),
            "bytes": round(extraction.expected_bytes(work)),
        }
        for work in extraction.work
    ]
    if as_json:
        print_json({"dry_run": True, "versions": plan})
        return
    for row in plan:
        changed = f", {row['changed']:,} of them changed" if row["changed"] else ""
        click.echo(
            f"{row['path']}: {row['missing']:,} of {row['utterances']:,} utterances to extract{changed}: about "
            f"{hours(row['hours'] * 3600)} of audio, {megabytes(row['bytes'])} of features; "
            f"{row['present']:,} are there, {row['failed']:,} have failed before"
        )


def _bottleneck(summary: Summary) -> str:
    """The stage that held a run back, and what would help."""
    on_cpu = summary.device == "cpu"
    remedy = {
        "decode": "more threads, or a faster disk",
        "resample": "more threads" + (", or files at the config's rate" if summary.resampled else ""),
        "extract": "a GPU, or more threads" if on_cpu else "a faster GPU",
        "write": "a faster disk",
        "wait": "a faster disk" if on_cpu else "a faster GPU, or disk",
    }
    return f"{summary.bottleneck} ({remedy[summary.bottleneck]} would help)"


def print_summary(summary: Summary) -> None:
    """What a run did, for a person."""
    for version in summary.versions:
        click.echo(version.path)
        click.echo(
            f"  {counted(version.utterances, 'utterance')}: {version.extracted:,} extracted"
            f" ({megabytes(version.num_bytes)}), {version.present:,} there before, {version.failed:,} failed"
            if version.extracted or version.failed or summary.interrupted
            else f"  nothing to do: all {version.utterances:,} utterances are there"
        )
    if summary.elsewhere:
        click.echo(counted(summary.elsewhere, "utterance was", "utterances were") + " done by another run meanwhile")
    if summary.resampled:
        resampled = counted(summary.resampled, "utterance was", "utterances were")
        click.echo(f"{resampled} resampled from another rate than the config's")
    if summary.failures:
        click.echo("failures: " + ", ".join(f"{reason} {count:,}" for reason, count in summary.failures.items()))
    if summary.stages and summary.audio_hours:
        shares = ", ".join(f"{stage} {share:.0%}" for stage, share in summary.stages.items() if share >= 0.005)
        click.echo(
            f"{hours(summary.audio_hours * 3600)} of audio in {summary.seconds:.1f} s: "
            f"{summary.times_real_time:,.0f} × real time on {summary.device}, {counted(summary.threads, 'thread')}"
        )
        click.echo(f"time in stages: {shares}; bottleneck: {_bottleneck(summary)}")
        if len(summary.versions) > 1:
            parts = ", ".join(f"{version.name} {version.seconds:.1f} s" for version in summary.versions)
            click.echo(f"threads' time in extracting: {parts}")
    if with_failures := [version.path for version in summary.versions if version.failed]:
        where = with_failures[0] if len(with_failures) == 1 else Path(with_failures[0]).parent
        click.echo(f"why utterances failed: featcache info {where} --failures")
