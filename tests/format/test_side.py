"""Side arrays of utterances, as a cache gives them."""

import pickle

import numpy as np
import pytest
from damage import flip
from make_cache import in_three_shards, made_up_side, make_version
from small_shards import SIDE

import featcache
from featcache.errors import DamagedError, MissingItemError, StoreError


@pytest.fixture(scope="module")
def sided(tmp_path_factory, features):
    """A cache of one version of three shards with side arrays; nobody changes it."""
    folder = tmp_path_factory.mktemp("sided")
    make_version(folder, *in_three_shards(features), side=SIDE)
    return folder


@pytest.mark.parametrize("check", [False, True])
def test_an_utterance_has_its_entries_by_id_and_by_position(sided, features, check):
    counts = set()
    for cache in (opened := featcache.open(sided, check=check), pickle.loads(pickle.dumps(opened))):
        for position, (name, array) in enumerate(features.items()):
            for spec in cache.spec.side:
                expected = made_up_side(spec, array)
                for key in (name, position, position - 20, np.int32(position)):
                    found = cache.side(spec.name, key)
                    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                    assert np.array_equal(found, expected)
                    assert not found.flags.writeable
                counts.add(len(expected))
        assert all(map(np.array_equal, cache.values(), features.values()))
    assert {0, 13} <= counts  # none of a short one


def test_what_is_not_there_is_told(sided, folder):
    cache = featcache.open(sided)
    with pytest.raises(StoreError, match="has no side array 'scale'; it has scales, marks"):
        cache.side("scale", 0)
    with pytest.raises(StoreError, match="has no side array 'scales'; it has none"):
        featcache.open(folder).side("scales", 0)
    with pytest.raises(MissingItemError, match="nobody"):
        cache.side("scales", "nobody")
    with pytest.raises(IndexError, match="no utterance at 20"):
        cache.side("scales", 20)


@pytest.mark.parametrize("path", ["zarr.json", "items/c/0/0", "side_marks/c/0/0"])
def test_damage_is_found_of_the_table_always_and_flipped_bits_of_the_entries_when_asked_for(
    tmp_path, features, path
):
    version = make_version(tmp_path, features, side=SIDE)
    file = version.shard(version.shard_names()[0]).folder / path
    flip(file, 100)
    is_of_entries = path.startswith("side_")
    if is_of_entries:
        featcache.open(tmp_path).side("marks", 0)
    with pytest.raises(DamagedError, match=f"{path}: damaged.*featcache repair"):
        featcache.open(tmp_path, check=is_of_entries).side("marks", 0)
    if path != "zarr.json":  # without which there is no shard
        file.unlink()
        with pytest.raises(DamagedError, match=f"{path}.*missing.*featcache repair"):
            featcache.open(tmp_path).side("marks", 0)
