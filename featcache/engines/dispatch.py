"""Has workers do tasks: deals out chunks, counts what was done, and goes on when a worker
dies.

If a worker dies, the uncommitted tasks of its chunk go to another. Its marks
name the utterances in flight, and suspects are extracted in a separate process. If a task
goes on to end workers and no mark names the cause, all its utterances are suspects."""

from __future__ import annotations

import itertools
import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from featcache.engines.worker import Died, Event, Message, Ready, Stop, Work, WorkerSetup, Working
from featcache.errors import ConfigError, ExtractorError, counted, listing
from featcache.extraction.audio_files import can_be_read
from featcache.extraction.jobs import DoneTask, JobGroup, Progress, RunControl, VersionCounts
from featcache.extraction.options import Options
from featcache.extraction.tasks import ShardTask
from featcache.version.in_flight import Suspects, find_suspects, remove_marks
from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures

MOST_TASKS = 64
"""The most tasks in a chunk. Chunks become smaller near the end, so that all workers end
together."""

CHUNK_SECONDS = 16 * 3600.0
"""Seconds of audio in a chunk, about: enough to fill a GPU's batches. For LibriSpeech's
lengths, a tenth of the computing for 16 h is padding of incomplete batches."""

_MOST_CHUNKS = 2
"""The chunks of a worker: it begins the second while it commits the end of the first."""

MOST_DEATHS = 3
"""The deaths after which a chunk is split into single tasks, and the further deaths that
a single task may cause."""

_POLL_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0

_TRIES = 2 * MOST_DEATHS
"""The deaths after which a single task is given up."""

_MOST_DEATHS = _TRIES + 1
"""The deaths of a worker without a commit in between, after which it is lost."""

_ENOUGH_UNREAD = 100

_ASKED = ("manifest", "root", "config", "from")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Tasks that one worker does."""

    tasks: tuple[ShardTask, ...]
    deaths: int = 0
    died_with: int | None = None
    """The number of the worker that died last; None if none has."""


class Chunks:
    """Deals tasks to workers."""

    def __init__(self, tasks: Iterator[ShardTask], workers: int) -> None:
        self.held: dict[int, list[Chunk]] = {}
        """The chunks of each busy worker, in their order."""
        self._tasks = tasks
        self._workers = workers
        self._ahead: deque[ShardTask] = deque()
        self._returned: list[Chunk] = []

    @property
    def are_done(self) -> bool:
        """True if every task is done."""
        self._look_ahead()
        return not (self._ahead or self._returned or self.held)

    def take(self, worker: int, is_alone: bool = False) -> Chunk | None:
        """Return the next chunk for a worker; None if it has nothing to do now. A busy worker
        gets new tasks only, and not the last ones."""
        self._look_ahead()
        if worker in self.held:
            is_near_end = len(self._ahead) < self._workers
            if self._returned or is_near_end or self.held[worker][0].deaths:
                return None
            chunk = self._new_chunk()
        else:
            chunk = self._returned_chunk(worker, is_alone) or self._new_chunk()
        if chunk is not None:
            self.held.setdefault(worker, []).append(chunk)
        return chunk

    def _returned_chunk(self, worker: int, is_alone: bool) -> Chunk | None:
        """Take a chunk of a dead worker. A worker does not get a chunk again that it died
        of, unless it `is_alone`. Chunks that cannot be extracted even alone come last."""
        returned = [chunk for chunk in self._returned if is_alone or chunk.died_with != worker]
        chunk = next((chunk for chunk in returned if chunk.deaths < _TRIES), None)
        if chunk is None and returned and not self._ahead:
            chunk = returned[0]
        if chunk is not None:
            self._returned.remove(chunk)
        return chunk

    def _new_chunk(self) -> Chunk | None:
        if not self._ahead:
            return None
        most = min(MOST_TASKS, len(self._ahead) // (2 * self._workers))
        tasks = [self._ahead.popleft()]
        seconds = sum(tasks[0].seconds)
        while len(tasks) < most and seconds < CHUNK_SECONDS:
            tasks.append(self._ahead.popleft())
            seconds += sum(tasks[-1].seconds)
        return Chunk(tuple(tasks))

    def undone(self, worker: int, done: Set[int]) -> int:
        """Count the worker's chunks that have a task whose row is not in `done`."""
        held = self.held.get(worker, ())
        return sum(any(task.row not in done for task in chunk.tasks) for chunk in held)

    def done(self, worker: int, count: int = 1) -> None:
        """Count a worker's first chunks as done."""
        del self.held[worker][:count]
        if not self.held[worker]:
            del self.held[worker]

    def died(self, worker: int, done: Set[int], counts: bool = True) -> None:
        """Take back the chunks of a dead worker, except for the tasks whose row is in `done`.
        The death `counts` unless the worker was preempted."""
        for chunk in self.held.pop(worker, []):
            if counts:
                chunk = replace(chunk, deaths=chunk.deaths + 1, died_with=worker)
            left = [task for task in chunk.tasks if task.row not in done]
            if chunk.deaths >= MOST_DEATHS:
                self._returned += [replace(chunk, tasks=(task,)) for task in left]
            elif left:
                self._returned.append(replace(chunk, tasks=tuple(left)))

    def _look_ahead(self) -> None:
        lacking = 2 * self._workers * MOST_TASKS - len(self._ahead)
        self._ahead.extend(itertools.islice(self._tasks, lacking))


