"""`featcache extract`: the main job."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featcache.cli import options
from featcache.cli.common import (
    FAILURES_LEFT,
    Document,
    as_document,
    error_document,
    note,
    printing,
    say,
    say_json,
)
from featcache.cli.corpora import worst
from featcache.cli.process import stoppable
from featcache.cli.progress import Display
from featcache.cli.runs import say_plan, say_summary, say_trial
from featcache.errors import ArgumentError, counted
from featcache.storage.location import Location

if TYPE_CHECKING:
    from featcache.extraction.corpus import CorpusSummary
    from featcache.extraction.extraction import Summary
    from featcache.extraction.jobs import Progress
    from featcache.extraction.plan import ExtractionPlan
    from featcache.manifest.utterances import Manifest

_ENGINE = (
    "local: this machine. ray: the Ray cluster of RAY_ADDRESS, or of this machine, or a new "
    "one. ray://HOST:PORT: another cluster."
)
_SHARD_SIZE = "Approximate size of a shard in MB. Does not change values.  [default: 128]"
_SOURCE = (
    "Read the features of this version instead of audio: for k-means units, and for configs "
    "with `store: {pool: …}`. --check-sources then compares the files of both versions."
)
_BATCHING = (
    "How a model gets clips: each alone, with clips of equal length, or padded.  [default: the "
    "extractor's own, unless `featcache probe` found that it changes values]"
)
_DISPLAY = (
    "How stderr shows progress. bar: a bar, or lines without a terminal. json: a JSON "
    "document every minute and at the end."
)


@options.command()
@click.argument("manifests", metavar="MANIFEST...", type=options.TEXT, nargs=-1, required=True)
@options.config(
    "configs",
    help=f"{options.CONFIGS} Repeat it for several: each audio file is decoded once.",
    multiple=True,
    default=("fbank80",),
    show_default=True,
)
@options.cache_to_fill
@options.root()
@options.manifest_and_config_keys
@options.device(
    "Compute on cpu, cuda, cuda:1 …, or with a process for each device: all (every GPU); "
    "cuda:0,cuda:2; cpu,cpu"
)
@options.flag(
    "--allow-mixed-devices",
    "Use GPUs of different models together, although each model rounds differently.",
)
@click.option("--engine", default="local", show_default=True, metavar="ENGINE", help=_ENGINE)
@options.extraction_threads
@click.option("--shard-size", "shard_megabytes", type=float, metavar="MB", help=_SHARD_SIZE)
@options.retry_failed
@click.option(
    "--max-failures",
    metavar="N|P%",
    help="Stop with exit code 1 if more than N utterances have failed in this run, or more than P% "
    "of those tried (checked from 100 on, and at the end). Features are kept.  "
    "[default: no limit]",
)
@click.option("--from", "source", type=options.LOCATION, metavar="CACHE[/VERSION]", help=_SOURCE)
@click.option("--batching", type=click.Choice(["single", "equal_length", "padded"]), help=_BATCHING)
@options.flag("--allow-mismatch", "Use the --batching that you give even if it may change values.")
@options.check_sources
@options.flag(
    "--replace",
    "Re-extract utterances whose path has changed, even if they are more than 5% of a version.",
)
@click.option(
    "--partition",
    metavar="I/N|auto",
    help="Extract only partition I of N, counted from 0: a range of rows, or every N-th of "
    "several manifests. auto: I and N come from SLURM, Kubernetes or SkyPilot. After all "
    "partitions of one manifest, run `featcache index`.",
)
@options.flag("--wait", "Wait while another command works in the version.  [default: exit with 1]")
@options.trust_remote_code
@options.flag(
    "--dry-run",
    "Print how many utterances, hours and bytes would be extracted, and extract nothing.",
)
@options.flag(
    "--trial",
    "With --dry-run: extract a random sample for ten seconds, keep nothing of it, and print how "
    "long the run would take.",
)
@click.option(
    "--progress",
    type=click.Choice(["bar", "json", "none"]),
    default="bar",
    show_default=True,
    help=_DISPLAY,
)
@options.flag("-q --quiet", "Print only errors, and the JSON of --json and --progress json.")
def extract(
    manifests: tuple[str, ...],
    configs: tuple[str, ...],
    cache: Location,
    trial: bool,
    **chosen: Any,
) -> int:
    """Extract the features of a manifest's utterances.

    MANIFEST is a CSV, TSV, JSONL or Parquet file with the column path. The columns id,
    start, duration (both in seconds) and channel are optional; - is standard input. It may
    also be a folder or a tar of audio, Parquet with audio inside, or a manifest of Kaldi,
    ESPnet, NeMo, Lhotse, SpeechBrain, fairseq, a TTS recipe or Hugging Face. Paths may be
    URLs (s3://, gs://, az://, https://) with the extra cloud.

    Run the command again to extract only what is missing: after a crash, with a longer
    manifest, or for rows whose path, start, duration or channel has changed. Each config
    gets its own version. Its failure ledger lists the utterances that cannot be extracted,
    with the reason.

    After Ctrl-C, SIGTERM or SIGHUP, extract saves everything extracted so far, and exits
    with 130. A second signal stops at once, and loses the shards being written.

    extract refuses a manifest if none of its files exists, or if it names other files than
    before for more than 5% of a version's utterances (and for more than one).

    Several manifests, or a quoted pattern, make a corpus. Each manifest is a part of it,
    with its own cache in CACHE, named after the file. Unchanged parts are skipped.

    \b
    Examples:
      featcache extract train.csv
      featcache extract train.json --set data_root=/corpora/librispeech
      featcache extract train.csv -c encodec24k-6kbps -c fbank80 -o /data/features
      featcache extract train.csv -c fbank80 --set params.num_mel_bins=40
      featcache extract train.csv -c units.yaml --from features/hubert-base-l6
      featcache extract train.csv -c hubert-base-l6 --device all --dry-run --trial
      featcache extract train.csv --partition 3/8
      featcache extract 'manifests/*.parquet' -o features
      featcache extract 'shards/{000..015}.tar' -o features
      featcache extract train.csv --root s3://bucket/corpus -o s3://bucket/features
    """
    printing.quiet = chosen.pop("quiet")
    shown = Shown(trial, chosen.pop("progress"))
    if trial and not chosen["dry_run"]:
        raise ArgumentError("--trial needs --dry-run")
    if chosen["threads"] is not None:
        # before torch starts them; `configure_torch` sets torch's own pools
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[variable] = str(chosen["threads"])
    exists = isinstance(cache, Path) and cache.exists()
    if not (exists or chosen["dry_run"]):  # a cache that is complete need not be written
        options.refuse_unwritable(cache)
    import_torch_when_used()
    from featcache.config import load_configs
    from featcache.engines.main_job import Observer
    from featcache.engines.main_job import extract as extract_features
    from featcache.extraction.extraction import Summary
    from featcache.extraction.options import Options
    from featcache.version.corpus import manifests_of_parts
    from featcache.version.selection import is_corpus

    reading = {name: chosen.pop(name) for name in options.READING}
    keys = options.take_keys(reading)
    run_options = Options(**{name: value for name, value in chosen.items() if value is not None})
    loaded = [config for source in configs for config in load_configs(source, keys)]
    for config in loaded:
        weights = getattr(config.params, "weights", None)
        if weights and sys.stderr.isatty():
            note(f"loading {config.name}: {weights}")
    partition = run_options.own_partition
    if partition is not None and partition.chosen_by:
        note(f"--partition {partition}, by {partition.chosen_by}")
    if trial and (is_corpus(cache) or manifests_of_parts(manifests)):
        raise ArgumentError("--trial is about one manifest: give one of these, and another cache")
    known_keys = list(dict.fromkeys(key for config in loaded for key in config.keys))

    def refuse_names(manifest: Manifest, part: str) -> None:
        printing.is_part = bool(part)
        options.refuse_unused(reading["values"], known_keys, manifest)

    result = extract_features(
        manifests[0] if len(manifests) == 1 else manifests,
        loaded,
        cache,
        run_options,
        reading=reading,
        observer=Observer(refuse_names, shown.running, shown.planned, shown.progress, shown.done),
        stop=shown.stop,
    )
    if not isinstance(result, Summary):
        return _conclude(cache, result, shown, run_options.dry_run)
    say_json(shown.documents[cache])
    return shown.codes[cache]


class Shown:
    """Shows each run, and keeps its exit code and its result as JSON, by the cache."""

    def __init__(self, trial: bool, progress_kind: str) -> None:
        self.stop = threading.Event()
        self.codes: dict[Location, int] = {}
        self.documents: dict[Location, Document] = {}
        self._trial = trial
        self._progress_kind = progress_kind
        self._around = ExitStack()
        self._reads_audio = True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let signals stop the run. What Ray prints to standard output goes to stderr."""
        from featcache.audio.commands import kill_commands

        with (
            stoppable(kill_commands, self.stop),
            ExitStack() as self._around,
            redirect_stdout(sys.stderr),
        ):
            yield

    def planned(self, plan: ExtractionPlan) -> None:
        """Begin to show a run, or print what a dry run would do."""
        self._cache = plan.cache
        self._reads_audio = any(version.built.label_files is None for version in plan.versions)
        if not plan.options.dry_run:
            self._display = self._around.enter_context(Display(plan, self._progress_kind))
            return
        self.codes[plan.cache] = 0
        self.documents[plan.cache] = document = say_plan(plan)
        if self._trial:
            document["trial"] = _try(plan)

    def progress(self, progress: Progress) -> None:
        """Show the progress of a run."""
        self._display.update(progress)

    def done(self, summary: Summary) -> None:
        """Print the summary of a run, and keep it."""
        document = as_document(summary)
        document["failed"] = summary.failed
        document["times_real_time"] = round(summary.times_real_time, 1)
        self.documents[self._cache] = document
        self.codes[self._cache] = say_summary(
            summary, str(self._cache), reads_audio=self._reads_audio
        )


def _try(plan: ExtractionPlan) -> Document:
    from featcache.engines.main_job import choose_engine
    from featcache.extraction.plan import existing_folder
    from featcache.extraction.trial import run_trial

    folder = None
    if plan.options.is_on_ray:
        if not isinstance(plan.cache, Path):
            raise ArgumentError(
                "--trial with --engine ray needs a cache in a shared folder: -o FOLDER"
            )
        # Ray's nodes share the folder of the cache.
        folder = existing_folder(plan.cache.absolute().parent)
    with redirect_stdout(sys.stderr):
        trials = run_trial(plan, choose_engine(plan.options), folder)
    return say_trial(trials)


def _conclude(corpus: Location, result: CorpusSummary, shown: Shown, is_dry_run: bool) -> int:
    """Print the results of a corpus's parts. Returns the worst exit code."""
    import msgspec

    codes: list[int] = []
    documents: dict[str, Document] = {}
    for name, error in result.errors.items():
        codes.append(error.exit_code)
        documents[name] = error_document(error)
    for name, versions in result.unchanged.items():
        if any(version.failed for version in versions):
            codes.append(FAILURES_LEFT)
        documents[name] = {"unchanged": True, "versions": msgspec.to_builtins(versions)}
    for name in result.parts:
        codes.append(shown.codes[corpus / name])
        documents[name] = {"unchanged": False, **shown.documents[corpus / name]}
    code, unchanged = worst(codes), len(result.unchanged)
    parts = [{"part": name, **documents[name]} for name in sorted(documents)]
    say_json({"corpus": str(corpus), "exit_code": code, "unchanged": unchanged, "parts": parts})
    done = "to extract" if is_dry_run else "extracted"
    counts = [f"{len(result.parts):,} {done}", f"{unchanged:,} unchanged since"]
    if result.errors:
        counts.append(f"{len(result.errors):,} not extracted")
    if result.left:
        counts.append(f"{len(result.left):,} not begun: run the same command again")
    say(f"{corpus}: {counted(len(parts) + len(result.left), 'part')}: {', '.join(counts)}")
    return code


def import_torch_when_used() -> None:
    """Let `import torch` cost nothing until something of torch is used, first by the main
    thread. It takes two seconds and 640 MB, and a run that finds nothing to do needs none."""
    spec = find_spec("torch")
    if spec is None or spec.loader is None or "torch" in sys.modules:
        return
    loader = spec.loader
    torch = sys.modules["torch"] = module_from_spec(spec)
    path = torch.__dict__.pop("__path__")  # read by the import of `torch.nn`, for example

    def load(name: str) -> Any:
        del torch.__getattr__
        torch.__path__ = path
        gc.disable()  # which would walk through 300,000 objects that stay, again and again
        try:
            loader.exec_module(torch)
        finally:
            gc.enable()
            gc.freeze()
        return getattr(torch, name)

    torch.__dict__["__getattr__"] = load  # called for what the module does not have
