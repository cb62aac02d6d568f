"""Interrupted runs: what had been extracted is kept, of every shard, and the next run
does the rest."""

import itertools
import os
import pty
import shutil
import signal
import threading
from pathlib import Path
from unittest import mock

import odd_extractors
import pytest
from cache_contents import check, items, ledger, only_version, shard_folders
from corpora import Corpus, speech
from extractions import write_config
from pausing import interrupt, stand_at
from processes import commands

import featcache
from featcache.device import BATCH_SECONDS
from featcache.engines.delivery import Delivery
from featcache.errors import ExtractorError
from featcache.manifest.read import read_manifest

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture(scope="module")
def by_ones(cli):
    """Runs `featcache` commands; a batch is one utterance, and all are in one shard."""
    with commands(modules=["small_batches"], beside=cli) as by_ones:
        yield by_ones


@pytest.fixture
def job(plain, gated_config, scratch) -> tuple:
    return (
        "extract",
        plain.manifest(),
        "-c",
        gated_config,
        "-o",
        scratch / "cache",
        "--threads",
        1,
    )


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_of_the_shard_under_way_what_is_extracted_is_kept(
    by_ones, job, plain, gate, whole, scratch, number
):
    """And what is being extracted, too; the next run adds the rest, bit by bit as an
    uninterrupted run would."""
    running = stand_at(gate, 5, by_ones, *job)
    ended = interrupt(running, gate, number).with_code(130)
    assert (
        "interrupted: 6 extracted utterances kept, 6 left: run the same command again" in ended.out
    )
    assert items(scratch / "cache") == {row["id"]: whole[row["id"]] for row in plain.rows[:6]}
    assert [problem.kind for problem in check(scratch / "cache").problems] == ["unfinished"]
    assert by_ones(*job, "--json").with_code(0).json()["versions"][0]["extracted"] == 6
    assert items(scratch / "cache") == whole
    report = check(scratch / "cache", manifest=read_manifest(plain.manifest()))
    assert (report.problems, report.repeated, report.utterances) == ([], 0, len(whole))


def test_interrupted_again_and_again_it_ends_as_if_it_had_not_been(
    by_ones, job, gate, whole, scratch
):
    for there in range(0, len(whole) - 2, 2):
        ended = interrupt(stand_at(gate, 1, by_ones, *job), gate, signal.SIGTERM)
        assert (ended.code, len(items(scratch / "cache"))) == (130, there + 2)
    assert by_ones(*job).code == 0
    assert items(scratch / "cache") == whole
    assert (check(scratch / "cache").problems, check(scratch / "cache").repeated) == ([], 0)


def test_versions_that_are_filled_together_get_the_same_part(
    by_ones, job, gate, whole, tmp_path, scratch
):
    other = write_config(tmp_path, "Picky")
    running = stand_at(gate, 3, by_ones, *job, "-c", other)
    assert interrupt(running, gate).code == 130
    documents = by_ones("info", scratch / "cache", "--json").json()["versions"]
    assert [document["utterances"] for document in documents] == [4, 4]
    assert by_ones(*job, "-c", other).code == 0
    documents = by_ones("info", scratch / "cache", "--json").json()["versions"]
    assert [document["utterances"] for document in documents] == [len(whole)] * 2


def test_what_failed_before_the_signal_is_in_the_ledger_and_the_rest_is_not(
    by_ones, plain, gated_config, gate, scratch
):
    """The second of each three rows fails. Nothing is known of those that were not tried."""
    rows = [
        {**row, "path": "nowhere.wav"} if i % 3 == 1 else row for i, row in enumerate(plain.rows)
    ]
    job = (
        "extract",
        plain.manifest(rows, "failing.csv"),
        "-c",
        gated_config,
        "-o",
        scratch,
        "--threads",
        1,
    )
    assert interrupt(stand_at(gate, 3, by_ones, *job), gate).code == 130
    assert {*items(scratch)} == {rows[i]["id"] for i in (0, 2, 3, 5)}
    assert {*ledger(scratch)} == {rows[i]["id"] for i in (1, 4)}
    assert by_ones(*job).code == 3
    assert len(items(scratch)) == 8
    assert len(ledger(scratch)) == 4


def test_of_rows_that_are_replaced_those_that_were_not_reached_keep_their_items(
    by_ones, job, plain, gate, whole, scratch
):
    """Every row now names the file of the next one; the run is interrupted after the
    third."""
    cache = scratch / "cache"
    assert by_ones(*job).code == 0
    paths = [row["path"] for row in plain.rows]
    rows = [{"id": row["id"], "path": paths[i - 1]} for i, row in enumerate(plain.rows)]
    replacing = ("extract", plain.manifest(rows, "next.csv"), *job[2:], "--replace")
    assert interrupt(stand_at(gate, 2, by_ones, *replacing), gate).code == 130
    ids = [row["id"] for row in rows]
    new = {ids[i]: whole[ids[i - 1]] for i in range(len(ids))}
    assert items(cache) == whole | {id_: new[id_] for id_ in ids[:3]}
    assert [problem.kind for problem in check(cache).problems] == ["unfinished"]
    assert by_ones(*replacing).code == 0
    assert items(cache) == new
    assert (check(cache).problems, check(cache).repeated) == ([], 0)


