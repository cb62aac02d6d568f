"""The standard streams, as a command needs them: open, stdout for results alone, and messages that never decide how the
work ends.

If a stream is closed (`2>&-`), the next file that is opened gets its number, and whatever a library prints goes into
that file. So `/dev/null` is put in its place. And a message that nobody can be given, because the disk below a log is
full or the terminal has been closed, is dropped.

On damaged files, libsndfile's readers of SDS and of G.72x print to C's stdout, and offer no way to turn that off. That
would be in the middle of a result which a program reads, or after it: C keeps what is printed to a file or a pipe until
its buffer is full or the process ends.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def stdout_for_results() -> Iterator[None]:
    """Within the block, only Python prints to standard output; what native libraries print goes to standard error.

    `sys.stdout` is exchanged for one that prints to a copy of descriptor 1, unless it prints elsewhere, as in tests.
    """
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__ or stream.fileno() != 1:
        yield
        return
    stream.flush()
    copy = os.dup(1)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(copy, "w", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
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


class _Messages(io.FileIO):
    """A file that takes all that is written, whether or not it can keep it."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
