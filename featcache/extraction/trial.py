"""How long a run would take: a sample of what is missing is extracted for a few seconds,
by the engine of the run.

It goes into a temporary folder, which is removed.

The sample is blocks of neighbouring rows from random places: neighbours stay together,
since they may share a file. What the first seconds are spent on, threads that start and
buffers that grow, is left out. How much the speed changed from one fifth of the rest to
the next says how far the estimate may be off."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import disk_usage
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from featcache.extraction.extraction import Summary, run_extraction
from featcache.extraction.jobs import Engine, Progress
from featcache.extraction.plan import ExtractionPlan, group_versions, plan_extraction
from featcache.extraction.version_plan import VersionPlan
from featcache.spec import seconds_that_fill

SECONDS = 10.0
"""How long is measured."""

_WARM_UP_SECONDS = 2.0
_MOST_SECONDS = 45.0
"""When a trial ends though it has measured too little: an extractor may be slow."""

_MOST_ROWS = 100_000
_BLOCK_ROWS = 32
_MOST_BYTES = 4e9
_SHARD_MEGABYTES = 32.0
_CPU_BATCH_SECONDS = 20.0
"""Seconds of audio in a batch on a CPU: less than usual, since a slow extractor would
finish too few batches."""

_SLICES = 5


@dataclass(frozen=True)
class Trial:
    """What a trial has measured of the versions that are filled together, and what
    follows for all of it."""

    versions: list[str]
    """The names of their configs."""
    elapsed_seconds: float
    """The seconds that were measured."""
    audio_seconds: float
    """Seconds of audio that were extracted in them."""
    failed: int
    """Utterances of the sample that failed."""
    times_real_time: float
    expected_seconds: float
    """The seconds that all that is missing would take."""
    at_least: float | None
    """The seconds if the speed is as much higher as it changed in the trial; None if too
    little was measured to say."""
    at_most: float | None
    """The seconds if it is as much lower; None if too little was measured to say."""
    device: str
    processes: int
    threads: int


def run_trial(plan: ExtractionPlan, engine: Engine, folder: Path | None = None) -> list[Trial]:
    """Try each group of versions that are filled together. Nothing is written to the
    cache, but to a temporary folder, which is made in `folder`; None for where the system
    has them. Raises StoreError if the temporary folder cannot be written; ExtractorError
    if the extractor broke its contract."""
    return [_try(plan, group, engine, folder) for group in group_versions(plan.versions)]


def sample_rows(planned: VersionPlan) -> NDArray[np.int64]:
    """Rows of the run's manifest that the version lacks: random blocks of neighbours, in
    random order, int64 `[n]`."""
    rows = np.unique(
        (planned.first_row + np.flatnonzero(planned.rows.missing)) // len(planned.config.copies)
    )
    starts = np.random.default_rng(0).permutation(np.arange(0, len(rows), _BLOCK_ROWS))
    return np.concatenate(
        [rows[at : at + _BLOCK_ROWS] for at in starts[: _MOST_ROWS // _BLOCK_ROWS].tolist()]
    )


def _try(
    plan: ExtractionPlan, group: Sequence[VersionPlan], engine: Engine, parent: Path | None
) -> Trial:
    """Extract a sample for a group."""
    total = max(version.expected_seconds for version in group)
    sample = plan.manifest.take(sample_rows(group[0]))
    shard_megabytes = min(plan.options.shard_megabytes, _SHARD_MEGABYTES)
    options = replace(
        plan.options, partition=None, max_failures=None, shard_megabytes=shard_megabytes
    )
    with TemporaryDirectory(
        prefix="featcache-trial-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        # `only`: whether none of its files is there has been asked of the whole manifest.
        trial = plan_extraction(
            sample, [version.built for version in group], Path(folder), options, only=sample.ids
        )
        versions = [
            replace(one, batching=planned.batching)
            for one, planned in zip(trial.versions, group, strict=True)
        ]
        if not trial.device.is_cuda:
            trial.device.batch_seconds = min(trial.device.batch_seconds, _CPU_BATCH_SECONDS)
        bytes_per_second = sum(version.info.spec.expected_bytes(1.0) for version in versions)
        num_bytes = min(_MOST_BYTES, disk_usage(folder).free / 4)
        meter = _Meter(seconds_that_fill(num_bytes, bytes_per_second))
        timer = threading.Timer(_MOST_SECONDS, meter.stop.set)
        timer.daemon = True
        timer.start()
        try:
            summary = run_extraction(
                replace(trial, versions=versions), engine, meter.report, meter.stop
            )
        finally:
            timer.cancel()
    audio, elapsed, error = meter.speed(summary)
    speed = audio / elapsed if audio else math.nan
    return Trial(
        versions=[version.config.name for version in group],
        elapsed_seconds=round(elapsed, 2),
        audio_seconds=round(audio, 1),
        failed=sum(summary.failed_by_reason.values()),
        times_real_time=round(speed, 1),
        expected_seconds=round(total / speed, 1),
        at_least=round(total / speed / (1 + error), 1) if math.isfinite(error) else None,
        at_most=round(total / speed / (1 - error), 1) if error < 1 else None,
        device=summary.device,
        processes=summary.processes,
        threads=summary.threads,
    )


@dataclass
class _Meter:
    """Takes the times at which audio was extracted, and stops the run when they are
    enough."""

    most_audio_seconds: float
    """How much may be extracted before the run is stopped: it has to lie somewhere."""
    stop: threading.Event = field(default_factory=threading.Event)
    points: list[tuple[float, float]] = field(default_factory=list)
    """Times, as `perf_counter` says them, and how much audio was extracted by then."""

    def report(self, progress: Progress) -> None:
        """Take the time."""
        if self.stop.is_set() or not progress.computed_seconds:
            return
        now = perf_counter()
        self.points.append((now, progress.computed_seconds))
        is_long_enough = now >= self.points[0][0] + _WARM_UP_SECONDS + SECONDS
        if is_long_enough or progress.computed_seconds > self.most_audio_seconds:
            self.stop.set()

    def speed(self, summary: Summary) -> tuple[float, float, float]:
        """Seconds of audio, the seconds that they took, and the relative error of their
        ratio: twice its standard error by fifths; infinite if there are too few points.
        Then it is of the whole trial, as its summary says.
        """
        warm = [
            (at, audio) for at, audio in self.points if at >= self.points[0][0] + _WARM_UP_SECONDS
        ]
        # of other processes, it may be the same many times
        if len({audio for _, audio in warm}) <= _SLICES:
            return summary.audio_seconds, summary.elapsed_seconds, math.inf
        times, audio = np.array(warm).T
        slices = np.diff(np.interp(np.linspace(times[0], times[-1], _SLICES + 1), times, audio))
        error = 2 * slices.std(ddof=1) / slices.mean() / math.sqrt(_SLICES)
        return float(audio[-1] - audio[0]), float(times[-1] - times[0]), float(error)