class Team(Protocol):
    """Workers, by their numbers, and their transport."""

    names: Sequence[str]

    def start(self, worker: int, setup: WorkerSetup) -> None:
        """Start a worker, also again after it has died."""

    def send(self, worker: int, message: Message) -> None:
        """Send a message to a worker, unless it has died."""

    def wait(self, seconds: float) -> Sequence[tuple[int, Event]]:
        """Return workers' events; waits for `seconds` at most."""

    def end(self) -> None:
        """End all workers. They commit what they have, and are killed if that takes
        long."""


@dataclass
class _Worker:
    runs: Sequence[str] = ()
    is_lost: bool = False
    deaths: int = 0
    latest: Progress | None = None
    committed: Progress = field(default_factory=Progress)
    """The committed part of `latest`."""
    done: set[int] = field(default_factory=set)
    """The rows of the tasks that it has committed."""


class Dispatch:
    """Has a team do shard tasks, with the options of the run."""

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
        versions = list(zip(paths, asked, strict=True))
        self._setup = WorkerSetup.of(group, versions=versions, options=options)
        self._workers = [_Worker() for _ in team.names]
        self._chunks = Chunks(tasks, len(self._workers))
        self._suspects = group.suspects
        self._dead_runs: set[str] = set()
        self._lasting = control.progress
        """The progress that stays if all workers die."""
        self._unread: dict[str, str] = {}
        """Messages, by id, on what workers could not read, though this machine can."""
        self._first_to_send: dict[str, int] = {}
        self._first_ready: tuple[str, str] | None = None
        """The name and the device of the first worker."""
        self._next_report = 0.0
        self._is_late_at = monotonic() + _PATIENCE_SECONDS

    def run(self) -> None:
        """Do all tasks, as an `Engine`. Raises ConfigError if the workers' devices or
        fingerprints differ; ExtractorError if every worker has died again and again; and
        the workers' errors."""
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
            example = next(iter(self._unread.values()))
            raise ExtractorError(
                f"workers could not read {counted(len(self._unread), 'utterance')}, such as "
                f"{example}; this machine can: let all see the audio, and run the same command "
                "again"
            )

    def _end(self) -> None:
        """Stop the busy workers, if the run was stopped, and have the idle ones record
        that."""
        held = self._chunks.held
        idle = [
            number
            for number, worker in enumerate(self._workers)
            if worker.runs and worker.latest is None and number not in held
        ]
        if self._control.stop.is_set():
            for number in (*held, *idle):
                self._team.send(number, Stop())
        for number in idle:
            held[number] = [Chunk(())]
            self._team.send(number, Work((), Suspects()))
        while held:
            self._listen()

    def _is_over(self) -> bool:
        return self._control.stop.is_set() or self._chunks.are_done

    def _listen(self) -> None:
        for number, event in self._team.wait(_POLL_SECONDS):
            self._handle(number, event)
        if monotonic() >= self._next_report:
            self._report()

    def _deal(self) -> None:
        ready = [number for number, worker in enumerate(self._workers) if worker.runs]
        undone = {
            number: self._chunks.undone(number, self._workers[number].done) for number in ready
        }
        for number in sorted(ready, key=undone.__getitem__):
            if undone[number] == _MOST_CHUNKS:
                continue
            chunk = self._chunks.take(number, is_alone=len(ready) == 1)
            if chunk is not None:
                suspects = self._suspects | self._suspects_in(chunk)
                self._team.send(number, Work(chunk.tasks, suspects))
        if self._first_ready is None and monotonic() > self._is_late_at:
            self._is_late_at = float("inf")
            _log.info(
                "still waiting for the first of %s to start", counted(len(self._workers), "worker")
            )

    def _handle(self, number: int, event: Event) -> None:
        worker = self._workers[number]
        match event:
            case str():
                if self._first_to_send.setdefault(event, number) == number:
                    _log.info(event)
            case Ready(device, threads, runs):
                worker.runs = runs
                self._control.workers[number] = device, threads
                self._compare(self._team.names[number], device)
            case DoneTask():
                self._settle_unread(event)
                worker.committed += event.progress
                worker.done.add(event.row)
                worker.deaths = 0
            case Working(progress, works):
                worker.latest = progress
                if works:
                    self._chunks.done(number, works)
            case Exception():
                raise event
            case Died(how, counts_as_death):
                self._bring_back(number, how, counts_as_death)

    def _compare(self, name: str, device: str) -> None:
        """Refuse a worker's device of another model than the first one's."""
        if self._first_ready is None:
            self._first_ready = name, device
        first_name, first_device = self._first_ready
        if device != first_device and not self._setup.options.allow_mixed_devices:
            raise ConfigError(
                f"{name} is {device}, and {first_name} is {first_device}, which rounds "
                "differently: choose devices of one model, or accept that with "
                "--allow-mixed-devices"
            )

    def _bring_back(self, number: int, how: str, counts: bool) -> None:
        dead, name = self._workers[number], self._team.names[number]
        successor = self._workers[number] = _Worker(deaths=dead.deaths)
        if counts:
            successor.deaths += 1
        self._lasting += dead.committed
        when, most_deaths = "before it was ready", MOST_DEATHS
        if dead.runs:
            when, most_deaths = "at work", _MOST_DEATHS
            self._learn(dead.runs, counts)
        self._chunks.died(number, dead.done, counts)
        successor.is_lost = successor.deaths >= most_deaths or self._control.stop.is_set()
        ended = f"{name}: the process ended {when} ({how})"
        if not successor.is_lost:
            _log.info("%s; it is started again, and what it had is given back", ended)
            self._team.start(number, self._setup)
            return
        _log.info("%s; it is not started again", ended)
        if all(worker.is_lost for worker in self._workers) and not self._is_over():
            raise ExtractorError(
                f"{listing(self._team.names)}: processes ended again and again, the last by {how}"
            )

    def _learn(self, dead: Sequence[str], counts: bool) -> None:
        living = {run for worker in self._workers for run in worker.runs}
        self._dead_runs.update(dead)
        for job, run in zip(self._group.jobs, dead, strict=True):
            if not counts:
                remove_marks(job.version.store.marks_folder / run)
            failures = standing_failures(job.version, open_index(job.version, keep=False))
            self._suspects |= find_suspects(job.version, failures, living, self._dead_runs)

    def _suspects_in(self, chunk: Chunk) -> Suspects:
        """Return a task's utterances if it goes on to end workers: they are extracted alone
        in its last try, and after that not any more. If nothing succeeds, no utterance is
        at fault."""
        if chunk.deaths < _TRIES - 1:
            return Suspects()
        ids = frozenset(utterance.id for task in chunk.tasks for utterance in task.utterances)
        done = self._done_so_far().versions
        is_over = chunk.deaths >= _TRIES and any(
            done[job.name].extracted for job in self._group.jobs
        )
        return Suspects(ids, ids if is_over else frozenset())

    def _settle_unread(self, done: DoneTask) -> None:
        """Record utterances as failed that this machine cannot read either."""
        root = self._group.root
        for job, unread in zip(self._group.jobs, done.unread, strict=True):
            failed = []
            for failure in unread:
                if len(self._unread) < _ENOUGH_UNREAD and not can_be_read(root, failure.path):
                    failed.append(failure)
                    continue
                message = f"{failure.id} on {done.host}: {failure.path}: {failure.message}"
                self._unread.setdefault(failure.id, message)
            job.run.fail(failed)
            self._lasting += Progress(
                Counter(failure.reason for failure in failed),
                versions={job.name: VersionCounts(failed=len(failed))},
            )

    def _report(self) -> None:
        self._next_report = monotonic() + _POLL_SECONDS
        before, done = self._control.progress, self._done_so_far()
        if before.too_many_failures:
            done = replace(
                done, too_many_failures=before.too_many_failures, traceback=before.traceback
            )
        self._control.progress = done
        self._control.check()
        if self._first_ready is not None:
            self._control.report(self._control.progress)

    def _done_so_far(self) -> Progress:
        """Sum up what workers have done; the dead ones, what they have committed."""
        return sum((worker.latest for worker in self._workers if worker.latest), self._lasting)
