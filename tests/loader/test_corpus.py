"""A corpus is one sequence: the indexes of all its parts are mapped, and positions count
through them."""

import pickle
import shutil

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as npst
from make_cache import add_shard, assert_same, make_features, make_version

import featcache
from featcache import BucketBatchSampler
from featcache.care.copying import copy_parts_list, copy_version
from featcache.errors import ArgumentError, FeatcacheWarning, ManifestError, StoreError
from featcache.spec import Frames, Track
from featcache.storage.location import parse_location
from featcache.storage.opening import open_store
from featcache.version.corpus import Part, PartVersion, put_part, record_version
from featcache.version.indexing import open_index
from featcache.version.selection import select_versions

SHARDS = ([5, 4], [7], [3, 3, 2], [6])


def make_corpus(folder, *parts, augment=None, prefix="{name}-{at}", side=()):
    """Make a corpus of the parts `p0`, `p1` …, of whose shards the numbers of utterances
    are given; of the third one of the first shard of `p0`, the id is `p0-0-2`, unless the
    prefix is another."""
    for number, sizes in enumerate(parts):
        name = f"p{number}"
        prefixes = [prefix.format(name=name, at=at) for at in range(len(sizes))]
        shards = [
            make_features(sizes[at], seed=100 * number + at, prefix=one)
            for at, one in enumerate(prefixes)
        ]
        version = make_version(folder / name, *shards, augment=augment, side=side)
        put_part(folder, Part(name, f"/manifests/{name}.csv"))
        record_version(version, PartVersion.of(version, open_index(version)))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), *SHARDS)


def test_a_corpus_is_the_caches_of_its_parts_one_after_another(folder):
    corpus = featcache.open(folder)
    caches = [featcache.open(folder / f"p{number}") for number in range(4)]
    whole = [features for cache in caches for features in cache.values()]
    assert isinstance(corpus, featcache.Corpus)
    assert corpus.parts == ["p0", "p1", "p2", "p3"]
    assert len(corpus) == len(whole) == 30
    assert all(
        np.array_equal(one, other) for one, other in zip(corpus.values(), whole, strict=True)
    )
    assert [*corpus] == [name for name, _ in corpus.items()] == [*corpus.ids]
    assert [*corpus.ids] == [id_ for cache in caches for id_ in cache.ids]
    assert np.array_equal(
        np.asarray(corpus.lengths), np.concatenate([cache.lengths for cache in caches])
    )
    assert np.array_equal(corpus["p2", 3], caches[2][3])
    assert np.array_equal(corpus["p2", "p2-1-0"], corpus["p2-1-0"])
    assert corpus.locate(-1) == ("p3", 5)
    assert corpus.part("p1").version.path == caches[1].version.path
    positions = np.array([29, 0, 12, 9, 9])
    features, lengths = corpus.batch(positions)
    for row, length, position in zip(features, lengths, positions, strict=True):
        assert np.array_equal(row[:length].numpy(), whole[position])
        assert not row[length:].any()
    checked, _ = corpus.batch(list(corpus.ids.texts(positions)), check=True)
    assert torch.equal(checked, features)


def test_an_id_is_looked_up_and_not_compared_with_all(folder, monkeypatch):
    """As in the corpus itself: there may be 10^8 of them."""
    corpus = featcache.open(folder)
    known = corpus.ids[17]
    monkeypatch.delattr(type(corpus.ids), "__iter__")
    monkeypatch.delattr(type(corpus.ids), "__getitem__")
    assert known in corpus.ids
    assert "nowhere" not in corpus.ids
    assert 17 not in corpus.ids


@pytest.fixture(scope="module")
def columns(folder):
    """Numbers of a corpus's utterances, and the same ones as arrays of numpy's."""
    corpus = featcache.open(folder)
    dataset = featcache.FeatureDataset(corpus, crop=8)
    found = (corpus.lengths, corpus.index.shard, dataset.lengths, dataset.shards)
    return [(column, np.asarray(column)) for column in found]


