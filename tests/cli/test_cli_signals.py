"""How a command ends that is not let go to its end: by a signal, or by a reader that has
gone."""

import io
import os
import signal
import sys
from contextlib import suppress

import pytest
from processes import Finished, python, start_script

from featcache.cli.common import note
from featcache.cli.process import stoppable


@pytest.fixture
def pipe(tmp_path):
    """A manifest that never comes: whoever reads it waits."""
    path = tmp_path / "manifest"
    os.mkfifo(path)
    return path


def reader_of(path):
    """The writing end of a pipe, once somebody reads it; None before."""
    with suppress(OSError):  # ENXIO
        return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    return None


def interrupted(running, number):
    """Send a signal, and again to a command that waits all the same: it may have come
    just before a read began."""
    while running.poll() is None:
        running.send(number)
        with suppress(AssertionError):
            running.wait_until(lambda: running.poll() is not None, seconds=5)
    return running.wait()


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda it: it.name
)
@pytest.mark.parametrize(
    "command",
    [
        "extract {pipe} -o {cache}",
        "verify {cache} --manifest {pipe}",
        "repair {cache} --manifest {pipe}",
        "stats {cache} --manifest {pipe}",
        "probe fbank80 {pipe}",
    ],
)
def test_a_signal_ends_a_command_with_130_while_it_only_reads(cli, cache, pipe, command, number):
    running = cli.start(*command.format(cache=cache, pipe=pipe).split())
    opened = []
    running.wait_until(lambda: opened.append(reader_of(pipe)) or opened[-1] is not None)
    try:
        ended = interrupted(running, number)
    finally:
        os.close(opened[-1])
    assert (ended.code, ended.out) == (130, "")
    # python may have said that a file was not closed
    assert ended.err.endswith("featcache: interrupted\n")


def test_a_signal_while_a_message_is_printed_stops_the_work(monkeypatch, capfd):
    class Signalling(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            signal.raise_signal(signal.SIGTERM)
            return len(data)

    with stoppable() as stop, monkeypatch.context() as patch:
        patch.setattr(
            sys, "stderr", io.TextIOWrapper(io.BufferedWriter(Signalling()), line_buffering=True)
        )
        note("extracting")
    assert stop.is_set()
    assert capfd.readouterr().err.startswith("interrupted: finishing and committing ")


def test_an_interrupt_while_the_command_line_is_imported_is_one_line():
    code = """
import sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == "click":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from featcache.__main__ import main
main()
"""
    assert python("-c", code, "ls") == Finished(130, "", "featcache: interrupted\n")


@pytest.mark.parametrize(
    "words", ["extract {manifest} -o {out}", "verify {cache}", "stats {cache}", "show {cache} u0"]
)
def test_an_interrupt_that_python_drops_in_an_import_ends_the_command(plain, cache, words):
    """As it does while it loads a native library, which takes seconds for torch's."""
    code = """
import os, signal, sys
from featcache.cli import main
class Interrupt:
    def find_spec(self, name, *_):
        if name in ("torch", "featcache.care.verify", "featcache.loader.cache"):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except KeyboardInterrupt:
                pass
sys.meta_path.insert(0, Interrupt())
main()
"""
    out = cache.parent / "never"
    words = words.format(manifest=plain.manifest(), out=out, cache=cache).split()
    assert python("-c", code, *words) == Finished(130, "", "featcache: interrupted\n")
    assert not out.exists()


def test_an_interrupt_while_a_native_library_runs_python_has_its_exit_code(cache, tmp_path):
    """After a plain KeyboardInterrupt there, `python -m` would end by SIGINT."""
    (tmp_path / "interrupted.py").write_text("""
import ctypes, sys
from featcache.cli import main
class Interrupt:
    def find_spec(self, name, *_):
        if name == "featcache.care.verify":
            code = b"import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
            ctypes.pythonapi.PyRun_String(code, 257, ctypes.py_object({}), ctypes.py_object({}))
sys.meta_path.insert(0, Interrupt())
main()
""")
    ended = python("-m", "interrupted", "verify", cache, cwd=tmp_path)
    assert ended == Finished(130, "", "featcache: interrupted\n")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_interrupt_before_a_command_and_a_second_one_after_it_are_one_line(
    cache, number, options
):
    """A shell and a wrapper may send it twice. click would print `Aborted!`, and end with 1."""
    code = """
import os, signal, sys
from featcache import cli
number, function = getattr(signal, sys.argv.pop(1)), sys.argv.pop(1)
owner = cli._Commands if function == "parse_args" else cli
def interrupted(*args, real=getattr(owner, function)):
    ended = real(*args)
    os.kill(os.getpid(), number)
    return ended
setattr(owner, function, interrupted)
class Interrupt:
    def find_spec(self, name, *_):
        if name == "featcache.care.verify":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
cli.main()
"""
    for function in ("parse_args", "complain", "_print_error"):
        ended = python("-c", code, number, function, "verify", cache, *options)
        assert (ended.code, ended.err) == (130, "featcache: interrupted\n")
        if options:
            assert ended.json()["error"]["exit_code"] == 130


def test_a_signal_that_is_ignored_stays_ignored(cli, cache, pipe):
    """As `nohup` and its like have it: the command goes on, and ends by what it reads."""
    code = """
    import os, signal, sys, threading
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from featcache.cli import main
    def write():
        with open(sys.argv[2], "w") as file:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
            file.write("id,path\\n")
    threading.Thread(target=write).start()
    main(["verify", sys.argv[1], "--manifest", sys.argv[2]])
    """
    assert "there are no rows" in start_script(cli, code, cache, pipe).wait().with_code(2).err


def test_a_reader_that_has_gone_is_told_as_shells_tell_it():
    """128 + SIGPIPE, and nothing on stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as stdout:
        ended = python("-m", "featcache", "configs", stdout=stdout)
    assert (ended.code, ended.err) == (141, "")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("configs", "featcache: standard output: No space left on device\n"),
        ("info nowhere --json", "featcache: nowhere: there is no such cache folder\n"),
    ],
)
def test_a_full_disk_below_stdout_is_named(command, said):
    with open("/dev/full", "w") as stdout:
        ended = python("-m", "featcache", *command.split(), stdout=stdout)
    assert (ended.code, ended.err) == (1, said)
