"""Which worker does which tasks: dealt out in chunks, given to others when a worker dies. Pure: no process is needed.

A chunk has about eight tasks, and fewer near the end, so that all workers end at about the same time. If a worker dies,
what it has not committed of its chunk goes to another. After three deaths a chunk is split into single tasks; a task
that by itself ends three workers is poison, and not tried any more.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from featcache.extraction.tasks import ShardTask

MOST_TASKS = 8
"""The tasks in a chunk: few enough that little is done again, enough that starting one costs nothing."""

MOST_DEATHS = 3
"""The deaths after which a chunk is split, and after which a single task is poison."""


@dataclass(frozen=True)
class Chunk:
    """Tasks that one worker does."""

    tasks: tuple[ShardTask, ...]
    """At least one task."""
    deaths: int = 0
    """How many workers have died of it."""
    died_with: int | None = None
    """The number of the worker that died last; None if none has."""


class Chunks:
    """Deals tasks, taken as they are wanted, to so many workers; each is done once, or poison."""

    def __init__(self, tasks: Iterator[ShardTask], workers: int) -> None:
        self._tasks = tasks
        self._workers = workers
        self._ahead: deque[ShardTask] = deque()
        self._returned: list[Chunk] = []
        self._held: dict[int, Chunk] = {}

    @property
    def are_done(self) -> bool:
        """Whether nothing is left: every task is done or poison."""
        self._look_ahead()
        return not (self._ahead or self._returned or self._held)

    @property
    def is_any_held(self) -> bool:
        """Whether a worker has a chunk."""
        return bool(self._held)

    def take(self, worker: int, is_alone: bool = False) -> Chunk | None:
        """The next chunk for a worker; None if there is nothing for it now.

        A worker is not given again what it died of, unless it `is_alone`: others are lost, or may never begin. It may
        be the worker's own device that is at fault.
        """
        fitting = [chunk for chunk in self._returned if is_alone or chunk.died_with != worker]
        if fitting:
            chunk = fitting[0]
            self._returned.remove(chunk)
        else:
            self._look_ahead()
            if not self._ahead:
                return None
            fair = len(self._ahead) // (2 * self._workers)
            size = max(1, min(MOST_TASKS, fair))
            chunk = Chunk(tuple(self._ahead.popleft() for _ in range(size)))
        self._held[worker] = chunk
        return chunk

    def done(self, worker: int) -> None:
        """A worker has done its chunk."""
        del self._held[worker]

    def died(self, worker: int, done: Set[str], counts: bool = True) -> Sequence[ShardTask]:
        """Take back the chunk of a worker that has died, but for the tasks that it has `done` of it, by their names.

        The death `counts` if the chunk may be the cause: not that of a worker that was preempted. Returns tasks that
        are poison, at most one.
        """
        chunk = self._held.pop(worker, None)
        if chunk is None:
            return ()
        left = tuple(task for task in chunk.tasks if task.name not in done)
        if not left:
            return ()
        if not counts:
            self._returned.append(replace(chunk, tasks=left))
            return ()
        again = Chunk(left, chunk.deaths + 1, worker)
        if again.deaths < MOST_DEATHS:
            self._returned.append(again)
        elif len(left) == 1 and len(chunk.tasks) == 1:
            return left
        else:
            self._returned += [Chunk((task,), 0, worker) for task in left]
        return ()

    def _look_ahead(self) -> None:
        """Have as many tasks at hand as tell whether the end is near."""
        wanted = 2 * self._workers * MOST_TASKS - len(self._ahead)
        self._ahead.extend(itertools.islice(self._tasks, wanted))
