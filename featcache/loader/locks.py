"""File locks that end with their process, even if it has forked.

A forked child shares its parent's descriptors, and with them the locks: a lock would outlive the parent that was
killed. So the child closes them at once.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

__all__ = ["close_own", "is_held", "open_own"]

_own: set[int] = set()
_opening = threading.RLock()


def open_own(path: Path, flags: int = os.O_RDWR) -> int:
    """Open a file with a descriptor that forked children do not share; `close_own` closes it.

    Raises:
        OSError: it cannot be opened.
    """
    with _opening:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o666)
        _own.add(descriptor)
    return descriptor


def close_own(descriptor: int) -> None:
    """Close what `open_own` opened, and let go of its locks."""
    with _opening:
        _own.discard(descriptor)
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether some process has a lock on a file; whoever takes one just now waits for this.

    Raises:
        OSError: the file cannot be opened, or its file system has no locks.
    """
    descriptor = open_own(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        close_own(descriptor)
    return False


def _close_all() -> None:
    for descriptor in _own:
        os.close(descriptor)
    _own.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_all)
