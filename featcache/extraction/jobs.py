"""The input of an engine: versions to fill together, each with its ledger and its counts."""

from __future__ import annotations

import math
import os
import re
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
from featcache.errors import ArgumentError, Reason, listing
from featcache.extraction.batching import BatchingChoice
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.features import OVERFLOW, Extracted, WorkerTimes
from featcache.extraction.from_audio import AudioExtractor, Fetch
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.padded_rows import Part
from featcache.extraction.tasks import ShardTask
from featcache.manifest.audio_locations import AudioLocation
from featcache.manifest.segments import Utterance
from featcache.version.in_flight import Suspects, forget_suspects
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure
from featcache.version.records import Run, library_versions
from featcache.version.version import Version

STAGES = ("decode", "resample", "extract", "write", "wait")
"""`extract` includes waits for a GPU; `wait` is for the disk, or for earlier batches."""

PROGRESS_THREAD = "featcache-progress"
"""The name of a thread that only shows progress. featcache may fork processes while it
runs."""


@dataclass(frozen=True)
class VersionCounts:
    """The counts of what a run has added to one version; see `VersionSummary`."""

    extracted: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """`VersionSummary.worker_seconds`."""
    upsampled: int = 0
    downsampled: int = 0
    silent: int = 0
    first_silent: str = ""

    def __add__(self, other: VersionCounts) -> VersionCounts:
        sums = {
            name: count + getattr(other, name)
            for name, count in vars(self).items()
            if name != "first_silent"
        }
        return VersionCounts(**sums, first_silent=self.first_silent or other.first_silent)


@dataclass(frozen=True)
class Progress:
    """The progress of a run, over all versions."""

    failures: Counter[str] = field(default_factory=Counter)
    audio_seconds: float = 0.0
    """Seconds of audio extracted. Copies count; versions that are filled together count
    once."""
    waiting_seconds: float = 0.0
    """Seconds of audio, about, that are extracted but wait for earlier ones."""
    shards: int = 0
    too_many_failures: str = ""
    """The reason to give up; else empty."""
    traceback: str = ""
    """The traceback of an extractor's exception that is that reason."""
    versions: Mapping[str, VersionCounts] = field(default_factory=dict)
    """The counts of each version, by its config's name."""
    stages: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    """Seconds of worker threads, by `STAGES`."""

    def __add__(self, other: Progress) -> Progress:
        versions = dict(self.versions)
        for name, counts in other.versions.items():
            versions[name] = versions.get(name, VersionCounts()) + counts
        stages = {
            stage: self.stages.get(stage, 0.0) + other.stages.get(stage, 0.0) for stage in STAGES
        }
        fault = self if self.too_many_failures else other
        return Progress(
            failures=self.failures + other.failures,
            audio_seconds=self.audio_seconds + other.audio_seconds,
            waiting_seconds=self.waiting_seconds + other.waiting_seconds,
            shards=self.shards + other.shards,
            versions=versions,
            stages=stages,
            too_many_failures=fault.too_many_failures,
            traceback=fault.traceback,
        )

    @property
    def computed_seconds(self) -> float:
        """Seconds of audio extracted, with those that wait for earlier ones."""
        return self.audio_seconds + self.waiting_seconds


@dataclass(frozen=True)
class DoneTask:
    """A task whose shards have been committed."""

    row: int
    """`ShardTask.row`."""
    progress: Progress
    unread: list[list[Failure]]
    """The utterances left out of each version: see `RunControl.leaves_unread`."""
    host: str = field(default_factory=socket.gethostname)


_MIN_TRIED = 100
"""The utterances that must be tried before a share of them counts."""

