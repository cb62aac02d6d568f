"""What a store does, and which one a location is in. Everything that reads a version goes through this interface.

What a folder alone can do (map a file, rename a folder, hold a lock) is done where it is needed, with its path: see
`folder_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from featcache.storage.folder import Folder
from featcache.storage.location import Location, ObjectPath
from featcache.storage.objects import Objects

__all__ = ["Store", "store_of"]

_FOLDER = Folder()
_OBJECTS = Objects()


class Store(Protocol):
    """A store: files by their locations. Safe to use from several threads and in forked processes.

    Raises:
        FileNotFoundError: From every method that reads: there is no such file, or no such folder.
        OSError: A folder's file cannot be read or written.
        StoreError: The object store refuses, or cannot be reached.
    """

    def get(self, location: Location, check: Callable[[int], None]) -> bytes:
        """All bytes of a file. `check` is called with their number before memory is asked for, and may raise.

        Raises:
            DamagedError: It is no regular file.
        """

    def get_ranges(self, location: Location, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Some ranges of a file's bytes, read side by side; those beyond its end are cut off, or empty."""

    def size(self, location: Location) -> int:
        """The number of bytes of a file."""

    def size_and_range(self, location: Location, start: int, size: int) -> tuple[int, bytes]:
        """The number of bytes of a file, and some of them; those beyond its end are cut off."""

    def exists(self, location: Location) -> bool:
        """Whether there is a file, or a folder with something in it."""

    def names(self, location: Location) -> list[str]:
        """The names of the files and folders in a folder, in any order."""

    def folders(self, location: Location) -> list[str]:
        """The names of the folders in a folder, in any order; also of what cannot be looked at."""

    def walk(self, location: Location) -> Iterator[tuple[str, int]]:
        """All files below a folder, each with its size: their paths in it, with slashes."""

    def put(self, location: Location, data: bytes) -> None:
        """Write a file, which appears whole or not at all; one that is there is replaced."""

    def put_blocks(self, location: Location, blocks: Callable[[], Iterator[memoryview]]) -> int:
        """Write a file, likewise, of blocks, which are read again if that fails; returns its size. If reading them
        fails, that error is raised, and nothing is written.
        """

    def put_if_absent(self, location: Location, data: bytes) -> bool:
        """Write a file unless there is one; whether it has been written."""

    def delete(self, location: Location) -> None:
        """Remove a file, if it is there."""


def store_of(location: Location) -> Store:
    """The store that a location is in."""
    return _OBJECTS if isinstance(location, ObjectPath) else _FOLDER
