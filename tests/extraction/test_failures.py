"""What cannot be extracted is named with its reason, and what extractors get wrong is
told."""

import csv
import io
import json
import os
import random
import re
import shutil
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from audio_files import forget_flac_length, patch_file
from cache_contents import check, chunk_files, items, only_version
from corpora import speech
from extractions import extracted, reasons_of, write_config
from loud_extractors import LOUD_SAMPLES

import featcache
from featcache.config import load_config
from featcache.device import BATCH_SECONDS
from featcache.engines.local import run_locally
from featcache.errors import AudioError, ConfigError, Reason
from featcache.extraction import from_audio
from featcache.extraction.extraction import run_extraction
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.manifest.read import read_manifest
from featcache.version.in_flight import Suspects
from featcache.version.ledger import read_failures
from featcache.version.selection import select_version

# Failures


def test_a_failed_utterance_is_in_the_ledger_and_not_tried_again(cli, plain, scratch):
    corpus = plain.copy(scratch / "corpus")
    cache = scratch / "c"
    (corpus.folder / "02.wav").write_bytes(b"RIFF, in name only")
    (corpus.folder / "07.wav").unlink()
    soundfile.write(corpus.folder / "09.wav", np.zeros(100), 16000)
    for row in corpus.rows:
        del row["duration"]
    job = ("extract", corpus.manifest(), "-o", cache, "--json")
    assert cli(*job).with_code(3).json()["failed_by_reason"] == {
        "file_missing": 1,
        "not_audio": 1,
        "too_short": 1,
    }
    ledger = read_failures(only_version(cache))
    assert (len(ledger), len(items(cache))) == (3, 9)

    again = cli(*job).with_code(3)
    assert (
        extracted(again),
        again.json()["failed_by_reason"],
        again.json()["versions"][0]["failed"],
    ) == (0, {}, 3)
    assert read_failures(only_version(cache)) == ledger
    verified = cli("verify", cache, "--manifest", corpus.manifest()).with_code(3)
    assert "3 utterances are in the failure ledger" in verified.out

    shutil.copy(plain.folder / "07.wav", corpus.folder)
    mended = cli(*job).with_code(3)
    assert (extracted(mended), mended.json()["versions"][0]["failed"]) == (1, 2)
    retried = cli(*job, "--retry-failed").with_code(3)
    assert retried.json()["failed_by_reason"] == {"not_audio": 1, "too_short": 1}
    for name in ("02.wav", "09.wav"):
        shutil.copy(plain.folder / name, corpus.folder)
    assert cli(*job).code == 0
    assert check(cache, manifest=read_manifest(corpus.manifest())).failed == 0


def test_every_kind_of_bad_file_is_named_with_its_reason(cli, bad, plain, scratch, written):
    # which no manifest may hold
    found = {name: one for name, one in bad.items() if "\0" not in str(one[0])}
    rows = [{"id": name, "path": str(path)} for name, (path, _) in found.items()]
    expected = {name: reason for name, (_, reason) in found.items()}
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
    text = "name: strict\nextractor: fbank\naudio: {resample: forbid, max_seconds: 3.5}\n"
    job = ("extract", manifest, "-o", scratch / "c", "-c", written(text, "strict.yaml"), "--json")
    made = cli(*job).with_code(3)
    ledger = read_failures(only_version(scratch / "c"))
    assert {failure.id: failure.reason for failure in ledger} == expected
    assert all(failure.message for failure in ledger)
    assert made.json()["failed_by_reason"] == Counter(expected.values())
    assert set(items(scratch / "c")) == {row["id"] for row in fine}
    assert check(scratch / "c").problems == []
    told = cli("info", scratch / "c", "--failures").out
    assert all(name in told and reason in told for name, reason in expected.items())
    # by now it might be readable
    assert cli(*job).json()["failed_by_reason"] == {"file_unreadable": 1}


