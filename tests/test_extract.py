"""`featcache extract`: a value depends on the audio and the config alone, and only what is missing is done."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
import zarr
from audio_files import bad_files
from conftest import TINY, Corpus, check, chunk_files, items, only_version, speech, write_config

import featcache
from featcache import pipeline
from featcache.config import load_config
from featcache.device import BATCH_SECONDS
from featcache.errors import Reason
from featcache.extraction import Extraction, Options
from featcache.manifest import read_manifest
from featcache.store import zarr3
from featcache.store.index import open_index


@pytest.fixture(scope="module")
def reference(cli, corpus, tmp_path_factory) -> Path:
    """A cache of the corpus, made by one thread in one shard."""
    cache = tmp_path_factory.mktemp("reference")
    made = cli("extract", corpus.manifest(), "-o", cache, "--threads", 1)
    assert made.code == 0, made.err
    assert len(chunk_files(cache)) == 1
    return cache


@pytest.fixture(scope="module")
def truth(reference) -> dict[str, tuple]:
    """The features of every utterance, as the reference has them."""
    return items(reference)


def versions_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def extracted(finished, number: int = 0) -> int:
    """How many utterances a run with --json extracted for one of its configs."""
    return finished.json()["versions"][number]["extracted"]


# A value depends on nothing but the audio and the config


def test_everything_is_there(corpus, truth):
    """Every utterance of the manifest is in the cache, under its id, with frames for its audio."""
    assert set(truth) == set(corpus.ids)
    assert all(dtype == "float16" and shape[1] == 80 for dtype, shape, _ in truth.values())
    assert truth["plain-01"][1] == (88, 80)  # 0.9 s: 1 + (14400 - 400) // 160
    assert truth["segment-3"][1] == (83, 80)


def test_channels_segments_and_rates_are_told_apart(truth):
    """Rows of one file give different features; rows of the same audio the same."""
    assert len({truth[name][2] for name in ("stereo-mix", "stereo-left", "stereo-right")}) == 3
    assert len({truth[f"segment-{i}"][2] for i in range(6)}) == 6
    assert truth["ünï-ço∂é"] == truth["plain-01"]


@pytest.mark.parametrize("shard_size", [TINY, "0.03", "128"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_shard_sizes_change_no_bit(cli, corpus, truth, scratch, threads, shard_size):
    """The same bits by any number of threads, in any shard size; the same shards by any number of threads."""
    made = cli("extract", corpus.manifest(), "-o", scratch, "--threads", threads, "--shard-size", shard_size)
    assert made.code == 0, made.err
    assert items(scratch) == truth
    assert len(chunk_files(scratch)) == {TINY: 27, "0.03": 14, "128": 1}[shard_size]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_the_manifest_changes_no_bit(cli, corpus, truth, scratch, seed):
    """A shuffled manifest gives the same features, whether or not it tells how long files are."""
    rows = [dict(row) for row in corpus.rows]
    random.Random(seed).shuffle(rows)
    for row in rows[::2]:
        if row["path"].startswith("plain"):
            row["duration"] = soundfile.info(corpus.folder / row["path"]).duration
    manifest = corpus.manifest(rows, f"shuffled-{seed}.csv")
    assert cli("extract", manifest, "-o", scratch, "--shard-size", "0.05").code == 0
    assert items(scratch) == truth


def test_a_grown_manifest_changes_no_bit_and_touches_no_shard(cli, corpus, truth, scratch):
    """Whatever part was there before, the rest is added beside it."""
    for count in (3, 4, 15, len(corpus.rows)):
        before = (
            {name: os.stat(only_version(scratch).shard(name).folder) for name in chunk_files(scratch)}
            if count > 3
            else {}
        )
        grown = corpus.manifest(corpus.rows[:count], "grown.csv")
        assert cli("extract", grown, "-o", scratch, "--shard-size", "0.02").code == 0
        after = {name: os.stat(only_version(scratch).shard(name).folder) for name in chunk_files(scratch)}
        assert all(
            (after[name].st_ino, after[name].st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
            for name, stat in before.items()
        )
    assert items(scratch) == truth


def test_each_utterance_extracted_alone_is_the_same(cli, reference, corpus):
    """Neighbours in a batch make no difference: `--recompute` extracts one by one, and finds the same bits."""
    result = cli("verify", reference, "--recompute", 1000, "--json")
    assert result.code == 0, result.err
    again = result.json()["versions"][0]["recomputed"]
    assert again["identical"] == again["utterances"] == len(corpus.rows)


def test_stock_zarr_and_the_loader_read_what_is_there(reference, truth):
    """A shard is a plain Zarr v3 group: zarr-python gives the same values as featcache, and without it."""
    cache = featcache.open(reference)
    assert set(cache.ids) == set(truth)
    for id_, (dtype, shape, data) in truth.items():
        assert (cache[id_].dtype.name, cache[id_].shape, cache[id_].tobytes()) == (dtype, shape, data)
    version = only_version(reference)
    for name in version.shard_names():
        group = zarr.open_group(version.shard(name).folder, mode="r")
        features, offsets = group["features"][...], group["offsets"][...]
        id_bytes, id_offsets = group["ids"][...].tobytes(), group["id_offsets"][...]
        for number in range(len(offsets) - 1):
            id_ = id_bytes[id_offsets[number] : id_offsets[number + 1]].decode()
            item = features[offsets[number] : offsets[number + 1]]
            assert (item.dtype.name, item.shape, item.tobytes()) == truth[id_]
    whole = zarr.open_group(version.path, mode="r")
    assert set(whole["shards"].group_keys()) == set(version.shard_names())


def test_a_shard_of_zeros_is_on_disk(cli, plain, scratch):
    """Chunks that equal the fill value are written like any other, and a missing one is an error."""
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", write_config(scratch, "Zeros"))
    assert made.code == 0, made.err
    ((_, chunk),) = chunk_files(scratch / "c").items()
    frames = sum(shape[0] for _, shape, _ in items(scratch / "c").values())
    assert len(chunk) == frames * 2 * 4 + 4
    assert not any(chunk[:-4])
    assert check(scratch / "c").problems == []


# Several configs


def test_several_configs_give_what_each_gives_alone(cli, corpus, truth, reference, scratch):
    """`-c a -c b` fills two versions with the bits, and under the shard names, of two separate runs."""
    manifest = corpus.manifest()
    together = cli("extract", manifest, "-o", scratch / "both", "-c", "fbank80", "-c", "mfcc13", "-c", "whisper-mel80")
    assert together.code == 0, together.err
    for config in ("fbank80", "mfcc13", "whisper-mel80"):
        assert cli("extract", manifest, "-o", scratch / config, "-c", config).code == 0
        (one,) = (scratch / "both").glob(f"{config}-*")
        moved = scratch / f"of-{config}"
        moved.mkdir()
        one.rename(moved / one.name)
        assert items(moved) == items(scratch / config)
        assert chunk_files(moved) == chunk_files(scratch / config)
    assert chunk_files(scratch / "of-fbank80") == chunk_files(reference)


def test_several_configs_decode_each_file_once(corpus, scratch, monkeypatch):
    """Three configs at two rates, and yet no file is opened twice."""
    opened = []
    decode = pipeline.decode

    def counting(path, segments, **options):
        opened.extend([path] * len(segments))
        return decode(path, segments, **options)

    monkeypatch.setattr(pipeline, "decode", counting)
    configs = [load_config(name) for name in ("fbank80", "mfcc13", "hifigan-mel80")]
    Extraction(read_manifest(corpus.manifest()), configs, scratch, Options("cpu", 2)).run()
    assert len(opened) == len(corpus.rows)
    assert len(list(scratch.iterdir())) == 3


def test_configs_that_lack_different_rows_are_filled_each(cli, plain, scratch):
    """A version that has some rows already gets the others, and no more."""
    half = plain.manifest(plain.rows[::2], "half.csv")
    assert cli("extract", half, "-o", scratch, "-c", "mfcc13").code == 0
    made = cli("extract", plain.manifest(), "-o", scratch, "-c", "mfcc13", "-c", "fbank80", "--json")
    assert (made.code, extracted(made, 0), extracted(made, 1)) == (0, 6, 12)
    verified = cli("verify", scratch, "--manifest", plain.manifest(), "--json")
    assert (verified.code, [version["repeated"] for version in verified.json()["versions"]]) == (0, [0, 0])


def test_two_configs_of_one_name_are_refused(cli, plain, scratch):
    """A name names one version of a run."""
    refused = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", "fbank80", "-c", "fbank80")
    assert refused.code == 2
    assert "same name" in refused.err
    assert not (scratch / "c").exists()


# Only what is missing is done


def test_again_does_nothing_and_says_so(cli, corpus, reference):
    """The second run opens no audio, makes no shard and no record of a run."""
    before = sorted(reference.rglob("*"))
    again = cli("extract", corpus.manifest(), "-o", reference)
    assert (again.code, again.err) == (0, "")
    assert f"nothing to do: all {len(corpus.rows)} utterances are there" in again.out
    assert sorted(reference.rglob("*")) == before


def test_another_config_is_another_version_and_says_what_differs(cli, plain, scratch):
    """Nothing is reused that another config made; one line names the keys."""
    (scratch / "a.yaml").write_text("name: mine\nextractor: fbank\n")
    (scratch / "b.yaml").write_text("name: mine\nextractor: fbank\nparams: {low_freq: 0, num_mel_bins: 40}\n")
    cache = scratch / "c"
    first = cli("extract", plain.manifest(), "-o", cache, "-c", scratch / "a.yaml")
    second = cli("extract", plain.manifest(), "-o", cache, "-c", scratch / "b.yaml")
    assert (first.code, first.err) == (0, "")
    assert second.code == 0
    (line,) = second.err.splitlines()
    assert "params.low_freq: 20.0 -> 0.0" in line
    assert "params.num_mel_bins: 80 -> 40" in line
    assert "params.high_freq" not in line
    assert len(versions_in(cache)) == 2
    again = cli("extract", plain.manifest(), "-o", cache, "-c", scratch / "b.yaml")
    assert "nothing to do" in again.out
    assert again.err == ""


def test_what_decides_no_value_makes_no_version(cli, plain, scratch):
    """A default spelt out, another order of keys or a limit of seconds is the same version."""
    (scratch / "a.yaml").write_text("name: mine\nextractor: fbank\n")
    (scratch / "b.yaml").write_text(
        "audio: {max_seconds: 100, sample_rate: 16000}\nparams: {num_mel_bins: 80}\nextractor: fbank\nname: mine\n"
    )
    cli("extract", plain.manifest(), "-o", scratch / "c", "-c", scratch / "a.yaml")
    again = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", scratch / "b.yaml")
    assert "nothing to do" in again.out
    assert len(versions_in(scratch / "c")) == 1


def test_rows_removed_are_surplus(cli, plain, scratch):
    """What a manifest no longer names stays, and verify counts it."""
    cli("extract", plain.manifest(), "-o", scratch)
    fewer = plain.manifest(plain.rows[:-3], "fewer.csv")
    assert "nothing to do: all 9 utterances are there" in cli("extract", fewer, "-o", scratch).out
    verified = cli("verify", scratch, "--manifest", fewer)
    assert verified.code == 0
    assert "3 utterances are not in the manifest" in verified.out


@pytest.mark.parametrize(
    "changed",
    [{"path": "stereo.wav"}, {"start": 0.1}, {"duration": 0.3}, {"channel": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_row_that_changed_is_extracted_again(cli, scratch, changed):
    """The new one counts from then on; the old one is superseded, and its neighbours are left alone."""
    corpus = Corpus(scratch / "corpus")
    corpus.folder.mkdir()
    for i in range(4):
        soundfile.write(corpus.folder / f"{i}.wav", speech(0.5, channels=2, seed=i), 16000)
        corpus.add(f"utt-{i}", f"{i}.wav", start=0.0, duration=0.4, channel=0)
    soundfile.write(corpus.folder / "stereo.wav", speech(0.6, channels=2, seed=9), 16000)
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    before = items(cache)
    corpus.rows[2] |= changed
    verified = cli("verify", cache, "--manifest", corpus.manifest())
    assert verified.code == 1
    assert "changed: utt-2" in verified.out
    planned = cli("extract", corpus.manifest(), "-o", cache, "--dry-run").out
    assert "1 of 4 utterances to extract, 1 of them changed" in planned
    made = cli("extract", corpus.manifest(), "-o", cache, "--json")
    assert (made.code, extracted(made)) == (0, 1)
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"utt-2"}
    fresh = scratch / "fresh"
    cli("extract", corpus.manifest(), "-o", fresh)
    assert after == items(fresh)
    report = check(cache, manifest=read_manifest(corpus.manifest()))
    assert (report.problems, report.items, report.repeated, report.surplus) == ([], 4, 0, 0)


def test_a_row_that_changes_back_and_forth_gives_what_the_last_run_asked_for(cli, plain, scratch):
    """A chain of superseded items ends at the latest one."""
    rows = [dict(row) for row in plain.rows[:3]]
    duration, seen = rows[1]["duration"], {}
    for step, seconds in enumerate((duration, 0.2, duration, 0.3, 0.2, duration)):
        rows[1]["duration"] = seconds
        assert cli("extract", plain.manifest(rows, "chain.csv"), "-o", scratch).code == 0
        features = items(scratch)["utt-01"]
        assert seen.setdefault(seconds, features) == features, step
        assert check(scratch, manifest=read_manifest(plain.manifest(rows, "chain.csv"))).problems == []
    assert len(set(seen.values())) == 3


def test_a_changed_file_is_extracted_again_when_asked(cli, plain, scratch):
    """`--check-sources` notices another size or mtime; without it nobody looks at the audio."""
    corpus = plain.copy(scratch / "corpus")
    cache = scratch / "c"
    cli("extract", corpus.manifest(), "-o", cache)
    before = items(cache)
    soundfile.write(corpus.folder / "03.wav", speech(0.46, seed=99), 16000)  # same size, other mtime and sound
    os.utime(corpus.folder / "05.wav", ns=(1, 1))  # touched, and the same
    assert "nothing to do" in cli("extract", corpus.manifest(), "-o", cache).out
    made = cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--json")
    assert (made.code, extracted(made)) == (0, 2)
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"utt-03"}
    assert "nothing to do" in cli("extract", corpus.manifest(), "-o", cache, "--check-sources").out
    assert check(cache, manifest=read_manifest(corpus.manifest())).problems == []


def test_a_file_that_is_gone_is_no_reason_to_drop_its_features(cli, plain, scratch):
    """`--check-sources` after the audio was tidied away: what cannot be extracted again stays."""
    corpus = plain.copy(scratch / "corpus")
    cache = scratch / "c"
    cli("extract", corpus.manifest(), "-o", cache)
    before = items(cache)
    (corpus.folder / "03.wav").unlink()
    os.utime(corpus.folder / "05.wav", ns=(1, 1))
    made = cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--json")
    assert (made.code, extracted(made)) == (0, 1)
    assert items(cache) == before


def test_another_corpus_with_the_same_ids_and_paths_is_refused(cli, plain, scratch):
    """ "Nothing to do" would hand training the other corpus's features. A corpus that was merely moved is fine."""
    cache = scratch / "c"
    cli("extract", plain.manifest(), "-o", cache)
    moved, other = plain.copy(scratch / "moved"), plain.copy(scratch / "other")
    assert "nothing to do" in cli("extract", moved.manifest(), "-o", cache).out
    soundfile.write(other.folder / "03.wav", speech(0.7, seed=99), 16000)
    refused = cli("extract", other.manifest(), "-o", cache)
    assert refused.code == 2
    (line,) = refused.err.splitlines()
    assert "1 of 12 files" in line
    assert "03.wav" in line
    assert "another corpus" in line
    made = cli("extract", other.manifest(), "-o", cache, "--check-sources", "--json")
    assert (made.code, extracted(made)) == (0, 1)


