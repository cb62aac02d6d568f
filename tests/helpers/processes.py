"""`featcache`, and Python code, as real processes; and what a process has open."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forking import MOST_SECONDS, POLL_SECONDS, wait_until
from shim import Faults

TESTS = Path(__file__).parent


@dataclass
class Finished:
    """What became of a process; `code` is negative where a signal ended it."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)

    def with_code(self, code: int, *, err: str | None = None) -> Finished:
        """The same, which must have ended with this code, and with just this on stderr if
        it is given."""
        is_right = self.code == code and err in (self.err, None)
        assert is_right, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self


@dataclass
class Running:
    """A `featcache` process that runs."""

    pid: int
    _stream: Any
    _folder: Path
    _code: int | None = None

    def send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have ended
            os.kill(self.pid, number)

    def err(self) -> str:
        return (self._folder / "err").read_text(errors="surrogateescape")

    def wait_until(self, condition, seconds: float = MOST_SECONDS) -> None:
        """Wait for something that the process does; also in folders that it renames
        meanwhile."""
        wait_until(condition, seconds, lambda: f"; stderr: {self.err()}")

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        if self._code is None and select.select([self._stream], [], [], 0)[0]:
            self.wait()
        return self._code

    def wait(self, seconds: float = MOST_SECONDS) -> Finished:
        if self._code is None:
            ready, _, _ = select.select([self._stream], [], [], seconds)
            if not ready:
                self.send(signal.SIGKILL)
            self._code = int(self._stream.readline())
            self._stream.close()
            assert ready, f"it did not end in {seconds} s; stderr: {self.err()}"
        out = (self._folder / "out").read_text(errors="surrogateescape")
        return Finished(self._code, out, self.err())


class Cli:
    """Runs `featcache` commands in processes of their own; see `cli_server.py`. All have
    variables of `env` added to their environment, and have imported `modules`, and what
    the server has that this one's is forked from: `beside`."""

    def __init__(
        self,
        folder: Path,
        env: dict[str, str] | None = None,
        modules: Sequence[str] = (),
        beside: Cli | None = None,
    ) -> None:
        self.folder = folder
        self.socket = str(folder / "socket")
        self._started: list[Running] = []
        arguments = [self.socket, str(os.getpid()), *modules]
        self._server: Running | subprocess.Popen
        if beside:
            self._server = beside.start(*arguments, env=env, entry="cli_server:serve_beside")
        else:
            path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {
                **os.environ,
                "PYTHONPATH": path,
                "PYTHONWARNINGS": "error",
                **(env or {}),
            }
            self._server = subprocess.Popen(
                [sys.executable, TESTS / "cli_server.py", *arguments], env=environment
            )

    @property
    def pid(self) -> int:
        """The process that all others are forked from."""
        return self._server.pid

    def __call__(self, *args: object, **options: Any) -> Finished:
        """Run a command to its end; the options are those of `start`."""
        return self.start(*args, **options).wait()

    def refused(self, *args: object, code: int = 2, **options: Any) -> str:
        """Run a command that is refused, with nothing on stdout; returns what it says on
        stderr."""
        ended = self(*args, **options)
        assert (ended.code, ended.out) == (code, ""), ended
        return ended.err

    def start(
        self,
        *args: object,
        cwd: Path | None = None,
        stdin: Path = Path(os.devnull),
        stderr: Path | None = None,
        env: dict[str, str] | None = None,
        faults: Faults | None = None,
        entry: str = "",
        **without: Any,
    ) -> Running:
        """Start a command, without the word `featcache`; or a function,
        `entry="module:function"`, with the arguments.

        `stderr` is a file for its messages, if they are not to be kept; `env` is added to
        its environment; `faults` are for where the shim is loaded (see `shim.py`);
        `without` is for `do_without` in `cli_server.py`."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        for name in ("out", "err"):  # a kill may come before it has opened them
            (folder / name).touch()
        request = {
            "args": [str(arg) for arg in args],
            "cwd": str(cwd or folder),
            "stdin": str(stdin),
            "stdout": str(folder / "out"),
            "stderr": str(stderr or folder / "err"),
            "env": env or {},
            "faults": faults and faults.request(),
            "entry": entry,
            "without": without,
        }
        with self._connect() as connection:
            connection.sendall(json.dumps(request, default=str).encode() + b"\n")
            stream = connection.makefile("r")
        self._started.append(Running(int(stream.readline()), stream, folder))
        return self._started[-1]

    def stop(self) -> None:
        """End the server, and what a failed test may have left running."""
        for running in self._started:
            if running._code is None:
                running.send(signal.SIGKILL)
        self._connect().close()
        self._server.wait()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)

        def answers() -> bool:
            assert self._server.poll() is None, "the server of test processes has died"
            return connection.connect_ex(self.socket) == 0

        wait_until(answers)
        return connection


@contextmanager
def commands(**options: Any) -> Iterator[Cli]:
    """A `Cli` with a folder of its own, which it takes along; the options are those of
    `Cli`."""
    # short: a socket's path has at most 100 letters
    with tempfile.TemporaryDirectory(prefix="featcache-") as folder:
        cli = Cli(Path(folder), **options)
        yield cli
        cli.stop()


def on_terminal(cli: Cli, columns: int, *command: object, **options: Any) -> tuple[int, str]:
    """How a `featcache` command ends, and what it writes on a terminal of that width; 0
    is one that knows no size.

    The options are those of `Cli.start`."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24 if columns else 0, columns))
    running = cli.start(*command, stderr=Path(os.ttyname(theirs)), **options)
    shown = b""
    while running.poll() is None or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], POLL_SECONDS)[0]:
            shown += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    return running.wait().code, shown.decode()


def run_script(cli: Cli, code: str, *arguments: object, **options: Any) -> str:
    """Run a script in a process of its own, in which featcache has been imported; returns
    what it prints.

    It may use torch's workers. The options are those of `start_script`."""
    return start_script(cli, code, *arguments, **options).wait().with_code(0).out


def start_script(
    cli: Cli, code: str, *arguments: object, ignore: Sequence[str] = (), **options: Any
) -> Running:
    """Start such a script; warnings, but for those whose messages begin with one of
    `ignore`, are errors in it.

    The other options are those of `Cli.start`."""
    path = Path(tempfile.mkdtemp(dir=cli.folder)) / "script.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    return cli.start(
        path, json.dumps(list(ignore)), *arguments, entry="cli_server:run_script", **options
    )


def run_python(code: str, *arguments: object) -> str:
    """Run a script in a new interpreter with warnings as errors; returns what it prints.

    Where nothing is about what is imported, or about memory, `run_script` is a hundred
    times as fast."""
    return python("-W", "error", "-c", textwrap.dedent(code), *arguments).with_code(0).out


def run_here(*arguments: object, code: int = 0, **options: Any) -> str:
    """Run a command in this process; what it prints. The options are those of click's
    `CliRunner.invoke`."""
    from click.testing import CliRunner

    from featcache.cli import main

    ended = CliRunner().invoke(main, [str(argument) for argument in arguments], **options)
    assert ended.exit_code == code, ended.output
    return ended.output


def python(*arguments: object, **options) -> Finished:
    """Run a new interpreter to its end."""
    pipes = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "timeout": MOST_SECONDS,
    }
    done = subprocess.run([sys.executable, *map(str, arguments)], **{**pipes, **options})
    return Finished(done.returncode, done.stdout, done.stderr)


def open_files(path):
    """The files that this process has open of those at or below a path, each as often as
    it is open."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed
            found.append(Path(os.readlink(descriptor)))
    return sorted(str(file) for file in found if file.is_relative_to(path))
