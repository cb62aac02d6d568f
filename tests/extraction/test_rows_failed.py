"""A row or its file has changed, and extracting it fails: that stays visible until it succeeds.

Until then nobody is given the older item as if it were this row's.
"""

import os
import shutil
import warnings
from collections import Counter

import numpy as np
import pytest
from cache_contents import check, items, only_version
from changed_rows import is_quiet, make_corpus, refusal, with_row
from corpora import Corpus
from damage import flip
from extractions import extracted, failures_of

import featcache
from featcache.errors import ManifestError, Reason
from featcache.extraction.from_version import StoredUtterance, open_source
from featcache.manifest import Utterance, read_manifest
from featcache.stats import moments
from featcache.version.index import open_index
from featcache.version.ledger import standing_failures


@pytest.fixture
def corpus(scratch) -> Corpus:
    return make_corpus(scratch / "corpus")


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
    assert failures_of(cli, cache) == []
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
    assert failures_of(cli, cache) == []
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
    flip(shard.folder / "features" / "c" / "0" / "0", int(shard.table.offsets("frame")[5]) * 160)  # of the sixth item
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
    assert failures_of(cli, cache) == []
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
    rows = [Utterance(id="u1", path="a.wav"), Utterance(id="u2", path="b.wav")]
    older, there = open_source(version.path, version.info.fingerprint).read(rows)
    assert isinstance(there, StoredUtterance)
    assert older.reason == Reason.NOT_IN_SOURCE
    assert "of another row or file: its file has changed since, and extracting the new one failed: not" in str(older)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_edited_each_row_has_its_own_features_or_is_told(corpus, scratch, seed):
    """Rows and files change at random, good and bad, and are extracted with and without a look at the files.

    After each run, a row is counted as present if and only if what is stored for it is what extracting it alone gives;
    the dataset serves those rows, and no others; and all others are failures that stand.
    """
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
                row["path"], row["duration"] = files[random.integers(3)], random.choice(["", 0.1, 0.2, 9.0])
            else:
                file, which = files[random.integers(3)], random.choice([*"abd", "junk"])
                content[file] = which
                (corpus.folder / file).write_bytes(good.get(which, b"junk"))
                clock += 10**9
                os.utime(corpus.folder / file, ns=(clock, clock))
        manifest = corpus.manifest(rows, "random.csv")
        options = featcache.Options("cpu", 1, check_sources=True, replace=True, retry_failed=random.random() < 0.3)
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
        assert all(served[id_] == features for id_, features in expected.items() if features is not None)
        report = check(cache, manifest=read_manifest(manifest))
        assert report.failed == len(bad)
        assert {problem.id for problem in report.problems} == bad & set(served)
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
    """The one failure is in the ledger that every hint names, with all that is known of it."""
    (failure,) = failures_of(cli, cache)
    assert (failure["id"], failure["path"], failure["reason"]) == (id_, path, "not_audio")
    told = cli("info", cache, "--failures").out
    assert " 1 failed\n" in told
    (line,) = [line for line in told.splitlines() if line.startswith(f"  {id_}\t")]
    assert line.endswith("; an older item of this id is there, and stays")
    plain = cli("verify", cache)
    assert plain.code == 3
    assert "1 utterance is in the failure ledger" in plain.out
    assert Counter(plain.out.split())["damage"] == 1
