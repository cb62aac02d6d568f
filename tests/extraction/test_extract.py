"""`featcache extract`: a value depends on the audio and the config alone, and a run tells
what it does."""

import os
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import soundfile
from cache_contents import chunk_files, items, items_of, only_version, shard_folders
from extractions import TINY, extracted, write_config

import featcache
from featcache.config import load_config
from featcache.device import Device
from featcache.errors import ArgumentError, ConfigError
from featcache.extraction import from_audio
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.plan import new_version_notes
from featcache.version.version import Version

# A value depends on nothing but the audio and the config


def test_everything_is_there_and_channels_and_segments_are_told_apart(corpus, truth):
    assert set(truth) == set(corpus.ids)
    assert all(dtype == "float16" and shape[1] == 80 for dtype, shape, _ in truth.values())
    assert truth["plain-01"][1] == (88, 80)  # 0.9 s: 1 + (14400 - 400) // 160
    assert truth["segment-3"][1] == (83, 80)
    assert len({truth[name][2] for name in ("stereo-mix", "stereo-left", "stereo-right")}) == 3
    assert len({truth[f"segment-{i}"][2] for i in range(6)}) == 6
    assert truth["ünï-ço∂é"] == truth["plain-01"]


@pytest.mark.parametrize("shard_size", [TINY, "0.03", "128"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_shard_sizes_change_no_bit(cli, corpus, truth, scratch, threads, shard_size):
    cli(
        "extract",
        corpus.manifest(),
        "-o",
        scratch,
        "--threads",
        threads,
        "--shard-size",
        shard_size,
    ).with_code(0)
    assert items(scratch) == truth
    assert len(chunk_files(scratch)) == {TINY: 27, "0.03": 14, "128": 1}[shard_size]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_the_manifest_changes_no_bit(cli, corpus, truth, scratch, seed):
    """A shuffled manifest gives the same features, whether or not it tells how long files
    are."""
    rows = [dict(row) for row in corpus.rows]
    random.Random(seed).shuffle(rows)
    for row in rows[::2]:
        if row["path"].startswith("plain"):
            row["duration"] = soundfile.info(corpus.folder / row["path"]).duration
    manifest = corpus.manifest(rows, f"shuffled-{seed}.csv")
    assert cli("extract", manifest, "-o", scratch, "--shard-size", "0.05").code == 0
    assert items(scratch) == truth


def test_a_grown_manifest_changes_no_bit_and_touches_no_shard(cli, corpus, truth, scratch):
    before = {}
    for count in (3, 4, 15, len(corpus.rows)):
        grown = corpus.manifest(corpus.rows[:count], "grown.csv")
        assert cli("extract", grown, "-o", scratch, "--shard-size", "0.02").code == 0
        stats = {folder: folder.stat() for folder in shard_folders(scratch)}
        after = {folder: (stat.st_ino, stat.st_mtime_ns) for folder, stat in stats.items()}
        assert after.items() >= before.items()
        before = after
    assert items(scratch) == truth


# Several configs


def test_several_configs_give_what_each_gives_alone_and_decode_each_file_once(
    corpus, scratch, written, monkeypatch
):
    """Of frames and of rows, at three sample rates."""
    rows = "name: {}\nextractor: row_extractors:Moments\naudio: {{sample_rate: {}}}\n"
    of_rows = [
        written(rows.format(f"rows-{rate}", rate), f"rows-{rate}.yaml") for rate in (16000, 8000)
    ]
    configs = ["fbank80", "mfcc13", "whisper-mel80", "hifigan-mel80", *of_rows]
    with monkeypatch.context() as patched:
        patched.setattr(from_audio, "decode", decode := Mock(side_effect=from_audio.decode))
        featcache.extract(corpus.manifest(), configs, scratch / "all", featcache.Options("cpu", 2))
    decoded = sum(len(call.args[1]) for call in decode.call_args_list)
    assert decoded == len(corpus.rows) - 2  # three rows take channels of one file
    for config in configs:
        name = Path(config).stem
        featcache.extract(corpus.manifest(), config, scratch / name, featcache.Options("cpu", 1))
        alone, one = only_version(scratch / name), only_version(scratch / "all", name)
        assert items_of(one) == items_of(alone)
        assert one.shard_names() == alone.shard_names()


def test_configs_that_lack_different_rows_are_filled_each_and_two_of_one_name_are_refused(
    cli, plain, scratch
):
    half = plain.manifest(plain.rows[::2], "half.csv")
    assert cli("extract", half, "-o", scratch, "-c", "mfcc13").code == 0
    made = cli(
        "extract", plain.manifest(), "-o", scratch, "-c", "mfcc13", "-c", "fbank80", "--json"
    )
    assert (made.code, extracted(made, 0), extracted(made, 1)) == (0, 6, 12)
    verified = cli("verify", scratch, "--manifest", plain.manifest(), "--json")
    assert (verified.code, [version["repeated"] for version in verified.json()["versions"]]) == (
        0,
        [0, 0],
    )
    refused = cli(
        "extract", plain.manifest(), "-o", scratch / "new", "-c", "fbank80", "-c", "fbank80"
    )
    assert (refused.code, "same name" in refused.err, (scratch / "new").exists()) == (
        2,
        True,
        False,
    )


# Threads


def test_what_a_call_is_given_of_another_type_is_named(plain, scratch):
    with pytest.raises(ArgumentError, match="configs: give one at least"):
        featcache.extract(plain.manifest(), [], scratch)
    for configs in (None, 3, ["fbank80", None]):
        with pytest.raises(ArgumentError, match=r"configs: (None|3) is a \w+: give names"):
            featcache.extract(plain.manifest(), configs, scratch)
    with pytest.raises(ArgumentError, match="source: 3 is neither a path nor a URL"):
        featcache.Options(source=3)


def test_no_path_is_empty(plain, scratch, monkeypatch):
    """An unset variable would mean the current folder."""
    monkeypatch.chdir(scratch)
    for manifest in ("", [""], [plain.manifest(), ""]):
        with pytest.raises(ArgumentError, match="the manifest's path is empty"):
            featcache.extract(manifest, "fbank80", scratch)
    with pytest.raises(ArgumentError, match="cache: '' is neither a path nor a URL"):
        featcache.extract(plain.manifest(), "fbank80", "")
    with pytest.raises(ArgumentError, match="path: '' is neither a path nor a URL"):
        featcache.open("")
    with pytest.raises(ConfigError, match="the name of a config is empty"):
        featcache.extract(plain.manifest(), ["fbank80", ""], scratch)
    assert not [*scratch.iterdir()]


def test_each_worker_computes_with_one_thread_of_torch(cli, plain, scratch):
    config = write_config(scratch, "Threads")
    assert (
        cli("extract", plain.manifest(), "-o", scratch / "c", "-c", config, "--threads", 3).code
        == 0
    )
    assert {
        float(value)
        for features in featcache.open(scratch / "c").values()
        for value in features.flat
    } == {1.0}


def test_a_process_has_no_more_threads_than_its_budget(cli, plain, scratch, gate, gated_config):
    """The main thread, the workers, the one that commits and the one that prints the progress;
    the kernel counts them."""
    counts = []

    def count() -> None:
        counts.append(len(os.listdir(f"/proc/{running.pid}/task")))

    # more than may wait for the first of them, so that some shards are there
    gate.write_text("10")
    options = ("-c", gated_config, "--threads", 2, "--shard-size", "0.0004")
    running = cli.start("extract", plain.manifest(), "-o", scratch, *options)
    running.wait_until(lambda: count() or len(shard_folders(scratch)) > 2)
    gate.unlink()
    assert running.wait().code == 0
    assert max(counts) <= 2 + 3


# Plans, summaries, manifests


def test_a_dry_run_writes_nothing(cli, plain, scratch):
    cache = scratch / "c"
    (version,) = (
        cli("extract", plain.manifest(), "-o", cache, "--dry-run", "--json")
        .with_code(0)
        .json()["versions"]
    )
    assert (version["missing"], version["present"]) == (12, 0)
    assert version["audio_seconds"] == pytest.approx(6.12, abs=0.2)
    assert not cache.exists()
    cli("extract", plain.manifest(plain.rows[:5], "five.csv"), "-o", cache)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    planned = cli("extract", plain.manifest(), "-o", cache, "--dry-run")
    assert "7 of 12 utterances to extract" in planned.out
    assert "5 are there" in planned.out
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    size = sum(len(chunk) - 4 for chunk in chunk_files(cache).values())
    assert version["bytes"] * 5 / 12 == pytest.approx(size, rel=0.3)


def test_a_first_extraction_tells_of_rows_that_read_the_same(cli, plain, scratch):
    rows = [*plain.rows, {**plain.rows[2], "id": "again"}]
    for told in ([f"2 of 13 rows read what another row reads: {rows[2]['id']} and again"], []):
        made = cli("extract", plain.manifest(rows, "same.csv"), "-o", scratch / "c").with_code(0)
        assert [line for line in told if line in made.err] == told
        assert len(made.err.splitlines()) == len(told)


def test_a_manifest_comes_by_standard_input_and_its_paths_by_root(cli, plain, scratch):
    cli(
        "extract", "-", "-o", scratch / "c", "--root", plain.folder, stdin=plain.manifest()
    ).with_code(0)
    assert set(items(scratch / "c")) == set(plain.ids)


def test_paths_that_are_not_utf8_do_not_matter(cli, plain, scratch):
    folder = Path(os.fsdecode(os.fsencode(scratch) + b"/caf\xe9"))
    folder.mkdir()
    manifest = folder / "manifest.csv"
    shutil.copy(plain.manifest(), manifest)
    for options in ([], ["--json"]):
        cli("extract", manifest, "--root", plain.folder, "-o", folder / "c", *options).with_code(0)
    assert cli("verify", folder / "c", "--recompute", 3).code == 0


def test_the_summary_tells_what_was_done(cli, corpus, scratch):
    made = cli("extract", corpus.manifest(), "-o", scratch, "--threads", 2, "--json")
    summary = made.json()
    assert summary["utterances"] == extracted(made) == len(corpus.rows)
    assert summary["upsampled"] + summary["downsampled"] == 5
    assert summary["threads"] == 2
    assert summary["device"] == "cpu"
    assert sum(summary["stages"].values()) == pytest.approx(1, abs=0.01)
    assert summary["bottleneck"] in summary["stages"]
    assert summary["audio_seconds"] == pytest.approx(26.5, abs=0.1)
    assert summary["versions"][0]["bytes"] == sum(
        len(chunk) - 4 for chunk in chunk_files(scratch).values()
    )


def test_a_version_that_another_run_creates_meanwhile_is_not_one_that_was_renamed(tmp_path):
    info = BuiltConfig(load_config("fbank80"), Device("cpu")).info
    Version.create(tmp_path / info.folder_name, info)
    assert new_version_notes(tmp_path, info) == []


def test_progress_is_a_snapshot_and_the_last_one_has_everything(corpus, scratch):
    snapshots = []
    summary = featcache.extract(
        corpus.manifest(),
        cache=scratch / "snapshots",
        options=featcache.Options(device="cpu", threads=2, shard_megabytes=0.01),
        observer=featcache.Observer(progress=snapshots.append),
    )
    seconds = [progress.audio_seconds for progress in snapshots]
    assert len({*map(id, snapshots)}) > 1  # one may come twice before there is more
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[-1] == summary.audio_seconds
    assert snapshots[-1].shards > 1


def test_two_names_of_one_new_version_are_refused_in_one_line(cli, plain, written, scratch):
    """As a run later refuses the second: else all would be extracted and stored twice."""
    configs = [written(f"name: {name}\nextractor: fbank\n", f"{name}.yaml") for name in "ab"]
    command = ["extract", plain.manifest(), "-o", scratch / "new"]
    said = cli.refused(*command, "-c", configs[0], "-c", configs[1])
    assert said.startswith("featcache: a and b are one version, with the fingerprint ")
    assert not (scratch / "new").exists()
