"""Runs shard tasks in this process, by a few worker threads.

Each worker takes the most urgent work: rows that fill a batch, to compute them; otherwise a batch of utterances, to
decode and, unless it becomes rows, extract it; otherwise, if no more utterances may be taken, rows that do not fill a
batch. The worker that completes a batch appends whatever is next in order to the shard (`delivery.py`), so there is no
writer thread. One thread beyond the budget waits for the disk, flushing finished shards while the workers go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from time import perf_counter

from featcache.device import Device
from featcache.engines.apart import Apart
from featcache.engines.claiming import claimed
from featcache.engines.delivery import Batch, Delivery
from featcache.engines.progress import Watch
from featcache.engines.shards import Fill
from featcache.extract.decoding import batches
from featcache.extract.derived import Produce
from featcache.extract.plan import ShardTask
from featcache.extract.rows import Pending, Row, compute_rows
from featcache.extract.target import Spent
from featcache.extract.window import Window
from featcache.manifest import Utterance
from featcache.store.in_flight import InFlight

_WINDOW_PER_WORKER = 4
"""Batches that may wait for one before them: bounds memory where one takes much longer, or rows wait for others."""

_WINDOW_SECONDS = 4 * 3600.0
"""Audio in those batches, at most, if there are many workers: 1.4 GB at 24 kHz."""

_POLL_SECONDS = 0.2

_END = object()


@dataclass
class _Worker:
    """A worker thread.

    Attributes:
        number: from 0.
        spent: what it did so far.
    """

    number: int
    spent: Spent = field(default_factory=Spent)


_Job = Callable[[_Worker], None]


class LocalEngine:
    """Does shard tasks for some versions, on one device.

    Args:
        fills: the versions; every task is for all of them.
        produce: what makes a batch's features, or its rows: `pipeline.batch.process`, say.
        device: to extract on.
        watch: what it tells of its progress, and what stops it.
        in_flight: marks what its workers work on.
        apart: makes the features of suspects, in place of `produce`.
    """

    def __init__(
        self,
        fills: Sequence[Fill],
        produce: Produce,
        device: Device,
        watch: Watch,
        in_flight: InFlight,
        apart: Apart,
    ) -> None:
        self._fills = fills
        self._produce = produce
        self._device = device
        self._in_flight = in_flight
        self._apart = apart
        self._progress = watch.progress
        self._stop = watch.stop
        self._batches: Iterator[Batch | None] = iter(())  # one worker at a time takes from it
        per_worker = _WINDOW_PER_WORKER * device.workers
        self._ahead = max(device.workers + 2, min(per_worker, int(_WINDOW_SECONDS / device.batch_seconds)))
        # Guards what follows, and the times in `Progress`. What that counts has one writer each: utterances the worker
        # that appends, shards the thread that commits, `elsewhere` the worker that takes.
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._window = Window(device)
        self._batch_of: dict[Pending, Batch] = {}
        self._is_taking = False
        self._is_exhausted = False
        self._is_starved = False  # what is left to take, other runs are doing
        self._taken = 0
        self._decoding = 0
        self._computing = 0
        self._delivery = Delivery(watch, self._state, self._fail)

    def run(self, tasks: Iterator[ShardTask]) -> None:
        """Do the tasks; returns when all are committed, or `stop` was set and what was whole is.

        Raises:
            StoreError: the cache cannot be written. What was committed stays.
            ExtractorError: the extractor broke its contract.
        """
        self._batches = self._cut(tasks)
        workers = [
            threading.Thread(target=self._work, args=[_Worker(number)], name=f"featcache-{number}")
            for number in range(self._device.workers)
        ]
        with self._delivery:
            try:
                for worker in workers:
                    worker.start()
                for worker in workers:
                    while worker.is_alive():  # a signal that comes just before a wait is handled when the wait ends
                        worker.join(_POLL_SECONDS)
            except BaseException as error:
                self._fail(error)
                raise
            finally:
                for worker in workers:
                    if worker.ident is not None:  # it has been started
                        worker.join()
        if self._error is not None:
            raise self._error

    def _work(self, worker: _Worker) -> None:
        try:
            while (job := self._next()) is not None:
                job(worker)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that called run
            self._fail(error)
        with self._state:
            self._progress.spend(worker.spent)

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._error is None:
                self._error = error
            self._state.notify_all()

    # Choosing: what a worker does next.

    def _next(self) -> _Job | None:
        """The most urgent job; waits while there is none. None once there will be none."""
        started = perf_counter()
        with self._state:
            try:
                while self._error is None and not self._stop.is_set():
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

    @property
    def _is_far_ahead(self) -> bool:
        """Whether as many batches as may wait do so for the one that is to be appended next."""
        return self._taken >= self._delivery.appended + self._ahead

    def _may_take(self) -> bool:
        if self._is_taking or self._is_exhausted or self._is_far_ahead:
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
        return self._window.oldest(self._delivery.appended) if self._is_far_ahead else None

    # Taking: batches are cut from tasks as they are wanted, by one worker at a time.

    def _take(self, worker: _Worker) -> None:
        """Take a batch, decode it, extract what is not for rows, and put the rest into the window."""
        if self._is_starved:
            self._stop.wait(_POLL_SECONDS)
        batch = next(self._batches, _END)
        with self._state:
            self._is_taking = False
            self._is_exhausted = batch is _END
            self._is_starved = batch is None
            if isinstance(batch, Batch):
                self._taken += 1
                self._decoding += 1
            self._state.notify_all()
        if not isinstance(batch, Batch):
            return
        produce: Produce = self._apart.extract if batch.is_suspect else self._produce
        with self._in_flight.working_on(worker.number, (one.id for one in batch.utterances), batch.is_suspect):
            parts = list(produce(batch.utterances, worker.spent))
        with self._state:
            self._decoding -= 1
            batch.parts = parts
            for pending in (one for part in parts for one in part if isinstance(one, Pending)):
                batch.waiting += 1
                self._batch_of[pending] = batch
                self._window.add(batch.number, pending.rows)
            self._complete(batch)
        self._delivery.append()

    def _compute(self, rows: list[Row], worker: _Worker) -> None:
        """Compute rows of one length."""
        ids = (row.pending.id_of(row) for row in rows)
        with worker.spent.extracting(rows[0].pending.target), self._in_flight.working_on(worker.number, ids):
            results = compute_rows(rows, self._device)
        with self._state:
            self._computing -= 1
            for row, result in zip(rows, results, strict=True):
                row.pending.done(row, result)
                if row.pending.is_complete:
                    batch = self._batch_of.pop(row.pending)
                    batch.waiting -= 1
                    self._complete(batch)
            self._state.notify_all()
        self._delivery.append()

    def _complete(self, batch: Batch) -> None:
        """Have a batch delivered, if nothing of it is missing any more."""
        if not batch.waiting:
            self._delivery.put(batch)
        self._state.notify_all()

    def _cut(self, tasks: Iterator[ShardTask]) -> Iterator[Batch | None]:
        """Batches; None where those that are left are not to be had at the moment."""
        number = 0
        for shard in claimed(tasks, self._fills, self._progress):
            if shard is None:
                yield None
                continue
            self._delivery.begin(shard)
            cut = batches(shard.task.utterances, shard.task.seconds, self._device.batch_seconds)
            parts = list(_suspects_alone(cut, self._apart.suspects.ids))
            for utterances, is_suspect in parts:
                yield Batch(number, shard, utterances, utterances is parts[-1][0], is_suspect)
                number += 1


def _suspects_alone(
    batches: Iterable[Sequence[Utterance]], suspects: Set[str]
) -> Iterator[tuple[Sequence[Utterance], bool]]:
    """The same batches, except that each suspect is one of its own; and whether it is a suspect's."""
    for batch in batches:
        for is_suspect, group in groupby(batch, key=lambda utterance: utterance.id in suspects):
            if is_suspect:
                yield from (([utterance], True) for utterance in group)
            else:
                yield list(group), False
