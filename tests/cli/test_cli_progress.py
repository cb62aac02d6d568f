"""Progress on stderr, on terminals of any width and where there is none, and as JSON; and
quiet."""

import io
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from time import monotonic, sleep
from unittest.mock import Mock

import pytest
from cache_contents import only_version
from extractions import ONE_EACH, write_config
from processes import on_terminal

from featcache.cli import progress
from featcache.extraction.jobs import Progress, VersionCounts
from featcache.version.in_flight import InFlight


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_on_a_terminal_there_is_a_bar(cli, plain, scratch, columns):
    """Hours done, time left, failures, times real time fit in 80 columns, and the first
    words in 40; none of it is left at the end."""
    job = (
        "extract",
        plain.manifest(),
        "-o",
        scratch / "c",
        "-c",
        write_config(scratch, "Slow", seconds=0.05),
    )
    code, shown = on_terminal(cli, columns, *job, "--threads", 1, "--shard-size", ONE_EACH)
    assert code == 0
    for words in ("of 6.1 s", " left", "0 failed", "× real time")[: 4 if columns >= 80 else 1]:
        assert words in shown
    lines = re.split("[\r\n]", shown)
    assert any("█" in line for line in lines) or columns < 80
    assert max(map(len, lines)) <= columns
    assert lines[-1].strip() == lines[-2].strip() == ""


PLANNED = Mock(spec=["seconds_to_decode"], seconds_to_decode=7200.0)
"""What `Display` asks of an extraction."""


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError("a terminal without a size, as some containers have it")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_elsewhere_there_are_lines_soon_and_then_now_and_then(monkeypatch, stream):
    """The first after five seconds, so that what is short is silent, and one in thirty
    from there on."""
    monkeypatch.setattr(progress, "monotonic", clock := Mock(return_value=1000.0))
    monkeypatch.setattr(sys, "stderr", written := stream())
    told = []
    with progress.Display(PLANNED) as display:
        so_far = Progress(
            failures=Counter(empty=2),
            versions={"one": VersionCounts(5, 2), "other": VersionCounts(4, 1)},
            stages={"decode": 2.0, "extract": 1.0},
        )
        for second in range(70):
            clock.return_value = 1000.0 + second
            display.update(replace(so_far, audio_seconds=100.0 * second))
            if len(lines := written.getvalue().splitlines()) > len(told):
                told.append(second)
    assert told == [5, 35, 65]
    assert lines[1] == (
        "58.3 min of 2.00 h, 00:37 left, 2 failed, 100 × real time, most time: decoding, "
        "7 utterances"
    )


def test_after_a_while_without_an_utterance_those_in_progress_are_named(
    cli, plain, scratch, monkeypatch
):
    """And again only after twice as long. Runs that were killed are not in progress."""
    cache = scratch / "cache"
    cli("extract", plain.manifest(), "-o", cache).with_code(0)
    version = only_version(cache)
    plan = Mock(seconds_to_decode=7200.0, versions=[Mock(path=version.path)])
    monkeypatch.setattr(progress, "monotonic", clock := Mock(return_value=1000.0))
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    killed = version.store.marks_folder / "killed"
    killed.mkdir()
    (killed / "in_flight.0").write_text('{"ids": ["old"], "apart": false}\n')
    display, named = progress.Display(plan), []
    with InFlight([(version, "run")], 2) as in_flight, in_flight.working_on(1, ["utt-07", "b"]):
        for second in range(400):
            clock.return_value = 1000.0 + second
            if second == 10:
                display.update(Progress(audio_seconds=5.0))
            display._note_hang()
            if len(lines := written.getvalue().splitlines()) > len(named):
                named.append(second)
    assert [lines[at] for at in (-2, -1)] == [
        f"no utterance was finished for {seconds} s: in progress: utt-07, b"
        for seconds in (120, 240)
    ]
    assert named[-3:] == [70, 130, 250]


def test_counted_things_have_the_same_form(monkeypatch):
    monkeypatch.setattr(progress, "monotonic", clock := Mock(return_value=1000.0))
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with progress.Steps(40, "shards") as steps, progress.Steps(None, "frames") as frames:
        for second in range(36):
            clock.return_value = 1000.0 + second
            steps.update()
            frames.update(100)
    assert written.getvalue().splitlines() == [
        "6 of 40 shards, 00:28 left, 1.2 shards/s",
        "600 frames, 120.0 frames/s",
        "36 of 40 shards, 00:03 left, 1.0 shards/s",
        "3,600 frames, 102.9 frames/s",
    ]


