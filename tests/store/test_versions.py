"""Versions are made once, found again, and told apart."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st
from small_shards import INFO, SIDED, elsewhere

from featcache.errors import DamagedError, StoreError
from featcache.store import zarr3
from featcache.store.selection import differing_keys, select_version, select_versions, version_folders
from featcache.store.version import Version


def test_a_version_is_found_again(scratch):
    """By its folder, by its cache, by its name; and it says what it is."""
    made = Version.create(scratch, INFO)
    assert made.path == scratch / "mine-0123456789ab"
    assert Version.create(scratch, INFO).info == made.info == INFO
    assert version_folders(scratch) == version_folders(made.path) == [made.path]
    assert select_version(scratch, "mine").path == made.path
    assert select_version(scratch, "mine-0123456789ab").path == made.path
    group = zarr.open_group(made.path, mode="r")
    assert list(group["shards"].group_keys()) == []
    assert group.attrs["featcache"]["format"] == 1


def test_a_version_says_what_its_side_arrays_are(scratch):
    """They come back as they went in; where there are none, nothing is said of them."""
    assert Version.create(scratch, SIDED).info == SIDED
    assert (
        "side"
        not in json.loads((Version.create(scratch / "b", INFO).path / "zarr.json").read_text())["attributes"][
            "featcache"
        ]["spec"]
    )


def test_what_a_kill_left_of_a_version_goes_when_it_is_old(scratch):
    """A day old, for a name that does not say who made it; what another process may be at work on stays."""
    day = 86400 + 60
    old, young = scratch / ".mine-0123456789ab.00ff00ff", scratch / ".mine-0123456789ab.11ff00ff"
    others = [scratch / ".mine-0123456789ab", scratch / ".snapshot", scratch / "mine-0123456789ab.00ff00ff"]
    for folder in (old, young, *others):
        (folder / "shards").mkdir(parents=True)
        if folder != young:
            os.utime(folder / "shards", (time.time() - day,) * 2)
            os.utime(folder, (time.time() - day,) * 2)
    for _ in range(2):
        path = Version.create(scratch, INFO).path
        assert sorted(scratch.iterdir()) == sorted([path, young, *others])
    os.utime(young / "shards", (time.time() - day,) * 2)
    os.utime(young, (time.time() - day,) * 2)
    Version.create(scratch, INFO)
    assert not young.exists()


def test_several_versions_of_a_name_are_told_apart(scratch):
    """Asked for the name alone, it says how they differ."""
    Version.create(scratch, replace(INFO, config={"params": {"low_freq": 20.0, "bins": 80}}))
    Version.create(scratch, replace(INFO, fingerprint="f" * 64, config={"params": {"low_freq": 0.0, "bins": 80}}))
    with pytest.raises(StoreError, match=r"2 versions.*params.low_freq: 20.0 -> 0.0"):
        select_version(scratch, "mine")
    assert select_version(scratch, "mine-ffffffffffff").info.fingerprint == "f" * 64
    with pytest.raises(StoreError, match="no version called 'yours'; it holds mine-"):
        select_version(scratch, "yours")


def test_damage_to_one_version_does_not_hide_another(scratch):
    """Whoever asks for a version by name gets it."""
    Version.create(scratch, INFO)
    other = Version.create(scratch, replace(INFO, name="other"))
    (other.path / "zarr.json").write_text("{}")
    assert select_version(scratch, "mine").info == INFO
    for name in (None, "other", other.path.name):
        with pytest.raises(DamagedError):
            select_versions(scratch, name)


def test_what_is_no_cache_is_said_to_be_none(scratch):
    """A folder that is not there, a file, an empty folder."""
    (scratch / "file").write_text("")
    for path, words in (
        (scratch / "gone", "no such cache"),
        (scratch / "file", "no such cache"),
        (scratch, "no version"),
    ):
        with pytest.raises(StoreError, match=words):
            version_folders(path)


def test_a_version_that_is_misspelt_says_which_there_are(scratch):
    """As part of the path."""
    made = Version.create(scratch, INFO)
    with pytest.raises(StoreError, match=f"mien: there is no such cache folder; {scratch} holds {made.path.name}$"):
        version_folders(scratch / "mien")


def test_a_path_may_name_a_version_by_its_config(scratch):
    """Where the cache holds one of that name; its metadata may be damaged. A folder of that name comes first."""
    made = Version.create(scratch, INFO)
    Version.create(scratch, replace(INFO, name="other"))
    assert version_folders(scratch / "mine") == [made.path]
    assert [version.path for version in select_versions(scratch / "mine")] == [made.path]
    assert select_version(scratch / "mine").path == made.path
    damage = bytearray((made.path / "zarr.json").read_bytes())
    damage[-30] ^= 1
    (made.path / "zarr.json").write_bytes(damage)
    assert version_folders(scratch / "mine") == [made.path]
    again = Version.create(scratch, replace(INFO, fingerprint="f" * 64))
    for ask in (version_folders, select_version):
        with pytest.raises(StoreError, match=f"{scratch}: holds 2 versions: {made.path.name}, {again.path.name}; name"):
            ask(scratch / "mine")
    (scratch / "mine").mkdir()
    with pytest.raises(StoreError, match="mine: holds no version"):
        version_folders(scratch / "mine")


def test_a_version_of_a_newer_format_is_refused(scratch):
    """With the way out."""
    made = Version.create(scratch, INFO)
    attributes = zarr3.read_group(made.path)
    (made.path / "zarr.json").write_bytes(zarr3.group_metadata({**attributes, "format": 2, "news": True}))
    with pytest.raises(StoreError, match="has format 2; this featcache reads format 1: upgrade it"):
        Version.open(made.path)


@given(
    st.dictionaries(
        st.sampled_from("abc"), st.dictionaries(st.sampled_from("xyz"), st.integers(0, 2)) | st.integers(0, 2)
    )
)
def test_configs_differ_from_themselves_in_nothing(config):
    """And from others in what differs."""
    assert differing_keys(config, config) == []
    assert differing_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == ["a.c: 2 -> 3"]
    assert differing_keys({"a": {"b": 1}}, {"a": {"b": 1, "c": 3}}) == ["a.c: not given -> 3"]


def test_two_processes_create_one_version(scratch):
    """Started at the same instant, in a cache that is not there yet: both get it, and nothing else is left."""
    code = "print(flush=True); sys.stdin.read(); print(Version.create(Path(sys.argv[1]), INFO).path)"
    processes = [elsewhere(code, scratch / "cache") for _ in range(3)]
    for process in processes:
        process.stdout.readline()
    outputs = [process.communicate()[0] for process in processes]
    assert {output.strip() for output in outputs} == {str(scratch / "cache" / "mine-0123456789ab")}
    assert [path.name for path in (scratch / "cache").iterdir()] == ["mine-0123456789ab"]
    assert Version.open(scratch / "cache" / "mine-0123456789ab").info == INFO
