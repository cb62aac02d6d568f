"""Counts what a run has done so far, for progress and summary."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from featcache.extract.target import Extracted, Spent
from featcache.store.runs import Failure

STAGES = ("decode", "resample", "extract", "write", "wait")
"""`extract` includes waiting for a GPU; `wait` is for the disk, for a batch that comes first, or for a GPU while
nothing may be decoded."""


@dataclass
class Counted:
    """What a run has added to one version.

    Attributes:
        extracted: utterances.
        failed: utterances.
        num_bytes: of features as they are stored, with side arrays.
        seconds: of worker threads that extracting them took; complete once the run has ended.
        resampled: utterances whose file had another rate, their copies not counted; likewise.
    """

    extracted: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    resampled: int = 0


@dataclass
class Progress:
    """What a run has done so far. Not thread-safe.

    Attributes:
        versions: what it has added to each, by the config's name.
        failures: utterances by reason, over all versions.
        audio_seconds: extracted; copies count, and each counts once for all versions that are filled together.
        shards: committed.
        elsewhere: utterances that another run has done meanwhile.
        stages: seconds of worker threads in each stage; complete once the run has ended.
    """

    versions: dict[str, Counted] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    audio_seconds: float = 0.0
    shards: int = 0
    elsewhere: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def version(self, name: str) -> Counted:
        """What has been added to the version of a config of that name."""
        return self.versions.setdefault(name, Counted())

    def add(self, name: str, extracted: Extracted) -> None:
        """Count what a version gets."""
        counted = self.version(name)
        counted.extracted += len(extracted.items)
        counted.failed += len(extracted.failures)
        counted.num_bytes += extracted.features.nbytes
        counted.num_bytes += sum(entries.nbytes for entries, _ in extracted.side.values())
        for failure in extracted.failures:
            self.failures[failure.reason] = self.failures.get(failure.reason, 0) + 1

    def take_back(self, name: str, num_items: int, num_bytes: int, failures: Sequence[Failure]) -> None:
        """Count no more what a version did not get after all."""
        counted = self.version(name)
        counted.extracted -= num_items
        counted.failed -= len(failures)
        counted.num_bytes -= num_bytes
        for failure in failures:
            self.failures[failure.reason] -= 1

    def spend(self, spent: Spent) -> None:
        """Count a worker's time."""
        self.stages["decode"] += spent.decode
        self.stages["resample"] += spent.waveform
        self.stages["extract"] += sum(spent.extract.values())
        for name, seconds in spent.extract.items():
            self.version(name).seconds += seconds
        for name, count in spent.resampled.items():
            self.version(name).resampled += count


@dataclass(frozen=True)
class Watch:
    """How a run is followed from outside, and stopped.

    Attributes:
        progress: what it has done so far.
        report: called with it, from worker threads, one at a time.
        stop: once it is set, whole shards are still committed, and no others begun.
    """

    progress: Progress
    report: Callable[[Progress], None]
    stop: threading.Event
