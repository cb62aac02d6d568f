"""File locks, which end with their process: the only place that calls `flock`.

A forked child shares its parent's descriptors, and with them its locks: those of a parent that was killed would live on
in the child. So a child closes them at once.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_own: weakref.WeakSet[Lock] = weakref.WeakSet()
_opening = threading.RLock()


class Lock:
    """An open file or folder, to be locked with `take` until `release`, until nobody refers to it, or until the process
    ends; `flags` are for `os.open`. If it is inherited, forked children hold the lock too, until the last of them ends.
    Raises OSError if the file cannot be opened."""

    def __init__(self, path: Path, flags: int = os.O_RDWR, *, is_inherited: bool = False) -> None:
        self.descriptor = -1
        """The open file's descriptor; -1 after `release`, and in a forked child that does not inherit the lock."""
        with _opening:
            self.descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
            if not is_inherited:
                _own.add(self)

    def __del__(self) -> None:
        self.release()

    def take(self, *, wait: bool = False, shared: bool = False) -> bool:
        """Take the lock, if nobody else holds it; with `wait`, as soon as nobody does. Returns whether it is ours.
        Raises OSError if the file system has no locks."""
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(self.descriptor, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    # Defaults, since at the interpreter's exit the module's own names may be gone.
    def release(self, close: Callable[[int], None] = os.close, opening: threading.RLock = _opening) -> None:
        """Close the file, and with it let go of the lock."""
        with opening:
            if self.descriptor >= 0:
                close(self.descriptor)
                self.descriptor = -1


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is missing; waits for whoever holds it. Raises OSError if the file
    cannot be opened, is a link, or its file system has no locks."""
    lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        lock.take(wait=True)
        yield
    finally:
        lock.release()


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file or folder. To find out, it is taken for a moment. Raises OSError if the
    file cannot be opened, or its file system has no locks."""
    lock = Lock(path, os.O_RDONLY)
    try:
        return not lock.take()
    finally:
        lock.release()


def _close_all() -> None:
    for lock in _own:
        lock.release()
    _own.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_all)
