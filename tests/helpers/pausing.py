"""Where extractors stand still for a test, which so meets a run in a known state, however
slow the machine is."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from processes import Cli, Finished, Running

from featcache.extractors import Params


def pass_gate(gate: str) -> None:
    """Stand still until a gate, given as the path of a file, lets one more in.

    It lets in as many of a run as its file says, and no more for as long as that file is
    there. A test writes the file before it starts a run, interferes once the run stands
    still, and removes the file. A gate without a file is open. What a run extracts in its
    isolated process counts as the run's: both add a byte to a file for each that was let
    in.
    """
    is_isolated = any("featcache.engines.isolated" in argument for argument in sys.orig_argv)
    entered = f"{gate}.{os.getppid() if is_isolated else os.getpid()}"
    descriptor = os.open(entered, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(descriptor, b".")
    number = os.lseek(descriptor, 0, os.SEEK_CUR) - 1  # where the byte was appended
    os.close(descriptor)
    with suppress(FileNotFoundError):
        while int(Path(gate).read_text() or 0) <= number:
            time.sleep(0.002)


class SlowParams(Params):
    """Those of an extractor that gives a test the time to interfere."""

    locations: ClassVar[frozenset[str]] = frozenset({"gate"})

    seconds: float = 0.0
    """To sleep, for every clip or batch."""
    gate: str = ""
    """The file of a gate that every one goes through; see `pass_gate`."""

    def pause(self) -> None:
        """Go through the gate, and sleep."""
        if self.gate:
            pass_gate(self.gate)
        time.sleep(self.seconds)


def stand_at(gate: Path, count: int, cli: Cli, *job: object, **options: Any) -> Running:
    """Start a run, and wait until it stands still at a gate: it has let in so many, and
    one more is before it.

    The options are those of `Cli.start`."""
    gate.write_text(str(count))
    running = cli.start(*job, **options)
    entered = gate.with_name(f"{gate.name}.{running.pid}")
    running.wait_until(lambda: entered.stat().st_size > count)
    return running


def interrupt(running: Running, gate: Path, number: signal.Signals = signal.SIGINT) -> Finished:
    """Interrupt a run that stands still at a gate; open it once the run has taken notice,
    and wait for the end."""
    running.send(number)
    running.wait_until(lambda: "interrupted" in running.err())
    gate.unlink()
    return running.wait()
