"""Has workers do tasks: deals out chunks, counts what was done, and goes on when a worker
dies.

A chunk has up to 16 hours of audio, and less near the end, so that all workers end at
about the same time. If a worker dies, what it has not committed of its chunk goes to
another. After three deaths a chunk is split into single tasks.

What is known of a death is used as by the run after a crash: the dead worker's marks say
what was in flight, and what may have ended it is extracted in a process of its own from
then on. If a task goes on to end workers and no mark says why, all its utterances are
suspects."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from featcache.engines.process import Setup
from featcache.engines.worker import (
    Died,
    Event,
    Finished,
    Message,
    Ready,
    Stop,
    Work,
    WorkerSetup,
    Working,
)
from featcache.errors import ConfigError, ExtractorError, counted, listing
from featcache.extraction.audio_files import can_be_read
from featcache.extraction.jobs import DoneTask, JobGroup, Progress, RunControl
from featcache.extraction.options import Options
from featcache.extraction.tasks import ShardTask
from featcache.version.in_flight import Suspects, find_suspects, remove_marks
from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures

MOST_TASKS = 64
"""The most tasks in a chunk: few enough that all workers end together."""

CHUNK_SECONDS = 16 * 3600.0
"""About how much audio is in a chunk: enough to fill a GPU's batches, which are not
filled from the next one. Of LibriSpeech's lengths, a tenth of what it computes for 16 h
only fills them up."""

MOST_DEATHS = 3
"""The deaths after which a chunk is split into single tasks, and the further ones that
one of these may cause."""

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0
"""How long to wait for the first worker before saying so."""

_TRIES = 2 * MOST_DEATHS
"""The deaths after which a single task is given up."""

_MOST_DEATHS = _TRIES + 1
"""How often a worker may die without having committed anything in between."""

_ENOUGH_UNREAD = 100
"""Utterances that workers cannot read and this process can, after which it does not look
at others: the run is to be repeated anyway, and workers would have to wait for the one
process that reads what they all cannot."""

_ASKED = ("manifest", "root", "config", "from")
"""What workers' records repeat of the record of their run."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Tasks that one worker does."""

    tasks: tuple[ShardTask, ...]
    deaths: int = 0
    """How many workers have died of it."""
    died_with: int | None = None
    """The number of the worker that died last; None if none has."""


