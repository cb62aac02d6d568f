"""Runs shard tasks in this process, by a few worker threads.

Each worker takes the most urgent work: the next batch in order, if it is complete, to
append it to its shard (`delivery.py`), so that there is no writer thread; otherwise rows
that fill a batch, to compute them; otherwise a batch of utterances, to decode it and,
unless it becomes rows, extract it; otherwise, if no more utterances may be taken, rows
that do not fill a batch. On a GPU, some workers do rows only, and the others everything
else. One thread beyond the budget waits for the disk, flushing finished shards while the
workers go on.

When the run is stopped, no more utterances are taken; those that were are finished, and
begun shards are committed."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial
from itertools import count
from time import perf_counter

from featcache.audio.remote import StoppedError
from featcache.engines.delivery import Batch, Delivery, OpenShard
from featcache.engines.isolated import IsolatedProcess
from featcache.errors import AudioError
from featcache.extraction.downloads import Downloads
from featcache.extraction.features import WorkerTimes
from featcache.extraction.from_audio import batches
from featcache.extraction.jobs import BatchExtractor, JobGroup, RunControl, batch_extractor
from featcache.extraction.padded_rows import PendingRows, Row, RowQueue, compute_rows
from featcache.extraction.tasks import ShardTask
from featcache.spec import seconds_that_fill
from featcache.version.in_flight import InFlight

_AHEAD_PER_WORKER = 4
"""Batches that may wait for one before them. Bounds memory if one takes much longer, or
if rows wait for others."""

_AHEAD_SECONDS = 4 * 3600.0
"""The most audio in those batches, if there are many workers: 1.4 GB at 24 kHz."""

_ROWS_AHEAD_SECONDS = 16 * 3600.0
"""The same, however many batches that is, where row workers wait for padded rows. Of what
they compute of LibriSpeech's lengths, 0.94 is wanted with 16 h, and 0.88 with 4; in
batches of 240 s, 0.92 and 0.76. The most is 0.95: padding."""

_ROWS_AHEAD_BYTES = 4 << 30
"""The most bytes, about, of features of those batches."""

_READ_AHEAD = 1024
"""Batches that are looked at for what is to be fetched: a container may be much longer."""

_FULL_SECONDS = 1800.0
"""Audio in full batches of rows, at which nothing more is decoded: more would only take
memory."""

_POLL_SECONDS = 0.2


def run_locally(group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
    """Do shard tasks for a group of versions; returns when all are committed or the run
    was stopped.

    Marks in the runs' folders say what is in flight. What may have crashed an earlier run
    has a process of its own.

    Raises:
        StoreError: The cache cannot be written. What was committed stays.
        ExtractorError: The extractor broke its contract.
    """
    workers = _Workers(group, tasks, control)
    with workers.in_flight, closing(workers.isolated), workers.downloads:
        try:
            workers.run()
        except Exception as error:
            if group.device.is_lost():
                workers.in_flight.keep(f"{group.device.label}: {error}")
            raise


_Work = Callable[[int, WorkerTimes], None]
"""What a worker thread does next, of its number and the times that it is to add to."""


class _Workers:
    """The worker threads of one group, and what they share."""

    def __init__(self, group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
        self.in_flight = InFlight(
            [(job.version, job.run.id) for job in group.jobs], group.device.workers
        )
        self.isolated = IsolatedProcess(group, control.stop)
        self.downloads = Downloads(group.root, group.device.workers, control.give_up, control.stop)
        self._group, self._device = group, group.device
        self._control, self._progress, self._stop = control, control.progress, control.stop
        self._extract_batch = batch_extractor(
            group.root,
            group.configs,
            group.source,
            self.downloads.take,
            self.downloads.wait_for_copy,
        )
        cut = self._cut(tasks)
        # One worker at a time takes from it.
        self._batches = _read_ahead(cut, self.downloads) if group.source is None else cut
        row_jobs = [job for job in group.jobs if group.source is None and job.built.takes_rows]
        self._row_workers = group.device.row_workers if row_jobs else 0
        self._most_ahead: float = _AHEAD_PER_WORKER * group.device.workers
        self._ahead_seconds = _AHEAD_SECONDS
        if self._row_workers and all(job.batching.batching == "padded" for job in row_jobs):
            bytes_per_second = sum(config.spec.expected_bytes(1.0) for config in group.configs)
            self._ahead_seconds = min(
                _ROWS_AHEAD_SECONDS, seconds_that_fill(_ROWS_AHEAD_BYTES, bytes_per_second)
            )
            self._most_ahead = math.inf
        # Guards what follows, and `Progress`.
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._queue = RowQueue(group.device.torch_device)
        self._batch_of: dict[PendingRows, Batch] = {}
        self._is_taking = False
        self._is_exhausted = False  # no more utterances are taken
        self._decoding = self._computing = 0
        self._delivery = Delivery(control, self._state, self._fail)

    def run(self) -> None:
        """Do the tasks; returns when all are committed, or when what had been taken at
        the stop is."""
        # Nothing is committed once this has ended, even if a second interrupt ends the
        # wait for the workers.
        with (
            closing(self._delivery),
            ThreadPoolExecutor(self._device.workers, "featcache") as threads,
        ):
            try:
                workers = [
                    threads.submit(self._work, number) for number in range(self._device.workers)
                ]
                # without end, it would not see a signal just before it
                while wait(workers, _POLL_SECONDS).not_done:
                    pass
            except BaseException as error:
                self._fail(error)
                raise
        # what waits for what cannot be fetched any more is not kept
        self._progress.waiting_seconds = 0.0
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            self._delivery.commit_part()

    def _work(self, number: int) -> None:
        try:
            while (work := self._next(number < self._row_workers)) is not None:
                work(number, times := WorkerTimes(float))
                del work  # and with it the rows
                with self._state:
                    self._progress.add_times(times)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that called run
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._error is None:
                self._error = error
            self._state.notify_all()
        self.downloads.closed.set()

    def _next(self, only_rows: bool) -> _Work | None:
        """The most urgent work; waits while there is none. None once there will be none,
        or something has failed.

        With row workers, these get rows only, and the others everything else."""
        started = perf_counter()
        may_compute, may_take = only_rows or not self._row_workers, not only_rows
        with self._state:
            try:
                while self._error is None:
                    self._is_exhausted = self._is_exhausted or self._stop.is_set()
                    if may_take and (batch := self._delivery.take()) is not None:
                        return lambda *_: self._delivery.append(batch)
                    if may_compute and (rows := self._rows_to_compute()) is not None:
                        self._computing += 1
                        return partial(self._compute, rows)
                    has_many_rows = (
                        self._row_workers > 0 and self._queue.full_seconds >= _FULL_SECONDS
                    )
                    is_enough = (
                        self._is_taking or self._is_exhausted or self._is_far_ahead or has_many_rows
                    )
                    if may_take and not is_enough:
                        self._is_taking = True
                        return self._take
                    # which may give rows
                    is_busy = self._is_taking or self._decoding or self._computing
                    if self._is_exhausted and not (is_busy or self._queue):
                        break
                    # not for ever: a signal sets `_stop`, and notifies nobody
                    self._state.wait(_POLL_SECONDS)
                return None
            finally:
                # a row worker that waits has been given nothing to do by those that
                # decode
                if not only_rows:
                    self._progress.stages["wait"] += perf_counter() - started

    @property
    def _is_far_ahead(self) -> bool:
        """Whether as many batches as may wait do so for the one that is to be appended
        next."""
        coming = self._delivery.coming
        if len(coming) < self._device.workers + 2:
            return False
        return (
            len(coming) >= self._most_ahead
            or sum(batch.seconds for batch in coming) >= self._ahead_seconds
        )

    def _rows_to_compute(self) -> list[Row] | None:
        """Rows that fill a batch; or fewer, if no others will join them, or if everything
        waits for them."""
        if self._computing >= self._device.slots:
            return None
        if (rows := self._queue.take_full()) is not None:
            self._state.notify_all()  # more may be decoded
            return rows
        if self._is_exhausted:
            return None if self._decoding else self._queue.take_oldest()
        return (
            self._queue.take_oldest(self._delivery.coming[0].number) if self._is_far_ahead else None
        )

    def _take(self, worker: int, times: WorkerTimes) -> None:
        """Take a batch, decode it, extract what does not become rows, and put the rows
        into the queue."""
        batch = next(self._batches, None)
        with self._state:
            self._is_taking = False
            self._state.notify_all()
            if batch is None:
                self._is_exhausted = True
                return
            self._delivery.coming.append(batch)
            self._decoding += 1
        extract: BatchExtractor = self.isolated.extract if batch.is_suspect else self._extract_batch
        ids = (utterance.id for utterance in batch.utterances)
        parts = None
        with self.in_flight.working_on(worker, ids, batch.is_suspect), suppress(StoppedError):
            parts = list(extract(batch.utterances, times))
        with self._state:
            self._decoding -= 1
            # it was stopped: nothing that comes after this batch is appended
            if parts is None:
                return
            batch.parts = parts
            for pending in (
                result for part in parts for result in part if isinstance(result, PendingRows)
            ):
                batch.num_pending += 1
                self._batch_of[pending] = batch
                self._queue.add(batch.number, pending.take_rows())
            self._state.notify_all()

    def _compute(self, rows: list[Row], worker: int, times: WorkerTimes) -> None:
        """Compute rows of one length."""
        started = perf_counter()
        with self.in_flight.working_on(worker, (row.id for row in rows)):
            results = compute_rows(rows, self._device)
        seconds = perf_counter() - started
        times["extract"] += seconds
        with self._state:
            self._computing -= 1
            for row, result in zip(rows, results, strict=True):
                batch = self._batch_of[row.pending]
                # the others of its batch may have to wait for long
                if not isinstance(result, AudioError):
                    waiting = row.seconds / len(self._group.jobs)
                    batch.waiting_seconds += waiting
                    self._progress.waiting_seconds += waiting
                row.pending.finish(row, result, seconds / len(rows))
                if row.pending.is_complete:
                    del self._batch_of[row.pending]
                    batch.num_pending -= 1
            self._state.notify_all()
        self._delivery.tell()

    def _cut(self, tasks: Iterator[ShardTask]) -> Iterator[Batch]:
        """Open the shards that tasks make, and cut the tasks into batches. Each suspect
        is a batch of its own."""
        suspects, numbers = self._group.suspects.ids, count()
        for task in tasks:
            shard = OpenShard(task, self._group.jobs, self._control.leaves_unread)
            for cut in batches(task.utterances, task.seconds, self._device.batch_seconds, suspects):
                utterances, seconds = task.utterances[cut], sum(task.seconds[cut])
                is_last, is_suspect = cut.stop == len(task.utterances), utterances[0].id in suspects
                yield Batch(next(numbers), shard, utterances, seconds, is_last, is_suspect)


def _read_ahead(batches: Iterator[Batch], downloads: Downloads) -> Iterator[Batch]:
    """The same batches; the files of those that follow are being fetched."""
    ahead: deque[Batch] = deque()
    for batch in batches:
        # The process of suspects fetches them itself.
        has_files = not batch.is_suspect and downloads.expect(batch.utterances)
        ahead.append(batch)
        # After a batch of which nothing is fetched, none is taken before it is wanted.
        while ahead and not (has_files and downloads.is_room and len(ahead) < _READ_AHEAD):
            yield ahead.popleft()
    yield from ahead
