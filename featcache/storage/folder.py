"""Files in folders of this machine, as a store."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from featcache.errors import DamagedError

__all__ = ["Folder", "open_file"]


def open_file(path: Path) -> FileIO:
    """Open a regular file for reading, or one that a link leads to.

    Raises:
        DamagedError: It is something else: a pipe, a device, a socket, a folder.
        OSError: It is missing, or cannot be opened.
    """
    try:
        # With O_NONBLOCK, a pipe opens at once. To reading a regular file it makes no difference.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV, errno.ELOOP):  # a socket; no such device; links in a circle
            raise DamagedError(f"{path}: damaged: not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path}: damaged: not a regular file")
    file = FileIO(descriptor)
    file.name = path  # for messages, as if `open` had opened it
    return file


class Folder:
    """The store that the machine's file system is; see `featcache.storage.store.Store`. Locations are paths."""

    def get(self, location: Any, check: Callable[[int], None]) -> bytes:
        """All bytes of a file, once `check` has accepted their number."""
        with open_file(location) as file:
            size = os.fstat(file.fileno()).st_size
            check(size)
            return file.read(size + 1) if size else b""

    def get_ranges(self, location: Any, starts: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """Some ranges of a file's bytes."""
        with open_file(location) as file:
            return [memoryview(os.pread(file.fileno(), size, at)) for at, size in zip(starts, sizes, strict=True)]

    def size(self, location: Any) -> int:
        """The number of bytes of a file."""
        with open_file(location) as file:
            return os.fstat(file.fileno()).st_size

    def size_and_range(self, location: Any, start: int, size: int) -> tuple[int, bytes]:
        """The number of bytes of a file, and some of them."""
        with open_file(location) as file:
            return os.fstat(file.fileno()).st_size, os.pread(file.fileno(), size, start)

    def exists(self, location: Any) -> bool:
        """Whether there is a file or a folder."""
        return os.path.lexists(location)

    def names(self, location: Any) -> list[str]:
        """The names in a folder."""
        return os.listdir(location)

    def folders(self, location: Any) -> list[str]:
        """The names of the folders in a folder."""
        with os.scandir(location) as entries:
            return [entry.name for entry in entries if _may_be_folder(entry)]

    def walk(self, location: Any) -> Iterator[tuple[str, int]]:
        """All files below a folder, each with its size."""
        for parent, _, names in os.walk(location):
            for name in names:
                path = os.path.join(parent, name)
                with suppress(FileNotFoundError):  # a run has moved it in the meantime
                    yield os.path.relpath(path, location), os.lstat(path).st_size

    def put(self, location: Any, data: bytes) -> None:
        """Write a file, whole or not at all."""
        path = Path(location)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            _write(beside, data)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def put_blocks(self, location: Any, blocks: Callable[[], Iterator[memoryview]]) -> int:
        """Write a file, whole or not at all, of blocks; returns its size."""
        data = b"".join(blocks())
        self.put(location, data)
        return len(data)

    def put_if_absent(self, location: Any, data: bytes) -> bool:
        """Write a file unless there is one; whether it was written."""
        path = Path(location)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            _write(beside, data)
            os.link(beside, path)
        except FileExistsError:
            return False
        finally:
            beside.unlink(missing_ok=True)
        return True

    def delete(self, location: Any) -> None:
        """Remove a file, if it is there."""
        Path(location).unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links in a circle, a bad sector: a shard that cannot be read
        return True
