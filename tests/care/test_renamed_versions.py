"""The folder of a version that was copied, or renamed: it is what it was, and says what it is."""

import shutil

import pytest
from cache_contents import check, items, only_version
from damage import CHUNKS, assert_repaired, flip, victim

import featcache
from featcache.version.selection import version_folders


@pytest.fixture
def renamed(cache):
    path = only_version(cache).path
    path.rename(path.with_name("fbank80-of-may"))
    return cache


def test_it_opens_and_is_not_damaged(cli, renamed, sound, plain):
    name = only_version(sound).path.name
    for arguments in ((), ("fbank80-of-may",), ("fbank80",)):
        assert len(featcache.open(renamed, *arguments)) == len(items(sound))
    verified = cli("verify", renamed, "--manifest", plain.manifest())
    assert (verified.code, verified.err) == (0, "")
    note = f"is a copy of {name}, or was renamed: extract adds to a version only under that name"
    assert note in verified.out
    assert "no damage found" in verified.out
    assert note in cli("info", renamed).out
    assert cli("info", renamed, "--json").json()["versions"][0]["original_name"] == name
    assert cli("info", sound, "--json").json()["versions"][0]["original_name"] is None
    nothing = cli("repair", renamed, "--manifest", plain.manifest())
    assert (nothing.code, "no damage found" in nothing.out) == (0, True)


def test_a_copy_beside_its_original_is_another_version_of_that_name(cli, cache, sound):
    path = only_version(cache).path
    shutil.copytree(path, path.with_name("copy"))
    verified = cli("verify", cache, "--json").json()
    assert verified["ok"]
    assert [len(version["notes"]) for version in verified["versions"]] == [1, 0]
    assert {id_: featcache.open(cache, "copy")[id_].tobytes() for id_ in items(sound)} == {
        id_: found[2] for id_, found in items(sound).items()
    }


@pytest.mark.parametrize("spoilt", ["an item", "all items of a shard", "its metadata"])
def test_repair_restores_it_where_it_is(cli, renamed, sound, plain, spoilt):
    """What is sound is copied, and what is damaged extracted, into this folder and no other."""
    if spoilt == "its metadata":
        (renamed / "fbank80-of-may" / "zarr.json").write_bytes(b"{}")
    else:
        flip(victim(renamed).folder / CHUNKS["features" if spoilt == "an item" else "items"], 100)
    assert cli("verify", renamed).code == 1
    assert_repaired(cli, renamed, sound, plain)
    assert [path.name for path in version_folders(renamed)] == ["fbank80-of-may"]


def test_repair_of_a_copy_leaves_the_original_alone(cli, cache, sound, plain):
    path, shard = only_version(cache).path, victim(cache).name
    copy = shutil.copytree(path, path.with_name("copy"))
    flip(copy / "shards" / shard / CHUNKS["features"], 100)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    repaired = cli("repair", copy, "--manifest", plain.manifest())
    assert repaired.code == 0, repaired.err
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    shutil.rmtree(path)
    assert items(cache) == items(sound)
    assert check(cache).problems == []


def test_a_link_of_the_right_name_is_not_renamed(renamed, sound):
    """A version on another disk, under any name, with a link in the cache."""
    path = renamed / "fbank80-of-may"
    moved = path.rename(renamed.parent / "elsewhere")
    (renamed / only_version(sound).path.name).symlink_to(moved)
    assert only_version(renamed).original_name is None
    assert check(renamed).notes == []
