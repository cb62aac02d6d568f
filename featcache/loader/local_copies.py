"""Shards that are read from local copies (see `places`), or from an object store.

**A cache in a folder** is copied in the background, and a shard is read from its copy once
that is complete. One thread in each process makes the copies for all its caches, in the
order in which shards were first read, and ends when there is nothing to do.

**A shard of an object store** is copied whole before anything of it is read, so each byte
is fetched once, however many processes read it. Without room, two kinds of copies go:
copies that nobody holds (see `ShardsAhead`) and nobody has read for a while; and copies of
which the processes together have read as many frames as there are. If all are in use,
ranges are read from the store: copying a shard again for single utterances would fetch far more.

Threads and their locks do not survive a fork: a child begins again when it reads."""

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
from functools import cached_property, partial
from pathlib import Path
from types import NoneType
from typing import Any

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
from featcache.loader.places import CopyRefused, LocalCopy, Place, PlaceOf, changing, memory_folder
from featcache.loader.shards import Shards
from featcache.spec import Ints
from featcache.storage.base import in_parallel
from featcache.storage.directory import Directory
from featcache.version.index import Index
from featcache.version.version import Version

_WAIT_SECONDS = 0.5
"""The time between two looks if other processes are copying all wanted shards."""

_POLL_SECONDS = 0.05
"""The time between two looks for a shard that is read now, and another process copies."""

_COPIES_AT_ONCE = 8
"""Shards that a process fetches at the same time; each takes some blocks of memory."""

