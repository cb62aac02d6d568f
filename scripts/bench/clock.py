"""What the benchmarks share: a clock that also says what a function cost the CPU, and whether it was alone."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

CORES = len(os.sched_getaffinity(0))
DISTURBED = 0.1
"""Share of the cores from which on what others do is worth a remark."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Timed:
    """What a call took."""

    seconds: float
    """Seconds by the clock on the wall."""
    cpu_seconds: float
    """CPU seconds of all threads, and of child processes that have ended."""
    others: float
    """The share of the machine's cores that other processes took meanwhile."""


def timed(function: Callable[[], object], *, patience: float = 10.0) -> Timed:
    """Call a function, and say what it took. Waits, for `patience` seconds, while the machine is at work for others."""
    _wait_for_quiet(patience)
    busy, cpu, start = _busy_seconds(), _own_seconds(), perf_counter()
    function()
    seconds, cpu = perf_counter() - start, _own_seconds() - cpu
    others = max(0.0, _busy_seconds() - busy - cpu) / (seconds * (os.cpu_count() or 1))
    return Timed(seconds, cpu, others)


def undisturbed(run: Callable[[], Timed], tries: int = 3) -> Timed:
    """Repeat a measurement while others disturb it; the least disturbed one."""
    least = run()
    while least.others >= DISTURBED and (tries := tries - 1):
        least = min(least, run(), key=lambda taken: taken.others)
    return least


def median(values: list[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def remark(others: float) -> str:
    """A line for a table whose measurements were disturbed; empty where they were not."""
    if others < DISTURBED:
        return ""
    return f"other processes had up to {others:.0%} of the cores: repeat it when they are idle"


def _wait_for_quiet(patience: float) -> None:
    for _ in range(int(patience / 0.25)):
        before = _busy_seconds()
        sleep(0.25)
        if _busy_seconds() - before < 0.25 * DISTURBED:
            return


def _own_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _busy_seconds() -> float:
    """CPU seconds that all processes have used since the machine started: all but idle and iowait."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / _TICKS
