"""Share between the scripts: options, tables of figures, a clock of the wall and of the
CPU, rounds in turns.

Whoever imports it can import what tests have in `tests/helpers` too: small models,
made-up speech and features."""

import argparse
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))


# Options and results


def options(doc: str | None, *positional: str, **defaults: Any) -> argparse.Namespace:
    """The options that a script was given, and `json`.

    Args:
        doc: The script's docstring, its help.
        positional: Names of paths that must be given.
        defaults: The default of each option, or it and a help: of the option's type, a
            type where there is none, False for a flag, a list for several.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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


class Table:
    """Figures of some runs.

    Args:
        title: What the rows are.
        formats: The name of each figure, and how it is written: `{"GB/s": "{:.2f}"}`.
    """

    def __init__(self, title: str, formats: Mapping[str, str]) -> None:
        self.title, self.formats = title, formats
        self.rows: dict[str, Sequence[Any]] = {}

    def add(self, name: str, *figures: Any) -> None:
        """Add a row, in which None stands for a figure that it has not."""
        self.rows[name] = figures

    def __str__(self) -> str:
        """In Markdown, its columns aligned."""
        rows = [[self.title, *self.formats]]
        for name, figures in self.rows.items():
            written = zip(self.formats.values(), figures, strict=True)
            rows.append(
                [name, *("" if figure is None else text.format(figure) for text, figure in written)]
            )
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = ([row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in rows)
        head, *lines = (f"| {' | '.join(row)} |" for row in cells)
        return "\n".join([head, "|---" * len(rows[0]) + "|", *lines])

    def document(self) -> dict[str, dict[str, Any]]:
        """The figures by row and column, for JSON."""
        return {
            name: dict(zip(self.formats, figures, strict=True))
            for name, figures in self.rows.items()
        }


def present(asked: argparse.Namespace, *parts: Table | str) -> None:
    """Print tables and lines, in order: as a list in JSON if that was asked for."""
    if asked.json:
        documents = [
            {part.title: part.document()} if isinstance(part, Table) else part
            for part in parts
            if part
        ]
        print(json.dumps(documents, indent=2, default=float))
    else:
        print(*filter(None, map(str, parts)), sep="\n")


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
    """Call a function, and say what it took. Waits, for `patience` seconds, while the
    machine is at work for others."""
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


def take_turns(runs: Mapping[str, Callable[[], object]], rounds: int) -> Turns:
    """Call all in turns. A call that returns a `Timed` has taken that."""
    taken: dict[str, list[Timed]] = {name: [] for name in runs}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for name, run in runs.items():
            taken[name].append(undisturbed(partial(_timed_itself, run)))
    return Turns(taken)


def quick_turns(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int,
    before: Callable[[str], object] = lambda _: None,
) -> Turns:
    """The same for calls of microseconds: the best of some calls in a row counts.
    `before` is called before each."""

    def all_rounds() -> None:
        taken.update({name: [] for name in runs})
        for _ in range(rounds):
            for name, run in runs.items():
                taken[name].append(Timed(min(_seconds(name, run, before) for _ in range(calls))))

    taken: dict[str, list[Timed]] = {}
    others = undisturbed(lambda: timed(all_rounds)).others
    return Turns(
        {name: [Timed(one.seconds, others=others) for one in each] for name, each in taken.items()}
    )


def best_speeds(reads: Mapping[str, Callable[[], Iterable[int]]], rounds: int) -> dict[str, float]:
    """Items per second of each, the best of the rounds in turns, from its second step on:
    when workers are running.

    Args:
        reads: What begins to read, and gives how many items each step has read.
        rounds: How many rounds.
    """

    def seconds_of_one(read: Callable[[], Iterable[int]]) -> Timed:
        counts = iter(read())
        next(counts)
        start = perf_counter()
        count = sum(counts)
        return Timed((perf_counter() - start) / count)

    turns = take_turns(
        {name: partial(seconds_of_one, read) for name, read in reads.items()}, rounds
    )
    return {name: 1 / turns.best(name) for name in reads}


def remark(*others: float) -> str:
    """A line below a table whose measurements others disturbed, by these shares of the
    cores; empty if none did."""
    if (most := max(others)) < DISTURBED:
        return ""
    return f"other processes had up to {most:.0%} of the cores: repeat it when they are idle"


def _timed_itself(run: Callable[[], object]) -> Timed:
    found: list[object] = []
    taken = timed(lambda: found.append(run()))
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
    """CPU seconds that all processes have used since the machine started: all but idle
    and iowait."""
    user, nice, system, _idle, _iowait, *rest = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + sum(rest[:3])) / _TICKS


# Memory, processes and files


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


@contextmanager
def temporary_folder(home: Path | None = None) -> Iterator[Path]:
    """A folder that goes afterwards: in `home`, which is made if it is missing, or where
    temporary files lie."""
    if home is not None:
        home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home) as name:
        yield Path(name)


def forget(files: Iterable[Path]) -> None:
    """Have files out of the page cache."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
