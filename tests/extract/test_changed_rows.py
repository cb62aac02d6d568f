"""Features belong to their row: the same id with another path, start, duration, channel or file is another utterance.

What was extracted for it is never handed out, or counted, as if it were this one; and if this one cannot be extracted,
that stays visible until it can.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest
import soundfile
from conftest import Corpus, check, items, only_version, speech
from extracting import extract_here, extracted
from make_cache import codes_cache, make_features, make_version
from manifests import manifest_of

import featcache
from featcache.config import load_config
from featcache.engines.local import run_locally
from featcache.errors import ArgumentError, FeatcacheWarning, ManifestError, Reason
from featcache.extract.extraction import Options, plan_extraction, run_extraction
from featcache.extract.from_version import StoredUtterance, open_source
from featcache.manifest import Utterance, read_manifest
from featcache.stats import moments, usage
from featcache.store.index import open_index
from featcache.store.runs import standing_failures


@pytest.fixture
def corpus(scratch) -> Corpus:
    """Clips a, b and d of one length at 16 kHz; junk.wav, which is none; and utterances u1 = a and u2 = b, 40 of d."""
    made = Corpus(scratch / "corpus")
    made.folder.mkdir()
    for seed, name in enumerate("abd"):
        soundfile.write(made.folder / f"{name}.wav", speech(0.4, seed=seed), 16000)
    (made.folder / "junk.wav").write_bytes(b"RIFF, in name only")
    made.add("u1", "a.wav")
    made.add("u2", "b.wav")
    for number in range(40):
        made.add(f"d{number}", "d.wav")
    return made


def with_row(corpus: Corpus, id_: str, name: str = "changed.csv", **columns):
    """The manifest with one row changed."""
    rows = [{**row, **columns} if row["id"] == id_ else row for row in corpus.rows]
    return corpus.manifest(rows, name)


def dataset_of(cache, manifest, **options):
    return featcache.FeatureDataset(featcache.open(cache), manifest, **options)


def refusal(cache, manifest, **options) -> str:
    with pytest.raises(ManifestError) as caught:
        dataset_of(cache, manifest, **options)
    return str(caught.value)


def is_quiet(cli, cache, manifest) -> bool:
    """Whether nothing is wrong with a manifest and its version, by all that look."""
    again = cli("extract", manifest, "-o", cache, "--check-sources")
    verified = cli("verify", cache, "--manifest", manifest)
    dataset_of(cache, manifest)
    return (again.code, again.err, verified.code, verified.err) == (0, "", 0, "")


# The dataset


def test_a_row_of_another_file_under_the_same_id_is_refused(cli, corpus, scratch):
    """Two manifests with an id in common, extracted one after the other: the first no longer has its features."""
    cache, train = scratch / "c", corpus.manifest(name="train.csv")
    assert cli("extract", train, "-o", cache).code == 0
    dev = corpus.manifest([{"id": "u1", "path": "b.wav"}, {"id": "v1", "path": "b.wav"}], "dev.csv")
    made = cli("extract", dev, "-o", cache)
    assert (made.code, "1 utterance is extracted again: u1: path a.wav → b.wav\n" in made.err) == (0, True)
    assert len(dataset_of(cache, dev)) == 2
    for options in ({}, {"skip_missing": True}, {"columns": []}, {"on_changed": "error"}):
        told = refusal(cache, train, **options)
        assert told.startswith(f"{train}: for 1 of 42 utterances, {only_version(cache).path} has features of another ")
        assert ": u1; u1: path b.wav → a.wav. `featcache extract " in told
        assert "or give the manifest that they were extracted from" in told
        assert 'on_changed="use"' in told
    with pytest.warns(FeatcacheWarning, match=r"u1: path b.wav → a.wav") as warned:
        dataset = dataset_of(cache, train, on_changed="warn")
    assert warned[0].filename == __file__
    used = dataset_of(cache, train, on_changed="use")
    for one in (dataset, used):
        assert one[0]["features"].equal(dataset_of(cache, dev)[0]["features"])
    assert cli("extract", train, "-o", cache).code == 0
    assert len(dataset_of(cache, train)) == 42
    with pytest.raises(ArgumentError, match="on_changed is 'ignore': choose 'error', 'warn', 'use'"):
        dataset_of(cache, train, on_changed="ignore")


@pytest.mark.parametrize(
    ("column", "was", "now", "told"),
    [
        ("duration", 0.3, 0.2, "duration 0.3 → 0.2"),
        ("duration", "", 0.2, "duration (none) → 0.2"),
        ("start", 0.1, "", "start 0.1 → (none)"),
        ("channel", 0, "", "channel 0 → (none)"),
    ],
)
def test_a_row_that_was_edited_is_refused_until_it_is_extracted_again(cli, corpus, scratch, column, was, now, told):
    cache = scratch / "c"
    assert cli("extract", with_row(corpus, "u1", **{column: was}), "-o", cache).code == 0
    edited = with_row(corpus, "u1", **{column: now})
    assert f"; u1: {told}. `featcache" in refusal(cache, edited)
    made = cli("extract", edited, "-o", cache)
    assert (made.code, f": u1: {told}\n" in made.err) == (0, True)
    assert is_quiet(cli, cache, edited)


def test_of_rows_without_a_path_the_id_alone_counts(cli, corpus, scratch):
    """As of all in a manifest without paths; others beside them are compared."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    rows = [{"id": "u1"}, {"id": "u2", "start": 0.2}, {"id": "d1", "path": "d.wav"}]
    assert len(dataset_of(cache, corpus.manifest(rows, "some.csv"))) == 3
    assert len(dataset_of(cache, manifest_of(scratch, [("u1", "x"), ("u2", "y")]))) == 2
    assert "for 1 of 3 utterances" in refusal(
        cache, corpus.manifest([*rows[:2], {"id": "d1", "path": "a.wav"}], "x.csv")
    )