def test_shards_have_utterances_hours_damage_and_speed(monkeypatch):
    """A shard that is read twice counts once."""
    monkeypatch.setattr(progress, "monotonic", clock := Mock(return_value=1000.0))
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with progress.Shards(20, passes=2) as shards:
        for second in range(6):
            clock.return_value = 1000.0 + second
            shards.done(50, 360.0, second == 3)
            shards.done(0, 0.0, False)
    assert written.getvalue().splitlines() == [
        "5 of 20 shards, 00:13 left, 1 damaged, 432 × real time, 36.0 min, 300 utterances"
    ]


def test_a_narrow_terminal_gets_the_first_words_and_nothing_is_shown_of_nothing(monkeypatch):
    monkeypatch.setattr(progress, "terminal_columns", lambda: 40)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    monkeypatch.setattr(progress, "monotonic", clock := Mock(return_value=1000.0))

    class Words(progress.Line):
        def _parts(self):
            return ["3 of 10 s", "00:07 left", "0 failed", "1 utterance"]

    line = Words(10)
    line._bar = Mock(n=0)
    clock.return_value = 1010.0
    line.show(3)
    assert line._bar.set_description_str.call_args.args == ("3 of 10 s, 00:07 left",)
    monkeypatch.setattr(progress, "monotonic", lambda: 1e9)
    shown = written.getvalue()
    Words(0).show(0)
    assert written.getvalue() == shown


def test_json_is_a_line_a_minute_and_one_at_the_end(monkeypatch):
    """Shares and speeds of stages are those since the line before, and at the end of the
    whole run."""
    monkeypatch.setattr(progress, "monotonic", clock := Mock(return_value=1000.0))
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with progress.Display(PLANNED, "json") as display:
        so_far = Progress(failures=Counter(empty=2), shards=3)
        for second in range(130):
            clock.return_value = 1000.0 + second
            stages = {"decode": 0.5 * second, "extract": 1.5 * max(0, second - 60), "wait": 0.0}
            display.update(replace(so_far, audio_seconds=10.0 * second, stages=stages))
    first, second, last = map(json.loads, written.getvalue().splitlines())
    assert [line["elapsed_seconds"] for line in (first, second, last)] == [60, 120, 129]
    assert [line["is_end"] for line in (first, second, last)] == [False, False, True]
    assert first["stages"] == {"decode": 1, "extract": 0, "wait": 0}
    assert second["stages"] == {"decode": 0.25, "extract": 0.75, "wait": 0}
    assert second["stages_times_real_time"] == {
        "decode": 20,
        "extract": pytest.approx(600 / 90, abs=0.05),
    }
    assert last["stages"] == {
        "decode": pytest.approx(64.5 / 168, abs=1e-4),
        "extract": 0.6161,
        "wait": 0,
    }
    assert [line["bottleneck"] for line in (first, second, last)] == [
        "decode",
        "extract",
        "extract",
    ]
    assert (second["audio_seconds"], second["audio_seconds_in_all"], second["seconds_left"]) == (
        1200,
        7200,
        600,
    )
    assert (second["times_real_time"], second["failed"], second["shards"]) == (10, 2, 3)


@pytest.mark.parametrize("has_begun", [True, False])
def test_json_goes_on_while_nothing_is_done(monkeypatch, has_begun):
    monkeypatch.setattr(progress, "_JSON_SECONDS", 0.02)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    with progress.Display(PLANNED, "json") as display:
        if has_begun:
            display.update(Progress())
        limit = monotonic() + 10
        while written.getvalue().count("\n") < 2 and monotonic() < limit:
            sleep(0.01)
    assert all(json.loads(line)["times_real_time"] == 0 for line in written.getvalue().splitlines())
    assert written.getvalue().count("\n") >= 3


def test_quiet_is_all_but_errors(cli, plain, scratch):
    gone = plain.manifest([{"id": "gone", "path": "gone.wav"}], "gone.csv")
    made = cli("extract", gone, "-o", scratch / "c", "-q", "--json")
    assert (made.code, made.err, made.json()["failed_by_reason"]) == (3, "", {"file_missing": 1})
    said = cli.refused("extract", gone, "-o", scratch / "c", "-q", "-c", "nonsense")
    assert said.startswith("featcache: config nonsense: ")
