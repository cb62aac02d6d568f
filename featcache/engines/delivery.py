"""Delivers extracted batches to shards, in order, and commits complete shards."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import TypeVar

from msgspec import structs

from featcache.errors import Reason, StoreError
from featcache.extraction.features import Extracted
from featcache.extraction.jobs import DoneTask, Progress, RunControl, VersionJob
from featcache.extraction.padded_rows import Part
from featcache.extraction.tasks import ShardTask
from featcache.format.shard import Item
from featcache.format.writing import ShardBuilder
from featcache.manifest.segments import Utterance
from featcache.version.ledger import Failure

_WAITING_COMMITS = 2
"""Complete shards that may wait for the disk."""

_UNREAD = frozenset({Reason.FILE_MISSING, Reason.FILE_UNREADABLE})

_Record = TypeVar("_Record", Item, Failure)


class OpenShard:
    """A task in progress, with a shard for each version, in memory until it is committed. Not
    thread-safe."""

    def __init__(
        self, task: ShardTask, jobs: Sequence[VersionJob], leaves_unread: bool = False
    ) -> None:
        self._jobs = jobs
        self._task = task
        self._left = _UNREAD if leaves_unread else frozenset()
        self._builders = [ShardBuilder(job.version.info.spec) for job in jobs]
        self._failures: list[list[Failure]] = [[] for _ in jobs]
        self._unread: list[list[Failure]] = [[] for _ in jobs]
        self._progress = Progress()
        ids = (utterance.id for utterance in task.utterances)
        self._generations = dict(zip(ids, task.generations, strict=True))

    def append(self, part: Iterable[Extracted]) -> Progress:
        """Append a part of a batch. Raises ExtractorError if the spec does not hold it."""
        progress = Progress()
        seconds: dict[str, float] = {}  # by utterance, over all versions
        versions = zip(self._jobs, self._builders, self._failures, self._unread, part, strict=True)
        for job, builder, failures, unread, extracted in versions:
            all_failed = [*map(self._with_generation, extracted.failures)]
            failed = [failure for failure in all_failed if failure.reason not in self._left]
            failures += failed
            unread += [failure for failure in all_failed if failure.reason in self._left]
            items = map(self._with_generation, extracted.items)
            for item, clip in zip(items, extracted.features, strict=True):
                builder.append(item, clip.features, clip.side)
                seconds[item.id] = item.num_samples / job.built.sample_rate
            progress += job.count(replace(extracted, failures=failed))
        progress += Progress(audio_seconds=sum(seconds.values()))
        self._progress += progress
        return progress

    def _with_generation(self, record: _Record) -> _Record:
        generation = self._generations[record.id]
        return record if generation == 1 else structs.replace(record, generation=generation)

    def commit(self) -> DoneTask:
        """Record the failures, and make the shards visible. Raises StoreError if the
        cache cannot be written."""
        num_shards = 0
        for job, builder, failures in zip(self._jobs, self._builders, self._failures, strict=True):
            job.run.fail(failures)
            if len(builder):
                name, files = builder.files(
                    fingerprint=job.version.info.fingerprint,
                    row=self._task.row,
                    manifest=self._task.manifest,
                    made_by=job.made_by,
                    where=job.version.path,
                )
                job.version.store.publish(files, f"shards/{name}")
                num_shards += 1
        progress = self._progress + Progress(shards=num_shards)
        return DoneTask(self._task.row, progress, self._unread)


@dataclass(eq=False)
class Batch:
    """Some utterances of a task, and their features."""

    number: int
    shard: OpenShard
    utterances: Sequence[Utterance]
    seconds: float
    is_last: bool
    is_suspect: bool
    parts: list[Part] | None = None
    """Each part's results of each version; None until the batch is extracted."""

    @property
    def is_complete(self) -> bool:
        """True once all results are there, with all rows."""
        if self.parts is None:
            return False
        return all(result.is_complete for result in chain.from_iterable(self.parts))

    @property
    def waiting_seconds(self) -> float:
        """Seconds of audio, about, in its computed rows."""
        return sum(
            result.waiting_seconds / len(part) for part in self.parts or () for result in part
        )


class Delivery:
    """Appends batches to their shards in order, and commits complete shards in its own
    thread.

    Args:
        state: The engine's lock, which guards `coming`; notified whenever a batch is
            appended.
        fail: Called with the error of a commit, in the thread that commits.
    """

    def __init__(
        self, control: RunControl, state: threading.Condition, fail: Callable[[BaseException], None]
    ) -> None:
        self.coming: deque[Batch] = deque()
        """The batches that are extracted, or wait for earlier ones, in order."""
        self._is_appending = False  # the first of them; guarded by `state`
        self._control = control
        self._state = state
        self._fail = fail
        self._reporting = threading.Lock()
        self._begun: OpenShard | None = None  # neither complete nor empty
        self._commits = ThreadPoolExecutor(1, "featcache-commit")
        self._commit_slots = threading.BoundedSemaphore(_WAITING_COMMITS)

    def close(self) -> None:
        """Wait for the commits."""
        self._commits.shutdown()

    def commit_part(self) -> None:
        """Commit the beginning of a shard, after `close`."""
        if self._begun is not None:
            self._commit(self._begun)

    @property
    def progress(self) -> Progress:
        """The progress, with computed rows whose batches are not complete."""
        with self._state:
            waiting_seconds = sum(batch.waiting_seconds for batch in self.coming)
        return replace(self._control.progress, waiting_seconds=waiting_seconds)

    def report(self) -> None:
        """Report the progress, unless another thread is doing so."""
        if self._reporting.acquire(blocking=False):
            try:
                self._control.report(self.progress)
            finally:
                self._reporting.release()

    def take(self) -> Batch | None:
        """Take the next batch to append, if it is complete and none is being appended. The
        caller holds `state`."""
        if self._is_appending or not self.coming or not self.coming[0].is_complete:
            return None
        self._is_appending = True
        return self.coming[0]

    def append(self, batch: Batch) -> None:
        """Append a batch that was taken. Raises StoreError if the cache cannot be
        written."""
        started = perf_counter()
        self._begun = batch.shard
        while batch.parts:
            part = batch.parts.pop(0)
            self._control.add(batch.shard.append(result.extracted() for result in part))
        self._control.check()
        self.report()
        if batch.is_last:
            self._begun = None
            self._commit_slots.acquire()
            self._commits.submit(self._commit, batch.shard).add_done_callback(self._committed)
        with self._state:
            self.coming.popleft()
            self._is_appending = False
            self._state.notify_all()
        self._control.add(Progress(stages={"write": perf_counter() - started}))

    def _commit(self, shard: OpenShard) -> None:
        try:
            done = shard.commit()
        except StoreError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError):
                raise
            remedy = "make room or mend the disk"
            if cause.errno == errno.EMFILE:
                remedy = "allow more open files, with ulimit -n"
            raise StoreError(
                f"{error}; what is committed stays: {remedy}, and run again"
            ) from error
        self._control.add(Progress(shards=done.progress.shards))
        self._control.done(done)

    def _committed(self, future: Future[None]) -> None:
        self._commit_slots.release()
        error = future.exception()
        if error is not None:
            self._fail(error)