def test_at_most_ten_rows_are_named_and_all_are_counted(tmp_path):
    """In every version; rows that are missing from the cache are another matter, and none of these."""
    features = make_features(30)
    for name in ("one", "other"):
        rows = {id_: {"path": "x.wav" if name == "other" and id_ < "utt-3" else "a.wav"} for id_ in features}
        make_version(tmp_path / "c", features, name=name, rows=rows)
    versions = {name: featcache.open(tmp_path / "c", name) for name in ("one", "other")}
    manifest = manifest_of(tmp_path, [(id_, "a.wav") for id_ in [*features, "more"]], ("id", "path"))
    assert len(featcache.FeatureDataset(versions["one"], manifest, skip_missing=True)) == 30
    with pytest.raises(
        ManifestError, match=r"for 23 of 31 utterances, .*other-.*: utt-0, .* … and 13 more; utt-0: path"
    ):
        featcache.FeatureDataset(versions, manifest, skip_missing=True)
    dataset = featcache.FeatureDataset(versions, manifest, where={"id": ["utt-3", "utt-4"]}, on_changed="error")
    assert len(dataset) == 2


def test_of_no_rows_none_has_changed(tmp_path):
    make_version(tmp_path / "c", make_features(3))
    none = read_manifest(manifest_of(tmp_path, [("utt-0", "a.wav")], ("id", "path"))).take(np.empty(0, np.int64))
    assert len(dataset_of(tmp_path / "c", none)) == 0


def test_copies_have_the_row_of_their_utterance(tmp_path):
    """At other speeds, they are cut from the same place of the same file."""
    features = {f"{id_}{suffix}": make_features(1)["utt-0"] for id_ in "ab" for suffix in ("", "_sp0.9")}
    rows = {id_: {"path": f"{id_[0]}.wav"} for id_ in features}
    version = make_version(tmp_path / "c", features, augment={"speed": [1.0, 0.9]}, rows=rows)
    right = manifest_of(tmp_path, [("a", "a.wav"), ("b", "b.wav")], ("id", "path"))
    assert len(featcache.FeatureDataset(featcache.open(version.path), right)) == 4
    wrong = manifest_of(tmp_path, [("a", "a.wav"), ("b", "c.wav")], ("id", "path"), "wrong.csv")
    with pytest.raises(ManifestError, match=r"2 of 4 utterances, .*: b, b_sp0.9; b: path b.wav → c.wav"):
        featcache.FeatureDataset(featcache.open(version.path), wrong)


# Statistics