_MOST_HELD = 128
"""Copies that a process holds at a time; each takes a file descriptor."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*(?:([kmgt])(i?))?b?", re.ASCII)

_in_folders: weakref.WeakSet[FolderShards] = weakref.WeakSet()
_in_stores: weakref.WeakSet[ObjectShards] = weakref.WeakSet()
_thread: threading.Thread | None = None


def parse_copying(
    ram: str | float | None, copy_to: str | Path | None, copy_limit: str | float | None
) -> list[PlaceOf]:
    """List the places that arguments of `featcache.open` mean, the nearest one first. Raises
    ArgumentError for an invalid size or folder, or a limit without a folder."""
    if copy_limit is not None and copy_to is None:
        raise ArgumentError(f"copy_limit is {copy_limit!r}, but nothing is copied without copy_to=")
    if copy_to == "" or not isinstance(copy_to, (str, os.PathLike, NoneType)):
        raise ArgumentError(f"copy_to is {copy_to!r}: give a folder on a disk of this machine")
    places: list[PlaceOf] = []
    if ram is not None:
        limit = parse_size("ram", ram)
        if limit > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise ArgumentError(f"ram is {limit:,} bytes: more than this machine has")
        places.append(partial(Place, folder=memory_folder(limit), limit=limit, is_memory=True))
    if copy_to is not None:
        refuse_url("copy_to", copy_to)
        disk_limit = None if copy_limit is None else parse_size("copy_limit", copy_limit)
        folder = Path(copy_to).expanduser().absolute()
        places.append(partial(Place, folder=folder, limit=disk_limit))
    return places


def parse_size(name: str, value: str | float) -> int:
    """Return a size in bytes, from a positive number, or from text: a number and kB, MB, GB,
    TB (powers of 1000), or KiB, MiB, GiB, TiB (powers of 1024), in upper or lower case,
    with or without the B. Raises ArgumentError for other values, or less than a byte."""
    num_bytes = _parse_text(value.strip().lower()) if isinstance(value, str) else value
    if not is_number(num_bytes) or not math.isfinite(num_bytes):
        raise ArgumentError(
            f'{name} is {value!r}: give a size like "4GB" or "512MiB", or a number of bytes'
        )
    if num_bytes < 1:
        raise ArgumentError(f"{name} is {value!r}: give at least one byte, or leave it out")
    return int(num_bytes)


def _parse_text(text: str) -> float:
    match = _SIZE.fullmatch(text)
    if match is None:
        return math.nan
    number, prefix, is_binary = match.groups()
    base = 1024 if is_binary else 1000
    num_bytes: float = float(number) * base ** " kmgt".index(prefix or " ")
    return num_bytes


def _features_in(copy: LocalCopy, chunk: Frames) -> NDArray[Any]:
    values: NDArray[Any] = copy.data[: chunk.num_bytes].view(chunk.dtype)
    return values.reshape(chunk.shape)


class CopiedShards(Shards):
    """The shards of a version, read from copies in places, the nearest place first."""

    def __init__(
        self, version: Version, index: Index, check: bool, places: Sequence[Place]
    ) -> None:
        super().__init__(version, index, check=check)
        self.places = places
        self._used_up: set[Place] = set()
        """The places where a copy has failed, and no more are made."""
        self._warnings: list[str] = []
        self._warned_of: set[type] = set()

    def _find_or_make(self, number: int, chunk: Frames) -> LocalCopy | CopyRefused:
        """Return the nearest copy of a shard, whose features are `chunk`, after making it in
        the nearer places."""
        copy: LocalCopy | None = None
        nearer: list[Place] = []
        name = self.index.shards[number].rpartition("/")[2]  # without a corpus part
        num_bytes = chunk.num_bytes + CHECKSUM_BYTES
        for place in self.places:
            with self._giving_up(place):
                copy = place.find(name, num_bytes)
            if copy is not None:
                break
            nearer.append(place)
        for place in reversed(nearer):
            if place in self._used_up:
                continue
            blocks = partial(self._blocks, number, None if copy is None else copy.path)
            with self._giving_up(place):
                refused = place.make(name, num_bytes, blocks)
                if refused is CopyRefused.UNDER_WAY and copy is None:
                    return refused
                copy = place.find(name, num_bytes) or copy
        return copy or CopyRefused.FULL

    def _blocks(self, number: int, copy: Path | None) -> Iterator[memoryview]:
        """Yield the checked blocks of the file of a shard's features, or of its copy."""
        with _blaming(copy):
            yield from self.version.shard(self.index.shards[number]).feature_blocks(copy)

    @contextmanager
    def _giving_up(self, place: Place) -> Iterator[None]:
        """Make no more copies in a place if the block fails."""
        try:
            yield
        except OSError as error:
            self._give_up([place], error, f"{error.filename or place.where}: {error.strerror}")

    def _give_up(self, places: Sequence[Place], error: Exception, reason: str) -> None:
        self._used_up.update(places)
        where = ", ".join(place.where for place in places)
        self._warn(
            type(error),
            f"{reason}: no more shards are copied to {where}; the others are read from "
            f"{self.version.path}",
        )

    def _warn_of_no_room(self, chunk: Frames, what_is: str) -> None:
        for place in self.places:
            if place in self._used_up:
                continue
            remedy = f"{place.setting} is raised"
            if place.limit is None:
                remedy = f"{place.setting} is given: without one, a tenth of the disk stays free"
            self._warn(
                CopyRefused,
                f"{place.where}: has no room for a shard of {chunk.num_bytes:,} bytes besides "
                f"what is in use: {what_is} read from {self.version.path}, unless {remedy}",
            )

    def _warn(self, kind: type, message: str) -> None:
        """Let the next read warn, once of each kind: a warning in a thread would be lost."""
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
    """A version's shards in a folder, copied in the background once read."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wanted: dict[int, None] = {}
        """The numbers of the shards to copy, in the order in which they were read."""
        self._finished: list[tuple[int, LocalCopy, NDArray[Any]]] = []
        """The copies that the thread has made, and the next read begins to use."""
        with changing:
            _in_folders.add(self)

    @property
    def is_at_work(self) -> bool:
        """True if shards are still to be copied in the background."""
        return bool(self._wanted)

    def _slices(self, shards: list[int], firsts: list[int], ends: list[int]) -> list[NDArray[Any]]:
        if self._finished or self._warnings or (self._wanted and _thread is None):
            self._collect()
        return super()._slices(shards, firsts, ends)

    def _collect(self) -> None:
        with changing:
            for number, copy, features in self._finished:
                self._features[number], self._copied[number] = features, copy
                self._files.pop(number, None)
            self._finished.clear()
            if self._wanted:  # also by the parent of a forked child
                _wake()
        self._tell()

    def _open(self, number: int) -> NDArray[Any]:
        features = super()._open(number)
        with changing:
            self._wanted[number] = None
            _wake()
        return features

    def copy_next(self) -> bool:
        """Copy one of the wanted shards, in the thread. Returns False if other processes are
        copying all of them."""
        for number in list(self._wanted):
            copy: LocalCopy | CopyRefused | None = None
            try:
                chunk = self.version.shard(self.index.shards[number]).open_features()
                copy = self._find_or_make(number, chunk)
            except StoreError as error:
                what = error.what if isinstance(error, DamagedError) else error
                self._warn(type(error), f"{what}; it is not copied, but read in place")
            except Exception as error:  # noqa: BLE001 - in a thread, it would be lost
                self._give_up(self.places, error, f"{type(error).__name__}: {error}")
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
        with _blaming(self._copied.get(number)):
            super()._read_into(out, number, first, frames)

    def _open_file(self, number: int) -> Frames:
        copy = self._copied.get(number)
        if copy is not None:
            features = self._features[number]
            with suppress(FileNotFoundError):  # the folder may go at any time
                opened = Directory(copy.path.parent).open(copy.path.name, None)
                return Frames(opened, features.shape, features.dtype, str(copy.path), None)
            self._copied.pop(number, None)
        return super()._open_file(number)


class ObjectShards(CopiedShards):
    """The shards of a version in an object store, copied whole before they are read.
    Without places for copies, ranges of shards are read: all ranges of a batch at the same
    time, neighbours in one request. Raises ArgumentError if there is room for less than a
    shard."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.where = [place.where for place in self.places]
        self._most_files = max(1, len(self.index.shards))  # they take no descriptors
        self.begin_anew()
        with changing:
            _in_stores.add(self)
        if math.isinf(self.room):
            return
        largest = int(self.sizes.max(initial=0))
        if self.room < largest:
            setting = " and ".join(place.setting for place in self.places)
            raise ArgumentError(
                f"{setting} is {self.room:,} bytes: the largest shard of {self.version.path} has "
                f"{largest:,}, and shards are copied whole: give more, or no "
                f"{setting.replace('copy_limit', 'copy_to')}="
            )

    def begin_anew(self) -> None:
        """Forget the copies and locks of the parent process."""
        self._copied: dict[int, LocalCopy] = {}
        self._one_at_a_time: dict[int, threading.Lock] = defaultdict(threading.Lock)
        self._fetching = threading.Semaphore(_COPIES_AT_ONCE)
        self._held: set[int] = set()
        """The numbers of the shards whose copies `hold` keeps."""

    @property
    def room(self) -> float:
        """The bytes of the largest place; infinite without a limit, or without places."""
        return max((place.limit or math.inf for place in self.places), default=math.inf)

    @cached_property
    def sizes(self) -> Ints:
        """The bytes of each shard's features, by the index; int64 `[shards]`."""
        frames = np.zeros(len(self.index.shards), np.int64)
        ends = np.asarray(self.index.first_frame) + np.asarray(self.index.num_frames)
        np.maximum.at(frames, np.asarray(self.index.shard), ends)
        sizes: Ints = self.version.info.spec.num_bytes(frames)
        return sizes

    def read_ahead(self, arrays: Iterable[NDArray[Any]]) -> AbstractContextManager[None]:
        """Return a context for arrays that are in memory already."""
        return nullcontext()

    def hold(self, number: int) -> Callable[[], None] | None:
        """Copy a shard, and keep the copy. Returns the function that lets go of it; None if
        there is no room."""
        copy = self._copy_of(number, self._file(number))
        if copy is None:
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

    def _slices(self, shards: list[int], firsts: list[int], ends: list[int]) -> list[NDArray[Any]]:
        by_shard: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for number, first, end in zip(shards, firsts, ends, strict=True):
            by_shard[number].append((first, end - first))
        read = in_parallel(self._of_shard, [*by_shard.items()])
        frames_of = dict(zip(by_shard, map(iter, read), strict=True))
        return [next(frames_of[number]) for number in shards]

    def _of_shard(self, number_and_ranges: tuple[int, list[tuple[int, int]]]) -> list[NDArray[Any]]:
        number, ranges = number_and_ranges
        firsts, counts = zip(*ranges, strict=True)
        chunk = self._file(number)
        chunk.require_within(firsts, counts)
        copy = self._copy_of(number, chunk)
        if copy is None:
            self._warn_of_no_room(chunk, "parts of shards are")
        self._tell()
        if copy is None:
            return chunk.read_ranges(firsts, counts)
        features = _features_in(copy, chunk)
        if number not in self._held:
            copy.count(sum(counts), len(features))
        return [features[first : first + count] for first, count in ranges]

    def _copy_of(self, number: int, chunk: Frames) -> LocalCopy | None:
        """Return the copy of a shard, after making it if needed; None if there is no room."""
        with changing:
            one_at_a_time = self._one_at_a_time[number]
        with one_at_a_time:
            copy = self._copied.get(number)
            if copy is not None and copy.use():
                return copy
            # The room of removed copies is free once they are not mapped any more.
            with changing:
                self._copied = {
                    other: copy for other, copy in self._copied.items() if copy.exists()
                }
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