def test_what_replaces_an_item_and_fails_leaves_it_there_and_verify_says_so(cli, plain, scratch):
    """Whether or not a neighbour in the same run has been replaced."""
    cache = scratch / "c"
    cli("extract", plain.manifest(), "-o", cache)
    before = items(cache)
    rows = [dict(row) for row in plain.rows]
    rows[3]["path"], rows[5]["duration"] = "gone.wav", 0.3
    changed = plain.manifest(rows, "changed.csv")
    assert cli("extract", changed, "-o", cache).code == 3
    assert {name for name, found in items(cache).items() if found != before[name]} == {rows[5]["id"]}
    (problem,) = check(cache, manifest=read_manifest(changed)).problems
    assert (problem.kind, problem.id) == ("changed", rows[3]["id"])


def test_it_says_so_when_it_replaces_features(cli, plain, scratch):
    """Another corpus with the same ids, in the same cache: one line tells before it is done."""
    cli("extract", plain.manifest(), "-o", scratch / "c")
    rows = [{**row, "path": str(plain.folder / row["path"])} for row in plain.rows]
    made = cli("extract", plain.manifest(rows, "absolute.csv"), "-o", scratch / "c")
    assert made.code == 0
    (line,) = made.err.splitlines()
    assert "12 utterances are extracted again: their path, start, duration, channel or file" in line


