"""Forked processes for tests: of this one's state, and real in every other way."""

import os
import select
import signal
import sys
import time
import traceback
import warnings
from contextlib import suppress

POLL_SECONDS = 0.002
MOST_SECONDS = 600
"""That a command may take: a limit for what hangs, which a busy machine does not reach."""


def fork(function):
    """Run a function in a forked process, which then ends; returns its pid. It fails if
    the function does."""
    with warnings.catch_warnings():
        # Python 3.12 warns where there are threads
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(MOST_SECONDS)  # also where a lock is never let go of
        function()
        code = 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def join(pid):
    """Wait for a forked process, and return its exit code; negative where a signal ended
    it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_forked(function):
    """Run a function in a forked process, which is to end well."""
    assert join(fork(function)) == 0


def wait_for_word(descriptor, word=b"."):
    """Wait for what another process writes into a pipe."""
    found = b""
    while not found.endswith(word):
        ready, _, _ = select.select([descriptor], [], [], MOST_SECONDS)
        assert ready, f"it never said {word!r}"
        found += os.read(descriptor, 1)


def wait_until(condition, seconds=MOST_SECONDS, tell=str):
    """Wait for what another process or thread does; also in folders that it renames
    meanwhile.

    If it does not do so, what `tell` returns is said."""
    # not by the clock, which goes on while the machine does not
    for _ in range(int(seconds / POLL_SECONDS)):
        with suppress(FileNotFoundError):
            if condition():
                return
        time.sleep(POLL_SECONDS)
    raise AssertionError(f"it never happened{tell()}")