class Chunks:
    """Deals tasks, taken as they are wanted, to so many workers; each is done once."""

    def __init__(self, tasks: Iterator[ShardTask], workers: int) -> None:
        self.held: dict[int, Chunk] = {}
        """What workers are at, by their numbers."""
        self._tasks = tasks
        self._workers = workers
        self._ahead: deque[ShardTask] = deque()
        self._returned: list[Chunk] = []

    @property
    def are_done(self) -> bool:
        """Whether nothing is left: every task is done."""
        self._look_ahead()
        return not (self._ahead or self._returned or self.held)

    def take(self, worker: int, is_alone: bool = False) -> Chunk | None:
        """The next chunk for a worker; None if there is nothing for it now.

        A worker is not given again what it died of, unless it `is_alone`: others are
        lost, or may never begin. It may be the worker's own device that is at fault. What
        cannot be extracted even apart comes last."""
        self._look_ahead()
        chunks = [chunk for chunk in self._returned if is_alone or chunk.died_with != worker]
        chunk = min(chunks, key=lambda chunk: chunk.deaths >= _TRIES, default=None)
        if chunk is not None and (chunk.deaths < _TRIES or not self._ahead):
            self._returned.remove(chunk)
        else:
            if not self._ahead:
                return None
            most = min(MOST_TASKS, len(self._ahead) // (2 * self._workers))
            tasks = [self._ahead.popleft()]
            seconds = sum(tasks[0].seconds)
            while len(tasks) < most and seconds < CHUNK_SECONDS:
                tasks.append(self._ahead.popleft())
                seconds += sum(tasks[-1].seconds)
            chunk = Chunk(tuple(tasks))
        self.held[worker] = chunk
        return chunk

    def done(self, worker: int) -> None:
        """A worker has done its chunk."""
        del self.held[worker]

    def died(self, worker: int, done: Set[str], counts: bool = True) -> None:
        """Take back the chunk of a worker that has died, but for the tasks that it has
        `done` of it, by their names.

        The death `counts` if the chunk may be the cause: not that of a worker that was
        preempted."""
        chunk = self.held.pop(worker, Chunk(()))
        left = tuple(task for task in chunk.tasks if task.name not in done)
        deaths, died_with = chunk.deaths + counts, worker if counts else chunk.died_with
        parts = [left] if deaths < MOST_DEATHS else [(task,) for task in left]
        self._returned += [Chunk(part, deaths, died_with) for part in parts if part]

    def _look_ahead(self) -> None:
        """Have as many tasks at hand as tell whether the end is near."""
        wanted = 2 * self._workers * MOST_TASKS - len(self._ahead)
        self._ahead.extend(itertools.islice(self._tasks, wanted))


class Team(Protocol):
    """Workers, by their numbers, and how to talk to them."""

    names: Sequence[str]
    """What people call each worker."""

    def start(self, worker: int, setup: WorkerSetup) -> None:
        """Start a worker, also again after it has died; `setup` is that of all workers."""

    def send(self, worker: int, message: Message) -> None:
        """Tell a worker something; nothing happens if it has died."""

    def wait(self, seconds: float) -> Sequence[tuple[int, Event]]:
        """What workers have said; waits for that for at most so long."""

    def end(self) -> None:
        """End all workers; they commit what they have, and whoever does not end soon is
        killed."""


@dataclass
class _Worker:
    """What is known of a worker."""

    runs: Sequence[str] = ()
    """Its runs, one in each version; none before it is ready."""
    is_lost: bool = False
    """Whether it is not started again."""
    deaths: int = 0
    """How often it has died since it last committed something."""
    latest: Progress | None = None
    """What it last said of all that it has done."""
    committed: Progress = field(default_factory=Progress)
    """What it has committed of that."""
    done: set[str] = field(default_factory=set)
    """The names of the tasks that it has committed."""


class Dispatch:
    """Has a team do shard tasks. `options` are those that the run is planned with."""

    def __init__(
        self,
        group: JobGroup,
        tasks: Iterator[ShardTask],
        control: RunControl,
        team: Team,
        options: Options,
    ) -> None:
        self._group, self._control, self._team = group, control, team
        paths = [job.version.path.absolute() for job in group.jobs]
        asked = [
            {key: job.run.asked[key] for key in _ASKED} | {"part_of": job.run.id}
            for job in group.jobs
        ]
        self._setup = WorkerSetup(Setup.of(group), list(zip(paths, asked, strict=True)), options)
        self._workers = [_Worker() for _ in team.names]
        self._chunks = Chunks(tasks, len(self._workers))
        self._suspects = group.suspects
        self._dead: set[str] = set()  # runs of workers
        # what is done, whatever becomes of the workers
        self._lasting = deepcopy(control.progress)
        # the ids of what workers could not read, though this machine can
        self._unread: set[str] = set()
        self._first_unread = ""  # one of them, and why
        self._said: dict[str, int] = {}  # which worker was the first to say it
        # the first worker that was ready, and its device
        self._first: tuple[str, str] | None = None
        self._next_report = 0.0
        self._is_late_at = monotonic() + _PATIENCE_SECONDS

    def run(self) -> None:
        """Start the team, and end it; returns when all tasks are committed, or the run
        was stopped.

        Raises:
            ConfigError: The workers' devices are of different models, or a worker finds
                another fingerprint.
            ExtractorError: The extractor broke its contract, or every worker has died
                again and again.
            StoreError: The cache cannot be written. What was committed stays.
        """
        try:
            for number in range(len(self._workers)):
                self._team.start(number, self._setup)
            while not self._is_over():
                self._deal()
                self._listen()
            self._end()
            self._report()
        finally:
            self._team.end()
        if self._unread:
            what = (
                f"workers could not read {counted(len(self._unread), 'utterance')}, such as "
                f"{self._first_unread}"
            )
            raise ExtractorError(
                f"{what}; this machine can: let all see the audio, and run the same command again"
            )

    def _end(self) -> None:
        """Stop who is at work, if the run was stopped, and have those who got nothing
        record that; wait for all."""
        idle = [
            number
            for number, worker in enumerate(self._workers)
            if worker.runs and worker.latest is None
        ]
        idle = [number for number in idle if number not in self._chunks.held]
        if self._control.stop.is_set():
            for number in (*self._chunks.held, *idle):
                self._team.send(number, Stop())
        for number in idle:
            self._chunks.held[number] = Chunk(())
            self._team.send(number, Work((), Suspects()))
        while self._chunks.held:
            self._listen()

    def _is_over(self) -> bool:
        """Whether nothing more is dealt out."""
        return self._control.stop.is_set() or self._chunks.are_done

    def _listen(self) -> None:
        """Take what workers say, and tell how far they are."""
        for number, event in self._team.wait(_POLL_SECONDS):
            self._handle(number, event)
        if monotonic() >= self._next_report:
            self._report()

    def _deal(self) -> None:
        """Give chunks to the workers that have none."""
        ready = [number for number, worker in enumerate(self._workers) if worker.runs]
        for number in ready:
            if (
                number not in self._chunks.held
                and (chunk := self._chunks.take(number, len(ready) == 1)) is not None
            ):
                self._team.send(
                    number, Work(chunk.tasks, self._suspects | self._suspects_in(chunk))
                )
        if self._first is None and monotonic() > self._is_late_at:
            self._is_late_at = float("inf")
            _log.info(
                "still waiting for the first of %s to start", counted(len(self._workers), "worker")
            )

    def _handle(self, number: int, event: Event) -> None:
        worker = self._workers[number]
        match event:
            case str():
                if self._said.setdefault(event, number) == number:  # others say the same
                    _log.info(event)
            case Ready(device, threads, runs):
                worker.runs = runs
                self._welcome(self._team.names[number], device, threads)
            case DoneTask():
                self._settle_unread(event)
                worker.committed.add(event.progress)
                worker.done.add(event.name)
                worker.deaths = 0
            case Working():
                worker.latest = event.progress
                if isinstance(event, Finished):
                    if event.progress.too_many_failures:
                        self._control.give_up(
                            event.progress.too_many_failures, event.progress.traceback
                        )
                    self._chunks.done(number)
            case Exception():
                raise event
            case Died(how, counts_as_death):
                self._bring_back(number, how, counts_as_death)

    def _welcome(self, name: str, device: str, threads: int) -> None:
        """Refuse a device of another model than the first one's, and count the others."""
        progress = self._control.progress
        if self._first is None:
            self._first = name, device
        if device != self._first[1] and not self._setup.options.allow_mixed_devices:
            what = (
                f"{name} is {device}, and {self._first[0]} is {self._first[1]}, which "
                "rounds differently"
            )
            raise ConfigError(
                f"{what}: choose devices of one model, or accept that with --allow-mixed-devices"
            )
        if device not in progress.devices:
            progress.devices.append(device)
        ready = sum(bool(worker.runs) for worker in self._workers)
        if ready > progress.processes:
            progress.processes, progress.threads = ready, progress.threads + threads

    def _bring_back(self, number: int, how: str, counts: bool) -> None:
        """Take back what a dead worker had, and start it again."""
        dead, name = self._workers[number], self._team.names[number]
        again = self._workers[number] = _Worker(deaths=dead.deaths + counts)
        self._lasting.add(dead.committed)
        if dead.runs:
            self._learn(dead.runs, counts)
        self._chunks.died(number, dead.done, counts)
        when, most = (
            ("at work", _MOST_DEATHS) if dead.runs else ("before it was ready", MOST_DEATHS)
        )
        again.is_lost = again.deaths >= most or self._control.stop.is_set()
        what = (
            "is not started again"
            if again.is_lost
            else "is started again, and what it had is given back"
        )
        _log.info("%s: the process ended %s (%s); it %s", name, when, how, what)
        if not again.is_lost:
            self._team.start(number, self._setup)
        elif all(worker.is_lost for worker in self._workers) and not self._is_over():
            raise ExtractorError(
                f"{listing(self._team.names)}: processes ended again and again, the last by {how}"
            )

    def _learn(self, dead: Sequence[str], counts: bool) -> None:
        """Look at what was in flight in a worker that has died."""
        living = {run for worker in self._workers for run in worker.runs}
        self._dead.update(dead)
        for job, run in zip(self._group.jobs, dead, strict=True):
            if not counts:
                remove_marks(job.version.store.desk / run)
            failures = standing_failures(job.version, open_index(job.version, keep=False))
            self._suspects |= find_suspects(job.version, failures, living, self._dead)

    def _suspects_in(self, chunk: Chunk) -> Suspects:
        """All utterances of a task that goes on to end workers: to be extracted apart
        when it is tried for the last time, and if that is of no use, not any more. Where
        everything ends workers, no utterance is at fault."""
        if chunk.deaths < _TRIES - 1:
            return Suspects()
        ids = frozenset(utterance.id for task in chunk.tasks for utterance in task.utterances)
        done = self._done_so_far().versions
        is_over = chunk.deaths >= _TRIES and any(
            done[job.name].extracted for job in self._group.jobs
        )
        return Suspects(ids, ids if is_over else frozenset())

    def _settle_unread(self, done: DoneTask) -> None:
        """Record what a worker could not read as failed; but what this machine can read
        is still to be done."""
        for job, unread in zip(self._group.jobs, done.unread, strict=True):
            failed = []
            for failure in unread:
                if len(self._unread) >= _ENOUGH_UNREAD or can_be_read(
                    self._group.root, failure.path
                ):
                    self._unread.add(failure.id)
                    why = f"{failure.id} on {done.host}: {failure.path}: {failure.message}"
                    self._first_unread = self._first_unread or why
                else:
                    failed.append(failure)
            job.run.fail(failed)
            self._lasting.failures.update(failure.reason for failure in failed)
            self._lasting.versions[job.name].failed += len(failed)

    def _report(self) -> None:
        """Count what was done so far, and tell."""
        self._next_report = monotonic() + _POLL_SECONDS
        done, progress = self._done_so_far(), self._control.progress
        for name in (
            "failures",
            "audio_seconds",
            "waiting_seconds",
            "shards",
            "stages",
            "versions",
        ):
            setattr(progress, name, getattr(done, name))
        self._control.check()
        if self._first is not None:  # until then, there is nothing to tell
            self._control.report(progress)

    def _done_so_far(self) -> Progress:
        """What all workers have done, the dead ones only what they have committed."""
        done = deepcopy(self._lasting)
        for worker in self._workers:
            if worker.latest is not None:
                done.add(worker.latest)
        return done
