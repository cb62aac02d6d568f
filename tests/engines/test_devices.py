"""A process for each device of this machine: what they make, what their deaths cost, how
they end."""

import os
import signal
import time
from operator import attrgetter
from pathlib import Path
from textwrap import dedent

import pytest
from cache_contents import being_written, check, items, shard_folders
from extractions import write_config
from forking import wait_until
from pausing import interrupt
from processes import Finished, python
from test_suspects import arrays, assert_it_cost_itself_alone, children_of, crashing

import featcache
from featcache.device import cores_near
from featcache.engines.devices import shares_of
from featcache.errors import ArgumentError, ConfigError
from featcache.extraction.options import parse_devices
from featcache.manifest.read import read_manifest

TWO = ("--device", "cpu,cpu", "--threads", 2)


ENDS_WHILE_IT_IS_CUT_OFF = """
    import threading
    from featcache.engines.worker import Inbox

    def cut_off():
        threading.main_thread().join()
        Inbox().close()

    threading.Thread(target=cut_off).start()
"""


def test_a_process_that_ends_while_its_connection_does_says_nothing():
    assert python("-c", dedent(ENDS_WHILE_IT_IS_CUT_OFF)) == Finished(0, "", "")


def start_two(cli, *job: object, gate: Path, count: int):
    """A run whose two processes each stand at the gate, having extracted so many
    utterances; and their pids."""
    gate.write_text(str(count))
    running = cli.start(*job)
    running.wait_until(lambda: len(children_of(running.pid)) == 2)
    pids = children_of(running.pid)
    running.wait_until(
        lambda: all(Path(f"{gate}.{pid}").stat().st_size == count + 1 for pid in pids)
    )
    return running, pids


def assert_whole(cache: Path, manifest: Path) -> None:
    """All twelve utterances are there, each once."""
    report = check(cache, manifest=read_manifest(manifest))
    assert (report.problems, report.repeated, report.utterances) == ([], 0, 12)


def wait_for_end(pids: list[int]) -> None:
    """Until none of the processes is there any more."""
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_two_processes_make_what_one_makes(corpus, scratch):
    """Frames and rows, several versions at once, clips that fail; the summaries agree
    too. In Python, and so that a call that names an engine is what the command does."""
    # So slow that the first process cannot be done with all before the second is there.
    configs = [
        "fbank80",
        write_config(scratch, "Moments", module="row_extractors", piece=20, seconds=0.2),
    ]
    options = {"threads": 2, "shard_megabytes": 0.05}
    one = featcache.extract(
        corpus.manifest(), configs, scratch / "one", featcache.Options("cpu", **options)
    )
    seen = []
    watch = featcache.Observer(
        progress=lambda progress: seen.append((progress.shards, progress.audio_seconds))
    )
    both = featcache.Options("cpu,cpu", **options)
    two = featcache.extract(corpus.manifest(), configs, scratch / "two", both, observer=watch)
    assert arrays(scratch / "one") == arrays(scratch / "two")
    assert len(shard_folders(scratch / "two")) > 6
    told = attrgetter(
        "utterances", "failed_by_reason", "upsampled", "downsampled", "device", "interrupted"
    )
    assert told(one) == told(two)
    # a sum, whose parts come in another order
    assert one.audio_seconds == pytest.approx(two.audio_seconds)
    told = attrgetter("extracted", "failed", "num_bytes", "upsampled", "downsampled", "missing")
    assert [*map(told, one.versions)] == [*map(told, two.versions)]
    assert (one.processes, two.processes) == (1, 2)
    assert seen == sorted(seen)
    assert seen[-1][0] == len(shard_folders(scratch / "two"))


