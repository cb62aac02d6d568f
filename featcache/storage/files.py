"""Single files outside of a cache, that appear whole or not at all, also after a power cut."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from featcache.errors import StoreError
from featcache.storage.work import flush

__all__ = ["write_file"]


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
