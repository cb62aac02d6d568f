"""The command line as a whole: what it imports, says and exits with. What each command
does is tested elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_contents import items, only_version
from corpora import COLUMNS
from make_cache import make_version
from processes import python, run_here

from featcache import __version__
from featcache.extraction.options import SHARD_MEGABYTES
from featcache.spec import Track


@pytest.fixture(scope="module")
def filled(cli, plain, tmp_path_factory) -> Path:
    """A cache with a version, and one utterance in its ledger."""
    cache = tmp_path_factory.mktemp("filled")
    rows = [*plain.rows, {"id": "gone", "path": "gone.wav"}]
    assert cli("extract", plain.manifest(rows, "with-gone.csv"), "-o", cache).code == 3
    return cache


def test_it_runs_as_a_module(plain, scratch):
    """In an interpreter of its own, in which a warning is an error."""
    run = ("-W", "error", "-m", "featcache", "extract")
    made = python(*run, plain.manifest(), "-o", scratch / "c", "--threads", 2).with_code(0, err="")
    assert "12 utterances: 12 extracted" in made.out
    assert "× real time" in made.out
    # shares of a tenth of a second say nothing of the machine
    assert "bottleneck" not in made.out


def test_help_comes_at_once():
    code = """
import sys
from featcache.cli import main

heavy = {"torch", "zarr", "soundfile", "miniaudio", "soxr", "torchaudio", "transformers", "safetensors"}
most = heavy | {"numpy", "pydantic", "yaml"}
helps = ["--help", "--version", *(f"{name} --help" for name in main.list_commands(None))]
for args, absent in [*((args, most) for args in helps), ("configs", heavy)]:
    try:
        main(args.split())
    except SystemExit as end:
        assert not end.code
    print("---")
    print(args, sorted(absent & {*sys.modules}), file=sys.stderr)
"""
    shown = python("-c", code)
    assert {line[-3:] for line in shown.err.splitlines()} == {" []"}, shown.err
    assert all(text.strip() for text in shown.out.split("---\n")[:-1])


def test_reading_needs_neither_torch_nor_the_packages_of_extraction(filled, scratch):
    """Arrays and the commands that read need neither; what does need one says which extra
    to install."""
    code = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {"torch", "pydantic", "soundfile", "miniaudio", "soxr"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import featcache
from featcache.cli import main
cache = featcache.open(sys.argv[1], check=True)
print(sum(len(array) for array in cache.values()) == cache.lengths.sum(), cache.item(cache.ids[0], start=0.1).ndim)
for name in ("batch", "adapters.to_hf", *featcache.__all__):
    try:
        cache.batch([0]) if name == "batch" else featcache.adapters.to_hf if "." in name else getattr(featcache, name)
    except featcache.FeatcacheError as error:
        print(name, type(error).__name__, str(error).rpartition(": ")[2])
for line in sys.argv[2:]:
    try:
        main(line.split())
    except SystemExit as end:
        print(line.split()[0], "->", end.code)
"""
    first = next(iter(items(filled)))
    there = (
        f"info {filled}",
        f"verify {filled}",
        f"show {filled} {first}",
        f"stats {filled} -o {scratch}/stats.npz",
        f"report {filled} -o {scratch}/report.html",
    )
    made = f"index {filled}", f"copy {filled} {scratch}/copied"
    refused = "extract manifest.csv", "configs", f"verify {filled} --recompute 1"
    told = python("-W", "ignore", "-c", code, filled, *there, *made, *refused)
    needing = {
        line.split()[0]: line for line in told.out.splitlines() if "MissingDependencyError" in line
    }
    assert told.out.startswith("True 2"), told.err
    of_torch = {
        "BucketBatchSampler",
        "Cmvn",
        "DataLoader",
        "FeatureDataset",
        "Mixture",
        "PackedLoader",
        "augment",
        "cmvn",
        "dequantize",
        "masks",
    }
    of_extraction = {"Observer", "Options", "extract", "extractor"}
    assert {*needing} == {"batch", "adapters.to_hf", *of_extraction, *of_torch}
    for name, line in needing.items():
        assert line.endswith("[extract]'" if name in of_extraction else "[torch]'")
    codes = [line.split(" -> ") for line in told.out.splitlines() if " -> " in line]
    names = ["info", "verify", "show", "stats", "report", "index", "copy"]
    names += ["extract", "configs", "verify"]
    assert codes == [[name, code] for name, code in zip(names, "0300000222", strict=True)]
    assert told.err.count("[extract]'") == 3


