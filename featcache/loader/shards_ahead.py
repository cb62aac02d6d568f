"""Shards of an object store, copied here before the batches that read them."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import groupby
from typing import Any

import numpy as np

from featcache.loader.dataset import FeatureDataset
from featcache.loader.local_copies import ObjectShards
from featcache.loader.utterances import DatasetVersion

Reading = AbstractContextManager[None]
"""A context in which a batch is made, and its shards stay."""

_SHARDS_AT_ONCE = 8
"""Shards that are fetched at the same time, ahead of batches."""

_MOST_WINDOWS = 4
"""Windows that are taken ahead of the current one."""


def in_object_stores(
    versions: Iterable[DatasetVersion],
) -> list[tuple[DatasetVersion, ObjectShards]]:
    """List the versions in an object store."""
    pairs = ((version, version.cache._shards) for version in versions)
    return [(version, shards) for version, shards in pairs if isinstance(shards, ObjectShards)]


_Key = tuple[ObjectShards, int]
"""A shard by its number."""

_Window = list[tuple[int, list[int]]]
"""The batches of a window: the number and the rows of each."""


class ShardsAhead:
    """The shards of an object store that the batches of one iteration will read, if the
    sampler takes the utterances of a few shards at a time. Safe to use from several threads.

    While the batches of one window are made, the shards of the next windows are copied in
    the order in which they are read, as far as there is room. A copy is held until the last
    of these batches that reads it has been made. A batch waits for its shards; the first of
    the unmade batches, only while there is room for them, so that one batch always goes on.
    A shard that cannot be fetched raises its error where it is read."""

    def __init__(self, dataset: FeatureDataset) -> None:
        remote = in_object_stores(dataset.versions)
        self._versions = [(version, shards) for version, shards in remote if shards.places]
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_SHARDS_AT_ONCE, "featcache-ahead")
        self._is_closed = False
        self._batches: deque[int] = deque()
        """The numbers of the unmade batches, in their order."""
        self._last: dict[_Key, int] = {}
        """The last batch that reads each shard, in the order in which shards are fetched."""
        self._begun: set[_Key] = set()
        """The shards whose fetching has begun."""
        self._held: dict[_Key, Callable[[], None] | None] = {}
        """The fetched shards, with the function that lets go of each; None for a failed one."""

    def windows(
        self, batches: Iterator[list[int]], sampler: Any
    ) -> Iterator[tuple[list[int], Reading]]:
        """Yield the batches, each with the context to make it in, which raises CancelledError
        if all was closed meanwhile. Windows are taken ahead: at least one, and more while
        there are threads and room. `sampler` yields the batches, and its `window` is the
        window of the latest batch."""
        upcoming: deque[_Window] = deque()
        for _, group in groupby(enumerate(batches), lambda _: sampler.window):
            upcoming.append([*group])
            are_begun = self._expect(upcoming[-1])
            if len(upcoming) > 1 and (not are_begun or len(upcoming) > _MOST_WINDOWS):
                yield from self._readings(upcoming.popleft())
        for window in upcoming:
            yield from self._readings(window)

    def _readings(self, window: _Window) -> Iterator[tuple[list[int], Reading]]:
        return ((rows, self._reading(number, rows)) for number, rows in window)

    def _expect(self, window: _Window) -> bool:
        """Fetch the shards of a window as soon as there is room. Tells whether the fetching
        of all expected shards has begun."""
        last = {key: number for number, rows in window for key in self._keys(rows)}
        with self._changed:
            self._batches += [number for number, _ in window]
            self._last |= last
            self._go_on()
            return len(self._begun) == len(self._last)

    def _keys(self, rows: list[int]) -> list[_Key]:
        """List the shards that are copied to read some rows, in the order of these."""
        keys: dict[_Key, None] = {}
        for version, shards in self._versions:
            positions = version.positions_of(np.array(rows, np.int64))
            keys |= dict.fromkeys((shards, n) for n in shards.index.shard[positions].tolist())
        return [*keys]

    @contextmanager
    def _reading(self, number: int, rows: list[int]) -> Iterator[None]:
        keys = self._keys(rows)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_read(number, keys))
            if self._is_closed:
                raise CancelledError
        try:
            yield
        finally:
            with self._changed:
                if not self._is_closed:
                    self._batches.remove(number)
                    self._go_on()

    # At the interpreter's exit, the module's names may be gone: hence the default.
    def close(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Fetch nothing more, and hold nothing."""
        # A forked child has neither the threads nor the locks.
        if is_ending() or os.getpid() != self._process:
            return
        with self._changed:
            self._is_closed = True
            self._batches.clear()
            self._go_on()
        self._threads.shutdown(wait=False)

    def _may_read(self, number: int, keys: Iterable[_Key]) -> bool:
        """Tell whether a batch's shards are fetched, or, for the first batch, have no room."""
        missing = [key for key in keys if key not in self._held]
        if not self._begun.isdisjoint(missing):
            return False
        return not missing or (number == self._batches[0] and self._next() is None)

    def _next(self) -> _Key | None:
        """Return the shard to fetch next; None if there is none, or no room for it."""
        key = next((key for key in self._last if key not in self._begun), None)
        if key is None or key[0].room == math.inf:
            return key
        same_places = [other for other in self._begun if other[0].where == key[0].where]
        num_bytes = sum(int(shards.sizes[number]) for shards, number in [*same_places, key])
        return key if num_bytes <= key[0].room else None

    def _go_on(self) -> None:
        """Let go of the shards that were read last. Begin to fetch others, as far as there
        are threads and room: the interpreter does not end before what has begun. Wake all
        waiting threads."""
        first = self._batches[0] if self._batches else math.inf
        for key in [key for key, last in self._last.items() if last < first]:
            if key in self._begun and key not in self._held:
                continue  # until it is fetched
            del self._last[key]
            self._begun.discard(key)
            let_go = self._held.pop(key, None)
            if let_go is not None:
                let_go()
        while len(self._begun) - len(self._held) < _SHARDS_AT_ONCE:
            upcoming = self._next()
            if upcoming is None:
                break
            self._begun.add(upcoming)
            try:
                self._threads.submit(self._fetch, upcoming)
            except RuntimeError:  # no more threads: the batch that reads it fetches it
                self._held[upcoming] = None
        self._changed.notify_all()

    def _fetch(self, key: _Key) -> None:
        shards, number = key
        let_go = None
        with suppress(Exception):  # raised again where it is read
            let_go = shards.hold(number)
        with self._changed:
            self._held[key] = let_go
            self._go_on()
