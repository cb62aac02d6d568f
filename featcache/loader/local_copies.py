"""Copies of shards nearer than the cache, on a local disk, in memory, or both (memory is
filled from the disk); and shards that are read from such copies, or asked of an object
store.

**Of a cache in a folder**, copies are made in the background, and a shard is read from
its copy once that is complete. One thread in each process makes them for all its caches,
one after another, in the order in which shards were first read. It ends when there is
nothing to do. What is read changes only where it is read: the thread puts a finished copy
into a list, and `Shards` collects it before its next read.

**Of a cache in an object store**, a shard is copied whole before anything of it is read.
So each byte is fetched once, however many processes of the machine read it, in any order,
while the copy stays. Without room, copies go that nobody holds (see `ShardsAhead`) and
nobody has read for a while, and those of which the processes together have read as many
frames as there are: of an epoch that takes shards one after the other, those that it is
done with. If all are in use, ranges are read from the store instead: to copy a shard
again and again for single utterances would fetch far more.

Threads and their locks do not survive a fork: a child begins anew when it reads."""

from __future__ import annotations

import math
import os
import re
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from featcache.errors import (
    ArgumentError,
    DamagedError,
    FeatcacheWarning,
    StoreError,
    is_number,
    refuse_url,
)
from featcache.format.group import CHECKSUM_BYTES
from featcache.format.shard import Frames
from featcache.loader.places import CopyRefused, Disk, LocalCopy, Place, changing, memory
from featcache.loader.shards import Shards
from featcache.storage.base import in_parallel
from featcache.storage.directory import Directory
from featcache.version.index import Index
from featcache.version.version import Version

_IDLE_SECONDS = 60.0
"""How long nobody has read a copy of a shard in an object store that may make room for
another."""

_WAIT_SECONDS = 0.5
"""How long to wait if other processes are copying all that is wanted."""

_POLL_SECONDS = 0.05
"""How long to wait for a shard that another process is copying, and that is to be read
now."""

_COPIES_AT_ONCE = 8
"""Shards that a process fetches side by side: each takes some blocks of memory, and a
batch may need dozens."""

_MOST_HELD = 128
"""Copies that a process holds at a time: each takes a file descriptor. Others stay as
long as they are in use."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kmgt])(i?))?b?", re.ASCII)

_in_folders: weakref.WeakSet[FolderShards] = weakref.WeakSet()
_in_stores: weakref.WeakSet[ObjectShards] = weakref.WeakSet()
_thread: threading.Thread | None = None


class Copying(TypedDict, total=False):
    """What `featcache.open` takes to keep shards nearer."""

    ram: str | float | None
    copy_to: str | Path | None
    copy_limit: str | float | None


@dataclass(frozen=True)
class Tiers:
    """What a cache keeps nearer, and how much of it, in bytes: the arguments of
    `featcache.open`, checked."""

    ram: int | None = None
    copy_to: Path | None = None
    copy_limit: int | None = None

    @classmethod
    def parse(
        cls,
        ram: str | float | None = None,
        copy_to: str | Path | None = None,
        copy_limit: str | float | None = None,
    ) -> Tiers:
        """The tiers. An ArgumentError refuses an invalid size or folder, or a limit
        without a folder."""
        if copy_limit is not None and copy_to is None:
            raise ArgumentError(
                f"copy_limit is {copy_limit!r}, but nothing is copied without copy_to="
            )
        # Empty is a variable that is not set, and would be the working directory.
        if copy_to == "" or not isinstance(copy_to, (str, os.PathLike, NoneType)):
            raise ArgumentError(f"copy_to is {copy_to!r}: give a folder on a disk of this machine")
        if copy_to is not None:
            refuse_url("copy_to", copy_to)
        num_bytes = None if ram is None else parse_size("ram", ram)
        if num_bytes is not None and num_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf(
            "SC_PHYS_PAGES"
        ):
            raise ArgumentError(f"ram is {num_bytes:,} bytes: more than this machine has")
        folder = None if copy_to is None else Path(copy_to).expanduser().absolute()
        return cls(
            num_bytes, folder, None if copy_limit is None else parse_size("copy_limit", copy_limit)
        )

    def places(self, version: Version) -> list[Place]:
        """List the places of a version's copies, the nearest one first."""
        idle_seconds = None if isinstance(version.path, Path) else _IDLE_SECONDS
        places: list[Place] = []
        if self.ram is not None:
            places.append(memory(version, self.ram, idle_seconds))
        if self.copy_to is not None:
            places.append(Disk(self.copy_to, version, self.copy_limit, idle_seconds))
        return places


