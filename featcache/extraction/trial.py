"""An estimate of a run's time, from a sample that its engine extracts for a few seconds.

The sample is blocks of neighbouring rows, which may share a file, from random places. The
first seconds, in which threads start and buffers grow, are left out. Differences of speed
between fifths of the others give the error of the estimate."""

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
from featcache.extraction.plan import ExtractionPlan, VersionPlan, group_versions, plan_extraction
from featcache.extraction.tasks import seconds_that_fill

SECONDS = 10.0
"""Seconds that are measured."""

_WARM_UP_SECONDS = 2.0
_MOST_SECONDS = 45.0

_MOST_ROWS = 100_000
_BLOCK_ROWS = 32
_MOST_BYTES = 4e9
_SHARD_MEGABYTES = 32.0
_CPU_BATCH_SECONDS = 20.0
"""Seconds in a batch on a CPU: few, since a slow extractor would finish too few batches."""

_SLICES = 5


@dataclass(frozen=True)
class Trial:
    """The measurements and the estimate for versions that are filled together."""

    versions: list[str]
    elapsed_seconds: float
    audio_seconds: float
    """Seconds of audio that were extracted in them."""
    failed: int
    times_real_time: float
    expected_seconds: float
    """The seconds that the whole run would take."""
    at_least: float | None
    """The seconds at the speed plus its measured error; None if too little was measured."""
    at_most: float | None
    """The seconds at the speed less that error."""
    device: str
    processes: int
    threads: int


def run_trial(plan: ExtractionPlan, engine: Engine, folder: Path | None) -> list[Trial]:
    """Try each group of versions that are filled together. It writes only to a temporary
    folder in `folder`; None for the system's place."""
    return [_try(plan, group, engine, folder) for group in group_versions(plan.versions)]


def sample_rows(planned: VersionPlan) -> NDArray[np.int64]:
    """Return rows of the run's manifest that the version lacks: random blocks of
    neighbours, in random order, int64 `[n]`."""
    missing = planned.first_row + np.flatnonzero(planned.rows.missing)
    rows = np.unique(missing // len(planned.built.copies))
    starts = np.random.default_rng(0).permutation(np.arange(0, len(rows), _BLOCK_ROWS))
    starts = starts[: _MOST_ROWS // _BLOCK_ROWS]
    return np.concatenate([rows[start : start + _BLOCK_ROWS] for start in starts.tolist()])


def _try(
    plan: ExtractionPlan, group: Sequence[VersionPlan], engine: Engine, parent: Path | None
) -> Trial:
    total = max(version.expected_seconds for version in group)
    sample = plan.manifest.complete().take(sample_rows(group[0]))
    options = replace(
        plan.options,
        partition=None,
        max_failures=None,
        shard_megabytes=min(plan.options.shard_megabytes, _SHARD_MEGABYTES),
    )
    built = [version.built for version in group]
    with TemporaryDirectory(
        prefix="featcache-trial-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        # With `only`, the plan does not ask again whether the manifest's files exist.
        trial = plan_extraction(sample, built, Path(folder), options, only=sample.ids)
        versions = [
            replace(version, batching=planned.batching)
            for version, planned in zip(trial.versions, group, strict=True)
        ]
        batch_seconds = trial.batch_seconds
        if not trial.device.is_cuda:
            batch_seconds = min(batch_seconds, _CPU_BATCH_SECONDS)
        trial = replace(trial, versions=versions, batch_seconds=batch_seconds)
        bytes_per_second = sum(version.info.spec.expected_bytes(1.0) for version in versions)
        num_bytes = min(_MOST_BYTES, disk_usage(folder).free / 4)
        meter = _Meter(seconds_that_fill(num_bytes, bytes_per_second))
        summary = _run(trial, engine, meter)
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


def _run(trial: ExtractionPlan, engine: Engine, meter: _Meter) -> Summary:
    timer = threading.Timer(_MOST_SECONDS, meter.stop.set)
    timer.daemon = True
    timer.start()
    try:
        return run_extraction(trial, engine, meter.report, meter.stop)
    finally:
        timer.cancel()


@dataclass
class _Meter:
    """Records how much audio was extracted when, and stops the run when that is enough."""

    most_audio_seconds: float
    stop: threading.Event = field(default_factory=threading.Event)
    points: list[tuple[float, float]] = field(default_factory=list)
    """Times of `perf_counter`, and the seconds of audio extracted by then."""

    def report(self, progress: Progress) -> None:
        if self.stop.is_set() or not progress.computed_seconds:
            return
        now = perf_counter()
        self.points.append((now, progress.computed_seconds))
        began, _ = self.points[0]
        is_long_enough = now >= began + _WARM_UP_SECONDS + SECONDS
        if is_long_enough or progress.computed_seconds > self.most_audio_seconds:
            self.stop.set()

    def speed(self, summary: Summary) -> tuple[float, float, float]:
        """Return seconds of audio, the seconds that they took, and the relative error of
        their ratio: twice its standard error by fifths. Without enough points, the error
        is infinite."""
        warm = [
            (time, audio)
            for time, audio in self.points
            if time >= self.points[0][0] + _WARM_UP_SECONDS
        ]
        # Other processes may report the same progress many times.
        if len({audio for _, audio in warm}) <= _SLICES:
            return summary.audio_seconds, summary.elapsed_seconds, math.inf
        times, audio = np.array(warm).T
        slices = np.diff(np.interp(np.linspace(times[0], times[-1], _SLICES + 1), times, audio))
        error = 2 * slices.std(ddof=1) / slices.mean() / math.sqrt(_SLICES)
        return float(audio[-1] - audio[0]), float(times[-1] - times[0]), float(error)