@pytest.mark.parametrize("store", ["", "store: {dtype: uint8}\n"], ids=["float32", "uint8"])
def test_an_extractor_may_refuse_a_clip_or_fail_it(cli, plain, scratch, store):
    rows = [
        {**row, "id": f"{name}-{i}"}
        for i, (row, name) in enumerate(zip(plain.rows, ["ok", "refuse", "nan"] * 4, strict=True))
    ]
    config = write_config(scratch, "Picky")
    config.write_text(config.read_text() + store)
    made = cli(
        "extract", plain.manifest(rows, "picky.csv"), "-o", scratch / "c", "-c", config, "--json"
    ).with_code(3)
    assert made.json()["failed_by_reason"] == {"extractor_refused": 4, "non_finite_features": 4}
    told = cli("info", scratch / "c", "--failures").out
    assert "nan-2\tnon_finite_features\t02.wav\tfeatures are NaN or infinite as float32" in told
    assert set(items(scratch / "c")) == {row["id"] for row in rows if row["id"].startswith("ok")}
    assert check(scratch / "c").problems == []


def test_when_all_utterances_fail_there_is_a_ledger_and_no_shard(cli, plain, scratch):
    """A disk that gives files without what is in them, say: nothing is lost by mending it
    and running again."""
    corpus = plain.copy(scratch / "corpus")
    for path in corpus.folder.glob("*.wav"):
        path.write_bytes(b"")
    made = cli("extract", corpus.manifest(), "-o", scratch / "c").with_code(3)
    assert "empty 12" in made.out
    assert "bottleneck" not in made.out  # of nothing
    assert made.out.endswith(f"featcache info {only_version(scratch / 'c').path} --failures\n")
    assert chunk_files(scratch / "c") == {}
    assert cli("verify", scratch / "c").code == 3
    assert cli("extract", plain.manifest(), "-o", scratch / "c").code == 0
    assert cli("verify", scratch / "c", "--manifest", plain.manifest()).code == 0
    made = cli(
        "extract", corpus.manifest(), "-o", scratch / "both", "-c", "fbank80", "-c", "mfcc13"
    )
    # the first one alone may have none
    assert made.out.endswith(f"featcache info {scratch / 'both'} --failures\n")


@pytest.mark.parametrize("extractor", ["Frames", "Rows"])
def test_a_batch_of_which_all_utterances_fail_holds_up_no_other(
    plain, scratch, monkeypatch, extractor
):
    """Of an extractor that takes rows, none is waited for: the ledger has them, and the
    others are extracted."""
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    first, *others = plain.rows[:3]
    manifest = read_manifest(
        plain.manifest([{**first, "path": "gone.wav"}, *others], "one-gone.csv")
    )
    config = write_config(scratch, extractor, module="loud_extractors")
    summary = featcache.extract(manifest, config, scratch / "c", Options("cpu", 2))
    assert summary.failed_by_reason == {"file_missing": 1}
    assert [failure.id for failure in read_failures(only_version(scratch / "c"))] == [first["id"]]
    assert {*items(scratch / "c")} == {row["id"] for row in others}
    again = featcache.extract(manifest, config, scratch / "c", Options("cpu", 2, retry_failed=True))
    assert (again.failed_by_reason, again.versions[0].missing) == ({"file_missing": 1}, 0)


def test_a_waveform_that_would_take_too_much_memory_fails(scratch, monkeypatch):
    """Without a limit in the config: by what its header says, before it is decoded, or
    while it is."""
    monkeypatch.setattr(from_audio, "_MOST_BYTES", 4 * 16000)
    for name in ("long", "unknown"):
        soundfile.write(scratch / f"{name}.flac", np.zeros(16000 * 2), 16000)
    forget_flac_length(scratch / "unknown.flac")
    (scratch / "m.csv").write_text("id,path\nlong,long.flac\nunknown,unknown.flac\n")
    config = load_config("fbank80", {"audio.max_seconds": None})
    featcache.extract(scratch / "m.csv", config, scratch / "c", featcache.Options("cpu", 1))
    failures = read_failures(only_version(scratch / "c"))
    assert [failure.reason for failure in failures] == ["too_long"] * 2
    assert all("at most 1 s" in failure.message for failure in failures)


