"""The interface of stores: a folder, or an object store. Nothing above this room asks
which one it is.

A published folder appears whole or not at all, and never changes. Its name stands for
its content, so two writers of one name write the same bytes."""

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

MARK = "zarr.json"
"""The file that makes a folder published: written last, and removed first."""

DAY_SECONDS = 86400.0
"""The age at which leftovers of unknown writers are removed."""

_ODD = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")

_log = logging.getLogger(__name__)
_untidy: set[Location] = set()
_T = TypeVar("_T")
_U = TypeVar("_U")


class Opened(Protocol):
    """An opened file, read without mapping it, by any number of threads. Every method
    raises what those of `Store` do; FileNotFoundError only if the file was removed from an
    object store since."""

    num_bytes: int

    @property
    def path(self) -> object:
        """Its location, for messages."""

    def read_into(self, out: memoryview, start: int) -> None:
        """Fill `out` with the file's bytes from `start` on."""

    def read_ranges(self, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Read several ranges of the file, side by side."""


class Store(Protocol):
    """Files by their keys: paths below `location`. Safe in threads and forked processes;
    pickled as the location.

    Raises:
        FileNotFoundError: From every method that reads: there is no such file.
        DamagedError: From every method that reads: it is no regular file, has another
            size, or the disk cannot read it.
        StoreError: The file may not be read, the network fails, the disk is full or
            read-only, or a link in the store is on the way to what is written.
    """

    location: Location

    def _place(self, key: str) -> Any:
        """Return the location of a key; the store's own for ""."""
        return self.location / checked_key(key) if key else self.location

    def read(self, key: str, at_most: int) -> bytes:
        """Read a file of at most so many bytes."""

    def open(self, key: str, num_bytes: int | None) -> Opened:
        """Open a file of exactly this size; of any size with None."""

    def blocks(self, key: str, num_bytes: int) -> Iterator[memoryview]:
        """Yield a file of exactly this size in blocks, each valid until the next one."""

    def map(
        self, key: str, num_bytes: int, passed: Callable[[memoryview], object] | None = None
    ) -> NDArray[np.uint8]:
        """Map a file of exactly this size, read-only, uint8 `[num_bytes]`; a remote file is
        fetched first. `passed` gets all bytes before, block by block: so what a disk cannot
        read is an error, and not a signal."""

    def exists(self, key: str) -> bool:
        """Tell whether a file exists, or a folder that is not empty; for the key "", the
        store's own folder."""

    def names(self, folder: str) -> list[str]:
        """List the names of files and published folders in a folder, sorted; none if there
        is no folder. Names that begin with a dot are left out. On a file system, unpublished
        folders are listed too."""

    def walk(self, folder: str = "") -> Iterator[tuple[str, int]]:
        """Yield the keys and sizes of all files below a folder."""

    def put(self, key: str, data: Buffer) -> None:
        """Write or replace a file, which appears whole."""

    def publish(self, files: Mapping[str, Buffer], folder: str) -> None:
        """Write a folder, which appears whole, of files by their paths in it; one of them
        is `MARK`. A folder of this name has the same content, and stays."""

    def remove(self, key: str) -> None:
        """Remove a file or a folder, which disappears as a whole, if it exists."""

    def destroy(self) -> None:
        """Remove everything, and the folder with it: the document first, or all at once.
        Raises StoreError if it is a link, or cannot be removed."""

    def lock(self, who: str) -> AbstractContextManager[None]:
        """Hold the store's lock within a `with` block. Everybody else gets a LockedError
        that names the store and `who`. The lock only saves work: object stores, and file
        systems without locks, give it to everybody."""

    def sweep(self, *, remove: bool = True) -> list[str]:
        """Remove what dead writers have left, as far as possible, and list its keys.
        Without `remove`, only list it."""

    @property
    def marks_folder(self) -> Path:
        """The folder on this machine for marks of what is in flight; made if missing."""


@contextmanager
def tidying(store: Location) -> Iterator[None]:
    """Let removals within fail, since nothing depends on them. The first failure of a
    store is logged."""
    try:
        yield
    except StoreError as error:
        if store not in _untidy:
            _untidy.add(store)
            _log.info("%s: what could be removed stays, and nothing depends on it", error)


def checked_key(key: str) -> str:
    """Return a key if it leads to a file or folder below a store. Raises DamagedError if
    not: keys come from documents, which may be a stranger's."""
    if {"", ".", ".."} & {*key.split("/")} or _ODD.search(key):
        raise DamagedError(f"{key!r}: damaged: does not name a file in a cache")
    return key


def require_size(num_bytes: int, expected: int | None, where: object) -> None:
    """Refuse a file of another size than expected, if a size is."""
    if expected not in (None, num_bytes):
        raise DamagedError(
            f"{where}: damaged: it has {num_bytes:,} bytes, and {expected:,} were written"
        )


def require_at_most(num_bytes: int, at_most: int, where: object) -> None:
    """Refuse a file that is larger than expected."""
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
    """Call `function` for each value, in threads, and list the results in order."""
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
