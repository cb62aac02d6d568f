"""Workers for tests that are no processes: each does its work when it is told to, or dies of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from featcache.engines import worker as workers
from featcache.engines.dispatch import dispatch
from featcache.engines.worker import Died, End, Ended, Ready, Stop, Work
from featcache.extraction.options import Options


class InlineTeam:
    """A team of which some die.

    Args:
        size: The number of workers.
        deadly: The ids of utterances that end whoever is told to extract them.
        labels: The models of the workers' devices.
        fate: Called with the number of a worker and the tasks that it is to do; may return how it dies of them.
    """

    def __init__(
        self,
        size: int,
        deadly: Collection[str] = (),
        labels: Collection[str] = (),
        fate: Callable[[int, Work], Died | None] = lambda number, work: None,
    ) -> None:
        self.names = [f"worker {number + 1}" for number in range(size)]
        self.started: list[int] = []
        self.works: list[tuple[int, Work]] = []
        self._deadly, self._labels, self._fate = frozenset(deadly), [*labels], fate
        self._events = []
        self._workers = {}
        self._stop = threading.Event()

    def start(self, worker, setup):
        self.started.append(worker)
        made = workers._Worker(setup.on("cpu", 1), self._stop, lambda event: self._events.append((worker, event)))
        self._workers[worker] = made
        label = self._labels[worker] if self._labels else "cpu"
        self._events.append((worker, Ready(label, 1, [job.run.id for job in made.jobs])))

    def send(self, worker, message):
        match message:
            case Work(tasks):
                self.works.append((worker, message))
                died = self._fate(worker, message)
                if self._deadly & {row.id for task in tasks for row in task.utterances}:
                    died = Died("SIGKILL")
                if died is None:
                    self._workers[worker].do(message)
                else:
                    self._events.append((worker, died))
            case Stop():
                self._stop.set()
            case End(interrupted):
                self._workers[worker].finish(interrupted)
                self._events.append((worker, Ended()))

    def wait(self, seconds):
        events, self._events = self._events, []
        return events

    def end(self):
        """Nothing has to end: there are no processes."""

    def engine(self, options=Options("cpu", 1)):  # noqa: B008
        """The engine that has this team do everything."""
        return lambda group, tasks, control: dispatch(group, tasks, control, self, options)
