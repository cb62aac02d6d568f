"""Running: `run_extraction` has an engine do what `plan_extraction` has planned, records
it, and sums it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np

from featcache.errors import DamagedError, LockedError, StoreError
from featcache.extraction.audio_files import some_paths
from featcache.extraction.jobs import (
    Engine,
    JobGroup,
    Progress,
    RunControl,
    VersionCounts,
    VersionJob,
    maker,
)
from featcache.extraction.plan import ExtractionPlan, group_versions
from featcache.extraction.tasks import shard_tasks
from featcache.extraction.version_plan import VersionPlan
from featcache.spec import seconds_that_fill
from featcache.version.in_flight import forget_suspects
from featcache.version.records import Run
from featcache.version.version import Version
from featcache.version.wanted import damaged_wanted, read_all_wanted, read_wanted

_POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


@contextmanager
def exclusively(plan: ExtractionPlan, stop: Event) -> Iterator[ExtractionPlan]:
    """Hold the locks of the versions that a plan is to fill; the jobs of an array take
    none. Yields the plan, made anew if a version has changed since. If `stop` is set
    while it waits, nothing more is to be done. Raises LockedError if somebody else is at
    work in a version, and the run is not to wait; StoreError if a version cannot be
    written."""
    locked = set[str]()
    with ExitStack() as held:
        while plan.options.partition is None and not stop.is_set():
            lacking = {
                str(planned.path): planned
                for planned in plan.versions
                if planned.num_missing or planned.is_new
            }
            # Every run locks them in the same order.
            if not (pending := [lacking[path] for path in sorted(lacking.keys() - locked)]):
                break
            for planned in pending:
                _lock(plan, planned, held, stop)
            locked |= lacking.keys()
            if stop.is_set():
                break
            if any(
                {*Version.open(one.path).shard_names()} != {*one.index.shards} for one in pending
            ):
                plan = plan.again()
        yield replace(plan, locked=frozenset(locked))


def _lock(plan: ExtractionPlan, planned: VersionPlan, held: ExitStack, stop: Event) -> None:
    """Take the lock of a version, which is made if it is missing; unless `stop` is set
    before it is free."""
    is_said = False
    while not stop.is_set():
        try:
            held.enter_context(Version.create(planned.path, planned.info).at_work("extract"))
            return
        except LockedError as error:
            if not plan.options.wait:
                raise LockedError(
                    f"{error}: wait with --wait, or share the work among jobs by --partition"
                ) from error
            if not is_said:
                _log.info("%s: this run waits until that has ended", error)
                is_said = True
        stop.wait(_POLL_SECONDS)


def run_extraction(
    plan: ExtractionPlan,
    engine: Engine,
    report: Callable[[Progress], Any] = lambda _: None,
    stop: Event | None = None,
) -> Summary:
    """Extract what is missing. Raises StoreError if the cache cannot be written: what was
    committed stays.

    Args:
        plan: What to do. Nobody else is at work in its versions: see `exclusively`.
        engine: Does the shard tasks: `featcache.engines.local.run_locally`, for example.
        report: Called with the progress now and then, from worker threads, by one at a time.
        stop: Set it to end the run: what has been taken is finished and committed, and
            nothing more is taken.
    """
    began = perf_counter()
    limit = plan.options.failure_limit
    unproven = {
        planned.config.name
        for planned in plan.versions
        if limit is None and not planned.index.shards
    }
    control = RunControl(Progress(), report, stop or Event(), limit, unproven=unproven)
    for planned in plan.versions:
        if not (planned.num_missing or planned.is_new):
            _settle(plan, planned)
    for versions in group_versions(plan.versions):
        if not control.stop.is_set():
            _fill(plan, versions, engine, control)
    interrupted = control.stop.is_set()
    control.check(is_end=not interrupted)
    return summarize(plan, control.progress, perf_counter() - began, interrupted)


def _fill(
    plan: ExtractionPlan, versions: Sequence[VersionPlan], engine: Engine, control: RunControl
) -> None:
    """Create the versions of a group, have the engine fill them, and record the outcome."""
    jobs = []
    for planned in versions:
        batching = planned.batching
        assert batching is not None  # it lacks rows
        planned.built.extractor.chosen_batching = batching.batching
        version = Version.create(planned.path, planned.info)
        version.store.sweep()
        _want(plan, planned, version)
        run = Run(version, _asked(plan, planned))
        jobs.append(
            VersionJob(
                planned.built, batching, version, run, has_extracted=bool(planned.index.shards)
            )
        )
        control.progress.versions[jobs[-1].name] = VersionCounts()
    suspects = reduce(or_, (planned.suspects for planned in versions))
    some = () if plan.manifest.has_urls or plan.source is not None else some_paths(plan.manifest)
    group = JobGroup(jobs, plan.manifest.root, plan.source, suspects, some)
    first = versions[0]  # all lack the same rows
    bytes_per_second = max(version.info.spec.expected_bytes(1.0) for version in versions)
    seconds = seconds_that_fill(plan.options.shard_megabytes * 1e6, bytes_per_second)
    tasks = shard_tasks(
        first.manifest, first.rows, first.wanted, first.seconds, seconds, first.first_row
    )
    has_ended = False
    try:
        engine(group, tasks, control)
        # The jobs of an array leave the index to `featcache index`.
        for job in jobs:
            job.finish(
                control.progress, control.stop.is_set(), builds_index=plan.options.partition is None
            )
        has_ended = not control.progress.too_many_failures
    finally:
        for planned, job in zip(versions, jobs, strict=True):
            if planned.is_new and plan.options.partition is None and not has_ended:
                _remove_if_empty(job.version)


def _remove_if_empty(version: Version) -> None:
    """Remove a version that a failed run has made, if it holds neither features nor
    failures, nor marks of what may have crashed the run."""
    with suppress(OSError, StoreError):  # the error of the run says more
        kept = version.shard_names() + version.store.names("failures")
        if not kept and not any(version.store.desk.iterdir()):
            version.store.destroy()


def _settle(plan: ExtractionPlan, planned: VersionPlan) -> None:
    """Sweep a complete version and keep what the manifest wants of it, if it can be
    written and nobody is at work."""
    version = Version.open(planned.path)
    needs_lock = plan.options.partition is None and str(planned.path) not in plan.locked
    with suppress(StoreError), version.at_work("extract") if needs_lock else nullcontext():
        version.store.sweep()
        _want(plan, planned, version)
        forget_suspects(version, planned.index)


def _want(plan: ExtractionPlan, planned: VersionPlan, version: Version) -> None:
    """Keep what the manifest wants of a version, if that is not what is kept. A repair's
    manifest may have other rows: if it is not known, it wants what is extracted again."""
    if plan.only is not None:
        known = {*version.store.names("wanted")} - {*damaged_wanted(version)}
        known.update(*(one.names for one in read_all_wanted(version)))
        if planned.wanted.name not in known:
            rows = planned.first_row + np.flatnonzero(planned.rows.missing)
            replace(planned.wanted, rows=planned.wanted.rows[:, rows]).save(version)
        return
    with suppress(FileNotFoundError, DamagedError):
        if np.array_equal(read_wanted(version, planned.wanted.name).rows, planned.wanted.rows):
            return
    planned.wanted.save(version)


def _asked(plan: ExtractionPlan, planned: VersionPlan) -> dict[str, Any]:
    """What a run records, when it begins, of what it is to do."""
    return {
        "manifest": plan.manifest.source,
        "root": str(plan.manifest.root),
        "utterances": len(planned.manifest),
        "new": planned.num_missing - planned.num_replaced,
        "replaced": planned.num_replaced,
        "partition": None
        if plan.options.own_partition is None
        else str(plan.options.own_partition),
        "config": planned.config.resolved(),
        "from": None if plan.source is None else str(plan.source.version.path),
        **maker(plan.device),
        **({"device": plan.options.workers} if plan.options.workers else {}),
    }


# The summary, which `--json` prints


@dataclass(frozen=True)
class VersionSummary:
    """What a run did to one version."""

    name: str
    path: str
    fingerprint: str
    utterances: int
    """Utterances of the manifest, with the copies that the config makes of them."""
    present: int
    """Utterances of the manifest that the version held already."""
    not_looked_at: int
    """Those of them whose audio files were not compared with what they were when they
    were extracted."""
    extracted: int
    failed: int
    """Utterances in the failure ledger: of this run, and of earlier ones if they were not
    tried again."""
    num_bytes: int
    """Bytes of features as they are stored, with side arrays, that this run wrote."""
    worker_seconds: float = 0.0
    """Seconds of worker threads that computing the features took."""
    upsampled: int = 0
    """Utterances whose file has a lower sample rate than the config. Copies do not count."""
    downsampled: int = 0
    """Utterances whose file has a higher sample rate than the config. Copies do not count."""
    sample_rate: int = 0
    """The config's sample rate, in Hz."""
    failed_before: dict[str, int] = field(default_factory=dict)
    """Utterances that failed in earlier runs and were not tried again, by reason."""
    missing: int = 0
    """Utterances that the run was to extract and has not: it was interrupted."""


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    utterances: int
    """Utterances in the manifest, or in the partition of it that the run is about."""
    versions: list[VersionSummary]
    """What it did to each version, in the order of the configs."""
    failed_by_reason: dict[str, int]
    """Utterances that failed in this run, by reason."""
    upsampled: int
    """Utterances whose file has a lower sample rate than the config; of several configs,
    the one with the most."""
    downsampled: int
    """Utterances whose file has a higher sample rate than the config; of several configs,
    the one with the most."""
    silent: int
    """Utterances whose waveform is silent; of several configs, the one with the most."""
    first_silent: str
    """One of them, and why; empty if there is none."""
    audio_seconds: float
    """Seconds of audio extracted. Copies count."""
    elapsed_seconds: float
    """Seconds that this took, once it was planned: without the import of torch."""
    device: str
    """The model of the device that extracted; several if they were mixed."""
    threads: int
    """The budget of threads, over all processes."""
    stages: dict[str, float] = field(default_factory=dict)
    """Each stage's share of the worker threads' time, 0 to 1."""
    bottleneck: str = ""
    """The stage that held the run back; empty if there was nothing to do."""
    interrupted: bool = False
    """Whether the run was stopped before its end."""
    too_many_failures: str = ""
    """That more utterances failed than were allowed, and how many, or why else the run
    was given up; empty if not."""
    traceback: str = ""
    """That of the exceptions that an extractor has raised again and again, if that is
    why; otherwise empty."""
    processes: int = 1
    """The number of processes that extracted, each on a device."""

    @property
    def times_real_time(self) -> float:
        """Seconds of audio extracted in a second."""
        return self.audio_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def failed(self) -> int:
        """Utterances in the failure ledger, over all versions."""
        return sum(version.failed for version in self.versions)


