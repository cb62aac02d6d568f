"""Another Python process with the same modules, at the other end of a connection.

Signals from a terminal or a scheduler do not reach it: it ends when the connection is closed, which a process that
ends in whatever way does.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from featcache import errors
from featcache.errors import FeatcacheError, ending

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END = 10.0

_BY_MESSAGE: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(errors.ArgumentError, errors.ConfigError, errors.ExtractorError, errors.ManifestError, errors.StoreError),
        MemoryError,
    )
}
"""Errors that are made from their message alone."""


class OtherProcess:
    """Starts another process, which is to serve `connection`: it calls the function `main`, given by its name as
    `package.module:function`, with its end of the connection. Its environment is by default that of this process.

    Raises:
        OSError: It cannot be started.
    """

    connection: Connection
    """This end of the connection."""

    def __init__(self, main: str, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        start = (
            "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
            "from multiprocessing.connection import Connection; "
            f"from {module} import {function}; {function}(Connection(int(sys.argv[2])))"
        )
        self.connection, theirs = Pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # which the other process inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", start, json.dumps(sys.path), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no result
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def end(self, seconds: float = _SECONDS_TO_END) -> str:
        """Close the connection, and wait for the end; kill it if it does not come within so many seconds. Returns how
        it ended: a signal's name, or its exit code.
        """
        self.connection.close()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:  # it is still extracting, and nobody waits for that any more
            self._process.kill()
            code = self._process.wait()
        return ending(code)


@dataclass(frozen=True)
class Fault:
    """An error in another process, because not all errors pass through a connection."""

    message: str
    """What the error says; of one that nobody expected, with its traceback."""
    kind: str
    """The name of its class."""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """What passes of an error."""
        if not isinstance(error, FeatcacheError | MemoryError):
            return cls("".join(traceback.format_exception(error)), type(error).__name__)
        kinds = (name for name, kind in _BY_MESSAGE.items() if isinstance(error, kind))
        return cls(str(error), next(kinds, errors.ExtractorError.__name__))

    def error(self) -> Exception:
        """The error, or one with the same exit code that says the same."""
        return _BY_MESSAGE.get(self.kind, RuntimeError)(self.message)

    @property
    def last_line(self) -> str:
        """The last line of the message, which says what happened where there is a traceback."""
        return self.message.strip().rpartition("\n")[2]


def kills_for_memory() -> int:
    """How many processes the system has ended since it started because memory had run out."""
    with suppress(OSError, ValueError), open("/proc/vmstat") as lines:
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
