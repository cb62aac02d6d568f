"""Shards that many threads have copied from an object store at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from featcache.loader import local_copies
from featcache.loader.local_copies import LocalCopies, Tier
from featcache.loader.local_disk import LocalDisk

BYTES = 4096


@pytest.fixture
def fast_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_that_copy_different_shards_do_not_meet(tmp_path, monkeypatch, fast_switches):
    monkeypatch.setattr(local_copies, "checked_blocks", lambda path, num_bytes, version: [memoryview(bytes(num_bytes))])
    version = SimpleNamespace(info=SimpleNamespace(folder_name="x-0123456789ab"), path="memory://b/v")
    chunk = SimpleNamespace(
        num_bytes=BYTES - 4, dtype=np.dtype(np.uint8), shape=(BYTES - 4,), path=None, version=None, checksum=1
    )
    tier = Tier("disk", None, "copy_limit", lambda: LocalDisk(tmp_path, None, "x-0123456789ab", version.path))
    copies = LocalCopies(version, [f"{number:012x}" for number in range(80)], [tier])
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: copies.features(number, chunk, 1), range(80)))
    assert len({copy.path for copy in found}) == 80