def parse_size(name: str, value: str | float) -> int:
    """The size in bytes that the argument of that name gives: a positive number; or text,
    a number and kB, MB, GB, TB (powers of 1000), or KiB, MiB, GiB, TiB (powers of 1024),
    in upper or lower case, with or without the B. Raises ArgumentError if it is neither,
    or less than a byte."""
    num_bytes = math.nan if isinstance(value, str) else value
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip().lower())):
        num_bytes = float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " ")
    if not is_number(num_bytes) or not math.isfinite(num_bytes):
        raise ArgumentError(
            f'{name} is {value!r}: give a size like "4GB" or "512MiB", or a number of bytes'
        )
    if num_bytes < 1:
        raise ArgumentError(
            f"{name} is {value!r}: it must be at least one byte; leave it out for none"
        )
    return int(num_bytes)


def _features_in(copy: LocalCopy, chunk: Frames) -> NDArray[Any]:
    """The features that a copy has of a shard, `[frames, *item_shape]`."""
    features: NDArray[Any] = copy.data[: chunk.num_bytes].view(chunk.dtype).reshape(chunk.shape)
    return features


class CopiedShards(Shards):
    """The shards of a version that are read from copies, in places of which the nearest
    is the first."""

    def __init__(
        self, version: Version, index: Index, check: bool, places: Sequence[Place]
    ) -> None:
        super().__init__(version, index, check=check)
        self.places = places
        self._used_up: set[Place] = set()  # where a copy has failed, and no more are made
        self._warnings: list[str] = []
        self._warned_of: set[type] = set()

    @property
    def where(self) -> str:
        """The places, for messages."""
        return ", ".join(place.where for place in self.places)

    def _find_or_make(self, number: int, chunk: Frames) -> LocalCopy | CopyRefused:
        """The nearest copy of a shard, whose features these are; where a nearer place has
        none, it is made there. A StoreError says that the features cannot be read, or are
        not what was written."""
        copy: LocalCopy | None = None
        nearer: list[Place] = []
        name = self.index.shards[number].rpartition("/")[2]  # without the part of a corpus
        num_bytes = chunk.num_bytes + CHECKSUM_BYTES
        for place in self.places:
            with self._giving_up(place):
                copy = place.find(name, num_bytes)
            if copy is not None:
                break
            nearer.append(place)
        for place in reversed([place for place in nearer if place not in self._used_up]):
            blocks = partial(self._blocks, number, None if copy is None else copy.path)
            with self._giving_up(place):
                refused = place.make(name, num_bytes, blocks)
                if refused is CopyRefused.UNDER_WAY and copy is None:
                    return refused
                copy = place.find(name, num_bytes) or copy
        return copy or CopyRefused.FULL

    def _blocks(self, number: int, copy: Path | None) -> Iterator[memoryview]:
        """The file of a shard's features, or the copy of it, in blocks; it is checked on
        the way."""
        with nullcontext() if copy is None else _blaming_the_copy():
            yield from self.version.shard(self.index.shards[number]).feature_blocks(copy)

    @contextmanager
    def _giving_up(self, place: Place) -> Iterator[None]:
        """Make no more copies in a place in which that fails within."""
        try:
            yield
        except OSError as error:
            self._used_up.add(place)
            self._warn_of_the_end(
                error, f"{error.filename or place.where}: {error.strerror}", place.where
            )

    def _warn_of_the_end(self, error: Exception, reason: str, where: str) -> None:
        rest = f"no more shards are copied to {where}; the others are read from {self.version.path}"
        self._warn(type(error), f"{reason}: {rest}")

    def _warn_of_no_room(self, chunk: Frames, what_is: str) -> None:
        for place in self.places:
            if place not in self._used_up:
                unless = (
                    "raised"
                    if place.limit is not None
                    else "given: without one, a tenth of the disk stays free"
                )
                what = (
                    f"{place.where}: has no room for a shard of {chunk.num_bytes:,} bytes "
                    "besides what is in use"
                )
                rest = (
                    f"{what_is} read from {self.version.path}, unless {place.setting} is {unless}"
                )
                self._warn(CopyRefused, f"{what}: {rest}")

    def _warn(self, kind: type, message: str) -> None:
        """Have the next read warn, once of each kind of trouble: in a thread, it would be
        lost."""
        with changing:
            if kind not in self._warned_of:
                self._warned_of.add(kind)
                self._warnings.append(message)

    def _tell(self) -> None:
        with changing:
            messages, self._warnings = self._warnings, []
        for message in messages:
            warnings.warn(message, FeatcacheWarning, stacklevel=2)


