"""From batches to shards: appended in order, committed concurrently."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType

from featcache.engines.progress import Watch
from featcache.engines.shards import OpenShard
from featcache.extract.rows import Pending
from featcache.extract.target import Extracted
from featcache.manifest import Utterance

_PENDING_COMMITS = 2
"""Shards that may wait for the disk before the workers do."""


@dataclass(eq=False)
class Batch:
    """Utterances of a task, and what became of them.

    Attributes:
        number: of the batch, over all tasks: batches are appended in this order.
        shard: that they are for.
        utterances: at least one.
        is_last: of its shard.
        is_suspect: whether it is one utterance that may have crashed an earlier run.
        parts: what each target got, part by part; rows may be missing.
        waiting: how many of these lack rows.
    """

    number: int
    shard: OpenShard
    utterances: Sequence[Utterance]
    is_last: bool
    is_suspect: bool = False
    parts: list[list[Extracted | Pending]] = field(default_factory=list)
    waiting: int = 0


class Delivery:
    """Appends batches to their shards in order, by whoever has just completed one, and commits shards that are full.

    Commits have a thread of their own, which mostly waits for the disk. Leaving the `with` block waits for it, and
    abandons the shards that are not full.

    Args:
        watch: what to count in, and whom to tell.
        state: the engine's lock, notified whenever a batch has been appended.
        fail: called with the error of a commit, in the thread that commits.

    Attributes:
        appended: how many batches have been appended; guarded by `state`.
    """

    def __init__(self, watch: Watch, state: threading.Condition, fail: Callable[[BaseException], None]) -> None:
        self.appended = 0
        self._watch = watch
        self._progress = watch.progress
        self._state = state
        self._fail = fail
        self._complete: dict[int, Batch] = {}  # by number; guarded by `state`
        self._is_appending = False  # guarded by `state`
        self._open: set[OpenShard] = set()
        self._commits = ThreadPoolExecutor(1, "featcache-commit")
        self._slots = threading.BoundedSemaphore(_PENDING_COMMITS)

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._commits.shutdown()
        with ExitStack() as left:  # all are abandoned, also where one raises: a full disk may refuse to close a file
            for shard in self._open:
                left.callback(shard.abandon, self._progress)

    def begin(self, shard: OpenShard) -> None:
        """Take over a shard before its first batch: it is committed or abandoned in the end."""
        self._open.add(shard)

    def put(self, batch: Batch) -> None:
        """Take a batch of which nothing is missing; the caller holds `state`."""
        self._complete[batch.number] = batch

    def append(self) -> None:
        """Append the next batches in order, as far as they are complete; nothing if another thread is doing so.

        Raises:
            StoreError: the cache cannot be written. Nothing is appended after that: a batch is half written.
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
            extracted = (one.extracted() if isinstance(one, Pending) else one for one in part)
            batch.shard.append(extracted, self._progress)
        self._watch.report(self._progress)
        if batch.is_last:
            self._slots.acquire()
            self._commits.submit(self._commit, batch.shard).add_done_callback(self._committed)

    def _commit(self, shard: OpenShard) -> None:
        shard.commit(self._progress)
        self._open.discard(shard)

    def _committed(self, future: Future[None]) -> None:
        self._slots.release()
        if (error := future.exception()) is not None:
            self._fail(error)
