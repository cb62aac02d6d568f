"""What a run hands to an engine: versions to be filled together, each with its ledger and
its counts."""

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
from featcache.extraction.features import Extracted, WorkerTimes
from featcache.extraction.from_audio import AudioExtractor, Fetch
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.options import FailureLimit
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
"""`extract` includes waits for a GPU; `wait` is for the disk, a batch before, or a GPU if
nothing may be decoded."""


@dataclass
class VersionCounts:
    """What a run has added to one version."""

    extracted: int = 0
    failed: int = 0
    num_bytes: int = 0
    """Bytes of features as they are stored, with side arrays."""
    seconds: float = 0.0
    """Seconds of worker threads that computing the features took."""
    upsampled: int = 0
    """Utterances, without copies, whose file has a lower rate than the config: the top of
    their spectrum is empty."""
    downsampled: int = 0
    """Utterances whose file has a higher sample rate than the config. Copies do not count."""
    silent: int = 0
    first_silent: str = ""
    """One of them, and why."""

    def add(self, other: VersionCounts) -> None:
        """Add what has been counted elsewhere."""
        for name, theirs in asdict(other).items():
            mine = getattr(self, name)
            setattr(self, name, mine or theirs if name == "first_silent" else mine + theirs)


@dataclass
class Progress:
    """What a run has done so far, over all versions. Not thread-safe."""

    failures: Counter[str] = field(default_factory=Counter)
    """Failed utterances by reason."""
    audio_seconds: float = 0.0
    """Seconds of audio extracted. Copies count, and a clip counts once for all versions
    that are filled together."""
    waiting_seconds: float = 0.0
    """Seconds of audio, about, that are extracted too, and wait for what comes before
    them."""
    shards: int = 0
    """Committed shards."""
    too_many_failures: str = ""
    """That more failed than allowed, and how many, that no audio can be fetched, or an
    extractor raises; else empty."""
    traceback: str = ""
    """That of such an exception; empty if there are none."""
    versions: dict[str, VersionCounts] = field(default_factory=dict)
    """What each version got, by its config's name, also what is not committed yet."""
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Seconds of worker threads in each stage. What a thread is at is added when it is
    done with a batch."""
    processes: int = 0
    """The number of other processes that extract; 0 if this one does."""
    devices: list[str] = field(default_factory=list)
    """The models of their devices."""
    threads: int = 0
    """The sum of their budgets."""

    def add(self, other: Progress) -> None:
        """Add what has been done elsewhere."""
        self.failures += other.failures
        self.add_times(other.stages)
        self.audio_seconds += other.audio_seconds
        self.waiting_seconds += other.waiting_seconds
        self.shards += other.shards
        for name, counts in other.versions.items():
            self.versions.setdefault(name, VersionCounts()).add(counts)
        if not self.too_many_failures:
            self.too_many_failures, self.traceback = other.too_many_failures, other.traceback

    @property
    def computed_seconds(self) -> float:
        """Seconds of audio that are extracted, whatever becomes of them."""
        return self.audio_seconds + self.waiting_seconds

    def add_times(self, times: Mapping[str, float]) -> None:
        """Count a worker's time, by stage."""
        for stage, seconds in times.items():
            self.stages[stage] += seconds


@dataclass(frozen=True)
class DoneTask:
    """A task whose shards have been committed."""

    name: str
    progress: Progress
    """What was done for it."""
    unread: list[list[Failure]]
    """What was left out of each version, and not recorded as failed: see
    `RunControl.leaves_unread`."""
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class RunControl:
    """How a run is watched, and stopped."""

    progress: Progress
    report: Callable[[Progress], object]
    """Called with the progress, from worker threads, by one at a time."""
    stop: threading.Event
    """Once it is set, nothing more is taken; what was is finished and committed."""
    max_failures: FailureLimit | None = None
    """How many utterances of a version may fail; None for any number."""
    done: Callable[[DoneTask], None] = lambda _: None
    """Called for each task whose shards have been committed, from any thread, by one at a
    time."""
    unproven: Set[str] = frozenset()
    """The names of versions that hold nothing yet, while no `max_failures` is given: if
    their configs refuse all of the first utterances, they are at fault."""
    leaves_unread: bool = False
    """Whether utterances whose file this machine cannot read are left to whoever has
    dealt out the tasks: another machine may have the file, and then they have not
    failed."""

    def give_up(self, reason: str, traceback: str = "") -> None:
        """Stop the run, as if too many utterances had failed."""
        if not self.progress.too_many_failures:
            self.progress.too_many_failures, self.progress.traceback = reason, traceback
        self.stop.set()

    def check(self, is_end: bool = False) -> None:
        """Stop if an extractor keeps raising, or a version has too many failures;
        `is_end` if nothing more follows."""
        refused = self.progress.failures.keys() <= _OF_CONFIG
        for name, counts in self.progress.versions.items():
            tried = counts.failed + counts.extracted
            if name in self.unproven and refused and tried == counts.failed >= _REFUSED_FIRST:
                reasons = listing(sorted(self.progress.failures))
                self.give_up(
                    f"{name}: all of the first {tried:,} utterances failed: {reasons}: does the "
                    "config suit this audio? --max-failures 100% tries all of them"
                )
            if self.max_failures and (
                fault := self.max_failures.fault(counts.failed, tried, is_end)
            ):
                self.give_up(fault)
        if self.progress.too_many_failures:
            self.stop.set()