def test_a_terminal_that_is_closed_loses_nothing(by_ones, job, gate, whole, scratch):
    """The shell's window goes, and with it stderr: what was extracted is committed all
    the same."""
    terminal, stderr = pty.openpty()
    running = stand_at(gate, 4, by_ones, *job, stderr=Path(os.ttyname(stderr)))
    os.close(terminal)
    os.close(stderr)
    running.send(signal.SIGHUP)  # as the kernel does
    gate.unlink()
    # on a busy machine, all may be done before the signal comes
    assert running.wait().code in (0, 130)
    there = items(scratch / "cache")
    assert 5 <= len(there) <= len(whole)
    assert there == {id_: whole[id_] for id_ in [*whole][: len(there)]}


def test_a_second_interrupt_stops_at_once(cli, plain, gate, gated_config, scratch):
    """Nobody waits for an extractor that takes its time: this one never ends. At once too
    if both signals come before anything was said, the second while the first is being
    handled."""
    for attempt in range(6):
        running = stand_at(
            gate, 0, cli, "extract", plain.manifest(), "-c", gated_config, "-o", scratch / "c"
        )
        running.send(signal.SIGINT)
        if attempt == 0:
            running.wait_until(lambda: "interrupted" in running.err())  # noqa: B023
        running.send(signal.SIGTERM)  # two of a kind may be delivered as one
        assert running.wait().code == 130
        assert check(scratch / "c").utterances == 0
        shutil.rmtree(scratch / "c")


# Stopped after each batch


@pytest.fixture
def clips(tmp_path) -> Path:
    """Ten clips of four lengths."""
    made = Corpus(tmp_path)
    for number in range(10):
        seconds = round(0.11 + 0.1 * (number % 4), 2)
        made.record(str(number), f"{number}.wav", speech(seconds, seed=number), duration=seconds)
    return made.manifest()


def run(manifest: Path, config: Path, cache: Path, threads: int, stop_after: int | None = None):
    """Extract in this process; the run is stopped when so many batches are appended."""
    stop, appended, write = threading.Event(), itertools.count(1), Delivery.append

    def counted(*batch):
        if next(appended) == stop_after:
            stop.set()
        write(*batch)

    with mock.patch.object(Delivery, "append", counted):
        return featcache.extract(
            manifest, config, cache, featcache.Options("cpu", threads), stop=stop
        )


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(
    ("extractor", "module", "augment"),
    [
        ("Slow", "odd_extractors", ""),
        ("Shapes", "row_extractors", ""),
        ("Shapes", "row_extractors", "augment: {speed: [0.9, 1.0, 1.1]}\n"),
    ],
    ids=["clips", "rows", "copies"],
)
def test_stopped_after_any_batch_a_run_keeps_a_beginning(
    clips, tmp_path, scratch, monkeypatch, extractor, module, augment, threads
):
    """Whatever rows wait for others: no batch that was taken is lost, and the copies of
    an utterance stay together."""
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    config = write_config(tmp_path, extractor, module=module)
    config.write_text(config.read_text() + augment)
    run(clips, config, scratch / "whole", threads)
    whole = items(scratch / "whole")
    for number in (1, 2, 5, 9):
        cache = scratch / str(number)
        summary = run(clips, config, cache, threads, stop_after=number)
        there, copies = items(cache), len(whole) // 10
        assert summary.interrupted
        assert number * copies <= len(there) == summary.versions[0].extracted
        assert there == {id_: whole[id_] for id_ in [*whole][: len(there)]}
        assert len(there) % copies == 0
        assert summary.versions[0].missing == len(whole) - len(there)
        version = only_version(cache)
        committed = sum(version.shard(name).info.seconds for name in version.shard_names())
        assert summary.audio_seconds == pytest.approx(committed)
        run(clips, config, cache, threads)
        assert items(cache) == whole
        assert (check(cache).problems, check(cache).repeated) == ([], 0)


def test_a_run_that_ends_by_an_error_commits_no_part_of_a_shard(
    clips, tmp_path, scratch, monkeypatch
):
    """Three clips have been appended when the extractor fails at the fourth."""
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    extract_clip, calls = odd_extractors.Slow.extract_clip, itertools.count(1)

    def breaks(extractor, clip):
        if next(calls) == 4:
            raise ExtractorError("a bug")
        return extract_clip(extractor, clip)

    monkeypatch.setattr(odd_extractors.Slow, "extract_clip", breaks)
    with pytest.raises(ExtractorError, match="a bug"):
        run(clips, write_config(tmp_path, "Slow"), scratch, 1)
    assert shard_folders(scratch) == []
