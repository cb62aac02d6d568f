"""Threads that make batches: what they hand over, and how they end."""

import gc
import subprocess
import sys
import threading
import weakref
from functools import partial

import pytest

from featcache.loader.threads import Task, Threads


def start(threads, call):
    """Have a thread make a call."""
    task = Task(call)
    threads.start(task)
    return task


def test_results_are_those_of_the_calls_in_their_order():
    with Threads(3, "test") as threads:
        tasks = [start(threads, partial(pow, number, 2)) for number in range(100)]
        assert [task.result() for task in tasks] == [number**2 for number in range(100)]


def test_an_error_is_raised_where_its_result_is_wanted():
    with Threads(2, "test") as threads:
        good, bad, after = (start(threads, partial(divmod, 7, divisor)) for divisor in (2, 0, 3))
        assert good.result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            bad.result()
        assert after.result() == (2, 1)


class Batch:
    """Something that a call has in memory."""


def test_an_error_that_was_raised_keeps_nothing_of_its_call():
    batches = []

    def fail() -> None:
        batch = Batch()
        batches.append(weakref.ref(batch))
        raise ValueError

    gc.disable()  # which would free them later, and not at once
    try:
        with Threads(1, "test") as threads, pytest.raises(ValueError):  # noqa: PT011
            start(threads, fail).result()
        assert batches[0]() is None
    finally:
        gc.enable()


def test_one_of_the_threads_may_end_them_all():
    with Threads(2, "test-own") as threads:
        start(threads, partial(threads.__exit__, None, None, None)).result()
        others = threading.enumerate()
    names = [thread.name for thread in others if thread.name.startswith("test-own")]
    assert len(names) <= 1


def test_an_interrupt_before_the_context_ends_them(monkeypatch):
    begin = threading.Thread.start

    def interrupted(thread):
        if thread.name == "test-interrupt_2":
            raise KeyboardInterrupt
        begin(thread)

    begun = Threads(2, "test-interrupt")
    del begun
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Threads(3, "test-interrupt")
    gc.collect()
    assert not [one for one in threading.enumerate() if one.name.startswith("test-interrupt")]


def test_the_end_waits_for_calls_that_run_and_makes_no_others():
    begun, may_end, made = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_end.wait()
        made.append("first")

    with Threads(1, "test-end") as threads:
        start(threads, first)
        start(threads, partial(made.append, "second"))
        begun.wait()
        threads.cancel()
        may_end.set()
    assert made == ["first"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("test-end")]


def test_an_interpreter_ends_in_the_middle_of_an_iteration():
    program = """
from featcache.loader.threads import Task, Threads
import time

def batches():
    with Threads(2, "test") as threads:
        first = Task(lambda: "a batch")
        threads.start(first)
        threads.start(Task(lambda: print("another", time.sleep(0.2))))
        yield first.result()

iteration = batches()
print(next(iteration))
"""
    left = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (left.returncode, left.stdout, left.stderr) == (0, "a batch\nanother None\n", "")