class FolderShards(CopiedShards):
    """A version's shards in a folder, copied in the background once read, and then read
    from the complete copies."""

    def __init__(
        self, version: Version, index: Index, check: bool, places: Sequence[Place]
    ) -> None:
        super().__init__(version, index, check, places)
        # the numbers of shards to be copied, in the order they were asked for
        self._wanted: dict[int, None] = {}
        self._finished: list[tuple[int, LocalCopy, NDArray[Any]]] = []
        with changing:
            _in_folders.add(self)

    @property
    def is_at_work(self) -> bool:
        """Whether there are shards still to be copied in the background."""
        return bool(self._wanted)

    def _slices(
        self, shards: list[int], firsts: list[int], counts: list[int]
    ) -> list[NDArray[Any]]:
        if self._finished or self._warnings or (self._wanted and _thread is None):
            self._collect()
        return super()._slices(shards, firsts, counts)

    def _collect(self) -> None:
        """Take what the thread has copied since the last time: it changes nothing itself
        of what is read. Warn of what went wrong; in a forked child, go on with what its
        parent had asked for."""
        with changing:
            for number, copy, features in self._finished:
                self._features[number], self._copied[number] = features, copy
                self._files.pop(number, None)
            self._finished.clear()
            if self.is_at_work:
                _wake()
        self._tell()

    def _open(self, number: int) -> NDArray[Any]:
        features = super()._open(number)
        with changing:
            self._wanted[number] = None
            _wake()
        return features

    def copy_next(self) -> bool:
        """Copy one of the wanted shards; False if others are copying all of them just
        now. For the thread."""
        for number in list(self._wanted):
            copy: LocalCopy | CopyRefused | None = None
            try:
                chunk = self.version.shard(self.index.shards[number]).open_features()
                copy = self._find_or_make(number, chunk)
            except StoreError as error:
                what = error.what if isinstance(error, DamagedError) else error
                self._warn(type(error), f"{what}; it is not copied, but read in place")
            except Exception as error:  # noqa: BLE001 - in a thread that nobody waits for, nobody would hear of it
                self._used_up.update(self.places)
                self._warn_of_the_end(error, f"{type(error).__name__}: {error}", self.where)
            if copy is CopyRefused.UNDER_WAY:
                continue
            with changing:
                self._wanted.pop(number, None)
                if copy is CopyRefused.FULL and not (self._copied or self._finished):
                    self._warn_of_no_room(chunk, "shards are not copied, but")
                elif not isinstance(copy, CopyRefused | None):
                    self._finished.append((number, copy, _features_in(copy, chunk)))
            return True
        return False

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        copy = self._copied.get(number)
        if copy is not None and copy.path is None:  # in this process's memory
            out[...] = self._features[number][first : first + len(out)]
            return
        with nullcontext() if copy is None else _blaming_the_copy():
            super()._read_into(out, number, first, frames)

    def _open_file(self, number: int) -> Frames:
        copy = self._copied.get(number)
        if copy is not None and copy.path is not None:
            with suppress(FileNotFoundError):  # the folder may go at any time
                opened, features = (
                    Directory(copy.path.parent).open(copy.path.name, None),
                    self._features[number],
                )
                return Frames(opened, features.shape, features.dtype, str(copy.path), None)
            self._copied.pop(number, None)
        return super()._open_file(number)


