"""Rows that name other audio than what was extracted for their ids, and files that are
others now.

They are extracted again, or refused where they are many. If that fails, it stays visible
until it succeeds, and nobody is given the older item as if it were this row's."""

import os
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cache_contents import check, items, only_version
from changed_rows import dataset_of, is_quiet, make_corpus, refusal, with_row
from corpora import Corpus, speech
from damage import flip
from extractions import extracted, failures_of

import featcache
from featcache.errors import ManifestError, Reason
from featcache.extraction.from_version import StoredUtterance, open_source
from featcache.manifest.read import read_manifest
from featcache.manifest.segments import Utterance
from featcache.stats import moments
from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures


@pytest.fixture
def corpus(scratch) -> Corpus:
    return make_corpus(scratch / "corpus")


@pytest.fixture
def cache(cli, corpus, scratch) -> Path:
    """A cache of the corpus, as it is before anything changes."""
    assert cli("extract", corpus.manifest(), "-o", scratch / "c").code == 0
    return scratch / "c"


def test_it_says_which_utterances_are_extracted_again_and_what_was_different(cli, corpus, cache):
    rows = [dict(row) for row in corpus.rows]
    rows[0]["path"] = "d.wav"
    for row in rows[1:8]:
        row |= {"start": 0.1, "duration": 0.2}
    (line,) = cli(
        "extract", corpus.manifest(rows, "edited.csv"), "-o", cache, "--dry-run"
    ).err.splitlines()
    told = (
        "8 utterances are extracted again: u1: path a.wav → d.wav; u2: start (none) → 0.1, "
        "duration (none) → "
    )
    assert told in line
    assert line.endswith(" … and 3 more")
    os.utime(corpus.folder / "a.wav", ns=(1, 1))
    shutil.copy2(corpus.folder / "junk.wav", corpus.folder / "b.wav")
    (line,) = cli(
        "extract", corpus.manifest(), "-o", cache, "--check-sources", "--dry-run"
    ).err.splitlines()
    assert line.endswith(": u1: its file's mtime; u2: its file's size and mtime")


def test_replacing_many_utterances_by_other_files_takes_a_word(cli, corpus, cache):
    """More than one, and more than a few per cent; by other files, not by other parts of
    them."""
    before = sorted(cache.rglob("*"))
    dev = corpus.manifest([{**row, "path": "b.wav"} for row in corpus.rows[2:5]], "dev.csv")
    for options in ((), ("--dry-run",)):
        (line,) = cli.refused("extract", dev, "-o", cache, *options).splitlines()
        assert (
            f"{dev}: names other files for 3 of the 42 utterances in "
            f"{only_version(cache).path}" in line
        )
        words = (
            "d0: path d.wav → b.wav",
            "another corpus with the same ids",
            "own cache with -o",
            "--replace",
        )
        assert all(word in line for word in words)
    assert sorted(cache.rglob("*")) == before
    fewer = corpus.manifest([{**row, "path": "b.wav"} for row in corpus.rows[2:4]], "fewer.csv")
    assert cli("extract", fewer, "-o", cache, "--dry-run").code == 0
    parts = corpus.manifest([{**row, "duration": 0.2} for row in corpus.rows], "parts.csv")
    assert cli("extract", parts, "-o", cache, "--dry-run").code == 0
    for name in "abd":
        os.utime(corpus.folder / f"{name}.wav", ns=(1, 1))
    assert cli("extract", corpus.manifest(), "-o", cache, "--check-sources", "--dry-run").code == 0
    assert extracted(cli("extract", dev, "-o", cache, "--replace", "--json").with_code(0)) == 3
    assert is_quiet(cli, cache, dev)


def test_an_utterance_counts_once_however_many_copies_there_are_of_it(corpus, scratch, written):
    """A single one may get another file without a word, with its copies."""
    config = written(
        "name: fast\nextractor: fbank\naugment: {speed: [0.9, 1.0, 1.1]}\n", "fast.yaml"
    )
    rows = corpus.rows[:6]

    def missing(some, **options):
        planned = featcache.Options("cpu", 1, dry_run=True, **options)
        return (
            featcache.extract(corpus.manifest(some, "some.csv"), config, scratch / "c", planned)
            .versions[0]
            .missing
        )

    featcache.extract(corpus.manifest(rows, "some.csv"), config, scratch / "c")
    one, two = ([*({**row, "path": "b.wav"} for row in rows[2 : 2 + n]), *rows[:2]] for n in (1, 2))
    assert missing(one) == 3
    with pytest.raises(ManifestError, match="names other files for 2 of the 6 utterances"):
        missing(two)
    assert missing(two, replace=True) == 6


# The same ids and paths under another root


