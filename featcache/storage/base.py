"""The interface of stores: a folder, or an object store. Nothing above this room asks
which one it is.

What is published appears whole or not at all, and a folder that is published never
changes: its name says what is in it, so that two writers of the same name write the same
bytes."""

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from featcache.errors import DamagedError, StoreError
from featcache.storage.location import Location

Buffer = bytes | bytearray | memoryview
"""Bytes to be written."""

MARK = "zarr.json"
"""The file by which a published folder is there: it is written last, and removed first."""

_ODD = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

_log = logging.getLogger(__name__)
_untidy: set[Location] = set()
_T = TypeVar("_T")
_U = TypeVar("_U")


class Opened(Protocol):
    """An opened file, read where it lies, by any number of threads. What the disk refuses
    is an error, never a signal.

    Raises:
        DamagedError: From every method: the file ends too early, or the disk cannot read it.
        StoreError: The file may not be read, or the network fails.
        FileNotFoundError: The file is in an object store, and has been removed since it
            was opened.
    """

    num_bytes: int
    """The size of the file."""

    def read_into(self, out: memoryview, start: int) -> None:
        """Fill `out` with the file's bytes from `start` on."""

    def read_ranges(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Some ranges of the file's bytes, read side by side."""


class Store(Protocol):
    """Files by their keys: paths below `location`. Safe in threads and forked processes;
    pickled as the location.

    Raises:
        FileNotFoundError: From every method that reads: there is no such file.
        DamagedError: From every method that reads: it is no regular file, it has another
            size than was said, or the disk cannot read it.
        StoreError: The file may not be read, the network fails, or (from what writes) the
            disk is full or read-only, or the way leads over a link that lies in the
            store.
    """

    @property
    def location(self) -> Location:
        """The place of the files."""

    def read(self, key: str, at_most: int) -> bytes:
        """All bytes of a file, which has at most so many."""

    def open(self, key: str, num_bytes: int | None) -> Opened:
        """A file of exactly this size, or with None of any, to be read piece by piece."""

    def blocks(self, key: str, num_bytes: int) -> Iterator[memoryview]:
        """The bytes of a file of exactly this size, in blocks that are valid until the
        next one."""

    def map(
        self, key: str, num_bytes: int, passed: Callable[[memoryview], object] | None = None
    ) -> NDArray[np.uint8]:
        """A file of exactly this size, mapped and read-only, uint8 `[num_bytes]`. What is
        remote is fetched first. All bytes pass `passed` before, block by block, so that
        what a disk cannot read is an error, and not a signal."""

    def exists(self, key: str) -> bool:
        """Tell whether a file exists, or a folder with something in it; without a key,
        the store's own folder."""

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted: of files, and of folders that have been
        published; none if there is no folder. Names that begin with a dot are left out.
        On a file system, folders count that have not been published, too."""

    def walk(self, folder: str = "") -> Iterator[tuple[str, int]]:
        """The keys of all files below a folder, and their sizes."""

    def put(self, key: str, data: Buffer) -> None:
        """Write a file, which appears whole, in place of the one that is there."""

    def publish(self, files: Mapping[str, Buffer], folder: str) -> None:
        """Write a folder, which appears whole, of files by their paths in it; one of them
        is `MARK`. If there is one of this name, it has the same content, and stays."""

    def remove(self, key: str) -> None:
        """Remove a file or a folder, which disappears as a whole; nothing happens if it
        is not there."""

    def destroy(self) -> None:
        """Remove everything, and the folder with it: the document first, or all at once.
        Raises StoreError if it is a link, or something of it cannot be removed."""

    def lock(self, who: str) -> AbstractContextManager[None]:
        """The one lock of the store, for the time of a `with` block. It saves work, and
        nothing depends on it: a file system without locks gives it to everybody, and so
        does an object store.

        Others are told `who` has it: they get a LockedError, whose message names the
        store, and says that."""

    def sweep(self, *, remove: bool = True) -> list[str]:
        """Remove what dead writers have left, as far as possible, and list its keys.
        Without `remove`, only list it."""

    @property
    def marks_folder(self) -> Path:
        """A folder of this machine, for what others need not see: marks of what is in
        flight. It is made if missing."""


@contextmanager
def tidying(store: Location) -> Iterator[None]:
    """Within, what nothing depends on is removed. Where that fails, it stays, which is
    said once a store."""
    try:
        yield
    except StoreError as error:
        if store not in _untidy:
            _untidy.add(store)
            _log.info("%s: what could be removed stays, and nothing depends on it", error)


def checked_key(key: str) -> str:
    """A key, if it leads to a file or folder below a store. Raises DamagedError if it
    leads outside or nowhere: keys come from documents, which may be a stranger's."""
    if {"", ".", ".."} & {*key.split("/")} or _ODD.search(key):
        raise DamagedError(f"{key!r}: damaged: does not name a file in a cache")
    return key


def require_size(num_bytes: int, expected: int | None, where: object) -> None:
    """Refuse a file that has not exactly the size that is expected, if any is."""
    if expected not in (None, num_bytes):
        raise DamagedError(
            f"{where}: damaged: it has {num_bytes:,} bytes, and {expected:,} were written"
        )


def require_at_most(num_bytes: int, at_most: int, where: object) -> None:
    """Refuse a file that is larger than what is read."""
    if num_bytes > at_most:
        raise DamagedError(
            f"{where}: damaged: {num_bytes:,} bytes, and at most {at_most:,} are expected"
        )


def require_within(
    starts: Sequence[int], sizes: Sequence[int], num_bytes: int, where: object
) -> None:
    """Refuse ranges beyond the end of a file, before memory is asked for."""
    end = max(map(operator.add, starts, sizes), default=0)
    if end > num_bytes:
        raise DamagedError(f"{where}: damaged: it ends before byte {end:,}")


def in_parallel(function: Callable[[_T], _U], values: Sequence[_T], threads: int = 64) -> list[_U]:
    """`function` of each value; requests are waited for side by side."""
    if len(values) < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor(min(threads, len(values))) as pool:
        try:
            results: Iterator[_U] = pool.map(function, values)
        except RuntimeError:  # no more threads can be started
            results = map(function, values)
        return list(results)


def as_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data