class ObjectShards(CopiedShards):
    """The shards of a version in an object store, which are copied whole before they are
    read; if there are no places for copies, ranges of them are read.

    What a batch takes of a shard is asked for at once, neighbours in one request, and of
    all its shards side by side. Nothing of features is kept in memory. Raises
    ArgumentError if there is room for less than a shard."""

    def __init__(
        self, version: Version, index: Index, check: bool, places: Sequence[Place]
    ) -> None:
        super().__init__(version, index, check, places)
        self._most_files = max(1, len(index.shards))  # none of them takes a descriptor
        self.begin_anew()
        with changing:
            _in_stores.add(self)
        if math.isfinite(self.room) and self.room < (most := int(self.sizes.max(initial=0))):
            setting = " and ".join(place.setting for place in places)
            why = f"the largest shard of {version.path} has {most:,}, and shards are copied whole"
            remedy = f"give more, or no {setting.replace('copy_limit', 'copy_to')}="
            raise ArgumentError(f"{setting} is {self.room:,} bytes: {why}: {remedy}")

    def begin_anew(self) -> None:
        """What a forked child does when it is there."""
        self._copied: dict[int, LocalCopy] = {}
        self._one_at_a_time: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._fetching = threading.Semaphore(_COPIES_AT_ONCE)
        # the numbers of shards of which this process says itself when they may go
        self._held: set[int] = set()

    @property
    def room(self) -> float:
        """The bytes of the largest place; infinite if one has no limit, or there is none."""
        return max(
            (math.inf if place.limit is None else place.limit for place in self.places),
            default=math.inf,
        )

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """The bytes of the features of each shard, as far as the index tells; int64
        `[shards]`."""
        frames = np.zeros(len(self.index.shards), np.int64)
        ends = np.asarray(self.index.first_frame) + np.asarray(self.index.num_frames)
        np.maximum.at(frames, np.asarray(self.index.shard), ends)
        sizes: NDArray[np.int64] = self.version.info.spec.num_bytes(frames)
        return sizes

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """The context to read such arrays in: they are in memory, or copied from the
        store just now."""
        return nullcontext()

    def hold(self, number: int) -> Callable[[], None] | None:
        """Copy a shard, and keep the copy until the function is called that is returned;
        None if there is no room. A StoreError says that the shard is not what was
        written, or cannot be fetched."""
        if (copy := self._copy_of(number, self._file(number))) is None:
            return None
        with changing:
            release = copy.hold() if len(self._held) < _MOST_HELD else None
            self._held.add(number)
        return partial(self._let_go, number, copy, release)

    def _let_go(self, number: int, copy: LocalCopy, release: Callable[[], None] | None) -> None:
        with changing:
            self._copied.pop(number, None)
            self._held.discard(number)
            if release is not None:
                release()
        copy.let_go()

    def _slices(
        self, shards: list[int], firsts: list[int], counts: list[int]
    ) -> list[NDArray[Any]]:
        ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, first, count in zip(shards, firsts, counts, strict=True):
            ranges[number].append((first, count))
        read = in_parallel(self._of_shard, [*ranges.items()])
        frames_of = dict(zip(ranges, map(iter, read), strict=True))
        return [next(frames_of[number]) for number in shards]

    def _of_shard(self, number_and_ranges: tuple[int, list[tuple[int, int]]]) -> list[NDArray[Any]]:
        number, ranges = number_and_ranges
        firsts, counts = zip(*ranges, strict=True)
        chunk = self._file(number)
        chunk.require_within(firsts, counts)
        if (copy := self._copy_of(number, chunk)) is None:
            self._warn_of_no_room(chunk, "parts of shards are")
        self._tell()  # of what has happened ahead, too
        if copy is None:
            return chunk.read_ranges(firsts, counts)
        features = _features_in(copy, chunk)
        if number not in self._held:
            copy.count(sum(counts), len(features))
        return [features[first : first + count] for first, count in ranges]

    def _copy_of(self, number: int, chunk: Frames) -> LocalCopy | None:
        """The copy of a shard, which is made now if there is none; None if there is no
        room for it."""
        with changing:
            one_at_a_time = self._one_at_a_time[number]
        with one_at_a_time:
            if (copy := self._copied.get(number)) is not None and copy.use():
                return copy
            # of what has been removed, there is room again once it is not mapped any more
            with changing:
                self._copied = {at: one for at, one in self._copied.items() if one.exists()}
            while True:
                with self._fetching:
                    made = self._find_or_make(number, chunk)
                if made is CopyRefused.FULL:
                    return None
                if not isinstance(made, CopyRefused):
                    with changing:
                        self._copied[number] = made
                    return made
                time.sleep(_POLL_SECONDS)

    def _read_into(self, out: NDArray[Any], number: int, first: int, frames: NDArray[Any]) -> None:
        out[...] = frames


def open_copied(version: Version, index: Index, check: bool, tiers: Tiers | None) -> CopiedShards:
    """Open the shards of a version that is copied nearer, or lies in an object store."""
    kind = FolderShards if isinstance(version.path, Path) else ObjectShards
    places = [] if tiers is None else tiers.places(version)
    return kind(version, index, check, places)


@contextmanager
def _blaming_the_copy() -> Iterator[None]:
    """Have damage that is found within be mended by removing the copy."""
    try:
        yield
    except DamagedError as error:
        raise DamagedError(f"{error.what}; remove this copy") from error


def _wake() -> None:
    """Start the thread, if there is none; under the lock."""
    global _thread
    if _thread is None:
        thread = threading.Thread(target=_work, name="featcache-copies", daemon=True)
        # no more threads, or the interpreter is ending: the originals will do
        with suppress(RuntimeError):
            thread.start()
            _thread = thread


def _work() -> None:
    """What the thread does: a shard of each cache in turn, until nothing is wanted."""
    global _thread
    while True:
        with changing:
            at_work = [shards for shards in _in_folders if shards.is_at_work]
            if not at_work:
                _thread = None
                return
        has_copied = [shards.copy_next() for shards in at_work]
        del at_work  # a cache that nobody has any more is not kept for this
        if not any(has_copied):
            time.sleep(_WAIT_SECONDS)


def _in_child() -> None:
    global _thread
    _thread = None
    for shards in _in_stores:
        shards.begin_anew()


os.register_at_fork(after_in_child=_in_child)