def test_recompute_finds_the_audio_of_every_run(cli, plain, corpus, scratch):
    """Manifests of several folders fill one cache; each utterance comes from below its own."""
    rows = [row for row in corpus.rows if row["id"].startswith("plain")]
    for manifest in (plain.manifest(), corpus.manifest(rows, "plain.csv")):
        assert cli("extract", manifest, "-o", scratch).code == 0
    verified = cli("verify", scratch, "--recompute", 100)
    assert verified.code == 0, verified.out
    assert "extracted 24 again: 24 bit-identical" in verified.out


# Failures


def test_a_failed_utterance_is_in_the_ledger_and_not_tried_again(cli, plain, scratch):
    """It is named with its reason; a second run says so and does nothing; a new file or --retry-failed tries again."""
    corpus = plain.copy(scratch / "corpus")
    cache = scratch / "c"
    (corpus.folder / "02.wav").write_bytes(b"RIFF, in name only")
    (corpus.folder / "07.wav").unlink()
    soundfile.write(corpus.folder / "09.wav", np.zeros(100), 16000)
    for row in corpus.rows:
        del row["duration"]
    made = cli("extract", corpus.manifest(), "-o", cache)
    assert made.code == 3
    assert "failures: file_missing 1, not_audio 1, too_short 1" in made.out
    (ledger,) = cache.glob("*/runs/*/failures.jsonl")
    reasons = {record["id"]: record["reason"] for record in map(json.loads, ledger.read_text().splitlines())}
    assert reasons == {"utt-02": "not_audio", "utt-07": "file_missing", "utt-09": "too_short"}
    assert len(items(cache)) == 9

    again = cli("extract", corpus.manifest(), "-o", cache)
    assert again.code == 3
    assert "0 extracted" in again.out
    assert "3 failed" in again.out
    assert list(cache.glob("*/runs/*/failures.jsonl")) == [ledger]
    verified = cli("verify", cache, "--manifest", corpus.manifest())
    assert verified.code == 3
    assert "3 utterances are in the failure ledger" in verified.out

    shutil.copy(plain.folder / "07.wav", corpus.folder)
    mended = cli("extract", corpus.manifest(), "-o", cache, "--json")
    assert (mended.code, extracted(mended), mended.json()["versions"][0]["failed"]) == (3, 1, 2)
    retried = cli("extract", corpus.manifest(), "-o", cache, "--retry-failed", "--json")
    assert (retried.code, retried.json()["failures"]) == (3, {"not_audio": 1, "too_short": 1})
    for name in ("02.wav", "09.wav"):
        shutil.copy(plain.folder / name, corpus.folder)
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    assert check(cache, manifest=read_manifest(corpus.manifest())).failed == 0


