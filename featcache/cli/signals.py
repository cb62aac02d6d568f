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
    """SIGTERM is what SIGINT is, a KeyboardInterrupt, unless whoever started this process has it ignored or handled."""
    is_main = threading.current_thread() is threading.main_thread()  # which alone may ask for signals
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
    """An event that the first SIGINT or SIGTERM sets; a second one ends the process at once."""
    stop = threading.Event()
    signals = count()  # not asked of the event: the second one may come while the first is setting it, in this thread

    def on_signal(number: int, frame: FrameType | None) -> None:
        if next(signals):
            os._exit(INTERRUPTED)  # what is half written is in work/, and swept by the next run
        stop.set()
        note("interrupted: committing the shards that are whole (once more to stop at once)")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
