"""Where extractors stand still for a test, which so meets a run in a known state, however slow the machine is."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from typing import ClassVar

from processes import Finished, Running

from featcache.extractors import Params


class Gate:
    """Lets in as many as its file says, and no more for as long as that file is there.

    A test writes the file before it starts a run, interferes once the run stands still, and removes the file. A gate
    without a file is open.

    Args:
        path: The path of that file.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._numbers = itertools.count()

    def enter(self) -> None:
        """Stand still until there is room."""
        number = next(self._numbers)
        while self._room() <= number:
            time.sleep(0.002)

    def _room(self) -> float:
        try:
            return int(self._path.read_text() or 0)
        except FileNotFoundError:
            return float("inf")


class GatedParams(Params):
    locations: ClassVar[frozenset[str]] = frozenset({"gate"})

    gate: str
    """The file of a `Gate`."""


class Gated:
    """Beside an extractor whose parameters are `GatedParams`: what it computes goes through `gate.enter()`."""

    def __init__(self, params, sample_rate, device):
        super().__init__(params, sample_rate, device)
        self.gate = Gate(params.gate)


def interrupt(running: Running, gate: Path, number: signal.Signals = signal.SIGINT) -> Finished:
    """Interrupt a run that stands still at a gate; open it once the run has taken notice, and wait for the end."""
    running.send(number)
    running.wait_until(lambda: "interrupted" in running.err())
    gate.unlink()
    return running.wait()
