"""Running: `run_extraction` has an engine do what `plan_extraction` has planned, and records what came of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from featcache.errors import DamagedError, LockedError, StoreError
from featcache.extraction.audio_files import some_paths
from featcache.extraction.jobs import Engine, JobGroup, Progress, RunControl, VersionJob, forget_marks, made_by, maker
from featcache.extraction.plan import ExtractionPlan, group_versions
from featcache.extraction.summary import Summary, summarize
from featcache.extraction.tasks import ShardTask, shard_tasks
from featcache.extraction.version_plan import VersionPlan
from featcache.version.records import Run
from featcache.version.version import Version
from featcache.version.wanted import Wanted, damaged_wanted, read_all_wanted, read_wanted

_log = logging.getLogger(__name__)


class _StoppedError(Exception):
    """The run was stopped while it waited for a lock."""


@contextmanager
def exclusively(plan: ExtractionPlan, stop: threading.Event) -> Iterator[ExtractionPlan]:
    """Hold the locks of the versions that a plan is to fill; the jobs of an array take none. Yields the plan, made anew
    if a version has changed since. If `stop` is set while it waits, nothing more is to be done. Raises LockedError if
    somebody else is at work in a version, and the run is not to wait; StoreError if a version cannot be written."""
    locked = set[str]()
    with ExitStack() as held:
        while plan.options.partition is None and not stop.is_set():
            lacking = {str(planned.path): planned for planned in plan.versions if planned.num_missing or planned.is_new}
            pending = [lacking[path] for path in sorted(lacking.keys() - locked)]  # every run in the same order
            if not pending:
                break
            for planned in pending:
                _lock(plan, planned, held, stop)
            locked |= lacking.keys()
            if any({*Version.open(one.path).shard_names()} != {*one.index.shards} for one in pending):
                plan = plan.again()
        yield plan


def _lock(plan: ExtractionPlan, planned: VersionPlan, held: ExitStack, stop: threading.Event) -> None:
    """Take the lock of a version, which is made if it is missing; unless `stop` is set before it is free."""
    version = Version.create(planned.path, planned.info)
    is_said = False

    def wait(holder: str) -> None:
        nonlocal is_said
        if not is_said:
            _log.info("%s: is in use by %s: this run waits until that has ended", version.path, holder)
            is_said = True
        if stop.is_set():
            raise _StoppedError

    try:
        held.enter_context(version.at_work("extract", wait if plan.options.wait else None))
    except LockedError as error:
        raise LockedError(
            f"{error}: run this again when that has ended, or with --wait, which waits for it; to share the work, give "
            "each of several jobs its own partition with --partition"
        ) from error
    except _StoppedError:
        return


def run_extraction(
    plan: ExtractionPlan,
    engine: Engine,
    report: Callable[[Progress], object] = lambda _: None,
    stop: threading.Event | None = None,
) -> Summary:
    """Extract what is missing.

    Args:
        plan: What to do. Nobody else is at work in its versions: see `exclusively`.
        engine: Does the shard tasks: `featcache.engines.local.run_locally`, for example.
        report: Called with the progress now and then, from worker threads, by one at a time.
        stop: Set it to end the run: what has been taken is finished and committed, and nothing more is taken.

    Raises:
        StoreError: The cache cannot be written. What was committed stays.
    """
    control = RunControl(Progress(), report, stop or threading.Event(), plan.options.failure_limit)
    jobs: list[VersionJob] = []
    for planned in plan.versions:
        if not (planned.num_missing or planned.is_new):
            _settle(plan, planned)
    for versions in group_versions(plan.versions):
        if not control.stop.is_set():
            jobs += _fill(plan, versions, engine, control)
    interrupted = control.stop.is_set()
    control.check_failures((job.counts for job in jobs), is_end=not interrupted)
    return summarize(plan, jobs, control.progress, interrupted)


def _fill(
    plan: ExtractionPlan, versions: Sequence[VersionPlan], engine: Engine, control: RunControl
) -> list[VersionJob]:
    """Create the versions of a group, have the engine fill them, and record the outcome."""
    jobs = []
    for planned in versions:
        planned.built.extractor.use_batching(planned.batching.batching)
        version = Version.create(planned.path, planned.info)
        version.store.sweep()
        _want(plan, planned, version)
        jobs.append(_begin(plan, planned, version))
    suspects = reduce(or_, (planned.suspects for planned in versions))
    has_urls = plan.source is None and plan.manifest.has_urls
    some = some_paths(plan.manifest, np.ones(len(plan.manifest), bool)) if plan.source is None else ()
    group = JobGroup(jobs, plan.manifest.root, has_urls, plan.device, plan.source, suspects, some)
    engine(group, _tasks(plan, versions), control)
    for job in jobs:
        job.finish(interrupted=control.stop.is_set())
    return jobs


def _settle(plan: ExtractionPlan, planned: VersionPlan) -> None:
    """Sweep a version that lacks nothing, and keep what the manifest wants of it; if it can be written, and nobody is
    at work in it."""
    version = Version.open(planned.path)
    with suppress(StoreError), nullcontext() if plan.options.partition else version.at_work("extract"):
        version.store.sweep()
        _want(plan, planned, version)
        forget_marks(version, planned.index)


def _want(plan: ExtractionPlan, planned: VersionPlan, version: Version) -> None:
    """Keep what the manifest wants of a version, if that is not what is kept. A repair's manifest may have other rows:
    if it is not known, it wants what is extracted again."""
    if plan.only is not None:
        known = {*version.store.names("wanted")} - {*damaged_wanted(version)}
        known.update(*(one.names for one in read_all_wanted(version)))
        if planned.wanted.name not in known:
            rows = planned.first_row + np.flatnonzero(planned.rows.missing)
            Wanted(planned.wanted.manifest, planned.wanted.rows[:, rows]).save(version)
        return
    with suppress(FileNotFoundError, DamagedError):
        if np.array_equal(read_wanted(version, planned.wanted.name).rows, planned.wanted.rows):
            return
    planned.wanted.save(version)


def _tasks(plan: ExtractionPlan, versions: Sequence[VersionPlan]) -> Iterator[ShardTask]:
    """The shards of a group, whose versions lack the same rows."""
    first, bytes_per_second = versions[0], max(version.bytes_per_second for version in versions)
    seconds = plan.options.shard_megabytes * 1e6 / bytes_per_second
    return shard_tasks(first.manifest, first.rows, first.wanted, first.seconds, seconds, first.first_row)


def _begin(plan: ExtractionPlan, planned: VersionPlan, version: Version) -> VersionJob:
    """Begin to record what this run does to a version."""
    return VersionJob(
        built=planned.built,
        batching=planned.batching,
        version=version,
        run=Run(version, _asked(plan, planned)),
        made_by=made_by(plan.device, planned.batching),
        had_shards=bool(planned.index.shards),
        builds_index=plan.options.partition is None,
    )


def _asked(plan: ExtractionPlan, planned: VersionPlan) -> dict[str, Any]:
    """What a run records, when it begins, of what it is to do."""
    return {
        "manifest": plan.manifest.source,
        "root": str(plan.manifest.root),
        "utterances": len(planned.manifest),
        "new": planned.num_missing - planned.num_replaced,
        "replaced": planned.num_replaced,
        "partition": None if plan.options.own_partition is None else str(plan.options.own_partition),
        "config": planned.config.resolved(),
        "from": None if plan.source is None else str(plan.source.version.path),
        **maker(plan.device),
        **({"device": plan.options.workers} if plan.options.workers else {}),
    }
