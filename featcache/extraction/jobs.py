"""The input of an engine: versions to fill together, each with its ledger and its counts."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any

from featcache.audio.members import copy_of
from featcache.audio.remote import Wait
from featcache.device import Device
from featcache.errors import Reason, listing
from featcache.extraction.failure_limit import FailureLimit
from featcache.extraction.features import Extracted, WorkerTimes
from featcache.extraction.from_audio import AudioExtractor, Fetch
from featcache.extraction.from_labels import LabelReader
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.padded_rows import BatchingChoice, PendingRows
from featcache.extraction.tasks import ShardTask
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest.audio_locations import AudioLocation
from featcache.manifest.segments import Utterance
from featcache.version.in_flight import Suspects, forget_suspects
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure
from featcache.version.records import Run
from featcache.version.version import Version, library_versions

STAGES = ("decode", "resample", "extract", "write", "wait")
"""`extract` includes waits for a GPU; `wait` is for the disk, or for earlier batches."""


@dataclass
class VersionCounts:
    """The counts of what a run has added to one version."""

    extracted: int = 0
    failed: int = 0
    num_bytes: int = 0
    """Bytes of features as they are stored, with side arrays."""
    seconds: float = 0.0
    """Seconds of worker threads that computing the features took."""
    upsampled: int = 0
    """Utterances, without copies, whose file has a lower sample rate than the config."""
    downsampled: int = 0
    """Utterances, without copies, whose file has a higher sample rate than the config."""
    silent: int = 0
    first_silent: str = ""

    def add(self, other: VersionCounts) -> None:
        """Add other counts."""
        self.extracted += other.extracted
        self.failed += other.failed
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.upsampled += other.upsampled
        self.downsampled += other.downsampled
        self.silent += other.silent
        self.first_silent = self.first_silent or other.first_silent


@dataclass
class Progress:
    """The progress of a run, over all versions. Not thread-safe."""

    failures: Counter[str] = field(default_factory=Counter)
    audio_seconds: float = 0.0
    """Seconds of audio extracted. Copies count; versions that are filled together count
    once."""
    waiting_seconds: float = 0.0
    """Seconds of audio, about, that are extracted but wait for earlier ones."""
    shards: int = 0
    too_many_failures: str = ""
    """The reason to give up; empty if there is none."""
    traceback: str = ""
    """The traceback of an extractor's exception that is that reason."""
    versions: dict[str, VersionCounts] = field(default_factory=dict)
    """The counts of each version, by its config's name."""
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Seconds of worker threads in each stage."""
    processes: int = 0
    """The number of other processes that extract."""
    devices: list[str] = field(default_factory=list)
    """The models of their devices."""
    threads: int = 0

    def add(self, other: Progress) -> None:
        """Add the progress of something else, except for its processes."""
        self.failures += other.failures
        self.add_times(other.stages)
        self.audio_seconds += other.audio_seconds
        self.waiting_seconds += other.waiting_seconds
        self.shards += other.shards
        for name, counts in other.versions.items():
            self.versions.setdefault(name, VersionCounts()).add(counts)
        if not self.too_many_failures:
            self.too_many_failures = other.too_many_failures
            self.traceback = other.traceback

    @property
    def computed_seconds(self) -> float:
        """Seconds of audio extracted, with those that wait for earlier ones."""
        return self.audio_seconds + self.waiting_seconds

    def add_times(self, times: Mapping[str, float]) -> None:
        """Add a worker's seconds, by stage."""
        for stage, seconds in times.items():
            self.stages[stage] += seconds


@dataclass(frozen=True)
class DoneTask:
    """A task whose shards have been committed."""

    name: str
    progress: Progress
    unread: list[list[Failure]]
    """The utterances left out of each version: see `RunControl.leaves_unread`."""
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class RunControl:
    """The means to watch a run, and to stop it."""

    progress: Progress
    report: Callable[[Progress], object]
    """Called with a snapshot of the progress, from worker threads, by one at a time."""
    stop: threading.Event
    """Once it is set, nothing more is taken; what was taken is finished and committed."""
    max_failures: FailureLimit | None = None
    done: Callable[[DoneTask], None] = lambda _: None
    """Called for each committed task, from any thread, by one at a time."""
    unproven: Set[str] = frozenset()
    """The names of versions that hold nothing yet: if their configs refuse all of the
    first utterances, the run is given up."""
    leaves_unread: bool = False
    """True if unreadable files are left to the process that has dealt out the tasks."""

    def give_up(self, reason: str, traceback: str = "") -> None:
        """Stop the run, as if too many utterances had failed."""
        if not self.progress.too_many_failures:
            self.progress.too_many_failures = reason
            self.progress.traceback = traceback
        self.stop.set()

    def check(self, is_end: bool = False) -> None:
        """Stop if an extractor keeps raising, or too many utterances have failed."""
        are_refused = self.progress.failures.keys() <= _OF_CONFIG
        for name, counts in self.progress.versions.items():
            tried = counts.failed + counts.extracted
            all_failed = tried == counts.failed >= _REFUSED_FIRST
            if name in self.unproven and are_refused and all_failed:
                reasons = listing(sorted(self.progress.failures))
                self.give_up(
                    f"{name}: all of the first {tried:,} utterances failed: {reasons}: does the "
                    "config suit this audio? --max-failures 100% tries all of them"
                )
            if self.max_failures is not None:
                fault = self.max_failures.fault(counts.failed, tried, is_end)
                if fault:
                    self.give_up(fault)
        if self.progress.too_many_failures:
            self.stop.set()


_MOST_FIRST = 5
"""Utterances in a row that an extractor may fail at the beginning of a version."""

_MOST_IN_A_ROW = 20
"""Utterances in a row that an extractor may fail later by exceptions."""

