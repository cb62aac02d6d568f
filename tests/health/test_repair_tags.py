"""A tag holds what it names by its bits: a repair that brings all of them back leaves it whole."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile
from cache_contents import check, items, only_version
from damage import CHUNKS, delete, flip, victim
from make_cache import add_shard

import featcache
from featcache.extraction.plan import Options
from featcache.health.repair import Repaired, repair
from featcache.manifest import read_manifest
from featcache.store.index import open_index
from featcache.store.tags import make_tag

FEATURES = CHUNKS["features"]
SPOILT = {
    "a bit": lambda chunk: flip(chunk, 7),
    "its end": lambda chunk: os.truncate(chunk, chunk.stat().st_size // 2),
    "all": delete,
    "metadata": lambda chunk: flip(chunk.parents[2] / "zarr.json", 20),
}


def mend(cache: Path, manifest: Path) -> Repaired:
    return repair(only_version(cache).path, read_manifest(manifest), Options("cpu", 1))


def tag(cache: Path) -> dict[str, bytes]:
    version = only_version(cache)
    index = open_index(version, keep=True)
    make_tag(version, "paper", index.shards, len(index))
    return by_tag(cache)


def by_tag(cache: Path) -> dict[str, bytes]:
    opened = featcache.open(cache, tag="paper", check=True)
    return {id_: np.asarray(opened[id_]).tobytes() for id_ in opened.ids}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_a_tag_stays_whole_if_all_bits_come_back(plain, sound, cache, spoil):
    before = tag(cache)
    shards = only_version(cache).shard_names()
    spoil(victim(cache).folder / FEATURES)
    done = mend(cache, plain.manifest())
    assert len(done.removed) == 1
    assert done.broken_tags == []
    assert by_tag(cache) == before
    assert only_version(cache).shard_names() == shards
    assert items(cache) == items(sound)
    report = check(cache, manifest=read_manifest(plain.manifest()))
    assert (report.problems, report.repeated) == ([], 0)
    featcache.open(cache, strict=True)
    assert not list(only_version(cache).path.glob("work/*"))


def test_what_has_been_replaced_since_it_was_tagged_comes_back_too(plain, cache):
    version, shard = only_version(cache), victim(cache)
    before, replaced = tag(cache), shard.ids[1]
    features = {replaced: np.zeros((3, *version.info.spec.item_shape), version.dtype)}
    add_shard(version, features, row=99, supersedes={shard.name: [1]}, run="run 2")
    now = items(cache)
    flip(shard.folder / FEATURES, 7)
    assert mend(cache, plain.manifest()).broken_tags == []
    assert by_tag(cache) == before
    assert items(cache) == now


def test_a_tag_is_not_whole_if_other_bits_come_back(plain, scratch, cli):
    corpus, cache = plain.copy(scratch / "corpus"), scratch / "cache"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    tag(cache)
    (name,) = only_version(cache).shard_names()
    shard = only_version(cache).shard(name)
    row = next(row for row in corpus.rows if row["id"] == shard.ids[0])
    path = corpus.folder / row["path"]
    waveform, rate = soundfile.read(path)
    soundfile.write(path, waveform / 2, rate)
    flip(shard.folder / FEATURES, 7)
    assert mend(cache, corpus.manifest()).broken_tags == ["paper"]
    with pytest.raises(featcache.errors.DamagedError, match="the tag paper is no longer whole"):
        by_tag(cache)
    assert check(cache).problems[0].kind == "tag"
