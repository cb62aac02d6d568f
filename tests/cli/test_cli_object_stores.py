"""Commands that read a cache take the URL of one, and say the same of it as of its folder."""

import json
from http.client import HTTPConnection

import pytest
from make_cache import make_features, make_version
from manifests import manifest_of
from object_stores import upload

import featcache

pytest.importorskip("obstore")


@pytest.fixture
def places(s3, tmp_path):
    """A cache in a folder, and the same in S3."""
    items = list(make_features(40).items())
    make_version(tmp_path / "c", dict(items[:25]), dict(items[25:]))
    featcache.open(tmp_path / "c")  # which builds the index
    upload(tmp_path / "c", "s3://speech/cli")
    return str(tmp_path / "c"), "s3://speech/cli"


def test_they_say_the_same(cli, s3, places):
    for args in ("info", "verify", "verify --no-data", "show utt-3", "stats", "report"):
        said = []
        for place in places:
            command, *rest = args.split()
            finished = cli(command, place, *rest, "--json", env=s3.environment).with_code(0)
            said.append(json.loads(finished.out.replace(place, "CACHE")))
        assert said[0] == said[1], args
    named = cli("info", f"{places[1]}/fbank80", env=s3.environment)
    assert (named.code, named.out.startswith(f"{places[1]}/fbank80-")) == (0, True), named.err


def test_info_and_ls_ask_the_index_and_no_tables_or_data_of_shards(cli, s3, places):
    for command, runs in (("info", 1), ("ls", 0)):
        s3.reset()
        assert cli(command, places[1], env=s3.environment).code == 0
        asked = {path.partition("/shards/")[2] for _, path in s3.paths} - {"", "zarr.json"}
        assert len(asked) == runs  # for the libraries, the document of one shard of each run
        assert all(name.count("/") == 1 and name.endswith("/zarr.json") for name in asked)


def test_what_is_not_wanted_is_removed(cli, s3, places, tmp_path):
    _, url = places
    rows = [(f"utt-{number}", f"audio/utt-{number}.wav") for number in range(20)]
    wanted = manifest_of(tmp_path, rows, ("id", "path"))
    pruned = cli(
        "prune", url, "--manifest", wanted, "--force", "--yes", "--json", env=s3.environment
    ).with_code(0)
    (version,) = pruned.json()["versions"]
    assert (version["unwanted"], version["pruned"]["removed"], version["pruned"]["rewritten"]) == (
        20,
        2,
        1,
    )
    verified = cli("verify", url, env=s3.environment)
    assert (verified.code, "1 shard, 20 utterances" in verified.out) == (0, True), verified
    cli("rm", f"{url}/fbank80", "--yes", env=s3.environment).with_code(0)
    assert "there is no such cache" in cli("info", url, env=s3.environment).err


@pytest.mark.parametrize(("prefix", "key"), [("odd-1", "/a"), ("odd-2", "../a")])
def test_a_key_that_is_no_path_is_named(cli, s3, places, prefix, key):
    upload(places[0], f"s3://speech/{prefix}")
    connection = HTTPConnection("127.0.0.1", s3.port, timeout=30)
    connection.request("PUT", f"/speech/{prefix}/{key}", b"anything")
    assert connection.getresponse().status == 200
    connection.close()
    for command in ("verify", "info"):
        ended = cli(command, f"s3://speech/{prefix}", env=s3.environment).with_code(1)
        assert f"the bucket holds {prefix}/{key[:-1]}" in ended.err
        assert "remove that object, or rename it" in ended.err
