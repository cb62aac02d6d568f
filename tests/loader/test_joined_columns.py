"""Columns that other versions give: joined with rows as strictly as features, and what
`where=` selects by them."""

import pickle

import numpy as np
import pytest
import torch
from make_cache import make_features, make_version

import featcache
from featcache import FeatureDataset
from featcache.errors import (
    ArgumentError,
    FeatcacheWarning,
    ManifestError,
    MissingItemError,
    StoreError,
)
from featcache.spec import Clip
from featcache.version.corpus import Part, PartVersion, put_part, record_version
from featcache.version.indexing import open_index

FEATURES = make_features(5)
MOS = {f"utt-{n}": np.array([value], np.float32) for n, value in enumerate([1.5, 4.5, 3.25, 2.0])}
VECTORS = {f"utt-{n}": np.array([[n, -n, n / 2]], np.float32) for n in reversed(range(5))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Features of five utterances, a score of four, and a vector of each, in two shards."""
    folder = tmp_path_factory.mktemp("joined")
    make_version(folder, FEATURES)
    make_version(folder, MOS, name="mos", axis=Clip())
    items = [*VECTORS.items()]
    make_version(folder, dict(items[:2]), dict(items[2:]), name="vectors", axis=Clip())
    return folder


@pytest.fixture
def cache(folder):
    return featcache.open(folder, "fbank80")


@pytest.fixture
def manifest(written):
    rows = [f"utt-{n},audio/utt-{n}.wav,{'dev' if n == 4 else 'train'}" for n in (3, 1, 4, 0, 2)]
    return written("\n".join(["id,path,split", *rows]))


def test_columns_are_joined_by_row(cache, folder, manifest):
    columns = {"mos": folder / "mos", "vector": featcache.open(folder, "vectors")}
    dataset = FeatureDataset(cache, manifest, columns=columns, where={"split": "train"})
    assert list(dataset.columns) == ["path", "split", "mos", "vector"]
    assert dataset[1]["mos"] == 4.5
    assert torch.equal(dataset[1]["vector"], torch.tensor([1.0, -1.0, 0.5]))
    batch = dataset.batch([0, 1])
    assert torch.equal(batch["mos"], torch.tensor([2.0, 4.5]))
    assert torch.equal(batch["vector"], torch.tensor([[3.0, -3.0, 1.5], [1.0, -1.0, 0.5]]))
    assert torch.equal(dataset.collate([dataset[0], dataset[1]])["vector"], batch["vector"])
    loaded = next(iter(featcache.DataLoader(dataset, batch_size=4, shuffle=False)))
    assert sorted(loaded["mos"].tolist()) == [1.5, 2.0, 3.25, 4.5]
    again = pickle.loads(pickle.dumps(dataset.subset([2, 1])))
    assert torch.equal(again.batch([0, 1])["mos"], torch.tensor([1.5, 4.5]))


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ('split == "train" and mos > 3', ["utt-1", "utt-2"]),
        ("split == 'train' and vector[1] < -1", ["utt-3", "utt-2"]),
        (lambda row: row["split"] == "train" and row["vector"][0] > 1, ["utt-3", "utt-2"]),
    ],
)
def test_where_sees_them(cache, folder, manifest, where, ids):
    columns = {"mos": folder / "mos", "vector": folder / "vectors", "split": str}
    dataset = FeatureDataset(cache, manifest, columns=columns, where=where, skip_missing=True)
    assert list(dataset.ids) == ids
    assert list(dataset.columns) == ["split", "mos", "vector"]
    assert dataset.skipped == ([] if isinstance(where, str) else ["utt-4"])


def test_a_row_that_the_version_lacks_is_missing(cache, folder, manifest):
    columns = {"mos": folder / "mos"}
    for where in (None, "mos > 3"):
        with pytest.raises(MissingItemError, match=r"'utt-4': no such utterance in .*mos-"):
            FeatureDataset(cache, manifest, columns=columns, where=where)
        dataset = FeatureDataset(cache, manifest, columns=columns, where=where, skip_missing=True)
        assert dataset.skipped == ["utt-4"]
        assert len(dataset) == (2 if where else 4)


def test_a_row_that_has_changed_is_refused(cache, folder, tmp_path, manifest):
    rows = {"utt-2": {"path": "audio/utt-2.wav", "start": 1.5}}
    other = make_version(tmp_path, MOS, name="mos", axis=Clip(), rows=rows).path
    options = {"columns": {"mos": other}, "skip_missing": True}
    what = "utt-2: start 1.5 → \\(none\\)"
    for where in (None, "mos > 4"):  # whatever its stale value says
        with pytest.raises(ManifestError, match=what):
            FeatureDataset(cache, manifest, where=where, **options)
    with pytest.warns(FeatcacheWarning, match=what) as caught:
        dataset = FeatureDataset(cache, manifest, on_changed="warn", **options)
    assert caught[0].filename == __file__
    assert len(dataset) == 4
    dataset = FeatureDataset(cache, manifest, on_changed="use", where="mos > 3", **options)
    assert list(dataset.ids) == ["utt-1", "utt-2"]


def test_without_a_manifest_ids_decide(cache, folder):
    columns = {"vector": folder / "vectors"}
    dataset = FeatureDataset(cache, columns=columns, where="vector[0] >= 3")
    assert list(dataset.ids) == ["utt-3", "utt-4"]
    assert dataset[0]["vector"].tolist() == [3.0, -3.0, 1.5]


def make_corpus(folder, *parts, **options):
    """Make a corpus of the parts `p0`, `p1` … with these features, and manifests beside it."""
    for number, features in enumerate(parts):
        version = make_version(folder / f"p{number}", features, **options)
        (folder / f"p{number}.csv").write_text("\n".join(["id", *features]))
        put_part(folder, Part(f"p{number}", f"/manifests/p{number}.csv"))
        record_version(version, PartVersion.of(version, open_index(version)))
    return featcache.open(folder)


def test_corpora_have_columns_of_corpora_part_by_part(cache, folder, tmp_path):
    """Also if parts have the same ids."""
    vectors = {"utt-0": np.ones((1, 3), np.float32), "utt-1": np.zeros((1, 3), np.float32)}
    features = make_corpus(tmp_path / "a", make_features(2), make_features(2, seed=1))
    halves = {id_: -vector for id_, vector in vectors.items()}
    options = {"name": "vectors", "axis": Clip()}
    columns = {"vector": make_corpus(tmp_path / "b", vectors, halves, **options)}
    for manifest in (None, str(tmp_path / "a" / "*.csv")):
        dataset = FeatureDataset(features, manifest, columns=columns, where="vector[0] < 0")
        assert list(dataset.ids) == ["utt-0"]
        assert dataset[0]["vector"].tolist() == [-1, -1, -1]
        np.testing.assert_array_equal(dataset[0]["features"], features["p1", "utt-0"])
        with pytest.raises(ArgumentError, match=r"all versions must be corpora|not all others are"):
            FeatureDataset(features, manifest, columns={"vector": folder / "vectors"})
    with pytest.raises(ArgumentError, match="is a corpus, which needs features of a corpus"):
        FeatureDataset(cache, [{"id": "utt-0"}], columns=columns)


def test_copies_have_the_value_of_their_utterance(folder, tmp_path, manifest):
    ids = [f"utt-{n}{suffix}" for n in range(5) for suffix in ("_sp0.9", "", "_sp1.1")]
    rows = {id_: {"path": f"audio/{id_.partition('_')[0]}.wav"} for id_ in ids}
    features = dict(zip(ids, make_features(15).values(), strict=True))
    make_version(tmp_path, features, augment={"speed": [0.9, 1.0, 1.1]}, rows=rows)
    cache = featcache.open(tmp_path)
    columns = {"vector": folder / "vectors"}
    for given in (manifest, None):
        dataset = FeatureDataset(cache, given, columns=columns, where="vector[0] == 3")
        assert list(dataset.ids) == ["utt-3_sp0.9", "utt-3", "utt-3_sp1.1"]
        assert dataset.batch([0, 2])["vector"][:, 0].tolist() == [3.0, 3.0]


def test_quantised_and_checked_values_are_the_same(folder, tmp_path):
    make_version(tmp_path, VECTORS, name="quantised", axis=Clip(), quantized=True)
    for path in (folder / "vectors", tmp_path / "quantised"):
        cache = featcache.open(path, check=True)
        columns = [
            FeatureDataset(features, columns={"vector": path}).columns["vector"]
            for features in (cache, featcache.open(path))
        ]
        expected = [cache[id_] for id_ in cache.ids]
        assert all(np.array_equal(column, expected) for column in columns)


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"x": "{folder}/fbank80"}, ArgumentError, "columns: x: .* has 100 frames/s, and a column"),
        ({"x": "{folder}/nothing"}, StoreError, "there is no such cache folder"),
        ({"split": "{folder}/vectors"}, ManifestError, "has a column 'split' of its own"),
        ({"lengths": "{folder}/mos"}, ArgumentError, "'lengths' is .*another name than id, ids"),
        ({"mos": 3}, ArgumentError, "columns: 'mos' is 3: give a type, the path of a version"),
    ],
)
def test_what_gives_no_column_is_one_line(cache, folder, manifest, columns, error, message):
    given = {
        name: value.format(folder=folder) if isinstance(value, str) else value
        for name, value in columns.items()
    }
    with pytest.raises(error, match=message):
        FeatureDataset(cache, manifest, columns=given)
