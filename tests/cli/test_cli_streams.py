"""Standard streams that are closed or full: the work goes on, and its result and exit code are the same."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cache_contents import check, chunk_files

CLOSED = {"stdin": "<&-", "stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-"}


def shell(command: list, redirections: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run a featcache command from a real shell, with redirections."""
    line = shlex.join([sys.executable, "-m", "featcache", *map(str, command)])
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = ["sh", "-c", f"{line} {redirections}"]
    return subprocess.run(done, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


COMMANDS = [
    (["extract", "{manifest}", "-o", "{new}"], 0),
    (["extract", "{failing}", "-o", "{new}"], 3),
    (["extract", "nowhere.csv"], 2),
    (["extract", "--no-such-option"], 2),
    (["info", "nowhere"], 1),
    (["verify", "{damaged}", "--no-data"], 1),
    (["verify", "{cache}"], 0),
    (["repair", "{cache}", "--manifest", "{manifest}"], 0),
    (["info", "{cache}"], 0),
    (["show", "{cache}", "utt-00"], 0),
    (["stats", "{cache}"], 0),
    (["configs"], 0),
    (["probe", "fbank80", "{manifest}", "--device", "cpu", "--utterances", "2"], 0),
    (["fit-kmeans", "{cache}", "-k", "2", "-o", "{new}"], 0),
]
"""Each with its exit code."""


@pytest.mark.parametrize(
    ("command", "code", "closed"),
    [(*command, "all") for command in COMMANDS] + [(*command, "stderr") for command in COMMANDS[:6]],
    ids=lambda part: part[0] if isinstance(part, list) else str(part),
)
def test_a_closed_stream_changes_neither_work_nor_exit_code(
    plain, cache, spoiled, scratch, tmp_path, command, code, closed
):
    rows = [{**row, "path": "nowhere.wav"} if i == 1 else row for i, row in enumerate(plain.rows)]
    places = {
        "manifest": plain.manifest(),
        "failing": plain.manifest(rows, "one-fails.csv"),
        "cache": cache,
        "damaged": spoiled,
        "new": scratch / "new",
    }
    ended = shell([argument.format(**places) for argument in command], CLOSED[closed], tmp_path)
    assert (ended.returncode, ended.stderr) == (code, "")


@pytest.fixture
def spoiled(cache, scratch):
    """A damaged copy of the sound cache."""
    copy = Path(shutil.copytree(cache, scratch / "spoiled"))
    next(copy.glob("*/shards/*/ids/c/0")).write_bytes(b"?")
    return copy


@pytest.mark.parametrize("closed", CLOSED)
def test_what_is_extracted_is_the_same_whatever_is_closed(plain, sound, scratch, tmp_path, closed):
    """No file of the cache gets the number of a stream, and with it what is printed."""
    manifest = plain.manifest()
    made = shell(["extract", manifest, "-o", scratch / "c", "--shard-size", "0.04"], CLOSED[closed], tmp_path)
    assert made.returncode == 0
    assert chunk_files(scratch / "c") == chunk_files(sound)
    assert check(scratch / "c").problems == []


@pytest.mark.parametrize(
    "command",
    [
        ["extract", "-", "-o", "new"],
        ["verify", "{cache}", "--manifest", "-"],
        ["repair", "{cache}", "--manifest", "-"],
        ["stats", "{cache}", "--manifest", "-"],
        ["probe", "fbank80", "-"],
    ],
    ids=lambda command: command[0],
)
def test_a_manifest_from_a_closed_stdin_is_one_clear_line(cache, tmp_path, command):
    ended = shell([argument.format(cache=cache) for argument in command], "<&-", tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert "<stdin>: standard input is closed" in line


def test_a_log_on_a_full_disk_stops_nothing(plain, scratch, tmp_path):
    """Messages are lost; what was to be done is done, and what cannot be done has its exit code."""
    assert shell(["extract", plain.manifest(), "-o", scratch / "c"], "2>/dev/full", tmp_path).returncode == 0
    assert check(scratch / "c").problems == []
    assert shell(["extract", "nowhere.csv"], "2>/dev/full", tmp_path).returncode == 2
    assert shell(["extract"], "2>/dev/full", tmp_path).returncode == 2