SOME = st.integers(-31, 31)
INDICES = st.one_of(
    SOME,
    st.integers(-30, 29).map(np.int32),
    st.lists(st.integers(-30, 29), max_size=5),
    st.lists(SOME, max_size=5),
    st.lists(st.booleans(), min_size=30, max_size=30),
    npst.arrays(bool, st.sampled_from([30, 30, 29, (30, 1), ()])),
    npst.arrays(
        npst.integer_dtypes(),
        npst.array_shapes(min_dims=0, max_dims=2),
        elements=st.integers(0, 29),
    ),
    npst.arrays(np.int64, st.integers(0, 5), elements=SOME),
    npst.basic_indices((30,), allow_newaxis=True, allow_ellipsis=True),
    st.sampled_from([np.float64(3), [0.5], None, "utt", np.array([3.0])]),
)


@given(at=INDICES)
def test_a_column_is_indexed_as_an_array_is(columns, at):
    for column, array in columns:
        try:
            expected = array[at]
        except IndexError:
            with pytest.raises(IndexError):
                column[at]
        else:
            chosen = column[at]
            assert (type(chosen), chosen.dtype) == (type(expected), expected.dtype)
            assert np.array_equal(chosen, expected)


@pytest.mark.filterwarnings("ignore:a worker process takes longer:featcache.FeatcacheWarning")
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_epoch_of_workers_takes_a_few_shards_of_any_parts(folder, context):
    dataset = featcache.FeatureDataset(featcache.open(folder))
    sampler = BucketBatchSampler(
        dataset.lengths, max_frames=120, shards=dataset.shards, shards_in_memory=2
    )
    assert sorted(at for batch in sampler for at in batch) == [*range(30)]
    workers = {"num_workers": 2, "multiprocessing_context": context}
    loader = torch.utils.data.DataLoader(
        dataset, batch_sampler=sampler, collate_fn=dataset.collate, **workers
    )
    assert_same(loader, list(featcache.DataLoader(dataset, sampler)))


def test_packed_rows_hold_a_corpus_without_its_manifests(folder):
    corpus = featcache.open(folder)
    dataset = featcache.FeatureDataset(corpus)
    loader = featcache.PackedLoader(dataset, tokens=64, rows=2, overflow="split")
    batches = [*loader]
    assert sorted(id_ for batch in batches for id_ in batch["ids"]) == sorted(corpus.ids)
    for batch in batches:
        for number, id_ in enumerate(batch["ids"]):
            tokens = batch["features"][batch["document_ids"] == number]
            np.testing.assert_array_equal(tokens, corpus[id_])


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        ((["true", "false"], ["true", "null"]), [True, False, True, None]),
        ((["1", "2"], ["null", "3"]), [1.0, 2.0, None, 3.0]),
        ((['"a"', "null"], ['"b"', '"c"']), ["a", None, "b", "c"]),
        ((["[1]", "null"], ["[2]", "[]"]), [[1], None, [2], []]),
        ((["true", "null"], ["null", "null"]), [True, None, None, None]),
    ],
)
def test_types_of_the_parts_columns_are_joined(folder, tmp_path, cells, values):
    for name, of_part in zip(("p0", "p2"), cells, strict=True):
        rows = (f'{{"id": "{name}-1-{row}", "x": {cell}}}\n' for row, cell in enumerate(of_part))
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    dataset = featcache.FeatureDataset(featcache.open(folder), tmp_path / "p?.jsonl")
    found = dataset.batch(range(4))["x"]
    found = found.tolist() if isinstance(found, torch.Tensor) else found
    assert [None if value != value else value for value in found] == values


@pytest.mark.parametrize(
    ("cells", "what"),
    [(("true", "1"), "booleans .*, numbers"), (("true", '"x"'), "booleans .*, text")],
)
def test_types_of_the_parts_columns_that_differ_are_refused(folder, tmp_path, cells, what):
    for name, cell in zip(("p0", "p2"), cells, strict=True):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"id": "{name}-1-0", "x": {cell}}}\n')
    with pytest.raises(ManifestError, match=f"the column 'x' holds {what} in others"):
        featcache.FeatureDataset(featcache.open(folder), tmp_path / "p?.jsonl")


