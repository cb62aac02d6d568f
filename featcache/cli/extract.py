"""`featcache extract`: the main job."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from featcache.cli import options
from featcache.cli.common import FAILURES_LEFT, error_document, note, print_json, read_manifest, say
from featcache.cli.corpora import worst
from featcache.cli.process import INTERRUPTED, stoppable
from featcache.cli.runs import (
    Display,
    complain_of_failures,
    plan_document,
    print_summary,
    progress_options,
    summary_document,
    trial_document,
)
from featcache.errors import ArgumentError, counted, megabytes
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.config import Config
    from featcache.extraction.corpus import CorpusPlan, CorpusSummary
    from featcache.extraction.jobs import Engine
    from featcache.extraction.plan import Options
    from featcache.extraction.summary import Summary
    from featcache.extraction.version_plan import BuiltConfig
    from featcache.manifest.audio_locations import AudioLocation


@click.command(short_help="Extract the features of a manifest's utterances.")
@click.argument("manifests", metavar="MANIFEST...", type=options.TEXT, nargs=-1, required=True)
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
@options.manifest_and_config_keys
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
    "shard_megabytes",
    type=options.POSITIVE,
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
    help="Extract only partition I of N, counted from 0: 0/8 to 7/8. For jobs of an array, which work side by side, "
    "without locks. Of one manifest, it is a range of rows, equally long where all have durations; `featcache "
    "index` builds the index after them. Of several manifests, it is every N-th of them. With auto, the variables of "
    "SLURM, Kubernetes or SkyPilot say which.",
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait while another command is at work in the version.  [default: say which, and exit with 1]",
)
@options.trust_remote_code
@click.option("--dry-run", is_flag=True, help="Only say what would be done: utterances, hours, bytes.")
@click.option(
    "--trial",
    is_flag=True,
    help="With --dry-run: also extract a random sample on this device for some ten seconds, into a temporary folder, "
    "and say how long all of it would take.",
)
@progress_options
@options.as_json("Print the summary as one JSON document.")
def extract(
    manifests: tuple[str, ...],
    configs: tuple[str, ...],
    cache: Location,
    root: AudioLocation | None,
    engine: str,
    dry_run: bool,
    trial: bool,
    progress: str,
    as_json: bool,
    reading: dict[str, Any],
    keys: dict[str, Any],
    **chosen: Any,
) -> int:
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
      featcache extract train.csv -c fbank80 --set params.num_mel_bins=40
      featcache extract train.csv -c encodec24k-6kbps -c fbank80
      featcache extract train.csv -c units.yaml --from features/hubert-base-l6
      featcache extract train.csv -c hubert-base-l6 --device all
      featcache extract train.csv -c hubert-base-l6 -o /shared/features --engine ray
      featcache extract segments.jsonl -c my-config.yaml --root /corpora/audio --dry-run
      featcache extract train.csv -c hubert-base-l6 --device all --dry-run --trial
      featcache extract train.csv --partition 3/8
      featcache extract 'manifests/*.parquet' -o features
      featcache extract train.csv --root s3://bucket/corpus
      featcache extract train.csv -o s3://bucket/features
    """
    if trial and not dry_run:
        raise ArgumentError("--trial goes with --dry-run")
    _limit_libraries(chosen["threads"])
    from featcache.config import load_config
    from featcache.engines.main_job import choose_engine
    from featcache.extraction.corpus import plan_corpus
    from featcache.extraction.plan import Options

    engine_to_run, parsed = choose_engine(engine, Options.parse(**chosen))
    loaded = [load_config(config, keys) for config in configs]
    if sys.stderr.isatty():
        for config in loaded:
            if weights := getattr(config.params, "weights", None):
                note(f"loading {config.name}: {weights}")
    if parsed.partition is not None and parsed.partition.chosen_by:
        note(f"--partition {parsed.partition}, by {parsed.partition.chosen_by}")
    known = list(dict.fromkeys(key for config in loaded for key in config.keys))
    reading = {**reading, "root": root}
    corpus = plan_corpus(cache, manifests, parsed, reading, writes=not dry_run)
    run_options = parsed if corpus is None else corpus.options
    job = _Job(engine_to_run, run_options, reading, known, dry_run, trial, progress, as_json)
    if corpus is None:
        outcome = job.extract(manifests[0], loaded, cache)
        if as_json:
            print_json(outcome.document)
        return outcome.code
    if trial:
        raise ArgumentError("--trial is about one manifest: give one of these, and another cache")
    return _extract_parts(job, loaded, corpus)


class _Outcome(NamedTuple):
    """What became of a run."""

    document: dict[str, Any]
    """The summary, or what would be done."""
    code: int
    summary: Summary | None
    """None if nothing was to be done but to say what would be."""


