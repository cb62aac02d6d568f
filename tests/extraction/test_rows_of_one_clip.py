"""Several rows of a manifest may name one clip: it is extracted once, and every command and
dataset counts it so."""

import json

import numpy as np
import pytest
from cache_contents import only_version
from corpora import Corpus, speech
from damage import flip
from label_files import long_textgrid

import featcache
from featcache.errors import ManifestError
from featcache.manifest.read import read_manifest
from featcache.version.wanted import read_all_wanted

STATS = ["-c", "audio-stats"]


@pytest.fixture
def corpus(tmp_path):
    """Three files: two rows of the first, in other languages, and of the third three rows
    whose cuts would have one id."""
    corpus = Corpus(tmp_path)
    for number, seconds in enumerate((0.5, 0.6, 2.5)):
        corpus.record(f"r{number}", f"r{number}.wav", speech(seconds, seed=number))
    paths = [row["path"] for row in corpus.rows]
    rows = [
        {"path": paths[0], "lang": "en", "text": "one"},
        {"path": paths[1], "lang": "en", "text": "two"},
        {"path": paths[0], "lang": "de", "text": "eins"},
        {"path": paths[2], "start": 1.5012, "duration": 0.5, "lang": "en", "text": "a"},
        {"path": paths[2], "start": 1.5049, "duration": 0.5, "lang": "en", "text": "b"},
        {"path": paths[2], "start": 1.5049, "duration": 0.5, "lang": "de", "text": "c"},
    ]
    corpus.train = corpus.folder / "train.jsonl"
    corpus.train.write_text("\n".join(map(json.dumps, rows)))
    corpus.texts = [row["text"] for row in rows]
    return corpus


def test_a_clip_is_extracted_once_and_read_by_all_its_rows(cli, corpus, scratch):
    cache = scratch / "c"
    ended = cli("extract", corpus.train, "-o", cache, *STATS, "-c", "fbank80-speed").with_code(0)
    assert "2 rows repeat the clip of another row, which is extracted once" in ended.err
    assert "4 utterances: 4 extracted" in ended.out
    assert "12 utterances: 12 extracted" in ended.out
    again = cli("extract", corpus.train, "-o", cache, *STATS).with_code(0)
    assert "nothing to do: 4 utterances are already there" in again.out
    caches = {name: featcache.open(cache, name) for name in ("audio-stats", "fbank80-speed")}
    dataset = featcache.FeatureDataset(caches, corpus.train, copies=False)
    assert [item["text"] for item in dataset] == corpus.texts
    assert dataset.ids[0] == dataset.ids[2] != dataset.ids[1]
    batch = dataset.batch(range(6))["features"]["audio-stats"]
    assert np.array_equal(batch[0], batch[2])
    assert np.array_equal(batch[4], batch[5])
    assert not np.array_equal(batch[3], batch[4])
    with_copies = featcache.FeatureDataset(
        caches["fbank80-speed"],
        corpus.train,
        columns={"stats": caches["audio-stats"]},
        where='lang == "de"',
    )
    assert len(with_copies) == 6
    assert np.array_equal(with_copies.batch([0, 3])["stats"], batch[[2, 5]])


def test_commands_count_clips(cli, corpus, scratch):
    cache = scratch / "c"
    cli("extract", corpus.train, "-o", cache, *STATS).with_code(0)
    version = only_version(cache)
    (wanted,) = read_all_wanted(version)
    assert len(wanted) == 4
    verified = cli("verify", cache, "--manifest", corpus.train, "--json").with_code(0).json()
    (counts,) = verified["versions"]
    assert [counts[name] for name in ("utterances", "surplus", "repeated")] == [4, 0, 0]
    assert counts["problems"] == []
    assert cli("prune", cache, "--manifest", corpus.train, "--yes").with_code(0)
    stats = cli("stats", cache, "--manifest", corpus.train, "--json").with_code(0).json()
    assert stats["utterances"] == 4
    values = {id_: array.copy() for id_, array in featcache.open(cache).items()}
    np.testing.assert_allclose(
        stats["mean"], np.mean([*values.values()], 0, dtype=np.float64), rtol=1e-6
    )
    by_lang = cli("stats", cache, "--manifest", corpus.train, "--by", "lang").with_code(2)
    assert "rows of one clip have several values of 'lang'" in by_lang.err
    by_path = cli("stats", cache, "--manifest", corpus.train, "--by", "path", "--json").json()
    assert [group["utterances"] for group in by_path["groups"]] == [1, 1, 2]
    (shard,) = (version.path / "shards").glob("*/")
    flip(shard / "features" / "c" / "0" / "0", 3)
    assert cli("verify", cache).code == 1
    cli("repair", cache, "--manifest", corpus.train).with_code(0)
    repaired = featcache.open(cache)
    assert all(np.array_equal(repaired[id_], array) for id_, array in values.items())


def test_other_formats_keep_the_rows(cli, corpus, scratch):
    cli("extract", corpus.train, "-o", scratch / "c", *STATS).with_code(0)
    table = corpus.folder / "train.csv"
    cli("manifest", corpus.train, "-o", table).with_code(0)
    read, rows = read_manifest(corpus.train), read_manifest(table)
    assert list(rows.ids) == list(read.ids)
    assert list(rows.columns["text"]) == corpus.texts
    assert "nothing to do" in cli("extract", table, "-o", scratch / "c", *STATS).with_code(0).out
    pytest.importorskip("speechbrain")
    from featcache.adapters.speechbrain import to_dynamic_item_dataset

    dataset = featcache.FeatureDataset(featcache.open(scratch / "c"), table)
    with pytest.raises(featcache.FeatcacheError, match="2 rows have the id of another"):
        to_dynamic_item_dataset(dataset)


def test_rows_of_a_clip_have_one_label_file(cli, corpus, scratch, written):
    pytest.importorskip("praatio")
    for lang in ("en", "de"):
        (corpus.folder / lang).mkdir()
        for row in corpus.rows:
            text = long_textgrid(2.5, {"words": [(0, 2.5, lang)]})
            (corpus.folder / lang / f"{row['id']}.TextGrid").write_text(text)
    config = "name: w\nextractor: labels\nparams: {{label_files: '{}/{{stem}}.TextGrid'}}\n"
    job = ("extract", corpus.train, "-o", scratch / "c", "-c")
    cli(*job, written(config.format("en"), "en.yaml")).with_code(0)
    dataset = featcache.FeatureDataset(featcache.open(scratch / "c"), corpus.train)
    assert [item["features"].labels for item in dataset] == [["en"]] * 6
    refused = cli(*job, written(config.format("{lang}"), "both.yaml")).with_code(2)
    assert "have the label files en/" in refused.err
    assert "give each row an id of its own" in refused.err


def test_an_id_of_two_cuts_is_refused(written):
    rows = "id,path,start\na,x.wav,1.5\nb,x.wav,\na,x.wav,1.6\na,x.wav,1.5\n"
    with pytest.raises(ManifestError, match="line 4: id 'a' is already on line 2, for another"):
        read_manifest(written(rows))
