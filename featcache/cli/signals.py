"""SIGINT, SIGTERM and SIGHUP: each ends a command with the exit code `INTERRUPTED`.

A signal that is ignored when the command begins stays ignored: `nohup` does this to SIGHUP, and a shell without job
control to the SIGINT of what it runs in the background. So does one that a program has a handler of its own for.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType

from featcache.cli.common import note

INTERRUPTED = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on each of the signals, as Python does on SIGINT."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def stoppable(at_once: Callable[[], object] = lambda: None) -> Iterator[threading.Event]:
    """Yield an event that the first of the signals sets; a second one calls `at_once`, and ends the process."""
    stop = threading.Event()
    signals = count()  # instead of `stop.is_set()`: a second signal may come in the middle of `stop.set()`

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(signals):
            at_once()
            os._exit(INTERRUPTED)  # half-written shards are in work/, and the next run removes them
        stop.set()
        note("interrupted: finishing and committing what is under way (once more to stop at once, and lose it)")

    with _handled(on_signal):
        yield stop


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the signals, but those that are ignored, or somebody else's. Only the main thread can do this."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = (signal.SIG_DFL, signal.default_int_handler)
    handled = [number for number in _SIGNALS if is_main and signal.getsignal(number) in ours]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
