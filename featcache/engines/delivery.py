"""Appends extracted batches to their shards in order, and commits complete shards in a thread of its own.

If the run is stopped, shards that are not complete are committed as they are: see `Delivery.commit_parts`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter

from featcache.engines.open_shards import OpenShard
from featcache.extraction.features import Extracted
from featcache.extraction.jobs import RunControl
from featcache.extraction.padded_rows import PendingRows
from featcache.manifest import Utterance

_WAITING_COMMITS = 2
"""Complete shards that may wait for the disk before the workers have to."""


@dataclass(eq=False)
class Batch:
    """Some utterances of a task, and their features."""

    number: int
    """The number of the batch, over all tasks. Batches are appended in this order."""
    shard: OpenShard
    """The shard that the batch belongs to."""
    utterances: Sequence[Utterance]
    """At least one utterance."""
    is_last: bool
    """Whether it is the last batch of its shard."""
    is_suspect: bool = False
    """Whether it is a single utterance that may have crashed an earlier run."""
    parts: list[list[Extracted | PendingRows]] = field(default_factory=list)
    """For each part of the batch, what each version gets; rows may be missing."""
    num_pending: int = 0
    """How many of these lack rows."""


class Delivery:
    """Appends batches to their shards in order, and commits shards once they are complete.

    The worker that completes a batch appends it. Commits have a thread of their own, which mostly waits for the disk.
    Leaving the `with` block waits for that thread, and abandons the shards that have not been committed.

    Args:
        control: What to count in, and whom to tell.
        state: The engine's lock, notified whenever a batch has been appended.
        fail: Called with the error of a commit, in the thread that commits.
    """

    appended: int
    """The number of batches that have been appended; guarded by `state`."""

    def __init__(self, control: RunControl, state: threading.Condition, fail: Callable[[BaseException], None]) -> None:
        self.appended = 0
        self._control = control
        self._progress = control.progress
        self._state = state
        self._fail = fail
        self._complete: dict[int, Batch] = {}  # by number; guarded by `state`
        self._is_appending = False  # guarded by `state`
        self._open: set[OpenShard] = set()
        self._commits = ThreadPoolExecutor(1, "featcache-commit")
        self._commit_slots = threading.BoundedSemaphore(_WAITING_COMMITS)

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        with ExitStack() as left:  # abandons all of them even if one raises: a full disk may refuse to close a file
            for shard in self._open:
                left.callback(shard.abandon, self._progress)

    def wait(self) -> None:
        """Wait until the complete shards are committed, or have failed to be; no batch may be appended any more."""
        self._commits.shutdown()

    def commit_parts(self) -> None:
        """Commit of each shard that is not complete what has been appended, after `wait`.

        Batches are appended whole and in order, so this is the beginning of the shard that was to be.

        Raises:
            StoreError: The cache cannot be written.
        """
        for shard in sorted(self._open, key=lambda shard: shard.task.row):
            if shard.has_begun:
                self._commit(shard)

    def begin(self, shard: OpenShard) -> None:
        """Take over a shard before its first batch, to commit or abandon it in the end."""
        self._open.add(shard)

    def put(self, batch: Batch) -> None:
        """Take a batch that lacks nothing; the caller holds `state`."""
        self._complete[batch.number] = batch

    def append(self) -> None:
        """Append the next batches in order, as far as they are complete; nothing if another thread is doing so.

        Raises:
            StoreError: The cache cannot be written. A batch is half written then, and nothing is appended after it.
        """
        while (batch := self._take()) is not None:
            started = perf_counter()
            self._write(batch)
            with self._state:
                self._is_appending = False
                self.appended += 1
                self._progress.stages["write"] += perf_counter() - started
                self._state.notify_all()

    def _take(self) -> Batch | None:
        with self._state:
            if self._is_appending or self.appended not in self._complete:
                return None
            self._is_appending = True
            return self._complete.pop(self.appended)

    def _write(self, batch: Batch) -> None:
        while batch.parts:
            part = batch.parts.pop(0)
            extracted = (result.extracted() if isinstance(result, PendingRows) else result for result in part)
            batch.shard.append(extracted, self._progress)
        self._control.check_extractors(batch.shard.jobs)
        self._control.check_failures(batch.shard.counts)
        self._control.report(self._progress)
        if batch.is_last:
            self._commit_slots.acquire()
            self._commits.submit(self._commit, batch.shard).add_done_callback(self._committed)

    def _commit(self, shard: OpenShard) -> None:
        shard.commit(self._progress)
        self._open.discard(shard)
        self._control.done(shard.done)

    def _committed(self, future: Future[None]) -> None:
        self._commit_slots.release()
        if (error := future.exception()) is not None:
            self._fail(error)
