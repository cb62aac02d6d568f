"""Standard streams that are closed or full, or that native libraries print to: work and
result are the same."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile
from cache_contents import check, chunk_files
from corpora import speech
from processes import python, run_script, start_script

STREAMS = ("stdin", "stdout", "stderr")


@pytest.fixture
def words(plain, cache, scratch):
    """Gives a command line its words: which manifest and cache are meant, one that is
    damaged, and a new place."""
    rows = [{**row, "path": "nowhere.wav"} if i == 1 else row for i, row in enumerate(plain.rows)]
    damaged = shutil.copytree(cache, scratch / "spoiled")
    next(damaged.glob("*/shards/*/items/c/0/0")).write_bytes(b"?")
    places = {"manifest": plain.manifest(), "failing": plain.manifest(rows, "one-fails.csv")}
    places |= {"cache": cache, "damaged": damaged, "new": scratch / "new"}
    return lambda command: command.format(**places).split()


COMMANDS = [
    ("extract {manifest} -o {new}", 0),
    ("extract {failing} -o {new}", 3),
    ("extract nowhere.csv", 2),
    ("extract --no-such-option", 2),
    ("info nowhere", 1),
    ("verify {damaged} --no-data", 1),
    ("verify {cache}", 0),
    ("repair {cache} --manifest {manifest}", 0),
    ("info {cache}", 0),
    ("show {cache} utt-00", 0),
    ("stats {cache}", 0),
    ("configs", 0),
    ("probe fbank80 {manifest} --device cpu --utterances 2", 0),
    ("fit-kmeans {cache} -k 2 -o {new}", 0),
]
"""Each with its exit code."""


@pytest.mark.parametrize(
    ("command", "code", "closed"),
    [(*command, STREAMS) for command in COMMANDS]
    + [(*command, ("stderr",)) for command in COMMANDS[:6]],
    ids=lambda part: "-".join(part) if isinstance(part, tuple) else str(part),
)
def test_a_closed_stream_changes_neither_work_nor_exit_code(
    cli, words, tmp_path, command, code, closed
):
    cli(*words(command), closed=closed, cwd=tmp_path).with_code(code, err="")


def test_from_a_shell_that_closes_all_streams_it_is_the_same(words, scratch, tmp_path):
    """In an interpreter that begins without them, and opens files before anything of
    featcache runs."""
    command, code = COMMANDS[1]
    line = shlex.join([sys.executable, "-m", "featcache", *words(command)])
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    assert (
        subprocess.run(
            ["sh", "-c", f"{line} <&- >&- 2>&-"], cwd=tmp_path, env=environment
        ).returncode
        == code
    )
    assert check(scratch / "new").damaged_shards == []


@pytest.mark.parametrize("closed", [*((name,) for name in STREAMS), STREAMS], ids=[*STREAMS, "all"])
def test_what_is_extracted_is_the_same_whatever_is_closed(cli, plain, sound, scratch, closed):
    """No file of the cache gets the number of a stream, and with it what is printed."""
    cli(
        "extract", plain.manifest(), "-o", scratch / "c", "--shard-size", "0.04", closed=closed
    ).with_code(0)
    assert chunk_files(scratch / "c") == chunk_files(sound)
    assert check(scratch / "c").problems == []


@pytest.mark.parametrize(
    "command",
    [
        "extract - -o new",
        "verify {cache} --manifest -",
        "repair {cache} --manifest -",
        "stats {cache} --manifest -",
        "probe fbank80 -",
    ],
)
def test_a_manifest_from_a_closed_stdin_is_one_clear_line(cli, cache, command):
    (line,) = cli.refused(*command.format(cache=cache).split(), closed=["stdin"]).splitlines()
    assert "<stdin>: standard input is closed" in line


def test_a_stderr_on_a_full_disk_stops_nothing(cli, plain, scratch):
    """Messages are lost; what was to be done is done, and what cannot be done has its
    exit code."""
    full = Path("/dev/full")
    assert cli("extract", plain.manifest(), "-o", scratch / "c", stderr=full).code == 0
    assert check(scratch / "c").problems == []
    assert cli("extract", "nowhere.csv", stderr=full).code == 2
    assert cli("extract", stderr=full).code == 2


# What native libraries print


def flushed(work: str) -> str:
    """A script that does some work, and ends as an interpreter does: what C has in its
    buffers is written."""
    return f"import ctypes, sys\ntry:\n    {work}\nfinally:\n    ctypes.CDLL(None).fflush(None)\n"


def test_a_result_is_one_document_though_a_library_prints_of_a_file(cli, tmp_path):
    """libsndfile prints of a damaged SDS, which it reads; when C's stdout is flushed is
    another matter."""
    damaged = tmp_path / "a.sds"
    soundfile.write(damaged, speech(1.0, seed=3)[:, 0], 16000, "PCM_16", format="SDS")
    with damaged.open("r+b") as file:
        file.seek(21 + 127 * 5)  # where a packet begins
        file.write(b"\0")
    (tmp_path / "manifest.csv").write_text("id,path\na,a.sds\n")
    assert "Error" in run_script(
        cli, flushed("import soundfile; soundfile.read(sys.argv[1])"), damaged
    )
    extract = ("extract", tmp_path / "manifest.csv", "-o", tmp_path / "c", "--json")
    made = start_script(
        cli, flushed("from featcache.cli import main; main(sys.argv[1:])"), *extract
    ).wait()
    assert made.code in (0, 3), made.err
    assert made.json()["utterances"] == 1


def test_all_that_python_prints_arrives_in_order_and_no_descriptor_is_left_open():
    code = """
import ctypes, os, sys, warnings
from featcache.cli.process import stdout_for_results
libc = ctypes.CDLL(None)
opened = os.listdir("/proc/self/fd")
print("before")
with stdout_for_results():
    libc.puts(b"native"); libc.fflush(None)
    os.write(1, b"native\\n")
    print("out"); print("err", file=sys.stderr); warnings.warn("careful")
print("after"); print("after", file=sys.stderr)
assert os.listdir("/proc/self/fd") == opened
with stdout_for_results():
    raise RuntimeError("ours")
"""
    done = python("-c", code)
    assert done.out == "before\nout\nafter\n", done.err
    assert done.err.startswith("native\nnative\nerr\n")
    assert "careful" in done.err
    assert done.err.endswith("RuntimeError: ours\n")