def test_a_raised_limit_of_seconds_lets_in_what_was_too_long(cli, plain, scratch, written):
    """`max_seconds` is not in the fingerprint: utterances that it kept out are missing
    once it no longer does."""
    for audio, added, failed in (
        ("{max_seconds: 0.5}", 6, 6),
        ("{max_seconds: 0.55}", 2, 4),
        ("{}", 4, 0),
    ):
        config = written(f"name: limited\nextractor: fbank\naudio: {audio}\n", "limited.yaml")
        made = cli("extract", plain.manifest(), "-o", scratch / "c", "-c", config, "--json")
        assert (made.code, extracted(made)) == (3 if failed else 0, added)
        assert list(reasons_of(cli, scratch / "c").values()) == ["too_long"] * failed


def test_headers_that_promise_hours_of_a_few_samples_cost_nothing(cli, plain, scratch, written):
    """1 Hz, by a flipped bit, say; and a file that is all hole. A config may lift either
    bound, and lets them in."""
    corpus = plain.copy(scratch / "corpus")
    corpus.record("slow", "slow.wav", speech(0.05), 1)
    corpus.record("low", "low.wav", speech(0.05), 999)
    sparse, num_bytes = (
        Path(shutil.copy(corpus.folder / "00.wav", corpus.folder / "sparse.wav")),
        7 * 3600 * 16000 * 2,
    )
    for at in (4, 40):
        patch_file(sparse, at, struct.pack("<I", num_bytes + 40 - at))
    os.truncate(sparse, 44 + num_bytes)
    corpus.add("sparse", "sparse.wav")
    config = written("name: bounded\nextractor: fbank\n", "default.yaml")
    job = ("extract", corpus.manifest(), "-o", scratch / "c", "-c", config)
    made = cli(*job, "--json", limits={"DATA": 2 << 30}).with_code(3)
    assert made.json()["failed_by_reason"] == {"rate_refused": 2, "too_long": 1}
    assert cli(*job, "--json").json()["failed_by_reason"] == {}
    config.write_text("name: bounded\nextractor: fbank\naudio: {min_source_rate: 999}\n")
    made = cli(*job, "--json")
    assert (extracted(made), made.json()["versions"][0]["failed"]) == (1, 2)
    told = cli("info", scratch / "c", "--failures").out
    assert "its header says 1 Hz" in told
    assert "audio.min_source_rate" in told


def test_a_lowered_bound_of_rates_lets_in_what_it_kept_out_where_resampling_is_forbidden(
    cli, plain, scratch, written
):
    corpus = plain.copy(scratch / "corpus")
    corpus.record("other", "other.wav", speech(0.5), 8000)
    for least, added, failed in ((16001, 0, 13), (16000, 12, 1), (1000, 0, 1)):
        audio = f"{{resample: forbid, min_source_rate: {least}}}"
        config = written(f"name: strict\nextractor: fbank\naudio: {audio}\n", "strict.yaml")
        made = cli(
            "extract", corpus.manifest(), "-o", scratch / "c", "-c", config, "--json"
        ).with_code(3)
        assert (extracted(made), made.json()["versions"][0]["failed"]) == (added, failed)


def test_a_failure_of_a_row_that_nobody_wants_counts_no_more(cli, plain, scratch):
    rows = [*plain.rows[:3], {"id": "gone", "path": "nowhere.wav"}]
    job = ("extract", "-o", scratch / "c", "--root", plain.folder)
    manifest = plain.manifest(rows, "dropped.csv")
    cli(*job, manifest).with_code(3)
    cli("verify", scratch / "c").with_code(3)
    plain.manifest(rows[:3], "dropped.csv")
    cli(*job, manifest).with_code(0)
    assert "ledger" not in cli("verify", scratch / "c").with_code(0).out
    (told,) = cli("info", scratch / "c", "--json").json()["versions"]
    assert (told["failed"], told["failures"]) == (0, [])
    plain.manifest(rows, "dropped.csv")
    cli(*job, manifest).with_code(3)
    cli("verify", scratch / "c").with_code(3)