def test_every_kind_of_bad_file_is_named_with_its_reason(cli, plain, scratch):
    """Missing, empty, cut off, no audio, not finite, too short, beside the file: and everything else is there."""
    (scratch / "bad").mkdir()
    expected, rows = {}, []
    for name, (path, reason) in bad_files(scratch / "bad").items():
        if "\0" not in str(path):  # which no manifest may hold
            rows.append({"id": name, "path": str(path)})
            expected[name] = reason
    good = str(plain.folder / "00.wav")
    soundfile.write(scratch / "short.wav", np.zeros(399), 16000)
    soundfile.write(scratch / "long.wav", speech(3.6), 16000)
    soundfile.write(scratch / "other-rate.wav", np.zeros(8000), 8000)
    for name, reason, row in (
        ("short", Reason.TOO_SHORT, {"path": str(scratch / "short.wav")}),
        ("short segment", Reason.TOO_SHORT, {"path": good, "start": 0.1, "duration": 0.01}),
        ("outside", Reason.SEGMENT_OUTSIDE, {"path": good, "start": 5.0}),
        ("beyond the end", Reason.SEGMENT_OUTSIDE, {"path": good, "duration": 5.0}),
        ("no channel", Reason.NO_SUCH_CHANNEL, {"path": good, "channel": 1}),
        ("long", Reason.TOO_LONG, {"path": str(scratch / "long.wav")}),
        ("other rate", Reason.RATE_REFUSED, {"path": str(scratch / "other-rate.wav")}),
    ):
        rows.append({"id": name, **row})
        expected[name] = reason
    fine = [{"id": row["id"], "path": str(plain.folder / row["path"])} for row in plain.rows[:8]]
    mixed = [*rows, *fine]
    random.Random(3).shuffle(mixed)
    manifest = scratch / "mixed.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in mixed))
    config = scratch / "strict.yaml"
    config.write_text("name: strict\nextractor: fbank\naudio: {resample: forbid, max_seconds: 3.5}\n")

    made = cli("extract", manifest, "-o", scratch / "c", "-c", config, "--json")
    assert made.code == 3, made.err
    (ledger,) = (scratch / "c").glob("*/runs/*/failures.jsonl")
    records = {record["id"]: record for record in map(json.loads, ledger.read_text().splitlines())}
    assert {name: record["reason"] for name, record in records.items()} == expected
    assert all(record["message"] for record in records.values())
    assert made.json()["failures"] == Counter(expected.values())
    assert set(items(scratch / "c")) == {row["id"] for row in fine}
    assert check(scratch / "c").problems == []
    told = cli("info", scratch / "c", "--failures").out
    assert all(name in told and reason in told for name, reason in expected.items())
    again = cli("extract", manifest, "-o", scratch / "c", "-c", config, "--json")
    assert again.json()["failures"] == {"file_unreadable": 1}  # by now it might be readable


