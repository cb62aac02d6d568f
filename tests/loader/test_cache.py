"""An opened cache: utterances by id and by position, batches of them, and what is said of
those not there."""

import gc
import pickle

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from make_cache import add_shard, make_features, make_version, padded_reference

import featcache
from featcache.errors import ArgumentError, FeatcacheError, MissingItemError, Reason
from featcache.manifest.strings import Strings, hash_of
from featcache.version.ledger import Failure
from featcache.version.records import Run


class TestCache:
    def test_holds_every_utterance_in_the_order_of_the_manifest(self, cache, features):
        assert len(cache) == 20
        assert list(cache.ids) == list(features)
        assert cache.lengths.dtype == np.int64
        assert cache.lengths.tolist() == [len(array) for array in features.values()]
        assert cache.spec.item_shape == (80,)
        assert cache.config["extractor"] == "made_up"

    def test_gives_what_was_stored_by_id_and_by_position(self, cache, features):
        for position, (name, array) in enumerate(features.items()):
            for key in (
                name,
                position,
                np.int32(position),
                np.uint64(position),
                torch.tensor(position),
                position - 20,
            ):
                assert cache[key].dtype == array.dtype
                assert np.array_equal(cache[key], array)
        assert all(map(np.array_equal, cache.values(), features.values()))

    def test_is_read_as_a_mapping(self, cache, features):
        assert (
            list(cache)
            == list(cache.keys())
            == [name for name, _ in cache.items()]
            == list(features)
        )
        assert all(np.array_equal(array, features[name]) for name, array in cache.items())
        assert dict(cache).keys() == features.keys()
        assert np.array_equal(cache.get("utt-3"), features["utt-3"])
        assert np.array_equal(cache.get(3), features["utt-3"])
        assert cache.get("utt-30") is None
        assert cache.get("utt-30", 5) == cache.get(20, 5) == 5
        assert "utt-3" in cache
        assert "utt-30" not in cache
        assert 3 not in cache

    def test_an_array_is_a_view_that_nobody_can_write_to(self, cache):
        array = cache[3]
        assert not array.flags.owndata
        assert array.base is not None
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        with pytest.raises(ValueError, match="read-only"):
            cache.lengths[0] = 1

    def test_an_array_outlives_the_cache(self, folder, features):
        arrays = [featcache.open(folder)[name] for name in features]
        gc.collect()
        assert all(map(np.array_equal, arrays, features.values()))

    def test_find_gives_positions(self, cache):
        assert cache.find(["utt-5", "utt-0", "utt-5"]).tolist() == [5, 0, 5]
        assert cache.find([]).tolist() == []
        for ids in ("utt-5", ["utt-5", 3]):
            with pytest.raises(ArgumentError, match="give a list of ids"):
                cache.find(ids)

    @given(st.text())
    def test_the_hash_of_one_string_is_that_of_many(self, string):
        assert hash_of(string) == Strings.of(["", string]).hashes()[1]

    def test_its_repr_says_what_it_is(self, cache):
        assert cache.version.path.name in repr(cache)
        assert f"20 utterances, {cache.lengths.sum() / 100:.1f} s of frames, " in repr(cache)
        assert "float16 [frames, 80], 100 frames/s" in repr(cache)

    @pytest.mark.parametrize("key", [20, -21, 10**12])
    def test_a_position_outside_is_an_index_error(self, cache, key):
        for read in (cache.__getitem__, lambda key: cache.batch([0, key])):
            with pytest.raises(IndexError, match=f"no utterance at {key}: .* has 20"):
                read(key)

    @pytest.mark.parametrize("key", [1.0, None, b"utt-1", slice(2), [1]])
    def test_a_key_that_is_neither_id_nor_position_is_refused(self, cache, key):
        with pytest.raises(ArgumentError, match="give an id, or a position") as error:
            cache[key]
        assert "\n" not in str(error.value)
        # as it says
        assert [len(each) for each in map(cache.item, range(3))] == cache.batch(range(3))[
            1
        ].tolist()

    def test_an_empty_version_can_be_opened(self, tmp_path):
        version = make_version(tmp_path)
        assert len(featcache.open(tmp_path)) == 0  # its manifest is empty
        version.store.remove("wanted")
        with pytest.warns(
            featcache.FeatcacheWarning,
            match="it holds nothing, and nothing says what it is to hold",
        ):
            cache = featcache.open(tmp_path)
        assert len(cache) == 0
        assert list(cache) == []
        assert "0 utterances" in repr(cache)
        with pytest.raises(MissingItemError):
            cache["utt-1"]

    def test_is_a_snapshot_also_where_it_is_unpickled(self, tmp_path):
        version = make_version(tmp_path, make_features(3))
        cache = featcache.open(tmp_path, check=True)
        cache.batch([0, 1, 2])
        again = make_features(2, seed=1)
        add_shard(version, again, row=0, generation=2)
        add_shard(version, make_features(3, prefix="new"), row=7)
        pickled = pickle.dumps(cache)
        assert len(pickled) < 1000  # paths
        copy = pickle.loads(pickled)
        assert copy.check
        assert list(copy.ids) == list(cache.ids) == ["utt-0", "utt-1", "utt-2"]
        assert np.array_equal(copy["utt-0"], cache["utt-0"])
        now = featcache.open(tmp_path)
        assert len(now) == 6
        assert np.array_equal(now["utt-0"], again["utt-0"])