# What extractors get wrong


@pytest.mark.parametrize(
    ("extractor", "how", "told"),
    [
        ("Crashing", "exit", r"Crashing called sys\.exit\(0\) while it extracted one!exit"),
        ("Crashing", "interrupt", r"Crashing raised KeyboardInterrupt while it extracted one!"),
        ("Wrong", "", r"Wrong \(.*odd_extractors\.py\): extract returned .*num_frames"),
    ],
)
def test_an_extractor_that_would_end_the_process_or_breaks_its_contract_ends_the_run(
    cli, plain, scratch, extractor, how, told
):
    """`sys.exit` says nothing, and may say that all went well."""
    rows = [{**plain.rows[0], "id": f"one!{how}"}, *plain.rows[1:3]]
    manifest = plain.manifest(rows, "exit.csv")
    made = cli(
        "extract", manifest, "-o", scratch / "c", "-c", write_config(scratch, extractor)
    ).with_code(1)
    (line,) = made.err.splitlines()
    assert re.search(told, line)
    assert [*(scratch / "c").iterdir()] == []


def test_an_extractor_that_is_built_elsewhere_moves_no_cache(cli, plain, scratch):
    config = write_config(scratch, "Moving")
    cli("extract", plain.manifest(), "-c", config, "-o", "c", cwd=scratch).with_code(0)
    assert len(items(scratch / "c")) == len(plain.rows)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_extractor_that_changes_the_current_folder_ends_the_run(cli, plain, scratch, threads):
    """In the process itself, and in forked ones."""
    config = write_config(scratch, "Moving")
    rows = [*plain.rows[:-1], {**plain.rows[-1], "id": "away"}]
    job = ("extract", plain.manifest(rows, "moving.csv"), "-c", config, "-o", "c", "--threads")
    ended = cli(*job, threads, "--shard-size", "0.001", cwd=scratch).with_code(1)
    assert "an extractor has changed the current folder" in ended.err
    assert "away" not in items(scratch / "c")


# Exceptions of extractors


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("cancelled", "CancelledError"),
        ("mute", "Mute: it has no text"),
        ("reason", "ValueError: 'loud' is not a valid Reason"),
    ],
)
def test_an_odd_exception_costs_its_clip_alone(cli, plain, scratch, how, told):
    rows = [*plain.rows[1:4], {**plain.rows[0], "id": f"one!{how}"}]
    manifest = plain.manifest(rows, "odd.csv")
    cli("extract", manifest, "-o", scratch, "-c", write_config(scratch, "Crashing")).with_code(3)
    (failure,) = read_failures(only_version(scratch))
    assert (failure.id, failure.reason) == (f"one!{how}", "extractor_error")
    assert failure.message.startswith(f"{told} (")
    assert len(items(scratch)) == 3


@pytest.fixture
def with_loud(plain, scratch):
    """The corpus with a loud clip between the others, at which `loud_extractors` raise an
    exception."""
    corpus = plain.copy(scratch / "corpus")
    corpus.rows.insert(3, {"id": "loud", "path": "loud.wav"})
    soundfile.write(corpus.folder / "loud.wav", 0.95 * np.sign(speech(LOUD_SAMPLES / 16000)), 16000)
    return corpus