def test_statistics_give_no_speakers_label_to_another_row(tmp_path):
    features = make_features(6)
    make_version(tmp_path / "c", features, rows={"utt-0": {"path": "x.wav"}})
    cache = featcache.open(tmp_path / "c")
    rows = [(id_, f"audio/{id_}.wav", "anna") for id_ in features]
    manifest = manifest_of(tmp_path, rows, ("id", "path", "speaker"))
    told = r"for 1 of 6 utterances, .*: utt-0; utt-0: path x.wav → audio/utt-0.wav.* or a manifest without paths"
    with pytest.raises(ManifestError, match=told):
        moments(cache, manifest, by="speaker")
    assert moments(cache, manifest_of(tmp_path, rows[1:], ("id", "path", "speaker")), by="speaker").utterances == 5
    assert moments(cache, manifest_of(tmp_path, [(row[0], row[2]) for row in rows]), by="speaker").utterances == 6
    codes = codes_cache(tmp_path / "codes")
    with pytest.raises(ManifestError, match="for 1 of 1 utterances"):
        usage(codes, manifest_of(tmp_path, [("utt-1", "y.wav")], ("id", "path")))


# Extraction


def test_it_says_which_utterances_are_extracted_again_and_what_was_different(cli, corpus, scratch):
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    rows = [dict(row) for row in corpus.rows]
    rows[0]["path"] = "d.wav"
    for row in rows[1:8]:
        row |= {"start": 0.1, "duration": 0.2}
    (line,) = cli("extract", corpus.manifest(rows, "edited.csv"), "-o", cache, "--dry-run").err.splitlines()
    assert (
        "8 utterances are extracted again: u1: path a.wav → d.wav; u2: start (none) → 0.1, duration (none) → " in line
    )
    assert line.endswith(" … and 3 more")
    os.utime(corpus.folder / "a.wav", ns=(1, 1))
    shutil.copy2(corpus.folder / "junk.wav", corpus.folder / "b.wav")
    (line,) = cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--dry-run").err.splitlines()
    assert line.endswith(": u1: its file's mtime; u2: its file's size and mtime")


def test_replacing_many_utterances_by_other_files_takes_a_word(cli, corpus, scratch):
    """More than one, and more than a few per cent; by other files, not by other parts of them."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    before = sorted(cache.rglob("*"))
    dev = corpus.manifest([{**row, "path": "b.wav"} for row in corpus.rows[2:5]], "dev.csv")
    for options in ((), ("--dry-run",)):
        refused = cli("extract", dev, "-o", cache, *options)
        assert (refused.code, refused.out) == (2, "")
        (line,) = refused.err.splitlines()
        assert f"{dev}: names other files for 3 of the 42 utterances in {only_version(cache).path}" in line
        assert "for example d0: path d.wav → b.wav" in line
        assert "another corpus with the same ids" in line
        assert "own cache with -o" in line
        assert "--replace" in line
    assert sorted(cache.rglob("*")) == before
    fewer = corpus.manifest([{**row, "path": "b.wav"} for row in corpus.rows[2:4]], "fewer.csv")
    assert cli("extract", fewer, "-o", cache, "--dry-run").code == 0
    parts = corpus.manifest([{**row, "duration": 0.2} for row in corpus.rows], "parts.csv")
    assert cli("extract", parts, "-o", cache, "--dry-run").code == 0
    for name in "abd":
        os.utime(corpus.folder / f"{name}.wav", ns=(1, 1))
    assert cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--dry-run").code == 0
    made = cli("extract", dev, "-o", cache, "--replace", "--json")
    assert (made.code, extracted(made)) == (0, 3)
    assert is_quiet(cli, cache, dev)


def test_an_utterance_counts_once_however_many_copies_there_are_of_it(corpus, scratch):
    """A single one may get another file without a word, with its copies."""
    config = scratch / "fast.yaml"
    config.write_text("name: fast\nextractor: fbank\naugment: {speed: [0.9, 1.0, 1.1]}\n")
    rows, options = corpus.rows[:6], Options("cpu", 1)

    def extraction(some, options=options):
        manifest = read_manifest(corpus.manifest(some, "some.csv"))
        return plan_extraction(manifest, [load_config(config)], scratch / "c", options)

    run_extraction(extraction(rows), run_locally)
    one, two = ([*({**row, "path": "b.wav"} for row in rows[2 : 2 + n]), *rows[:2]] for n in (1, 2))
    assert extraction(one).num_missing == 3
    with pytest.raises(ManifestError, match="names other files for 2 of the 6 utterances"):
        extraction(two)
    assert extraction(two, Options("cpu", 1, replace=True)).num_missing == 6


# Failures of what is to replace an item


def test_a_changed_row_that_fails_stays_visible_and_is_served_by_nobody(cli, corpus, scratch):
    """u1 = a.wav, then u1 = junk.wav: until the row or the file is mended."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    before = items(cache)
    junk = with_row(corpus, "u1", path="junk.wav")
    for _ in range(2):
        made = cli("extract", junk, "-o", cache)
        assert made.code == 3
        assert "0 extracted, 41 already there, 1 failed" in made.out
        assert_told(cli, cache, "u1", "junk.wav")
        verified = cli("verify", cache, "--manifest", junk)
        assert verified.code == 1
        assert "  u1: what is there of it is older: extracting junk.wav failed: not_audio: " in verified.out
        assert "1 utterance is in the failure ledger: featcache info " in verified.out
        told = refusal(cache, junk)
        assert "; u1: path a.wav → junk.wav, and extracting that failed: not_audio: " in told
        assert "extracts them again once what failed is mended; or give" in told
    assert "1 failed before and was not tried again (--retry-failed does): not_audio 1" in made.out
    assert items(cache) == before
    retried = cli("extract", junk, "-o", cache, "--retry-failed")
    assert (retried.code, "failures: not_audio 1" in retried.out) == (3, True)

    # The row is what it was: so is the item. `info`, which knows no manifest, tells of what was tried last.
    assert is_quiet(cli, cache, corpus.manifest())
    assert_told(cli, cache, "u1", "junk.wav")
    assert cli("extract", junk, "-o", cache).code == 3

    shutil.copy(corpus.folder / "b.wav", corpus.folder / "junk.wav")
    mended = cli("extract", junk, "-o", cache, "--json")
    assert (mended.code, extracted(mended)) == (0, 1)
    assert is_quiet(cli, cache, junk)
    assert failures_in(cli, cache) == []
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"u1"}
    assert after["u1"] == after["u2"]