KINDS = [
    *[((80,), "float16"), ((80,), "float32"), ((2, 3), "float16")],
    *[((8,), "uint16"), ((8,), "uint8"), ((), "uint32"), ((), "int64")],
]


class TestBatch:
    @settings(max_examples=60)
    @given(data=st.data())
    def test_equals_the_reference(self, data, tmp_path_factory):
        shape, dtype = data.draw(st.sampled_from(KINDS), "item shape and dtype")
        folder = tmp_path_factory.getbasetemp() / f"reference-{len(shape)}-{sum(shape)}-{dtype}"
        shards = [make_features(6, shape, dtype, seed=n, prefix=f"é{n}") for n in range(2)]
        stored = [array for shard in shards for array in shard.values()]
        if not folder.exists():
            make_version(folder, *shards)
        cache = featcache.open(folder)
        positions = data.draw(st.lists(st.integers(-12, 11), min_size=1, max_size=20), "positions")
        padding_value = data.draw(st.integers(0, 100), "padding")
        ids = [cache.ids[position] for position in positions]
        given_as = [make(some) for make in (list, np.array, iter) for some in (positions, ids)]
        keys = data.draw(st.sampled_from([*given_as, torch.tensor(positions)]))
        padded, lengths = cache.batch(keys, padding_value=padding_value, check=True)
        expected = [stored[position] for position in positions]
        assert padded.is_contiguous()
        assert np.array_equal(padded.numpy(), padded_reference(expected, padding_value))
        assert padded.numpy().dtype == np.dtype(dtype)
        assert lengths.dtype == torch.int64
        assert lengths.tolist() == [len(array) for array in expected]

    def test_is_the_callers_own(self, cache, features):
        padded, lengths = cache.batch([0, 1])
        padded.zero_()
        lengths.zero_()
        assert np.array_equal(cache[0], features["utt-0"])
        assert cache.lengths[0] == len(features["utt-0"])

    def test_uses_memory_again_when_nobody_looks_at_it(self, folder):
        cache = featcache.open(folder)
        expected = [padded_reference([cache[2 * n], cache[2 * n + 1]]) for n in range(6)]
        addresses = {
            cache.batch([2 * n, 2 * n + 1])[0].data_ptr() for n in range(6) for _ in range(3)
        }
        assert len(addresses) < 6
        tensors = [cache.batch([2 * n, 2 * n + 1])[0] for n in range(6)]
        seen = [
            [tensor[1:, :1], tensor.numpy()[:, 0], tensor.view(-1)][n % 3]
            for n, tensor in enumerate(tensors)
        ]
        del tensors
        for n in range(6):
            cache.batch([2 * n, 2 * n + 1])[0].fill_(-1)
        views = [
            [array[1:, :1], array[:, 0], array.reshape(-1)][n % 3]
            for n, array in enumerate(expected)
        ]
        assert all(map(np.array_equal, seen, views))

    @pytest.mark.parametrize("shape", [(2 * 40 * 80,), (5, 40, 80), (100_000,)])
    def test_gathers_into_a_given_tensor(self, cache, shape):
        out = torch.full(shape, 7, dtype=torch.float16)
        padded, _ = cache.batch([2, 4], out=out)
        assert padded.data_ptr() == out.data_ptr()
        assert torch.equal(padded, cache.batch([2, 4])[0])

    @pytest.mark.parametrize(
        ("out", "what"),
        [
            (torch.empty(10, dtype=torch.float16), "room for 10 values: this batch has"),
            (torch.empty(10_000, dtype=torch.float32), "must be torch.float16"),
            (np.empty(10_000, np.float16), "out is a ndarray: give a tensor"),
            (torch.empty(10_000, 2, dtype=torch.float16)[:, 0], "contiguous"),
            (torch.empty(10_000, dtype=torch.float16, device="meta"), "CPU memory"),
        ],
    )
    def test_a_tensor_that_does_not_do_is_refused(self, cache, out, what):
        with pytest.raises(ArgumentError, match=what):
            cache.batch([0, 1], out=out)

    @pytest.mark.parametrize("keys", [[], np.array([]), torch.tensor([])])
    def test_of_nothing_is_empty(self, cache, keys):
        features, lengths = cache.batch(keys)
        assert list(features.shape) == [0, 0, *cache.spec.item_shape]
        assert features.dtype == cache.batch([0])[0].dtype
        assert (lengths.dtype, lengths.tolist()) == (torch.int64, [])

    @pytest.mark.parametrize(
        "keys",
        [
            *(
                "utt-1",
                ["utt-1", 2],
                [1, "utt-2"],
                [1.0],
                [True, False],
                [[1], [2]],
                [[1], [2, 3]],
                [None],
            ),
            *(torch.ones(2), torch.tensor(3), np.array(3), np.array("utt-1"), None, 5),
        ],
    )
    def test_of_what_is_neither_ids_nor_positions_is_refused(self, cache, keys):
        with pytest.raises(ArgumentError, match=r"give (a list of|all) ids"):
            cache.batch(keys)


