"""Side arrays of utterances, as a cache gives them."""

import pickle

import numpy as np
import pytest
from damage import flip
from make_cache import in_three_shards, made_up_side, make_version

import featcache
from featcache.errors import DamagedError, MissingItemError, StoreError
from featcache.spec import SideSpec

SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")


@pytest.fixture(scope="module")
def sided(tmp_path_factory, features):
    """A cache of one version of three shards with side arrays; nobody changes it."""
    folder = tmp_path_factory.mktemp("sided")
    make_version(folder, *in_three_shards(features), side=SIDE)
    return folder


@pytest.fixture
def cache(folder):
    return featcache.open(folder)


class TestSide:
    @pytest.mark.parametrize("check", [False, True])
    def test_gives_the_entries_of_an_utterance_by_id_and_by_position(self, sided, features, check):
        cache = featcache.open(sided, check=check)
        counts = set()
        for position, (name, array) in enumerate(features.items()):
            for spec in cache.spec.side:
                expected = made_up_side(spec, array)
                for key in (name, position, position - 20, np.int32(position)):
                    found = cache.side(spec.name, key)
                    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                    assert np.array_equal(found, expected)
                    assert not found.flags.writeable
                counts.add(len(expected))
        assert {0, 13} <= counts  # none of a short one
        assert all(map(np.array_equal, cache.values(), features.values()))

    def test_goes_with_a_pickled_cache(self, sided, features):
        cache = featcache.open(sided)
        expected = cache.side("scales", "utt-3")
        assert np.array_equal(pickle.loads(pickle.dumps(cache)).side("scales", "utt-3"), expected)

    def test_names_those_that_there_are(self, sided, cache):
        with pytest.raises(StoreError, match="has no side array 'scale'; it has scales, marks"):
            featcache.open(sided).side("scale", 0)
        with pytest.raises(StoreError, match="has no side array 'scales'; it has none"):
            cache.side("scales", 0)

    def test_an_utterance_that_is_not_there_is_told_as_ever(self, sided):
        cache = featcache.open(sided)
        with pytest.raises(MissingItemError, match="nobody"):
            cache.side("scales", "nobody")
        with pytest.raises(IndexError, match="no utterance at 20"):
            cache.side("scales", 20)

    @pytest.mark.parametrize("name", ["items/c/0/0", "side_marks/c/0/0"])
    def test_a_missing_file_is_damage(self, tmp_path, features, name):
        version = make_version(tmp_path, features, side=SIDE)
        (version.shard(version.shard_names()[0]).folder / name).unlink()
        with pytest.raises(DamagedError, match=f"{name}.*missing.*featcache repair"):
            featcache.open(tmp_path).side("marks", 0)

    @pytest.mark.parametrize("name", ["zarr.json", "items/c/0/0"])
    def test_a_flipped_bit_of_the_table_is_found_always(self, tmp_path, features, name):
        version = make_version(tmp_path, features, side=SIDE)
        flip(version.shard(version.shard_names()[0]).folder / name, 100)
        with pytest.raises(DamagedError, match=f"{name}: damaged.*featcache repair"):
            featcache.open(tmp_path).side("marks", 0)

    def test_a_flipped_bit_of_the_entries_is_found_when_asked_for(self, tmp_path, features):
        version = make_version(tmp_path, features, side=SIDE)
        flip(version.shard(version.shard_names()[0]).folder / "side_marks/c/0/0", 100)
        featcache.open(tmp_path).side("marks", 0)
        with pytest.raises(DamagedError, match=r"side_marks.*damaged.*featcache repair"):
            featcache.open(tmp_path, check=True).side("marks", 0)