@pytest.mark.parametrize(
    ("how", "most_deaths"), [("segfault", 1), pytest.param("7", 2, marks=pytest.mark.slow)]
)
def test_a_clip_that_ends_its_process_costs_itself_in_one_run(
    cli, plain, scratch, how, most_deaths
):
    config = write_config(scratch, "Crashing")
    job = ("extract", crashing(plain, how), "-c", config, "--shard-size", "0.0008")
    done = cli(*job, "-o", scratch / "c", *TWO).with_code(3)
    assert done.err.count("the process ended at work") <= most_deaths
    assert "12 utterances: 11 extracted" in done.out
    assert_it_cost_itself_alone(cli, plain, config, scratch / "c", how)


def test_an_interrupt_ends_all_processes_and_keeps_what_they_have(
    cli, plain, gate, gated_config, scratch
):
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, "--shard-size", "0.0015")
    # each clip takes longer than the message that stops a process
    job += ("--set", "params.seconds=0.5")
    running, pids = start_two(cli, *job, *TWO, gate=gate, count=2)
    for pid in pids:  # as a terminal does
        os.kill(pid, signal.SIGINT)
    ended = interrupt(running, gate).with_code(130)
    wait_for_end(pids)
    assert "extracted utterances kept" in ended.out
    assert being_written(scratch) == []
    assert [problem.kind for problem in check(scratch).problems] == ["unfinished"]
    assert cli(*job, "--device", "cpu").code == 0  # whatever does the rest
    assert_whole(scratch, plain.manifest())


@pytest.mark.slow
@pytest.mark.parametrize("is_asked_before", [False, True])
def test_a_killed_run_leaves_no_process(cli, plain, gate, gated_config, scratch, is_asked_before):
    """They commit what they have; and end at once if they had been told to stop, and a
    second signal came."""
    job = (
        "extract",
        plain.manifest(),
        "-c",
        gated_config,
        "-o",
        scratch,
        *TWO,
        "--shard-size",
        "0.0015",
    )
    running, pids = start_two(cli, *job, gate=gate, count=1)
    if is_asked_before:
        running.send(signal.SIGTERM)
        running.wait_until(lambda: "interrupted" in running.err())
        time.sleep(1)  # the processes are told
        running.send(signal.SIGTERM)
        assert running.wait().code == 130
        wait_for_end(pids)
        gate.unlink()
    else:
        running.send(signal.SIGKILL)
        running.wait()
        gate.unlink()
        wait_for_end(pids)
        assert being_written(scratch) == []
        assert len(items(scratch)) >= 2
    cli(*job).with_code(0)
    assert_whole(scratch, plain.manifest())
    assert being_written(scratch) == []


@pytest.mark.slow
def test_what_is_wrong_with_a_config_or_the_disk_is_said_once(cli, plain, scratch):
    job = (
        "extract",
        plain.manifest(),
        "-c",
        write_config(scratch, "Wrong"),
        "-o",
        scratch / "c",
        *TWO,
    )
    broken = cli(*job).with_code(1)
    assert broken.err.count("featcache: ") == 1, broken.err
    assert "frames" in broken.err


# Names and shares


def test_devices_by_their_names():
    assert parse_devices("cpu,cpu") == ["cpu", "cpu"]
    for names, message in (
        ("all", "no CUDA device"),
        ("cpu,cuda:7", "cuda:7"),
        ("cpu,", "a name is missing"),
        ("cpu:1", "no number"),
        ("cpu,meta", "meta"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_devices(names)
    for engine in ("dask", None):
        with pytest.raises(ArgumentError, match="there is no such engine; use local, ray"):
            featcache.Options(engine=engine)


def test_the_budget_is_shared():
    assert shares_of(8, ["cpu", "cpu", "cpu"]) == [3, 3, 2]
    assert shares_of(1, ["cuda:0", "cuda:1"]) == [1, 1]


def test_cores_near_a_gpu(tmp_path):
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    for listed, cores in (("4-6,12", {4, 5, 6, 12}), ("0", {0}), ("", set())):
        (device / "local_cpulist").write_text(f"{listed}\n")
        assert cores_near("0000:3b:00.0", tmp_path) == cores
    assert cores_near("0000:00:00.0", tmp_path) == set()
