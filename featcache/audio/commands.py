"""Audio that a command prints, as those in Kaldi's `wav.scp`: `sph2pipe -f wav a.sph |`.

A command runs only if the user has allowed it, and if his manifest names it (`featcache.trust`). It needs a shell only
if it has characters that mean something to one. What it prints is kept in a file without a name until it is decoded.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import subprocess
import tempfile
from contextlib import suppress
from typing import IO

from featcache.audio.remote import Fetched, FileStamp
from featcache.errors import AudioError, Reason
from featcache.manifest.audio_locations import Command
from featcache.trust import command_is_allowed

_FOR_A_SHELL = re.compile(r"[|&;<>()$`*?\[\]{}#~\n]|^\s*\w+=")
_MOST_SECONDS = 3600
_MOST_BYTES = 8 << 30
_SHOWN = 200


def run_command(command: Command) -> Fetched:
    """Run a command, and keep what it prints.

    Raises:
        AudioError: It is not allowed, does not run, fails, prints nothing, or does not end within an hour.
    """
    if not command_is_allowed(command):
        message = "is a command, which runs only with --allow-commands, and if the manifest that is given names it"
        raise AudioError(Reason.FILE_UNREADABLE, message)
    printed = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (Fetched closes it)
    try:
        with tempfile.TemporaryFile() as errors:
            _run(_arguments(command), printed, errors)
        size = os.fstat(printed.fileno()).st_size
        if size == 0:
            raise AudioError(Reason.EMPTY, "the command prints nothing")
        return Fetched(FileStamp(size, 0), file=printed)
    except BaseException:
        printed.close()
        raise


def _arguments(command: Command) -> list[str]:
    text = command.rstrip()[:-1]
    with suppress(ValueError):  # a quote that is not closed
        if not _FOR_A_SHELL.search(text) and (arguments := shlex.split(text)):
            return arguments
    return ["sh", "-c", text]


def _run(arguments: list[str], printed: IO[bytes], errors: IO[bytes]) -> None:
    try:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=printed, stderr=errors, start_new_session=True
        )
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise AudioError(Reason.FILE_UNREADABLE, f"the command does not run: {arguments[0]}: {what}") from error
    try:
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_MOST_BYTES, _MOST_BYTES))
        code = process.wait(_MOST_SECONDS)
    except subprocess.TimeoutExpired as error:
        message = f"the command has not ended after {_MOST_SECONDS:,} s"
        raise AudioError(Reason.FILE_UNREADABLE, message) from error
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own, so all that it has started
            process.wait()
    if code:
        ended = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        raise AudioError(Reason.FILE_UNREADABLE, f"the command ends with {ended}{_last_line(errors)}")


def _last_line(errors: IO[bytes]) -> str:
    """The last line that a command wrote to stderr, as the end of a message."""
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - 4 * _SHOWN))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:_SHOWN]}" if lines else ""
