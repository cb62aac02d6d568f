"""What killed processes leave behind: names that say who is writing, and which of them are of the dead.

Whatever is being written has a temporary name, `<what>.<owner>.<8 hex>`, whose owner is a process:
`<host>-<boot>-<pid namespace>-<pid>-<start>`. Locks alone cannot tell who is alive: on some file systems, each machine
has its own, and every lock of another machine's seems to be free.

What has such a name is a leftover if

* its process ran here, in this boot of this machine and among the processes that are seen from here, and has ended;
* or it ran here in an earlier boot, and nothing in it is younger than this boot;
* or it ran elsewhere, and nothing in it has changed for a day. The same holds for names without an owner, which earlier
  featcache gave.

Times are compared by the clock of the file system, which may be another machine's.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from pathlib import Path

from featcache.store.checksums import hex_crc32c

_DAY_SECONDS = 86400.0
_TEMPORARY = re.compile(r"(?P<what>.+?)(\.(?P<owner>\w+-[0-9a-f]{8}-\d+-\d+-\d+))?\.[0-9a-f]{8}")
_HOST_CHARACTERS = 24


@dataclass(frozen=True)
class Owner:
    """A process, as it can be told apart from all others of all machines."""

    host: str
    """The machine's name, shortened, and a checksum of the whole name."""
    boot: str
    """The first 8 hex digits of the kernel's id of this boot."""
    namespace: str
    """The number of the pid namespace: what runs in another container is not seen from here."""
    pid: str
    """The process's number."""
    start: str
    """When it began, in ticks of the clock since the boot: numbers of processes come again."""

    @classmethod
    def here(cls) -> Owner:
        """This process."""
        return _owner(os.getpid())

    def __str__(self) -> str:
        return "-".join(astuple(self))

    def is_seen_from(self, other: Owner) -> bool:
        """Whether the other process, if it runs, would see this one if that ran too."""
        return (self.host, self.boot, self.namespace) == (other.host, other.boot, other.namespace)

    def runs(self) -> bool:
        """Whether the process, which is to be seen from here, is still there."""
        start = _start_of(self.pid)
        if start is not None:
            return start == self.start
        try:  # it has ended, or /proc hides other users' processes
            os.kill(int(self.pid), 0)
        except (ProcessLookupError, OverflowError):
            return False
        except OSError:  # it is another user's
            pass
        return True


def temporary_name(what: str) -> str:
    """A fresh name for something while this process writes it."""
    return f"{what}.{Owner.here()}.{uuid.uuid4().hex[:8]}"


def leftovers(folder: Path, is_temporary: Callable[[str], bool]) -> list[str]:
    """The names in a folder of what killed processes have left there; `is_temporary` tells which names are given there
    to what is being written.

    Raises:
        OSError: The folder cannot be read.
    """
    names = [entry.name for entry in os.scandir(folder) if is_temporary(entry.name)]
    if not names:
        return []
    clock = _Clock(folder)
    return [name for name in names if _is_leftover(folder / name, clock)]


def what_of(name: str) -> str:
    """What a temporary name is the name of; the name itself if it is none."""
    match = _TEMPORARY.fullmatch(name)
    return match["what"] if match else name


def _is_leftover(path: Path, clock: _Clock) -> bool:
    match = _TEMPORARY.fullmatch(path.name)
    if match is None:
        return False
    here = Owner.here()
    owner = Owner(*match["owner"].split("-")) if match["owner"] else None
    with suppress(OSError):  # it is gone, or the disk is read-only: it is not ours to remove
        if owner is not None and owner.is_seen_from(here):
            return not owner.runs()
        changed = max(_changes(path))
        if owner is not None and owner.host == here.host and owner.boot != here.boot and changed < clock.boot:
            return True
        return clock.now - changed > _DAY_SECONDS
    return False


def _changes(path: Path) -> Iterator[float]:
    """When a file, or a folder and everything in it, last changed."""
    yield path.lstat().st_mtime
    if path.is_dir() and not path.is_symlink():
        for parent, folders, files in os.walk(path):
            for name in (*folders, *files):
                with suppress(FileNotFoundError):
                    yield os.lstat(os.path.join(parent, name)).st_mtime


class _Clock:
    """The clock of a folder's file system, which is asked when it is needed, by writing there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def now(self) -> float:
        """Seconds since 1970."""
        path = self._folder / f".clock{temporary_name('')}"
        try:
            path.touch(exist_ok=False)
            return path.lstat().st_mtime
        finally:
            path.unlink(missing_ok=True)

    @cached_property
    def boot(self) -> float:
        """When this machine was started; a second early, since file systems round."""
        return self.now - time.clock_gettime(time.CLOCK_BOOTTIME) - 1


@cache
def _owner(pid: int) -> Owner:
    return Owner(_host(), _boot(), _namespace(), str(pid), _start_of(str(pid)) or "0")


def _host() -> str:
    name = os.uname().nodename
    return re.sub(r"\W", "_", name, flags=re.ASCII)[:_HOST_CHARACTERS] + "_" + hex_crc32c(name.encode())


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return "0" * 8


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _start_of(pid: str) -> str | None:
    """When a process began, by its `stat`; empty if it is dead and its parent has not noticed, None if it is not there.

    The fields are counted from behind the command's name, which may hold anything.
    """
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return "" if state in "ZX" else fields[18]
