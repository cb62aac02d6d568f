"""Tags: what is read by one is what was there when it was made, whatever happens to the version since."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import uuid

import numpy as np
import pytest
from make_cache import add_shard, make_features, make_version

import featcache
from featcache.errors import ArgumentError, DamagedError, StoreError
from featcache.health.verify import verify
from featcache.storage.location import parse_location
from featcache.store.copying import copy_version
from featcache.store.documents import UNSEALED, seal
from featcache.store.index import index_folder, open_index
from featcache.store.prune import plan_prune
from featcache.store.selection import select_version, version_folders
from featcache.store.tags import at_tag, make_tag, remove_tag, tag_file, tag_names
from featcache.store.version import Version

RUN = "run {}"
ODD_TAGS = [
    b"",
    b"[]",
    b'{"checksum": "00000000"}',
    json.dumps({"sealed": True}).encode(),
]


def tag(version: Version, name: str):
    index = open_index(version, keep=True)
    return make_tag(version, name, index.shards, len(index))


def contents(cache) -> dict[str, bytes]:
    return {id_: np.asarray(cache[id_]).tobytes() for id_ in cache.ids}


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    """A place for a cache."""
    if request.param == "folder":
        return tmp_path / "features"
    pytest.importorskip("obstore")
    return parse_location("cache", f"memory://{uuid.uuid4()}/features")


@pytest.fixture
def tagged(place):
    """A version of twelve utterances in two shards, tagged `paper`; then one is replaced, and one added."""
    version = make_version(place)
    items = list(make_features(12).items())
    first = add_shard(version, dict(items[:6]), run=RUN.format(1))
    add_shard(version, dict(items[6:]), row=6, run=RUN.format(1))
    tag(version, "paper")
    newer = {"utt-3": items[0][1], "utt-new": items[1][1]}
    add_shard(version, newer, row=12, supersedes={first: [3]}, run=RUN.format(2))
    return version, dict(items), newer


def test_a_tag_gives_what_was_current_when_it_was_made(tagged, place):
    version, before, newer = tagged
    given = place if isinstance(place, os.PathLike) else str(place)
    by_tag = featcache.open(given, tag="paper")
    assert contents(by_tag) == {id_: array.tobytes() for id_, array in before.items()}
    now = contents(featcache.open(given))
    assert now["utt-3"] == newer["utt-3"].tobytes()
    assert len(now) == 13
    assert contents(featcache.open(f"{given}@paper")) == contents(by_tag)
    assert contents(featcache.open(f"{given}/fbank80@paper")) == contents(by_tag)
    assert contents(pickle.loads(pickle.dumps(by_tag))) == contents(by_tag)
    report = verify(at_tag(version, "paper"))
    assert (report.problems, report.utterances, report.shards) == ([], 12, 2)


def test_a_tag_never_changes_and_can_be_removed(tagged):
    version = tagged[0]
    with pytest.raises(ArgumentError, match="tags never change"):
        tag(version, "paper")
    tag(version, "v2")
    assert tag_names(version) == ["paper", "v2"]
    remove_tag(version, "paper")
    with pytest.raises(StoreError, match="has no tag paper; it has v2"):
        select_version(version.path.parent / f"{version.path.name}@paper")
    with pytest.raises(StoreError, match="has no tag paper"):
        remove_tag(version, "paper")


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-x", "a b", "x" * 101, "ü"])
def test_names_that_are_no_names(tmp_path, name):
    version = make_version(tmp_path, make_features(2))
    with pytest.raises(ArgumentError, match="no name for a tag"):
        tag(version, name)
    assert not (version.folder / "tags").exists()


def test_an_empty_version_is_not_tagged(tmp_path):
    with pytest.raises(ArgumentError, match="holds nothing yet"):
        tag(make_version(tmp_path), "paper")


def test_a_shard_of_a_tag_that_is_gone_is_named_with_the_tag(tagged, place):
    version, _, _ = tagged
    if not isinstance(place, os.PathLike):
        pytest.skip("removes a folder")
    gone = open_index(at_tag(version, "paper")).shards[0]
    shutil.rmtree(version.folder / "shards" / gone)
    with pytest.raises(DamagedError, match=f"the tag paper is no longer whole: .*{gone} is gone"):
        featcache.open(place, tag="paper")
    assert [problem.kind for problem in verify(version).problems] == ["tag"]


def test_the_same_items_made_anew_are_not_taken_for_the_tagged_ones(tagged, place):
    """A redo of the same rows has the same name, and may have other bits."""
    version, before, _ = tagged
    if not isinstance(place, os.PathLike):
        pytest.skip("removes a folder")
    index = open_index(at_tag(version, "paper"))
    name = index.shards[1]
    shutil.rmtree(version.folder / "shards" / name)
    redo = {id_: before[id_] + np.float16(0.5) for id_ in list(before)[6:]}
    assert add_shard(version, redo, row=6, run=RUN.format(3)) == name
    by_tag = featcache.open(place, tag="paper")
    assert np.asarray(by_tag["utt-0"]).tobytes() == before["utt-0"].tobytes()
    with pytest.raises(DamagedError, match="the tag paper is no longer whole"):
        by_tag["utt-7"]
    assert [problem.kind for problem in verify(version).problems] == ["tag"]
    assert [problem.shard for problem in verify(at_tag(version, "paper")).problems] == [name]


def test_a_copy_has_the_tags_and_keeps_its_own(tagged, tmp_path):
    version = tagged[0]
    done = copy_version(version, tmp_path / "copy")
    copy = Version.open(tmp_path / "copy" / version.path.name)
    assert done.problems == []
    assert tag_names(copy) == ["paper"]
    assert len(open_index(at_tag(copy, "paper"))) == 12
    remove_tag(copy, "paper")
    tag(copy, "paper")
    assert [problem.kind for problem in copy_version(version, tmp_path / "copy").problems] == ["tag"]
    assert len(open_index(at_tag(copy, "paper"))) == 13
    remove_tag(version, "paper")
    assert copy_version(version, tmp_path / "copy").problems == []


def test_the_index_of_a_tag_stays_and_does_not_displace_the_versions(tmp_path):
    version = make_version(tmp_path, make_features(3))
    tag(version, "first")
    of_tag = index_folder(version, version.shard_names())
    for number in range(5):
        add_shard(version, make_features(2, seed=number, prefix=f"more{number}"), row=3 + 2 * number)
        open_index(version)
    now = index_folder(version, version.shard_names())
    assert of_tag.exists()
    written = (of_tag / "index.json").stat().st_mtime_ns, (now / "index.json").stat().st_mtime_ns
    featcache.open(tmp_path, tag="first"), featcache.open(tmp_path)
    assert ((of_tag / "index.json").stat().st_mtime_ns, (now / "index.json").stat().st_mtime_ns) == written
    assert len(os.listdir(of_tag.parent)) == 4


@pytest.mark.parametrize("odd", [*ODD_TAGS, "another version's", "a shard elsewhere", "a pipe", "huge"], ids=str)
def test_odd_tags_are_refused_in_one_line(tmp_path, odd):
    version = make_version(tmp_path, make_features(3))
    tag(version, "paper")
    place = tag_file(version, "paper")
    document = json.loads(place.read_bytes())
    document["checksum"] = UNSEALED
    if odd == "another version's":
        place.write_bytes(seal({**document, "fingerprint": "0" * 64}))
    elif odd == "a shard elsewhere":
        place.write_bytes(seal({**document, "shards": {"../../other": "00000000"}}))
    elif odd == "a pipe":
        place.unlink()
        os.mkfifo(place)
    elif odd == "huge":
        with place.open("wb") as file:
            file.truncate(1 << 40)
    else:
        place.write_bytes(odd)
    with pytest.raises(DamagedError, match=r"paper\.json: (damaged|is a tag of another)"):
        featcache.open(tmp_path, tag="paper")
    assert len(featcache.open(tmp_path)) == 3
    assert [problem.kind for problem in verify(version).problems] == ["tag"]
    remove_tag(version, "paper")
    assert verify(version).problems == []


def test_of_two_versions_the_one_that_has_the_tag_is_meant(tmp_path):
    old, new = (make_version(tmp_path, make_features(3), params={"low_freq": hertz}) for hertz in (20.0, 0.0))
    tag(old, "paper")
    assert featcache.open(tmp_path, "fbank80", tag="paper").version.path == old.path
    assert featcache.open(f"{tmp_path}@paper").version.path == old.path
    assert featcache.open(f"{tmp_path}/fbank80@paper").version.path == old.path
    for given in ((tmp_path, "fbank80", "other"), (f"{tmp_path}/fbank80@other",), (f"{tmp_path}@other",)):
        with pytest.raises(StoreError, match=f"none of its 2 versions has a tag other: .*{old.path.name}"):
            featcache.open(given[0], *given[1:2], tag=given[2] if given[2:] else None)
    with pytest.raises(ArgumentError, match="'' is no name for a tag"):
        featcache.open(old.path, tag="")
    tag(new, "paper")
    for given in (f"{tmp_path}@paper", f"{tmp_path}/fbank80@paper"):
        with pytest.raises(StoreError, match=r"holds 2 versions with a tag paper: fbank80-.*@paper.*low_freq"):
            featcache.open(given)
    with pytest.raises(StoreError, match="holds 2 versions: "):
        featcache.open(f"{tmp_path}/fbank80")


def test_files_with_other_names_are_no_tags(tmp_path):
    version = make_version(tmp_path / "cache", make_features(3))
    tag(version, "paper")
    for name in ("a b.json", "\x1b[31m.json", "-x.json", ".hidden.json", "paper.json.orig", "é.json"):
        (version.folder / "tags" / name).touch()
    assert tag_names(version) == ["paper"]
    assert verify(version).problems == []
    assert copy_version(version, tmp_path / "copy").problems == []


def test_without_the_folder_of_tags_nobody_knows_what_they_keep(tmp_path):
    version = make_version(tmp_path, make_features(3))
    (version.folder / "tags").symlink_to("tags")  # which cannot be read, even by root
    assert len(featcache.open(tmp_path)) == 3
    for look in (tag_names, plan_prune, verify):
        with pytest.raises(StoreError, match="tags: cannot be read: Too many levels of symbolic links"):
            look(version)


def test_tags_are_not_written_through_a_link(tmp_path):
    version = make_version(tmp_path / "cache", make_features(3))
    (tmp_path / "elsewhere").mkdir()
    (version.folder / "tags").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a symbolic link"):
        tag(version, "paper")
    (tmp_path / "elsewhere" / "mine.json").touch()
    with pytest.raises(StoreError, match="is a symbolic link"):
        remove_tag(version, "mine")
    assert os.listdir(tmp_path / "elsewhere") == ["mine.json"]


def test_commands_that_change_a_version_take_no_tag(tagged, place):
    with pytest.raises(StoreError, match="takes a version, and no tag"):
        version_folders(place / "fbank80@paper")
