"""Prune takes away what no reader needs, and nothing else: not a bit of what stays, nothing that a tag names."""

from __future__ import annotations

import random
import shutil
import uuid
from itertools import count

import numpy as np
import pytest
from damage import CHUNKS, flip
from make_cache import add_shard, make_features, make_version
from manifests import manifest_of
from scratch import scratch_folder
from small_shards import INFO, item, write

import featcache
from featcache.errors import DamagedError, ManifestError, StoreError
from featcache.health.verify import verify
from featcache.manifest import read_manifest
from featcache.storage.location import parse_location
from featcache.storage.objects import Objects
from featcache.storage.store import store_of
from featcache.store.index import open_index
from featcache.store.ledger import Failure, standing_failures
from featcache.store.made_items import MadeItems
from featcache.store.prune import plan_prune, prune
from featcache.store.removing import remove_version
from featcache.store.run_records import ShardEvent, read_runs
from featcache.store.runs import Run
from featcache.store.tags import at_tag, make_tag, read_tags
from featcache.store.version import Version


def manifest(folder, ids):
    return read_manifest(manifest_of(folder, [(id_, f"{id_}.wav") for id_ in ids], ("id", "path"), "wanted.csv"))


def contents(version: Version) -> dict[str, bytes]:
    """The features of each item that counts, by id."""
    index, found = open_index(version), {}
    for position, id_ in enumerate(index.ids):
        first, count = int(index.first_frame[position]), int(index.num_frames[position])
        found[id_] = version.shard(index.shards[int(index.shard[position])]).features[first : first + count].tobytes()
    return found


def add(version: Version, ids, run: int, supersedes=None) -> str:
    """Extract utterances anew, with other values than any before: whatever there is of them is replaced, or what is
    given.
    """
    index = open_index(version)
    if supersedes is None:
        supersedes = {}
        for position in index.find(ids_of(ids)):
            if position >= 0:
                place = index.place(int(position))
                supersedes.setdefault(place.shard, []).append(place.item)
    rows = [item(id_, path=f"{id_}.wav", mtime_ns=run) for id_ in ids]
    values = np.random.default_rng(run).random((3 * len(rows), 2), np.float32)
    return write(version, rows, values, row=run, supersedes=supersedes, run=f"run {run:03}").name


def ids_of(ids):
    from featcache.strings import Strings

    return Strings.of(ids)


def tag(version: Version, name: str) -> dict[str, bytes]:
    index = open_index(version)
    make_tag(version, name, index.shards, len(index))
    return contents(at_tag(version, name))


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_history_what_is_wanted_and_what_is_tagged_stays_bit_for_bit(seed):
    chance = random.Random(seed)
    every = [f"u{number}" for number in range(9)]
    with scratch_folder() as folder:
        version, tagged = Version.create(folder / "cache", INFO), {}
        for run in range(chance.randrange(1, 9)):
            ids = chance.sample(every, chance.randrange(1, 6))
            # now and then, a run that did not know of the others
            add(version, ids, run, {} if chance.random() < 0.2 else None)
            if chance.random() < 0.25:
                tagged[f"t{run}"] = tag(version, f"t{run}")
            if chance.random() < 0.3:
                prune_all(version)
        before = contents(version)
        wanted = chance.sample(every, chance.randrange(1, 9)) if chance.random() < 0.7 else None
        if wanted and not before.keys() & {*wanted}:
            wanted = None
        asked = None if wanted is None else manifest(folder, wanted)
        plan = plan_prune(version, asked, force=True)
        done = prune(version, plan, asked)
        assert (done.damaged, done.removed) == ((), len(plan.removed) + len(plan.rewritten))
        after = contents(version)
        assert {id_: data for id_, data in before.items() if wanted is None or id_ in wanted}.items() <= after.items()
        if not tagged:
            assert wanted is None or after.keys() <= {*wanted}
            assert sum(version.shard(name).info.items for name in version.shard_names()) == len(after)
        assert len(before.keys() - after.keys()) == plan.unwanted
        for name, held in tagged.items():
            assert contents(at_tag(version, name)) == held
        assert plan_prune(version, asked, force=True).is_empty
        assert [problem for problem in verify(version).problems if problem.kind != "record"] == []