def test_manifests_are_joined_with_the_parts_of_their_names(folder, tmp_path):
    for name in ("p0", "p2"):
        rows = "".join(f"{name}-1-{number},{number},of {name}\n" for number in range(3))
        (tmp_path / f"{name}.csv").write_text(f"id,digit,speaker\n{rows}")
    corpus = featcache.open(folder)
    dataset = featcache.FeatureDataset({"one": corpus, "two": corpus}, tmp_path / "p?.csv")
    assert [*dataset.ids] == [f"{name}-1-{number}" for name in ("p0", "p2") for number in range(3)]
    batch = dataset.batch([4, 2])
    assert (batch["digit"].tolist(), batch["speaker"]) == ([1, 2], ["of p2", "of p0"])
    assert np.array_equal(
        batch["features"]["two"][0][: batch["lengths"]["two"][0]].numpy(), corpus["p2", "p2-1-1"]
    )
    assert len(featcache.FeatureDataset(corpus, tmp_path / "p2.csv", columns=["digit"])) == 3
    (tmp_path / "p9.csv").write_text("id\na\n")
    with pytest.raises(StoreError, match="there is no part 'p9'"):
        featcache.FeatureDataset(corpus, tmp_path / "p9.csv")
    (tmp_path / "p0.csv").write_text("id,digit,speaker\np0-1-0,seven,x\n")
    with pytest.raises(
        ManifestError, match="the column 'digit' holds numbers in some manifests, text in others"
    ):
        featcache.FeatureDataset(corpus, tmp_path / "p[02].csv")
    for lacking in ("p0", "p2"):
        for name in ("p0", "p2"):
            header, cell = ("id", "") if name == lacking else ("id,age", ",7")
            (tmp_path / f"{name}.csv").write_text(f"{header}\n{name}-1-0{cell}\n")
        with pytest.raises(
            ManifestError, match="not all of these manifests have a column 'age': leave it out of"
        ):
            featcache.FeatureDataset(corpus, tmp_path / "p[02].csv")


def test_caches_beside_a_corpus_come_first(folder, tmp_path):
    """The corpus is looked through for their ids; the ids of its parts may be alike, and
    a cache has one of each."""
    corpus, cache = featcache.open(folder), featcache.open(folder / "p2")
    dataset = featcache.FeatureDataset({"one": cache, "two": corpus})
    assert [*dataset.ids] == [*cache.ids]
    features = dataset[1]["features"]
    assert torch.equal(features["one"], features["two"])
    with pytest.raises(
        ArgumentError,
        match="first version is a corpus, and not all others are: give one first that",
    ):
        featcache.FeatureDataset({"two": corpus, "one": cache})
    for versions in ({"one": cache, "two": corpus}, {"two": corpus, "one": cache}):
        with pytest.raises(ArgumentError, match="with a corpus: all versions must be corpora"):
            featcache.FeatureDataset(versions, tmp_path / "p2.csv")
    with pytest.raises(ArgumentError, match="manifest is a list: with a corpus, give one path: of"):
        featcache.FeatureDataset(corpus, [tmp_path / "p2.csv"])


@pytest.mark.parametrize("names", [("main", "slow"), ("slow", "main")])
def test_a_track_of_a_corpus_is_a_corpus(tmp_path, names):
    side = (Track("slow", (2,), "float32", "every third frame", Frames(100 / 3)),)
    corpus = featcache.open(make_corpus(tmp_path / "corpus", [5], [3], prefix="utt", side=side))
    slow = corpus.track("slow")
    assert slow is corpus.track("slow")
    assert np.array_equal(slow["p1", "utt-2"], corpus.part("p1").track("slow")["utt-2"])
    assert np.array_equal(slow.part("p1")["utt-2"], slow[7])
    assert np.array_equal(pickle.loads(pickle.dumps(slow)).part("p1")["utt-2"], slow[7])
    of_name = {"main": corpus, "slow": slow}
    versions = {name: of_name[name] for name in names}
    (tmp_path / "p1.csv").write_text("id\nutt-2\nutt-0\n")
    for manifest, positions in ((None, range(8)), (tmp_path / "p1.csv", [7, 5])):
        dataset = featcache.FeatureDataset(versions, manifest)
        lengths = dataset.batch(range(len(dataset)))["lengths"]
        assert lengths["main"].tolist() == corpus.lengths[positions].tolist()
        assert lengths["slow"].tolist() == slow.lengths[positions].tolist()


def test_the_copies_of_a_corpus_are_rows_with_their_speeds(tmp_path):
    corpus = featcache.open(
        make_corpus(tmp_path / "corpus", [2], [3], augment={"speed": [0.9, 1.0]})
    )
    assert featcache.FeatureDataset(corpus).batch([4, 0])["speed"].tolist() == [1.0, 1.0]


