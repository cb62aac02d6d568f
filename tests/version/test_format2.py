"""Formats are kept: the cache in format2/, made when format 2 was new, opens, verifies
and is repaired."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from damage import flip
from pages import ROOT

import featcache
from featcache.care.verify import verify
from featcache.version.indexing import open_index
from featcache.version.ledger import standing_failures
from featcache.version.selection import select_version

# of the clips in examples/: one was extracted again, and one is missing
KEPT = Path(__file__).parent / "format2"
IDS = ["anna-1", "anna-2", "anna-3", "ben-1", "ben-2", "ben-3", "ben-4", "anna-4"]


@pytest.fixture
def kept(tmp_path) -> Path:
    return Path(shutil.copytree(KEPT / "cache", tmp_path / "cache"))


def test_it_opens_as_it_is_now_and_as_it_was(kept):
    cache = featcache.open(kept, strict=True, check=True)
    assert sorted(cache.ids) == sorted(IDS)
    assert cache.lengths.sum() == 1848
    values = np.concatenate([cache[id_] for id_ in sorted(cache.ids)])
    assert (values.shape, values.dtype) == ((1848, 4), np.float32)
    assert float(values.mean(dtype=np.float64)) == pytest.approx(14.015879280768432, abs=1e-9)
    before = featcache.open(kept, tag="first")
    assert np.array_equal(before["anna-4"], before["ben-4"])
    assert not np.array_equal(cache["anna-4"], cache["ben-4"])


def test_it_is_verified(kept):
    version = select_version(kept)
    report = verify(version)
    assert (report.problems, report.utterances, report.failed, report.shards) == ([], 8, 1, 2)
    assert not any(version.shard(name).info.finite for name in version.shard_names())
    (failure,) = standing_failures(version, open_index(version)).values()
    assert (failure.id, failure.reason) == ("nobody", "file_missing")


@pytest.mark.parametrize("name", ["features/c/0/0", "items/c/0/0", "text/zarr.json"])
def test_it_is_repaired(cli, kept, name):
    sound = featcache.open(kept, strict=True)
    expected = {id_: sound[id_].tobytes() for id_ in sound.ids}
    for shard in kept.glob("*/shards/*/"):
        flip(shard / name, 40)
    assert cli("verify", kept).code == 1
    manifest = ("--manifest", KEPT / "manifest.csv", "--root", ROOT / "examples")
    repaired = cli("repair", kept, *manifest, "--device", "cpu")
    assert repaired.code in (0, 3), repaired.err
    cache, version = featcache.open(kept, strict=True), select_version(kept)
    assert {id_: cache[id_].tobytes() for id_ in cache.ids} == expected
    assert all(version.shard(name).info.finite for name in version.shard_names())
    (verified,) = cli("verify", kept, *manifest, "--json").json()["versions"]
    # whose shard may be another now
    assert {problem["kind"] for problem in verified["problems"]} <= {"tag"}
