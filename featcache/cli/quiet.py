"""Keeps what native libraries print away from the terminal, and from a result that a program reads.

On damaged files, libmpg123 (which libsndfile contains) prints notes to stderr, and libsndfile's readers of SDS and of
G.72x print to stdout. They offer no way to turn that off, and print to descriptors 1 and 2 themselves. What is wrong
with the file is in the failure ledger, in better words.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within the block, descriptors 1 and 2 lead nowhere, and `sys.stdout` and `sys.stderr` print to copies of them.

    The streams of Python are exchanged, if they are those of the process, so everything that Python prints arrives,
    tracebacks included. Threads that are running see the change at once: begin no block while some print.
    """
    with ExitStack() as ended:
        for number, name in ((1, "stdout"), (2, "stderr")):
            with suppress(OSError):  # the descriptor is closed, as by `2>&-`
                ended.enter_context(_to_nowhere(number, name))
        yield


@contextmanager
def _to_nowhere(number: int, name: str) -> Iterator[None]:
    stream = getattr(sys, name)
    copy = os.dup(number)
    try:
        ours = None
        if isinstance(stream, io.TextIOWrapper) and _descriptor(stream) == number:
            stream.flush()
            ours = _like(stream, copy)
            setattr(sys, name, ours)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        try:
            yield
        finally:
            os.dup2(copy, number)
            if ours is not None:
                setattr(sys, name, stream)
                with suppress(OSError):  # what could not be printed has raised an error when it was
                    ours.close()
    finally:
        os.close(copy)


def _like(stream: io.TextIOWrapper, descriptor: int) -> io.TextIOWrapper:
    """A stream that writes as another does, but to a descriptor of its own."""
    kind: Any = type(getattr(stream.buffer, "raw", stream.buffer))
    raw = kind(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _descriptor(stream: io.TextIOWrapper) -> int | None:
    """The descriptor of a stream; None if it has none, as in tests."""
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
