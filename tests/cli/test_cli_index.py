"""`featcache index` builds the index once, after all jobs of an array."""

from __future__ import annotations

import json
import os

from cache_contents import only_version

from featcache.version.index import load_index


def test_index_is_built_once(cli, plain, scratch):
    for number in range(2):
        assert cli("extract", plain.manifest(), "-o", scratch, "--partition", f"{number}/2").code == 0
    version = only_version(scratch)
    assert load_index(version, version.shard_names()) is None
    assert "index built" in cli("index", scratch).out
    assert len(load_index(version, version.shard_names())) == 12
    ended = cli("index", scratch, "--json")
    assert json.loads(ended.out)["versions"][0]["built"] is False
    assert ended.err == ""


def test_index_says_what_is_missing_and_that_it_could_not_be_written(cli, plain, scratch):
    assert cli("extract", plain.manifest(), "-o", scratch, "--partition", "0/1", "--shard-size", "0.03").code == 0
    assert cli("extract", plain.manifest(), "-o", scratch / "b", "--partition", "0/2", "--shard-size", "0.03").code == 0
    ended = cli("index", scratch / "b")
    assert ended.code == 0
    assert "5 of the 12 utterances of" in ended.err
    (version,) = scratch.glob("fbank80-*")
    os.symlink(scratch, version / "index")
    ended = cli("index", version)
    assert ended.code == 1
    assert "index: is a symbolic link to" in ended.err