def test_a_changed_file_that_fails_stays_visible_and_is_served_by_nobody(cli, corpus, scratch):
    """Another file in place of a.wav, which is junk, with `--check-sources`."""
    cache, manifest = scratch / "c", corpus.manifest()
    assert cli("extract", manifest, "-o", cache).code == 0
    before = items(cache)
    was = (corpus.folder / "a.wav").read_bytes(), (corpus.folder / "a.wav").stat().st_mtime_ns
    shutil.copy(corpus.folder / "junk.wav", corpus.folder / "a.wav")
    for options in (["--check-sources"], [], ["--check-sources"], ["--retry-failed"]):
        made = cli("extract", manifest, "-o", cache, *options)
        assert (made.code, "41 already there, 1 failed" in made.out) == (3, True)
        assert_told(cli, cache, "u1", "a.wav")
    verified = cli("verify", cache, "--manifest", manifest)
    assert verified.code == 1
    assert "  u1: what is there of it is older: extracting a.wav failed: not_audio: " in verified.out
    assert "; u1: its file has changed since, and extracting the new one failed: not_audio: " in refusal(
        cache, manifest
    )
    with pytest.raises(ManifestError, match="its file has changed since"):
        moments(featcache.open(cache), manifest)
    planned = cli("extract", manifest, "-o", cache, "--dry-run").out
    assert "0 of 42 utterances to extract; 41 are there, 1 have failed before" in planned
    assert items(cache) == before

    (corpus.folder / "a.wav").write_bytes(was[0])
    os.utime(corpus.folder / "a.wav", ns=(was[1], was[1]))  # as if nothing had ever happened
    mended = cli("extract", manifest, "-o", cache, "--json")
    assert (mended.code, extracted(mended)) == (0, 1)
    assert is_quiet(cli, cache, manifest)
    assert failures_in(cli, cache) == []
    assert items(cache) == before


