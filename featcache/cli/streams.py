"""The standard streams, as a command needs them: open, and messages never decide how the work ends.

If a stream is closed (`2>&-`), the next file that is opened gets its number, and whatever a library prints goes into
that file. So `/dev/null` is put in its place. And a message that nobody can be given, because the disk below a log is
full or the terminal has been closed, is dropped.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def standard_streams() -> Iterator[None]:
    """Have all three streams open. A `sys.stdin` of None still says that standard input was closed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
            os.set_inheritable(opened, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    before = sys.stderr
    if before is None or before is sys.__stderr__:
        sys.stderr = io.TextIOWrapper(
            io.BufferedWriter(_Messages(2, "w", closefd=False)),
            before.encoding if before else "utf-8",
            "backslashreplace",
            line_buffering=True,
        )
    try:
        yield
    finally:
        if sys.stderr is not None:
            sys.stderr.flush()
        sys.stderr = before


class _Messages(io.FileIO):
    """A file that takes all that is written, whether or not it can keep it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
