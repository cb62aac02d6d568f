"""A run that waits for another says so, and for which: it may have been stopped."""

from __future__ import annotations

import signal
import socket

import pytest
from cache_contents import being_written, items
from processes import commands


@pytest.fixture(scope="module")
def impatient(cli):
    with commands(modules=["impatient"], beside=cli) as impatient:
        yield impatient


@pytest.fixture
def job(plain, gated_config, gate, scratch):
    gate.write_text("2")
    return ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, "--threads", 1)


def waiting_lines(running):
    return [line for line in running.err().splitlines() if "waiting for another run" in line]


def test_who_holds_what_is_left_is_named(impatient, job, gate, plain, scratch):
    """Again and again; also that its process was stopped. When that goes on, both end well."""
    first = impatient.start(*job)
    first.wait_until(lambda: being_written(scratch, "*.????????"))
    (version,) = scratch.iterdir()
    (run,) = [path.name for path in (version / "runs").iterdir()]
    second = impatient.start(*job)
    second.wait_until(lambda: len(waiting_lines(second)) >= 2)
    line = f"{version}: waiting for another run, which has claimed what is left: {run} (process {first.pid} on "
    assert waiting_lines(second)[0] == f"{line}{socket.gethostname()})"
    first.send(signal.SIGSTOP)
    stopped = f", which has been stopped: kill -CONT {first.pid} lets it go on, kill -KILL {first.pid} ends"
    second.wait_until(lambda: stopped in waiting_lines(second)[-1])
    first.send(signal.SIGCONT)
    gate.unlink()
    assert (first.wait().code, second.wait().code) == (0, 0)
    assert len(items(scratch)) == len(plain.rows)


def test_a_run_that_has_something_to_do_does_not_say_so(impatient, job, gate, plain, slow_config, scratch):
    gate.unlink()
    assert "waiting" not in impatient(*job).err


def test_a_run_of_an_earlier_featcache_is_named_without_its_process(impatient, job, gate, scratch):
    """Its record does not say who it is; a record that cannot be read says nothing."""
    first = impatient.start(*job)
    first.wait_until(lambda: being_written(scratch, "*.????????"))
    (record,) = scratch.glob("*/runs/*/run.json")
    text = record.read_text()
    second = impatient.start(*job)
    second.wait_until(lambda: waiting_lines(second))
    for changed in (text.replace('"pid"', '"?"'), "{"):
        record.write_text(changed)
        second.wait_until(lambda: waiting_lines(second)[-1].endswith(f": {record.parent.name}"))
    gate.unlink()
    assert (first.wait().code, second.wait().code) == (0, 0)
