"""Running: `run_extraction` has an engine do what is planned, records it, and sums it up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from threading import Event
from time import perf_counter
from typing import Any

import numpy as np

from featcache.errors import DamagedError, LockedError, StoreError
from featcache.extraction.audio_files import paths_of_some
from featcache.extraction.jobs import (
    Engine,
    JobGroup,
    Progress,
    RunControl,
    VersionCounts,
    VersionJob,
    maker,
)
from featcache.extraction.plan import ExtractionPlan, VersionPlan, group_versions
from featcache.extraction.tasks import seconds_that_fill, shard_tasks
from featcache.version.in_flight import forget_suspects
from featcache.version.records import Run
from featcache.version.version import Version
from featcache.version.wanted import damaged_wanted, read_all_wanted, read_wanted

_POLL_SECONDS = 0.2

_log = logging.getLogger(__name__)


@contextmanager
def exclusively(plan: ExtractionPlan, stop: Event) -> Iterator[ExtractionPlan]:
    """Hold the locks of the versions that a plan is to fill; the jobs of an array take
    none. Yields the plan, planned again if a version has changed since. Raises LockedError
    if somebody else is at work, and the run is not to wait. Once `stop` is set, nothing
    more is to be done."""
    locked = set[str]()
    with ExitStack() as locks:
        while plan.options.partition is None and not stop.is_set():
            lacking = {
                str(planned.path): planned
                for planned in plan.versions
                if planned.num_missing or planned.is_new
            }
            # Every run locks them in the same order.
            pending = [lacking[path] for path in sorted(lacking.keys() - locked)]
            if not pending:
                break
            for planned in pending:
                _lock(plan, planned, locks, stop)
            locked |= lacking.keys()
            if stop.is_set():
                break
            if any(map(_has_changed, pending)):
                plan = plan.again()
        yield replace(plan, locked=frozenset(locked))


def _has_changed(planned: VersionPlan) -> bool:
    return {*Version.open(planned.path).shard_names()} != {*planned.index.shards}


def _lock(plan: ExtractionPlan, planned: VersionPlan, locks: ExitStack, stop: Event) -> None:
    """Take the lock of a version, which is created if it is missing, unless `stop` is
    set."""
    is_waiting = False
    while not stop.is_set():
        try:
            version = Version.create(planned.path, planned.info)
            locks.enter_context(version.at_work("extract"))
            if planned.is_new:
                locks.callback(_remove_unless_begun, version)
            return
        except LockedError as error:
            if not plan.options.wait:
                remedy = "run again when it has ended, or give extract --wait or --partition"
                raise LockedError(f"{error}: {remedy}") from error
            if not is_waiting:
                _log.info("%s: this run waits until that has ended", error)
            is_waiting = True
        stop.wait(_POLL_SECONDS)


def run_extraction(
    plan: ExtractionPlan,
    engine: Engine,
    report: Callable[[Progress], Any] = lambda _: None,
    stop: Event | None = None,
) -> Summary:
    """Extract what is missing. Nobody else may be at work in the plan's versions: see
    `exclusively`. Raises StoreError if the cache cannot be written.

    Args:
        report: Called with the progress, from any thread, by one at a time.
        stop: Set it to end the run: what has been taken is finished and committed.
    """
    began = perf_counter()
    limit = plan.options.failure_limit
    unproven = set[str]()
    for planned in plan.versions:
        if not (planned.num_missing or planned.is_new):
            _settle(plan, planned)
        if limit is None and not planned.index.shards:
            unproven.add(planned.config.name)
    control = RunControl(report, stop or Event(), limit, unproven=unproven)
    for versions in group_versions(plan.versions):
        if not control.stop.is_set():
            _fill(plan, versions, engine, control)
    interrupted = control.stop.is_set()
    control.check(is_end=not interrupted)
    report(control.progress)
    workers = [*control.workers.values()]
    return summarize(plan, control.progress, perf_counter() - began, interrupted, workers)


def _fill(
    plan: ExtractionPlan, versions: Sequence[VersionPlan], engine: Engine, control: RunControl
) -> None:
    jobs = [_begin(plan, planned) for planned in versions]
    control.add(Progress(versions={job.name: VersionCounts() for job in jobs}))
    some_paths: Sequence[str] = ()
    if plan.source is None and not versions[0].manifest.has_urls:
        some_paths = paths_of_some(versions[0].manifest)
    suspects = reduce(or_, (planned.suspects for planned in versions))
    group = JobGroup(
        jobs, plan.manifest.root, plan.source, suspects, plan.batch_seconds, some_paths
    )
    bytes_per_second = max(version.info.spec.expected_bytes(1.0) for version in versions)
    seconds = seconds_that_fill(plan.options.shard_megabytes * 1e6, bytes_per_second)
    first = versions[0]  # all lack the same rows
    tasks = shard_tasks(
        first.manifest, first.rows, first.wanted, first.seconds, seconds, first.first_row
    )
    # The jobs of an array leave the index to `featcache index`.
    is_whole = plan.options.partition is None
    has_ended = False
    try:
        engine(group, tasks, control)
        for job in jobs:
            job.finish(control.progress, control.stop.is_set(), builds_index=is_whole)
        has_ended = not control.progress.too_many_failures
    finally:
        for planned, job in zip(versions, jobs, strict=True):
            if planned.is_new and is_whole and not has_ended:
                _remove_if_empty(job.version)


def _begin(plan: ExtractionPlan, planned: VersionPlan) -> VersionJob:
    batching = planned.batching
    assert batching is not None  # it lacks rows
    planned.built.extractor.chosen_batching = batching.batching
    version = Version.create(planned.path, planned.info)
    version.store.sweep()
    _keep_wanted(plan, planned, version)
    run = Run(version, _asked(plan, planned))
    has_extracted = bool(planned.index.shards)
    return VersionJob(planned.built, batching, version, run, has_extracted)


def _remove_unless_begun(version: Version) -> None:
    """Remove a version that a run has made, if the run ended before it began to fill it."""
    with suppress(OSError, StoreError):
        if not version.store.names("wanted"):
            _remove_if_empty(version)


def _remove_if_empty(version: Version) -> None:
    """Remove a version that a failed run has made, if it is empty."""
    with suppress(OSError, StoreError):  # the error of the run matters more
        content = version.shard_names() + version.store.names("failures")
        if not content and not any(version.store.marks_folder.iterdir()):
            version.store.destroy()


def _settle(plan: ExtractionPlan, planned: VersionPlan) -> None:
    """Update a complete version, if it can be written and nobody is at work."""
    version = Version.open(planned.path)
    needs_lock = plan.options.partition is None and str(planned.path) not in plan.locked
    with suppress(StoreError), version.at_work("extract") if needs_lock else nullcontext():
        version.store.sweep()
        _keep_wanted(plan, planned, version)
        forget_suspects(version, planned.index)


def _keep_wanted(plan: ExtractionPlan, planned: VersionPlan, version: Version) -> None:
    """Save what the manifest wants of a version. A repair's manifest may have other rows:
    if it is unknown, it wants only what is extracted again."""
    wanted = planned.wanted
    if plan.only is None:
        with suppress(FileNotFoundError, DamagedError):
            if np.array_equal(read_wanted(version, wanted.name).rows, wanted.rows):
                return
        wanted.save(version)
        return
    known = {*version.store.names("wanted")} - {*damaged_wanted(version)}
    known.update(*(saved.names for saved in read_all_wanted(version)))
    if wanted.name not in known:
        rows = planned.first_row + np.flatnonzero(planned.rows.missing)
        replace(wanted, rows=wanted.rows[:, rows]).save(version)


def _asked(plan: ExtractionPlan, planned: VersionPlan) -> dict[str, Any]:
    partition, source = plan.options.own_partition, plan.source
    asked = {
        "manifest": plan.manifest.source,
        "root": str(plan.manifest.root),
        "utterances": len(planned.manifest),
        "new": planned.num_missing - planned.num_replaced,
        "replaced": planned.num_replaced,
        "partition": None if partition is None else str(partition),
        "config": planned.config.resolved(),
        "from": None if source is None else str(source.version.path),
        **maker(plan.device),
    }
    if plan.options.workers:
        asked["device"] = plan.options.workers
    return asked


# The summary, which `--json` prints


@dataclass(frozen=True)
class VersionSummary:
    """The outcome of a run for one version."""

    name: str
    path: str
    fingerprint: str
    utterances: int
    """Utterances of the manifest, with the copies that the config makes of them."""
    present: int
    """Utterances of the manifest that the version held already."""
    not_looked_at: int
    """Present utterances whose files were not compared with those of the extraction."""
    extracted: int
    failed: int
    """Utterances in the failure ledger, of this run or earlier ones."""
    num_bytes: int
    """Bytes of features that this run wrote, with side arrays."""
    worker_seconds: float
    """Seconds of worker threads that computing the features took."""
    upsampled: int
    """Utterances, without copies, whose file has a lower sample rate than the config."""
    downsampled: int
    """Utterances, without copies, whose file has a higher sample rate than the config."""
    sample_rate: int
    failed_before: dict[str, int]
    """Utterances that failed earlier and were not tried again, by reason."""
    missing: int
    """Utterances that an interrupted run has not extracted."""


@dataclass(frozen=True)
class Summary:
    """The outcome of a run."""

    utterances: int
    versions: list[VersionSummary]
    """The outcome for each version, in the order of the configs."""
    failed_by_reason: dict[str, int]
    """Utterances that failed in this run, by reason."""
    upsampled: int
    """The most `VersionSummary.upsampled` of all configs."""
    downsampled: int
    silent: int
    """Utterances whose waveform is silent; the most of all configs."""
    first_silent: str
    """A silent utterance, and the reason; else empty."""
    audio_seconds: float
    """Seconds of audio extracted. Copies count."""
    elapsed_seconds: float
    """Seconds of the run after planning."""
    device: str
    """The models of the devices that extracted."""
    threads: int
    stages: dict[str, float]
    """Each stage's share of the worker threads' time, 0 to 1."""
    bottleneck: str
    """The stage that took the most time; empty if there was nothing to do."""
    interrupted: bool
    """True if the run was stopped before its end."""
    too_many_failures: str
    """The reason why the run was given up; else empty."""
    traceback: str
    """The traceback of an extractor's exceptions, if they are that reason."""
    processes: int
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
    plan: ExtractionPlan,
    progress: Progress,
    elapsed_seconds: float,
    interrupted: bool,
    workers: Sequence[tuple[str, int]] = (),
) -> Summary:
    """Sum up a run, with the `RunControl.workers`."""
    versions = [_version_summary(plan, planned, progress) for planned in plan.versions]
    silent = [counts for counts in progress.versions.values() if counts.silent]
    total = sum(progress.stages.values())
    stages = {stage: round(spent / total, 4) for stage, spent in progress.stages.items() if total}
    return Summary(
        utterances=len(plan.versions[0].manifest) // len(plan.versions[0].built.copies),
        versions=versions,
        failed_by_reason={
            reason: count for reason, count in sorted(progress.failures.items()) if count
        },
        upsampled=max(version.upsampled for version in versions),
        downsampled=max(version.downsampled for version in versions),
        silent=max((counts.silent for counts in silent), default=0),
        first_silent=next((counts.first_silent for counts in silent), ""),
        audio_seconds=progress.audio_seconds,
        elapsed_seconds=elapsed_seconds,
        device=", ".join(dict.fromkeys(device for device, _ in workers)) or plan.device.label,
        threads=sum(threads for _, threads in workers) or plan.device.threads,
        stages=stages,
        bottleneck=max(stages, key=stages.__getitem__, default=""),
        interrupted=interrupted,
        too_many_failures=progress.too_many_failures,
        traceback=progress.traceback,
        processes=len(workers) or 1,
    )


def _version_summary(
    plan: ExtractionPlan, planned: VersionPlan, progress: Progress
) -> VersionSummary:
    counts = progress.versions.get(planned.config.name, VersionCounts())
    present = int(planned.rows.present.sum())
    # A repair does not look at audio that is present.
    compares_audio = plan.options.check_sources or plan.only is not None
    return VersionSummary(
        name=planned.config.name,
        path=str(planned.path),
        fingerprint=planned.info.fingerprint,
        utterances=len(planned.manifest),
        present=present,
        not_looked_at=0 if compares_audio else present,
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
