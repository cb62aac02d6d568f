"""A tag is a list of names of shards, which say what is in them: it holds as long as these are there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile
from cache_contents import check, items, only_version
from damage import CHUNKS, flip, mend, victim

import featcache
from featcache.version.index import open_index
from featcache.version.tags import make_tag

FEATURES = CHUNKS["features"]


def tag(cache: Path) -> dict[str, bytes]:
    make_tag(only_version(cache), "paper", open_index(only_version(cache)))
    return by_tag(cache)


def by_tag(cache: Path) -> dict[str, bytes]:
    opened = featcache.open(cache, tag="paper", check=True)
    return {id_: np.asarray(opened[id_]).tobytes() for id_ in opened.ids}


def test_a_tag_stays_whole_if_only_metadata_was_damaged(plain, sound, cache):
    """Then the files of the shard are written again, under its name."""
    before, shards = tag(cache), only_version(cache).shard_names()
    flip(victim(cache).folder / "features" / "zarr.json", 20)
    assert mend(cache, plain.manifest()).broken_tags == []
    assert by_tag(cache) == before
    assert only_version(cache).shard_names() == shards
    assert items(cache) == items(sound)


def test_a_tag_is_not_whole_if_other_bits_come_back(plain, scratch, cli):
    corpus, cache = plain.copy(scratch / "corpus"), scratch / "cache"
    assert cli("extract", corpus.manifest(), "-o", cache).code == 0
    tag(cache)
    (name,) = only_version(cache).shard_names()
    shard = only_version(cache).shard(name)
    row = next(row for row in corpus.rows if row["id"] == shard.table.ids[0])
    path = corpus.folder / row["path"]
    waveform, rate = soundfile.read(path)
    soundfile.write(path, waveform / 2, rate)
    flip(shard.folder / FEATURES, 7)
    assert mend(cache, corpus.manifest()).broken_tags == ["paper"]
    with pytest.raises(featcache.errors.StoreError, match="the tag paper names shards that are gone"):
        by_tag(cache)
    assert check(cache).problems[0].kind == "tag"