def prune_all(version: Version, asked=None):
    return prune(version, plan_prune(version, asked, force=True), asked)


def test_an_older_item_of_a_tag_does_not_count_again(tmp_path):
    """The tagged shard stays, so what replaced its items cannot go as a whole."""
    version = Version.create(tmp_path, INFO)
    add(version, ["a", "b"], 1)
    before = tag(version, "paper")
    add(version, ["b"], 2)
    now = contents(version)
    done = prune_all(version, manifest(tmp_path, ["a"]))
    assert done.removed == 0
    assert contents(version) == now
    assert contents(at_tag(version, "paper")) == before


def recorded(version: Version, ids, count=None):
    """A run over a manifest of these rows, which extracts the first so many of them and dies; by default, all."""
    asked = {"manifest": "m.csv", "root": "/", "utterances": len(ids), "new": len(ids), "held": 0, "replaced": 0}
    run = Run(version, {**asked, "others": 0, "failed": 0})
    done = ids[:count]
    shard = write(version, [item(id_, path=f"{id_}.wav") for id_ in done], run=run.id)
    run.record_shards([ShardEvent(shard.name, len(done))])
    if count is None:
        run.finish({"extracted": len(ids), "failed": 0, "interrupted": False, "items": len(ids)})
    else:
        run._lock.release()


def test_what_was_pruned_is_not_missing_and_what_is_missing_stays_so(tmp_path):
    ids = [f"u{number}" for number in range(9)]
    version = Version.create(tmp_path / "whole", INFO)
    recorded(version, ids)
    prune_all(version, manifest(tmp_path, ids[:6]))
    assert verify(version).problems == []
    assert len(contents(version)) == 6
    version = Version.create(tmp_path / "killed", INFO)
    recorded(version, ids, 5)
    (before,) = verify(version).problems
    assert "4 of the 9 utterances" in before.message
    prune_all(version, manifest(tmp_path, ids[2:]))
    assert [problem.message for problem in verify(version).problems] == [before.message]


def test_a_record_whose_shard_is_still_there_counts_for_nothing(tmp_path):
    """As after a kill between the record and the removal."""
    ids = [f"u{number}" for number in range(9)]
    version = Version.create(tmp_path, INFO)
    recorded(version, ids, 5)
    (before,) = verify(version).problems
    (name,) = version.shard_names()
    run = Run(version, {"held": 3, "only": True})
    run.record_shards([ShardEvent(name, 0, until=run.id, pruned=2, made_by=open_index(version).runs[0])])
    run._lock.release()
    assert [problem.message for problem in verify(version).problems] == [before.message]


def test_a_failure_that_was_made_up_for_does_not_stand_again(tmp_path):
    version = Version.create(tmp_path, INFO)
    Run(version, {}).fail([Failure(id="b", path="b.wav", reason="empty", message="")])
    add(version, ["a", "b"], 1)
    prune_all(version, manifest(tmp_path, ["a"]))
    assert standing_failures(version, open_index(version)) == {}


def test_a_damaged_shard_stays_and_what_it_replaces_does_not_count_again(tmp_path):
    version = Version.create(tmp_path, INFO)
    first = add(version, ["a", "b", "c"], 1)
    second = add(version, ["b", "c"], 2)
    add(version, ["c"], 3)
    before = contents(version)
    flip(version.shard(first).folder / CHUNKS["features"], 9)
    done = prune_all(version)
    assert done.damaged == (first,)
    assert done.rewritten == 1
    assert second not in version.shard_names()
    now = contents(version)
    assert {id_: now[id_] for id_ in "bc"} == {id_: before[id_] for id_ in "bc"}
    assert {problem.shard for problem in verify(version).problems if problem.shard} == {first}


