"""Features belong to their row: a dataset, or statistics, of rows other than those
extracted is refused."""

import numpy as np
import pytest
from cache_contents import check, only_version
from changed_rows import dataset_of, make_corpus, refusal, with_row
from corpora import Corpus
from make_cache import codes_cache, made_cache, make_features, make_version
from manifests import manifest_of

import featcache
from featcache.errors import ArgumentError, FeatcacheWarning, ManifestError
from featcache.manifest.read import read_manifest
from featcache.stats import moments, usage


@pytest.fixture
def corpus(scratch) -> Corpus:
    return make_corpus(scratch / "corpus")


def extracted(cache, manifest):
    """Extract a manifest; how many utterances were not there."""
    return (
        featcache.extract(manifest, cache=cache, options=featcache.Options("cpu", 2))
        .versions[0]
        .extracted
    )


def test_a_row_of_another_file_under_the_same_id_is_refused(corpus, scratch):
    """Two manifests with an id in common, extracted one after the other: the first no
    longer has its features."""
    cache, train = scratch / "c", corpus.manifest(name="train.csv")
    assert extracted(cache, train) == 42
    dev = corpus.manifest([{"id": "u1", "path": "b.wav"}, {"id": "v1", "path": "b.wav"}], "dev.csv")
    assert extracted(cache, dev) == 2
    assert len(dataset_of(cache, dev)) == 2
    for options in ({}, {"skip_missing": True}, {"columns": []}, {"on_changed": "error"}):
        told = refusal(cache, train, **options)
        assert told.startswith(
            f"{train}: for 1 of 42 utterances, {only_version(cache).path} has features of another "
        )
        assert ": u1; u1: path b.wav → a.wav. `featcache extract " in told
        assert "or give the manifest that they were extracted from" in told
        assert 'on_changed="use"' in told
    with pytest.warns(FeatcacheWarning, match=r"u1: path b.wav → a.wav") as warned:
        dataset = featcache.FeatureDataset(featcache.open(cache), train, on_changed="warn")
    assert warned[0].filename == __file__
    used = dataset_of(cache, train, on_changed="use")
    for read in (dataset, used):
        assert read[0]["features"].equal(dataset_of(cache, dev)[0]["features"])
    assert extracted(cache, train) == 1
    assert len(dataset_of(cache, train)) == 42
    with pytest.raises(
        ArgumentError, match="on_changed is 'ignore': choose 'error', 'warn', 'use'"
    ):
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
def test_a_row_that_was_edited_is_refused_until_it_is_extracted_again(
    corpus, scratch, column, was, now, told
):
    cache = scratch / "c"
    assert extracted(cache, with_row(corpus, "u1", **{column: was})) == 42
    edited = with_row(corpus, "u1", **{column: now})
    assert f"; u1: {told}. `featcache" in refusal(cache, edited)
    assert extracted(cache, edited) == 1
    assert len(dataset_of(cache, edited)) == 42
    assert extracted(cache, edited) == 0
    assert check(cache, manifest=read_manifest(edited)).problems == []


def test_of_rows_without_a_path_the_id_alone_counts(corpus, scratch, monkeypatch):
    """As of all in a manifest without paths; others beside them are compared."""
    cache = scratch / "c"
    assert extracted(cache, corpus.manifest()) == 42
    rows = [{"id": "u1"}, {"id": "u2", "start": 0.2}, {"id": "d1", "path": "d.wav"}]
    assert len(dataset_of(cache, corpus.manifest(rows, "some.csv"))) == 3
    # the ledger, in a bucket a request and more, is not read for them
    with monkeypatch.context() as patch:
        patch.setattr("featcache.loader.utterances.failures_by_row", None)
        assert len(dataset_of(cache, manifest_of(scratch, [("u1", "x"), ("u2", "y")]))) == 2
    rows[2]["path"] = "a.wav"
    assert "for 1 of 3 utterances" in refusal(cache, corpus.manifest(rows, "x.csv"))


