"""`featcache extract`: the main job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from dataclasses import replace as with_values
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import FAILURES_LEFT, megabytes, note, print_json, read_manifest, say
from featcache.cli.corpora import worst
from featcache.cli.signals import INTERRUPTED, stoppable
from featcache.cli.summary import plan_document, print_summary
from featcache.errors import ArgumentError, DamagedError, ManifestError, counted

if TYPE_CHECKING:
    from featcache.config import Config
    from featcache.extraction.extraction import Options
    from featcache.extraction.jobs import Engine
    from featcache.extraction.summary import Summary
    from featcache.extraction.version_plan import BuiltConfig
    from featcache.manifest.audio_locations import AudioLocation
    from featcache.storage.location import Location


@click.command(short_help="Extract the features of a manifest's utterances.")
@options.manifests_argument
@click.option(
    "-c",
    "--config",
    "configs",
    type=options.CONFIG,
    multiple=True,
    default=("fbank80",),
    show_default=True,
    metavar="CONFIG",
    help="A YAML file, or the name of a packaged config. May be given several times: each audio file is decoded once.",
)
@options.cache(
    "The cache: a folder, created if missing, or a URL, as s3://bucket/features.", default="features", show_default=True
)
@options.root()
@options.manifest_format
@options.device("cpu, cuda, cuda:1 …; all: every GPU, a process for each; several: cuda:0,cuda:2 or cpu,cpu")
@click.option(
    "--allow-mixed-devices",
    is_flag=True,
    help="Let GPUs of several models extract, although each model rounds differently.",
)
@click.option(
    "--engine",
    default="local",
    show_default=True,
    metavar="ENGINE",
    help="local: this machine; ray: the Ray cluster that RAY_ADDRESS names or this machine is in, else one that is "
    "started here; ray://HOST:PORT: one elsewhere.",
)
@options.threads("One budget for decoding, computing and writing.  [default: every core; on the CPU at most 8]")
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    help="Approximate size of a shard. A kill loses the shards being written. Does not change values.  [default: 128]",
)
@click.option(
    "--retry-failed",
    is_flag=True,
    help="Retry utterances that failed in earlier runs, even if their files are unchanged.",
)
@click.option(
    "--max-failures",
    metavar="N|P%",
    help="Stop, and exit with 1, when more than N utterances have failed in this run, or more than P% of those tried "
    "(of 100 or more, or of all). What was extracted is kept.  [default: no limit]",
)
@click.option(
    "--from",
    "source",
    type=options.LOCATION,
    metavar="CACHE[/VERSION]",
    help="Make units from the features of this version instead of from audio.",
)
@click.option(
    "--batching",
    type=click.Choice(["single", "equal_length", "padded"]),
    help="How clips share a model's batch.  [default: what the extractor declares, unless `probe` found a difference]",
)
@click.option("--allow-mismatch", is_flag=True, help="Accept that --batching even though it may change values.")
@click.option("--check-sources", is_flag=True, help="Re-extract utterances whose file has changed in size or mtime.")
@click.option(
    "--replace",
    is_flag=True,
    help="Re-extract utterances whose path has changed even if they are more than 5% of the version.",
)
@click.option(
    "--partition",
    metavar="I/N|auto",
    help="Extract only partition I of N, counted from 0: 0/8 to 7/8. For jobs of an array, which need no locks and do "
    "not wait for each other. Of one manifest, it is a range of rows: the manifest needs durations, and `featcache "
    "index` builds the index after them. Of several manifests, it is every N-th of them. With auto, the variables of "
    "SLURM, Kubernetes or SkyPilot say which.",
)
@options.trust_remote_code
@click.option("--dry-run", is_flag=True, help="Only say what would be done: utterances, hours, bytes.")
@options.as_json("Print the summary as one JSON document.")
@click.pass_context
def extract(
    ctx: click.Context,
    manifests: tuple[str, ...],
    configs: tuple[str, ...],
    cache: Location,
    root: AudioLocation | None,
    device: str | None,
    allow_mixed_devices: bool,
    engine: str,
    threads: int | None,
    shard_size: float | None,
    retry_failed: bool,
    max_failures: str | None,
    source: Location | None,
    batching: str | None,
    allow_mismatch: bool,
    check_sources: bool,
    replace: bool,
    partition: str | None,
    dry_run: bool,
    as_json: bool,
    reading: dict[str, Any],
) -> None:
    """Extract the features of the MANIFEST's utterances into a cache.

    MANIFEST is a CSV, TSV, JSONL or Parquet file with the columns id and path, and optionally start and duration
    (seconds) and channel; - is standard input. Or a folder of audio, a data directory of Kaldi, a manifest of NeMo,
    Lhotse, SpeechBrain, fairseq, a TTS recipe or a dataset of Hugging Face, as it is: docs/manifest.md has them all.
    Paths may be URLs (s3://, gs://, az://, https://) with featcache[cloud].

    Run the command again to extract only what is missing: after a crash, with a longer manifest, or for
    rows whose path, start, duration or channel has changed. Each config gets a version of its own.
    Utterances that cannot be extracted are listed, with the reason, in the version's failure ledger.

    Ctrl-C, SIGTERM or SIGHUP: what is under way is finished, all that was extracted is committed, and the
    exit code is 130. A second signal stops at once, and loses the shards being written, as a kill does.

    A manifest that names other files for more than 5% of a version's utterances (and more than one) is
    refused: it looks like another corpus with the same ids. So is one of whose files none is there.

    Several manifests, or a quoted pattern, make a corpus: each manifest is a part, with a cache of its own in CACHE,
    named after the file. Parts that have not changed since are not looked at again.

    \b
    Examples:
      featcache extract train.csv
      featcache extract data/train
      featcache extract train.json --set data_root=/corpora/librispeech
      featcache extract train.csv -c mfcc13 -o /data/features --threads 4
      featcache extract train.csv -c encodec24k-6kbps -c fbank80
      featcache extract train.csv -c units.yaml --from features/hubert-base-l6
      featcache extract train.csv -c hubert-base-l6 --device all
      featcache extract train.csv -c hubert-base-l6 -o /shared/features --engine ray
      featcache extract segments.jsonl -c my-config.yaml --root /corpora/audio --dry-run
      featcache extract train.csv --partition 3/8
      featcache extract 'manifests/*.parquet' -o features
      featcache extract train.csv --root s3://bucket/corpus
      featcache extract train.csv -o s3://bucket/features
    """
    _limit_libraries(threads)
    from featcache.config import load_config
    from featcache.engines.main_job import choose_engine
    from featcache.extraction.extraction import SHARD_MEGABYTES, Options
    from featcache.extraction.failures import FailureLimit
    from featcache.extraction.partition import Partition
    from featcache.store.corpus import by_part_name, is_corpus, manifests_of_parts

    chosen = Options(
        device=device,
        threads=threads,
        shard_megabytes=shard_size or SHARD_MEGABYTES,
        retry_failed=retry_failed,
        check_sources=check_sources,
        replace=replace,
        source=source,
        batching=batching,
        allow_mismatch=allow_mismatch,
        max_failures=None if max_failures is None else FailureLimit.parse(max_failures),
        allow_mixed_devices=allow_mixed_devices,
        partition=None if partition is None else Partition.parse(partition, os.environ),
    )
    run, chosen = choose_engine(engine, chosen)
    loaded = [load_config(config) for config in configs]
    if sys.stderr.isatty():
        for config in loaded:
            if weights := getattr(config.params, "weights", None):
                note(f"loading {config.name}: {weights}")
    if chosen.partition is not None and chosen.partition.chosen_by:
        note(f"--partition {chosen.partition}, by {chosen.partition.chosen_by}")
    job = _Job(run, chosen, {**reading, "root": root}, dry_run, as_json)
    parts = manifests_of_parts(manifests)
    if parts is not None or is_corpus(cache):
        if not isinstance(cache, Path):
            raise ArgumentError(f"{cache}: a corpus is extracted into a folder: `featcache copy` copies it to a store")
        is_one = parts is None
        ctx.exit(_extract_parts(job, loaded, cache, parts or by_part_name(map(Path, manifests)), is_one=is_one))
    outcome = job.extract(manifests[0], loaded, cache)
    if as_json:
        print_json(outcome.document)
    ctx.exit(outcome.code)


@dataclass(frozen=True)
class _Outcome:
    """What became of a run."""

    document: dict[str, Any]
    """The summary, or what would be done."""
    code: int
    """The exit code."""
    summary: Summary | None
    """The summary; None if nothing was to be done but to say what would be."""


@dataclass(frozen=True)
class _Job:
    """How manifests are extracted, each in a run of its own."""

    engine: Engine
    options: Options
    reading: dict[str, Any]
    """How manifests are read: arguments of `read_manifest`."""
    dry_run: bool
    as_json: bool

    def extract(self, manifest: str | Path, configs: Sequence[Config | BuiltConfig], cache: Location) -> _Outcome:
        """Extract a manifest, and print the summary for people."""
        from featcache.cli.progress import Display
        from featcache.extraction.extraction import plan_extraction, run_extraction

        plan = plan_extraction(read_manifest(str(manifest), self.reading, carry=False), configs, cache, self.options)
        for line in [*plan.notes, *disk_space_notes(cache, plan.expected_bytes)]:
            note(line)
        if self.dry_run:
            return _Outcome(plan_document(plan, prints=not self.as_json), 0, None)
        # Ray prints to standard output, which is for the result.
        with Display(plan) as display, stoppable() as stop, redirect_stdout(sys.stderr):
            summary = run_extraction(plan, self.engine, display.update, stop)
        document = {**asdict(summary), "times_real_time": round(summary.times_real_time, 1)}
        if not self.as_json:
            print_summary(summary)
        if summary.too_many_failures:
            note(f"featcache: {summary.too_many_failures}; why: featcache info {shlex.quote(str(cache))} --failures")
            return _Outcome(document, 1, summary)
        code = INTERRUPTED if summary.interrupted else FAILURES_LEFT if summary.failed else 0
        return _Outcome(document, code, summary)


def _extract_parts(
    job: _Job, configs: Sequence[Config], corpus: Path, manifests: Mapping[str, Path], *, is_one: bool = False
) -> int:
    """Extract the parts of a corpus, one after the other, and return the exit code of the worst.

    `is_one` if a single manifest was given: then a partition is one of its rows, and not of the parts.
    """
    from featcache.extraction.corpus import PartRun, build_configs, plan_corpus

    partition = None if is_one else job.options.partition
    job = job if partition is None else with_values(job, options=with_values(job.options, partition=None))
    plan = plan_corpus(corpus, manifests, partition, writes=not job.dry_run)
    for line in plan.notes:
        note(line)
    built = build_configs(configs, job.options)
    documents, codes, unchanged, wrong = [], [0], 0, 0
    for number, (name, manifest) in enumerate(plan.manifests.items(), 1):
        try:
            part = PartRun(plan, name)
            known = part.unchanged(built, job.options, job.reading["root"])
            if known is not None:
                unchanged += 1
                codes.append(FAILURES_LEFT if any(version.failed for version in known) else 0)
                documents.append({"part": name, "unchanged": True, "versions": [asdict(version) for version in known]})
                continue
            changed = "; its manifest has changed since it was extracted" if part.is_changed else ""
            note(f"part {name}, {number:,} of {len(plan.manifests):,}{changed}")
            outcome = job.extract(manifest, built, part.cache)
            if outcome.summary is not None and job.options.partition is None:
                part.record(outcome.summary)
        except (DamagedError, ManifestError) as error:  # the other parts need not wait for it
            note(f"featcache: {error}")
            documents.append({"part": name, "error": str(error)})
            codes.append(error.exit_code)
            wrong += 1
            continue
        documents.append({"part": name, "unchanged": False, **outcome.document})
        codes.append(outcome.code)
        if outcome.code in (1, INTERRUPTED):
            break
    code = worst(codes)
    if job.as_json:
        print_json({"corpus": str(corpus), "exit_code": code, "unchanged": unchanged, "parts": documents})
    else:
        done = len(documents) - unchanged - wrong
        left = len(plan.manifests) - len(documents)
        what = "to extract" if job.dry_run else "extracted"
        say(
            f"{corpus}: {counted(len(plan.manifests), 'part')}: {done:,} {what}, {unchanged:,} unchanged since"
            + (f", {wrong:,} not extracted" if wrong else "")
            + (f", {left:,} not begun: run the same command again" if left else "")
        )
    return code


def disk_space_notes(cache: Location, num_bytes: float) -> list[str]:
    """That the disk has no room for what is to be written.

    Args:
        cache: The cache, which may not exist yet.
        num_bytes: Bytes to be written, approximately.
    """
    if not isinstance(cache, Path):
        return []
    folder = next((folder for folder in (cache.absolute(), *cache.absolute().parents) if folder.is_dir()), None)
    if folder is None:
        return []
    free = shutil.disk_usage(folder).free
    if num_bytes <= free:
        return []
    return [f"{cache}: the features take about {megabytes(num_bytes)}, and the disk has {megabytes(free)} free"]


def _limit_libraries(threads: int | None) -> None:
    """Limit OpenMP and MKL to the budget before torch starts them; torch's own pools follow in `configure_torch`."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)
