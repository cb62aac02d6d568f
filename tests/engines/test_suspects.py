"""A clip that ends the process that extracts it costs itself, and nothing else."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cache_contents import check, items, ledger, only_version, shard_folders
from corpora import Corpus
from extractions import ONE_EACH, extracted, write_config
from pausing import interrupt

import featcache
from featcache.version.in_flight import InFlight, Suspects, find_suspects
from featcache.version.records import Run, read_run, run_names
from featcache.version.version import Version

ONE_THREAD = featcache.Options("cpu", 1)


def crashing(corpus: Corpus, *culprits: str) -> Path:
    """A manifest of all the clips, of which some crash their process, each in the way
    that its name says."""
    rows = [dict(row) for row in corpus.rows]
    for number, how in enumerate(culprits):
        rows[1 + 4 * number]["id"] += f"!{how}"
    return corpus.manifest(rows, f"crashing-{'-'.join(culprits)}.csv")


def run_until_it_ends(cli, *job, **options) -> tuple[int, int]:
    """Start a command again for as long as its process is killed; the exit code in the
    end, and the deaths before."""
    for deaths in range(20):
        finished = cli(*job, **options)
        if finished.code in (0, 3):
            return finished.code, deaths
    raise AssertionError(f"it dies again and again: {finished.err}")


def arrays(cache: Path) -> dict[str, bytes]:
    """The bytes of all arrays of all shards."""
    files = (path for shard in shard_folders(cache) for path in shard.glob("*/c/**/*"))
    return {str(path.relative_to(cache)): path.read_bytes() for path in files if path.is_file()}


def marks(cache: Path) -> list[Path]:
    """What runs have left of what was in flight."""
    return [*cache.rglob("desk/*/in_flight.*"), *cache.rglob("desk/*/crash.txt")]


def failures(cache: Path) -> dict[str, tuple[str, str]]:
    """The ledger: reason and message, by the id of the utterance."""
    return {id_: (one.reason, one.message) for id_, one in ledger(cache).items()}


def as_if_killed(version, ids: list[str], apart: bool = False, crash: str = "") -> None:
    """Leave what a run leaves that dies with some utterances in flight."""
    folder = version.store.marks_folder / Run(version, {}).id
    folder.mkdir()
    (folder / "in_flight.0").write_text(json.dumps({"ids": ids, "apart": apart}) + "\nstale")
    (folder / "in_flight.1").write_text("\n" + json.dumps({"ids": ["cleared"], "apart": False}))
    if crash:
        (folder / "crash.txt").write_text(crash)


def assert_it_cost_itself_alone(cli, plain, config, cache: Path, how: str) -> None:
    """The second clip, which ends its process, is in the ledger; everything else is
    there, as if it had never been."""
    ended = {"segfault": "SIGSEGV", "7": "exit code 7"}[how]
    assert failures(cache) == {
        f"{plain.ids[1]}!{how}": ("crashed", f"extracting it ended a process: {ended}")
    }
    assert marks(cache) == []
    assert check(cache).problems == []
    others = plain.manifest([row for row in plain.rows if row["id"] != plain.ids[1]], "others.csv")
    whole = cache.with_name("others")
    assert cli("extract", others, "-c", config, "-o", whole, "--threads", 1).code == 0
    assert items(cache) == items(whole)


# The whole of it, in real processes


def test_a_clip_that_crashes_its_process_ends_in_the_ledger(cli, plain, scratch):
    manifest, config = crashing(plain, "segfault"), write_config(scratch, "Crashing")
    job = (
        "extract",
        manifest,
        "-c",
        config,
        "-o",
        scratch / "c",
        "--threads",
        1,
        "--shard-size",
        "0.0008",
    )
    (scratch / "here").mkdir()
    (scratch / "here" / "json.py").write_text(
        "raise SystemExit('the current folder is not to be imported from')"
    )
    code, deaths = run_until_it_ends(cli, *job, cwd=scratch / "here")
    assert (code, deaths) == (3, 1)
    assert_it_cost_itself_alone(cli, plain, config, scratch / "c", "segfault")
    assert "crashed 1" in cli(*job).with_code(3).out


def test_a_worker_that_is_killed_after_it_did_some_of_its_work_has_not_finished(
    cli, plain, scratch
):
    manifest, config = crashing(plain, "SIGKILL"), write_config(scratch, "Crashing")
    rows = manifest.read_text().splitlines(keepends=True)
    # the culprit comes last
    manifest.write_text("".join([rows[0], *rows[3:], rows[1], rows[2]]))
    job = (
        "extract",
        manifest,
        "-c",
        config,
        "-o",
        scratch / "c",
        "--device",
        "cpu,cpu",
        "--shard-size",
        ONE_EACH,
    )
    cli(*job).with_code(3)
    store = only_version(scratch / "c").store
    runs = [read_run(store, name) for name in run_names(store)]
    assert any(run.outcome.get("extracted") for run in runs if not run.finished)


@pytest.mark.slow
def test_clips_that_kill_their_process_cost_few_runs(cli, plain, scratch):
    """Three, each in a way that leaves no trace: the first costs two runs, the others one
    each. Asked for, they are tried again, apart."""
    manifest, config = crashing(plain, "SIGKILL", "7", "SIGKILL"), write_config(scratch, "Crashing")
    job = (
        "extract",
        manifest,
        "-c",
        config,
        "-o",
        scratch / "c",
        "--threads",
        1,
        "--shard-size",
        ONE_EACH,
    )
    code, deaths = run_until_it_ends(cli, *job)
    assert code == 3
    assert deaths <= 2 + 1 + 1
    found = failures(scratch / "c")
    assert {reason for reason, _ in found.values()} == {"crashed"}
    assert [message.rpartition(": ")[2] for _, message in found.values()] == [
        "SIGKILL",
        "exit code 7",
        "SIGKILL",
    ]
    assert len(items(scratch / "c")) == len(plain.rows) - 3
    assert "crashed 3" in cli(*job, "--retry-failed").with_code(3).out


@pytest.mark.parametrize("how", ["numpy", "memory"])
def test_a_clip_without_enough_memory_is_that_clips_failure(cli, plain, scratch, how):
    job = (
        "extract",
        crashing(plain, how),
        "-c",
        write_config(scratch, "Crashing"),
        "-o",
        scratch / "c",
    )
    cli(*job).with_code(3)
    assert [reason for reason, _ in failures(scratch / "c").values()] == ["out_of_memory"]
    assert len(items(scratch / "c")) == len(plain.rows) - 1
    assert marks(scratch / "c") == []
    assert cli(*job, "--json").json()["failed_by_reason"] == {"out_of_memory": 1}


def test_an_interrupt_condemns_nobody(cli, plain, gate, gated_config, scratch):
    """Signals to all processes of a job, as from a scheduler, end neither the other
    process nor the clip in it."""
    first = plain.manifest(plain.rows[:1], "one.csv")
    assert cli("extract", first, "-c", gated_config, "-o", scratch).code == 0
    as_if_killed(
        only_version(scratch), plain.ids[1:3], crash="Fatal Python error: Segmentation fault"
    )
    gate.write_text("0")
    job = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch, "--threads", 1)
    running = cli.start(*job)
    running.wait_until(
        lambda: any(
            f'["{plain.ids[1]}"], "apart": true' in path.read_text() for path in marks(scratch)
        )
    )
    running.wait_until(lambda: children_of(running.pid))
    (other,) = children_of(running.pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(other, number)
    assert interrupt(running, gate, signal.SIGTERM).code == 130
    assert failures(scratch) == {}
    finished = cli(*job, "--json")
    # the suspect is there
    assert (finished.code, extracted(finished)) == (0, len(plain.rows) - 2)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [
        int(child)
        for path in Path(f"/proc/{pid}/task").glob("*/children")
        for child in path.read_text().split()
    ]


def test_what_is_extracted_apart_is_bit_for_bit_the_same(plain, scratch):
    """Frames, rows, quantised values and silence, of several versions at once; shards
    have the same names, too."""
    plain = plain.copy(scratch / "corpus")
    soundfile.write(plain.folder / plain.rows[3]["path"], np.zeros(16000), 16000)
    configs = [
        "fbank80",
        "fbank80-uint8",
        write_config(scratch, "Moments", module="row_extractors", piece=20),
    ]
    usual, apart = scratch / "usual", scratch / "apart"
    for cache in (usual, apart):
        featcache.extract(plain.manifest(plain.rows[:1], "one.csv"), configs, cache, ONE_THREAD)
    for folder in apart.iterdir():
        as_if_killed(Version.open(folder), plain.ids[3:6], crash="Fatal Python error: Aborted")
    for cache in (usual, apart):
        summary = featcache.extract(plain.manifest(), configs, cache, featcache.Options("cpu", 2))
        assert (summary.failed, summary.silent) == (0, 1)
    assert arrays(usual) == arrays(apart)
    assert marks(apart) == []


def test_what_leaves_a_device_useless_is_a_crash(plain, scratch, monkeypatch):
    """Some CUDA errors stay until the process ends: what was in flight is suspected, as
    after a fatal signal."""
    monkeypatch.setattr("featcache.device.Device.is_lost", lambda self: True)
    with pytest.raises(RuntimeError, match="CUDA error"):
        featcache.extract(
            plain.manifest(), write_config(scratch, "Broken"), scratch / "c", ONE_THREAD
        )
    version = only_version(scratch / "c")
    (crash,) = [path.read_text() for path in marks(scratch / "c") if path.name == "crash.txt"]
    assert crash == "cpu: CUDA error: out of cheese"
    assert plain.ids[0] in find_suspects(version, {}, dead={*run_names(version.store)}).ids


def test_suspects_fail_where_no_other_process_can_begin(plain, slow_config, scratch, monkeypatch):
    """Better than to crash everything again: the rest is extracted, and the ledger says
    why."""
    monkeypatch.setattr("featcache.engines.isolated._MAIN", "odd_extractors:end_at_once")
    featcache.extract(plain.manifest(plain.rows[:1], "one.csv"), slow_config, scratch, ONE_THREAD)
    as_if_killed(only_version(scratch), plain.ids[2:5], crash="Fatal Python error: Aborted")
    featcache.extract(plain.manifest(), slow_config, scratch, featcache.Options("cpu", 2))
    found = failures(scratch)
    assert {*found} == {*plain.ids[2:5]}
    assert found[plain.ids[2]][1] == "a process of its own cannot begin: it ended: exit code 5"
    assert len(items(scratch)) == len(plain.rows) - 3


# Marks


def test_what_ended_two_runs_though_it_was_apart_is_not_tried_again(
    cli, plain, slow_config, scratch
):
    """As where the system ends a whole container for the memory of one process in it."""
    assert (
        cli(
            "extract", plain.manifest(plain.rows[:1], "one.csv"), "-c", slow_config, "-o", scratch
        ).code
        == 0
    )
    for _ in range(2):
        as_if_killed(only_version(scratch), [plain.ids[4]], apart=True)
    finished = cli("extract", plain.manifest(), "-c", slow_config, "-o", scratch).with_code(3)
    assert f"1 utterance in flight ({plain.ids[4]})" in finished.err
    assert [*failures(scratch)] == [plain.ids[4]]
    assert len(items(scratch)) == len(plain.rows) - 1


def test_marks_say_what_each_worker_works_on_and_go_with_the_run(version):
    """A long one is followed by a short one; ids may hold anything; an error takes the
    marks along, unless it is one of memory."""
    run = Run(version, {}).id
    folder = version.store.marks_folder / run
    with InFlight([(version, run)], 2) as in_flight:
        with (
            in_flight.working_on(0, ["a" * 10_000, "\udc80\n"]),
            in_flight.working_on(1, ["b"], apart=True),
        ):
            pass
        with in_flight.working_on(0, ["c\nd"]):
            lines = [
                path.read_bytes().split(b"\n")[0] for path in sorted(folder.glob("in_flight.*"))
            ]
            assert [line and json.loads(line) for line in lines] == [
                {"ids": ["c\nd"], "apart": False},
                b"",
            ]
            assert find_suspects(version, {}) == Suspects()  # it is alive
    assert not folder.exists()
    for error, stay in ((ValueError, False), (MemoryError, True)):
        with (
            pytest.raises(error),
            InFlight([(version, run)], 1) as in_flight,
            in_flight.working_on(0, ["e"]),
        ):
            raise error
        assert (folder / "in_flight.0").exists() is stay