@pytest.mark.parametrize(
    ("extractor", "params", "where", "is_suspect"),
    [
        ("Frames", {}, "in refuse_loud", False),
        ("Frames", {}, "in refuse_loud", True),
        ("Rows", {}, "in refuse_loud", False),
        ("Rows", {}, "in refuse_loud", True),
        ("Rows", {"piece": 10}, "in refuse_loud", False),
        ("Rows", {"at": "pieces"}, "in pieces", False),
        ("Clips", {}, "in refuse_loud", False),
        ("Clips", {"at": "num_frames"}, "in num_frames", False),
    ],
)
def test_a_clip_at_which_an_extractor_raises_an_exception_fails(
    plain, with_loud, scratch, extractor, params, where, is_suspect
):
    config = load_config(write_config(scratch, extractor, module="loud_extractors", **params))
    both = [config, load_config("fbank80")]
    plan = plan_extraction(
        read_manifest(with_loud.manifest()), both, scratch / "c", Options("cpu", 2)
    )
    if is_suspect:
        suspects = Suspects(frozenset({"loud"}))
        plan = replace(
            plan, versions=[replace(version, suspects=suspects) for version in plan.versions]
        )
    summary = run_extraction(plan, run_locally)
    assert (summary.failed_by_reason, summary.too_many_failures) == ({"extractor_error": 1}, "")
    (failure,) = read_failures(select_version(scratch / "c", config.name))
    assert failure.id == "loud"
    assert re.fullmatch(
        rf"ValueError: too loud \(helpers/loud_extractors\.py:\d+, {where}\)", failure.message
    )
    featcache.extract(plain.manifest(), both, scratch / "without", Options("cpu", 1))
    assert items(scratch / "c", config.name) == items(scratch / "without", config.name)
    assert len(items(scratch / "c", "fbank80")) == len(with_loud.rows)
    again = featcache.extract(with_loud.manifest(), both, scratch / "c", Options("cpu", 2))
    assert again.failed_by_reason == {}


def test_many_exceptions_in_a_row_end_the_run_and_not_the_next_one(with_loud, scratch, monkeypatch):
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    loud = [{"id": f"loud-{number}", "path": f"loud-{number}.wav"} for number in range(30)]
    for row in loud:  # of one file, they would be one batch
        (with_loud.folder / row["path"]).symlink_to("loud.wav")
    manifest = with_loud.manifest([*with_loud.rows[:5], *loud, *with_loud.rows[5:]], "many.csv")
    config = write_config(scratch, "Clips", module="loud_extractors")
    first = featcache.extract(manifest, config, scratch / "c", Options("cpu", 1))
    assert (
        "clips: Clips raised exceptions at 20 utterances "
        "in a row, the last one loud-19" in first.too_many_failures
    )
    assert first.traceback.count("ValueError: too loud") == 1
    assert {*items(scratch / "c")} == {row["id"] for row in with_loud.rows[:5]} - {"loud"}
    assert 21 <= len(read_failures(only_version(scratch / "c"))) < 30
    second = featcache.extract(manifest, config, scratch / "c", Options("cpu", 1))
    assert (second.too_many_failures, second.failed) == ("", 31)
    assert len(items(scratch / "c")) == len(with_loud.rows) - 1


def test_an_extractor_that_always_raises_an_exception_ends_the_run_with_one_traceback(
    cli, plain, scratch
):
    made = cli(
        "extract", plain.manifest(), "-o", scratch / "c", "-c", write_config(scratch, "Broken")
    ).with_code(1)
    assert "featcache: broken: Broken raised exceptions at 12 utterances in a row" in made.err
    assert made.err.count("Traceback") == 1
    assert made.err.endswith("  RuntimeError: CUDA error: out of cheese\n")


def test_a_single_clip_tells_where_its_extractor_raised_an_exception(with_loud, scratch):
    live = featcache.extractor(config=write_config(scratch, "Frames", module="loud_extractors"))
    with pytest.raises(
        AudioError, match=r"ValueError: too loud \(helpers/loud_extractors"
    ) as raised:
        live.file(with_loud.folder / "loud.wav")
    assert "refuse_loud(block)" in raised.value.__notes__[0]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64"])
def test_features_are_not_stored_as_integers(plain, scratch, written, dtype):
    """A cast would leave noise: it is refused before anything is written. Only uint8
    quantises."""
    config = written(f"name: a\nextractor: fbank\nstore: {{dtype: {dtype}}}\n", "a.yaml")
    message = rf"store\.dtype: {dtype} cannot hold the features of fbank, .* or uint8, which quantises them"
    with pytest.raises(ConfigError, match=message):
        featcache.extract(plain.manifest(), config, scratch / "c")
    assert not (scratch / "c").exists()


