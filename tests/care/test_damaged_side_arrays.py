"""Damage to side arrays is found and repaired, as in the columns of a shard."""

from __future__ import annotations

from pathlib import Path

import pytest
from cache_contents import check, items, only_version
from damage import FILES, SPOIL, each_flip, flip, victim
from extractions import write_config
from make_cache import make_features, make_version

import featcache
from featcache.care.verify import examine_shard
from featcache.format.shard import Shard
from featcache.spec import SideSpec
from featcache.version.version import Version

SIDE = SideSpec("scales", (), "float32", "loudness"), SideSpec("marks", (2,), "uint16", "where from and where to")
SIDE_FILES = ["side_scales/zarr.json", "side_marks/zarr.json", "side_scales/c/0", "side_marks/c/0/0"]


@pytest.fixture
def sided(scratch) -> tuple[Version, Shard]:
    """A version with side arrays, to spoil, and the first of its two shards."""
    parts = [make_features(4, (2,), "float32", prefix=prefix, max_frames=12, seed=3) for prefix in "ab"]
    version = make_version(scratch, *parts, side=SIDE)
    assert check(scratch).problems == []
    shard = version.shard(version.shard_names()[0])
    found = {str(path.relative_to(shard.folder)) for path in shard.folder.rglob("*") if path.is_file()}
    assert found == {*FILES, *SIDE_FILES}
    return version, shard


@pytest.mark.parametrize("file", SIDE_FILES)
def test_a_flipped_bit_in_any_byte_of_a_side_array_is_found(sided, file):
    """Of its entries, of their checksum, and of its metadata."""
    version, shard = sided
    for _ in each_flip(shard.folder / file):
        (problem,) = examine_shard(version, shard.name, False).problems
        assert (problem.kind, problem.shard) == ("checksum", shard.name)
        assert file.partition("/")[0] in problem.message
    assert examine_shard(version, shard.name, True).problems == []


@pytest.mark.parametrize("file", SIDE_FILES)
@pytest.mark.parametrize("spoil", SPOIL[:5], ids=lambda spoil: spoil.__name__)
def test_a_spoilt_file_of_a_side_array_is_found(sided, file, spoil):
    """Gone, empty, a byte too short or too long, a folder."""
    version, shard = sided
    spoil(shard.folder / file)
    assert {problem.shard for problem in examine_shard(version, shard.name, False)[1]} == {shard.name}


def side_files(cache: Path) -> dict[str, bytes]:
    """Every file of the side arrays in a cache's one version."""
    shards = only_version(cache).path / "shards"
    return {str(path.relative_to(shards)): path.read_bytes() for path in shards.glob("*/side_*/**/*") if path.is_file()}


def test_a_damaged_side_array_is_extracted_again(cli, plain, scratch):
    """With the rest of its shard, by an extractor that gives, beside the features, how many frames there are."""
    config = write_config(scratch, "Moments", module="row_extractors")
    cache = scratch / "cache"
    assert cli("extract", plain.manifest(), "-o", cache, "-c", config, "--shard-size", "0.0008").code == 0
    names, sound, features = only_version(cache).shard_names(), side_files(cache), items(cache)
    assert len(names) > 2
    assert len(sound) == 2 * len(names)
    opened = featcache.open(cache)
    assert [opened.side("counts", id_).tolist() for id_ in opened.ids] == [[len(opened[id_])] for id_ in opened.ids]
    shard = victim(cache)
    flip(shard.folder / "side_counts" / "c" / "0", 9)
    verified = cli("verify", cache, "--no-data")
    assert verified.code == 1
    assert "side_counts/c/0: damaged: its checksum does not match" in verified.out
    refused = cli("repair", cache, "--manifest", plain.manifest())
    assert (refused.code, only_version(cache).shard_names()) == (2, names)
    assert "names row_extractors:Moments, which is not a registered extractor; --trust-remote-code" in refused.err
    assert cli("repair", cache, "--manifest", plain.manifest(), "--trust-remote-code").code == 0
    assert (only_version(cache).shard_names(), side_files(cache), items(cache)) == (names, sound, features)
    assert cli("verify", cache, "--manifest", plain.manifest()).code == 0
