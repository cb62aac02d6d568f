"""Says that a run waits for others, and for which: one of them may have been stopped, and never go on."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

from featcache.errors import listing
from featcache.extraction.jobs import VersionJob
from featcache.store.run_records import is_running, request_of
from featcache.store.version import Version

FIRST_SECONDS = 10.0
"""How long a run waits before it says so."""

AGAIN_SECONDS = 300.0
"""How long it then waits before it says so again."""

_log = logging.getLogger(__name__)


class Waiting:
    """Watches how long a run waits for what other runs have claimed."""

    def __init__(self, jobs: Sequence[VersionJob]) -> None:
        self._jobs = jobs
        self._next: float | None = None  # when to speak; None while there is something to do

    def go_on(self) -> None:
        """Still nothing to do: say so, if it has been long enough."""
        now = monotonic()
        if self._next is None:
            self._next = now + FIRST_SECONDS
        elif now >= self._next:
            self._next = now + AGAIN_SECONDS
            _log.info(self._message())

    def end(self) -> None:
        """There is something to do again, or nothing left."""
        self._next = None

    def _message(self) -> str:
        others = dict.fromkeys(other for job in self._jobs for other in _others(job.version, job.run.id))
        who = listing(others) if others else "one that cannot be seen from this machine"
        paths = listing(str(job.version.path) for job in self._jobs)
        return f"{paths}: waiting for another run, which has claimed what is left: {who}"


def _others(version: Version, own: str) -> Iterator[str]:
    """The other runs that are filling a version, each with its process, as far as its record and this machine tell."""
    with suppress(OSError):
        for name in sorted(os.listdir(version.desk / "runs")):
            if name != own and is_running(version, name):
                asked = request_of(version, name)
                host, pid = asked.get("host"), asked.get("pid")
                process = f" (process {pid} on {host}{_state(pid) if host == socket.gethostname() else ''})"
                yield name + (process if isinstance(pid, int) and isinstance(host, str) else "")


def _state(pid: object) -> str:
    """That a process of this machine has been stopped, by SIGSTOP or Ctrl-Z; empty if it has not."""
    with suppress(OSError, IndexError):
        if Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].startswith("T"):
            return f", which has been stopped: kill -CONT {pid} lets it go on, kill -KILL {pid} ends it"
    return ""
