"""Tags: what is read by one is what was there when it was made, whatever happens to the
version since."""

import os
import pickle

import msgspec
import pytest
from cache_contents import values_of
from damage import CHUNKS, flip
from make_cache import add_shard, make_features, make_version
from object_stores import any_store

import featcache
from featcache.care.copying import copy_version
from featcache.care.prune import plan_prune
from featcache.care.verify import verify
from featcache.errors import ArgumentError, DamagedError, StoreError
from featcache.format.documents import encode_line
from featcache.version.index import index_name
from featcache.version.indexing import open_index
from featcache.version.selection import select_version, version_folders
from featcache.version.tags import at_tag, make_tag, read_tag, remove_tag, tag_names, tags_to_show
from featcache.version.version import Version


@pytest.fixture(params=["folder", "memory"])
def place(request, tmp_path):
    if request.param == "folder":
        return tmp_path / "features"
    pytest.importorskip("obstore")
    return any_store()


@pytest.fixture
def tagged(place):
    """A version of twelve utterances in two shards, tagged `paper`; then one is replaced,
    and one added."""
    version = make_version(place)
    items = list(make_features(12).items())
    add_shard(version, dict(items[:6]))
    add_shard(version, dict(items[6:]), row=6)
    make_tag(version, "paper", open_index(version))
    newer = {"utt-3": items[0][1], "utt-new": items[1][1]}
    add_shard(version, newer, row=12, generation=2)
    return version, dict(items), newer


@pytest.fixture
def small(tmp_path) -> Version:
    """A version of three utterances in a folder, tagged `paper`."""
    version = make_version(tmp_path / "small", make_features(3))
    make_tag(version, "paper", open_index(version))
    return version


def test_a_tag_gives_what_was_current_when_it_was_made(tagged, place):
    version, before, newer = tagged
    given = place if isinstance(place, os.PathLike) else str(place)
    by_tag = featcache.open(given, tag="paper")
    assert values_of(by_tag) == {id_: array.tobytes() for id_, array in before.items()}
    now = values_of(featcache.open(given))
    assert now["utt-3"] == newer["utt-3"].tobytes()
    assert len(now) == 13
    assert values_of(featcache.open(f"{given}@paper")) == values_of(by_tag)
    assert values_of(featcache.open(f"{given}/fbank80@paper")) == values_of(by_tag)
    assert values_of(pickle.loads(pickle.dumps(by_tag))) == values_of(by_tag)
    report = verify(at_tag(version, "paper"))
    assert (report.problems, report.utterances, report.shards) == ([], 12, 2)
    assert read_tag(version, "paper").items == 12


def test_shards_that_are_not_looked_at_are_no_fault_of_a_tag(tagged):
    """Another tag leaves them out."""
    version = tagged[0]
    make_tag(version, "newer", open_index(version))
    assert verify(at_tag(version, "paper")).problems == verify(version).problems == []


def test_a_tag_never_changes_and_can_be_removed(tagged):
    version = tagged[0]
    with pytest.raises(ArgumentError, match="has a tag paper already: choose another name"):
        make_tag(version, "paper", open_index(version))
    make_tag(version, "v2", open_index(version))
    assert tag_names(version) == ["paper", "v2"]
    remove_tag(version, "paper")
    with pytest.raises(StoreError, match="has no tag paper: its tags are v2"):
        select_version(version.path.parent / f"{version.path.name}@paper")
    with pytest.raises(StoreError, match="has no tag paper"):
        remove_tag(version, "paper")


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-x", "a b", "x" * 101, "\u00fc"])
def test_names_that_are_no_names(tmp_path, name):
    version = make_version(tmp_path, make_features(2))
    with pytest.raises(ArgumentError, match="cannot name a tag"):
        make_tag(version, name, open_index(version))
    assert not (version.path / "tags").exists()


def test_an_empty_version_is_not_tagged(tmp_path):
    version = make_version(tmp_path)
    with pytest.raises(StoreError, match="has no utterances yet, so there is nothing to tag"):
        make_tag(version, "paper", open_index(version))


def test_a_shard_of_a_tag_that_is_gone_is_named_with_the_tag_and_one_that_comes_back_mends_it(
    small, tmp_path
):
    version, (name,) = small, read_tag(small, "paper").shards
    add_shard(version, make_features(2, prefix="more"), row=3)
    (version.path / "shards" / name).rename(tmp_path / name)
    with pytest.raises(
        StoreError, match=f"the tag paper names shards that are gone or damaged: {name}"
    ):
        featcache.open(version.path, tag="paper")
    assert [problem.kind for problem in verify(version).problems] == ["tag"]
    assert name in tags_to_show(version)[0]["fault"]
    add_shard(version, make_features(3))  # of the same content, so of the same name
    assert len(featcache.open(version.path, tag="paper")) == 3
    assert tags_to_show(version)[0]["fault"] is None
    flip(version.shard(name).folder / CHUNKS["features"], 5)
    assert [problem.kind for problem in verify(version).problems] == ["checksum", "tag"]


