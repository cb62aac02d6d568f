"""Audio that a command prints, as in Kaldi's `wav.scp`: `sph2pipe -f wav a.sph |`.

A command leads its own process group, so that it can be ended with all its children."""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import time
from contextlib import suppress
from subprocess import DEVNULL, Popen, TimeoutExpired
from typing import IO

from featcache.audio.remote import Fetched, FileStamp, Wait, kept_on_disk
from featcache.errors import AudioError, Reason, ending
from featcache.manifest.audio_locations import Command, allowed_commands

_FOR_A_SHELL = re.compile(r"[|&;<>()$`*?\[\]{}#~\n]|^\s*\w+=")
_MOST_SECONDS = 3600
_MOST_BYTES = 8 << 30
_SHOWN = 200
_FINISHED_SECONDS = 2.0  # a run that is being stopped waits so long for a command
_POLL_SECONDS = 0.2

_running: set[int] = set()  # the process groups of the commands that run


def run_command(command: Command, wait: Wait = time.sleep) -> Fetched:
    """Run a command, and keep its output. Raises AudioError if it is not allowed, does not
    run, fails, prints nothing, or does not end within an hour; or the disk is full."""
    if command not in allowed_commands():
        what = "a command needs --allow-commands, and a manifest that names it"
        raise AudioError(Reason.FILE_UNREADABLE, what)
    printed = kept_on_disk(())
    try:
        with kept_on_disk(()) as errors:
            _run(command, printed, errors, wait)
        size = os.fstat(printed.fileno()).st_size
        if size == 0:
            raise AudioError(Reason.EMPTY, "the command prints nothing")
        return Fetched(FileStamp(size, 0), file=printed)
    except BaseException:
        printed.close()
        raise


def kill_commands() -> None:
    """Kill the running commands, for a process that is about to end."""
    for group in tuple(_running):
        _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):  # all of it has ended
        os.killpg(group, signal.SIGKILL)


def _arguments(command: Command) -> list[str]:
    text = command.rstrip()[:-1]
    with suppress(ValueError):  # a quote that is not closed
        arguments = [] if _FOR_A_SHELL.search(text) else shlex.split(text)
        if arguments:
            return arguments
    return ["sh", "-c", text]


def _run(command: Command, printed: IO[bytes], errors: IO[bytes], wait: Wait) -> None:
    arguments = _arguments(command)
    try:
        process = Popen(
            arguments, stdin=DEVNULL, stdout=printed, stderr=errors, start_new_session=True
        )
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        what = f"the command does not run: {arguments[0]}: {why}"
        raise AudioError(Reason.FILE_UNREADABLE, what) from error
    _running.add(process.pid)
    started = time.monotonic()
    try:
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_MOST_BYTES, _MOST_BYTES))
        while process.poll() is None:
            seconds = time.monotonic() - started
            if seconds > _MOST_SECONDS:
                what = f"the command has not ended after {_MOST_SECONDS:,} s"
                raise AudioError(Reason.FILE_UNREADABLE, what)
            if seconds > _FINISHED_SECONDS:
                wait(0.0)
            with suppress(TimeoutExpired):
                process.wait(_POLL_SECONDS)
    finally:
        if process.poll() is None:
            _kill(process.pid)
            process.wait()
        _running.discard(process.pid)
    if process.returncode:
        start = max(0, os.fstat(errors.fileno()).st_size - 4 * _SHOWN)
        tail = os.pread(errors.fileno(), 4 * _SHOWN, start).decode(errors="replace")
        lines = tail.strip().splitlines()
        last_line = f": {lines[-1][:_SHOWN]}" if lines else ""
        what = f"the command ends with {ending(process.returncode)}{last_line}"
        raise AudioError(Reason.FILE_UNREADABLE, what)
