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
from typing import Any

from featcache.device import Device
from featcache.errors import StoreError
from featcache.manifest import Utterance
from featcache.pipeline import Extracted, Pending, Row, Spent, Target, batches, compute_rows
from featcache.plan import ShardTask
from featcache.store.claims import Claim
from featcache.store.runs import Failure, Run
from featcache.store.shard import ShardWriter
from featcache.store.version import Version
from featcache.window import Window

_WINDOW_PER_WORKER = 4
"""Batches that may wait for one before them: bounds memory where one takes much longer, or rows wait for others."""

_WINDOW_SECONDS = 4 * 3600.0
"""Audio in those batches, at most, if there are many workers: 1.4 GB at 24 kHz."""

_PENDING_COMMITS = 2
"""Shards that may wait for the disk before the workers do."""

_POLL_SECONDS = 0.2

_END = object()

STAGES = ("decode", "resample", "extract", "write", "wait")
"""`extract` includes waiting for a GPU; `wait` is for the disk, for a batch that comes first, or for a GPU while
nothing may be decoded."""

Produce = Callable[[Sequence[Utterance], Spent], Iterable[list[Extracted | Pending]]]
"""Makes features of a batch of utterances: for one part of it after the other, what each target gets."""

_Job = Callable[[Spent], None]


@dataclass
class Counted:
    """What a run has added to one version.

    Attributes:
        extracted: utterances.
        failed: utterances.
        num_bytes: of features.
        seconds: of worker threads that extracting them took; complete once the run has ended.
    """

    extracted: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass
class Progress:
    """What a run has done so far.

    Attributes:
        versions: what it has added to each, by the config's name.
        failures: utterances by reason, over all versions.
        audio_seconds: extracted; an utterance counts once, however many versions it is for.
        shards: committed.
        elsewhere: utterances that another run has done meanwhile.
        resampled: utterances whose file had another rate.
        stages: seconds of worker threads in each stage; complete once the run has ended.
    """

    versions: dict[str, Counted] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    audio_seconds: float = 0.0
    shards: int = 0
    elsewhere: int = 0
    resampled: int = 0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))


class _Shard:
    """A task under way: a writer for each target, filled batch by batch."""

    def __init__(self, task: ShardTask, claims: list[Claim], targets: Sequence[Target]) -> None:
        self.task = task
        self.claims = claims
        self.failures: list[list[Failure]] = [[] for _ in targets]
        self.audio_seconds = 0.0  # of utterances that any target has extracted
        self.writers = [
            ShardWriter(
                target.version.work_folder(task.name),
                target.version.info.spec.item_shape,
                target.version.dtype,
                target.version.info.spec.side,
            )
            for target in targets
        ]

    def abandon(self) -> None:
        for writer in self.writers:
            writer.discard()
        for claim in self.claims:
            claim.release()


@dataclass(eq=False)
class _Batch:
    """Utterances of a task, and what became of them.

    Attributes:
        parts: what each target got, part by part; rows may be missing.
        waiting: how many of these lack rows.
    """

    number: int
    shard: _Shard
    utterances: Sequence[Utterance]
    is_last: bool
    parts: list[list[Extracted | Pending]] = field(default_factory=list)
    waiting: int = 0