@pytest.mark.parametrize(("names", "seconds", "count"), [("abd", 0.4, 42), ("a", 0.7, 1)])
def test_another_corpus_with_the_same_ids_and_paths_is_refused(
    cli, corpus, cache, scratch, names, seconds, count
):
    """By its bytes: paths that are relative to another folder say nothing, nor does the
    length of one-second clips."""
    other = corpus.copy(scratch / "other").manifest()
    for seed, name in enumerate(names):
        path = other.with_name(f"{name}.wav")
        soundfile.write(path, speech(seconds, seed=10 + seed), 16000)
        os.utime(path, (10**9, 10**9))
    (line,) = cli("extract", other, "-o", cache).with_code(2).err.splitlines()
    assert all(
        word in line for word in (" of 42 files checked are not what", "a.wav", "another corpus")
    )
    assert "is not the file that was extracted" in refusal(cache, other)
    with pytest.raises(ManifestError, match="is not the file that was extracted"):
        moments(featcache.open(cache), other)
    assert len(dataset_of(cache, other, on_changed="use")) == len(corpus.rows)
    assert (
        extracted(cli("extract", other, "-o", cache, "--check-sources", "--json").with_code(0))
        == count
    )


def test_a_corpus_that_was_copied_or_moved_is_the_same(cli, corpus, cache, scratch):
    """Other times, equal bytes; or no longer there at all; or no audio beside the
    manifest, as in training."""
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


# What is extracted again, and fails


def test_a_changed_row_that_fails_stays_visible_and_is_served_by_nobody(cli, corpus, cache):
    before = items(cache)
    junk = with_row(corpus, "u1", path="junk.wav")
    for _ in range(2):
        made = cli("extract", junk, "-o", cache).with_code(3)
        assert "0 extracted, 41 already there, 1 failed" in made.out
        assert_told(cli, cache, "u1", "junk.wav")
        verified = cli("verify", cache, "--manifest", junk).with_code(1)
        assert (
            "  u1: what is there is older: extracting junk.wav failed: not_audio: " in verified.out
        )
        assert "1 utterance is in the failure ledger: featcache info " in verified.out
        told = refusal(cache, junk)
        assert "; u1: path a.wav → junk.wav, and extracting that failed: not_audio: " in told
        assert "extracts them again once what failed is mended; or give" in told
    assert "1 failed before and was not tried again (--retry-failed does): not_audio 1" in made.out
    assert items(cache) == before
    assert (
        "failures: not_audio 1"
        in cli("extract", junk, "-o", cache, "--retry-failed").with_code(3).out
    )

    # The row is what it was: so is the item. `info`, which knows no manifest, tells of
    # what was tried last.
    assert is_quiet(cli, cache, corpus.manifest())
    assert_told(cli, cache, "u1", "junk.wav")
    assert cli("extract", junk, "-o", cache).code == 3

    shutil.copy(corpus.folder / "b.wav", corpus.folder / "junk.wav")
    assert extracted(cli("extract", junk, "-o", cache, "--json").with_code(0)) == 1
    assert is_quiet(cli, cache, junk)
    assert failures_of(cli, cache) == []
    after = items(cache)
    assert {name for name in after if after[name] != before[name]} == {"u1"}
    assert after["u1"] == after["u2"]


def test_a_changed_file_that_fails_stays_visible_and_is_served_by_nobody(cli, corpus, cache):
    manifest = corpus.manifest()
    before = items(cache)
    was = (corpus.folder / "a.wav").read_bytes(), (corpus.folder / "a.wav").stat().st_mtime_ns
    shutil.copy(corpus.folder / "junk.wav", corpus.folder / "a.wav")
    for options in (["--check-sources"], [], ["--check-sources"], ["--retry-failed"]):
        assert (
            "41 already there, 1 failed"
            in cli("extract", manifest, "-o", cache, *options).with_code(3).out
        )
        assert_told(cli, cache, "u1", "a.wav")
    verified = cli("verify", cache, "--manifest", manifest).with_code(1)
    assert "  u1: what is there is older: extracting a.wav failed: not_audio: " in verified.out
    told = refusal(cache, manifest)
    assert (
        "; u1: its file has changed since, and extracting the new one failed: not_audio: " in told
    )
    with pytest.raises(ManifestError, match="its file has changed since"):
        moments(featcache.open(cache), manifest)
    planned = cli("extract", manifest, "-o", cache, "--dry-run").out
    assert "0 of 42 utterances to extract; 41 are there, 1 have failed before" in planned
    assert items(cache) == before

    (corpus.folder / "a.wav").write_bytes(was[0])
    os.utime(corpus.folder / "a.wav", ns=(was[1], was[1]))  # as if nothing had ever happened
    assert extracted(cli("extract", manifest, "-o", cache, "--json").with_code(0)) == 1
    assert is_quiet(cli, cache, manifest)
    assert failures_of(cli, cache) == []
    assert items(cache) == before


def test_a_failure_outlives_the_repair_of_the_item_that_it_left(cli, corpus, cache):
    """The item is in another shard then, and is as old as it was; one that is extracted
    again is not."""
    junk = with_row(corpus, "u1", path="junk.wav")
    assert cli("extract", junk, "-o", cache).code == 3
    version = only_version(cache)
    (name,) = version.shard_names()
    shard = version.shard(name)
    # of the sixth item
    flip(shard.folder / "features" / "c" / "0" / "0", int(shard.table.offsets("frame")[5]) * 160)
    assert cli("repair", version.path, "--manifest", corpus.manifest()).code == 0
    assert name not in version.shard_names()
    assert_told(cli, cache, "u1", "junk.wav")
    assert "u1: path a.wav → junk.wav, and extracting that failed" in refusal(cache, junk)