def summarize(
    plan: ExtractionPlan, progress: Progress, elapsed_seconds: float, interrupted: bool
) -> Summary:
    """Sum up a run."""
    versions = [_version_summary(plan, planned, progress) for planned in plan.versions]
    total = sum(progress.stages.values())
    stages = (
        {stage: round(spent / total, 4) for stage, spent in progress.stages.items()}
        if total
        else {}
    )
    return Summary(
        utterances=len(plan.versions[0].manifest) // len(plan.versions[0].config.copies),
        versions=versions,
        failed_by_reason={
            reason: count for reason, count in sorted(progress.failures.items()) if count
        },
        upsampled=max((version.upsampled for version in versions), default=0),
        downsampled=max((version.downsampled for version in versions), default=0),
        silent=max((counts.silent for counts in progress.versions.values()), default=0),
        first_silent=next(
            (counts.first_silent for counts in progress.versions.values() if counts.silent), ""
        ),
        audio_seconds=progress.audio_seconds,
        elapsed_seconds=elapsed_seconds,
        device=", ".join(progress.devices) or plan.device.label,
        threads=progress.threads or plan.device.threads,
        stages=stages,
        bottleneck=max(stages, key=stages.__getitem__) if stages else "",
        interrupted=interrupted,
        too_many_failures=progress.too_many_failures,
        traceback=progress.traceback,
        processes=progress.processes or 1,
    )


def _version_summary(
    plan: ExtractionPlan, planned: VersionPlan, progress: Progress
) -> VersionSummary:
    counts = progress.versions.get(planned.config.name, VersionCounts())
    present = int(planned.rows.present.sum())
    # repair is about what is lost
    looks_at_audio = plan.options.check_sources or plan.only is not None
    return VersionSummary(
        name=planned.config.name,
        path=str(planned.path),
        fingerprint=planned.info.fingerprint,
        utterances=len(planned.manifest),
        present=present,
        not_looked_at=0 if looks_at_audio else present,
        extracted=counts.extracted,
        failed=int(planned.rows.failed.sum()) + counts.failed,
        num_bytes=counts.num_bytes,
        worker_seconds=round(counts.seconds, 3),
        upsampled=counts.upsampled,
        downsampled=counts.downsampled,
        sample_rate=planned.built.sample_rate,
        failed_before=planned.failed_before,
        missing=planned.num_missing - counts.extracted - counts.failed,
    )