class TestMissing:
    @pytest.fixture
    def cache(self, tmp_path):
        """20 utterances; bad-0 … bad-2 have failed."""
        version = make_version(tmp_path, make_features(20))
        source = {"path": "a.wav", "size": 1, "mtime_ns": 1}
        Run(version, {}).fail(
            Failure(
                id=f"bad-{n}",
                reason=Reason.TOO_SHORT if n else Reason.EMPTY,
                message=f"seen {n}",
                **source,
            )
            for n in range(3)
        )
        return featcache.open(tmp_path)

    @pytest.mark.parametrize(
        "read", [lambda cache, key: cache[key], lambda cache, key: cache.batch(["utt-0", key])]
    )
    def test_says_that_an_utterance_failed_and_why(self, cache, read):
        with pytest.raises(
            MissingItemError, match=r"^bad-1: failed in extraction: seen 1 \(too_short\)"
        ):
            read(cache, "bad-1")

    def test_says_that_an_utterance_is_unknown_and_how_ids_look(self, cache):
        with pytest.raises(
            KeyError, match=r"^'utt-20': no such utterance in .* holds 20, like 'utt-0'$"
        ) as caught:
            cache["utt-20"]
        assert isinstance(caught.value, FeatcacheError)

    def test_names_up_to_ten_together(self, cache):
        ids = [*(f"bad-{n}" for n in range(3)), *(f"utt-{n}" for n in range(15, 30))]
        with pytest.raises(MissingItemError) as caught:
            cache.batch(ids)
        message = str(caught.value)
        assert message.startswith("13 of 18 utterances are not in ")
        assert (
            "bad-0, bad-1, bad-2, utt-20, utt-21, utt-22, utt-23, utt-24, utt-25, utt-26 … "
            "and 3 more" in message
        )
        assert message.endswith("3 of them failed in extraction (too_short 2, empty 1)")

    def test_needs_no_ledger(self, cache):
        (cache.version.path / "failures").rename(cache.version.path / "gone")
        with pytest.raises(MissingItemError, match="no such utterance"):
            cache["bad-1"]
