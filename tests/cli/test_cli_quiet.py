"""What native libraries print of damaged files reaches neither the terminal nor a result; all that is ours does."""

import ctypes
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from corpora import speech

from featcache.cli.quiet import quiet_libraries


def spoil(path, at, by):
    data = bytearray(path.read_bytes())
    data[at : at + len(by)] = by
    path.write_bytes(data)


@pytest.fixture
def damaged(tmp_path):
    """A manifest of damaged files: an SDS and an MP3, of which libsndfile and libmpg123 say something themselves."""
    sounds = speech(1.0, seed=3)[:, 0].astype(np.float32)
    soundfile.write(tmp_path / "a.sds", sounds, 16000, "PCM_16", format="SDS")
    spoil(tmp_path / "a.sds", 21 + 127 * 5, b"\0")  # where a packet begins
    soundfile.write(tmp_path / "b.mp3", sounds, 16000, "MPEG_LAYER_III", format="MP3")
    spoil(tmp_path / "b.mp3", 1000, bytes(800))
    manifest = tmp_path / "manifest.csv"
    manifest.write_text("id,path\na,a.sds\nb,b.mp3\n")
    return manifest


DECODE = "import sys, soundfile; [soundfile.read(path) for path in sys.argv[1:]]"


def test_the_libraries_do_print_of_these_files(damaged):
    folder = damaged.parent
    read = [sys.executable, "-c", DECODE]
    done = subprocess.run([*read, folder / "a.sds"], capture_output=True, text=True, check=False)
    assert "Error" in done.stdout
    done = subprocess.run([*read, folder / "b.mp3"], capture_output=True, text=True, check=False)
    assert "MPEG" in done.stderr


def test_a_result_is_one_document_and_messages_are_ours_alone(damaged, scratch):
    command = [sys.executable, "-m", "featcache", "extract", str(damaged), "-o", str(scratch / "cache"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    assert json.loads(done.stdout)["utterances"] == 2
    assert done.stderr == ""


INSIDE = """
import ctypes, os, subprocess, sys, warnings
from featcache.cli.quiet import quiet_libraries
libc = ctypes.CDLL(None)
print("before")
with quiet_libraries():
    libc.puts(b"native"); libc.fflush(None)
    os.write(2, b"native"); os.write(1, b"native")
    print("out"); print("err", file=sys.stderr); warnings.warn("careful")
print("after"); print("after", file=sys.stderr)
with quiet_libraries():
    raise RuntimeError("ours")
"""


def test_all_that_python_prints_arrives_in_order():
    done = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, check=False)
    assert done.stdout == "before\nout\nafter\n"
    assert "native" not in done.stderr
    assert done.stderr.startswith("err\n")
    assert "careful" in done.stderr
    assert done.stderr.endswith("RuntimeError: ours\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_left_closed(closed):
    code = "from featcache.cli.quiet import quiet_libraries\nwith quiet_libraries(): pass"
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" {closed}'], check=False)
    assert done.returncode == 0


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd")
    with quiet_libraries():
        ctypes.CDLL(None).puts(b"native")
    assert os.listdir("/proc/self/fd") == before