# The ledger as a manifest


def test_the_ledger_is_a_manifest_of_what_failed(cli, plain, written, scratch):
    audio = plain.copy(scratch / "audio")
    bad = [
        {"id": "a,b", "path": "bad, too.wav", "start": 0.1, "duration": 0.2},
        {"id": "late", "path": "00.wav", "start": 9.0, "duration": 1.0},
        {"id": "gone", "path": str(scratch / "gone.wav"), "channel": 0},
    ]
    (audio.folder / "bad, too.wav").write_text("no audio")
    config = written(
        "name: fast\nextractor: fbank\naugment: {speed: [0.9, 1.0, 1.1]}\n", "fast.yaml"
    )
    command = ("extract", "-c", config, "-o", scratch / "c")
    assert cli(*command, audio.manifest([*audio.rows[:2], *bad], "all.csv")).code == 3
    ledger = cli("info", scratch / "c", "--failures", "--csv").with_code(0)
    assert f"some paths are relative, to {audio.folder}: " in ledger.err
    rows = {row["id"]: row for row in csv.DictReader(io.StringIO(ledger.out))}
    reasons = {"a,b": "not_audio", "late": "segment_outside", "gone": "file_missing"}
    assert {id_: row["reason"] for id_, row in rows.items()} == reasons
    assert all(row["message"] for row in rows.values())
    for row in bad:
        assert {name: rows[row["id"]][name] for name in row} == {
            name: str(value) for name, value in row.items()
        }
    shutil.copy(audio.folder / "00.wav", audio.folder / "bad, too.wav")
    (scratch / "failed.csv").write_text(ledger.out)
    again = cli(
        *command, scratch / "failed.csv", "--root", audio.folder, "--retry-failed", "--json"
    )
    assert (again.json()["versions"][0]["extracted"], again.json()["versions"][0]["failed"]) == (
        3,
        6,
    )


def test_failures_of_several_roots_have_theirs_in_a_column(cli, plain, scratch):
    """One --root would find other files, or none. A root of which nothing fails is not named."""
    command = ("extract", "-o", scratch / "c")
    roots = [scratch / name for name in ("one", "other", "sound")]
    for root, row in zip(roots, plain.rows, strict=False):
        corpus = plain.copy(root)
        bad = {"id": f"bad-{root.name}", "path": "bad.wav"}
        (root / "bad.wav").write_text("no audio")
        rows = [row, bad] if root != roots[2] else [row]
        cli(*command, corpus.manifest(rows, f"{root.name}.csv"))
    ledger = cli("info", scratch / "c", "--failures", "--csv").with_code(0)
    assert ledger.err.startswith(
        f"some paths are relative, to {roots[0]}, {roots[1]}: to extract these again, take the "
        "rows of one `root` at a time"
    )
    rows = csv.DictReader(io.StringIO(ledger.out))
    assert {row["id"]: row["root"] for row in rows} == {
        f"bad-{root.name}": str(root) for root in roots[:2]
    }
    shutil.copy(roots[1] / "00.wav", roots[1] / "bad.wav")
    (scratch / "failed.csv").write_text(ledger.out)
    where = f"root == {str(roots[1])!r}"
    cli("manifest", scratch / "failed.csv", "-o", scratch / "one.csv", "--where", where)
    one = (scratch / "one.csv", "--root", roots[1], "--retry-failed")
    cli(*command, *one).with_code(0)
    assert "bad-other" in featcache.open(scratch / "c")


def test_the_ledger_as_a_manifest_is_of_one_version_and_asked_for_alone(cli, plain, scratch):
    """The parts of a corpus may have the same ids."""
    for options in (["--csv"], ["--csv", "--failures", "--json"]):
        cli("info", scratch, *options).with_code(
            2, err="featcache: --csv needs --failures, and excludes --json\n"
        )
    parts = [plain.manifest(plain.rows[n : n + 1], f"{name}.csv") for n, name in enumerate("ab")]
    cli("extract", *parts, "-o", scratch / "c")
    said = cli.refused("info", scratch / "c", "--failures", "--csv")
    assert (
        said == f"featcache: {scratch}/c: is a corpus: --csv is about one version, as "
        f"{scratch}/c/a\n"
    )