@pytest.mark.parametrize("separator", ["\u2028", "\u0085", "\x1c", "\r", "é"])
def test_the_ledger_keeps_names_of_any_characters(cli, plain, scratch, separator):
    """What Unicode, or Python, takes for the end of a line is no end of a record."""
    path = f"no{separator}such.wav"
    manifest = scratch / "odd.jsonl"
    manifest.write_text(json.dumps({"id": "odd", "path": path}) + "\n")
    assert cli("extract", manifest, "-o", scratch / "c").code == 3
    ((_, failure),) = [
        (one["id"], one) for one in cli("info", scratch / "c", "--json").json()["versions"][0]["failures"]
    ]
    assert failure["path"] == path
    assert "0 extracted" in cli("extract", manifest, "-o", scratch / "c").out


def test_an_extractor_may_refuse_a_clip_or_fail_it(cli, plain, scratch):
    """Those utterances are in the ledger, and those beside them in the cache."""
    rows = [
        {**row, "id": f"{name}-{i}"}
        for i, (row, name) in enumerate(zip(plain.rows, ["ok", "refuse", "nan"] * 4, strict=True))
    ]
    made = cli(
        "extract",
        plain.manifest(rows, "picky.csv"),
        "-o",
        scratch / "c",
        "-c",
        write_config(scratch, "Picky"),
        "--json",
    )
    assert made.code == 3
    assert made.json()["failures"] == {"extractor_refused": 4, "non_finite_features": 4}
    assert set(items(scratch / "c")) == {row["id"] for row in rows if row["id"].startswith("ok")}
    assert check(scratch / "c").problems == []