# What is said


def test_a_shell_completes_commands_options_and_configs(tmp_path):
    """By its script, in a real bash, which completes paths itself: it is told where they
    are wanted."""
    (tmp_path / "featcache").write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'featcache'\nfrom featcache.cli "
        "import main\nmain()\n"
    )
    (tmp_path / "featcache").chmod(0o755)
    script = """
        eval "$(_FEATCACHE_COMPLETE=bash_source featcache)"
        compopt() { echo paths; }
        for typed in "ver" "extract m.csv --allow-mix" "extract m.csv -c fbank80-s" "info f"; do
            COMP_WORDS=(featcache $typed) COMP_CWORD=$(wc -w <<< "$typed") COMPREPLY=()
            _featcache_completion featcache
            echo "${COMPREPLY[*]}"
        done
    """
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment
    )
    completed = ["verify", "--allow-mixed-devices", "paths", "fbank80-speed", "paths", ""]
    assert done.stdout.split("\n")[:-1] == completed, done.stderr


def test_version_and_defaults_are_those_of_the_package(cli):
    assert __version__ in cli("--version").out
    shown = " ".join(cli("extract", "--help").out.split())
    assert f"Does not change values. [default: {SHARD_MEGABYTES:g}]" in shown


def test_configs_are_listed_and_printed(cli):
    listed = cli("configs").with_code(0)
    assert (
        len({len(line) - len(line.split(maxsplit=1)[1]) for line in listed.out.splitlines()}) == 1
    )
    for line in listed.out.splitlines():
        assert run_here("configs", line.split()[0]).startswith("# ")
    assert "did you mean the packaged config fbank80?" in cli.refused("configs", "fbank81")
    assert "fbank80, fbank80-lhotse, fbank80-speed" in cli.refused("configs", "x")


def test_a_cache_that_is_not_there_exits_with_1(cli, filled):
    said = cli.refused("verify", "filed0", cwd=filled.parent, code=1)
    assert (
        said == f"featcache: filed0: there is no such cache folder (did you mean {filled.name}?)\n"
    )


# info and show


def test_info_says_what_a_cache_holds(cli, filled):
    told = cli("info", filled).out
    for words in (
        "12 utterances",
        "1 failed",
        "float16 [frames, 80]",
        "100 frames/s",
        "16,000 Hz",
        "featcache 0",
    ):
        assert words in told
    assert only_version(filled).info.fingerprint in told
    assert (
        "gone\tfile_missing\tgone.wav\tthere "
        "is no such file" in cli("info", filled, "--failures").out
    )


