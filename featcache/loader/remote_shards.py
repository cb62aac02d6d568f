"""A version's shards that are far from this process: read from copies nearer by, or asked of an object store.

**Ahead of batches**, shards of an object store are fetched while training works on those before. A sampler that takes
the utterances of a few shards at a time knows what comes next. While the batches of one window are made, the shards of
the next ones are copied to the local disk or into memory, in the order in which they are read, as far as there is room
for them beside what is still needed. A copy is held until the last batch of these windows that reads it has been made;
then it may make room for others at once."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from featcache.errors import ArgumentError
from featcache.format.shard import Frames
from featcache.loader.local_copies import LocalCopies, Tiers, blaming_the_copy
from featcache.loader.shards import Shards
from featcache.storage.base import in_parallel
from featcache.storage.directory import Directory
from featcache.version.index import Index
from featcache.version.version import Version

if TYPE_CHECKING:
    from featcache.loader.dataset import FeatureDataset
    from featcache.loader.utterances import DatasetVersion

_AT_ONCE = 8
"""Shards that are fetched side by side ahead of batches."""

_MOST_WINDOWS = 4
"""Windows that are taken ahead."""


def open_shards(version: Version, index: Index, check: bool, tiers: Tiers | None) -> Shards:
    """The shards of a version that has copies, or is in an object store. Raises ArgumentError if it is in an object
    store, and there is room for less than a shard."""
    copies = LocalCopies(version, index.shards, [] if tiers is None else [*tiers.places(version)])
    if isinstance(version.path, Path):
        return _CopiedShards(version, index, check, copies)
    shards = ObjectShards(version, index, check, copies)
    most = int(shards.sizes.max(initial=0))
    if copies.places and copies.room is not None and copies.room < most:
        setting = " and ".join(place.setting for place in copies.places)
        raise ArgumentError(
            f"{setting} is {copies.room:,} bytes: the largest shard of {version.path} has {most:,}, and "
            f"shards are copied whole: give more, or no {setting.replace('copy_limit', 'copy_to')}="
        )
    return shards


class _CopiedShards(Shards):
    """The shards of a version in a folder, in copies as soon as they are complete; `copies` makes them."""

    def __init__(self, version: Version, index: Index, check: bool, copies: LocalCopies) -> None:
        super().__init__(version, index, check=check)
        self.copies = copies

    def _slices(self, shards: list[int], firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        if self.copies.has_news:
            for copy in self.copies.collect():  # the thread that makes them changes nothing of this itself
                self._features[copy.number] = copy.features
                self._copied[copy.number] = copy
                self._files.pop(copy.number, None)
        return super()._slices(shards, firsts, counts)

    def _open(self, number: int) -> NDArray[Any]:
        features = super()._open(number)
        self.copies.want(number)
        return features

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        copy = self._copied.get(number)
        if copy is not None and copy.path is None:  # in this process's memory
            out[...] = copy.features[first : first + len(out)]
            return
        with nullcontext() if copy is None else blaming_the_copy():
            super()._read_into(out, number, first, frames)

    def _open_file(self, number: int) -> Frames:
        copy = self._copied.get(number)
        if copy is None or copy.path is None:
            return super()._open_file(number)
        opened = Directory(copy.path.parent).open(copy.path.name, None)
        return Frames(opened, copy.features.shape, copy.features.dtype, str(copy.path), None)


class ObjectShards(Shards):
    """The frames and side arrays of a version's utterances in an object store. Safe to use from several threads.

    What a batch takes of a shard is asked for at once, neighbours in one request, and of all its shards side by side.
    Nothing of features is kept in memory. `copies` makes copies of whole shards before they are read; if it has no
    places, ranges are read."""

    def __init__(self, version: Version, index: Index, check: bool, copies: LocalCopies) -> None:
        super().__init__(version, index, check=check)
        self.copies = copies
        self._most_files = max(1, len(index.shards))  # none of them takes a descriptor

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """The context to read such arrays in: they are in memory, or copied from the store just now."""
        return nullcontext()

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of the features of each shard, as far as the index tells; int64 `[shards]`."""
        frames = np.zeros(len(self.index.shards), np.int64)
        ends = np.asarray(self.index.first_frame) + np.asarray(self.index.num_frames)
        np.maximum.at(frames, np.asarray(self.index.shard), ends)
        return frames * self.version.info.spec.bytes_per_frame

    def to_fetch(self, positions: NDArray[np.int64]) -> Counter[int]:
        """The shards that are copied to read these utterances, in the order of these, each with how many there are."""
        return Counter(self.index.shard[positions].tolist() if self.copies.places else ())

    def hold(self, number: int) -> Callable[[], None] | None:
        """Copy a shard, and keep the copy until the function is called that is returned; see `LocalCopies.hold`."""
        return self.copies.hold(number, self._file(number))

    def _slices(self, shards: list[int], firsts: list[int], counts: list[int]) -> list[NDArray[Any]]:
        ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, first, count in zip(shards, firsts, counts, strict=True):
            ranges[number].append((first, count))
        read = in_parallel(self._of_shard, [*ranges.items()])
        frames_of = dict(zip(ranges, map(iter, read), strict=True))
        return [next(frames_of[number]) for number in shards]

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        out[...] = frames

    def _of_shard(self, number_and_ranges: tuple[int, list[tuple[int, int]]]) -> list[NDArray[Any]]:
        number, ranges = number_and_ranges
        firsts, counts = zip(*ranges, strict=True)
        chunk = self._file(number)
        chunk.require_within(firsts, counts)
        copy = self.copies.features(number, chunk, sum(counts)) if self.copies.places else None
        if copy is None:
            self._copied.pop(number, None)
            return chunk.read_ranges(firsts, counts)
        self._copied[number] = copy
        return [copy.features[first : first + count] for first, count in ranges]


