"""Whole shards are taken away, exchanged, or there twice: verify says which, and repair and extract restore them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from cache_contents import check, items, only_version
from promises import assert_is_after

from featcache.manifest.read import read_manifest


@pytest.fixture(scope="module")
def other(faulty, from_nothing, config, kept) -> Path:
    """The shards of another config."""
    path = kept / "other.yaml"
    path.write_text(config.read_text().replace("tiny", "other").replace("4}", "4, high_freq: -100}"))
    command = [path if argument == config else argument for argument in from_nothing.command]
    faulty(*from_nothing.arguments(kept / "other", command)).with_code(3)
    return only_version(kept / "other").path / "shards"


def exchange(shard: Path) -> None:
    first, second = sorted(path for path in shard.parent.iterdir() if path.is_dir())
    first.rename(shard.parent / ".aside")
    second.rename(first)
    (shard.parent / ".aside").rename(second)


def halve_chunks(shard: Path) -> None:
    for path in shard.rglob("0"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


SPOIL = {
    "gone": lambda shard, other: shutil.rmtree(shard),
    "emptied": lambda shard, other: (shutil.rmtree(shard), shard.mkdir()),
    "twice": lambda shard, other: shutil.copytree(shard, shard.with_name("0123456789abcdef")),
    "exchanged inside": lambda shard, other: exchange(shard),
    "of another version": lambda shard, other: (shutil.rmtree(shard), shutil.copytree(min(other.glob("*/")), shard)),
    "cut off": lambda shard, other: halve_chunks(shard),
}
"""What happens to a shard; `other` has the shards of another version."""


@pytest.mark.parametrize("how", SPOIL)
def test_a_shard_that_is_not_in_its_place(faulty, from_nothing, other, trials, how):
    """The items of it, and no others, are named; afterwards the cache is as it was."""
    cache = from_nothing.prepare(trials / "cache")
    assert faulty(*from_nothing.arguments(cache)).code == 3
    version = only_version(cache)
    names, sound = version.shard_names(), items(cache)
    shard = version.shard(names[0])
    ids = set(shard.table.ids)
    SPOIL[how](shard.folder, other)
    report = check(cache, manifest=read_manifest(from_nothing.manifest))
    assert report.problems
    if how == "gone":
        assert {problem.id for problem in report.problems if problem.id} == ids
    elif how == "twice":
        assert report.damaged_shards == ["0123456789abcdef"]
    else:
        assert {shard.name} <= {*report.damaged_shards} <= {*names}
    for command in (("repair", cache, "--manifest", from_nothing.manifest), from_nothing.arguments(cache)):
        ended = faulty(*command)
        assert ended.code in (0, 3), ended
    assert items(cache) == sound
    # what is kept of a damaged shard is in a shard of another name
    assert_is_after(replace(from_nothing, shards=frozenset()), cache, how)