@dataclass(frozen=True)
class _Job:
    """How manifests are extracted, each in a run of its own."""

    engine: Engine
    options: Options
    reading: dict[str, Any]
    """How manifests are read: arguments of `read_manifest`."""
    keys: Sequence[str]
    """The keys that the configs may have."""
    dry_run: bool
    trial: bool
    """Whether a dry run tries how long it would take."""
    progress: str
    as_json: bool

    def extract(
        self, manifest: str | Path, configs: Sequence[Config | BuiltConfig], cache: Location, *, is_part: bool = False
    ) -> _Outcome:
        """Extract a manifest, and print the summary for people."""
        from featcache.audio.commands import kill_commands
        from featcache.engines.ray import RAY
        from featcache.extraction.extraction import exclusively, run_extraction
        from featcache.extraction.plan import plan_extraction

        read = read_manifest(str(manifest), self.reading, self.keys, is_part=is_part, carry=False)
        plan = plan_extraction(read, configs, cache, self.options)
        for line in [*plan.notes, *disk_space_notes(cache, plan.expected_bytes)]:
            note(line)
        if self.dry_run:
            document = plan_document(plan, prints=not self.as_json)
            if self.trial:
                from featcache.extraction.trial import run_trial

                folder = _shared_folder(cache) if self.options.workers == RAY else None
                with redirect_stdout(sys.stderr):
                    trials = run_trial(plan, self.engine, folder)
                document["trial"] = trial_document(trials, prints=not self.as_json)
            return _Outcome(document, 0, None)
        # Ray prints to standard output, which is for the result.
        with (
            stoppable(kill_commands) as stop,
            exclusively(plan, stop) as plan,
            Display(plan, self.progress) as display,
            redirect_stdout(sys.stderr),
        ):
            summary = run_extraction(plan, self.engine, display.update, stop)
        document = summary_document(summary)
        if not self.as_json:
            print_summary(summary)
        if summary.too_many_failures:
            complain_of_failures(summary, str(cache))
            return _Outcome(document, 1, summary)
        code = INTERRUPTED if summary.interrupted else FAILURES_LEFT if summary.failed else 0
        return _Outcome(document, code, summary)


def _extract_parts(job: _Job, configs: Sequence[Config], plan: CorpusPlan) -> int:
    """Extract the parts of a corpus in turn. Returns the exit code of the worst."""
    from featcache.extraction.corpus import extract_parts

    outcomes: dict[str, _Outcome] = {}

    def extract_part(manifest: Path, built: list[BuiltConfig], cache: Location) -> Summary | None:
        outcomes[cache.name] = job.extract(manifest, built, cache, is_part=True)
        return outcomes[cache.name].summary

    result = extract_parts(plan, configs, job.reading["root"], extract_part, note)
    codes = {name: error.exit_code for name, error in result.errors.items()}
    codes |= {name: outcome.code for name, outcome in outcomes.items()}
    for name, known in result.unchanged.items():
        codes[name] = FAILURES_LEFT if any(version.failed for version in known) else 0
    code, unchanged = worst(codes.values()), len(result.unchanged)
    if job.as_json:
        documents = [{"part": name, **_part_document(name, result, outcomes)} for name in sorted(codes)]
        print_json({"corpus": str(plan.folder), "exit_code": code, "unchanged": unchanged, "parts": documents})
        return code
    done = len(outcomes.keys() - result.errors.keys())
    is_done = "to extract" if job.dry_run else "extracted"
    say(
        f"{plan.folder}: {counted(len(plan.manifests), 'part')}: {done:,} {is_done}, {unchanged:,} unchanged since"
        + (f", {len(result.errors):,} not extracted" if result.errors else "")
        + (f", {len(result.left):,} not begun: run the same command again" if result.left else "")
    )
    return code


def _part_document(name: str, result: CorpusSummary, outcomes: Mapping[str, _Outcome]) -> dict[str, Any]:
    if name in result.errors:
        return error_document(result.errors[name])
    if name in result.unchanged:
        import msgspec

        return {"unchanged": True, "versions": msgspec.to_builtins(result.unchanged[name])}
    return {"unchanged": False, **outcomes[name].document}


def _shared_folder(cache: Location) -> Path:
    """A folder that the nodes of a cluster share, for a trial: next to the cache, which they share."""
    if not isinstance(cache, Path):
        raise ArgumentError("--trial with --engine ray needs a cache in a folder that all nodes share: -o FOLDER")
    return _existing(cache.absolute().parent)


def _existing(folder: Path) -> Path:
    """The folder, or the lowest above it that exists."""
    return next(found for found in (folder.absolute(), *folder.absolute().parents) if found.is_dir())


def disk_space_notes(cache: Location, num_bytes: float) -> list[str]:
    """That the disk has no room for so many bytes, approximately. The cache may not exist yet."""
    if not isinstance(cache, Path):
        return []
    free = shutil.disk_usage(_existing(cache)).free
    if num_bytes <= free:
        return []
    return [f"{cache}: the features take about {megabytes(num_bytes)}, and the disk has {megabytes(free)} free"]


def _limit_libraries(threads: int | None) -> None:
    """Limit OpenMP and MKL to the budget before torch starts them; torch's own pools follow in `configure_torch`."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(threads)
