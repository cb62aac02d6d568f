"""What native libraries print of damaged files is in no result."""

import ctypes
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from corpora import speech

from featcache.cli.process import stdout_for_results


def spoil(path, at, by):
    data = bytearray(path.read_bytes())
    data[at : at + len(by)] = by
    path.write_bytes(data)


@pytest.fixture
def damaged(tmp_path):
    """A manifest of damaged files: an SDS, of which libsndfile prints something itself, and an MP3."""
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


def test_a_result_is_one_document(damaged, scratch, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, C's stdout has no buffer either
    command = [sys.executable, "-m", "featcache", "extract", str(damaged), "-o", str(scratch / "cache"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stderr
    assert json.loads(done.stdout)["utterances"] == 2


INSIDE = """
import ctypes, os, subprocess, sys, warnings
from featcache.cli.process import stdout_for_results
libc = ctypes.CDLL(None)
print("before")
with stdout_for_results():
    libc.puts(b"native"); libc.fflush(None)
    os.write(1, b"native\\n")
    print("out"); print("err", file=sys.stderr); warnings.warn("careful")
print("after"); print("after", file=sys.stderr)
with stdout_for_results():
    raise RuntimeError("ours")
"""


def test_all_that_python_prints_arrives_in_order():
    done = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, text=True, check=False)
    assert done.stdout == "before\nout\nafter\n", done.stderr
    assert done.stderr.startswith("native\nnative\nerr\n")
    assert "careful" in done.stderr
    assert done.stderr.endswith("RuntimeError: ours\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_left_closed(closed):
    code = "from featcache.cli.process import stdout_for_results\nwith stdout_for_results(): pass"
    done = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" {closed}'], check=False)
    assert done.returncode == 0


def test_no_descriptor_is_left_open():
    before = os.listdir("/proc/self/fd")
    with stdout_for_results():
        ctypes.CDLL(None).puts(b"native")
    assert os.listdir("/proc/self/fd") == before
