"""Audio that commands print: refused unless allowed, and then the same as of files."""

import os
import shutil
import signal
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from audio_files import write_tone
from cache_contents import items
from extractions import failures_of
from forking import wait_until

from featcache.audio.commands import run_command
from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import AudioError
from featcache.extraction.extraction import run_extraction
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.audio_locations import Command, allow_commands
from featcache.manifest.read import read_manifest
from featcache.version.in_flight import Suspects


@pytest.fixture
def data(scratch):
    """Two clips as files, and as what commands print."""
    for seed, name in enumerate(("a b", "c")):
        write_tone(scratch / f"{name}.wav", rate=8000, seed=seed)
    for name, lines in {
        "files": [f"u1 {scratch}/a b.wav", f"u2 {scratch}/c.wav"],
        "commands": [
            f"u1 touch {scratch}/ran; cat '{scratch}/a b.wav' |",
            f"u2 cat < {scratch}/c.wav | cat |",
        ],
    }.items():
        (scratch / name).mkdir()
        (scratch / name / "wav.scp").write_text("\n".join(lines))
    return scratch


def test_what_commands_print_gives_the_features_of_files(cli, data):
    refused = cli("extract", data / "commands", "-o", data / "cache").with_code(2)
    assert refused.err.count("is a command, which runs only with --allow-commands") == 2
    assert not any((data / name).exists() for name in ("cache", "ran"))
    assert cli("extract", data / "commands", "-o", data / "cache", "--allow-commands").code == 0
    assert cli("extract", data / "files", "-o", data / "expected").code == 0
    assert items(data / "cache") == items(data / "expected")
    assert set(items(data / "cache")) == {"u1", "u2"}


def test_a_cache_alone_runs_no_command(cli, data):
    assert cli("extract", data / "commands", "-o", data / "cache", "--allow-commands").code == 0
    (data / "ran").unlink()
    alone = cli("verify", data / "cache", "--recompute", "2", "--sources=content").with_code(1)
    refusal = "a command needs --allow-commands, and a manifest that names it"
    assert refusal in alone.out
    shutil.copytree(data / "files", data / "others")
    others = cli(
        "verify",
        data / "cache",
        "--recompute",
        "2",
        "--manifest",
        data / "others",
        "--allow-commands",
    )
    assert refusal in others.out
    assert not (data / "ran").exists()
    options = ["--manifest", data / "commands", "--allow-commands", "--sources=content"]
    assert cli("verify", data / "cache", "--recompute", "2", *options).code == 0


def test_commands_that_fail_are_in_the_ledger(cli, data):
    lines = [
        "u1 echo no such recording >&2; exit 3 |",
        "u2 no-such-program-of-kaldi a.sph |",
        "u3 true |",
        "u4 echo no audio |",
        f"u5 head -c 4000 {data}/c.wav |",
        f"u6 cat {data}/c.wav; kill -9 $$ |",
        f"u7 cat {data}/c.wav |",
        "u8 kill -40 $$ |",
    ]
    (data / "commands" / "wav.scp").write_text("\n".join(lines))
    cli("extract", data / "commands", "-o", data / "cache", "--allow-commands").with_code(3)
    found = {one["id"]: (one["reason"], one["message"]) for one in failures_of(cli, data / "cache")}
    assert [found.pop(name)[0] for name in ("u4", "u5")] == ["not_audio", "truncated"]
    assert found == {
        "u1": ("file_unreadable", "the command ends with exit code 3: no such recording"),
        "u2": (
            "file_unreadable",
            "the command does not run: no-such-program-of-kaldi: No such file or directory",
        ),
        "u3": ("empty", "the command prints nothing"),
        "u6": ("file_unreadable", "the command ends with SIGKILL"),
        "u8": ("file_unreadable", "the command ends with signal 40"),
    }


def test_planning_runs_no_command_whose_rate_was_refused(cli, data, written):
    config = written("name: low\nextractor: fbank\naudio: {min_source_rate: 9000}\n", "low.yaml")
    job = ("extract", data / "commands", "-o", data / "cache", "--allow-commands", "-c", config)
    cli(*job).with_code(3)
    (data / "ran").unlink()
    assert "2 of 2 utterances to extract" in cli(*job, "--dry-run").with_code(0).out
    assert not (data / "ran").exists()


def test_a_command_that_does_not_end_is_killed_with_what_it_started(monkeypatch, scratch):
    monkeypatch.setattr("featcache.audio.commands._MOST_SECONDS", 0.5)
    command = Command(f"(sleep 60; touch {scratch}/late) & sleep 60 |")
    allow_commands([command])
    with pytest.raises(AudioError, match=r"the command has not ended after 0\.5 s"):
        run_command(command)


class Hanging:
    """A manifest of a command that hangs, as does what it has started: all of it holds a
    pipe open."""

    def __init__(self, folder):
        self.folder = folder
        os.mkfifo(folder / "pipe")
        self._pipe = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        (folder / "wav.scp").write_text(
            f"u1 exec 9> {folder}/pipe; sleep 99 & echo begun >&9; sleep 99; true |\n"
        )

    def says(self, words):
        """Whether it has just begun, and says so; or has ended, and says nothing."""
        with suppress(BlockingIOError):
            return os.read(self._pipe, 64) == words
        return False


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_run_that_is_stopped_kills_a_command_that_hangs(scratch, monkeypatch, is_suspect):
    # but in the process for suspects
    monkeypatch.setattr("featcache.audio.commands._FINISHED_SECONDS", 0)
    hanging, stop = Hanging(scratch), threading.Event()
    manifest = read_manifest(scratch / "wav.scp", allow_commands=True)
    plan = plan_extraction(manifest, [load_config("fbank80")], scratch / "cache", Options("cpu", 1))
    if is_suspect:
        plan = replace(
            plan, versions=[replace(plan.versions[0], suspects=Suspects(frozenset({"u1"})))]
        )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_extraction, plan, run_locally, stop=stop)
        wait_until(lambda: hanging.says(b"begun\n"))
        stop.set()
        summary = running.result()
    wait_until(lambda: hanging.says(b""))
    assert (summary.interrupted, summary.failed) == (True, 0)


def test_a_second_interrupt_kills_a_command_that_hangs_too(cli, scratch):
    hanging = Hanging(scratch)
    running = cli.start("extract", scratch / "wav.scp", "-o", scratch / "cache", "--allow-commands")
    running.wait_until(lambda: hanging.says(b"begun\n"))
    running.send(signal.SIGINT)
    running.wait_until(lambda: "interrupted" in running.err())
    running.send(signal.SIGINT)
    assert running.wait().code == 130
    wait_until(lambda: hanging.says(b""))


def test_a_disk_without_a_place_for_what_is_printed_is_named(scratch, monkeypatch):
    command = Command("echo a |")
    allow_commands([command])
    monkeypatch.setattr(tempfile, "tempdir", str(scratch / "gone"))
    with pytest.raises(
        AudioError, match=r"a copy cannot be kept in .*/gone: No such file or directory"
    ):
        run_command(command)
