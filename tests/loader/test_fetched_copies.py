"""Shards that many threads have copied from an object store at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from local_copies import disk_of

from featcache.loader.local_copies import LocalCopies

BYTES = 4096


@pytest.fixture
def fast_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_that_copy_different_shards_do_not_meet(tmp_path, fast_switches):
    shard = SimpleNamespace(feature_blocks=lambda copy: [memoryview(bytes(BYTES))])
    version = SimpleNamespace(path="memory://b/v", shard=lambda name: shard)
    chunk = SimpleNamespace(num_bytes=BYTES - 4, dtype=np.dtype(np.uint8), shape=(BYTES - 4,))
    copies = LocalCopies(version, [f"{number:016x}" for number in range(80)], [disk_of(tmp_path)])
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda number: copies.features(number, chunk, 1), range(80)))
    assert len({copy.path for copy in found}) == 80
