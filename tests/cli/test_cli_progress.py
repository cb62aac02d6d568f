"""Progress on stderr: on terminals of any width, and where there is none."""

from __future__ import annotations

import io
import re
import sys

import pytest
from extractions import write_config
from processes import on_terminal

from featcache.cli import progress
from featcache.extraction.jobs import Progress


def shown_on_terminal(cli, columns, *command):
    """What a command writes that ends well."""
    code, shown = on_terminal(cli, columns, *command)
    assert code == 0
    return shown


@pytest.fixture
def slow(plain, scratch):
    """A command that takes some time."""
    config = write_config(scratch, "Slow", seconds=0.05)
    return ("extract", plain.manifest(), "-o", scratch / "c", "-c", config, "--threads", 1, "--shard-size", 0.0003)


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_there_is_a_bar(cli, slow, columns):
    """Hours done, time left, failures, times real time fit in 80 columns; and none of it is left at the end."""
    shown = shown_on_terminal(cli, columns, *slow)
    for words in ("of 6.1 s", " left", "0 failed", "× real time"):
        assert words in shown
    lines = re.split("[\r\n]", shown)
    assert any("█" in line for line in lines)
    assert max(map(len, lines)) <= columns
    assert lines[-1].strip() == lines[-2].strip() == ""


def test_on_a_narrow_terminal_the_first_words_are_shown(cli, slow):
    shown = shown_on_terminal(cli, 40, *slow)
    assert "of 6.1 s" in shown
    assert max(map(len, re.split("[\r\n]", shown))) <= 40


class Planned:
    """What `Display` asks of an extraction."""

    seconds_to_decode = 7200.0


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError("a terminal without a size, as some containers have it")


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_elsewhere_there_are_lines_soon_and_then_now_and_then(monkeypatch, stream):
    """The first after five seconds, so that what is short is silent, and one in thirty from there on."""
    clock = [1000.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", written := stream())
    told = []
    with progress.Display(Planned()) as display:
        so_far = Progress(failures={"empty": 2})
        for second in range(70):
            clock[0] = 1000.0 + second
            so_far.audio_seconds = 100.0 * second
            display.update(so_far)
            if len(lines := written.getvalue().splitlines()) > len(told):
                told.append(second)
    assert told == [5, 35, 65]
    assert lines[1] == "58.3 min of 2.00 h, 0:37 left, 2 failed, 100 × real time"
