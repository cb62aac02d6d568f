"""The process of a command: its standard streams, a bar on its terminal, and the signals
that end it.

The streams are open, stdout is for results alone, and messages never decide how the work
ends. If one is closed (`2>&-`), the next opened file gets its number, and what a library
prints; so `/dev/null` takes its place.

On damaged files, libsndfile's readers of SDS and of G.72x print to C's stdout, and offer
no way to turn that off. That would be in the middle of a result which a program reads, or
after it: C keeps what is printed to a file or a pipe until its buffer is full or the
process ends.

SIGINT, SIGTERM and SIGHUP each end a command with the exit code `INTERRUPTED`. A signal
that is ignored when the command begins stays ignored: `nohup` does this to SIGHUP, and a
shell without job control to the SIGINT of what it runs in the background. So does one
that a program has a handler of its own for."""

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
from types import FrameType
from typing import TYPE_CHECKING, Any, Never

from featcache.cli.common import MessageFile, printing

if TYPE_CHECKING:
    from tqdm import tqdm

INTERRUPTED = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDING = "finishing and committing what is under way (once more to stop at once, and lose it)"


@contextmanager
def standard_streams() -> Iterator[None]:
    """Have all three streams open. A `sys.stdin` of None still says that standard input
    was closed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # the lowest number that is free, which is this one
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(opened, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    before = sys.stderr
    if before is None or before is sys.__stderr__:
        messages = io.BufferedWriter(MessageFile(2, "w", closefd=False))
        encoding = before.encoding if before else "utf-8"
        sys.stderr = io.TextIOWrapper(messages, encoding, "backslashreplace", line_buffering=True)
    try:
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        sys.stderr = before


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Within the block, only Python prints to standard output; what native libraries
    print goes to standard error.

    `sys.stdout` is exchanged for one that prints to a copy of descriptor 1, unless it
    prints elsewhere, as in tests."""
    stream = sys.stdout
    if (
        not isinstance(stream, io.TextIOWrapper)
        or stream is not sys.__stdout__
        or stream.fileno() != 1
    ):
        yield
        return
    stream.flush()
    copy = os.dup(1)
    results = io.BufferedWriter(io.FileIO(copy, "w", closefd=False))
    buffering = stream.line_buffering, stream.write_through
    sys.stdout = io.TextIOWrapper(results, stream.encoding, stream.errors, None, *buffering)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with suppress(OSError):  # what could not be printed has raised an error when it was
            sys.stdout.close()
        sys.stdout = stream
        ctypes.CDLL(None).fflush(None)  # while descriptor 1 is standard error
        os.dup2(copy, 1)
        os.close(copy)


def terminal_columns() -> int:
    """The width of the terminal that stderr goes to; 0 if it goes elsewhere, the terminal
    has no size, or with `-q`."""
    with suppress(OSError):  # if it is no terminal
        return 0 if printing.quiet else os.get_terminal_size(sys.stderr.fileno()).columns
    return 0


def progress_bar(total: float | None, unit: str, **settings: Any) -> tqdm[Never]:
    """A bar on a terminal, which is gone in the end; elsewhere, it shows nothing."""
    from tqdm import tqdm

    columns = terminal_columns()
    return tqdm(
        total=total, unit=f" {unit}", leave=False, file=sys.stderr, disable=not columns, **settings
    )


@contextmanager
def stoppable(
    at_once: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
    ending: str = _ENDING,
) -> Iterator[threading.Event]:
    """Yield an event that the first of the signals sets, which says how the command is
    `ending`; a second one calls `at_once`, and ends the process."""
    stop = stop or threading.Event()
    # instead of `stop.is_set()`: a second signal may come in the middle of `stop.set()`
    signals = count()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(signals):
            at_once()
            # half-written shards are in work/, and the next run removes them
            os._exit(INTERRUPTED)
        stop.set()
        # not by `note`: the signal may have come while `sys.stderr` was written to
        if not printing.quiet:
            with suppress(OSError):
                os.write(2, f"interrupted: {ending}\n".encode())

    with signals_handled(on_signal):
        yield stop


@contextmanager
def signals_handled(
    handler: Callable[[int, FrameType | None], object] = signal.default_int_handler,
) -> Iterator[None]:
    """Handle the signals, but those that are ignored, or somebody else's; by default,
    raise KeyboardInterrupt on each, as Python does on SIGINT. Only the main thread can do
    this."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = (signal.SIG_DFL, signal.default_int_handler)
    handled = [number for number in _SIGNALS if is_main and signal.getsignal(number) in ours]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
