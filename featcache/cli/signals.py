"""SIGINT and SIGTERM: both end a command with the exit code `INTERRUPTED`."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType

from featcache.cli.common import note

INTERRUPTED = 130


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on SIGINT, unless the signal is already ignored or handled."""
    is_main = threading.current_thread() is threading.main_thread()  # only the main thread can set handlers
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def stoppable() -> Iterator[threading.Event]:
    """Yield an event that the first SIGINT or SIGTERM sets; a second signal ends the process at once."""
    stop = threading.Event()
    signals = count()  # instead of `stop.is_set()`: a second signal may come in the middle of `stop.set()`

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(signals):
            os._exit(INTERRUPTED)  # half-written shards are in work/, and the next run removes them
        stop.set()
        note("interrupted: committing the shards that are whole (once more to stop at once)")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
