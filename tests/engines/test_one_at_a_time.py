"""One command at a time works on a version: the next one says which does, or waits. (That
a kill lets the next one begin, in storage/test_directory.py and faults/test_kills.py.)"""

import signal
import socket
import threading
from pathlib import Path

import pytest
from cache_contents import check, items, only_version
from extractions import ONE_EACH
from pausing import interrupt

import featcache
from featcache.care.prune import plan_prune, prune
from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import LockedError
from featcache.extraction.extraction import exclusively, run_extraction
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest
from featcache.version.wanted import read_all_wanted

WAITS = "this run waits until that has ended"


@pytest.fixture
def job(plain, gated_config, gate, scratch):
    """An extraction that stands still at the third utterance, each in a shard of its own."""
    gate.write_text("2")
    command = ("extract", plain.manifest(), "-c", gated_config, "-o", scratch / "c", "--threads", 1)
    return (*command, "--shard-size", ONE_EACH)


@pytest.fixture
def at_gate(cli, job, scratch):
    """That extraction, which holds the lock."""
    running = cli.start(*job)
    running.wait_until(lambda: len(list((scratch / "c").glob("*/shards/*/"))) == 2)
    return running


def test_who_comes_second_is_told_who_is_at_work(cli, plain, job, at_gate, gate, scratch):
    """Whatever it was to do, nothing is changed; whoever reads, or has nothing to do,
    does so."""
    version = only_version(scratch / "c")
    cache, manifest = scratch / "c", plain.manifest()
    done = plain.manifest([row for row in plain.rows if row["id"] in items(cache)], "done.csv")
    for command in (
        job,
        ("repair", cache, "--manifest", manifest),
        ("prune", cache, "--manifest", plain.manifest(plain.rows[:1], "one.csv"), "--yes"),
        ("rm", version.path, "--yes"),
    ):
        (line,) = cli(*command).with_code(1).err.splitlines()
        assert f"process {at_gate.pid} on {socket.gethostname()}" in line, command
    line = cli(*job).err
    assert line.startswith(
        f"featcache: {version.path}: is in use by featcache extract, process {at_gate.pid} on "
    )
    assert all(word in line for word in (" UTC: ", "--wait", "--partition"))
    assert "2 utterances" in cli("info", cache).out
    assert "nothing to do" in cli("extract", done, *job[2:]).with_code(0).out
    gate.unlink()
    assert at_gate.wait().code == 0
    assert len(items(cache)) == len(plain.rows)


def test_a_run_that_is_refused_leaves_no_version(cli, job, at_gate, gate, scratch):
    """Folders are locked in order: that of fbank80 is made before the other is refused."""
    cache = scratch / "c"
    before = [path.name for path in cache.iterdir()]
    refused = cli(*job, "-c", "fbank80").with_code(1)
    assert f"process {at_gate.pid} on " in refused.err
    assert [path.name for path in cache.iterdir()] == before
    gate.unlink()
    assert at_gate.wait().code == 0
    cli("verify", cache).with_code(0)


def test_with_wait_the_second_does_what_the_first_has_not_unless_it_is_interrupted(
    cli, plain, job, at_gate, gate, scratch
):
    impatient, waiting = (cli.start(*job, "--wait", "--json") for _ in range(2))
    for one in (impatient, waiting):
        one.wait_until(lambda: WAITS in one.err())  # noqa: B023
    impatient.send(signal.SIGINT)
    summary = impatient.wait().with_code(130).json()
    assert (summary["interrupted"], summary["versions"][0]["extracted"]) == (True, 0)
    assert interrupt(at_gate, gate).code == 130
    there = len(items(scratch / "c"))
    ended = waiting.wait()
    summary = ended.json()["versions"][0]
    assert (ended.code, summary["present"], summary["extracted"]) == (
        0,
        there,
        len(plain.rows) - there,
    )
    assert ended.err.count(WAITS) == 1
    assert check(scratch / "c").repeated == 0


def test_what_has_changed_since_it_was_planned_is_planned_again(plain, scratch):
    """All of it was pruned away but six, or done by another run in the meantime."""

    def planned(rows, name):
        manifest = read_manifest(plain.manifest(rows, name))
        return plan_extraction(
            manifest, [load_config("fbank80")], scratch, featcache.Options("cpu", 1)
        )

    early = planned(plain.rows, "manifest.csv")
    expected = featcache.extract(plain.manifest(), cache=scratch).versions[0].extracted
    with exclusively(early, threading.Event()) as plan:
        assert [one.versions[0].num_missing for one in (early, plan)] == [expected, 0]
    more = planned([*plain.rows, {**plain.rows[0], "id": "new"}], "more.csv")
    whole, version = items(scratch), only_version(scratch)
    half = planned(plain.rows[:6], "half.csv").manifest.ids.hashes()
    assert prune(version, plan_prune(version, half), half).rewritten == 1
    with exclusively(more, threading.Event()) as plan:
        assert run_extraction(plan, run_locally).versions[0].extracted == 7
    assert items(scratch).items() >= whole.items()
    assert check(scratch).problems == []


def test_a_run_that_finds_all_done_once_it_has_the_lock_keeps_what_it_wants(plain, scratch):
    manifest = read_manifest(plain.manifest(plain.rows, "early.csv"))
    early = plan_extraction(
        manifest, [load_config("fbank80")], scratch, featcache.Options("cpu", 1)
    )
    featcache.extract(plain.manifest(), cache=scratch)
    with exclusively(early, threading.Event()) as plan:
        assert run_extraction(plan, run_locally).versions[0].extracted == 0
    assert "early.csv" in {
        Path(wanted.manifest).name for wanted in read_all_wanted(only_version(scratch))
    }


def test_in_python_who_waits_is_stopped_by_its_event(plain, scratch):
    featcache.extract(plain.manifest(plain.rows[:2], "2.csv"), cache=scratch)
    with only_version(scratch).at_work("repair"):
        with pytest.raises(
            LockedError, match=r"is in use by featcache repair, .*: run again when it has ended, or"
        ):
            featcache.extract(plain.manifest(), cache=scratch)
        stop = threading.Event()
        threading.Timer(0.2, stop.set).start()
        given = {"cache": scratch, "options": featcache.Options(wait=True), "stop": stop}
        # the second is not there yet
        summary = featcache.extract(plain.manifest(), ["fbank80", "mfcc13"], **given)
    assert (summary.interrupted, [version.extracted for version in summary.versions]) == (
        True,
        [0, 0],
    )


def test_a_part_of_a_corpus_that_is_busy_does_not_hold_up_the_others(cli, plain, scratch):
    rows = {name: plain.rows[at : at + 2] for at, name in enumerate("ab")}
    manifests = [plain.manifest(some, f"{name}.csv") for name, some in rows.items()]
    corpus = ("extract", *manifests, "-o", scratch / "corpus")
    assert cli(*corpus, "--threads", 1).code == 0
    manifests = [plain.manifest(plain.rows[:4], f"{name}.csv") for name in rows]
    with only_version(scratch / "corpus" / "a").at_work("repair"):
        ended = cli(*corpus, "--json")
    assert (ended.code, "part a: " in ended.err, "featcache repair, process" in ended.err) == (
        1,
        True,
        True,
    )
    busy, done = ended.json()["parts"]
    assert (busy["error"]["type"], done["versions"][0]["extracted"]) == ("LockedError", 2)
