"""Shards and versions that were copied, moved or renamed: each knows what it is, and none
is taken for another's."""

import shutil
from pathlib import Path

import pytest
from cache_contents import check, items, only_version, values_of
from damage import CHUNKS, assert_repaired, flip, mend, victim

import featcache
from featcache.care.verify import verify
from featcache.errors import DamagedError
from featcache.version.selection import version_folders
from featcache.version.version import Version


@pytest.fixture(scope="module")
def two(cli, plain, tmp_path_factory) -> Path:
    """A cache of two versions, at a frame shift of 10 and of 12.5 ms, each in some shards."""
    folder = tmp_path_factory.mktemp("two")
    for name, shift in (("a", 10.0), ("b", 12.5)):
        (folder / f"{name}.yaml").write_text(
            f"name: {name}\nextractor: fbank\nparams: {{frame_shift: {shift}}}\n"
        )
    configs = ("-c", folder / "a.yaml", "-c", folder / "b.yaml")
    assert (
        cli(
            "extract", plain.manifest(), *configs, "-o", folder / "cache", "--shard-size", "0.04"
        ).code
        == 0
    )
    return folder / "cache"


@pytest.fixture
def pair(two, scratch) -> tuple[Version, Version]:
    """A copy of both versions, to spoil."""
    return versions(Path(shutil.copytree(two, scratch / "cache")))


def versions(cache: Path) -> tuple[Version, Version]:
    a, b = (Version.open(path) for path in sorted(cache.glob("[ab]-*")))
    return a, b


def values(version: Version) -> dict[str, bytes]:
    return values_of(featcache.open(version.path, check=True, strict=True))


def test_shards_copied_beside_anothers_are_noticed_by_every_command_and_taken_away(
    cli, plain, two, pair
):
    a, b = pair
    shutil.copytree(b.path / "shards", a.path / "shards", dirs_exist_ok=True)
    what = f"belongs to another version ({b.info.fingerprint[:12]})"
    with pytest.raises(DamagedError, match=r"belongs to another version .*featcache repair"):
        featcache.open(a.path)
    for command in ("verify", "stats", "info"):
        finished = cli(command, a.path).with_code(1)
        assert what in finished.out + finished.err
    done = mend(a.path, plain.manifest())
    assert (done.extracted, done.aside, {*done.removed}) == (0, {}, {*b.shard_names()})
    for mended, before in zip(pair, versions(two), strict=True):
        assert mended.shard_names() == before.shard_names()
        assert values(mended) == values(before)
        assert verify(mended).problems == []


def test_a_shard_that_was_moved_goes_back_to_its_version_or_aside(plain, two, pair):
    """Aside, where its version is not in the cache; and can be moved back."""
    a, b = pair
    sound = values(versions(two)[0])
    first, second = a.shard_names()[:2]
    (a.path / "shards" / first).rename(b.path / "shards" / first)
    assert mend(b.path, plain.manifest()).aside == {}
    assert values(a) == sound
    (a.path / "shards" / second).rename(b.path / "shards" / second)
    elsewhere = a.path.rename(a.path.parent.parent / f"elsewhere-{a.path.parent.name}")
    try:
        ((place, fingerprint),) = mend(b.path, plain.manifest()).aside.items()
        assert fingerprint == a.info.fingerprint
        assert values(b) == values(versions(two)[1])
        Path(place).rename(elsewhere / "shards" / second)
        assert values(Version.open(elsewhere)) == sound
    finally:
        shutil.rmtree(elsewhere)


def test_a_shard_that_its_version_has_damaged_is_set_aside(plain, two, pair):
    """A copy of it in another version, which is sound, is not thrown away for that one;
    and is its cure."""
    a, b = pair
    sound = values(versions(two)[0])
    name = a.shard_names()[0]
    copy = shutil.copytree(a.shard(name).folder, b.path / "shards" / name)
    flip(a.shard(name).folder / CHUNKS["features"], 100)
    assert mend(b.path, plain.manifest()).aside == {f"{b.path}/aside/{name}": a.info.fingerprint}
    assert not copy.exists()
    shutil.rmtree(a.shard(name).folder)
    (b.path / "aside" / name).rename(a.path / "shards" / name)
    assert values(a) == sound


# The folder of a version that was copied, or renamed: it is what it was, and says what it is


@pytest.fixture
def renamed(cache):
    path = only_version(cache).path
    path.rename(path.with_name("fbank80-of-may"))
    return cache


def test_it_opens_and_is_not_damaged(cli, renamed, sound, plain):
    name = only_version(sound).path.name
    for arguments in ((), ("fbank80-of-may",), ("fbank80",)):
        assert len(featcache.open(renamed, *arguments)) == len(items(sound))
    verified = cli("verify", renamed, "--manifest", plain.manifest()).with_code(0, err="")
    note = f"is a copy of {name}, or was renamed: extract adds to a version only under that name"
    assert note in verified.out
    assert "no damage found" in verified.out
    assert note in cli("info", renamed).out
    assert cli("info", renamed, "--json").json()["versions"][0]["original_name"] == name
    assert cli("info", sound, "--json").json()["versions"][0]["original_name"] is None


def test_a_copy_beside_its_original_is_another_version_whose_repair_leaves_it_alone(
    cli, cache, sound, plain
):
    path, shard = only_version(cache).path, victim(cache).name
    copy = shutil.copytree(path, path.with_name("copy"))
    verified = cli("verify", cache, "--json").json()
    assert verified["ok"]
    assert [len(version["notes"]) for version in verified["versions"]] == [1, 0]
    assert values_of(featcache.open(cache, "copy")) == values_of(featcache.open(sound))
    flip(copy / "shards" / shard / CHUNKS["features"], 100)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    cli("repair", copy, "--manifest", plain.manifest()).with_code(0)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    shutil.rmtree(path)
    assert items(cache) == items(sound)
    assert check(cache).problems == []


@pytest.mark.parametrize("spoilt", ["an item", "all items of a shard", "its metadata"])
def test_repair_restores_it_where_it_is(cli, renamed, sound, plain, spoilt):
    """What is sound is copied, and what is damaged extracted, into this folder and no
    other."""
    if spoilt == "its metadata":
        (renamed / "fbank80-of-may" / "zarr.json").write_bytes(b"{}")
    else:
        flip(victim(renamed).folder / CHUNKS["features" if spoilt == "an item" else "items"], 100)
    assert cli("verify", renamed).code == 1
    assert_repaired(cli, renamed, sound, plain)
    assert [path.name for path in version_folders(renamed)] == ["fbank80-of-may"]


def test_a_link_of_the_right_name_is_not_renamed(renamed, sound):
    """A version on another disk, under any name, with a link in the cache."""
    path = renamed / "fbank80-of-may"
    moved = path.rename(renamed.parent / "elsewhere")
    (renamed / only_version(sound).path.name).symlink_to(moved)
    assert only_version(renamed).original_name is None
    assert check(renamed).notes == []
