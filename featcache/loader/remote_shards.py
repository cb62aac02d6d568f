"""A version's shards that are far from this process: read from copies nearer by, or asked of an object store.

**Ahead of batches**, shards of an object store are fetched while training works on those before. A sampler that takes
the utterances of a few shards at a time knows what comes next. While the batches of one window are made, the shards of
the next ones are copied to the local disk or into memory, in the order in which they are read, as far as there is room
for them beside what is still needed. A copy is held until the last batch of these windows that reads it has been made;
then it may make room for others at once."""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from itertools import chain, groupby
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

_Hold: TypeAlias = Future[Callable[[], None] | None]
"""A copy that is made, and then held: what lets go of it, if it is there."""


class ShardsAhead:
    """The shards that the batches of one iteration will read. Safe to use from several threads.

    A batch waits for its shards, unless it is the first of those that have not been made: so whatever there is room
    for, there is one that goes on. What cannot be fetched is no error here, but where it is read."""

    def __init__(self, dataset: FeatureDataset) -> None:
        self._versions = [(version, shards) for version, shards in _remote(dataset) if shards.copies.places]
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_AT_ONCE, "featcache-ahead")
        self._is_closed = False
        self._batches: list[frozenset[_Key]] = []  # what those read that have not been made, in their order
        self._holds: dict[_Key, _Hold | None] = {}  # of all these, in the order in which they begin; None before that

    def windows(
        self, batches: Iterator[list[int]], sampler: Any
    ) -> Iterator[tuple[list[int], AbstractContextManager[None]]]:
        """The batches, of which windows are taken ahead: at least one, and as many as keep all threads fetching while
        there is room; each with the context to make it in. `sampler`, which gives them, has the `window` of the latest.

        The context raises CancelledError if all was closed meanwhile."""
        upcoming: deque[list[tuple[list[int], AbstractContextManager[None]]]] = deque()
        for _, group in groupby(batches, lambda batch: sampler.window):
            window = [(rows, self._keys_of(rows)) for rows in group]
            are_begun = self._expect([keys for _, keys in window])
            upcoming.append([(rows, self._reading(keys)) for rows, keys in window])
            if len(upcoming) > 1 and (not are_begun or len(upcoming) > _MOST_WINDOWS):
                yield from upcoming.popleft()
        for rest in upcoming:
            yield from rest

    def _keys_of(self, rows: list[int]) -> frozenset[_Key]:
        """The shards that are copied to read some rows."""
        at = np.array(rows, np.int64)
        numbers = (
            (shards, shards.index.shard[version.positions_of(at)].tolist()) for version, shards in self._versions
        )
        return frozenset((shards, number) for shards, some in numbers for number in some)

    def _expect(self, window: list[frozenset[_Key]]) -> bool:
        """Fetch what the batches of a window read, as soon as there is room; whether all that is expected has been
        begun."""
        with self._changed:
            self._batches += window
            for key in chain.from_iterable(window):
                self._holds.setdefault(key)
            self._begin()
            return None not in self._holds.values()

    @contextmanager
    def _reading(self, keys: frozenset[_Key]) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_read(keys))
            if self._is_closed:
                raise CancelledError
        try:
            yield
        finally:
            self._end(keys)

    # A default, since at the interpreter's exit the module's own names may be gone.
    def close(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Fetch nothing more, and hold nothing."""
        if is_ending() or os.getpid() != self._process:  # a forked child has neither the threads nor the locks
            return
        with self._changed:
            self._is_closed = True
            holds = [*self._holds.values()]
            self._holds.clear()
            self._changed.notify_all()
        self._threads.shutdown(wait=False)
        for hold in filter(None, holds):
            hold.add_done_callback(_let_go)

    def _may_read(self, keys: frozenset[_Key]) -> bool:
        """Whether a batch's shards are there; for the first one, those that there is room for."""
        holds = [self._holds[key] for key in keys]
        if any(map(_is_under_way, holds)):
            return False
        return None not in holds or (keys == self._batches[0] and self._next() is None)

    def _next(self) -> _Key | None:
        """What is to begin next, if there is room for it."""
        key = next((key for key, hold in self._holds.items() if hold is None), None)
        if key is None or (room := key[0].copies.room) is None:
            return key
        begun = [other for other, hold in self._holds.items() if hold and other[0].copies.where == key[0].copies.where]
        return key if sum(int(shards.sizes[number]) for shards, number in [*begun, key]) <= room else None

    def _begin(self) -> None:
        """Begin, in their order, what there are threads and room for: no more than that, since the interpreter does not
        end before what has been begun."""
        while (key := self._next()) is not None and sum(map(_is_under_way, self._holds.values())) < _AT_ONCE:
            shards, number = key
            try:
                hold = self._holds[key] = self._threads.submit(shards.hold, number)
            except RuntimeError:  # the interpreter is ending, or there are no more threads: who reads it fetches it
                hold = self._holds[key] = Future()
                hold.set_result(None)
                self._changed.notify_all()
            else:
                hold.add_done_callback(self._go_on)

    def _go_on(self, _: object) -> None:
        """Begin what can be begun since a fetch has ended, and wake who waits for it."""
        with self._changed:
            self._begin()
            self._changed.notify_all()

    def _end(self, keys: frozenset[_Key]) -> None:
        """Let go of the shards that nobody reads any more after this batch, and only then go on with the next."""
        with self._changed:
            if self._is_closed:
                return
            self._batches.remove(keys)
            for key in keys:
                if not any(key in others for others in self._batches) and (hold := self._holds.pop(key)):
                    hold.add_done_callback(_let_go)
            self._begin()
            self._changed.notify_all()


def _is_under_way(hold: _Hold | None) -> bool:
    return hold is not None and not hold.done()


def _let_go(hold: _Hold) -> None:
    """Let go of a copy, if there is one."""
    if hold.exception() is None and (let_go := hold.result()) is not None:
        let_go()
