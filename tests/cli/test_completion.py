"""What a shell completes: commands, configs, versions, ids; and how little that loads."""

import os
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from featcache.cli import main


def completed(*words):
    """The values that are offered for the last word, without those that a shell finds."""
    shell = ShellComplete(main, {}, "featcache", "_FEATCACHE_COMPLETE")
    items = shell.get_completions([*map(str, words[:-1])], str(words[-1]))
    return [item.value for item in items if item.type == "plain"]


def test_commands_and_configs():
    assert completed("sh") == ["show"]
    assert completed("extract", "a.csv", "-c", "fbank80-") == [
        "fbank80-lhotse",
        "fbank80-speed",
        "fbank80-uint8",
    ]


def test_versions_by_their_folders_and_configs(sound):
    (folder,) = (path.name for path in sound.iterdir() if path.name.startswith("fbank80"))
    assert completed("verify", f"{sound}/fb") == [f"{sound}/fbank80", f"{sound}/{folder}"]
    assert completed("verify", f"{sound}/nothing") == []
    assert completed("verify", sound / "nowhere" / "fb") == []


def test_versions_of_the_current_folder(sound, monkeypatch):
    monkeypatch.chdir(sound)
    assert completed("info", "fb")[0] == "fbank80"


def test_ids_of_the_version(sound):
    assert completed("show", sound / "fbank80", "utt-1") == ["utt-10", "utt-11"]
    assert completed("show", sound, "utt-03") == ["utt-03"]
    assert completed("show", sound / "nothing", "utt") == []
    assert len(completed("show", sound, "")) == 12


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell):
    assert "_FEATCACHE_COMPLETE" in run({"_FEATCACHE_COMPLETE": f"{shell}_source"})[0]


def run(variables, *options):
    """What featcache prints on both streams, with these variables."""
    command = [sys.executable, *options, "-m", "featcache"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    return done.stdout, done.stderr


def test_nothing_heavy_is_imported(sound):
    words = f"featcache show {sound}/fbank80 utt-1"
    asked = {"COMP_WORDS": words, "COMP_CWORD": "3", "_FEATCACHE_COMPLETE": "bash_complete"}
    out, err = run(asked, "-X", "importtime")
    assert out.splitlines() == ["plain,utt-10", "plain,utt-11"]
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in err.splitlines()}
    assert "numpy" in imported
    assert not {"torch", "zarr", "pydantic", "tqdm", "soundfile"} & imported
