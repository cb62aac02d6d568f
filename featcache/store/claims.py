"""Claims: several runs work on one version without a coordinator, and without doing a shard twice.

Before a run makes a shard, it locks a file named after the work. A lock ends with its process, so the claims
of a killed run are free at once. If the file system has no locks, every claim succeeds: two runs may then
make the same shard, and the second to finish finds it in place and drops its own.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
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
            with ExitStack() as opened:
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                opened.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
                except BlockingIOError:
                    return False
                except OSError:
                    locked = False  # no locks on this file system
                else:
                    locked = True
                    if not _is_still(self._path, descriptor):
                        continue  # its last holder removed the file before we got the lock: once more
                self._descriptor, self.locked = descriptor, locked
                opened.pop_all()
                return True

    def release(self) -> None:
        """Let go, and remove the file, if it can be removed: what holds the claim is the lock."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink()
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
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
