"""Shard tasks in progress, with a writer for each version, from the first batch to the commit.

Several runs share work through claims, without a coordinator; unless their tasks have been dealt out to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from featcache.errors import Reason, StoreError
from featcache.extraction.features import Extracted
from featcache.extraction.jobs import DoneTask, Progress, RunControl, VersionCounts, VersionJob
from featcache.extraction.tasks import ShardTask
from featcache.store.commits import commit_shard
from featcache.store.ledger import Failure
from featcache.store.run_records import ShardEvent
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version

_UNREAD = frozenset({Reason.FILE_MISSING, Reason.FILE_UNREADABLE})
"""Reasons that may hold on one machine and not on another."""


def open_shards(
    tasks: Iterator[ShardTask], jobs: Sequence[VersionJob], control: RunControl
) -> Iterator[OpenShard | None]:
    """Open the shards that tasks make, one after another; if other runs may be given the same tasks, claim them first.

    Yields None, again and again, while other runs hold the claims on all that is left.

    Raises:
        StoreError: The cache cannot be written.
        DamagedError: A shard that another run has added in the meantime is not what was written.
    """
    if control.takes_claims:
        yield from _claim_shards(tasks, jobs, control)
    else:
        for task in tasks:
            with ExitStack() as no_claims:
                shard = OpenShard(task, no_claims, jobs, control.leaves_unread)
            yield shard


def _claim_shards(
    tasks: Iterator[ShardTask], jobs: Sequence[VersionJob], control: RunControl
) -> Iterator[OpenShard | None]:
    """Claim tasks, and open the shards that they make. Tasks that another run has claimed come last.

    While other runs hold the claims on all that is left, this yields None, again and again: what this run has begun
    must go on, because the other run may wait for it. Whichever task is free first comes next. If the other run ends
    without a shard, the task is done here.
    """
    deferred = []
    for task in tasks:
        if (claims := _claim(task, jobs)) is None:
            deferred.append(task)
        elif shard := _open(task, claims, jobs, control):
            yield shard
    while deferred:
        free = next(((task, claims) for task in deferred if (claims := _claim(task, jobs)) is not None), None)
        if free is None:
            yield None
            continue
        deferred.remove(free[0])
        if shard := _open(*free, jobs, control, was_taken=True):
            yield shard


def _claim(task: ShardTask, jobs: Sequence[VersionJob]) -> ExitStack | None:
    """Claim a task in every version; None if another run holds one of the claims."""
    with ExitStack() as claims:
        for job in jobs:
            claim = claims.enter_context(job.version.claim(task.name))
            with _writing(job.version):
                is_ours = claim.take()
            if not is_ours:
                return None
        return claims.pop_all()


def _open(
    task: ShardTask, claims: ExitStack, jobs: Sequence[VersionJob], control: RunControl, was_taken: bool = False
) -> OpenShard | None:
    """Open what remains of a claimed task; None if other runs have extracted all of it. `was_taken` says that one of
    them had claimed it before.
    """
    with claims:
        remaining = set().union(*(job.concurrent.remaining(task, was_taken) for job in jobs))
        control.progress.elsewhere += len(task.utterances) - len(remaining)
        if not remaining:
            return None
        if len(remaining) < len(task.utterances):
            task = task.only(remaining)
        return OpenShard(task, claims, jobs, control.leaves_unread)


@dataclass
class _VersionShard:
    """The shard that one version gets."""

    job: VersionJob
    writer: ShardWriter
    failures: list[Failure] = field(default_factory=list)
    unread: list[Failure] = field(default_factory=list)
    """What another machine may be able to read."""
    counts: VersionCounts = field(default_factory=VersionCounts)
    """What has been appended."""


class OpenShard:
    """A task in progress, without what other runs have extracted. Not thread-safe.

    The claims on it, if any, are held until it is committed or abandoned. If this raises, the caller closes them.

    Raises:
        StoreError: From every method, if the cache cannot be written.
    """

    def __init__(
        self, task: ShardTask, claims: ExitStack, jobs: Sequence[VersionJob], leaves_unread: bool = False
    ) -> None:
        self.task = task
        self._left = _UNREAD if leaves_unread else frozenset()
        self._audio_seconds = 0.0
        self._shards: list[_VersionShard] = []
        for job in jobs:
            version, spec = job.version, job.version.info.spec
            with _writing(version):
                writer = ShardWriter(version.work_folder(task.name), spec)
            claims.callback(writer.discard)
            self._shards.append(_VersionShard(job, writer))
        self._held = claims.pop_all()  # closing it discards what is not committed, then releases the claims

    @property
    def has_begun(self) -> bool:
        """Whether anything has been appended: an item or a failure."""
        return any(shard.writer.items or shard.failures or shard.unread for shard in self._shards)

    @property
    def counts(self) -> list[VersionCounts]:
        """What the run has added to each version, these shards included."""
        return [shard.job.counts for shard in self._shards]

    @property
    def jobs(self) -> list[VersionJob]:
        """The versions that get the shards."""
        return [shard.job for shard in self._shards]

    def append(self, part: Iterable[Extracted], progress: Progress) -> None:
        """Write what each version gets from a part of a batch, and count it."""
        seconds: dict[str, float] = {}  # of each utterance, whichever version has it
        for shard, extracted in zip(self._shards, part, strict=True):
            shard.unread += [failure for failure in extracted.failures if failure.reason in self._left]
            failures = [failure for failure in extracted.failures if failure.reason not in self._left]
            extracted = replace(extracted, failures=failures)
            with _writing(shard.job.version):
                shard.writer.append(extracted.items, extracted.features, extracted.num_frames, extracted.side)
            shard.failures += extracted.failures
            shard.counts.add(shard.job.count(extracted))
            progress.count_failures(extracted.failures)
            rate = shard.job.built.sample_rate
            seconds |= {item.id: item.num_samples / rate for item in extracted.items}
        self._audio_seconds += sum(seconds.values())
        progress.audio_seconds += sum(seconds.values())

    def commit(self, progress: Progress) -> None:
        """Record the failures, make the shards visible, count them, and release the task.

        What has not been appended is no part of the shards, and still to be done.
        """
        for shard in self._shards:
            job, writer = shard.job, shard.writer
            job.run.fail(shard.failures, self.task.replaces)
            if not writer.items:
                continue
            with _writing(job.version):
                there = commit_shard(
                    writer,
                    job.version,
                    sample_rate=job.built.sample_rate,
                    row=self.task.row,
                    supersedes=self.task.supersedes(writer.ids),
                    made_by={**job.made_by, "run": job.run.id, "fingerprint": job.version.info.fingerprint},
                )
            job.run.record_shards([ShardEvent(there.name, writer.items, entry=there.entry)], are_there=True)
            job.concurrent.ignore(there.name)
            progress.shards += 1
        self._held.close()

    @property
    def done(self) -> DoneTask:
        """What the versions have got, once it is committed."""
        progress = Progress(audio_seconds=self._audio_seconds, shards=sum(bool(s.writer.items) for s in self._shards))
        for shard in self._shards:
            progress.count_failures(shard.failures)
        unread = [shard.unread for shard in self._shards]
        ids = {failure.id for failures in unread for failure in failures}
        replaces = {id_: place for id_, place in self.task.replaces.items() if id_ in ids}
        return DoneTask(progress, [shard.counts for shard in self._shards], self.task.name, unread, replaces)

    def abandon(self, progress: Progress) -> None:
        """Drop what was appended, take back what was counted, and release the task."""
        for shard in self._shards:
            shard.job.counts.take_back(shard.counts)
            progress.count_failures(shard.failures, -1)
        progress.audio_seconds -= self._audio_seconds
        self._held.close()


@contextmanager
def _writing(version: Version) -> Iterator[None]:
    """Say what can be done about a disk that is full, read-only or broken."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{version.desk}: cannot be written: {error.strerror}; the shards committed so far are good: "
            "make room or mend the disk, and run the same command again"
        ) from error
