"""Appends extracted batches to their shards in order, and commits complete shards in a
thread of its own.

A shard is in memory until it is committed. If the run is stopped, `Delivery.commit_part`
commits incomplete ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter

from featcache.errors import Reason, StoreError
from featcache.extraction.features import Extracted
from featcache.extraction.jobs import DoneTask, Progress, RunControl, VersionJob
from featcache.extraction.padded_rows import PendingRows
from featcache.extraction.tasks import ShardTask
from featcache.format.writing import ShardBuilder
from featcache.manifest.segments import Utterance
from featcache.version.ledger import Failure

_WAITING_COMMITS = 2
"""Complete shards that may wait for the disk before the workers have to."""

_UNREAD = frozenset({Reason.FILE_MISSING, Reason.FILE_UNREADABLE})
"""Reasons that may hold on one machine and not on another."""


class OpenShard:
    """A task in progress, with a shard for each version, from the first batch to the
    commit. Not thread-safe."""

    def __init__(
        self, task: ShardTask, jobs: Sequence[VersionJob], leaves_unread: bool = False
    ) -> None:
        self.jobs = jobs
        self._task = task
        self._left = _UNREAD if leaves_unread else frozenset()
        self._builders = [ShardBuilder(job.version.info.spec) for job in jobs]
        self._failures: list[list[Failure]] = [[] for _ in jobs]
        self._done = DoneTask(task.name, Progress(), [[] for _ in jobs])
        numbers = zip(task.utterances, task.generations, strict=True)
        self._generations = {
            utterance.id: generation for utterance, generation in numbers if generation > 1
        }

    def append(self, part: Iterable[Extracted]) -> Progress:
        """Add and return what each version gets of a part of a batch; ExtractorError if
        that is not what it holds."""
        done = Progress()
        seconds: dict[str, float] = {}  # of each utterance, whichever version has it
        for number, (job, extracted) in enumerate(zip(self.jobs, part, strict=True)):
            items, all_failures = extracted.items, extracted.failures
            if self._generations:
                items = [
                    replace(item, generation=self._generations.get(item.id, 1)) for item in items
                ]
                all_failures = [
                    replace(one, generation=self._generations.get(one.id, 1))
                    for one in all_failures
                ]
            failures = [failure for failure in all_failures if failure.reason not in self._left]
            self._done.unread[number] += [
                failure for failure in all_failures if failure.reason in self._left
            ]
            self._failures[number] += failures
            for item, clip in zip(items, extracted.features, strict=True):
                self._builders[number].append(item, clip.features, clip.side)
            done.add(job.count(replace(extracted, failures=failures)))
            seconds |= {item.id: item.num_samples / job.built.sample_rate for item in items}
        done.audio_seconds = sum(seconds.values())
        self._done.progress.add(done)
        return done

    def commit(self) -> DoneTask:
        """Record the failures, and make the shards visible. Returns what the versions
        have got.

        What was not appended is in no shard, and still to be done. Raises StoreError if
        the cache cannot be written."""
        for job, builder, failures in zip(self.jobs, self._builders, self._failures, strict=True):
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
                self._done.progress.shards += 1
        return self._done


@dataclass(eq=False)
class Batch:
    """Some utterances of a task, and their features."""

    number: int
    """The number of the batch, over all tasks."""
    shard: OpenShard
    utterances: Sequence[Utterance]
    """At least one utterance."""
    seconds: float
    """Seconds of their audio, known or estimated."""
    is_last: bool
    is_suspect: bool = False
    """Whether it is a single utterance that may have crashed an earlier run."""
    parts: list[list[Extracted | PendingRows]] | None = None
    """For each part of the batch, what each version gets; rows may be missing. None until
    it is extracted."""
    num_pending: int = 0
    """How many of these lack rows."""
    waiting_seconds: float = 0.0
    """What it has added to that of `Progress`."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is missing."""
        return self.parts is not None and not self.num_pending


class Delivery:
    """Appends batches to their shards in order, and commits shards once they are complete.

    Commits have a thread of their own, which mostly waits for the disk.

    Args:
        control: What to count in, and whom to tell.
        state: The engine's lock, which guards `coming` and what is counted; notified
            whenever a batch is appended.
        fail: Called with the error of a commit, in the thread that commits.
    """

    def __init__(
        self, control: RunControl, state: threading.Condition, fail: Callable[[BaseException], None]
    ) -> None:
        self.coming: deque[Batch] = deque()
        """The batches that are being extracted, or wait for what comes before them, in
        the order of their tasks."""
        self._is_appending = False  # the first of them; guarded by `state`
        self._control = control
        self._progress = control.progress
        self._state = state
        self._fail = fail
        self._telling = threading.Lock()
        self._begun: OpenShard | None = None  # what is neither complete nor empty
        self._commits = ThreadPoolExecutor(1, "featcache-commit")
        self._commit_slots = threading.BoundedSemaphore(_WAITING_COMMITS)

    def close(self) -> None:
        """Wait until the complete shards are committed, or have failed to be; no batch
        may be appended any more."""
        self._commits.shutdown()

    def commit_part(self) -> None:
        """Commit of a shard that is not complete what has been appended, after `close`.

        Batches are appended whole and in order, so this is the beginning of the shard
        that was to be. Raises StoreError if the cache cannot be written."""
        if self._begun is not None:
            self._commit(self._begun)

    def tell(self) -> None:
        """Tell how far the run is, unless another thread is doing so."""
        if self._telling.acquire(blocking=False):
            try:
                self._control.report(self._progress)
            finally:
                self._telling.release()

    def take(self) -> Batch | None:
        """The next batch, if it is complete and none is being appended; the caller holds
        `state`, and then appends it. After one that could not be written, there is
        none."""
        if self._is_appending or not self.coming or not self.coming[0].is_complete:
            return None
        self._is_appending = True
        self._progress.waiting_seconds -= self.coming[0].waiting_seconds
        return self.coming[0]

    def append(self, batch: Batch) -> None:
        """Append a batch that was taken. Raises StoreError if the cache cannot be
        written: it is half written then."""
        started = perf_counter()
        self._begun = shard = batch.shard
        while batch.parts:
            part = batch.parts.pop(0)
            extracted = (
                result.extracted() if isinstance(result, PendingRows) else result for result in part
            )
            done = shard.append(extracted)
            with self._state:
                self._progress.add(done)
        self._control.check()
        self.tell()
        if batch.is_last:
            self._begun = None
            self._commit_slots.acquire()
            self._commits.submit(self._commit, shard).add_done_callback(self._committed)
        with self._state:
            self.coming.popleft()
            self._is_appending = False
            self._progress.stages["write"] += perf_counter() - started
            self._state.notify_all()

    def _commit(self, shard: OpenShard) -> None:
        try:
            done = shard.commit()
        except StoreError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            raise StoreError(
                f"{error}; what is committed stays: make room or mend the disk, and run again"
            ) from error
        with self._state:
            self._progress.shards += done.progress.shards
        self._control.done(done)

    def _committed(self, future: Future[None]) -> None:
        self._commit_slots.release()
        if (error := future.exception()) is not None:
            self._fail(error)
