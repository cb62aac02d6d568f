"""File locks, which end with their process: the only place that calls `flock`.

A forked child shares its parent's descriptors, and with them its locks: those of a parent that was killed would live on
in the child. So a child closes them at once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

__all__ = ["Claim", "Lock", "is_held", "locked", "why_not_shared"]

_own: weakref.WeakSet[Lock] = weakref.WeakSet()
_opening = threading.RLock()


class Lock:
    """An open file or folder, to be locked with `take` until `release`, until nobody refers to it, or until the process
    ends; `flags` are for `os.open`. If it is inherited, forked children hold the lock too, until the last of them ends.

    Raises:
        OSError: The file cannot be opened.
    """

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

        Raises:
            OSError: The file system has no locks.
        """
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
    """Hold the lock of a file, which is made if it is missing; waits for whoever holds it.

    Raises:
        OSError: The file cannot be opened, is a link, or its file system has no locks.
    """
    lock = Lock(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    try:
        lock.take(wait=True)
        yield
    finally:
        lock.release()


def is_held(path: Path, *, alone: bool = False) -> bool:
    """Whether somebody holds the lock of a file or folder; with `alone`, only if it is not a shared one.

    To find out, the lock is taken for a moment: of those who do this without `alone` at once, each may see the others.

    Raises:
        OSError: The file cannot be opened, or its file system has no locks.
    """
    lock = Lock(path, os.O_RDONLY)
    try:
        return not lock.take(shared=alone)
    finally:
        lock.release()


class Claim:
    """A lock on a file that exists only while somebody works: several runs share work without a coordinator.

    Before a run makes a shard, it claims a file named after the work, so that no shard is made twice. The claims of a
    killed run are free at once. If the file system has no locks, every claim succeeds: two runs may then make the same
    shard, and the second to finish finds it in place and drops its own.

    Release it, or use `with`.
    """

    def __init__(self, path: Path) -> None:
        self.locked = False
        """Whether the file system really holds the lock for us."""
        self._path = path
        self._lock: Lock | None = None

    def take(self, *, wait: bool = False) -> bool:
        """Try to take the claim; with `wait`, until whoever has it lets go. Returns whether it is ours."""
        while True:
            with ExitStack() as opened:
                lock = Lock(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
                opened.callback(lock.release)
                is_locked = True
                try:
                    if not lock.take(wait=wait):
                        return False
                except OSError:  # no locks on this file system
                    is_locked = False
                if is_locked and not _is_still(self._path, lock.descriptor):
                    continue  # its last holder removed the file before we got the lock: once more
                self._lock, self.locked = lock, is_locked
                opened.pop_all()
                return True

    def release(self) -> None:
        """Let go, and remove the file, if it can be removed: what holds the claim is the lock."""
        lock, self._lock, self.locked = self._lock, None, False
        if lock is not None and lock.descriptor >= 0:  # which a forked child has not
            with suppress(OSError):
                self._path.unlink()
            lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_LOCAL = {
    "lustre": re.compile(r"localflock"),
    "nfs": re.compile(r"local_lock=(flock|all)|nolock"),
    "nfs4": re.compile(r"local_lock=(flock|all)"),
}
"""By the type of a network file system, the options by which each machine that mounts it has locks of its own."""


def why_not_shared(file: Path, mounts: str | None = None) -> str | None:
    """Why locks do not keep two runs apart on the file system of a file, as far as can be seen; None if they do.

    Two descriptors of one file must not both get its lock, not even in one process; nobody else may lock it meanwhile.
    Whether machines see each other's locks, only the mount's options tell, by default those of `/proc/self/mountinfo`.

    Raises:
        OSError: The file cannot be opened, or locking it fails for another reason than that there are no locks.
    """
    first, second = Lock(file), Lock(file)
    try:
        if first.take() and second.take():
            return "every lock is granted"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return f"there are no locks ({error.strerror})"
    finally:
        first.release()
        second.release()
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
        except OSError:
            return None
    return _why_local(file.resolve(), mounts)


def _why_local(path: Path, mounts: str) -> str | None:
    """The option by which locks are those of each machine alone, on the mount that a path is on; None without one."""
    innermost, kind, options = -1, "", ""
    for line in mounts.splitlines():  # proc(5): 36 35 98:0 /root /place options … - type source options
        front, _, back = line.partition(" - ")
        place, details = front.split(" ")[4:5], back.split(" ")
        if not place or len(details) < 3:
            continue
        folder = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place[0]))
        if path.is_relative_to(folder) and len(folder.parts) >= innermost:  # a later mount hides one of the same place
            innermost, kind, options = len(folder.parts), details[0], f"{front.split(' ')[5]},{details[2]}"
    found = [option for option in options.split(",") if kind in _LOCAL and _LOCAL[kind].fullmatch(option)]
    return f"each machine has locks of its own ({kind} is mounted with {found[0]})" if found else None


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _close_all() -> None:
    for lock in _own:
        lock.release()
    _own.clear()
    _opening.release()


os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_close_all)
