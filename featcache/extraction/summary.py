"""The summary of a run, which `--json` prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter

from featcache.extraction.jobs import Progress, VersionCounts, VersionJob
from featcache.extraction.plan import ExtractionPlan
from featcache.extraction.version_plan import VersionPlan


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
    """Those of them whose audio files were not compared with what they were when they were extracted."""
    extracted: int
    failed: int
    """Utterances in the failure ledger: of this run, and of earlier ones if they were not tried again."""
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
    """Utterances in the manifest."""
    versions: list[VersionSummary]
    """What it did to each version, in the order of the configs."""
    failed_by_reason: dict[str, int]
    """Utterances that failed in this run, by reason."""
    upsampled: int
    """Utterances whose file has a lower sample rate than the config; of several configs, the one with the most."""
    downsampled: int
    """Utterances whose file has a higher sample rate than the config; of several configs, the one with the most."""
    silent: int
    """Utterances whose waveform is silent; of several configs, the one with the most."""
    first_silent: str
    """One of them, and why; empty if there is none."""
    audio_seconds: float
    """Seconds of audio extracted. Copies count."""
    elapsed_seconds: float
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
    """That more utterances have failed than were allowed, and how many, or why else the run was given up; empty if it
    was not."""
    traceback: str = ""
    """That of the exceptions that an extractor has raised again and again, if that is why; otherwise empty."""
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


def summarize(plan: ExtractionPlan, jobs: Iterable[VersionJob], progress: Progress, interrupted: bool) -> Summary:
    """Sum up a run, which ends now."""
    counts_of = {job.built: job.counts for job in jobs}
    looks_at_audio = plan.options.check_sources or plan.only is not None  # repair is about what is lost
    versions = [
        _version_summary(planned, counts_of.get(planned.built, VersionCounts()), looks_at_audio)
        for planned in plan.versions
    ]
    total = sum(progress.stages.values())
    stages = {stage: round(spent / total, 4) for stage, spent in progress.stages.items()} if total else {}
    return Summary(
        utterances=plan.num_utterances,
        versions=versions,
        failed_by_reason={reason: count for reason, count in sorted(progress.failures.items()) if count},
        upsampled=max((version.upsampled for version in versions), default=0),
        downsampled=max((version.downsampled for version in versions), default=0),
        silent=max((counts.silent for counts in counts_of.values()), default=0),
        first_silent=next((counts.first_silent for counts in counts_of.values() if counts.silent), ""),
        audio_seconds=progress.audio_seconds,
        elapsed_seconds=perf_counter() - plan.started,
        device=", ".join(progress.devices) or plan.device.label,
        threads=progress.threads or plan.device.threads,
        stages=stages,
        bottleneck=max(stages, key=stages.__getitem__) if stages else "",
        interrupted=interrupted,
        too_many_failures=progress.too_many_failures,
        traceback=progress.traceback,
        processes=progress.processes or 1,
    )


def _version_summary(plan: VersionPlan, counts: VersionCounts, looks_at_audio: bool) -> VersionSummary:
    present = int(plan.rows.present.sum())
    return VersionSummary(
        name=plan.config.name,
        path=str(plan.path),
        fingerprint=plan.info.fingerprint,
        utterances=len(plan.manifest),
        present=present,
        not_looked_at=0 if looks_at_audio else present,
        extracted=counts.extracted,
        failed=int(plan.rows.failed.sum()) + counts.failed,
        num_bytes=counts.num_bytes,
        worker_seconds=round(counts.seconds, 3),
        upsampled=counts.upsampled,
        downsampled=counts.downsampled,
        sample_rate=plan.built.sample_rate,
        failed_before=plan.failed_before,
        missing=plan.num_missing - counts.extracted - counts.failed,
    )
