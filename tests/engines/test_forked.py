"""Processes forked on a CPU, for features that are made without a model: what they make,
what their deaths cost, how they end, and when there are none."""

import json
import os
import signal
import threading
from multiprocessing import Pipe
from unittest import mock

import pytest
from cache_contents import being_written, check, ledger
from extractions import write_config
from pausing import interrupt
from processes import python
from test_devices import assert_whole, start_two, wait_for_end
from test_suspects import arrays, assert_it_cost_itself_alone, crashing

from featcache.engines import worker
from featcache.errors import NO_THREAD
from featcache.manifest.read import read_manifest

TWO = ("--device", "cpu", "--threads", 2)
IN_SHARDS = ("--shard-size", "0.0004")


def extracted(cli, *job: object) -> dict:
    return json.loads(cli(*job, "--json").out)


def test_forked_processes_make_the_shards_of_one(cli, corpus, scratch):
    """Of several versions at once."""
    job = ("extract", corpus.manifest(), "-c", "fbank80", "-c", "mfcc13", "--shard-size", "0.02")
    one = extracted(cli, *job, "-o", scratch / "one", "--threads", 1)
    for trial in range(10):  # on a busy machine, one may do all before the other is there
        two = extracted(cli, *job, "-o", scratch / f"two{trial}", *TWO, "--progress", "json")
        assert arrays(scratch / "one") == arrays(scratch / f"two{trial}")
        if two["processes"] == 2:
            break
    assert (one["processes"], two["processes"]) == (1, 2)
    for key in ("utterances", "failed_by_reason", "upsampled", "downsampled", "silent"):
        assert one[key] == two[key]


def test_a_clip_that_ends_its_process_costs_itself_in_one_run(cli, plain, scratch):
    config = write_config(scratch, "Crashing")
    job = ("extract", crashing(plain, "segfault"), "-c", config, *IN_SHARDS)
    done = cli(*job, "-o", scratch / "c", *TWO).with_code(3)
    assert "the process ended at work" in done.err
    assert_it_cost_itself_alone(cli, plain, config, scratch / "c", "segfault")


def test_a_process_that_a_dead_one_has_forked_does_not_hold_up_the_run(cli, plain, gate, scratch):
    """It has the connection of the dead one, also of one that extracts suspects."""
    gate.write_text("1000")
    config = write_config(scratch, "Crashing", gate=str(gate))
    job = ("extract", crashing(plain, "orphan"), "-c", config, *IN_SHARDS)
    running = cli.start(*job, "-o", scratch / "c", *TWO)
    try:
        running.wait().with_code(3)
    finally:
        gate.unlink()
    (failure,) = ledger(scratch / "c").values()
    assert failure.message == "extracting it ended a process: SIGKILL"


def test_an_interrupt_keeps_what_the_processes_have(cli, plain, gate, gated_config, scratch):
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, *IN_SHARDS)
    running, pids = start_two(cli, *job, *TWO, gate=gate, count=2)
    for pid in pids:  # as a terminal does
        os.kill(pid, signal.SIGINT)
    ended = interrupt(running, gate).with_code(130)
    wait_for_end(pids)
    assert "extracted utterances kept" in ended.out
    assert being_written(scratch) == []
    assert [problem.kind for problem in check(scratch).problems] == ["unfinished"]
    cli(*job, *TWO).with_code(0)
    assert_whole(scratch, plain.manifest())


def test_a_killed_run_leaves_no_process_and_no_lock(cli, plain, gate, gated_config, scratch):
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, *TWO, *IN_SHARDS)
    running, pids = start_two(cli, *job, gate=gate, count=1)
    running.send(signal.SIGKILL)
    running.wait()
    gate.unlink()
    wait_for_end(pids)
    assert being_written(scratch) == []
    cli(*job).with_code(0)
    assert_whole(scratch, plain.manifest())


HANGS = """
import ctypes, os
from featcache.engines import process

process._SECONDS_TO_COMMIT = 2
ready, is_ready = os.pipe()
child = os.fork()
if not child:
    os.close(1)
    process.end_with_parent()
    os.write(is_ready, b".")
    while True:
        ctypes.PyDLL(None).pause()  # which keeps the interpreter
os.read(ready, 1)
print(child)
"""


def test_a_process_whose_extractor_never_returns_ends_after_its_parent():
    wait_for_end([int(python("-c", HANGS).with_code(0).out)])


def test_too_few_files_or_threads_for_the_processes_are_one_line(
    cli, plain, slow_config, scratch, monkeypatch
):
    job = ("extract", plain.manifest(), "-c", slow_config, "-o", scratch, *IN_SHARDS)
    few = cli.start(*job, "--device", "cpu", "--threads", 8, limits={"NOFILE": 18}).wait()
    assert few.with_code(1).err == "featcache: Too many open files: allow more, with ulimit -n\n"
    ours, others = Pipe()
    ours.send("setup")
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError(NO_THREAD)))
    worker.serve(others)
    assert repr(ours.recv()) == repr(MemoryError(NO_THREAD))


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_is_replaced(cli, plain, gate, gated_config, scratch, killed):
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, *TWO, *IN_SHARDS)
    running, pids = start_two(cli, *job, gate=gate, count=1)
    os.kill(pids[killed], signal.SIGKILL)
    running.wait_until(lambda: "is started again" in running.err())
    gate.unlink()
    ended = running.wait().with_code(0)
    assert "SIGKILL" in ended.err
    assert_whole(scratch, plain.manifest())
    assert check(scratch, manifest=read_manifest(plain.manifest())).problems == []


IN_PYTHON = """
    import sys, threading
    import featcache

    manifest, cache, size, has_thread = sys.argv[1:]
    if has_thread == "yes":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    options = featcache.Options("cpu", 2, shard_megabytes=float(size))
    print(featcache.extract(manifest, "fbank80", cache, options).processes)
"""


@pytest.mark.parametrize(
    ("size", "has_thread", "processes"), [(0.02, "no", 2), (128, "no", 1), (0.02, "yes", 1)]
)
def test_a_process_forks_if_there_is_work_and_no_other_thread(
    corpus, scratch, size, has_thread, processes
):
    script = scratch / "script.py"
    script.write_text("\n".join(line[4:] for line in IN_PYTHON.splitlines()))
    for trial in range(3):  # on a busy machine, one may do all before the other is there
        job = (script, corpus.manifest(), scratch / f"c{trial}", size, has_thread)
        made_by = python(*job).with_code(0).out.strip()
        if made_by == str(processes):
            break
    assert made_by == str(processes)


def test_models_are_not_forked(cli, corpus, scratch):
    """Their weights would be in memory several times."""
    config = write_config(scratch, "Moments", module="row_extractors", piece=20)
    job = ("extract", corpus.manifest(), "-c", config, "--shard-size", "0.01")
    assert extracted(cli, *job, "-o", scratch / "c", *TWO)["processes"] == 1
