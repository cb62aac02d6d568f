"""Forks `featcache` processes out of one that has imported everything: 20 ms each instead of three seconds.

What is forked is a real process in every other way: its own interpreter state, files, signals and limits, and it
may be killed at any moment. Started by `processes.py` as `python cli_server.py SOCKET PARENT`, by the process of that
pid; each connection asks for one process, is told its pid, and then how it ended. A server that has imported more, or
has another environment, is itself such a process: `serve_beside`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import NoReturn

import shim

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# A few threads of native libraries are harmless to a fork that happens before they have any work.
warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)

_CHANGES_FILES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}


def preload() -> None:
    import numpy.ma
    import soxr
    import tqdm

    import featcache.cli
    import featcache.cli.progress
    import featcache.engines.local
    import featcache.extraction.extraction
    import featcache.extractors.kaldi
    import featcache.health.recompute
    import featcache.health.repair
    import featcache.health.verify

    assert featcache.cli
    assert numpy.ma
    assert soxr
    assert tqdm


def serve(path: str, parent: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the handlers of connections
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(5)
        while os.path.exists(f"/proc/{parent}"):  # it does not outlive the tests, however they end
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.setblocking(True)
            with connection, connection.makefile("rw") as stream:
                line = stream.readline()
                if not line:
                    return  # a connection that asks for nothing ends the server
                if os.fork() == 0:
                    server.close()
                    return handle(json.loads(line), stream)


def serve_beside(path: str, parent: str, *modules: str) -> None:
    """Be another server, which has imported these modules too."""
    prepare(modules)
    serve(path, int(parent))


def prepare(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # so that collections in a fork do not copy all of it


def handle(request: dict, stream) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        become(request)
        leave(run(request["args"], request.get("entry", "")))
    print(pid, file=stream, flush=True)
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), file=stream, flush=True)
    os._exit(0)


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


def leave(code: int) -> NoReturn:
    """End as the interpreter does, but for taking everything imported apart, which takes a second."""
    threading._shutdown()  # waits for the threads that are left
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(code)


def become(request: dict) -> None:
    """Turn this fork into the process that was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored where tests run in the background
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise, where they run under nohup
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    tempfile.tempdir = None  # it is kept from when this process was another
    # as the interpreter does, and again does no harm
    sys.path[1:1] = [os.path.abspath(path) for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    for descriptor, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_WRONLY), (2, "stderr", os.O_WRONLY)):
        opened = os.open(request[name], flags | (os.O_CREAT | os.O_APPEND if descriptor else 0))
        os.dup2(opened, descriptor)
        os.close(opened)
    for name in request.get("closed", ()):
        os.close(("stdin", "stdout", "stderr").index(name))
        for attribute in (name, f"__{name}__"):  # as an interpreter has them that begins without the descriptor
            setattr(sys, attribute, None)
    for name, limit in request["limits"].items():
        number = getattr(resource, f"RLIMIT_{name}")
        resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
    if request["powerless"]:
        drop_privileges()
    if request["fault"]:
        sys.addaudithook(saboteur(**request["fault"]))
    if request.get("faults"):
        shim.become(**request.get("faults"))


def drop_privileges() -> None:
    """Root's power to write anywhere goes; who it is stays. Source: capset(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if libc.capset(header, nothing):
        raise OSError(ctypes.get_errno(), "capset")


def saboteur(folder: str, before: int, error: int):
    """An audit hook that counts what is about to change a file below `folder`, and strikes from one of them on.

    Without an error number the process is killed there; with one, that and every later change fails with it.
    """
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in _CHANGES_FILES or not str(arguments[0]).startswith(folder):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        count += 1
        if count <= before or (error and event in ("os.remove", "os.rmdir")):  # a full disk lets go of files
            return
        if not error:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(error, os.strerror(error), arguments[0])

    return hook


if __name__ == "__main__":
    preload()
    prepare(sys.argv[3:])
    serve(sys.argv[1], int(sys.argv[2]))