# Faults of the config that show as a fault of every clip


def test_features_beyond_float16_end_the_run_early_and_the_remedy_is_named(
    plain, scratch, monkeypatch
):
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    config = write_config(scratch, "Overflowing", module="mistaken_extractors")
    half = load_config(config, {"store.dtype": "float16"})
    summary = featcache.extract(plain.manifest(), half, scratch / "c", Options("cpu", 1))
    assert 5 <= summary.failed < len(plain.rows)
    assert "overflowing: Overflowing gave no finite features for 5 utterances in a row" in (
        summary.too_many_failures
    )
    assert (
        "ends at 65,504: store.dtype: bfloat16 or float32 holds them" in summary.too_many_failures
    )
    whole = featcache.extract(plain.manifest(), config, scratch / "c", Options("cpu", 1))
    assert whole.versions[0].extracted == len(plain.rows)


def test_float16_that_overflows_later_many_times_in_a_row_ends_the_run(
    with_loud, scratch, monkeypatch
):
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    loud = [{"id": f"loud-{number}", "path": f"loud-{number}.wav"} for number in range(30)]
    for row in loud:
        (with_loud.folder / row["path"]).symlink_to("loud.wav")
    manifest = with_loud.manifest([*with_loud.rows[:3], *loud, *with_loud.rows[4:]], "many.csv")
    config = write_config(scratch, "OverflowingWhenLoud", module="mistaken_extractors")
    half = load_config(config, {"store.dtype": "float16"})
    summary = featcache.extract(manifest, half, scratch / "c", Options("cpu", 1))
    assert "gave no finite features for 20 utterances in a row" in summary.too_many_failures
    assert "bfloat16 or float32 holds them" in summary.too_many_failures
    assert summary.versions[0].extracted == 3
    assert summary.failed < 30


def test_features_that_no_dtype_holds_are_not_said_to_fit_float32(plain, scratch):
    config = write_config(scratch, "NotANumber", module="mistaken_extractors")
    half = load_config(config, {"store.dtype": "float16"})
    summary = featcache.extract(plain.manifest(), half, scratch / "c", Options("cpu", 1))
    assert "features are NaN or infinite as float16;" in summary.too_many_failures


def test_a_config_that_refuses_all_of_the_first_utterances_ends_the_run(
    plain, scratch, monkeypatch
):
    monkeypatch.setattr("featcache.extraction.jobs._REFUSED_FIRST", 6)
    monkeypatch.setitem(BATCH_SECONDS, "cpu", 0.01)
    config = load_config("fbank80", {"audio.max_seconds": 0.1})
    manifest = plain.manifest([{**row, "duration": None} for row in plain.rows], "unknown.csv")
    job = manifest, config, scratch / "c"
    first = featcache.extract(*job, Options("cpu", 1))
    assert "fbank80: all of the first 6 utterances failed: too_long" in first.too_many_failures
    assert "--max-failures 100%" in first.too_many_failures
    assert first.failed == 6
    told = featcache.extract(*job, Options("cpu", 1, max_failures="100%"))
    assert (told.too_many_failures, told.failed) == ("", len(plain.rows))


def test_a_version_that_holds_something_may_get_many_refused_utterances(
    plain, scratch, monkeypatch
):
    monkeypatch.setattr("featcache.extraction.jobs._REFUSED_FIRST", 6)
    config = load_config("fbank80", {"audio.max_seconds": 0.41})
    manifest = plain.manifest(plain.rows[:1], "first.csv")
    featcache.extract(manifest, config, scratch / "c", Options("cpu", 1))
    summary = featcache.extract(plain.manifest(), config, scratch / "c", Options("cpu", 1))
    assert (summary.too_many_failures, summary.failed) == ("", len(plain.rows) - 1)
