"""Claims: several runs work on one version without a coordinator, and without doing a shard twice.

A run that is about to do a shard locks a file named after the work. A lock dies with its process, so
what a killed run had claimed is free at once. Where the file system has no locks, every claim succeeds:
two runs may then do the same shard, and the second to finish finds it there and drops its own.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType


class Claim:
    """An exclusive lock on a file that exists only while somebody works; release it, or use `with`.

    Attributes:
        locked: whether the file system really holds the lock for us.
    """

    def __init__(self, path: Path) -> None:
        self.locked = False
        self._path = path
        self._descriptor = -1

    def take(self, *, wait: bool = False) -> bool:
        """Try to take the claim; with `wait`, until whoever has it lets go. Returns whether it is ours."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError:  # no locks on this file system
                self._descriptor = descriptor
                return True
            if _is_still(self._path, descriptor):
                self._descriptor, self.locked = descriptor, True
                return True
            os.close(descriptor)  # its last holder removed the file before we got the lock: once more

    def release(self) -> None:
        """Let go, and remove the file."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor, self.locked = -1, False

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
