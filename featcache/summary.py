"""The summary of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from featcache.device import Device
from featcache.engines.progress import Counted, Progress
from featcache.extract.work import Work


@dataclass(frozen=True)
class VersionSummary:
    """What a run did to one version.

    Attributes:
        name: the config's.
        path: of the version.
        fingerprint: of the version.
        utterances: of the manifest, with the copies that the config makes of them.
        present: utterances of the manifest that were there already.
        extracted: utterances extracted by this run.
        failed: utterances in the ledger: by this run and, not tried again, by earlier ones.
        failed_before: those of earlier runs, by reason.
        num_bytes: of features as they are stored, with side arrays, written by this run.
        seconds: of worker threads that computing them took.
        resampled: utterances whose file had another rate than the config; their copies do not count.
        left: utterances that the run was to extract, and has not: it was interrupted, or another run has done them.
    """

    name: str
    path: str
    fingerprint: str
    utterances: int
    present: int
    extracted: int
    failed: int
    num_bytes: int
    seconds: float = 0.0
    resampled: int = 0
    failed_before: dict[str, int] = field(default_factory=dict)
    left: int = 0


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        utterances: in the manifest.
        versions: one entry a config.
        failures: of this run, by reason.
        resampled: utterances whose file had another rate than the config; with several, of the one where most had.
        audio_hours: extracted; copies count.
        seconds: from start to end.
        device: that extracted.
        threads: the budget.
        stages: each stage's share of the worker threads' time, 0 to 1.
        bottleneck: the stage that held the run back; empty where there was nothing to do.
        elsewhere: utterances that another run did meanwhile.
        interrupted: whether the run was stopped before its end.
    """

    utterances: int
    versions: list[VersionSummary]
    failures: dict[str, int]
    resampled: int
    audio_hours: float
    seconds: float
    device: str
    threads: int
    stages: dict[str, float] = field(default_factory=dict)
    bottleneck: str = ""
    elsewhere: int = 0
    interrupted: bool = False

    @property
    def times_real_time(self) -> float:
        """Seconds of audio extracted in a second."""
        return self.audio_hours * 3600 / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        """Utterances in the failure ledger, over all versions."""
        return sum(version.failed for version in self.versions)


def summarize(
    work: Sequence[Work], progress: Progress, device: Device, *, utterances: int, seconds: float, interrupted: bool
) -> Summary:
    """Sum up a run.

    Args:
        work: what each version lacked.
        progress: what the run did.
        device: that extracted.
        utterances: in the manifest.
        seconds: from start to end.
        interrupted: whether it was stopped before its end.
    """
    versions = []
    for one in work:
        counted = progress.versions.get(one.config.name, Counted())
        versions.append(
            VersionSummary(
                name=one.config.name,
                path=str(one.path),
                fingerprint=one.info.fingerprint,
                utterances=len(one.manifest),
                present=int(one.todo.present.sum()),
                extracted=counted.extracted,
                failed=int(one.todo.failed.sum()) + counted.failed,
                num_bytes=counted.num_bytes,
                seconds=round(counted.seconds, 3),
                resampled=counted.resampled,
                failed_before=one.failed_before,
                left=int(one.todo.missing.sum()) - counted.extracted - counted.failed,
            )
        )
    spent = sum(progress.stages.values())
    stages = {name: round(one / spent, 4) for name, one in progress.stages.items()} if spent else {}
    return Summary(
        utterances=utterances,
        versions=versions,
        failures={reason: count for reason, count in sorted(progress.failures.items()) if count},
        resampled=max((version.resampled for version in versions), default=0),
        audio_hours=progress.audio_seconds / 3600,
        seconds=seconds,
        device=device.label,
        threads=device.threads,
        stages=stages,
        bottleneck=max(stages, key=lambda name: stages[name]) if stages else "",
        elsewhere=progress.elsewhere,
        interrupted=interrupted,
    )