def test_at_most_ten_rows_are_named_and_all_are_counted(tmp_path):
    """In every version; rows that are missing from the cache are another matter, and none
    of these."""
    features = make_features(30)
    for name in ("one", "other"):
        rows = {
            id_: {"path": "x.wav" if name == "other" and id_ < "utt-3" else "a.wav"}
            for id_ in features
        }
        make_version(tmp_path / "c", features, name=name, rows=rows)
    versions = {name: featcache.open(tmp_path / "c", name) for name in ("one", "other")}
    manifest = manifest_of(
        tmp_path, [(id_, "a.wav") for id_ in [*features, "more"]], ("id", "path")
    )
    assert len(featcache.FeatureDataset(versions["one"], manifest, skip_missing=True)) == 30
    told = r"for 23 of 31 utterances, .*other-.*: utt-0, .* … and 13 more; utt-0: path"
    with pytest.raises(ManifestError, match=told):
        featcache.FeatureDataset(versions, manifest, skip_missing=True)
    dataset = featcache.FeatureDataset(
        versions, manifest, where={"id": ["utt-3", "utt-4"]}, on_changed="error"
    )
    assert len(dataset) == 2


def test_of_no_rows_none_has_changed(tmp_path):
    make_version(tmp_path / "c", make_features(3))
    none = read_manifest(manifest_of(tmp_path, [("utt-0", "a.wav")], ("id", "path"))).take(
        np.empty(0, np.int64)
    )
    assert len(dataset_of(tmp_path / "c", none)) == 0


def test_copies_have_the_row_of_their_utterance(tmp_path):
    """At other speeds, they are cut from the same place of the same file."""
    features = {
        f"{id_}{suffix}": make_features(1)["utt-0"] for id_ in "ab" for suffix in ("", "_sp0.9")
    }
    rows = {id_: {"path": f"{id_[0]}.wav"} for id_ in features}
    version = make_version(tmp_path / "c", features, augment={"speed": [1.0, 0.9]}, rows=rows)
    right = manifest_of(tmp_path, [("a", "a.wav"), ("b", "b.wav")], ("id", "path"))
    assert len(featcache.FeatureDataset(featcache.open(version.path), right)) == 4
    wrong = manifest_of(tmp_path, [("a", "a.wav"), ("b", "c.wav")], ("id", "path"), "wrong.csv")
    with pytest.raises(
        ManifestError, match=r"2 of 4 utterances, .*: b, b_sp0.9; b: path b.wav → c.wav"
    ):
        featcache.FeatureDataset(featcache.open(version.path), wrong)
    with pytest.raises(
        ManifestError, match=r"^<list>: .*path a.wav → c.wav\. Extract these rows again; or give"
    ):
        featcache.FeatureDataset(featcache.open(version.path), [{"id": "a", "path": "c.wav"}])


def test_statistics_give_no_speakers_label_to_another_row(tmp_path):
    features = make_features(6)
    cache = made_cache(tmp_path / "c", features, rows={"utt-0": {"path": "x.wav"}})
    rows = [(id_, f"audio/{id_}.wav", "anna") for id_ in features]
    manifest = manifest_of(tmp_path, rows, ("id", "path", "speaker"))
    told = r"for 1 of 6 utterances, .*: utt-0; utt-0: path x.wav → audio/utt-0.wav.* or a manifest without paths"
    with pytest.raises(ManifestError, match=told):
        moments(cache, manifest, by="speaker")
    assert (
        moments(
            cache, manifest_of(tmp_path, rows[1:], ("id", "path", "speaker")), by="speaker"
        ).utterances
        == 5
    )
    assert (
        moments(
            cache, manifest_of(tmp_path, [(row[0], row[2]) for row in rows]), by="speaker"
        ).utterances
        == 6
    )
    codes = codes_cache(tmp_path / "codes")
    with pytest.raises(ManifestError, match="for 1 of 1 utterances"):
        usage(codes, manifest_of(tmp_path, [("utt-1", "y.wav")], ("id", "path")))
