"""Faults of the file system, of locks and of the clock, in real processes: the C side is
`tests/faults/shim.c`."""

import ctypes
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parents[1] / "faults" / "shim.c"
CHANGES = ("open", "write", "truncate", "allocate", "sync", "rename", "mkdir", "unlink", "rmdir")
"""The kinds of calls that change files, or make a change last: `open` is one that may
change something."""

KINDS = (*CHANGES, "read_open", "read", "lock", "list")
"""All kinds, as shim.c numbers them: `read_open` is any other `open`."""

STEP = int(os.environ.get("FAULTS_STEP", "1"))
"""A long run tries call number 0, `STEP`, 2 * `STEP` …: all of them, unless the
environment says otherwise."""

GROWS = ("open", "write", "truncate", "allocate", "sync", "rename", "mkdir")
"""The calls that need room on the disk."""


def build(folder: Path) -> Path:
    """Compile the shim; the test is skipped where that is impossible."""
    import pytest  # which the server of test processes does without

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build tests/faults/shim.c with")
    library = folder / "shim.so"
    built = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
    )
    if built.returncode:
        pytest.skip(f"tests/faults/shim.c cannot be compiled here: {built.stderr.splitlines()[0]}")
    return library


@dataclass(frozen=True)
class Strike:
    """What is to happen, and at which call."""

    at: int
    """The number of the call, from 0, among those of these kinds."""
    action: str
    """`kill` before the call; `error`; `short`, half of a write; `torn`, a kill after
    half of it; `lost`, a flush that fails and whose bytes are gone."""
    kinds: Sequence[str] = CHANGES
    """The kinds of calls that count."""
    error: int = 0
    """The errno of `error` and `lost`."""
    times: int = 1
    """How many calls, from that one on; -1 for all."""


def spread_kills(calls: Counter[str], count: int) -> Iterator[Strike]:
    """Kills spread over a command of so many calls of each kind: two before a call, and
    every third in the middle of a write."""
    chance = random.Random(calls.total())
    for number in range(count):
        kinds = CHANGES if number % 3 else ("write",)
        total = sum(calls[kind] for kind in kinds)
        at = (number * total + chance.randrange(total)) // count
        yield Strike(at, "kill" if number % 3 else "torn", kinds)


@dataclass(frozen=True)
class Faults:
    """What is different for a process, in what is at or below a folder; elsewhere all is
    as usual."""

    folder: Path
    strike: Strike | None = None
    record: Path | None = None
    """A file for a record of all calls that change something; see `read_calls`."""
    data: bool = False
    """Whether it is to have the bytes that were written."""
    locks: str = "real"
    """`real`; `granted`, always; `fail`, with `lock_error`; `host`, which another host
    does not see."""
    lock_error: int = 0
    host: str = ""
    """The host's name, and its boot's."""
    shared: str = ""
    """A folder outside the watched one, for `host`."""
    clock: tuple[float, float] = (0.0, 0.0)
    """By how many seconds the clock is ahead, and up to how many more, by chance, at each
    look."""

    def request(self) -> dict[str, Any]:
        """As JSON has it."""
        record = str(self.record) if self.record else None
        return {**asdict(self), "folder": str(self.folder.resolve()), "record": record}


def become(request: dict[str, Any]) -> None:
    """Turn this process, into which the shim was loaded, into one of the faults of a
    `Faults.request`."""
    shim = ctypes.CDLL(None)
    host, shared, record, strike = (
        request[name] for name in ("host", "shared", "record", "strike")
    )
    if host:
        Path(shared, f"boot-{host}").write_text(f"{host}-0000-0000-0000-000000000000\n")
    shim.shim_watch(request["folder"].encode())
    shim.shim_locks(
        request["locks"].encode(), request["lock_error"], host.encode(), shared.encode()
    )
    shim.shim_clock(*map(ctypes.c_double, request["clock"]))
    if record is not None and shim.shim_record(record.encode(), int(request["data"])):
        raise OSError(f"{record}: cannot be written")
    if strike is not None:
        kinds = sum(1 << KINDS.index(kind) for kind in strike["kinds"])
        at, action, error, times = strike["at"], strike["action"], strike["error"], strike["times"]
        shim.shim_strike(kinds, ctypes.c_long(at), action.encode(), error, ctypes.c_long(times))


@dataclass(frozen=True)
class Call:
    """A call that succeeded, or a flush that did not."""

    kind: str
    ok: bool
    inode: int
    """Of the file or folder."""
    offset: int
    """Where it wrote; the new size of `truncate`; for `open`, whether it made the file."""
    length: int
    """How many bytes it wrote; for `open`, whether it emptied the file."""
    parent: int
    """The inode of the folder that it is in."""
    other_parent: int
    """The inode of the folder that it was renamed into."""
    path: str
    other_path: str
    data: bytes = field(default=b"", repr=False)

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.other_path}".strip()


def read_calls(record: Path) -> list[Call]:
    """The calls in a record, in order."""
    calls, left = [], record.read_bytes()
    at = 0
    while at < len(left):
        end = left.index(b"\n", at)
        kind, ok, inode, offset, length, parent, other, has_data, path, other_path = left[
            at:end
        ].split(b"\t")
        at = end + 1
        data = left[at : at + int(length)] if int(has_data) else b""
        at += len(data)
        numbers = (int(inode), int(offset), int(length), int(parent), int(other))
        calls.append(
            Call(kind.decode(), bool(int(ok)), *numbers, path.decode(), other_path.decode(), data)
        )
    return calls
