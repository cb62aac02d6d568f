"""Single files outside of a cache: that appear whole or not at all, also after a power cut; and regular ones alone."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from featcache.errors import DamagedError, StoreError
from featcache.storage.work import flush

__all__ = ["open_file", "write_file"]


def write_file(path: Path, data: bytes) -> None:
    """Write a file, in place of one that is there.

    Raises:
        StoreError: It cannot be written. If there was a file of this name, it is still there.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        flush(path.parent)
    except OSError as error:
        with suppress(OSError):  # it was never made, or the disk is read-only by now
            beside.unlink()
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


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