def open_copied(
    version: Version, index: Index, check: bool, places: Sequence[PlaceOf]
) -> CopiedShards:
    """Open the shards of a version that is copied nearer, or lies in an object store."""
    kind = FolderShards if isinstance(version.path, Path) else ObjectShards
    return kind(version, index, check, [place_of(version) for place_of in places])


@contextmanager
def _blaming(copy: object) -> Iterator[None]:
    """Let an error about damage say that the copy is to be removed, if it is one."""
    try:
        yield
    except DamagedError as error:
        if copy is None:
            raise
        raise DamagedError(f"{error.what}; remove this copy") from error


def _wake() -> None:
    """Start the thread, if there is none; under the lock."""
    global _thread
    if _thread is None:
        thread = threading.Thread(target=_work, name="featcache-copies", daemon=True)
        # Without more threads, the originals are read.
        with suppress(RuntimeError):
            thread.start()
            _thread = thread


def _work() -> None:
    """Copy a shard of each cache in turn, until nothing is wanted. The thread runs this."""
    global _thread
    while True:
        with changing:
            at_work = [shards for shards in _in_folders if shards.is_at_work]
            if not at_work:
                _thread = None
                return
        has_copied = [shards.copy_next() for shards in at_work]
        del at_work  # so that closed caches are freed
        if not any(has_copied):
            time.sleep(_WAIT_SECONDS)


def _in_child() -> None:
    global _thread
    _thread = None
    for shards in _in_stores:
        shards.begin_anew()


os.register_at_fork(after_in_child=_in_child)