def test_a_failure_outlives_the_repair_of_the_item_that_it_left(cli, corpus, scratch):
    """The item is in another shard then, and is as old as it was; one that is extracted again is not."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    junk = with_row(corpus, "u1", path="junk.wav")
    assert cli("extract", junk, "-o", cache).code == 3
    version = only_version(cache)
    (name,) = version.shard_names()
    shard = version.shard(name)
    chunk = shard.folder / "features" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[int(shard.offsets[5]) * 160] ^= 1  # of the sixth item
    chunk.write_bytes(data)
    assert cli("repair", version.path, "--manifest", corpus.manifest()).code == 0
    assert name not in version.shard_names()
    assert_told(cli, cache, "u1", "junk.wav")
    assert "u1: path a.wav → junk.wav, and extracting that failed" in refusal(cache, junk)


def test_a_failure_that_something_newer_has_made_up_for_is_over(cli, corpus, scratch):
    """Also one of another row than that: and if the row comes back, it is tried, and fails, again."""
    cache = scratch / "c"
    junk = with_row(corpus, "u1", path="junk.wav")
    for manifest, code in ((corpus.manifest(), 0), (junk, 3), (with_row(corpus, "u1", "b.csv", path="b.wav"), 0)):
        assert cli("extract", manifest, "-o", cache).code == code
    assert failures_in(cli, cache) == []
    assert "u1: path b.wav → junk.wav. `featcache extract" in refusal(cache, junk)
    again = cli("extract", junk, "-o", cache)
    assert (again.code, "failures: not_audio 1" in again.out) == (3, True)
    assert_told(cli, cache, "u1", "junk.wav")


def test_units_are_not_made_of_an_older_file(cli, corpus, scratch):
    """From a version's features: an item whose file has changed and failed since is not in the source."""
    cache, manifest = scratch / "c", corpus.manifest()
    assert cli("extract", manifest, "-o", cache).code == 0
    shutil.copy(corpus.folder / "junk.wav", corpus.folder / "a.wav")
    assert cli("extract", manifest, "-o", cache, "--check-sources").code == 3
    version = only_version(cache)
    rows = [Utterance("u1", "a.wav", None, None, None), Utterance("u2", "b.wav", None, None, None)]
    older, there = open_source(version.path, version.info.fingerprint).read(rows)
    assert isinstance(there, StoredUtterance)
    assert older.reason == Reason.NOT_IN_SOURCE
    assert "of another row or file: its file has changed since, and extracting the new one failed: not" in str(older)


def test_where_nothing_was_replaced_the_ledger_is_what_it_was(cli, corpus, scratch):
    """Readers of before know the records; and records of before, which say nothing of an item, are read."""
    cache = scratch / "c"
    assert cli("extract", with_row(corpus, "u1", path="junk.wav"), "-o", cache).code == 3
    (ledger,) = cache.glob("*/runs/*/failures.jsonl")
    assert "replaces" not in ledger.read_text()
    version = only_version(cache)
    (failure,) = standing_failures(version, open_index(version)).values()
    assert (failure.id, failure.replaces) == ("u1", None)
    ledger.write_text(ledger.read_text() + ledger.read_text().replace('"u1"', '"u2"'))  # which is there
    assert list(standing_failures(version, open_index(version))) == ["u1"]


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_edited_each_row_has_its_own_features_or_is_told(corpus, scratch, seed):
    """Rows and files change at random, good and bad, and are extracted with and without a look at the files.

    After each run, a row is counted as present if and only if what is stored for it is what extracting it alone gives;
    the dataset serves those rows, and no others; and all others are failures that stand.
    """
    random = np.random.default_rng(seed)
    config, cache, truth = load_config("fbank80"), scratch / "c", {}
    good = {name: (corpus.folder / f"{name}.wav").read_bytes() for name in "abd"}
    files = ["x.wav", "y.wav", "z.wav"]
    rows = [{"id": f"u{n}", "path": files[n % 3]} for n in range(5)]
    content = dict.fromkeys(files, "a")
    clock = 10**18
    for file in files:
        (corpus.folder / file).write_bytes(good["a"])
    for step in range(8):
        for _ in range(step and int(random.integers(1, 4))):
            if random.random() < 0.5:
                row = rows[random.integers(len(rows))]
                row["path"], row["duration"] = files[random.integers(3)], random.choice(["", 0.1, 0.2, 9.0])
            else:
                file, which = files[random.integers(3)], random.choice([*"abd", "junk"])
                content[file] = which
                (corpus.folder / file).write_bytes(good.get(which, b"junk"))
                clock += 10**9
                os.utime(corpus.folder / file, ns=(clock, clock))
        path = corpus.manifest(rows, "random.csv")
        manifest = read_manifest(path)
        options = Options("cpu", 1, check_sources=True, replace=True, retry_failed=bool(random.random() < 0.3))
        summary = extract_here(manifest, [config], cache, options)
        expected = {}
        for row in rows:
            key = content[row["path"]], row.get("duration", "")
            if key not in truth:
                truth[key] = alone(corpus, config, key, scratch / f"alone-{seed}-{len(truth)}")
            expected[row["id"]] = truth[key]
        bad = {id_ for id_, features in expected.items() if features is None}
        assert summary.failed == len(bad), step
        version = only_version(cache)
        assert set(standing_failures(version, open_index(version))) >= bad
        again = plan_extraction(manifest, [config], cache, Options("cpu", 1, check_sources=True))
        assert (again.num_missing, int(again.versions[0].rows.failed.sum())) == (0, len(bad))
        served = items(cache)
        assert all(served[id_] == features for id_, features in expected.items() if features is not None)
        report = check(cache, manifest=manifest)
        assert report.failed == len(bad)
        assert {problem.id for problem in report.problems} == bad & set(served)
        opened = featcache.open(cache)
        if stale := bad & set(opened.ids):
            with pytest.raises(ManifestError, match=f"for {len(stale)} of 5 utterances"):
                featcache.FeatureDataset(opened, path, skip_missing=True)
        elif bad != set(expected):
            with warnings.catch_warnings(action="error"):
                dataset = featcache.FeatureDataset(opened, path, skip_missing=True)
            assert set(dataset.ids) == set(expected) - bad


