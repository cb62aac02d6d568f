"""What tests of adapters share: a version as it was when a tag was made, and as it is."""

import pytest
from make_cache import add_shard, make_features, make_version

import featcache
from featcache.version.indexing import open_index
from featcache.version.tags import make_tag


@pytest.fixture
def tagged(tmp_path) -> tuple[featcache.Cache, featcache.Cache]:
    """A version at a tag, and as it is since `utt-0` has been extracted again, with other
    features."""
    version = make_version(tmp_path / "features", make_features(4))
    make_tag(version, "paper", open_index(version))
    add_shard(version, make_features(1, seed=9), generation=2)
    then, now = featcache.open(version.path, tag="paper"), featcache.open(version.path)
    assert then["utt-0"].tobytes() != now["utt-0"].tobytes()
    return then, now