def test_when_all_utterances_fail_there_is_a_ledger_and_no_shard(cli, plain, scratch):
    """A wrong --root, say: nothing is lost by mounting the disk and running again."""
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "--root", scratch)
    assert made.code == 3
    assert "file_missing 12" in made.out
    assert "bottleneck" not in made.out  # of nothing
    assert made.out.endswith(f"featcache info {only_version(scratch / 'c').path} --failures\n")
    assert chunk_files(scratch / "c") == {}
    assert cli("verify", scratch / "c").code == 3
    assert cli("extract", plain.manifest(), "-o", scratch / "c").code == 0
    assert cli("verify", scratch / "c", "--manifest", plain.manifest()).code == 0


def test_where_several_versions_lack_utterances_the_summary_names_the_cache(cli, plain, scratch):
    """Its first version alone may have no failures."""
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "--root", scratch, "-c", "fbank80", "-c", "mfcc13")
    assert made.out.endswith(f"featcache info {scratch / 'c'} --failures\n")


def test_a_raised_limit_of_seconds_lets_in_what_was_too_long(cli, plain, scratch):
    """`max_seconds` is not in the fingerprint: utterances that it kept out are missing once it no longer does."""
    config = scratch / "limited.yaml"
    config.write_text("name: limited\nextractor: fbank\naudio: {max_seconds: 0.5}\n")
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", config)
    assert made.code == 3
    assert "too_long 6" in made.out
    config.write_text("name: limited\nextractor: fbank\naudio: {max_seconds: 0.55}\n")
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", config, "--json")
    assert (made.code, extracted(made)) == (3, 2)
    config.write_text("name: limited\nextractor: fbank\n")
    assert cli("extract", plain.manifest(), "-o", scratch / "c", "-c", config).code == 0


