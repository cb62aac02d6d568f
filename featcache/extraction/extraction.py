"""Running: `run_extraction` has an engine do what `plan_extraction` has planned, and records what came of it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from pathlib import Path
from time import perf_counter

import numpy as np

from featcache.errors import StoreError
from featcache.extraction.audio_files import some_paths
from featcache.extraction.jobs import ConcurrentRuns, Engine, JobGroup, Progress, RunControl, VersionJob, made_by
from featcache.extraction.plan import ExtractionPlan, group_versions, seconds_per_shard
from featcache.extraction.summary import Summary, summarize
from featcache.extraction.tasks import ShardTask, shard_tasks
from featcache.extraction.version_plan import VersionPlan
from featcache.storage.location import ObjectPath
from featcache.storage.objects import require_put_if_absent
from featcache.store.commits import sweep_attempts
from featcache.store.in_flight import forget_suspects
from featcache.store.partitions import digest_of_rows, is_done, shards_to_make_up_for_in
from featcache.store.records import Record
from featcache.store.removing import refuse_pruned
from featcache.store.run_records import ManifestKey, ShardEvent
from featcache.store.runs import Run
from featcache.store.unfinished import find_unfinished, held_before, shards_to_make_up_for, unrecorded_shards
from featcache.store.version import Version
from featcache.store.version_info import library_versions

_log = logging.getLogger(__name__)


def run_extraction(
    plan: ExtractionPlan,
    engine: Engine,
    report: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Summary:
    """Extract what is missing.

    Args:
        plan: What to do.
        engine: Does the shard tasks: `featcache.engines.local.run_locally`, for example.
        report: Called with the progress now and then, from worker threads, by one at a time.
        stop: Set it to end the run: what has been taken is finished and committed, and nothing more is taken.

    Raises:
        StoreError: The cache cannot be written. What was committed stays.
    """
    is_whole = plan.options.partition is None
    control = RunControl(
        Progress(), report, stop or threading.Event(), plan.options.max_failures, takes_claims=is_whole
    )
    jobs: list[VersionJob] = []
    if isinstance(plan.cache, ObjectPath) and any(one.num_missing or one.is_new for one in plan.versions):
        require_put_if_absent(plan.cache)
    for planned in plan.versions:
        if planned.partition is not None and not planned.num_missing:
            _settle_partition(plan, planned)
        elif not (planned.num_missing or planned.is_new):
            _settle(plan, planned)
    for versions in group_versions(plan.versions):
        if not control.stop.is_set():
            jobs += _fill(plan, versions, engine, control, is_first=not jobs)
    interrupted = control.stop.is_set()
    control.check_failures((job.counts for job in jobs), is_end=not interrupted)
    return summarize(
        plan.versions,
        jobs,
        control.progress,
        plan.device,
        looks_at_audio=plan.options.check_sources or plan.only is not None,  # repair is about what is lost
        utterances=plan.num_utterances,
        elapsed_seconds=perf_counter() - plan.started,
        interrupted=interrupted,
    )


def _fill(
    plan: ExtractionPlan, versions: Sequence[VersionPlan], engine: Engine, control: RunControl, *, is_first: bool
) -> list[VersionJob]:
    """Create the versions of a group, have the engine fill them, and record the outcome."""
    for planned in versions:
        planned.built.extractor.use_batching(planned.batching.batching)
    opened = [Version.create(plan.cache, planned.info, planned.path.name) for planned in versions]
    for version, planned in zip(opened, versions, strict=True):
        version.sweep()
        sweep_attempts(version, planned.index.shards)
    if control.takes_claims and is_first and isinstance(plan.cache, Path):
        _say_if_locks_are_not_shared(opened[0])
    jobs = [_begin(plan, planned, version) for planned, version in zip(versions, opened, strict=True)]
    suspects = reduce(or_, (planned.suspects for planned in versions))
    has_urls = plan.source is None and plan.manifest.has_urls
    some = some_paths(plan.manifest, np.ones(len(plan.manifest), bool)) if plan.source is None else ()
    group = JobGroup(jobs, plan.manifest.root, has_urls, plan.device, plan.source, suspects, some)
    engine(group, _tasks(plan, versions), control)
    for job in jobs:
        job.finish(interrupted=control.stop.is_set())
    return jobs


def _say_if_locks_are_not_shared(version: Version) -> None:
    with suppress(OSError, StoreError):  # what cannot be written is said when something is to be
        if (why := version.why_locks_are_not_shared()) is not None:
            _log.info(
                f"{version.path}: {why}: of several runs at once, each would do all of the work; give each its own "
                "partition with --partition"
            )


def _settle(plan: ExtractionPlan, planned: VersionPlan) -> None:
    """Sweep a version that lacks nothing, and record that it lacks nothing if its records do not say so; if it can be
    written.
    """
    with suppress(OSError, StoreError):
        version = Version.open(planned.path)
        version.sweep()
        sweep_attempts(version, planned.index.shards)
        forget_suspects(version, planned.index)
        if plan.only is None and find_unfinished(version, planned.index, all_runs=True):
            _begin(plan, planned, version).finish(interrupted=False)


def _settle_partition(plan: ExtractionPlan, planned: VersionPlan) -> None:
    """Record that a version lacks nothing of a partition if its records do not say so; also of one that has no rows."""
    assert planned.partition is not None
    if not planned.is_new and is_done(Version.open(planned.path), planned.partition):
        return
    version = Version.create(plan.cache, planned.info, planned.path.name)
    _begin(plan, planned, version).finish(interrupted=False)


def _tasks(plan: ExtractionPlan, versions: Sequence[VersionPlan]) -> Iterator[ShardTask]:
    """The shards of a group, whose versions lack the same rows."""
    first = versions[0]
    sized = versions if first.partition is None else plan.versions
    seconds = seconds_per_shard([version.info.spec for version in sized], plan.options.shard_megabytes)
    first_row = 0 if first.partition is None else first.partition.first
    return shard_tasks(first.manifest, first.index, first.rows, first.seconds, seconds, first.ranges, first_row)


def _begin(plan: ExtractionPlan, planned: VersionPlan, version: Version) -> VersionJob:
    """Open a version's ledger for this run."""
    index = planned.index
    asked = _asked(plan, planned, version)
    lost: list[ShardEvent] = []
    unrecorded: list[ShardEvent] = []
    if plan.only is None:
        there = planned.rows.present | (planned.rows.replaces >= 0)
        unrecorded = unrecorded_shards(version, index, planned.manifest.ids.take(np.flatnonzero(there)))
        if planned.partition is None:
            lost = shards_to_make_up_for(version, index, _manifest_key(plan))
        else:
            lost = shards_to_make_up_for_in(version, planned.partition)
    run = Run(version, asked, after=index.runs)
    if plan.only is None:  # else a repair holds the right to take shards away itself
        try:
            refuse_pruned(version, index.shards)
        except StoreError:
            run.withdraw()
            raise
    run.record_shards(unrecorded)
    return VersionJob(
        built=planned.built,
        batching=planned.batching,
        version=version,
        run=run,
        made_by=made_by(plan.device, planned.batching),
        shards=index.shards,
        concurrent=ConcurrentRuns(version, index.shards),
        lost=lost,
        builds_index=planned.partition is None,
    )


def _manifest_key(plan: ExtractionPlan) -> ManifestKey:
    return plan.manifest.source, str(plan.manifest.root)


def _asked(plan: ExtractionPlan, planned: VersionPlan, version: Version) -> Record:
    """What a run records, when it begins, of what it is to do."""
    manifest = _manifest_key(plan)
    ids, index = planned.manifest.ids, planned.index
    asked: Record = {
        "manifest": manifest[0],
        "root": manifest[1],
        "new": planned.num_missing - planned.num_replaced,
        "replaced": planned.num_replaced,
        "only": plan.only is not None,
    }
    if planned.partition is None:
        held = held_before(version, index, manifest, ids.take(np.flatnonzero(planned.rows.missing)))
        asked |= {"utterances": len(planned.manifest), "digest": digest_of_rows(planned.manifest)}
        asked |= {"held": len(index), **held}
    else:
        asked |= {"utterances": planned.partition.rows, "part": planned.partition.document()}
    return asked | {
        "config": planned.config.resolved(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": plan.options.workers or str(plan.device.torch_device),
        "threads": plan.device.threads,
        "from": None if plan.source is None else str(plan.source.version.path),
        "made_by": library_versions(),
    }