def test_a_damaged_column_refuses_all(tmp_path):
    version = Version.create(tmp_path, INFO)
    first = add(version, ["a", "b"], 1)
    add(version, ["b"], 2)
    flip(version.shard(first).folder / "zarr.json", 100)
    with pytest.raises(DamagedError, match="featcache repair"):
        plan_prune(version)


def test_nothing_is_removed_beside_a_run_or_after_a_change(tmp_path):
    version = Version.create(tmp_path, INFO)
    add(version, ["a", "b"], 1)
    add(version, ["b"], 2)
    names, plan = version.shard_names(), plan_prune(version)
    run = Run(version, {"host": "here", "pid": 12})
    for remove in (lambda: prune(version, plan), lambda: remove_version(version)):
        with pytest.raises(StoreError, match=r"a run is under way .*process 12 on here"):
            remove()
    run.finish({})
    with version.claim("repair") as claim:
        assert claim.take()
        with pytest.raises(StoreError, match="another repair is running, or the version is being tagged or pruned"):
            prune(version, plan)
    assert version.shard_names() == names
    add(version, ["b"], 3)
    with pytest.raises(StoreError, match="has changed meanwhile; nothing has been removed"):
        prune(version, plan)
    assert {*names} < {*version.shard_names()}


def test_a_tag_that_cannot_be_read_refuses_all(tmp_path):
    version = Version.create(tmp_path, INFO)
    add(version, ["a", "b"], 1)
    tag(version, "paper")
    add(version, ["b"], 2)
    flip(version.folder / "tags" / "paper.json", 60)
    with pytest.raises(DamagedError, match=r"paper\.json"):
        plan_prune(version)
    with pytest.raises(DamagedError):
        [*read_tags(version)]


def test_another_corpus_manifest_is_refused(tmp_path):
    version = Version.create(tmp_path, INFO)
    add(version, ["a"], 1)
    with pytest.raises(ManifestError, match="has none of the 1 utterance of"):
        plan_prune(version, manifest(tmp_path, ["x"]))


@pytest.fixture
def stored():
    """A version in an object store: five utterances in two shards, of which a third shard has replaced one."""
    pytest.importorskip("obstore")
    version = make_version(parse_location("cache", f"memory://{uuid.uuid4()}/features"))
    features = make_features(6)
    items = list(features.items())
    first = add_shard(version, dict(items[:3]), run="run 1")
    add_shard(version, dict(items[3:5]), row=3, run="run 1")
    add_shard(version, {"utt-1": items[5][1]}, row=9, supersedes={first: [1]}, run="run 2")
    return version, {**dict(items[:5]), "utt-1": items[5][1]}


def test_what_was_pruned_and_then_lost_is_whole_once_it_is_extracted_again(cli, plain, scratch):
    cache, manifest = scratch / "cache", plain.manifest()
    assert cli("extract", manifest, "-o", cache).code == 0
    fewer = plain.manifest(plain.rows[1:], "fewer.csv")
    assert cli("prune", cache, "--manifest", fewer, "--force", "--yes").code == 0
    (shard,) = cache.glob("*/shards/*/")
    shutil.rmtree(shard)
    assert "no longer there" in cli("verify", cache).out
    assert cli("extract", manifest, "-o", cache).code == 0
    assert cli("verify", cache).code == 0
    featcache.open(cache, strict=True)


def test_in_an_object_store(stored, tmp_path):
    version, features = stored
    wanted = [id_ for id_ in features if id_ != "utt-3"]
    done = prune_all(version, manifest(tmp_path, wanted))
    assert (done.removed, done.rewritten) == (2, 2)
    assert read(version) == {id_: features[id_].tobytes() for id_ in wanted}
    assert sum(version.shard(name).info.items for name in version.shard_names()) == 4
    assert [problem for problem in verify(version).problems if problem.kind != "record"] == []
    assert plan_prune(version, manifest(tmp_path, wanted), force=True).is_empty


def read(version: Version) -> dict[str, bytes]:
    opened = featcache.open(str(version.path), strict=True)
    return {id_: np.asarray(opened[id_]).tobytes() for id_ in opened.ids if id_ != "utt-3"}