def remote_copies(dataset: FeatureDataset) -> list[LocalCopies]:
    """The copies of the versions that are in an object store; of those without places, batches ask the store for their
    own bytes."""
    return [shards.copies for _, shards in _remote(dataset)]


def _remote(dataset: FeatureDataset) -> list[tuple[DatasetVersion, ObjectShards]]:
    """The versions that are in an object store."""
    versions = ((version, version.cache._shards) for version in dataset.versions)
    return [(version, shards) for version, shards in versions if isinstance(shards, ObjectShards)]


_Key: TypeAlias = tuple[ObjectShards, int]
"""A shard by its number."""


@dataclass
class _Fetch:
    """A shard that is copied ahead of batches."""

    shards: ObjectShards
    number: int
    num_left: int = 0
    """The number of utterances that are still to be read of it."""
    future: Future[Callable[[], None] | None] | None = None
    """What lets go of the copy, once it is there; None before it is begun."""

    @property
    def num_bytes(self) -> int:
        """The bytes of the shard's features, as far as the index tells."""
        return int(self.shards.sizes[self.number])

    def is_under_way(self) -> bool:
        return self.future is not None and not self.future.done()


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
        self._numbers = itertools.count()
        self._fetches: dict[_Key, _Fetch] = {}  # in the order in which they begin
        self._batches: dict[int, dict[_Key, int]] = {}  # those that are not made, in their order, and what they read

    def windows(
        self, batches: Iterator[list[int]], sampler: Any
    ) -> Iterator[tuple[list[int], AbstractContextManager[None]]]:
        """The batches, of which windows are taken ahead: at least one, and as many as keep all threads fetching while
        there is room; each with the context to make it in. `sampler`, which gives them, has the `window` of the latest.

        The context raises CancelledError if all was closed meanwhile."""
        upcoming: deque[list[list[int]]] = deque()
        for _, group in groupby(batches, lambda batch: sampler.window):
            upcoming.append(list(group))
            are_begun = self._expect(np.concatenate([np.array(batch, np.int64) for batch in upcoming[-1]]))
            if len(upcoming) > 1 and (not are_begun or len(upcoming) > _MOST_WINDOWS):
                yield from map(self._add, upcoming.popleft())
        for rest in upcoming:
            yield from map(self._add, rest)

    def _add(self, rows: list[int]) -> tuple[list[int], AbstractContextManager[None]]:
        """Add a batch, which is to be made after those before."""
        wanted = self._wanted(np.array(rows, np.int64))
        with self._changed:
            number = next(self._numbers)
            self._batches[number] = wanted
        return rows, self._reading(number)

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
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
            futures = [fetch.future for fetch in self._fetches.values() if fetch.future is not None]
            self._fetches.clear()
            self._batches.clear()
            self._changed.notify_all()
        self._threads.shutdown(wait=False)
        for future in futures:
            future.add_done_callback(_release)

    def _wanted(self, rows: NDArray[np.int64]) -> dict[_Key, int]:
        """The shards that are read for some rows, and how many utterances of each."""
        of_versions = [(shards, shards.to_fetch(version.positions_of(rows))) for version, shards in self._versions]
        return {(shards, number): count for shards, counts in of_versions for number, count in counts.items()}

    def _expect(self, rows: NDArray[np.int64]) -> bool:
        """Fetch what a window reads, as soon as there is room; whether all that is expected has been begun."""
        wanted = self._wanted(rows)
        with self._changed:
            for key, count in wanted.items():
                self._fetches.setdefault(key, _Fetch(*key)).num_left += count
            self._begin()
            return all(fetch.future is not None for fetch in self._fetches.values())

    def _may_read(self, number: int) -> bool:
        """Whether a batch's shards are there; for the first one, those that there is room for."""
        fetches = [self._fetches[key] for key in self._batches[number]]
        if any(fetch.is_under_way() for fetch in fetches):
            return False
        are_begun = all(fetch.future is not None for fetch in fetches)
        return are_begun or (number == next(iter(self._batches)) and self._next() is None)

    def _next(self) -> _Fetch | None:
        """What is to begin next, if there is room for it."""
        upcoming = next((fetch for fetch in self._fetches.values() if fetch.future is None), None)
        if upcoming is None or (room := upcoming.shards.copies.room) is None:
            return upcoming
        where = upcoming.shards.copies.where
        begun = [fetch for fetch in self._fetches.values() if fetch.future is not None]
        taken = sum(fetch.num_bytes for fetch in begun if fetch.shards.copies.where == where)
        return upcoming if taken + upcoming.num_bytes <= room else None

    def _begin(self) -> None:
        """Begin, in their order, what there are threads and room for: no more than that, since the interpreter does not
        end before what has been begun."""
        while (fetch := self._next()) is not None and sum(map(_Fetch.is_under_way, self._fetches.values())) < _AT_ONCE:
            try:
                fetch.future = self._threads.submit(fetch.shards.hold, fetch.number)
            except RuntimeError:  # the interpreter is ending, or there are no more threads: who reads it fetches it
                fetch.future = Future()
                fetch.future.set_result(None)
                self._changed.notify_all()
            else:
                fetch.future.add_done_callback(self._go_on)

    def _go_on(self, _: object) -> None:
        """Begin what can be begun since a fetch has ended, and wake who waits for it."""
        with self._changed:
            self._begin()
            self._changed.notify_all()

    def _end(self, number: int) -> None:
        """Let go of the shards that nobody reads any more after this batch, and only then go on with the next."""
        with self._changed:
            for key, count in self._batches.pop(number, {}).items():
                fetch = self._fetches[key]
                fetch.num_left -= count
                if not fetch.num_left:
                    del self._fetches[key]
                    if fetch.future is not None:
                        fetch.future.add_done_callback(_release)
            self._begin()
            self._changed.notify_all()


def _release(future: Future[Callable[[], None] | None]) -> None:
    """Let go of a copy, if there is one."""
    if future.exception() is None and (let_go := future.result()) is not None:
        let_go()
