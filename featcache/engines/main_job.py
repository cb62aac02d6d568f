"""The main job as one call: `featcache.extract`, which the command calls too."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featcache.config import Config, load_configs
from featcache.engines.local import run_locally
from featcache.engines.process import can_fork
from featcache.errors import ArgumentError, did_you_mean, listing
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.corpus import CorpusSummary, extract_parts, plan_corpus
from featcache.extraction.extraction import Summary, exclusively, run_extraction, summarize
from featcache.extraction.jobs import Engine, JobGroup, Progress, RunControl
from featcache.extraction.options import Options
from featcache.extraction.plan import ExtractionPlan, plan_extraction
from featcache.extraction.tasks import ShardTask
from featcache.manifest.copies import copies_of
from featcache.manifest.label_files import needs_columns, template_of
from featcache.manifest.read import Table, is_table, manifest_of, read_manifest, read_some_rows
from featcache.manifest.utterances import Manifest
from featcache.storage.location import Location, as_location
from featcache.version.selection import is_corpus, refuse_version

_FEWEST_TASKS, _LEAST_TASKS = 4, 2
"""The shards to make from which on processes are forked, and those for each process, at
least. With fewer, threads are as fast."""

_READING = ("root", "format", "values", "allow_commands", "allow_queries")

_log = logging.getLogger(__name__)


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True)
class Observer:
    """Callbacks that report the progress of `featcache.extract`. All are optional.

    Each part of a corpus has a run of its own, one after the other. An exception of a
    callback ends the job."""

    read: Callable[[Manifest, str], object] = _ignore
    """Called with a manifest that has been read, and the name of its part of a corpus,
    else empty."""
    running: Callable[[], AbstractContextManager[object]] = nullcontext
    """Called for a context that a run is in once it is planned, also while it waits for
    others to end."""
    planned: Callable[[ExtractionPlan], object] = _ignore
    """Called with the plan before a run, or of a dry run."""
    progress: Callable[[Progress], object] = _ignore
    """Called with a snapshot of the `Progress` now and then, from any thread, by one at a
    time: `audio_seconds` that were extracted, `computed_seconds` with those that wait for
    earlier ones, `failures` by reason, committed `shards`, seconds of worker threads by
    `stages`."""
    done: Callable[[Summary], object] = _ignore
    """Called when a run has ended or was stopped."""


def choose_engine(options: Options) -> Engine:
    """Return the engine of the options. Raises ArgumentError or ConfigError if it takes no
    such device or there is none; MissingDependencyError if Ray is not installed."""
    if not isinstance(options.engine, str):
        return options.engine
    # A run of a few clips does not wait for the import of what several processes need.
    if options.is_on_ray:
        from featcache.engines.ray import on_ray

        return on_ray(options)
    if options.devices:
        from featcache.engines.devices import on_devices

        return on_devices(options)
    return _on_this_machine(options)


def _on_this_machine(options: Options) -> Engine:
    """Return an engine that extracts on one device: by threads of this process, or on a CPU
    by a forked process for each thread of the budget, which wait for no common
    interpreter. Models stay in this one: their operations leave the interpreter alone, and
    their weights would be in memory several times."""

    def run(group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
        most = group.device.threads
        is_light = not any(
            built.extractor.takes_rows or built.has_weights for built in group.configs
        )
        if most < 2 or group.device.is_cuda or group.source or not is_light or not can_fork():
            run_locally(group, tasks, control)
            return
        first = list(itertools.islice(tasks, max(_FEWEST_TASKS, _LEAST_TASKS * most)))
        tasks = itertools.chain(first, tasks)
        if len(first) < _FEWEST_TASKS:
            run_locally(group, tasks, control)
            return
        from featcache.engines.devices import run_forked

        run_forked(min(most, len(first) // _LEAST_TASKS), group, tasks, control, options)

    return run


def extract(
    manifest: str | Path | Manifest | Table | Sequence[str | Path],
    configs: str | Path | Config | Sequence[str | Path | Config] = "fbank80",
    cache: str | Path | Location = "features",
    options: Options | None = None,
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002
    reading: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    stop: threading.Event | None = None,
) -> Summary | CorpusSummary:
    """Extract the features of a manifest's utterances into a cache, as `featcache
    extract` does.

    Features that the cache holds are not extracted again, so a failed task may be retried
    as it is. Utterances that cannot be extracted do not raise an error:
    `summary.failed_by_reason` counts them, and the version's failure ledger has them.
    In the whole process, torch gets one thread of its own, and TF32 is turned off.
    Messages go to the logger `featcache`.

    Args:
        manifest: A manifest in any format of docs/manifest.md, or one that was read; or a
            table in memory: of pandas, Polars or Arrow, or a list of dictionaries. A list
            of manifests, or a pattern as in a shell, makes a corpus with a part for each;
            so does one manifest if the cache is a corpus.
        configs: YAML files, names of packaged configs, or configs; each fills a version.
        cache: The folder of the versions, made if it is missing; or a URL:
            `s3://bucket/features`.
        options: The options of the run: `featcache.Options(device="cpu", threads=2)`.
        set: Values of keys of all configs, by their dotted paths:
            `{"params.num_mel_bins": 40}`.
        reading: How manifests are read: `root`, `format`, `values`, `allow_commands`,
            `allow_queries`, as for `read_manifest`. Relative paths are relative to the
            folder or URL `root`; by default to the manifest's folder, or for a table to
            the current one.
        observer: Callbacks: `featcache.Observer(progress=print)`.
        stop: Set it to end the job: what has been taken is finished and committed.

    Returns:
        The summary: `summary.failed` utterances are in the ledger, and
            `summary.interrupted` is True if the job was stopped. For a corpus, a
            `CorpusSummary` with a summary of each part; a part whose manifest has faults
            is in its `errors`.

    Raises:
        ArgumentError: An argument is invalid.
        ConfigError: A config has faults, or there is no such device.
        ManifestError: The manifest has faults, or looks like that of another corpus.
        MissingDependencyError: The engine needs a package that is not installed.
        StoreError: Somebody else is at work in a version; or the cache cannot be written.
            What was committed stays.
        ExtractorError: The extractor broke its contract.
    """
    folder = as_location("cache", cache)
    options = options or Options()
    reading = dict(reading or {})
    for unknown in sorted(reading.keys() - _READING):
        meant, known = did_you_mean(unknown, _READING), listing(_READING, len(_READING))
        raise ArgumentError(f"reading: there is no {unknown}{meant}: give {known}")
    sources: list[Any] = [configs]
    if isinstance(configs, Iterable) and not isinstance(configs, str | Path | Config):
        sources = [*configs]
    for source in sources:
        if not isinstance(source, str | Path | Config):
            remedy = "give names or paths of configs, or Config objects"
            raise ArgumentError(f"configs: {source!r} is a {type(source).__name__}: {remedy}")
    loaded = [config for source in sources for config in load_configs(source, set)]
    if not loaded:
        raise ArgumentError("configs: give one at least")
    resolved = [config.resolved() for config in loaded]
    carry = any(map(needs_columns, resolved))
    has_own_rows = all(template_of(each) is None and copies_of(each).are_plain for each in resolved)
    engine, how_read = choose_engine(options), {**reading, "carry": carry}
    stop = stop or threading.Event()
    job = _Job(engine, how_read, has_own_rows, observer or Observer(), stop)
    refuse_version(folder)
    if is_table(manifest):
        manifest = manifest_of(manifest, audio=True, root=reading.get("root"), carry=carry)
    if isinstance(manifest, Manifest):
        if is_corpus(folder):
            raise ArgumentError(
                f"{cache}: is a corpus, whose parts are named after files: give the manifest's path"
            )
        return job.run(manifest, loaded, folder, options)
    is_list = not isinstance(manifest, str | Path)
    paths: Any = manifest if is_list else [manifest]
    corpus = plan_corpus(folder, paths, options, reading, is_list=is_list)
    if corpus is None:
        return job.run(paths[0], loaded, folder, options)
    return extract_parts(corpus, loaded, job.run)


@dataclass(frozen=True)
class _Job:
    engine: Engine
    reading: Mapping[str, Any]
    has_own_rows: bool
    """True if versions have the manifest's own rows: no copies, and no label files."""
    observer: Observer
    stop: threading.Event

    def run(
        self,
        source: str | Path | Manifest,
        configs: Sequence[Config | BuiltConfig],
        cache: Location,
        options: Options,
        part: str = "",
    ) -> Summary:
        """Extract a manifest into a cache, or plan a dry run."""
        manifest = source
        if not isinstance(manifest, Manifest):
            partition = options.own_partition
            if partition and self.has_own_rows:
                manifest = read_some_rows(manifest, partition.span, **self.reading)
            else:
                manifest = read_manifest(manifest, **self.reading)
        for line in manifest.notes:
            _log.info("%s", line)
        self.observer.read(manifest, part)
        plan = plan_extraction(manifest, configs, cache, options)
        for line in plan.notes:
            _log.info("%s", line)
        if options.dry_run:
            self.observer.planned(plan)
            return summarize(plan, Progress(), elapsed_seconds=0.0, interrupted=False)
        with self.observer.running(), exclusively(plan, self.stop) as plan:
            self.observer.planned(plan)
            summary = run_extraction(plan, self.engine, self.observer.progress, self.stop)
        self.observer.done(summary)
        return summary
