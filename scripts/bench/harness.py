"""What the scripts share: options, a clock of the wall and of the CPU, rounds in turns, tables, pictures."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

CORES = len(os.sched_getaffinity(0))
KEPT = Path(tempfile.gettempdir(), "featcache-bench")
"""Where corpora and models are kept from one run to the next."""
DISTURBED = 0.1
"""Share of the cores from which on what others do is worth a remark."""

_TICKS = os.sysconf("SC_CLK_TCK")


# Options and results


def options(doc: str | None, *positional: str, **defaults: Any) -> argparse.Namespace:
    """The options that a script was given, and `json`.

    Args:
        doc: The script's docstring, its help.
        positional: Names of paths that must be given.
        defaults: The default of each option, or it and a help: of the option's type, a type where there is none, False
            for a flag, a list for several.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in positional:
        parser.add_argument(name, type=Path)
    for name, given in {**defaults, "json": (False, "print JSON")}.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=text)
        elif isinstance(default, type):
            parser.add_argument(flag, type=default, help=text)
        elif isinstance(default, list):
            parser.add_argument(flag, type=type(default[0]), nargs="+", default=default, help=text)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=text)
    return parser.parse_args()


def present(result: Any, show: Callable[[Any], object], asked: argparse.Namespace) -> None:
    """Print a result: as JSON if that was asked for, else what `show` makes of it."""
    print(json.dumps(result, indent=2) if asked.json else show(result))


def columns(head: Sequence[object], *rows: Sequence[object], markdown: bool = False) -> str:
    """A table: the first column flush left, the others flush right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in cells]
        return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in cells
    )


def available(makers: Mapping[str, Callable[..., Any]], *arguments: object) -> dict[str, Any]:
    """What each makes; those whose packages are not installed are left out, which is told."""
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make(*arguments)
        except ImportError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return made


# Time


@dataclass(frozen=True)
class Timed:
    """What a call took."""

    seconds: float
    """Seconds by the clock on the wall."""
    cpu_seconds: float = 0.0
    """CPU seconds of all threads, and of child processes that have ended."""
    others: float = 0.0
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


@dataclass(frozen=True)
class Turns:
    """What some calls took, in rounds in which all took turns."""

    taken: dict[str, list[Timed]]

    def median(self, name: str, what: str = "seconds") -> float:
        return median(getattr(each, what) for each in self.taken[name])

    def best(self, name: str, what: str = "seconds") -> float:
        return min(getattr(each, what) for each in self.taken[name])

    def ratio(self, name: str, to: str, what: str = "seconds") -> float:
        """The median of the ratios within a round."""
        pairs = zip(self.taken[name], self.taken[to], strict=True)
        return median(getattr(one, what) / getattr(other, what) for one, other in pairs)

    @property
    def others(self) -> float:
        """The largest share of the cores that others had."""
        return max(each.others for rounds in self.taken.values() for each in rounds)


def take_turns(runs: Mapping[str, Callable[[], object]], rounds: int, *, patience: float = 10.0) -> Turns:
    """Call all in turns. A call that returns a `Timed` has taken that."""
    taken: dict[str, list[Timed]] = {name: [] for name in runs}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name, run in runs.items():
            taken[name].append(undisturbed(lambda run=run: _timed_itself(run, patience)))
    return Turns(taken)


def quick_turns(
    runs: Mapping[str, Callable[[], object]], rounds: int, calls: int, before: Callable[[str], object] = lambda _: None
) -> Turns:
    """The same for calls of microseconds: the best of some calls in a row counts. `before` is called before each."""

    def all_rounds() -> None:
        taken.update({name: [] for name in runs})
        for _ in range(rounds):
            for name, run in runs.items():
                taken[name].append(Timed(min(_seconds(name, run, before) for _ in range(calls))))

    taken: dict[str, list[Timed]] = {}
    others = undisturbed(lambda: timed(all_rounds)).others
    return Turns({name: [Timed(one.seconds, others=others) for one in each] for name, each in taken.items()})


def remark(others: float) -> str:
    """A line for a table whose measurements were disturbed; empty where they were not."""
    if others < DISTURBED:
        return ""
    return f"other processes had up to {others:.0%} of the cores: repeat it when they are idle"


def _timed_itself(run: Callable[[], object], patience: float) -> Timed:
    found: list[object] = []
    taken = timed(lambda: found.append(run()), patience=patience)
    return found[0] if isinstance(found[0], Timed) else taken


def _seconds(name: str, run: Callable[[], object], before: Callable[[str], object]) -> float:
    before(name)
    start = perf_counter()
    made = run()
    seconds = perf_counter() - start
    del made
    return seconds


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


# Memory and processes


def status_bytes(name: str, process: int | str = "self") -> int:
    """What /proc says of a process, such as `VmHWM`, in bytes; 0 where it says nothing."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def private_bytes() -> int:
    """Memory that no other process shares."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_Dirty:"))


def in_child(function: Callable[..., object], *arguments: object) -> Any:
    """What a function returns in a forked process, whose memory is its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.write(writer, json.dumps(function(*arguments)).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(1)
    return json.loads(said)


def forget(files: Iterable[Path]) -> None:
    """Have files out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
