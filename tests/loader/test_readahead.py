"""Cold batches are asked for ahead; warm ones, after a while, are not."""

import numpy as np
import pytest
from make_cache import make_features, make_version

import featcache
from featcache.storage import files
from featcache.storage.files import Readahead, map_file, will_need


@pytest.fixture
def asked(monkeypatch):
    arrays = []
    monkeypatch.setattr(files, "will_need", arrays.append)
    return arrays


def test_anything_may_be_asked_for_and_stays_as_it_is(tmp_path):
    data = np.arange(100_000, dtype=np.uint16)
    data.tofile(tmp_path / "file")
    with (tmp_path / "file").open("rb") as file:
        mapped = map_file(file.fileno(), data.nbytes).view(np.uint16)
    for array in (
        mapped,
        mapped[5000:5001],
        mapped[70_000:],
        mapped[:0],
        data,
        data[3:7],
        np.empty(0),
    ):
        before = array.copy()
        will_need(array)
        assert np.array_equal(array, before)


def test_it_asks_while_the_disk_is_read_and_some_batches_longer(asked, monkeypatch):
    reads = 0
    monkeypatch.setattr(files, "_disk_reads", lambda: reads)
    ahead, array = Readahead(), np.zeros(1)

    def batches(count, from_disk):
        nonlocal reads
        asked.clear()
        for _ in range(count):
            with ahead.over([array]):
                reads += from_disk
        return len(asked)

    assert batches(100, from_disk=0) == files._WARM_BATCHES
    assert batches(10, from_disk=3) == 9  # the first one tells
    assert batches(100, from_disk=0) == files._WARM_BATCHES


def test_a_batch_asks_for_what_it_reads_from_maps_and_for_nothing_else(tmp_path, asked):
    make_version(tmp_path, make_features(8), make_features(4, prefix="more"))
    plain, cache = featcache.open(tmp_path), featcache.open(tmp_path)
    expected = [plain[row] for row in (5, 1, 9)]
    cache.batch([5, 1, 9])
    assert all(map(np.array_equal, asked, expected))
    assert len(asked) == 3
    asked.clear()
    cache.batch([5, 2])
    assert len(asked) == 2