def test_a_copy_has_the_tags_and_keeps_its_own(tagged, tmp_path):
    version = tagged[0]
    done = copy_version(version, tmp_path / "copy")
    copy = Version.open(tmp_path / "copy" / version.path.name)
    assert done.problems == []
    assert len(open_index(at_tag(copy, "paper"))) == 12
    remove_tag(copy, "paper")
    make_tag(copy, "paper", open_index(copy))
    assert [problem.kind for problem in copy_version(version, tmp_path / "copy").problems] == [
        "tag"
    ]
    assert len(open_index(at_tag(copy, "paper"))) == 13
    remove_tag(version, "paper")
    assert copy_version(version, tmp_path / "copy").problems == []


def test_the_index_of_a_tag_stays_and_does_not_displace_the_versions(small):
    version, of_tag = small, index_name(small, small.shard_names())
    for number in range(5):
        add_shard(
            version, make_features(2, seed=number, prefix=f"more{number}"), row=3 + 2 * number
        )
        open_index(version)
    names = version.store.names("index")
    assert {of_tag, index_name(version, version.shard_names())} <= {*names}
    assert len(names) == 4
    featcache.open(version.path, tag="paper"), featcache.open(version.path)
    assert version.store.names("index") == names


@pytest.mark.parametrize(
    "change",
    [
        {"shards": ["../../other"]},
        {"shards": "all"},
        {"items": -1},
        {"name": "other"},
        "a pipe",
        "huge",
        "flipped",
    ],
    ids=str,
)
def test_odd_tags_are_refused_in_one_line(small, change):
    place, tag = small.path / "tags" / "paper", read_tag(small, "paper")
    if change == "a pipe":
        place.unlink()
        os.mkfifo(place)
    elif change == "huge":
        os.truncate(place, 1 << 40)
    elif change == "flipped":
        flip(place, place.read_bytes().index(b'"made"') + 10)
    else:
        place.write_bytes(encode_line({**msgspec.to_builtins(tag), **change}))
    with pytest.raises(DamagedError, match="tags/paper: damaged: "):
        featcache.open(small.path, tag="paper")
    with pytest.raises(DamagedError, match="tags/paper: damaged: "):
        plan_prune(small)  # what it names is not known, and must stay
    assert len(featcache.open(small.path)) == 3
    assert [problem.kind for problem in verify(small).problems] == ["tag"]
    remove_tag(small, "paper")
    assert verify(small).problems == []


def test_of_two_versions_the_one_that_has_the_tag_is_meant(tmp_path):
    old, new = (
        make_version(tmp_path, make_features(3), params={"low_freq": hertz})
        for hertz in (20.0, 0.0)
    )
    make_tag(old, "paper", open_index(old))
    assert featcache.open(tmp_path, "fbank80", tag="paper").version.path == old.path
    assert featcache.open(f"{tmp_path}@paper").version.path == old.path
    assert featcache.open(f"{tmp_path}/fbank80@paper").version.path == old.path
    for given in (
        (tmp_path, "fbank80", "other"),
        (f"{tmp_path}/fbank80@other",),
        (f"{tmp_path}@other",),
    ):
        with pytest.raises(
            StoreError, match=f"none of its 2 versions has a tag other: .*{old.path.name}"
        ):
            featcache.open(given[0], *given[1:2], tag=given[2] if given[2:] else None)
    make_tag(new, "paper", open_index(new))
    for given in (f"{tmp_path}@paper", f"{tmp_path}/fbank80@paper"):
        with pytest.raises(
            StoreError, match=r"holds 2 versions with a tag paper: fbank80-.*@paper.*low_freq"
        ):
            featcache.open(given)
    with pytest.raises(StoreError, match="holds 2 versions: "):
        featcache.open(f"{tmp_path}/fbank80")


def test_files_with_other_names_are_no_tags(small, tmp_path):
    for name in ("a b", "\x1b[31m", "-x", ".hidden", "\u00e9"):
        (small.path / "tags" / name).touch()
    assert tag_names(small) == ["paper"]
    assert verify(small).problems == []
    assert copy_version(small, tmp_path / "copy").problems == []


def test_without_the_folder_of_tags_nobody_knows_what_they_keep(tmp_path):
    version = make_version(tmp_path, make_features(3))
    (version.path / "tags").symlink_to("tags")  # which cannot be read, even by root
    for look in (tag_names, plan_prune, verify):
        with pytest.raises(StoreError, match=r"tags: damaged: not a regular file"):
            look(version)


def test_commands_that_change_a_version_take_no_tag(tagged, place):
    with pytest.raises(StoreError, match=r"takes a version, and no tag; .* holds fbank80-"):
        version_folders(place / "fbank80@paper")
