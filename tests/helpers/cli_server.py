"""Forks `featcache` processes out of one that has imported everything: 20 ms each instead
of three seconds.

What is forked is a real process in every other way: its own interpreter state, files,
signals and limits, and it may be killed at any moment. Started by `processes.py` as
`python cli_server.py SOCKET PARENT`, by the process of that pid; each connection asks for
one process, is told its pid, and then how it ended. A server that has imported more, or
has another environment, is itself such a process: `serve_beside`."""

import ctypes
import errno
import gc
import importlib
import json
import os
import re
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn

import shim

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# A few threads of native libraries are harmless to a fork that happens before they have
# any work.
warnings.filterwarnings(
    "ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning
)

PRELOADED = ["numpy.ma", "soxr", "tqdm", "featcache.cli.runs", "featcache.extractors.kaldi"]
PRELOADED += [
    "featcache.care.prune",
    "featcache.care.recompute",
    "featcache.care.repair",
    "featcache.care.verify",
]
PRELOADED += [
    "featcache.engines.local",
    "featcache.engines.main_job",
    "featcache.extraction.extraction",
]
PRELOADED += ["featcache.storage.directory"]
"""What the first server has imported."""


def serve(path: str, parent: int) -> None:
    with socket.socket(socket.AF_UNIX) as server, selectors.EpollSelector() as waiting:
        server.bind(path)
        server.listen()
        waiting.register(server, selectors.EVENT_READ)
        # it does not outlive the tests, however they end
        while os.path.exists(f"/proc/{parent}"):
            for key, _ in waiting.select(5):
                if key.data is not None:
                    waiting.unregister(key.fd)
                    tell_end(key.fd, key.data)
                elif (begun := begin(server, waiting)) is None:
                    return  # a connection that asks for nothing ends the server
                else:
                    waiting.register(*begun)


def begin(
    server: socket.socket, waiting: selectors.EpollSelector
) -> tuple[int, int, socket.socket] | None:
    """Begin the process that the next connection asks for: what to wait for, and whom to
    tell then."""
    connection, _ = server.accept()
    with connection.makefile() as stream:
        line = stream.readline()
    if not line:
        connection.close()
        return None
    pid = os.fork()
    if pid == 0:
        close_all(server, waiting, connection)
        request = json.loads(line)
        become(request)
        leave(run(request["args"], request.get("entry", "")))
    connection.send(b"%d\n" % pid)
    return os.pidfd_open(pid), selectors.EVENT_READ, connection


def close_all(
    server: socket.socket, waiting: selectors.EpollSelector, connection: socket.socket
) -> None:
    """Close what is the server's in a process that has begun."""
    for key in [*waiting.get_map().values()]:
        if key.data is not None:
            os.close(key.fd)
            key.data.close()
    for each in (waiting, server, connection):
        each.close()


def tell_end(pidfd: int, connection: socket.socket) -> None:
    """Tell how a process ended, unless nobody listens any more."""
    ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
    with suppress(ConnectionError), connection:
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        connection.send(b"%d\n" % code)


def serve_beside(path: str, parent: str, *modules: str) -> None:
    """Be a server that has imported these modules too."""
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # so that collections in a fork do not copy all of it
    serve(path, int(parent))


def run(args: list[str], entry: str) -> int:
    from featcache.cli import main

    try:
        if entry:
            module, _, function = entry.partition(":")
            getattr(importlib.import_module(module), function)(*args)
        else:
            main(args, prog_name="featcache")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
            return 1
        return end.code or 0
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def run_script(path: str, ignore: str, *arguments: str) -> None:
    """Run a script as the interpreter does; `ignore` is a list, as JSON, of how warnings
    to ignore begin."""
    for message in json.loads(ignore):
        warnings.filterwarnings("ignore", re.escape(message))
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


def leave(code: int) -> NoReturn:
    """End as the interpreter does, but for taking everything imported apart, which takes
    a second."""
    threading._shutdown()  # waits for the threads that are left
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)


def become(request: dict) -> None:
    """Turn this fork into the process that was asked for."""
    # a shell has it ignored where tests run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise, where they run under nohup
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it is kept from when this process was another
    # as the interpreter does, and again does no harm
    sys.path[1:1] = [
        os.path.abspath(path)
        for path in request["env"].get("PYTHONPATH", "").split(os.pathsep)
        if path
    ]
    for descriptor, name, flags in (
        (0, "stdin", os.O_RDONLY),
        (1, "stdout", os.O_WRONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        opened = os.open(request[name], flags | (os.O_CREAT | os.O_APPEND if descriptor else 0))
        os.dup2(opened, descriptor)
        os.close(opened)
    do_without(**request.get("without", {}))
    if request.get("faults"):
        shim.become(request["faults"])


def do_without(
    closed: Sequence[str] = (),
    limits: dict[str, int] | None = None,
    full: str = "",
    powerless: bool = False,
) -> None:
    """Close some of `stdin`, `stdout` and `stderr`, as a shell does it with `<&-`; set
    resource limits, `FSIZE` for `RLIMIT_FSIZE`; have the disk of a folder be full; and
    have permissions count even if the tests run as root."""
    for name in closed:
        os.close(("stdin", "stdout", "stderr").index(name))
        # as an interpreter has them that begins without the descriptor
        for attribute in (name, f"__{name}__"):
            setattr(sys, attribute, None)
    for name, most in (limits or {}).items():
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (most, resource.getrlimit(number)[1]))
    if full:
        sys.addaudithook(partial(refuse_files, full))
    if powerless:  # who it is stays; source: capset(2)
        header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        if ctypes.CDLL(None, use_errno=True).capset(header, nothing):
            raise OSError(ctypes.get_errno(), "capset")


def refuse_files(folder: str, event: str, arguments: tuple) -> None:
    """An audit hook, as if the disk of a folder were full."""
    makes_one = event == "os.mkdir" or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
    )
    if makes_one and str(arguments[0]).startswith(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])


if __name__ == "__main__":
    serve_beside(*sys.argv[1:3], *PRELOADED, *sys.argv[3:])
