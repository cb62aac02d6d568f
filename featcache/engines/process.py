"""Another Python process with the same modules, over a connection. Signals of a terminal
or scheduler do not reach it: it ends with the connection."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from ctypes import CDLL
from dataclasses import dataclass
from multiprocessing import Pipe, current_process, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import Any, Self

from featcache import errors
from featcache.config import Config
from featcache.device import Device
from featcache.errors import FeatcacheError, ManifestError, counted, ending
from featcache.extraction.audio_files import paths_there
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.jobs import PROGRESS_THREAD, JobGroup
from featcache.manifest.audio_locations import (
    AudioLocation,
    allow_commands,
    allowed_commands,
    locate,
)
from featcache.storage.location import Location
from featcache.trust import allow_remote_code, remote_code_is_allowed
from featcache.version.version import Version

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END = 10.0

_SECONDS_TO_COMMIT = 30
"""The seconds that a process has after its parent's end. Also the number of a signal, see
`end_with_parent`."""

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

_HARMLESS_THREADS = {"MainThread", "zarr_io", PROGRESS_THREAD}

_BY_MESSAGE = (
    errors.ArgumentError,
    errors.ConfigError,
    errors.ManifestError,
    errors.StoreError,
    MemoryError,
)
"""Errors that pass through a connection; others become an ExtractorError."""


class OtherProcess:
    """Starts another process, which calls the function `main`, given as
    `package.module:function`, with its end of `connection`. Raises OSError if it cannot
    be started."""

    def __init__(self, main: str, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        self.connection, other_end = Pipe()
        file = other_end.fileno()
        program = "; ".join(
            [
                f"import sys; sys.path[:] = {sys.path!a}",
                "from multiprocessing.connection import Connection",
                f"from {module} import {function}",
                f"{function}(Connection({file}))",
            ]
        )
        command = [sys.executable, "-P", "-c", program]
        with _starting(self.connection, other_end):
            # What a library prints is no result, and goes to stderr.
            self._process = Popen(
                command, stdin=DEVNULL, stdout=2, pass_fds=[file], env=environment
            )

    def has_ended(self) -> bool:
        """Tell whether the process has ended, and nothing of it is left to receive. The
        connection does not tell while a process that it has forked lives."""
        return self._process.poll() is not None and not self.connection.poll()

    def end(self) -> str:
        """Close the connection, and wait for the end, or kill the process. Returns how it
        ended: a signal's name, or its exit code."""
        self.connection.close()
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return ending(code)


class ForkedProcess:
    """Forks this process. The child has its modules in common memory, imports nothing
    again, and calls `main` with its end of `connection`. Raises OSError if it cannot be
    forked.

    Args:
        others: Connections of this process that the child closes, so that they end with
            this process.
    """

    def __init__(
        self, main: Callable[[Connection], None], others: Iterable[Connection] = ()
    ) -> None:
        self.connection, other_end = Pipe()
        kept = [self.connection, *others]
        self._process = get_context("fork").Process(target=_child, args=(main, other_end, kept))
        with _starting(self.connection, other_end), warnings.catch_warnings():
            # Python 3.12 warns of any thread. See `can_fork`.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()

    def has_ended(self) -> bool:
        """See `OtherProcess`."""
        return self._process.exitcode is not None and not self.connection.poll()

    def end(self) -> str:
        """See `OtherProcess`."""
        self.connection.close()
        if self._process.exitcode is None:
            self._process.join(_SECONDS_TO_END)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        return ending(self._process.exitcode or 0)


def _child(
    main: Callable[[Connection], None], connection: Connection, others: Sequence[Connection]
) -> None:
    for other in others:
        other.close()
    os.dup2(2, 1)  # what a library prints is no result
    main(connection)


