"""Another Python process with the same modules, over a connection: what it needs to
extract alike, and how errors pass.

Signals of a terminal or scheduler do not reach it: it ends with the connection, which
ends with this process."""

from __future__ import annotations

import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from subprocess import DEVNULL, Popen, TimeoutExpired

from featcache import errors
from featcache.config import Config
from featcache.device import Device
from featcache.errors import FeatcacheError, ManifestError, counted, ending
from featcache.extraction.audio_files import paths_there
from featcache.extraction.from_version import SourceVersion
from featcache.extraction.jobs import JobGroup
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest.audio_locations import AudioLocation, locate
from featcache.storage.location import Location
from featcache.trust import (
    allow_commands,
    allow_remote_code,
    allowed_commands,
    remote_code_is_allowed,
)
from featcache.version.version import Version

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_TO_END = 10.0

_BY_MESSAGE = (
    errors.ArgumentError,
    errors.ConfigError,
    errors.ManifestError,
    errors.StoreError,
    MemoryError,
)
"""Errors that are made from their message alone, and so pass through a connection; others
become an ExtractorError."""


class OtherProcess:
    """Starts another process, which is to serve `connection`: it calls the function
    `main`, given by its name as `package.module:function`, with its end of the
    connection. Its environment is by default that of this process. Raises OSError if it
    cannot be started."""

    def __init__(self, main: str, environment: Mapping[str, str] | None = None) -> None:
        module, _, function = main.partition(":")
        self.connection, theirs = Pipe()  # this end of the connection, and the other one
        connect = (
            "from multiprocessing.connection import Connection; theirs = "
            f"Connection({theirs.fileno()})"
        )
        serve = f"from {module} import {function}; {function}(theirs)"
        command = [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path[:] = {sys.path!a}; {connect}; {serve}",
        ]
        # which the other process inherits
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            # What a library prints is no result, and goes to stderr.
            self._process = Popen(
                command, stdin=DEVNULL, stdout=2, pass_fds=[theirs.fileno()], env=environment
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def end(self) -> str:
        """Close the connection, and wait for the end; kill the process if it does not
        come soon. Returns how it ended: a signal's name, or its exit code."""
        self.connection.close()
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except TimeoutExpired:  # it is still extracting, and nobody waits for that any more
            self._process.kill()
            code = self._process.wait()
        return ending(code)


def passable(error: BaseException) -> Exception:
    """An error that passes through a connection, which not all do: it has the same exit
    code and says the same; instead of one that nobody expected, with its traceback."""
    if not isinstance(error, FeatcacheError | MemoryError):
        return RuntimeError("".join(traceback.format_exception(error)))
    if isinstance(error, errors.MissingDependencyError):
        return errors.ConfigError(str(error))
    kinds = (kind for kind in _BY_MESSAGE if isinstance(error, kind))
    return next(kinds, errors.ExtractorError)(str(error))


def last_line(error: object) -> str:
    """The last line of an error, which says what happened where there is a traceback."""
    return str(error).strip().rpartition("\n")[2]


def kills_for_memory() -> int:
    """How many processes the system has ended since it started because memory had run out."""
    with suppress(OSError, ValueError), open("/proc/vmstat") as lines:
        return int(dict(line.split() for line in lines).get("oom_kill", 0))
    return 0


@dataclass(frozen=True)
class Setup:
    """The configs of a group of versions, and where their audio is."""

    root: AudioLocation
    """What paths of audio files are relative to."""
    paths_there: Sequence[str]
    """The paths of some files that are there where the run was planned; empty if they are
    at URLs."""
    configs: Sequence[Config]
    source: Location | None
    """The place of the version whose features are used instead of audio."""
    allows_remote_code: bool
    """Whether `--trust-remote-code` was given."""
    allowed_commands: frozenset[str]
    """The manifest's commands, if `--allow-commands` was given."""
    cpu_batch_seconds: float
    """About how many seconds of audio a worker extracts at once, if it does so on a CPU."""

    @classmethod
    def of(cls, group: JobGroup) -> Setup:
        """That of a group, for processes whose current folder may be another."""
        root = group.root.absolute() if isinstance(group.root, Path) else group.root
        there = paths_there(group.root, group.some_paths)
        configs = [config.config for config in group.configs]
        source = None if group.source is None else group.source.version.path.absolute()
        batch_seconds = group.device.batch_seconds
        return cls(
            root,
            there,
            configs,
            source,
            remote_code_is_allowed(),
            allowed_commands(),
            batch_seconds,
        )

    def build(self, device: Device) -> tuple[list[BuiltConfig], SourceVersion | None]:
        """Prepare this process for the extractors, and open the version that they extract
        from.

        Raises:
            ManifestError: None of the audio files is there.
            StoreError: That version cannot be opened.
        """
        if self.paths_there and not paths_there(self.root, self.paths_there):
            files = (
                f"{counted(len(self.paths_there), 'audio file')}, such as "
                f"{locate(self.root, self.paths_there[0])}"
            )
            raise ManifestError(
                f"{socket.gethostname()}: has none of {files}: share their file system, or use URLs"
            )
        if self.allows_remote_code:
            allow_remote_code()
        allow_commands(self.allowed_commands)
        source = None if self.source is None else SourceVersion(Version.open(self.source))
        if not device.is_cuda:
            device.batch_seconds = self.cpu_batch_seconds
        return [BuiltConfig(config, device) for config in self.configs], source
