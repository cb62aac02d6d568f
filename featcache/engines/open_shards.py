"""Shard tasks in progress, with a writer for each version, from the first batch to the commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from featcache.errors import Reason
from featcache.extraction.features import Extracted
from featcache.extraction.jobs import DoneTask, Progress, VersionCounts, VersionJob
from featcache.extraction.tasks import ShardTask
from featcache.format.writing import ShardBuilder
from featcache.version.ledger import Failure

_UNREAD = frozenset({Reason.FILE_MISSING, Reason.FILE_UNREADABLE})
"""Reasons that may hold on one machine and not on another."""


@dataclass
class _VersionShard:
    """The shard that one version gets."""

    job: VersionJob
    builder: ShardBuilder
    failures: list[Failure] = field(default_factory=list)
    unread: list[Failure] = field(default_factory=list)
    """What another machine may be able to read."""
    counts: VersionCounts = field(default_factory=VersionCounts)
    """What has been appended."""


class OpenShard:
    """A task in progress, in memory. Not thread-safe."""

    def __init__(self, task: ShardTask, jobs: Sequence[VersionJob], leaves_unread: bool = False) -> None:
        self.task = task
        self._left = _UNREAD if leaves_unread else frozenset()
        self._audio_seconds = 0.0
        self._shards = [_VersionShard(job, ShardBuilder(job.version.info.spec)) for job in jobs]
        later = zip(task.utterances, task.generations, strict=True)
        self._generations = {utterance.id: generation for utterance, generation in later if generation > 1}

    @property
    def has_begun(self) -> bool:
        """Whether anything has been appended: an item or a failure."""
        return any(len(shard.builder) or shard.failures or shard.unread for shard in self._shards)

    @property
    def counts(self) -> list[VersionCounts]:
        """What the run has added to each version, these shards included."""
        return [shard.job.counts for shard in self._shards]

    @property
    def jobs(self) -> list[VersionJob]:
        """The versions that get the shards."""
        return [shard.job for shard in self._shards]

    def append(self, part: Iterable[Extracted], progress: Progress) -> None:
        """Add what each version gets from a part of a batch, and count it.

        Raises:
            ExtractorError: It is not what the version holds.
        """
        seconds: dict[str, float] = {}  # of each utterance, whichever version has it
        for shard, extracted in zip(self._shards, part, strict=True):
            items, all_failures = extracted.items, extracted.failures
            if self._generations:
                items = [replace(item, generation=self._generations.get(item.id, 1)) for item in items]
                all_failures = [replace(one, generation=self._generations.get(one.id, 1)) for one in all_failures]
            shard.unread += [failure for failure in all_failures if failure.reason in self._left]
            failures = [failure for failure in all_failures if failure.reason not in self._left]
            extracted = replace(extracted, items=items, failures=failures)
            shard.builder.append(items, extracted.features, extracted.num_frames, extracted.side)
            shard.failures += failures
            shard.counts.add(shard.job.count(extracted))
            progress.count_failures(failures)
            rate = shard.job.built.sample_rate
            seconds |= {item.id: item.num_samples / rate for item in items}
        self._audio_seconds += sum(seconds.values())
        progress.audio_seconds += sum(seconds.values())

    def commit(self, progress: Progress) -> None:
        """Record the failures, make the shards visible, and count them.

        What has not been appended is no part of the shards, and still to be done.

        Raises:
            StoreError: The cache cannot be written.
        """
        for shard in self._shards:
            job, version = shard.job, shard.job.version
            job.run.fail(shard.failures)
            if not len(shard.builder):
                continue
            name, files = shard.builder.files(
                fingerprint=version.info.fingerprint,
                row=self.task.row,
                manifest=self.task.manifest,
                made_by={**job.made_by, "run": job.run.id},
                where=version.path,
            )
            version.store.publish(files, f"shards/{name}")
            progress.shards += 1

    @property
    def done(self) -> DoneTask:
        """What the versions have got, once it is committed."""
        progress = Progress(
            audio_seconds=self._audio_seconds, shards=sum(bool(len(shard.builder)) for shard in self._shards)
        )
        for shard in self._shards:
            progress.count_failures(shard.failures)
        unread = [shard.unread for shard in self._shards]
        return DoneTask(progress, [shard.counts for shard in self._shards], self.task.name, unread)

    def abandon(self, progress: Progress) -> None:
        """Drop what was appended, and take back what was counted."""
        for shard in self._shards:
            shard.job.counts.take_back(shard.counts)
            progress.count_failures(shard.failures, -1)
        progress.audio_seconds -= self._audio_seconds