def end_with_parent() -> None:
    """Have the kernel end this process half a minute after its parent, even if it does not
    return to the interpreter."""
    libc = CDLL(None)
    # At the parent's end, the kernel sends signal 30 (SIGPWR, which is free). The C library
    # calls `alarm` with the signal's number: SIGALRM follows after 30 seconds.
    libc.signal(_SECONDS_TO_COMMIT, libc.alarm)
    libc.prctl(_PR_SET_PDEATHSIG, _SECONDS_TO_COMMIT)


def can_fork() -> bool:
    """Return True if a forked child of this process can extract.

    It cannot if it lacks threads that may hold a lock, such as those of obstore. No child uses
    zarr, which a program may have imported. A daemon of multiprocessing may have no children."""
    others = {thread.name for thread in threading.enumerate()} - _HARMLESS_THREADS
    return not (others or "obstore" in sys.modules or current_process().daemon)


@contextmanager
def _starting(connection: Connection, other_end: Connection) -> Iterator[None]:
    """Block signals of a terminal or scheduler while a process starts, which inherits
    that. Closes its end here, and after an error the connection."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    except BaseException:
        connection.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        other_end.close()


def passable(error: BaseException) -> Exception:
    """Return an error that passes through a connection, with the same exit code and
    message; an unexpected one has its traceback."""
    if errors.NO_THREAD in str(error):
        return MemoryError(errors.NO_THREAD)
    if not isinstance(error, FeatcacheError | MemoryError):
        return RuntimeError("".join(traceback.format_exception(error)))
    if isinstance(error, errors.MissingDependencyError):
        return errors.ConfigError(str(error))
    kinds = (kind for kind in _BY_MESSAGE if isinstance(error, kind))
    return next(kinds, errors.ExtractorError)(str(error))


def last_line(error: object) -> str:
    """Return the last line of an error, which names the cause after a traceback."""
    return str(error).strip().rpartition("\n")[2]


def kills_for_memory() -> int:
    """Count the processes that the system has killed because memory had run out."""
    with suppress(OSError, ValueError), open("/proc/vmstat") as lines:
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    return 0


@dataclass(frozen=True)
class Setup:
    """The configs of a group of versions, and where their audio is."""

    root: AudioLocation
    """The root of relative paths."""
    paths_there: Sequence[str]
    """The paths of some files that exist where the run was planned."""
    configs: Sequence[Config]
    source: Location | None
    allows_remote_code: bool
    allowed_commands: frozenset[str]
    cpu_batch_seconds: float
    """Seconds of audio, about, that a worker extracts at once on a CPU."""

    @classmethod
    def of(cls, group: JobGroup, **more: Any) -> Self:
        """Return the setup of a group, for processes whose current folder may be another.
        `more` are the fields of a subclass."""
        return cls(
            root=group.root.absolute() if isinstance(group.root, Path) else group.root,
            paths_there=paths_there(group.root, group.some_paths),
            configs=[config.config for config in group.configs],
            source=None if group.source is None else group.source.version.path.absolute(),
            allows_remote_code=remote_code_is_allowed(),
            allowed_commands=allowed_commands(),
            cpu_batch_seconds=group.batch_seconds,
            **more,
        )

    def batch_seconds(self, device: Device) -> float:
        """Return the seconds of audio, about, that a worker extracts at once."""
        return device.batch_seconds if device.is_cuda else self.cpu_batch_seconds

    def build(self, device: Device) -> tuple[list[BuiltConfig], SourceVersion | None]:
        """Prepare this process for the extractors, and open the source. Raises
        ManifestError if none of the audio files is there."""
        if self.paths_there and not paths_there(self.root, self.paths_there):
            raise ManifestError(
                f"{socket.gethostname()}: has none of "
                f"{counted(len(self.paths_there), 'audio file')}, such as "
                f"{locate(self.root, self.paths_there[0])}: share their file system, or use URLs"
            )
        if self.allows_remote_code:
            allow_remote_code()
        allow_commands(self.allowed_commands)
        source = None if self.source is None else SourceVersion(Version.open(self.source))
        return [BuiltConfig(config, device) for config in self.configs], source