_LIMIT = re.compile(r"(\d{1,9})|(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)


@dataclass(frozen=True)
class FailureLimit:
    """The utterances that may fail in a run, `--max-failures`: a number, or a share of
    those tried."""

    text: str
    count: float
    share: float
    """The share, 0 to 1; 1 if there is only a number."""

    @classmethod
    def parse(cls, text: str | int) -> FailureLimit:
        """Parse a number, such as `20`, or a percentage, such as `0.5%`. Raises ArgumentError
        if the text is neither."""
        text = str(text).strip()
        match = _LIMIT.fullmatch(text)
        if match is None or float(match[2] or 0) > 100:
            raise ArgumentError(
                f"--max-failures is {text!r}: give a number of utterances, or a percentage "
                "such as 1%"
            )
        return cls(text, float(match[1] or math.inf), float(match[2] or 100) / 100)

    def fault(self, failed: int, tried: int, is_end: bool) -> str:
        """Return a message if too many have failed, otherwise an empty string. A share counts
        once 100 were tried, and at the end of the run."""
        share_counts = is_end or tried >= _MIN_TRIED
        if failed <= self.count and not (share_counts and failed > self.share * tried):
            return ""
        are = "utterance that was tried has" if tried == 1 else "utterances that were tried have"
        return f"{failed:,} of the {tried:,} {are} failed, and --max-failures allows {self.text}"


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


@dataclass
class RunControl:
    """The means to watch a run, and to stop it."""

    report: Callable[[Progress], object]
    """Called with the progress, from worker threads, by one at a time."""
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
    progress: Progress = Progress()
    """The progress so far, which `add` replaces."""
    workers: dict[int, tuple[str, int]] = field(default_factory=dict)
    """The model of the device, and the threads, of each other process that extracts."""
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def add(self, progress: Progress) -> None:
        """Add to the progress."""
        with self._changing:
            self.progress += progress

    def give_up(self, reason: str, traceback: str = "") -> None:
        """Stop the run, as if too many utterances had failed."""
        self.add(Progress(too_many_failures=reason, traceback=traceback))
        self.stop.set()

    def check(self, is_end: bool = False) -> None:
        """Stop if an extractor keeps raising, or too many utterances have failed."""
        progress = self.progress
        are_refused = progress.failures.keys() <= _OF_CONFIG
        for name, counts in progress.versions.items():
            tried = counts.failed + counts.extracted
            all_failed = tried == counts.failed >= _REFUSED_FIRST
            if name in self.unproven and are_refused and all_failed:
                reasons = listing(sorted(progress.failures))
                self.give_up(
                    f"{name}: all of the first {tried:,} utterances failed: {reasons}: check "
                    "the config, or try all of them with --max-failures 100%"
                )
            if self.max_failures is not None:
                fault = self.max_failures.fault(counts.failed, tried, is_end)
                if fault:
                    self.give_up(fault)
        if progress.too_many_failures:
            self.stop.set()


_MOST_FIRST = 5
"""Utterances in a row that an extractor may fail at the beginning of a version."""

_MOST_IN_A_ROW = 20
"""Utterances in a row that an extractor may fail later by exceptions, or because float16
cannot hold their features."""

_REMEDIES = {
    Reason.EXTRACTOR_ERROR: ("raised exceptions at", "fix it"),
    Reason.NON_FINITE_FEATURES: (
        "gave no finite features for",
        "change the config, or check the weights",
    ),
}


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
        fault = self._fault(extracted)
        return Progress(
            Counter(failure.reason for failure in extracted.failures),
            versions={self.name: counts},
            too_many_failures=fault,
            traceback=fault and extracted.traceback,
        )

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
            is_at_fault = last.reason == Reason.EXTRACTOR_ERROR or OVERFLOW in last.message
            goes_on = is_at_fault and count >= _MOST_IN_A_ROW
            if last.reason in _REMEDIES and (is_first or goes_on):
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

BatchExtractor = Callable[[Sequence[Utterance], WorkerTimes], Iterable[Part]]
"""Extracts a batch of utterances, part by part: yields the results of each version."""


def batch_extractor(
    root: AudioLocation,
    configs: Sequence[BuiltConfig],
    source: SourceVersion | None,
    fetched: Fetch = copy_of,
    wait: Wait = lambda _: None,
) -> BatchExtractor:
    """Return a function that extracts batches from audio, from files in its place, or
    from the source's features. The other arguments are those of `AudioExtractor`."""
    if source is not None:
        return partial(source.extract, root, configs)
    if configs[0].label_files is not None:  # then all of them read such files
        from featcache.extraction.from_files import read_files

        return partial(read_files, root, configs, fetched)
    return AudioExtractor(root, configs, fetched, wait)
