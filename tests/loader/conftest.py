"""What tests of local copies share."""

import pytest
from local_copies import shards
from make_cache import make_version


@pytest.fixture
def slow_folder(tmp_path):
    """Where a cache is whose shards are to be copied."""
    return tmp_path / "network" / "features"


@pytest.fixture
def disk(scratch):
    """Where they are copied to."""
    return scratch / "disk"


@pytest.fixture
def version(slow_folder):
    """What is to be copied."""
    return make_version(slow_folder, *shards())
