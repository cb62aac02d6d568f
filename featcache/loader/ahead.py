"""Shards of an object store that batches will read soon, fetched while training works on those before.

A sampler that takes the utterances of a few shards at a time knows what comes next. While the batches of one window are
made, the shards of the next ones are copied to the local disk or into memory, in the order in which they are read, as
far as there is room for them beside what is still needed. A copy is held until the last batch of these windows that
reads it has been made; then it may make room for others at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.loader.dataset import FeatureDataset
from featcache.loader.remote_shards import ObjectShards, ToFetch
from featcache.loader.utterances import DatasetVersion

_AT_ONCE = 8
"""Shards that are fetched side by side."""

_MOST_WINDOWS = 4
"""Windows that are taken ahead."""


def fetches(dataset: FeatureDataset) -> bool:
    """Whether shards are copied from an object store before they are read."""
    return any(shards.copies is not None for _, shards in _remote(dataset))


def asks_store(dataset: FeatureDataset) -> bool:
    """Whether batches ask an object store for their own bytes, since no shards are copied."""
    return any(shards.copies is None for _, shards in _remote(dataset))


def _remote(dataset: FeatureDataset) -> list[tuple[DatasetVersion, ObjectShards]]:
    """The versions that are in an object store."""
    versions = ((version, version.cache._shards) for version in dataset.versions)
    return [(version, shards) for version, shards in versions if isinstance(shards, ObjectShards)]


class ShardsAhead:
    """The shards that the batches of one iteration will read. Safe to use from several threads.

    A batch waits for its shards, unless it is the first of those that have not been made: so whatever there is room
    for, there is one that goes on. What cannot be fetched is no error here, but where it is read."""

    def __init__(self, dataset: FeatureDataset) -> None:
        self._versions = _remote(dataset)
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_AT_ONCE, "featcache-ahead")
        self._is_closed = False
        self._numbers = count()
        self._left: Counter[ToFetch] = Counter()  # utterances that are still to be read
        self._queue: dict[ToFetch, None] = {}  # shards that are not begun, in their order
        self._begun: dict[ToFetch, Future[Callable[[], None] | None]] = {}
        self._bytes: Counter[str] = Counter()  # of these, in each place of copies
        self._batches: dict[int, dict[ToFetch, int]] = {}  # those that are not made, in their order, and what they read

    def windows(self, batches: Iterator[list[int]], sampler: Any) -> Iterator[list[int]]:
        """The batches, of which windows are taken ahead: at least one, and as many as keep all threads fetching while
        there is room. `sampler`, which gives them, has the `window` of the latest."""
        upcoming: deque[list[list[int]]] = deque()
        for _, group in groupby(batches, lambda batch: sampler.window):
            upcoming.append(list(group))
            self._expect(np.concatenate([np.array(batch, np.int64) for batch in upcoming[-1]]))
            if len(upcoming) > 1 and (self._queue or len(upcoming) > _MOST_WINDOWS):
                yield from upcoming.popleft()
        for rest in upcoming:
            yield from rest

    def add(self, rows: list[int]) -> int:
        """Add a batch, which is to be made after those before; returns its number."""
        wanted = self._wanted(np.array(rows, np.int64))
        with self._changed:
            number = next(self._numbers)
            self._batches[number] = wanted
            return number

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """The context to make a batch in.

        Raises:
            CancelledError: All was closed meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_read(number))
            if self._is_closed:
                raise CancelledError
        try:
            yield
        finally:
            self._end(number)

    # A default, since at the interpreter's exit the module's own names may be gone.
    def close(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Fetch nothing more, and hold nothing."""
        if is_ending() or os.getpid() != self._process:  # a forked child has neither the threads nor the locks
            return
        with self._changed:
            self._is_closed = True
            begun = list(self._begun.values())
            for pending in (self._queue, self._begun, self._left, self._batches):
                pending.clear()
            self._changed.notify_all()
        self._threads.shutdown(wait=False)
        for future in begun:
            future.add_done_callback(_release)

    def _wanted(self, rows: NDArray[np.int64]) -> dict[ToFetch, int]:
        wanted: dict[ToFetch, int] = {}
        for version, shards in self._versions:
            wanted |= shards.to_fetch(version.positions_of(rows))
        return wanted

    def _expect(self, rows: NDArray[np.int64]) -> None:
        wanted = self._wanted(rows)
        with self._changed:
            self._queue |= {shard: None for shard in wanted if shard not in self._left}
            self._left.update(wanted)
            self._begin()

    def _may_read(self, number: int) -> bool:
        """Whether a batch's shards are there; for the first one, those that there is room for."""
        wanted = self._batches[number].keys()
        if any(not self._begun[shard].done() for shard in wanted & self._begun.keys()):
            return False
        return not wanted & self._queue.keys() or (number == next(iter(self._batches)) and not self._has_room())

    def _has_room(self) -> bool:
        """Whether there is room for the first shard of the queue."""
        shard = next(iter(self._queue))
        where, room = shard.copies.where, shard.copies.room
        return room is None or self._bytes[where] + shard.num_bytes <= room

    def _begin(self) -> None:
        """Begin to fetch, in the order of the queue, what there are threads and room for: no more than that, since the
        interpreter does not end before what has been begun."""
        while self._queue and sum(not each.done() for each in self._begun.values()) < _AT_ONCE and self._has_room():
            shard = next(iter(self._queue))
            try:
                future = self._threads.submit(shard.hold)
            except RuntimeError:  # the interpreter is ending, or there are no more threads: who reads them fetches them
                self._queue.clear()
                self._changed.notify_all()
                return
            del self._queue[shard]
            self._bytes[shard.copies.where] += shard.num_bytes
            self._begun[shard] = future
            future.add_done_callback(self._go_on)

    def _go_on(self, _: object) -> None:
        """Begin what can be begun since a fetch has ended, and wake who waits for it."""
        with self._changed:
            self._begin()
            self._changed.notify_all()

    def _end(self, number: int) -> None:
        """Let go of the shards that nobody reads any more after this batch, and only then go on with the next."""
        with self._changed:
            wanted = self._batches.get(number, {})
            self._left.subtract(wanted)
            done = [shard for shard in wanted if not self._left[shard]]
            begun = {shard: self._begun.pop(shard) for shard in done if shard in self._begun}
            for shard in done:
                del self._left[shard]
                self._queue.pop(shard, None)
        for future in begun.values():
            future.add_done_callback(_release)
        with self._changed:
            for shard in begun:
                self._bytes[shard.copies.where] -= shard.num_bytes
            self._batches.pop(number, None)
            self._begin()
            self._changed.notify_all()


def _release(future: Future[Callable[[], None] | None]) -> None:
    """Let go of a copy, if there is one."""
    if future.exception() is None and (let_go := future.result()) is not None:
        let_go()
