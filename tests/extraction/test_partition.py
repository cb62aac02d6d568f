"""Jobs of an array, each of which extracts a partition of the manifest: together they are
one run, and nobody waits."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cache_contents import check, chunk_files, items, only_version, shard_folders
from extractions import ONE_EACH, extracted
from hypothesis import given
from hypothesis import strategies as st
from pausing import interrupt, stand_at

import featcache
from featcache.errors import ArgumentError, StoreError
from featcache.extraction.partition import Partition
from featcache.version.records import read_run, run_names

THREE = "0.03"
"""MB: a shard size that gives twelve clips three or four shards."""

COUNTS = st.integers(1, 30)


def extract(manifest, cache, *options):
    size = () if "--shard-size" in options else ("--shard-size", THREE)
    return ("extract", manifest, "-o", cache, "--threads", 1, *size, *options)


def kill(cli, gate, count, job, cache, there):
    """Kill a run that may extract so many utterances, once so many shards are there."""
    gate.write_text(str(count))
    running = cli.start(*job)
    running.wait_until(lambda: len(shard_folders(cache)) >= there)
    running.send(signal.SIGKILL)
    running.wait()
    gate.unlink()


def problems(cache):
    return [problem.message for problem in check(cache).problems]


def slices(durations, count):
    return [
        slice(*Partition(number, count).span(np.array(durations, np.float64)))
        for number in range(count)
    ]


@given(
    st.lists(
        st.floats(0.1, 40) | st.sampled_from([5e-324, 1e-9, 1e9, 1.7e308, np.nan]), max_size=60
    ),
    COUNTS,
)
def test_parts_are_all_rows_in_order(durations, count):
    rows = [row for some in slices(durations, count) for row in range(some.start, some.stop)]
    assert rows == list(range(len(durations)))


@given(st.lists(st.floats(0.1, 40), min_size=1, max_size=60), COUNTS, st.booleans())
def test_parts_are_equally_long_or_have_equally_many_rows(durations, count, is_known):
    given = np.array(durations) if is_known else np.array([*durations[1:], np.nan])
    weights = given if is_known else np.ones(len(given))
    for some in slices(given, count):
        assert abs(weights[some].sum() - weights.sum() / count) < weights.max() + 1e-6


def slurm(**changed: int) -> dict[str, str]:
    """The environment of a task of an array, of the numbers 1, 3, 5 and 7 unless
    something is changed."""
    numbers = {"MIN": 1, "MAX": 7, "COUNT": 4, **changed}
    return {f"SLURM_ARRAY_TASK_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("text", "environment", "partition"),
    [
        ("0/8", {}, "0/8"),
        ("auto", slurm(ID=5), "2/4"),
        ("auto", slurm(ID=1, MAX=1, COUNT=1), "0/1"),
        (
            "auto",
            {"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETIONS": "4", "SKYPILOT_NODE_RANK": "0"},
            "3/4",
        ),
        ("auto", {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}, "1/2"),
        ("auto", {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3"}, "1/3"),
    ],
)
def test_which_part(text, environment, partition):
    assert str(Partition.parse(text, environment)) == partition


@pytest.mark.parametrize(
    ("text", "environment", "said"),
    [
        ("8/8", {}, "partitions count from 0: 0/8 to 7/8"),
        ("1/0", {}, "there are 1 to"),
        ("3", {}, "as 0/8, or auto"),
        ("-1/8", {}, "as 0/8, or auto"),
        ("auto", {}, "there is no SLURM_ARRAY_TASK_ID"),
        ("auto", slurm(ID=2, COUNT=3), "not evenly spaced"),
        ("auto", slurm(ID=5) | {"SLURM_STEP_NUM_TASKS": "2"}, "srun --ntasks=1"),
        ("auto", {"SLURM_ARRAY_TASK_ID": "5"}, "no SLURM_ARRAY_TASK_MIN in the environment"),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "set the variable JOB_COMPLETIONS"),
        (
            "auto",
            {"SKYPILOT_NODE_RANK": "2", "SKYPILOT_NUM_NODES": "two"},
            "SKYPILOT_NUM_NODES is 'two'",
        ),
        ("auto", {"PARALLEL_SEQ": "3"}, "--partition {}/8"),
    ],
)
def test_a_part_that_there_is_not_is_refused_in_one_line(text, environment, said):
    with pytest.raises(ArgumentError) as error:
        Partition.parse(text, environment)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_are_together_one_run(cli, plain, sound, scratch):
    """Item by item, in whatever order they run, and however the manifest's path was
    typed; on the way, the version is said to lack some. What is there is not done again,
    nor recorded; what is gone is made again by its part."""
    manifest, cache = plain.manifest(), scratch / "parts"
    for number, typed in (
        (2, manifest),
        (0, manifest.name),
        (3, f"../{plain.folder.name}/{manifest.name}"),
    ):
        assert cli(*extract(typed, cache, "--partition", f"{number}/4"), cwd=plain.folder).code == 0
    (problem,) = problems(cache)
    assert problem.startswith(
        f"{only_version(cache).path}: 3 of the 12 utterances of {manifest} are missing: "
    )
    assert "3 of the 12 utterances of" in cli("info", cache).out
    with pytest.raises(StoreError, match="3 of the 12 utterances of"):
        featcache.open(cache, strict=True)
    assert cli(*extract(manifest, cache, "--partition", "1/4")).code == 0
    assert problems(cache) == []
    assert "missing" not in cli("info", cache).out
    featcache.open(cache, strict=True)
    assert items(cache) == items(sound)
    assert list(featcache.open(cache).ids) == list(featcache.open(sound).ids)
    version = only_version(cache)
    runs = run_names(version.store)
    assert [read_run(version.store, name).asked["partition"] for name in runs] == [
        "2/4",
        "0/4",
        "3/4",
        "1/4",
    ]
    assert cli(*extract(manifest, cache, "--partition", "1/4")).code == 0
    assert run_names(version.store) == runs
    shutil.rmtree(version.path / "shards" / version.shard_names()[0])
    assert f"{12 - len(items(cache))} of the 12 utterances of" in problems(cache)[0]
    for number in range(4):
        assert cli(*extract(manifest, cache, "--partition", f"{number}/4")).code == 0
    assert problems(cache) == []
    assert items(cache) == items(sound)


def test_a_part_builds_no_index_and_takes_no_lock(cli, plain, gate, gated_config, scratch):
    running = stand_at(
        gate, 1, cli, *extract(plain.manifest(), scratch, "-c", gated_config, "--partition", "0/1")
    )
    with only_version(scratch).at_work("rm"):
        gate.unlink()
        assert running.wait().code == 0
    assert not list(scratch.glob("*/index"))


def test_a_part_that_was_interrupted_keeps_what_it_has(cli, plain, gate, gated_config, scratch):
    """SIGTERM, as before a time limit: exit code 130; again, in other partitions or as a
    whole, the rest is done."""
    manifest, options = plain.manifest(), ("-c", gated_config, "--shard-size", ONE_EACH)
    assert cli(*extract(manifest, scratch, *options, "--partition", "1/2")).code == 0
    gate.write_text("2")
    running = cli.start(*extract(manifest, scratch, *options, "--partition", "0/2"))
    running.wait_until(lambda: len(shard_folders(scratch)) >= 7)
    assert interrupt(running, gate, signal.SIGTERM).code == 130
    there = len(items(scratch))
    assert there >= 7
    assert f"{12 - there} of the 12 utterances of" in problems(scratch)[0]
    assert cli(*extract(manifest, scratch, *options, "--partition", "0/3")).code == 0
    assert len(problems(scratch)) == 1
    assert cli(*extract(manifest, scratch, *options, "--partition", "1/3")).code == 0
    assert problems(scratch) == []  # the first half's rows are all in these two thirds
    assert len(items(scratch)) == 12


def test_a_run_over_the_whole_makes_up_for_parts_and_parts_for_it(
    cli, plain, gate, gated_config, scratch
):
    """Though it and one of them are killed: their shards are those of a run that nobody
    disturbed."""
    manifest, options = plain.manifest(), ("-c", gated_config, "--shard-size", ONE_EACH)
    assert cli(*extract(manifest, scratch / "whole", *options)).code == 0
    cache = scratch / "parts"
    kill(cli, gate, 2, extract(manifest, cache, *options), cache, there=2)
    first = extract(manifest, cache, *options, "--partition", "0/2")
    kill(cli, gate, 2, first, cache, there=4)
    assert f"{12 - len(items(cache))} of the 12 utterances of" in problems(cache)[0]
    for job in (first, extract(manifest, cache, *options, "--partition", "1/2")):
        assert problems(cache) != []
        # the kills say nothing of the clips that were in flight
        cli(*job).with_code(0, err="")
    assert problems(cache) == []
    assert chunk_files(cache) == chunk_files(scratch / "whole")
    longer = plain.manifest([*plain.rows, {**plain.rows[0], "id": "added"}], "manifest.csv")
    assert cli(*extract(longer, cache, *options, "--partition", "0/2")).code == 0
    assert "1 of the 13 utterances of" in problems(cache)[0]
    assert cli(*extract(longer, cache, *options)).code == 0
    assert problems(cache) == []
    assert len(items(cache)) == 13


def test_failures_of_parts_are_in_the_ledger(cli, plain, scratch):
    rows = [plain.rows[0], {**plain.rows[1], "path": "missing.wav"}, *plain.rows[2:]]
    manifest = plain.manifest(rows, "failing.csv")
    codes = [
        cli(*extract(manifest, scratch, "--partition", f"{number}/3")).code for number in range(3)
    ]
    assert codes == [3, 0, 0]
    report = check(scratch)
    assert (report.problems, report.failed) == ([], 1)
    assert (
        "1 failed before" in cli(*extract(manifest, scratch, "--partition", "0/3")).with_code(3).out
    )
    assert cli(*extract(manifest, scratch, "--partition", "0/3", "--retry-failed")).code == 3
    assert cli(*extract(manifest, scratch, "--partition", "1/3", "--retry-failed")).code == 0
    assert problems(scratch) == []


def test_more_parts_than_utterances_that_have_copies(cli, plain, scratch, written):
    config = written("name: c\nextractor: fbank\naugment: {speed: [1.0, 0.9]}\n", "copies.yaml")
    rows = [{"id": row["id"], "path": row["path"]} for row in plain.rows]
    job = extract(
        plain.manifest(rows, "no-durations.csv"),
        scratch / "parts",
        "-c",
        config,
        "--shard-size",
        ONE_EACH,
    )
    ended = [cli(*job, "--partition", f"{number}/16") for number in range(16)]
    assert {part.code for part in ended} == {0}
    assert any("nothing to do: this partition has no utterances" in part.out for part in ended)
    assert not any(" 0 utterances are" in part.out for part in ended)
    assert problems(scratch / "parts") == []
    assert cli(*extract(plain.manifest(), scratch / "whole", "-c", config)).code == 0
    assert items(scratch / "parts") == items(scratch / "whole")
    assert len(items(scratch / "parts")) == 24


def test_a_part_does_what_is_missing_of_its_rows(cli, plain, scratch):
    some = plain.manifest(plain.rows[2:4], "some.csv")
    assert cli(*extract(some, scratch)).code == 0
    ended = [
        cli(*extract(plain.manifest(), scratch, "--partition", f"{number}/2", "--json"))
        for number in range(2)
    ]
    assert [one.json()["versions"][0]["present"] for one in ended] == [2, 0]
    assert sum(map(extracted, ended)) == 10
    assert extracted(cli(*extract(plain.manifest(), scratch, "--partition", "0/3", "--json"))) == 0
    assert problems(scratch) == []


def test_all_jobs_of_slurm_get_the_options(tmp_path):
    """The array, and the job after it; what that one gets besides comes last, so that it
    may be less."""
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$@" >> "$0.called"; echo 7\n')
    (tmp_path / "sbatch").chmod(0o755)
    scripts = Path(__file__).parents[2] / "examples/slurm"
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "INDEX_OPTIONS": "--gres=none --mem=1G",
    }
    options = ["--account=me", "--partition=gpu", "--gres=gpu:1"]
    subprocess.run(
        [scripts / "submit.sh", "m.csv", "c", "8", *options],
        env=environment,
        check=True,
        cwd=tmp_path,
    )
    asked = " ".join(options)
    assert (tmp_path / "sbatch.called").read_text().splitlines() == [
        f"--parsable --array=0-7 {asked} {scripts}/extract.sbatch",
        f"--parsable --dependency=afterany:7 {asked} --gres=none --mem=1G {scripts}/index.sbatch",
    ]
