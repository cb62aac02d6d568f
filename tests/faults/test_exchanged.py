"""Whole shards are taken away, exchanged, or there twice: verify says which, and repair
and extract restore them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cache_contents import check, items, only_version
from damage import CHUNKS
from hostile_caches import reseal
from promises import assert_is_after

from featcache.manifest.read import read_manifest


def exchange(shard: Path) -> None:
    first, second = sorted(path for path in shard.parent.iterdir() if path.is_dir())
    first.rename(shard.parent / ".aside")
    second.rename(first)
    (shard.parent / ".aside").rename(second)


SPOIL = {
    "gone": shutil.rmtree,
    "emptied": lambda shard: (shutil.rmtree(shard), shard.mkdir()),
    "twice": lambda shard: shutil.copytree(shard, shard.with_name("0123456789abcdef")),
    "exchanged": exchange,
    "of another version": lambda shard: reseal(shard, lambda it: it.update(fingerprint="f" * 64)),
    "cut off": lambda shard: [os.truncate(shard / chunk, 9) for chunk in CHUNKS.values()],
}
"""What happens to a shard."""


@pytest.mark.parametrize("how", SPOIL)
def test_a_shard_that_is_not_in_its_place(faulty, from_nothing, trials, how):
    """The items of it, and no others, are named; afterwards the cache is as it was."""
    cache = from_nothing.prepare(trials / "cache")
    assert faulty(*from_nothing.arguments(cache)).code == 3
    version = only_version(cache)
    names, sound = version.shard_names(), items(cache)
    shard = version.shard(names[0])
    ids = set(shard.table.ids)
    SPOIL[how](shard.folder)
    report = check(cache, manifest=read_manifest(from_nothing.manifest))
    assert report.problems
    if how == "gone":
        assert {problem.id for problem in report.problems if problem.id} == ids
    elif how == "twice":
        assert report.damaged_shards == ["0123456789abcdef"]
    else:
        assert {shard.name} <= {*report.damaged_shards} <= {*names}
    for command in (
        ("repair", cache, "--manifest", from_nothing.manifest),
        from_nothing.arguments(cache),
    ):
        ended = faulty(*command)
        assert ended.code in (0, 3), ended
    assert items(cache) == sound
    # what is kept of a damaged shard is in a shard of another name
    assert_is_after(replace(from_nothing, shards=frozenset()), cache, how)
