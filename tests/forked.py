"""Forked processes for tests: of this one's state, and real in every other way."""

import os
import signal
import sys
import time
import traceback
import warnings
from contextlib import contextmanager

MOST_SECONDS = 120
"""That one may take; also against a lock that is never let go of."""


def fork(function):
    """Run a function in a forked process, which then ends; returns its pid. It fails if the function does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(MOST_SECONDS)
        function()
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def join(pid):
    """Wait for a forked process, and return its exit code; negative where a signal ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def forked(function):
    """A forked process that is to end well by the end of the block."""
    pid = fork(function)
    try:
        yield pid
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        join(pid)
        raise
    assert join(pid) == 0


def wait_until(condition, seconds=60.0):
    """Wait for what another process or thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