def alone(corpus, config, key, cache):
    """What a row of some content and duration gives, extracted alone; None where it fails."""
    which, duration = key
    rows = [{"id": "alone", "path": f"{which}.wav", "duration": duration}]
    manifest = read_manifest(corpus.manifest(rows, "alone.csv"))
    extract_here(manifest, [config], cache, Options("cpu", 1))
    return items(cache).get("alone")


def failures_in(cli, cache):
    (version,) = cli("info", cache, "--json").json()["versions"]
    return version["failures"]


def assert_told(cli, cache, id_, path):
    """The one failure is in the ledger that every hint names, with all that is known of it."""
    (failure,) = failures_in(cli, cache)
    assert (failure["id"], failure["path"], failure["reason"]) == (id_, path, "not_audio")
    told = cli("info", cache, "--failures").out
    assert " 1 failed\n" in told
    (line,) = [line for line in told.splitlines() if line.startswith(f"  {id_}\t")]
    assert line.endswith("; an older item of this id is there, and stays")
    plain = cli("verify", cache)
    assert plain.code == 3
    assert "1 utterance is in the failure ledger" in plain.out
    assert Counter(plain.out.split())["damage"] == 1


# The same ids and paths under another root


def another_corpus(corpus: Corpus, folder) -> Corpus:
    """With files of the same names and sizes as in a corpus, and other speech."""
    other = corpus.copy(folder)
    for seed, name in enumerate("abd"):
        soundfile.write(folder / f"{name}.wav", speech(0.4, seed=10 + seed), 16000)
        os.utime(folder / f"{name}.wav", (10**9, 10**9))
    return other


def test_another_corpus_of_equal_paths_and_sizes_is_refused(cli, corpus, scratch):
    """By its bytes: paths that are relative to another folder say nothing, nor does the length of one-second clips."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    other = another_corpus(corpus, scratch / "other").manifest()
    refused = cli("extract", other, "-o", cache)
    assert refused.code == 2
    assert "of 42 files checked are not what" in refused.err
    assert "is not the file that was extracted" in refusal(cache, other)
    with pytest.raises(ManifestError, match="is not the file that was extracted"):
        moments(featcache.open(cache), other)
    assert len(dataset_of(cache, other, on_changed="use")) == len(corpus.rows)


def test_a_corpus_that_was_copied_or_moved_is_the_same(cli, corpus, scratch):
    """Other times, equal bytes; or no longer there at all; or no audio beside the manifest, as in training."""
    cache = scratch / "c"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    copied = corpus.copy(scratch / "copied")
    for path in copied.folder.glob("*.wav"):
        os.utime(path, (10**9, 10**9))
    assert "nothing to do" in cli("extract", copied.manifest(), "-o", cache).out
    assert len(dataset_of(cache, copied.manifest())) == len(corpus.rows)
    shutil.rmtree(corpus.folder)
    assert "nothing to do" in cli("extract", copied.manifest(), "-o", cache).out
    for path in copied.folder.glob("*.wav"):
        path.unlink()
    assert len(dataset_of(cache, copied.manifest())) == len(corpus.rows)