def test_a_corpus_in_an_object_store(folder):
    pytest.importorskip("obstore")
    to = parse_location("to", "memory://corpora/test-corpus")
    copy_parts_list(folder, to)
    with pytest.raises(StoreError, match="no part holds a version yet"):
        featcache.open(str(to))
    for number in (0, 2, 3):
        copied = featcache.open(folder / f"p{number}").version
        copy_version(copied, to / f"p{number}")
    there = to / "p3" / copied.path.name
    store = open_store(there)
    store.remove("index")
    store.put("shards/0123456789abcdef/items/zarr.json", b"{}")  # of a copy that was killed
    with pytest.warns(
        FeatcacheWarning, match="the folder of its part p1 is not there; `featcache extract` with"
    ):
        corpus = featcache.open(str(to), ram="1MB")
    assert corpus.parts == ["p0", "p2", "p3"]
    assert all(
        np.array_equal(corpus["p2", at], featcache.open(folder)["p2", at]) for at in range(8)
    )
    positions = [22, 0, 9]
    assert torch.equal(corpus.batch(positions)[0], corpus.batch(positions, check=True)[0])


def test_what_has_changed_since(folder, tmp_path):
    """An opened corpus stays as it was; a new one is as the parts are now, which are then
    looked at."""
    corpus = make_corpus(tmp_path / "corpus", *SHARDS[:2])
    before = featcache.open(corpus)
    sent = pickle.dumps(before)
    version = featcache.open(corpus / "p1").version
    add_shard(version, make_features(2, prefix="new"), row=99)
    assert len(featcache.open(corpus)) == 18
    assert len(before) == len(pickle.loads(sent)) == 16
    assert np.array_equal(pickle.loads(sent)[15], featcache.open(folder)[15])
    shutil.rmtree(version.path / "index")
    assert np.array_equal(pickle.loads(sent)["p1", 6], before["p1", 6])


@pytest.mark.parametrize("augment", [None, {"speed": [0.9, 1.0]}])
def test_adapters_take_a_corpus(tmp_path, augment):
    for toolkit in ("datasets", "lhotse"):
        pytest.importorskip(toolkit)
    from featcache.adapters.huggingface import to_hf
    from featcache.adapters.lhotse import cuts

    corpus = featcache.open(make_corpus(tmp_path / "corpus", [2], [3], augment=augment))
    rows = to_hf(corpus)
    assert rows["id"][:] == [cut.id for cut in cuts(corpus)] == [*corpus]
    assert np.array_equal(rows[3]["features"], corpus[3])


def test_adapters_refuse_ids_that_lead_to_another_part(tmp_path):
    for toolkit in ("datasets", "lhotse", "speechbrain"):
        pytest.importorskip(toolkit)
    from featcache.adapters.huggingface import to_hf
    from featcache.adapters.lhotse import cuts
    from featcache.adapters.speechbrain import to_dynamic_item_dataset

    corpus = featcache.open(make_corpus(tmp_path / "corpus", [3], [3], prefix="utt"))
    whole = featcache.FeatureDataset(corpus)
    for adapt in (cuts, to_hf, to_dynamic_item_dataset):
        with pytest.raises(
            ArgumentError, match=r"'utt-0', .* only the first is found: pass the cache of one part"
        ):
            adapt(whole)
        assert len(adapt(corpus.part("p1"))) == len(adapt(whole.subset([0, 1]))) + 1 == 3
    # a dataset's ids are looked for in that alone
    second = to_dynamic_item_dataset(whole.subset([5, 3]))
    assert [len(one["feats"]) for one in second] == corpus.lengths[[5, 3]].tolist()


def test_parts_that_lack_the_version(tmp_path):
    corpus = make_corpus(tmp_path / "corpus", [2], [3])
    make_version(corpus / "p1", make_features(3), name="other")
    with pytest.raises(StoreError, match=r"its parts hold 2 versions: fbank80-.*, other-"):
        featcache.open(corpus)
    with pytest.warns(FeatcacheWarning, match=r"1 part has no other-.*, not extracted yet: p0"):
        assert len(featcache.open(corpus / "other")) == 3
    with pytest.raises(StoreError, match="not extracted yet: p0"):
        featcache.open(corpus, "other", strict=True)
    with pytest.raises(StoreError, match="no part holds a version called 'none'"):
        featcache.open(corpus, "none")
    for path in (corpus, corpus / "other"):
        with pytest.raises(ArgumentError, match="corpus: is a corpus: name one of its parts"):
            select_versions(path)