def test_a_failure_that_something_newer_has_made_up_for_is_over(cli, corpus, cache):
    """Also one of another row than that: and if the row comes back, it is tried, and
    fails, again."""
    junk = with_row(corpus, "u1", path="junk.wav")
    for manifest, code in ((junk, 3), (with_row(corpus, "u1", "b.csv", path="b.wav"), 0)):
        assert cli("extract", manifest, "-o", cache).code == code
    assert failures_of(cli, cache) == []
    assert "u1: path b.wav → junk.wav. `featcache extract" in refusal(cache, junk)
    assert "failures: not_audio 1" in cli("extract", junk, "-o", cache).with_code(3).out
    assert_told(cli, cache, "u1", "junk.wav")


def test_units_are_not_made_of_an_older_file(cli, corpus, cache):
    """From a version's features: an item whose file has changed and failed since is not
    in the source."""
    manifest = corpus.manifest()
    shutil.copy(corpus.folder / "junk.wav", corpus.folder / "a.wav")
    assert cli("extract", manifest, "-o", cache, "--check-sources").code == 3
    version = only_version(cache)
    rows = [Utterance(id="u1", path="a.wav"), Utterance(id="u2", path="b.wav")]
    older, there = open_source(version.path, version.info.fingerprint).read(rows)
    assert isinstance(there, StoredUtterance)
    assert older.reason == Reason.NOT_IN_SOURCE
    assert (
        "of another row or file: its file has changed since, and extracting the new one "
        "failed: not" in str(older)
    )


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_edited_each_row_has_its_own_features_or_is_told(corpus, scratch, seed):
    """Rows and files change at random, good and bad; each run looks at the files.

    After each run, a row is counted as present if and only if what is stored for it is
    what extracting it alone gives; the dataset serves those rows, and no others; and all
    others are failures that stand."""
    random = np.random.default_rng(seed)
    cache, truth = scratch / "c", {}
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
                row["path"], row["duration"] = (
                    files[random.integers(3)],
                    random.choice(["", 0.1, 0.2, 9.0]),
                )
            else:
                file, which = files[random.integers(3)], random.choice([*"abd", "junk"])
                content[file] = which
                (corpus.folder / file).write_bytes(good.get(which, b"junk"))
                clock += 10**9
                os.utime(corpus.folder / file, ns=(clock, clock))
        manifest = corpus.manifest(rows, "random.csv")
        options = featcache.Options(
            "cpu", 1, check_sources=True, replace=True, retry_failed=random.random() < 0.3
        )
        summary = featcache.extract(manifest, cache=cache, options=options)
        expected = {}
        for row in rows:
            key = content[row["path"]], row.get("duration", "")
            if key not in truth:
                truth[key] = alone(corpus, key, scratch / f"alone-{len(truth)}")
            expected[row["id"]] = truth[key]
        bad = {id_ for id_, features in expected.items() if features is None}
        assert summary.failed == len(bad), step
        version = only_version(cache)
        assert set(standing_failures(version, open_index(version))) >= bad
        planned = featcache.Options("cpu", check_sources=True, dry_run=True)
        (again,) = featcache.extract(manifest, cache=cache, options=planned).versions
        assert (again.missing, again.failed) == (0, len(bad))
        served = items(cache)
        assert all(
            served[id_] == features for id_, features in expected.items() if features is not None
        )
        report = check(cache, manifest=read_manifest(manifest))
        assert report.failed == len(bad)
        told = {(problem.kind, problem.id) for problem in report.problems}
        assert told == {("changed", id_) for id_ in bad & set(served)}
        opened = featcache.open(cache)
        if stale := bad & set(opened.ids):
            with pytest.raises(ManifestError, match=f"for {len(stale)} of 5 utterances"):
                featcache.FeatureDataset(opened, manifest, skip_missing=True)
        elif bad != set(expected):
            with warnings.catch_warnings(action="error"):
                dataset = featcache.FeatureDataset(opened, manifest, skip_missing=True)
            assert set(dataset.ids) == set(expected) - bad


def alone(corpus, key, cache):
    """What a row of some content and duration gives, extracted alone; None where it fails."""
    which, duration = key
    rows = [{"id": "alone", "path": f"{which}.wav", "duration": duration}]
    featcache.extract(corpus.manifest(rows, "alone.csv"), cache=cache)
    return items(cache).get("alone")


def assert_told(cli, cache, id_, path):
    """The one failure is in the ledger that every hint names, with all that is known of
    it."""
    (failure,) = failures_of(cli, cache)
    assert (failure["id"], failure["path"], failure["reason"]) == (id_, path, "not_audio")
    told = cli("info", cache, "--failures").out
    assert " 1 failed\n" in told
    (line,) = [line for line in told.splitlines() if line.startswith(f"  {id_}\t")]
    assert line.endswith("; an older item of this id is there, and stays")
    plain = cli("verify", cache).with_code(3)
    assert "1 utterance is in the failure ledger" in plain.out
    assert Counter(plain.out.split())["damage"] == 1
