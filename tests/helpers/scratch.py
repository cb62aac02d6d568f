"""Folders that are quick to write to."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder in memory where there is such a file system: flushing to disk then takes
    no time."""
    memory = Path("/dev/shm")
    parent = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="featcache-", dir=parent) as folder:
        yield Path(folder)
