"""Commands on a terminal of any width."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from contextlib import suppress


def on_terminal(columns: int, *command: object, **options) -> tuple[int, str]:
    """How a `featcache` command ends, and what it writes on a terminal of that width; 0 is one that knows no size."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24 if columns else 0, columns))
    arguments = [sys.executable, "-m", "featcache", *map(str, command)]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=theirs, **options) as process:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 4096):
                shown += chunk
        os.close(ours)
    return process.returncode, shown.decode()