_MOST_FIRST, _MOST_IN_A_ROW = 5, 20
"""Utterances in a row that an extractor may fail: the first ones of a version, and by
exceptions later ones."""

_REMEDIES = {
    Reason.EXTRACTOR_ERROR: ("raised exceptions at", "mend it"),
    Reason.NON_FINITE_FEATURES: (
        "gave no finite features for",
        "change the config, or check the weights",
    ),
}
"""What to say of failures that are the extractor's, and what to do about them."""

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
"""Reasons that may be the fault of the config: other audio would not help."""


@dataclass(eq=False)
class VersionJob:
    """A version that a run is filling."""

    built: BuiltConfig
    """The config, and the extractor that was built for it."""
    batching: BatchingChoice
    """How the extractor puts rows together."""
    version: Version
    run: Run
    """What the run records in the version; and the failure ledger."""
    has_extracted: bool = False
    """Whether the extractor is known to have extracted anything, in this run or before it."""
    _in_a_row: Counter[str] = field(default_factory=Counter)
    """Utterances that have failed since the extractor has extracted any, by reason."""

    @property
    def name(self) -> str:
        """The name of its config, which no other version of a run has."""
        return self.built.config.name

    def count(self, extracted: Extracted) -> Progress:
        """Count what the version gets from a part of a batch; parts come in order."""
        silent = [f"{id_}: {why}" for id_, (_, why) in extracted.remarks.items() if why]
        num_bytes = sum(features.num_bytes for features in extracted.features)
        counts = VersionCounts(
            len(extracted.items), len(extracted.failures), num_bytes, extracted.seconds
        )
        counts.upsampled = sum(
            rate < self.built.sample_rate for rate, _ in extracted.remarks.values()
        )
        counts.downsampled = sum(
            rate > self.built.sample_rate for rate, _ in extracted.remarks.values()
        )
        counts.silent, counts.first_silent = len(silent), next(iter(silent), "")
        done = Progress(
            Counter(failure.reason for failure in extracted.failures), versions={self.name: counts}
        )
        if fault := self._fault(extracted):
            done.too_many_failures, done.traceback = fault, extracted.traceback
        return done

    def _fault(self, extracted: Extracted) -> str:
        """That the extractor has failed again and again, also at this part; empty if it
        has not."""
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
        """What is recorded with every shard: the libraries and the device that make it,
        how, and for which run."""
        how = {"batching": self.batching.batching, "mismatch": self.batching.mismatch}
        return {**library_versions(), "device": self.built.device.label, **how, "run": self.run.id}

    def finish(self, progress: Progress, interrupted: bool, builds_index: bool = False) -> None:
        """Record the outcome. A run that `builds_index` and came to its end does so
        first, for training."""
        outcome = asdict(progress.versions[self.name])
        if not interrupted and builds_index:
            index = open_index(self.version)
            outcome["items"] = len(index)
            forget_suspects(self.version, index)
        self.run.finish({**outcome, "interrupted": interrupted})


def maker(device: Device) -> dict[str, Any]:
    """What a run records of the process that is at work."""
    process = {"host": socket.gethostname(), "pid": os.getpid(), "device": str(device.torch_device)}
    return {**process, "threads": device.threads, "made_by": library_versions()}


@dataclass(frozen=True)
class JobGroup:
    """Versions that lack the same rows, and are filled together."""

    jobs: Sequence[VersionJob]
    """The versions; every task is for all of them."""
    root: AudioLocation
    """What paths of audio files are relative to."""
    source: SourceVersion | None
    """The version whose features are used instead of audio; None for audio."""
    suspects: Suspects
    some_paths: Sequence[str] = ()
    """The paths of some of the audio files, by which a machine can tell whether it has
    them."""

    @property
    def configs(self) -> list[BuiltConfig]:
        """The config of each version, and its extractor."""
        return [job.built for job in self.jobs]

    @property
    def device(self) -> Device:
        """The device that all of them are built for."""
        return self.jobs[0].built.device


Engine = Callable[[JobGroup, Iterator[ShardTask], RunControl], None]
"""Does shard tasks for a group of versions, and returns when all are committed; or if the
run was stopped, when what was done of them is. It writes the failures of a task into the
ledgers before it commits the shard that lacks them."""

BatchExtractor = Callable[
    [Sequence[Utterance], WorkerTimes], Iterable[list[Extracted | PendingRows]]
]
"""Extracts a batch of utterances: for one part of it after the other, what each version
gets."""


def batch_extractor(
    root: AudioLocation,
    configs: Sequence[BuiltConfig],
    source: SourceVersion | None,
    fetched: Fetch = copy_of,
    wait: Wait = lambda _: None,
) -> BatchExtractor:
    """A function that extracts batches for these configs: from audio, or if there is a
    source, from its features. `fetched` and `wait` are those of `AudioExtractor`."""
    return (
        AudioExtractor(root, configs, fetched, wait)
        if source is None
        else partial(source.extract, root, configs)
    )