def test_ls_has_a_line_for_each_version_and_says_what_sets_it_apart(cli, plain, scratch, written):
    low = written("name: mel\nextractor: fbank\nparams: {low_freq: 40}\n", "low.yaml")
    high = written("name: mel\nextractor: fbank\nparams: {high_freq: 7600}\n", "high.yaml")
    assert cli("extract", plain.manifest(), "-c", low, "-c", "fbank80", "-o", scratch).code == 0
    assert cli("extract", plain.manifest(), "-c", high, "-o", scratch).code == 0
    versions = cli("ls", scratch, "--json").json()["versions"]
    apart = sorted((version["name"], version["distinction"]) for version in versions)
    assert apart == [
        ("fbank80", []),
        ("mel", ["params.high_freq=0.0", "params.low_freq=40.0"]),
        ("mel", ["params.high_freq=7600.0", "params.low_freq=20.0"]),
    ]
    header, *lines = cli("ls", scratch).out.splitlines()
    assert header.split()[0] == "version"
    for version, line in zip(versions, lines, strict=True):
        assert line.split()[:2] == [Path(version["path"]).name, "12"]
        assert line.endswith(", ".join(version["distinction"]))
        assert line.count(version["first_run"][:10]) == 2
    shown = cli("show", scratch, "utt-00").out.split("\n\n")  # with a line between them
    assert [text.partition(" ")[0] for text in shown] == ["version"] * 3


def test_info_and_show_tell_of_side_arrays(cli, scratch):
    """What they are; and of an utterance, how many entries, and their range, if there are
    any."""
    side = (
        Track("scales", (), "float32", "loudness"),
        Track("marks", (2,), "uint16", "from and to"),
    )
    make_version(
        scratch,
        {"long": np.ones((6, 80), np.float16), "short": np.ones((2, 80), np.float16)},
        side=side,
    )
    told = cli("info", scratch).out
    assert "side array scales, float32 [entries]: loudness" in told
    assert "side array marks, uint16 [entries, 2]: from and to" in told
    (document,) = cli("info", scratch, "--json").json()["versions"]
    assert [one["name"] for one in document["spec"]["side"]] == ["scales", "marks"]
    (document,) = cli("show", scratch, "long", "--json").json()["versions"]
    assert document["side"] == {
        "scales": {"shape": [2], "dtype": "float32", "min": 6.0, "mean": 6.5, "max": 7.0},
        "marks": {"shape": [2, 2], "dtype": "uint16", "min": 6.0, "mean": 7.5, "max": 9.0},
    }
    assert (
        "scales       shape [2], dtype float32, "
        "min 6.0, mean 6.5, max 7.0\n" in cli("show", scratch, "long").out
    )
    (document,) = cli("show", scratch, "short", "--json").json()["versions"]
    nothing = {"shape": [0], "dtype": "float32", "min": None, "mean": None, "max": None}
    assert document["side"]["scales"] == nothing
    assert "scales       shape [0], dtype float32\n" in cli("show", scratch, "short").out


def test_show_says_where_an_utterance_is_and_came_from(cli, plain, filled):
    (document,) = cli("show", filled, "utt-03", "--json").json()["versions"]
    assert document["shape"] == list(items(filled)["utt-03"][1])
    assert document["size"] == (plain.folder / "03.wav").stat().st_size
    assert [document[name] for name in COLUMNS] == ["utt-03", "03.wav", None, 0.46, None]
    assert "file_missing" in cli.refused("show", filled, "gone", code=1)
    assert "nobody" in cli.refused("show", filled, "nobody", code=1)


def test_show_tells_seconds_and_rates_apart_and_what_the_row_says_where_it_says_something(
    cli, corpus, reference
):
    """The samples that it counts are at the config's rate, and the file's is another."""
    (document,) = cli("show", reference, "rate-8000", "--json").json()["versions"]
    assert (document["audio_seconds"], document["num_samples"], document["source_rate"]) == (
        0.8,
        12800,
        8000,
    )
    assert "sample_rate" not in document
    told = cli("show", reference, "rate-8000").out
    size = (corpus.folder / "rate-8000.wav").stat().st_size
    assert "duration     0.800 s\nsource rate  8000 Hz\n" in told
    assert f"source file  {size:,} bytes, modified 2" in told
    assert "num_samples" not in told
    assert "start        0.913 s\nduration     0.850 s\n" in cli("show", reference, "segment-1").out
    assert "channel      0\n" in cli("show", reference, "stereo-left").out
    whole = cli("show", reference, "plain-01").out
    assert "start" not in whole
    assert "channel" not in whole