@pytest.mark.parametrize("at", [0, 1, 2, 9, 40])
def test_in_an_object_store_what_stays_is_there_whichever_request_is_the_last(stored, tmp_path, monkeypatch, at):
    version, features = stored
    wanted = manifest(tmp_path, [id_ for id_ in features if id_ != "utt-3"])
    before, requests, delete = read(version), count(), Objects.delete

    def cut_off(self, location):
        if next(requests) >= at:
            raise StoreError("cut off")
        delete(self, location)

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "delete", cut_off)
        with pytest.raises(StoreError, match="cut off"):
            prune_all(version, wanted)
    assert read(version) == before
    again = Version.open(version.path)
    prune_all(again, wanted)
    assert read(again) == before
    assert plan_prune(again, wanted, force=True).is_empty


def test_what_is_left_of_a_shard_in_an_object_store_is_not_damaged_though_an_index_had_it(tmp_path, monkeypatch):
    version = make_version(parse_location("cache", f"memory://{uuid.uuid4()}/features"))
    features = make_features(3)
    name = add_shard(version, features)
    open_index(version, keep=True)
    wanted, delete = manifest(tmp_path, [*features][:2]), Objects.delete

    def cut_off(self, location):
        delete(self, location)
        if str(location).endswith(f"{name}/zarr.json"):
            raise StoreError("cut off")

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "delete", cut_off)
        with pytest.raises(StoreError, match="cut off"):
            prune_all(version, wanted)
    again = Version.open(version.path)
    assert read(again) == {id_: features[id_].tobytes() for id_ in [*features][:2]}
    assert plan_prune(again, wanted, force=True).is_empty
    assert MadeItems(again, open_index(again), read_runs(again)).num_pruned_since("") == 1


def test_a_removal_from_an_object_store_that_is_cut_off_is_continued(stored, monkeypatch):
    version, _ = stored
    run = Run(version, {"host": "far"})
    run.record_shards([ShardEvent(name, 1) for name in version.shard_names()])
    run.finish({})
    open_index(version, keep=True)
    for last in ("crc32c/c/0", "index.json", "run.json", "shards/zarr.json"):
        delete = Objects.delete

        def cut_off(self, location, last=last, delete=delete):
            delete(self, location)
            if str(location).endswith(last):
                raise StoreError("cut off")

        with monkeypatch.context() as patch:
            patch.setattr(Objects, "delete", cut_off)
            with pytest.raises(StoreError, match="cut off"):
                remove_version(version)
        version = Version.open(version.path)
    assert [name for name, _ in store_of(version.path).walk(version.path)] == ["zarr.json"]


def test_in_an_object_store_nothing_is_removed_beside_a_run_elsewhere(stored):
    version, _ = stored
    names, run = version.shard_names(), Run(version, {"host": "far", "pid": 12})
    shutil.rmtree(run.folder)  # as if it were another machine's
    for remove in (lambda: prune_all(version), lambda: remove_version(version)):
        with pytest.raises(StoreError, match=r"a run on far may be under way .* wait until nothing has been written"):
            remove()
    assert version.shard_names() == names
    run.finish({})
    prune_all(version)
    remove_version(version)
    assert [*store_of(version.path).walk(version.path)] == []


def test_a_version_is_removed_with_everything_and_no_link_is_followed(tmp_path):
    outside = tmp_path / "outside"
    (outside / "shards").mkdir(parents=True)
    (outside / "shards" / "mine").touch()
    version = Version.create(tmp_path / "cache", INFO)
    other = Version.create(tmp_path / "cache", INFO, "other-0123456789ab")
    add(version, ["a"], 1)
    (version.folder / "aside").symlink_to(outside)
    link = tmp_path / "cache" / "link-0123456789ab"
    link.symlink_to(outside)
    with pytest.raises(StoreError, match="is a symbolic link"):
        remove_version(Version(link, INFO))
    remove_version(version)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted([link.name, other.path.name])
    assert (outside / "shards" / "mine").exists()
