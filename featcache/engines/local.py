"""Runs shard tasks in this process: a few worker threads, results in order, commits beside them.

Each worker takes what is most urgent: rows that fill a batch, to compute them; else a batch of utterances, to decode
and, unless it becomes rows, extract it; else, where nobody may take more, rows that fill no batch. Whoever completes
a batch appends whatever is next in order to the shard, so there is no writer to hand over to, and no thread beyond the
budget: one more only waits for the disk, flushing finished shards while the workers go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from featcache.device import Device
from featcache.engines.claiming import claimed
from featcache.engines.progress import Watch
from featcache.engines.shards import Fill, OpenShard
from featcache.manifest import Utterance
from featcache.pipeline.decoding import batches
from featcache.pipeline.rows import Pending, Row, compute_rows
from featcache.pipeline.target import Extracted, Spent
from featcache.pipeline.window import Window
from featcache.plan import ShardTask

_WINDOW_PER_WORKER = 4
"""Batches that may wait for one before them: bounds memory where one takes much longer, or rows wait for others."""

_WINDOW_SECONDS = 4 * 3600.0
"""Audio in those batches, at most, if there are many workers: 1.4 GB at 24 kHz."""

_PENDING_COMMITS = 2
"""Shards that may wait for the disk before the workers do."""

_POLL_SECONDS = 0.2

_END = object()

Produce = Callable[[Sequence[Utterance], Spent], Iterable[list[Extracted | Pending]]]
"""Makes features of a batch of utterances: for one part of it after the other, what each target gets."""

_Job = Callable[[Spent], None]


@dataclass(eq=False)
class _Batch:
    """Utterances of a task, and what became of them.

    Attributes:
        parts: what each target got, part by part; rows may be missing.
        waiting: how many of these lack rows.
    """

    number: int
    shard: OpenShard
    utterances: Sequence[Utterance]
    is_last: bool
    parts: list[list[Extracted | Pending]] = field(default_factory=list)
    waiting: int = 0


class LocalEngine:
    """Does shard tasks for some versions, on one device.

    Args:
        fills: the versions; every task is for all of them.
        produce: what makes a batch's features, or its rows: `pipeline.batch.process`, say.
        device: to extract on.
        watch: what it tells of its progress, and what stops it.
    """

    def __init__(self, fills: Sequence[Fill], produce: Produce, device: Device, watch: Watch) -> None:
        self._fills = fills
        self._produce = produce
        self._device = device
        self._watch = watch
        self._progress = watch.progress
        self._stop = watch.stop
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._open: set[OpenShard] = set()
        per_worker = _WINDOW_PER_WORKER * device.workers
        self._ahead = max(device.workers + 2, min(per_worker, int(_WINDOW_SECONDS / device.batch_seconds)))
        self._state = threading.Condition()  # guards the following, and progress and stages
        self._window = Window(device)
        self._batch_of: dict[Pending, _Batch] = {}
        self._is_taking = False
        self._is_exhausted = False
        self._is_starved = False  # what is left to take, other runs are doing
        self._taken = 0
        self._decoding = 0
        self._computing = 0
        self._written = 0
        self._finished: dict[int, _Batch] = {}
        self._appending = False

    def run(self, tasks: Iterator[ShardTask]) -> None:
        """Do the tasks; returns when all are committed, or `stop` was set and what was whole is.

        Raises:
            StoreError: the cache cannot be written. What was committed stays.
            ExtractorError: the extractor broke its contract.
        """
        self._batches = self._cut(tasks)
        self._commits = ThreadPoolExecutor(1, "featcache-commit")
        self._commit_slots = threading.BoundedSemaphore(_PENDING_COMMITS)
        workers = [threading.Thread(target=self._work, name=f"featcache-{i}") for i in range(self._device.workers)]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                while worker.is_alive():  # a signal that comes just before a wait is handled when the wait ends
                    worker.join(_POLL_SECONDS)
        except BaseException:
            self._failed.set()
            raise
        finally:
            for worker in workers:
                worker.join()
            self._commits.shutdown()
            for shard in self._open:
                shard.abandon(self._progress)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        spent = Spent()
        try:
            while (job := self._next()) is not None:
                job(spent)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that called run
            self._fail(error)
        with self._state:
            self._progress.spend(spent)

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._error is None:
                self._error = error
            self._failed.set()
            self._state.notify_all()

    # Choosing: what a worker does next.

    def _next(self) -> _Job | None:
        """The most urgent job; waits while there is none. None once there will be none."""
        started = perf_counter()
        with self._state:
            try:
                while not (self._failed.is_set() or self._stop.is_set()):
                    if (rows := self._rows_to_compute()) is not None:
                        self._computing += 1
                        return partial(self._compute, rows)
                    if self._may_take():
                        self._is_taking = True
                        return self._take
                    if self._is_exhausted and not (self._is_busy or self._window):
                        break
                    self._state.wait(_POLL_SECONDS)  # not for ever: a signal sets `_stop`, and tells nobody
                return None
            finally:
                self._progress.stages["wait"] += perf_counter() - started

    @property
    def _is_busy(self) -> bool:
        """Whether a worker does what may give rows, or complete a batch."""
        return bool(self._is_taking or self._decoding or self._computing)

    def _may_take(self) -> bool:
        if self._is_taking or self._is_exhausted or self._taken >= self._written + self._ahead:
            return False
        return not self._is_starved or not (self._decoding or self._computing or self._window)

    def _rows_to_compute(self) -> list[Row] | None:
        """Rows that make a batch; or that do not, where none will join them, or where everything waits for them."""
        if self._computing >= self._device.slots:
            return None
        if (rows := self._window.full()) is not None:
            return rows
        if self._is_exhausted or self._is_starved:
            return None if self._decoding else self._window.oldest()
        return self._window.oldest(self._written) if self._taken >= self._written + self._ahead else None

    # Taking: batches are cut from tasks as they are wanted, by one worker at a time.

    def _take(self, spent: Spent) -> None:
        """Take a batch, decode it, extract what is not for rows, and put the rest into the window."""
        if self._is_starved:
            self._stop.wait(_POLL_SECONDS)
        batch = next(self._batches, _END)
        with self._state:
            self._is_taking = False
            self._is_exhausted = batch is _END
            self._is_starved = batch is None
            if isinstance(batch, _Batch):
                self._taken += 1
                self._decoding += 1
            self._state.notify_all()
        if not isinstance(batch, _Batch):
            return
        parts = list(self._produce(batch.utterances, spent))
        with self._state:
            self._decoding -= 1
            batch.parts = parts
            for pending in (one for part in parts for one in part if isinstance(one, Pending)):
                batch.waiting += 1
                self._batch_of[pending] = batch
                self._window.add(batch.number, pending.rows)
            self._finish(batch)
        self._deliver()

    def _compute(self, rows: list[Row], spent: Spent) -> None:
        """Compute rows of one length."""
        with spent.extracting(rows[0].pending.target):
            results = compute_rows(rows, self._device)
        with self._state:
            self._computing -= 1
            for row, result in zip(rows, results, strict=True):
                row.pending.done(row, result)
                if row.pending.is_complete:
                    batch = self._batch_of.pop(row.pending)
                    batch.waiting -= 1
                    self._finish(batch)
            self._state.notify_all()
        self._deliver()

    def _finish(self, batch: _Batch) -> None:
        """Have a batch delivered, if nothing of it is missing any more."""
        if not batch.waiting:
            self._finished[batch.number] = batch
        self._state.notify_all()

    def _cut(self, tasks: Iterator[ShardTask]) -> Iterator[_Batch | None]:
        """Batches; None where those that are left are not to be had at the moment."""
        number = 0
        for shard in claimed(tasks, self._fills, self._progress):
            if shard is None:
                yield None
                continue
            self._open.add(shard)
            cut = list(batches(shard.task.utterances, shard.task.seconds, self._device.batch_seconds))
            for utterances in cut:
                yield _Batch(number, shard, utterances, utterances is cut[-1])
                number += 1

    # Delivering: in the batches' order, by whoever has just completed one.

    def _deliver(self) -> None:
        while True:
            with self._state:
                if self._failed.is_set() or self._appending or self._written not in self._finished:
                    return
                self._appending = True
                batch = self._finished.pop(self._written)
            started = perf_counter()
            try:
                self._append(batch)
            except BaseException as error:
                self._fail(error)  # before another worker's turn: nothing may follow what is half written
                raise
            with self._state:
                self._appending = False
                self._written += 1
                self._progress.stages["write"] += perf_counter() - started
                self._state.notify_all()

    def _append(self, batch: _Batch) -> None:
        while batch.parts:
            part = batch.parts.pop(0)
            extracted = (one.extracted() if isinstance(one, Pending) else one for one in part)
            batch.shard.append(extracted, self._progress)
        self._watch.report(self._progress)
        if batch.is_last:
            self._commit_slots.acquire()
            self._commits.submit(self._commit, batch.shard).add_done_callback(self._committed)

    # Committing: in a thread of its own, which mostly waits for the disk.

    def _commit(self, shard: OpenShard) -> None:
        shard.commit(self._progress)
        self._open.discard(shard)

    def _committed(self, future: Future[None]) -> None:
        self._commit_slots.release()
        if (error := future.exception()) is not None:
            self._fail(error)