_REMEDIES = {
    Reason.EXTRACTOR_ERROR: ("raised exceptions at", "mend it"),
    Reason.NON_FINITE_FEATURES: (
        "gave no finite features for",
        "change the config, or check the weights",
    ),
}

_REFUSED_FIRST = 100
"""Utterances in a row at the beginning of a version that its config may refuse."""

_OF_CONFIG = {
    Reason.NO_SUCH_CHANNEL,
    Reason.RATE_REFUSED,
    Reason.TOO_SHORT,
    Reason.TOO_LONG,
    Reason.NON_FINITE_FEATURES,
    Reason.EXTRACTOR_REFUSED,
    Reason.EXTRACTOR_ERROR,
    Reason.OUT_OF_MEMORY,
}
"""Reasons that may be the fault of the config."""


@dataclass(eq=False)
class VersionJob:
    """A version that a run is filling."""

    built: BuiltConfig
    batching: BatchingChoice
    version: Version
    run: Run
    has_extracted: bool = False
    """True if the extractor has extracted anything, in this run or before it."""
    _in_a_row: Counter[str] = field(default_factory=Counter)

    @property
    def name(self) -> str:
        """The name of its config."""
        return self.built.config.name

    def count(self, extracted: Extracted) -> Progress:
        """Count what the version gets from a part of a batch; parts come in order."""
        rates = [rate for rate, _ in extracted.remarks.values()]
        silent = [f"{id_}: {why}" for id_, (_, why) in extracted.remarks.items() if why]
        counts = VersionCounts(
            extracted=len(extracted.items),
            failed=len(extracted.failures),
            num_bytes=sum(features.num_bytes for features in extracted.features),
            seconds=extracted.seconds,
            upsampled=sum(rate < self.built.sample_rate for rate in rates),
            downsampled=sum(rate > self.built.sample_rate for rate in rates),
            silent=len(silent),
            first_silent=next(iter(silent), ""),
        )
        progress = Progress(
            Counter(failure.reason for failure in extracted.failures), versions={self.name: counts}
        )
        progress.too_many_failures = self._fault(extracted)
        if progress.too_many_failures:
            progress.traceback = extracted.traceback
        return progress

    def _fault(self, extracted: Extracted) -> str:
        """Return a message if the extractor has failed too often in a row."""
        if extracted.items:
            self._in_a_row.clear()
            self.has_extracted = True
            return ""
        self._in_a_row.update(failure.reason for failure in extracted.failures)
        for last in reversed(extracted.failures):
            count = self._in_a_row[last.reason]
            is_first = not self.has_extracted and count >= _MOST_FIRST
            is_raising = last.reason == Reason.EXTRACTOR_ERROR and count >= _MOST_IN_A_ROW
            if last.reason in _REMEDIES and (is_first or is_raising):
                did, remedy = _REMEDIES[Reason(last.reason)]
                extractor = type(self.built.extractor).__name__
                return (
                    f"{self.name}: {extractor} {did} {count:,} utterances in a row, the last one "
                    f"{last.id}: {last.message}; {remedy}, and run with --retry-failed"
                )
        return ""

    @cached_property
    def made_by(self) -> dict[str, Any]:
        """The record in every shard of how it was made."""
        return {
            **library_versions(),
            "device": self.built.device.label,
            "batching": self.batching.batching,
            "mismatch": self.batching.mismatch,
            "run": self.run.id,
        }

    def finish(self, progress: Progress, interrupted: bool, builds_index: bool = False) -> None:
        """Record the outcome. A complete run that `builds_index` first builds the index."""
        outcome = asdict(progress.versions[self.name])
        if not interrupted and builds_index:
            index = open_index(self.version)
            outcome["items"] = len(index)
            forget_suspects(self.version, index)
        self.run.finish({**outcome, "interrupted": interrupted})


def maker(device: Device) -> dict[str, Any]:
    """Return a run's record of the process that is at work."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": str(device.torch_device),
        "threads": device.threads,
        "made_by": library_versions(),
    }


@dataclass(frozen=True)
class JobGroup:
    """Versions that lack the same rows, and are filled together."""

    jobs: Sequence[VersionJob]
    root: AudioLocation
    source: SourceVersion | None
    suspects: Suspects
    batch_seconds: float
    some_paths: Sequence[str] = ()
    """Paths by which a machine can tell whether it has the audio."""

    @property
    def configs(self) -> list[BuiltConfig]:
        """The config of each version, and its extractor."""
        return [job.built for job in self.jobs]

    @property
    def device(self) -> Device:
        """The device that all of them are built for."""
        return self.jobs[0].built.device


Engine = Callable[[JobGroup, Iterator[ShardTask], RunControl], None]
"""Does shard tasks for a group of versions. Returns when all tasks are committed, or when
the run was stopped and the begun tasks are committed. An engine writes the failures of a
task into the ledgers before it commits the shard that lacks them."""

BatchExtractor = Callable[
    [Sequence[Utterance], WorkerTimes], Iterable[list[Extracted | PendingRows]]
]
"""Extracts a batch of utterances, part by part: yields the results of each version."""


def batch_extractor(
    root: AudioLocation,
    configs: Sequence[BuiltConfig],
    source: SourceVersion | None,
    fetched: Fetch = copy_of,
    wait: Wait = lambda _: None,
    batch_seconds: float | None = None,
) -> BatchExtractor:
    """Return a function that extracts batches from audio, label files or the source's
    features.
    The other arguments are those of `AudioExtractor`."""
    if configs[0].label_files is not None:  # then all of them read label files
        return LabelReader(root, configs, fetched)
    if source is None:
        return AudioExtractor(root, configs, fetched, wait, batch_seconds)
    return partial(source.extract, root, configs)
