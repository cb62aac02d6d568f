"""`verify --subset`: some of the shards now, the others another time, and all of them in the end."""

import shutil

import pytest
from cache_contents import only_version
from damage import CHUNKS, flip
from hypothesis import given
from hypothesis import strategies as st

from featcache.care.verify import Subset

NAMES = st.text("0123456789abcdef", min_size=12, max_size=12)


@given(NAMES, st.integers(1, 50))
def test_every_shard_is_in_one_subset(name, of):
    assert sum(Subset(number, of).has(name) for number in range(of)) == 1


def verified(cli, cache, subset, *more):
    found = cli("verify", cache, "--subset", subset, *more, "--json")
    (version,) = found.json()["versions"]
    return found.code, version


def test_all_subsets_look_at_all_shards_once(cli, plain, sound):
    found = [verified(cli, sound, f"{number}/3") for number in range(3)]
    assert [code for code, _ in found] == [0, 0, 0]
    assert sum(version["shards"] for _, version in found) == 3
    assert sum(version["utterances"] for _, version in found) == len(plain.rows)
    assert all(version["shards"] + version["shards_left_out"] == 3 for _, version in found)
    whole = cli("verify", sound, "--json").json()["versions"][0]
    for count in ("frames", "bytes"):
        assert sum(version[count] for _, version in found) == whole[count]


def test_damage_is_found_by_the_subset_it_is_in_and_by_no_other(cli, cache):
    version = only_version(cache)
    name = version.shard_names()[1]
    flip(version.shard(name).folder / CHUNKS["features"], 10)
    ours = next(number for number in range(4) if Subset(number, 4).has(name))
    for number in range(4):
        code, found = verified(cli, cache, f"{number}/4")
        assert code == (1 if number == ours else 0)
        assert [problem["shard"] for problem in found["problems"]] == ([name] if number == ours else [])


def test_what_concerns_all_shards_is_said_of_all_or_said_to_be_left_out(cli, plain, cache):
    """A manifest is compared with the whole version, whatever subset is read."""
    rows = [*plain.rows, {"id": "new", "path": "new.wav"}]
    manifest = plain.manifest(rows, "longer.csv")
    for number in range(3):
        code, found = verified(cli, cache, f"{number}/3", "--manifest", manifest)
        assert (code, [problem["id"] for problem in found["problems"]]) == (1, ["new"])
        assert found["surplus"] == 0
        (note,) = found["notes"]
        assert note.endswith("of 3 shards; utterances that are in two shards were not looked for")


def test_without_another_shards_metadata_what_concerns_all_is_left_out_and_that_is_damage(cli, plain, cache):
    version = only_version(cache)
    name = version.shard_names()[0]
    flip(version.shard(name).folder / "zarr.json", 300)
    shutil.rmtree(version.path / "index")
    other = next(number for number in range(5) if not Subset(number, 5).has(name))
    code, found = verified(cli, cache, f"{other}/5", "--manifest", plain.manifest(), "--sources")
    assert code == 1
    (problem,) = found["problems"]
    assert name in problem["message"]
    assert "without that shard, it was not looked at what is missing, changed or failed" in found["notes"]


@pytest.mark.parametrize("subset", ["3/3", "4/3", "0/0", "3", "/3", "3/", "a/b", "-1/3", "1.0/3", "³/5"])
def test_a_subset_that_there_is_not_is_refused(cli, sound, subset):
    refused = cli("verify", sound, f"--subset={subset}")
    assert (refused.code, "is not one of 0/N to N-1/N, such as 0/10" in refused.err) == (2, True)
