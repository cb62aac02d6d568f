"""The threads of featcache.DataLoader: how they end."""

import os
import subprocess
import sys
import threading

import pytest
from forking import MOST_SECONDS, wait_until

import featcache
from featcache import DataLoader, FeatureDataset


@pytest.fixture(scope="module")
def dataset(folder):
    return FeatureDataset(featcache.open(folder))


def loader_threads():
    return [one for one in threading.enumerate() if one.name.startswith("featcache-loader")]


def test_one_of_the_threads_may_end_them_all(dataset):
    """As the garbage collector does."""
    has_batch, is_closed = threading.Event(), threading.Event()

    def transform(batch):
        if batch["ids"] == [dataset.ids[1]]:
            has_batch.wait(MOST_SECONDS)
            batches.close()
            is_closed.set()
        return batch

    batches = iter(DataLoader(dataset, [[0], [1], [2]], transform=transform))
    next(batches)
    has_batch.set()
    assert is_closed.wait(MOST_SECONDS)
    assert list(batches) == []
    wait_until(lambda: not loader_threads())


def test_an_interrupt_before_the_first_batch_ends_them(dataset, monkeypatch):
    begin = threading.Thread.start

    def interrupted(thread):
        if thread.name == "featcache-loader_1":
            raise KeyboardInterrupt
        begin(thread)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    batches = iter(DataLoader(dataset, [[0], [1]], transform=lambda batch: batch))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert not loader_threads()


def test_the_end_waits_for_batches_in_progress_and_makes_no_others(dataset, monkeypatch):
    may_end, made = threading.Event(), []

    def transform(batch):
        if made:
            may_end.wait(MOST_SECONDS)
        made.append(batch["ids"])
        return batch

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    batches = iter(DataLoader(dataset, [[0], [1], [2]], transform=transform, prefetch=3))
    next(batches)
    threading.Timer(0.2, may_end.set).start()
    batches.close()
    assert made == [[dataset.ids[0]], [dataset.ids[1]]]
    assert not loader_threads()


def test_an_interpreter_ends_in_the_middle_of_an_iteration(folder, dataset):
    program = """
import sys
import time

import featcache

dataset = featcache.FeatureDataset(featcache.open(sys.argv[1]))

def transform(batch):
    time.sleep(0.5 * (batch["ids"] != [dataset.ids[0]]))
    print(*batch["ids"], flush=True)
    return batch

iteration = iter(featcache.DataLoader(dataset, [[0], [1]], transform=transform))
next(iteration)
"""
    command = [sys.executable, "-c", program, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS)
    expected = f"{dataset.ids[0]}\n{dataset.ids[1]}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, expected, "")
