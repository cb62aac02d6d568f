"""`--dry-run --trial`: what is measured, what follows from it, and that nothing is left."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from featcache.config import load_config
from featcache.device import Device
from featcache.engines.process import Setup
from featcache.extraction import trial
from featcache.extraction.jobs import Progress
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest


@pytest.fixture
def fast(written):
    return written("name: fast\nextractor: fbank\naugment: {speed: [0.9, 1.0, 1.1]}\n", "fast.yaml")


def planned(manifest, cache, config="fbank80", **options):
    return plan_extraction(
        read_manifest(manifest), [load_config(config)], cache, Options(device="cpu", **options)
    )


def meter(speeds):
    """A meter that was told of extraction at these speeds, each of them for 0.1 s, from
    second 2 on."""
    step = 0.1
    times = 2.0 + step * np.arange(len(speeds) + 1)
    audio = np.concatenate([[100.0], 100.0 + step * np.cumsum(speeds)])
    return trial._Meter(
        math.inf, points=[(0.0, 50.0), *zip(times.tolist(), audio.tolist(), strict=True)]
    )


FIFTHS = [10, 20, 15, 30, 25]


@pytest.mark.parametrize(
    ("speeds", "measured"),
    [
        ([20.0] * 100, (200, 10, 0)),
        (np.repeat(FIFTHS, 20), (200, 10, 2 * np.std(FIFTHS, ddof=1) / 20 / math.sqrt(5))),
        ([20.0] * 4, (1234, 3.4, math.inf)),
        ([0.0] * 100, (1234, 3.4, math.inf)),
    ],
    ids=["steady", "fifths differ", "too short", "one batch that goes on"],
)
def test_the_warm_up_is_left_out_and_the_error_is_twice_that_of_the_mean_of_the_fifths(
    speeds, measured
):
    assert meter(speeds).speed(
        SimpleNamespace(audio_seconds=1234.0, elapsed_seconds=3.4)
    ) == pytest.approx(measured)


def test_the_run_is_stopped_when_enough_is_measured(monkeypatch):
    monkeypatch.setattr(trial, "perf_counter", lambda: clock[0])
    clock = [0.0]
    made = trial._Meter(1000.0)
    made.report(Progress())
    assert not made.points
    for _ in range(200):
        made.report(Progress(audio_seconds=5.0))
        clock[0] += 0.1
    assert made.stop.is_set()
    assert made.points[-1][0] == pytest.approx(trial.SECONDS + 2, abs=0.2)
    large = trial._Meter(1000.0)
    large.report(Progress(audio_seconds=1001.0))
    assert large.stop.is_set()


def test_the_sample_is_blocks_of_what_is_missing(cli, plain, scratch, monkeypatch):
    monkeypatch.setattr(trial, "_BLOCK_ROWS", 2)
    cli("extract", plain.manifest(plain.rows[:4], "some.csv"), "-o", scratch / "c")
    (version,) = planned(plain.manifest(), scratch / "c").versions
    rows = trial.sample_rows(version).tolist()
    assert sorted(rows) == list(range(4, 12))
    assert rows != sorted(rows)
    assert all(second == first + 1 for first, second in zip(rows[::2], rows[1::2], strict=True))
    monkeypatch.setattr(trial, "_MOST_ROWS", 4)
    assert len(trial.sample_rows(version)) == 4


def test_the_sample_of_copies_and_of_partitions_is_of_the_manifest_s_own_rows(plain, fast, scratch):
    (version,) = planned(plain.manifest(), scratch / "c", fast).versions
    assert sorted(trial.sample_rows(version)) == list(range(12))
    halves = [
        planned(
            plain.manifest(), scratch / "c", fast, partition=half, shard_megabytes=0.003
        ).versions[0]
        for half in ("0/2", "1/2")
    ]
    rows = [set(trial.sample_rows(half).tolist()) for half in halves]
    assert rows[0] | rows[1] == set(range(12))
    assert min(rows[1]) >= max(rows[0]) > 0


def test_a_trial_says_the_time_and_leaves_nothing(cli, plain, fast, scratch, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(scratch))
    command = (
        "extract",
        plain.manifest(),
        "-o",
        scratch / "c",
        "-c",
        fast,
        "-c",
        "mfcc13",
        "--dry-run",
        "--trial",
    )
    tried = cli(*command, "--json").json()["trial"]
    assert [*scratch.iterdir()] == []
    assert [one["versions"] for one in tried["tried"]] == [["fast"], ["mfcc13"]]
    assert all(one["times_real_time"] > 0 and one["failed"] == 0 for one in tried["tried"])
    seconds = 6.1 * sum(1 / speed for speed in (0.9, 1, 1.1))
    assert tried["tried"][0]["audio_seconds"] == pytest.approx(seconds, rel=0.02)
    expected = sum(one["expected_seconds"] for one in tried["tried"])
    assert tried["expected_seconds"] == pytest.approx(expected)
    said = cli(*command)
    assert all(
        words in said.out
        for words in ("a trial of fast: ", " on cpu, ", "all of it would take about ")
    )
    refused = cli("extract", plain.manifest(), "-o", scratch / "c", "--trial")
    assert (refused.code, refused.out, refused.err) == (
        2,
        "",
        "featcache: --trial needs --dry-run\n",
    )
    assert [*scratch.iterdir()] == []


def test_a_trial_in_other_processes_has_small_batches_too(plain):
    group = SimpleNamespace(
        root=plain.folder, some_paths=(), configs=(), source=None, batch_seconds=20.0
    )
    setup = Setup.of(group)
    assert setup.batch_seconds(Device("cpu")) == 20.0
    on_gpu = SimpleNamespace(is_cuda=True, batch_seconds=240.0)
    assert setup.batch_seconds(on_gpu) == 240.0


def test_where_nothing_is_missing_or_all_fails_a_trial_says_so(cli, plain, cache):
    assert (
        "trial"
        not in cli("extract", plain.manifest(), "-o", cache, "--dry-run", "--trial")
        .with_code(0, err="")
        .out
    )
    (plain.folder / "bad.wav").write_text("no audio")
    bad = plain.manifest([{"id": "bad", "path": "bad.wav", "duration": 1}], "bad.csv")
    failed = cli("extract", bad, "-o", cache, "--dry-run", "--trial").with_code(0)
    assert "1 utterance of it failed" in failed.out
    assert "nothing of the sample was extracted, so nobody can say how long" in failed.out
    gone = [
        {"id": f"gone-{number}", "path": f"gone-{number}.wav", "duration": 1} for number in range(2)
    ]
    grown = plain.manifest([*plain.rows, *gone], "grown.csv")
    assert (
        "2 utterances of it failed"
        in cli("extract", grown, "-o", cache, "--dry-run", "--trial").with_code(0).out
    )