class LocalEngine:
    """Does shard tasks for some targets, on one device.

    Args:
        targets: the versions to fill; every task is for all of them.
        runs: each target's run, whose ledger takes the failures.
        produce: what makes a batch's features, or its rows: `pipeline.process`, say.
        device: to extract on.
        made_by: recorded with every shard of each target.
        progress: added to.
        report: called with it, from worker threads, one at a time.
        stop: once it is set, whole shards are still committed, and no others begun.
        planned: names of the shards that each target had when the tasks were planned: later ones are others'.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        runs: Sequence[Run],
        produce: Produce,
        device: Device,
        made_by: Sequence[dict[str, Any]],
        progress: Progress,
        report: Callable[[Progress], None],
        stop: threading.Event,
        planned: Sequence[Iterable[str]],
    ) -> None:
        self._progress = progress
        self._targets = targets
        self._runs = runs
        self._produce = produce
        self._device = device
        self._made_by = made_by
        self._report = report
        self._stop = stop
        self._others = [_Others(target.version, known) for target, known in zip(targets, planned, strict=True)]
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._open: set[_Shard] = set()
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
                self._uncount(shard)
                shard.abandon()
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
            stages = self._progress.stages
            stages["decode"] += spent.decode
            stages["resample"] += spent.waveform
            stages["extract"] += sum(spent.extract.values())
            self._progress.resampled += spent.resampled
            for name, seconds in spent.extract.items():
                self._progress.versions.setdefault(name, Counted()).seconds += seconds

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
        for shard in self._claimed(tasks):
            if shard is None:
                yield None
                continue
            self._open.add(shard)
            cut = list(batches(shard.task.utterances, shard.task.seconds, self._device.batch_seconds))
            for utterances in cut:
                yield _Batch(number, shard, utterances, utterances is cut[-1])
                number += 1

    def _claimed(self, tasks: Iterator[ShardTask]) -> Iterator[_Shard | None]:
        """Tasks that are ours to do: those that another run is doing come last, for it may not finish them.

        None, time and again, while it does them: what this run has begun must go on, for the other may wait for that.
        """
        deferred = []
        for task in tasks:
            if (claims := self._claim(task)) is None:
                deferred.append(task)
            elif shard := self._begin(task, claims):
                yield shard
        for task in deferred:
            while (claims := self._claim(task)) is None:
                yield None
            if shard := self._begin(task, claims):
                yield shard

    def _claim(self, task: ShardTask) -> list[Claim] | None:
        claims: list[Claim] = []
        for target in self._targets:
            claim = target.version.claim(task.name)
            try:
                is_ours = claim.take()
            except OSError as error:
                raise _cannot_write(target.version, error) from error
            if not is_ours:
                for taken in claims:
                    taken.release()
                return None
            claims.append(claim)
        return claims

    def _begin(self, task: ShardTask, claims: list[Claim]) -> _Shard | None:
        """Open writers for what of a claimed task no other run has done by now."""
        remaining = self._others[0].remaining(task)
        for others in self._others[1:]:
            remaining |= others.remaining(task)
        with self._state:
            self._progress.elsewhere += len(task.utterances) - len(remaining)
        if not remaining:
            for claim in claims:
                claim.release()
            return None
        if len(remaining) < len(task.utterances):
            task = task.only(remaining)
        try:
            return _Shard(task, claims, self._targets)
        except OSError as error:
            raise _cannot_write(self._targets[0].version, error) from error

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
            seconds: dict[str, float] = {}  # of each utterance, whichever target has extracted it
            for number, part in enumerate(batch.parts.pop(0)):
                extracted = part.extracted() if isinstance(part, Pending) else part
                writer, version = batch.shard.writers[number], self._targets[number].version
                try:
                    writer.append(
                        extracted.items,
                        extracted.features,
                        extracted.num_frames,
                        extracted.side,
                    )
                except OSError as error:
                    raise _cannot_write(version, error) from error
                batch.shard.failures[number] += extracted.failures
                self._count(extracted, number)
                rate = self._targets[number].config.audio.sample_rate
                seconds |= {item.id: item.num_samples / rate for item in extracted.items}
            batch.shard.audio_seconds += sum(seconds.values())
            self._progress.audio_seconds += sum(seconds.values())
        self._report(self._progress)
        if batch.is_last:
            self._commit_slots.acquire()
            self._commits.submit(self._commit, batch.shard).add_done_callback(self._committed)

    def _count(self, extracted: Extracted, number: int) -> None:
        config, progress = self._targets[number].config, self._progress
        counted = progress.versions.setdefault(config.name, Counted())
        counted.extracted += len(extracted.items)
        counted.failed += len(extracted.failures)
        counted.num_bytes += extracted.features.nbytes
        for failure in extracted.failures:
            progress.failures[failure.reason] = progress.failures.get(failure.reason, 0) + 1

    def _uncount(self, shard: _Shard) -> None:
        """Take back what was counted of a shard that never became whole."""
        for target, writer, failures in zip(self._targets, shard.writers, shard.failures, strict=True):
            counted = self._progress.versions.get(target.config.name, Counted())
            counted.extracted -= writer.items
            counted.failed -= len(failures)
            counted.num_bytes -= writer.num_bytes
            for failure in failures:
                self._progress.failures[failure.reason] -= 1
        self._progress.audio_seconds -= shard.audio_seconds

    # Committing: in a thread of its own, which mostly waits for the disk.

    def _commit(self, shard: _Shard) -> None:
        for target, run, writer, failures, others, made_by in zip(
            self._targets, self._runs, shard.writers, shard.failures, self._others, self._made_by, strict=True
        ):
            run.fail(failures)
            if not writer.items:
                writer.discard()
                continue
            try:
                name = writer.commit(
                    target.version.path / "shards",
                    sample_rate=target.config.audio.sample_rate,
                    row=shard.task.row,
                    supersedes=shard.task.supersedes(writer.ids),
                    made_by={**made_by, "run": run.id},
                )
            except OSError as error:
                raise _cannot_write(target.version, error) from error
            others.ours(name)
            self._progress.shards += 1
        for claim in shard.claims:
            claim.release()
        self._open.discard(shard)

    def _committed(self, future: Future[None]) -> None:
        self._commit_slots.release()
        if (error := future.exception()) is not None:
            self._fail(error)


class _Others:
    """What other runs have added to a version since this run was planned."""

    def __init__(self, version: Version, known: Iterable[str]) -> None:
        self._version = version
        self._known = set(known)
        self._done: dict[str, tuple[Any, ...]] = {}

    def ours(self, name: str) -> None:
        """A shard of our own needs no looking into."""
        self._known.add(name)

    def remaining(self, task: ShardTask) -> set[int]:
        """Numbers of the task's utterances that are still to do."""
        for name in self._version.shard_names():
            if name not in self._known:
                self._known.add(name)
                for item in self._version.shard(name).items():
                    self._done[item.id] = (item.path, item.start, item.duration, item.channel)
        return {
            number
            for number, row in enumerate(task.utterances)
            if self._done.get(row.id) != (row.path, row.start, row.duration, row.channel)
        }


def _cannot_write(version: Version, error: OSError) -> StoreError:
    return StoreError(
        f"{version.path}: cannot be written: {error.strerror}; the shards committed so far are good: "
        "make room or mend the disk, and run the same command again"
    )
