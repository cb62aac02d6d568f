"""Runs shard tasks in this process, by a few worker threads.

Each worker takes the most urgent work: it appends the next complete batch in order
(`delivery.py`); otherwise computes rows that fill a batch; otherwise decodes a batch of
utterances and, unless it becomes rows, extracts it; and at the end computes rows that do
not fill a batch. On a GPU, some workers do rows only, and the others everything else.

When the run is stopped, workers take no more utterances. They finish the utterances that
they have, and commit begun shards."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, suppress
from functools import partial
from itertools import chain, count
from time import perf_counter

from featcache.audio.remote import StoppedError
from featcache.engines.delivery import Batch, Delivery, OpenShard
from featcache.engines.isolated import IsolatedProcess
from featcache.errors import ExtractorError, StoreError
from featcache.extraction.downloads import Downloads
from featcache.extraction.features import Extracted, WorkerTimes
from featcache.extraction.from_audio import batches
from featcache.extraction.jobs import (
    BatchExtractor,
    JobGroup,
    Progress,
    RunControl,
    batch_extractor,
)
from featcache.extraction.padded_rows import Row, RowQueue, compute_rows
from featcache.extraction.tasks import ShardTask, seconds_that_fill
from featcache.version.in_flight import InFlight

_AHEAD_PER_WORKER = 4
"""Batches that may wait for an earlier one. Bounds memory."""

_AHEAD_SECONDS = 4 * 3600.0
"""The most audio in those batches: 1.4 GB at 24 kHz."""

_ROWS_AHEAD_SECONDS = 16 * 3600.0
"""The most audio in those batches if row workers wait for padded rows. For LibriSpeech's
lengths, 0.94 of the computed samples are audio with 16 h, and 0.88 with 4. The most is
0.95: padding."""

_ROWS_AHEAD_BYTES = 4 << 30

_READ_AHEAD = 1024

_FULL_SECONDS = 1800.0
"""Seconds in full batches of rows, at which decoding pauses to save memory."""

_POLL_SECONDS = 0.2


def run_locally(group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
    """Do shard tasks for a group of versions, as an `Engine`. Raises StoreError if the
    cache cannot be written; ExtractorError if the extractor broke its contract."""
    workers = _Workers(group, tasks, control)
    with workers.in_flight, closing(workers.isolated), workers.downloads:
        try:
            workers.run()
        except Exception as error:
            if group.device.is_lost():
                workers.in_flight.keep(f"{group.device.label}: {error}")
            raise


_Work = Callable[[int, WorkerTimes], None]
"""Work of a worker thread, by its number; adds to the times."""


class _Workers:
    def __init__(self, group: JobGroup, tasks: Iterator[ShardTask], control: RunControl) -> None:
        self.in_flight = InFlight(
            [(job.version, job.run.id) for job in group.jobs], group.device.workers
        )
        self.isolated = IsolatedProcess(group, control.stop)
        self.downloads = Downloads(group.root, group.device.workers, control.give_up, control.stop)
        self._group, self._device = group, group.device
        self._control, self._stop = control, control.stop
        self._folder = os.stat(".")
        self._extract_batch = batch_extractor(
            group.root,
            group.configs,
            group.source,
            self.downloads.take,
            self.downloads.wait_for_copy,
        )
        # One worker at a time takes from it.
        self._batches = self._cut(tasks)
        if group.source is None:
            self._batches = _read_ahead(self._batches, self.downloads)
        row_jobs = [job for job in group.jobs if job.built.extractor.takes_rows]
        self._row_workers = 0
        if row_jobs and group.source is None:
            self._row_workers = group.device.row_workers
        self._most_ahead: float = _AHEAD_PER_WORKER * group.device.workers
        self._ahead_seconds = _AHEAD_SECONDS
        if self._row_workers and all(job.batching.batching == "padded" for job in row_jobs):
            bytes_per_second = sum(job.built.info.spec.expected_bytes(1.0) for job in group.jobs)
            self._ahead_seconds = min(
                _ROWS_AHEAD_SECONDS, seconds_that_fill(_ROWS_AHEAD_BYTES, bytes_per_second)
            )
            self._most_ahead = math.inf
        # Guards what follows.
        self._state = threading.Condition()
        self._error: BaseException | None = None
        self._queue = RowQueue()
        self._is_taking = False
        self._is_exhausted = False  # no more utterances are taken
        self._decoding = self._computing = 0
        self._delivery = Delivery(control, self._state, self._fail)

    def run(self) -> None:
        # Nothing is committed after this, even if a second interrupt ends the wait.
        with (
            closing(self._delivery),
            ThreadPoolExecutor(self._device.workers, "featcache") as threads,
        ):
            try:
                workers = [
                    threads.submit(self._work, number) for number in range(self._device.workers)
                ]
                # An endless wait would not see a signal just before it.
                while wait(workers, _POLL_SECONDS).not_done:
                    pass
            except BaseException as error:
                self._fail(error)
                raise
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            self._delivery.commit_part()

    def _work(self, number: int) -> None:
        only_rows = number < self._row_workers
        try:
            while True:
                times, started = WorkerTimes(float), perf_counter()
                work = self._next(only_rows)
                # Row workers wait for the decoding workers, which are the bottleneck then.
                if not only_rows:
                    times["wait"] = perf_counter() - started
                if work is not None:
                    work(number, times)
                    self._refuse_another_folder()
                self._control.add(Progress(stages=times))
                if work is None:
                    break
                del work  # it holds the rows
        except BaseException as error:  # noqa: BLE001 - `run` raises it again
            self._fail(error)

    def _refuse_another_folder(self) -> None:
        if not os.path.samestat(os.stat("."), self._folder):
            raise ExtractorError(
                "an extractor has changed the current folder, and relative paths lead elsewhere: "
                "let it change the folder back, as contextlib.chdir does"
            )

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, StoreError):  # a shard that was written elsewhere, perhaps
            try:
                self._refuse_another_folder()
            except ExtractorError as moved:
                error = moved
        with self._state:
            if self._error is None:
                self._error = error
            self._state.notify_all()
        self.downloads.closed.set()

    def _next(self, only_rows: bool) -> _Work | None:
        """Wait for the most urgent work. Returns None at the end, or after an error."""
        with self._state:
            while self._error is None:
                self._is_exhausted = self._is_exhausted or self._stop.is_set()
                work = self._work_now(only_rows)
                if work is not None:
                    return work
                # Busy workers may still give rows.
                is_busy = self._is_taking or self._decoding or self._computing
                if self._is_exhausted and not (is_busy or self._queue):
                    break
                # Not for ever: a signal sets `_stop` without a notification.
                self._state.wait(_POLL_SECONDS)
        return None

    def _work_now(self, only_rows: bool) -> _Work | None:
        if not only_rows:
            batch = self._delivery.take()
            if batch is not None:
                return lambda *_: self._delivery.append(batch)
        if only_rows or not self._row_workers:
            rows = self._rows_to_compute()
            if rows is not None:
                self._computing += 1
                return partial(self._compute, rows)
        if only_rows or self._is_taking or self._is_exhausted or self._is_far_ahead:
            return None
        if self._row_workers and self._queue.full_seconds >= _FULL_SECONDS:
            return None
        self._is_taking = True
        return self._take

    @property
    def _is_far_ahead(self) -> bool:
        coming = self._delivery.coming
        if len(coming) < self._device.workers + 2:
            return False
        if len(coming) >= self._most_ahead:
            return True
        return sum(batch.seconds for batch in coming) >= self._ahead_seconds

    def _rows_to_compute(self) -> list[Row] | None:
        """Take rows that fill a batch; or fewer, if no others will join them, or everything
        waits for them."""
        if self._computing >= self._device.slots:
            return None
        rows = self._queue.take_full()
        if rows is not None:
            self._state.notify_all()  # more may be decoded
            return rows
        if self._is_exhausted:
            return None if self._decoding else self._queue.take_oldest()
        if self._is_far_ahead:
            return self._queue.take_oldest(self._delivery.coming[0].number)
        return None

    def _take(self, worker: int, times: WorkerTimes) -> None:
        """Take a batch, decode it, extract what does not become rows, and queue the
        rows."""
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
            if parts is None:  # stopped: nothing after this batch is appended
                return
            batch.parts = parts
            for result in chain.from_iterable(parts):
                self._queue.add(batch.number, result.take_rows())
                if isinstance(result, Extracted):
                    times["extract"] += result.seconds
            self._state.notify_all()

    def _compute(self, rows: list[Row], worker: int, times: WorkerTimes) -> None:
        started = perf_counter()
        with self.in_flight.working_on(worker, (row.id for row in rows)):
            results = compute_rows(rows)
        seconds = perf_counter() - started
        times["extract"] += seconds
        with self._state:
            self._computing -= 1
            for row, of_versions in zip(rows, results, strict=True):
                row.pending.finish(row, of_versions, seconds / len(rows))
            self._state.notify_all()
        self._delivery.report()

    def _cut(self, tasks: Iterator[ShardTask]) -> Iterator[Batch]:
        """Cut the tasks into batches. Each suspect is a batch of its own."""
        suspects, numbers = self._group.suspects.ids, count()
        batch_seconds = self._group.batch_seconds
        for task in tasks:
            shard = OpenShard(task, self._group.jobs, self._control.leaves_unread)
            for cut in batches(task.utterances, task.seconds, batch_seconds, suspects):
                utterances = task.utterances[cut]
                yield Batch(
                    number=next(numbers),
                    shard=shard,
                    utterances=utterances,
                    seconds=sum(task.seconds[cut]),
                    is_last=cut.stop == len(task.utterances),
                    is_suspect=utterances[0].id in suspects,
                )


def _read_ahead(batches: Iterator[Batch], downloads: Downloads) -> Iterator[Batch]:
    """Yield the batches, while the files of later ones are fetched."""
    ahead: deque[Batch] = deque()
    for batch in batches:
        # The process of suspects fetches its files itself.
        has_files = not batch.is_suspect and downloads.expect(batch.utterances)
        ahead.append(batch)
        # A batch without files to fetch is not read ahead.
        while ahead and not (has_files and downloads.is_room and len(ahead) < _READ_AHEAD):
            yield ahead.popleft()
    yield from ahead