# What extractors get wrong


def test_an_extractor_that_breaks_its_contract_ends_the_run(cli, plain, scratch):
    """One line says what it did; nothing of it is kept."""
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", write_config(scratch, "Wrong"))
    assert made.code == 1
    (line,) = made.err.splitlines()
    assert "Wrong returned" in line
    assert "num_frames" in line
    assert chunk_files(scratch / "c") == {}


def test_an_extractor_that_crashes_tells_on_what(cli, plain, scratch):
    """The traceback is its author's; the utterances are ours to name."""
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", write_config(scratch, "Broken"))
    assert made.code == 1
    assert "CUDA error: out of cheese" in made.err
    assert "while Broken extracted utt-00, utt-01" in made.err


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_features_are_not_stored_as_integers(cli, plain, scratch, dtype):
    """A cast would leave noise: it is refused before anything is written."""
    (scratch / "a.yaml").write_text(f"name: a\nextractor: fbank\nstore: {{dtype: {dtype}}}\n")
    made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", scratch / "a.yaml")
    assert made.code == 2
    assert f"store.dtype: {dtype}" in made.err
    assert not (scratch / "c").exists()


# Threads


def test_each_worker_computes_with_one_thread_of_torch(cli, plain, scratch):
    """`--threads` workers, and none besides: torch brings no threads of its own into any of them."""
    config = write_config(scratch, "Threads")
    assert cli("extract", plain.manifest(), "-o", scratch / "c", "-c", config, "--threads", 3).code == 0
    version = only_version(scratch / "c")
    assert {float(value) for name in version.shard_names() for value in np.unique(version.shard(name).features)} == {
        1.0
    }


