"""A command's standard streams and terminal, and the signals that end it.

The next opened file would get the number of a closed stream (`2>&-`), and what libraries
print; so `/dev/null` replaces it. On damaged files, libsndfile's readers of SDS and of
G.72x print to C's stdout, where only results may go.

SIGINT, SIGTERM and SIGHUP each end a command with the exit code `INTERRUPTED`. A signal
that is ignored when the command begins (by `nohup`, for example) stays ignored, and one
that the calling program handles keeps its handler."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from traceback import walk_stack
from types import FrameType
from typing import NoReturn

from featcache.cli.common import MessageFile, as_error, print_json, printing

INTERRUPTED = 130

_COLUMNS = 80
"""The columns of a picture where no terminal says how many there are."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDING = "finishing and committing what is under way (once more to stop at once, and lose it)"


@contextmanager
def standard_streams() -> Iterator[None]:
    """Open the streams that are closed. `sys.stdin` stays None if it was closed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # `open` takes the lowest free number, which is this one
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    before = sys.stderr
    if before is None or before is sys.__stderr__:
        messages = io.BufferedWriter(MessageFile(2, "w", closefd=False))
        encoding = getattr(before, "encoding", "utf-8")
        sys.stderr = io.TextIOWrapper(messages, encoding, "backslashreplace", line_buffering=True)
    try:
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        sys.stderr = before


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Send to standard error what native libraries print to standard output. `sys.stdout`
    prints to a copy of descriptor 1, unless it already prints elsewhere."""
    stream = sys.stdout
    if (
        stream is not sys.__stdout__
        or not isinstance(stream, io.TextIOWrapper)
        or stream.fileno() != 1
    ):
        yield
        return
    stream.flush()
    copy = os.dup(1)
    buffering = 1 if stream.line_buffering or stream.write_through else -1
    sys.stdout = open(copy, "w", buffering, stream.encoding, stream.errors, closefd=False)  # noqa: SIM115
    os.dup2(2, 1)
    try:
        yield
    finally:
        with suppress(OSError):  # printing has already raised it
            sys.stdout.close()
        sys.stdout = stream
        ctypes.CDLL(None).fflush(None)  # while descriptor 1 is standard error
        os.dup2(copy, 1)
        os.close(copy)


def terminal_columns() -> int:
    """Return the width of the terminal on stderr; 0 without one, or with `-q`."""
    if printing.quiet:
        return 0
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:  # stderr is no terminal
        return 0


def terminal_of_results() -> tuple[int, int]:
    """Return the columns of the terminal on stdout, and its colours: 2**24, 256, or 0. In a
    pipe, 80 and 0; 80 columns too if the terminal does not know its size, as in a container."""
    try:
        columns = os.get_terminal_size(sys.stdout.fileno()).columns or _COLUMNS
    except OSError:  # stdout is no terminal; tests replace it by what has no descriptor
        return _COLUMNS, 0
    terminal = os.environ.get("TERM", "dumb")
    if os.environ.get("NO_COLOR") or terminal == "dumb":
        return columns, 0
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return columns, 1 << 24
    return columns, 256 if "256color" in terminal else 0


@contextmanager
def stoppable(
    at_once: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
    ending: str = _ENDING,
) -> Iterator[threading.Event]:
    """Yield an event that the first signal sets, after printing how the command is
    `ending`. A second signal calls `at_once`, and ends the process."""
    stop = stop or threading.Event()
    # not `stop.is_set()`: a second signal may come during `stop.set()`
    signals = count()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(signals):
            at_once()
            os._exit(INTERRUPTED)  # the next run removes half-written shards
        stop.set()
        # not by `note`: the signal may have interrupted a write to `sys.stderr`
        if not printing.quiet:
            with suppress(OSError):
                os.write(2, f"interrupted: {ending}\n".encode())

    with signals_handled(on_signal):
        yield stop


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. During an import, end the process: a native library that is
    being loaded may drop the exception, or abort."""
    importers = (at.f_code.co_filename for at, _ in walk_stack(frame))
    if any(name.startswith("<frozen importlib") for name in importers):
        end_at_once(number, frame)
    raise KeyboardInterrupt


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Report the interrupt, and end the process."""
    with suppress(OSError, ValueError):  # stdout may be closed
        os.write(2, b"featcache: interrupted\n")
        if printing.as_json:
            print_json(as_error("Interrupted", "interrupted", INTERRUPTED))
    os._exit(INTERRUPTED)


def ignore_signals() -> None:
    """Ignore the signals that would end the process at once."""
    for number in _SIGNALS:
        if signal.getsignal(number) is end_at_once:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], object] = _interrupt,
) -> Iterator[None]:
    """Handle the signals that have Python's own handlers, in the main thread; by default,
    raise KeyboardInterrupt."""
    is_main = threading.current_thread() is threading.main_thread()
    of_python = (signal.SIG_DFL, signal.default_int_handler, _interrupt, end_at_once)
    handled = [number for number in _SIGNALS if is_main and signal.getsignal(number) in of_python]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
