"""Delivers extracted batches to shards, in order, and commits complete shards."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter

from featcache.errors import StoreError
from featcache.extraction.jobs import Progress, RunControl
from featcache.extraction.open_shard import OpenShard
from featcache.extraction.padded_rows import Part
from featcache.manifest.segments import Utterance

_WAITING_COMMITS = 2
"""Complete shards that may wait for the disk."""


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
    num_pending: int = 0
    waiting_seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        """True once all results are there, with all rows."""
        return self.parts is not None and not self.num_pending


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

    def report(self) -> None:
        """Report the progress, unless another thread is doing so."""
        if self._reporting.acquire(blocking=False):
            try:
                self._control.report(self._control.progress)
            finally:
                self._reporting.release()

    def take(self) -> Batch | None:
        """Take the next batch to append, if it is complete and none is being appended. The
        caller holds `state`."""
        if self._is_appending or not self.coming or not self.coming[0].is_complete:
            return None
        batch = self.coming[0]
        self._is_appending = True
        self._control.add(Progress(waiting_seconds=-batch.waiting_seconds))
        return batch

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
