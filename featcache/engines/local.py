"""Runs shard tasks in this process: a few worker threads, results in order, commits beside them.

Each worker takes the next batch and does all of it: decode, resample, extract. Whoever finishes a batch
appends whatever is next in order to the shard, so there is no writer to hand over to, and no thread beyond
the budget: one more only waits for the disk, flushing finished shards while the workers go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from featcache.device import Device
from featcache.errors import StoreError
from featcache.manifest import Utterance
from featcache.memory import AudioMemory
from featcache.pipeline import Extracted, Spent, Target, batches, process
from featcache.plan import ShardTask
from featcache.store.claims import Claim
from featcache.store.runs import Failure, Run
from featcache.store.shard import ShardWriter
from featcache.store.version import Version

_WINDOW_PER_WORKER = 4
"""Batches that may wait, extracted, for one before them: bounds memory where one takes much longer."""

_PENDING_COMMITS = 2
"""Shards that may wait for the disk before the workers do."""

_POLL_SECONDS = 0.2

STAGES = ("decode", "resample", "extract", "write", "wait")
"""`extract` includes waiting for a GPU; `wait` is for the disk, or for a batch that comes first."""


@dataclass
class Counted:
    """What a run has added to one version: utterances extracted, utterances that failed, bytes of features."""

    extracted: int = 0
    failed: int = 0
    num_bytes: int = 0


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
        self.writers = [
            ShardWriter(
                target.version.work_folder(task.name),
                target.version.info.spec.item_shape,
                target.version.dtype,
            )
            for target in targets
        ]

    def abandon(self) -> None:
        for writer in self.writers:
            writer.discard()
        for claim in self.claims:
            claim.release()


@dataclass(frozen=True)
class _Batch:
    number: int
    shard: _Shard
    utterances: Sequence[Utterance]
    is_last: bool


class LocalEngine:
    """Does shard tasks for some targets, on one device.

    Args:
        targets: the versions to fill; every task is for all of them.
        runs: each target's run, whose ledger takes the failures.
        root: what the manifest's relative paths are relative to.
        device: to extract on.
        made_by: recorded with every shard.
        progress: added to.
        report: called with it, from worker threads, one at a time.
        stop: once it is set, whole shards are still committed, and no others begun.
        planned: names of the shards that each target had when the tasks were planned: later ones are others'.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        runs: Sequence[Run],
        root: Path,
        device: Device,
        made_by: dict[str, Any],
        progress: Progress,
        report: Callable[[Progress], None],
        stop: threading.Event,
        planned: Sequence[Iterable[str]],
    ) -> None:
        self._progress = progress
        self._targets = targets
        self._runs = runs
        self._root = root
        self._device = device
        self._made_by = made_by
        self._report = report
        self._stop = stop
        self._memory = AudioMemory()
        self._others = [_Others(target.version, known) for target, known in zip(targets, planned, strict=True)]
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._open: set[_Shard] = set()
        self._taking = threading.Lock()
        self._state = threading.Condition()  # guards the following, and progress and stages
        self._written = 0
        self._finished: dict[int, tuple[_Batch, list[list[Extracted]]]] = {}
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
            while (batch := self._take()) is not None:
                parts = list(process(batch.utterances, self._root, self._targets, self._device, self._memory, spent))
                self._deliver(batch, parts)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that called run
            self._fail(error)
        with self._state:
            stages = self._progress.stages
            stages["decode"] += spent.decode
            stages["resample"] += spent.waveform
            stages["extract"] += spent.extract
            self._progress.resampled += spent.resampled

    def _fail(self, error: BaseException) -> None:
        with self._state:
            if self._error is None:
                self._error = error
            self._failed.set()
            self._state.notify_all()

    # Taking: batches are cut from tasks as they are wanted, by one worker at a time.

    def _take(self) -> _Batch | None:
        with self._taking:
            if self._stop.is_set() or self._failed.is_set():
                return None
            batch = next(self._batches, None)
        if batch is not None:
            started = perf_counter()
            window = _WINDOW_PER_WORKER * self._device.workers
            with self._state:
                self._state.wait_for(lambda: self._failed.is_set() or batch.number < self._written + window)
                self._progress.stages["wait"] += perf_counter() - started
            if self._failed.is_set():
                return None
        return batch

    def _cut(self, tasks: Iterator[ShardTask]) -> Iterator[_Batch]:
        number = 0
        for shard in self._claimed(tasks):
            self._open.add(shard)
            cut = list(batches(shard.task.utterances, shard.task.seconds, self._device.batch_seconds))
            for utterances in cut:
                yield _Batch(number, shard, utterances, utterances is cut[-1])
                number += 1

    def _claimed(self, tasks: Iterator[ShardTask]) -> Iterator[_Shard]:
        """Tasks that are ours to do: those that another run is doing come last, for it may not finish them."""
        deferred = []
        for task in tasks:
            if (claims := self._claim(task)) is None:
                deferred.append(task)
            elif shard := self._begin(task, claims):
                yield shard
        for task in deferred:
            while (claims := self._claim(task)) is None:
                if self._stop.wait(_POLL_SECONDS) or self._failed.is_set():
                    return
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

    # Delivering: in the batches' order, by whoever has just finished one.

    def _deliver(self, batch: _Batch, parts: list[list[Extracted]]) -> None:
        with self._state:
            self._finished[batch.number] = batch, parts
        while True:
            with self._state:
                if self._failed.is_set() or self._appending or self._written not in self._finished:
                    return
                self._appending = True
                batch, parts = self._finished.pop(self._written)
            started = perf_counter()
            try:
                self._append(batch, parts)
            except BaseException as error:
                self._fail(error)  # before another worker's turn: nothing may follow what is half written
                raise
            with self._state:
                self._appending = False
                self._written += 1
                self._progress.stages["write"] += perf_counter() - started
                self._state.notify_all()

    def _append(self, batch: _Batch, parts: list[list[Extracted]]) -> None:
        for part in parts:
            for number, extracted in enumerate(part):
                writer, version = batch.shard.writers[number], self._targets[number].version
                try:
                    writer.append(extracted.items, extracted.features, extracted.num_frames)
                except OSError as error:
                    raise _cannot_write(version, error) from error
                batch.shard.failures[number] += extracted.failures
                self._count(extracted, number)
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
        if number == 0:
            progress.audio_seconds += sum(item.num_samples for item in extracted.items) / config.audio.sample_rate

    def _uncount(self, shard: _Shard) -> None:
        """Take back what was counted of a shard that never became whole."""
        for target, writer, failures in zip(self._targets, shard.writers, shard.failures, strict=True):
            counted = self._progress.versions.get(target.config.name, Counted())
            counted.extracted -= writer.items
            counted.failed -= len(failures)
            counted.num_bytes -= writer.num_bytes
            for failure in failures:
                self._progress.failures[failure.reason] -= 1
        self._progress.audio_seconds -= shard.writers[0].num_samples / self._targets[0].config.audio.sample_rate

    # Committing: in a thread of its own, which mostly waits for the disk.

    def _commit(self, shard: _Shard) -> None:
        for target, run, writer, failures, others in zip(
            self._targets, self._runs, shard.writers, shard.failures, self._others, strict=True
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
                    made_by={**self._made_by, "run": run.id},
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
