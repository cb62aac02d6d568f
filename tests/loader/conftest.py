"""What tests of reading share: a cache; local copies, object stores, and disks that fail."""

import errno
import os

import pytest
from local_copies import shards
from make_cache import make_features, make_version
from object_stores import upload_for_module

import featcache
from featcache.storage import directory


@pytest.fixture
def cache(folder):
    """The cache of a module's features, opened."""
    return featcache.open(folder)


@pytest.fixture
def version(tmp_path):
    """A version whose shards are to be copied."""
    return make_version(tmp_path / "network" / "features", *shards())


@pytest.fixture
def slow_folder(version):
    return version.path.parent


@pytest.fixture
def expected(slow_folder):
    return [array.copy() for array in featcache.open(slow_folder).values()]


@pytest.fixture
def other(tmp_path):
    """Another version, of one shard."""
    return make_version(tmp_path / "other", *shards(9, 1), params={"n": 2})


@pytest.fixture
def disk(scratch):
    return scratch / "disk"


@pytest.fixture
def bad_sector(monkeypatch):
    """Makes reading files fail, of which a function of their paths is true, from some
    byte on."""
    preadv = os.preadv

    def spoil(is_bad, first=0):
        def failing(descriptor, buffers, start):
            end = start + sum(memoryview(buffer).nbytes for buffer in buffers)
            if end > first and is_bad(os.readlink(f"/proc/self/fd/{descriptor}")):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(descriptor, buffers, start)

        monkeypatch.setattr(os, "preadv", failing)
        # The page cache has nothing of a bad sector.
        monkeypatch.setattr(directory, "enter_cached", lambda _block: False)

    return spoil


# A cache of eight shards, in a folder and in an object store; nobody changes it


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    items = list(make_features(96, max_frames=200).items())
    make_version(folder, *(dict(items[at : at + 12]) for at in range(0, 96, 12)))
    featcache.open(folder)
    return folder


@pytest.fixture(scope="module")
def uploaded(original, s3_of_module):
    upload_for_module(s3_of_module, original, "s3://speech/features")
    return "s3://speech/features"