def test_a_process_has_no_more_threads_than_its_budget(cli, plain, scratch, slower_config):
    """The main thread, the workers, the one that commits, those that wait for the disk; the kernel counts them."""
    running = cli.start(
        "extract", plain.manifest(), "-o", scratch, "-c", slower_config, "--threads", 2, "--shard-size", "0.0004"
    )
    running.wait_until(lambda: list(scratch.glob("*/shards/*/")))
    count = len(os.listdir(f"/proc/{running.pid}/task"))
    assert running.wait().code == 0
    assert count <= 2 + 2 + zarr3.SYNC_THREADS


# Plans, summaries, manifests


def test_a_dry_run_writes_nothing(cli, plain, scratch):
    """It says how many utterances, hours and bytes, before and after."""
    cache = scratch / "c"
    planned = cli("extract", plain.manifest(), "-o", cache, "--dry-run", "--json")
    assert planned.code == 0
    (version,) = planned.json()["versions"]
    assert (version["missing"], version["present"]) == (12, 0)
    assert version["hours"] * 3600 == pytest.approx(6.12, abs=0.2)
    assert not cache.exists()
    cli("extract", plain.manifest(plain.rows[:5], "five.csv"), "-o", cache)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    planned = cli("extract", plain.manifest(), "-o", cache, "--dry-run")
    assert "7 of 12 utterances to extract" in planned.out
    assert "5 are there" in planned.out
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    size = sum(len(chunk) - 4 for chunk in chunk_files(cache).values())
    assert version["bytes"] * 5 / 12 == pytest.approx(size, rel=0.3)


def test_a_manifest_comes_by_standard_input_and_its_paths_by_root(cli, plain, reference, scratch):
    """`-`, with what its paths are relative to."""
    made = cli("extract", "-", "-o", scratch / "c", "--root", plain.folder, stdin=plain.manifest())
    assert made.code == 0, made.err
    assert set(items(scratch / "c")) == set(plain.ids)


def test_paths_that_are_not_utf8_do_not_matter(cli, plain, scratch):
    """A folder from an old file system: its name is bytes, and the run works all the same."""
    folder = Path(os.fsdecode(os.fsencode(scratch) + b"/caf\xe9"))
    folder.mkdir()
    manifest = folder / "manifest.csv"
    shutil.copy(plain.manifest(), manifest)
    for options in ([], ["--json"]):
        made = cli("extract", manifest, "--root", plain.folder, "-o", folder / "c", *options)
        assert made.code == 0, made.err
    assert cli("verify", folder / "c", "--recompute", 3).code == 0


def test_the_summary_tells_what_was_done(cli, corpus, scratch):
    """Utterances, hours, resampled ones, where the time went, and the budget of threads."""
    made = cli("extract", corpus.manifest(), "-o", scratch, "--threads", 2, "--json")
    summary = made.json()
    assert summary["utterances"] == extracted(made) == len(corpus.rows)
    assert summary["resampled"] == 5
    assert summary["threads"] == 2
    assert summary["device"] == "cpu"
    assert sum(summary["stages"].values()) == pytest.approx(1, abs=0.01)
    assert summary["bottleneck"] in summary["stages"]
    assert summary["audio_hours"] * 3600 == pytest.approx(26.5, abs=0.1)
    assert summary["versions"][0]["num_bytes"] == sum(len(chunk) - 4 for chunk in chunk_files(scratch).values())


def test_an_interrupted_run_counts_what_it_has_committed(plain, slower_config, scratch, monkeypatch):
    """Not what was extracted for a shard that never became whole."""
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.5)  # a batch each: one shard has several
    options = Options("cpu", 1, shard_megabytes=0.0014)
    stop = threading.Event()
    extraction = Extraction(read_manifest(plain.manifest()), [load_config(slower_config)], scratch, options)
    summary = extraction.run(lambda progress: stop.set() if progress.shards else None, stop)
    assert summary.interrupted
    version = only_version(scratch)
    there = len(open_index(version))
    assert 0 < there < len(plain.rows)
    assert summary.versions[0].extracted == there
    assert summary.audio_hours * 3600 == pytest.approx(
        sum(version.shard(name).info.seconds for name in version.shard_names())
    )
