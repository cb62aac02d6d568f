"""What all tests of engines compare with."""

import pytest
from cache_contents import items, shard_folders

import featcache


@pytest.fixture(scope="session")
def whole(plain, slow_config, tmp_path_factory) -> dict[str, tuple]:
    """What one process makes of the plain corpus if nothing happens, in one shard."""
    cache = tmp_path_factory.mktemp("whole")
    featcache.extract(plain.manifest(), slow_config, cache, featcache.Options("cpu", 1))
    assert len(shard_folders(cache)) == 1
    return items(cache)
