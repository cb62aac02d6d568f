"""Prune takes away what no reader needs, and nothing else: not a bit of what stays,
nothing that a tag names."""

import random
import shutil
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from cache_contents import items_of
from damage import CHUNKS, flip
from make_cache import add_shard, make_features, make_version
from object_stores import any_store
from scratch import scratch_folder
from small_shards import create, item, write

import featcache
from featcache.care.prune import plan_prune, prune, remove_version, rewrite
from featcache.care.verify import verify
from featcache.errors import ArgumentError, DamagedError, LockedError, StoreError
from featcache.manifest.segments import SegmentColumns
from featcache.manifest.strings import Strings
from featcache.storage.directory import Directory
from featcache.storage.opening import open_store
from featcache.version.indexing import open_index
from featcache.version.ledger import Failure, put_failures, read_failures, rewrite_failures
from featcache.version.tags import at_tag, make_tag
from featcache.version.version import Version
from featcache.version.wanted import Wanted


def add(version: Version, ids, run: int, *, blind: bool = False) -> str:
    """Extract utterances anew, with other values than any before: whatever there is of
    them is replaced, but by a run that is blind to it."""
    index = open_index(version)
    at = index.find(Strings.of(ids)).tolist()
    generations = [
        1 if blind or position < 0 else int(index.generation[position]) + 1 for position in at
    ]
    rows = [
        item(id_, generation=generation) for id_, generation in zip(ids, generations, strict=True)
    ]
    values = np.random.default_rng(run).random((3 * len(rows), 2), np.float32)
    return write(version, rows, values, row=run).name


def tag(version: Version, name: str) -> dict[str, tuple]:
    make_tag(version, name, open_index(version))
    return items_of(at_tag(version, name))


def hashes(ids):
    return None if ids is None else Strings.of(ids).hashes()


def prune_all(version: Version, ids=None):
    return prune(version, plan_prune(version, hashes(ids)), hashes(ids))


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_history_what_is_wanted_and_what_is_tagged_stays_bit_for_bit(seed):
    chance = random.Random(seed)
    every = [f"u{number}" for number in range(9)]
    with scratch_folder() as folder:
        version, tagged = create(folder), {}
        for run in range(chance.randrange(1, 9)):
            add(
                version,
                chance.sample(every, chance.randrange(1, 6)),
                run,
                blind=chance.random() < 0.2,
            )
            if chance.random() < 0.25:
                tagged[f"t{run}"] = tag(version, f"t{run}")
            if chance.random() < 0.3:
                prune_all(version)
        before = items_of(version)
        num_items = sum(version.shard(name).info.items for name in version.shard_names())
        wanted = chance.sample(every, chance.randrange(1, 9)) if chance.random() < 0.7 else None
        plan = plan_prune(version, hashes(wanted))
        num_wanted = len(before if wanted is None else before.keys() & {*wanted})
        assert plan.older + plan.unwanted + plan.bound == num_items - num_wanted
        done = prune(version, plan, hashes(wanted))
        assert (done.damaged, done.removed) == ((), len(plan.removed) + len(plan.rewritten))
        after = items_of(version)
        assert {
            id_: data for id_, data in before.items() if wanted is None or id_ in wanted
        }.items() <= after.items()
        if not tagged:
            assert wanted is None or after.keys() <= {*wanted}
            assert sum(version.shard(name).info.items for name in version.shard_names()) == len(
                after
            )
        assert len(before.keys() - after.keys()) == plan.unwanted
        for name, held in tagged.items():
            assert items_of(at_tag(version, name)) == held
        assert plan_prune(version, hashes(wanted)).is_empty
        assert verify(version).problems == []


def test_an_older_item_of_a_tag_does_not_count_again(version):
    """The tagged shard stays, so what replaced its items cannot go as a whole."""
    add(version, ["a", "b"], 1)
    before = tag(version, "paper")
    add(version, ["b"], 2)
    now = items_of(version)
    assert prune_all(version, ["a"]).removed == 0
    assert items_of(version) == now
    assert items_of(at_tag(version, "paper")) == before


def test_what_was_replaced_does_not_count_again_while_the_rest_goes(version, monkeypatch):
    """Whatever the generations of what stays of its shard."""
    add(version, ["a"], 1)
    write(version, [item("x"), item("a", generation=5)], row=2)
    write(version, [item("x", generation=2)], np.full((3, 2), 7), row=3)
    before, remove, counting = items_of(version), Directory.remove, []

    def watched(store: Directory, key: str) -> None:
        remove(store, key)
        if key.startswith("shards/"):
            counting.append(items_of(version))

    monkeypatch.setattr(Directory, "remove", watched)
    assert prune_all(version, ["a"]).removed == 3
    assert len(counting) == 3
    assert all(items.items() <= before.items() for items in counting)
    assert [*items_of(version)] == ["a"]


def test_a_failure_that_was_made_up_for_does_not_stand_again(version):
    put_failures(version, "run 1", [Failure(id="b", path="b.wav", reason="empty", message="")])
    add(version, ["a", "b"], 1)
    prune_all(version, ["a"])
    assert read_failures(version) == []


def test_what_failed_of_two_rows_of_an_id_stays_failed_of_both(version):
    """Two manifests want them, and neither is to be told that its own is missing."""
    standing = [
        Failure(id="b", path="b.wav", start=start, reason="empty", message="")
        for start in (None, 1.0)
    ]
    put_failures(
        version, "run 1", [Failure(id="a", path="a.wav", reason="empty", message=""), *standing]
    )
    for name, failure in zip("mn", standing, strict=True):
        row_hash = SegmentColumns.of([failure]).hashes()
        Wanted(name, np.stack([hashes("b"), row_hash, np.ones(1, np.uint64)])).save(version)
    for run in (1, 2):
        add(version, ["a"], run)
    prune_all(version)
    assert {*read_failures(version)} == {*standing}


def test_what_a_job_of_an_array_enters_in_the_ledger_meanwhile_stays(version, monkeypatch):
    """It takes no lock: what it has written has not been read, when the ledger is written
    again."""
    early, late = (Failure(id=id_, path="b.wav", reason="empty", message="") for id_ in "ab")
    put_failures(version, "run 1", [early])

    def rewrite(*arguments: object) -> None:
        put_failures(version, "run 2", [late])
        rewrite_failures(*arguments)

    monkeypatch.setattr("featcache.care.prune.rewrite_failures", rewrite)
    for run in (1, 2):
        add(version, ["a"], run)
    prune_all(version)
    assert read_failures(version) == [late]


@pytest.mark.parametrize("folder", ["failures", "wanted"])
@pytest.mark.parametrize("ids", [["a"], None], ids=["some", "all"])
def test_where_a_record_cannot_be_read_the_ledger_stays(version, folder, ids):
    """What cannot be read may say that a failure stands, or want what goes: then nothing
    goes. Repair sees to it."""
    put_failures(
        version,
        "run 1",
        [Failure(id=id_, path="b.wav", reason="empty", message="") for id_ in "bc"],
    )
    add(version, ["a", "b"], 1)
    Wanted("m", np.stack([hashes(["a", "b"])] * 3)).save(version)
    (damaged,) = (version.path / folder).iterdir()
    flip(damaged, 20)
    (ledger,) = (version.path / "failures").iterdir()
    before = ledger.read_bytes()
    add(version, ["a"], 2)
    with pytest.raises(DamagedError) if ids and folder == "wanted" else nullcontext():
        prune_all(version, ids)
    assert (open_index(version).find(Strings.of("ab")) >= 0).all() or folder == "failures"
    assert ledger.read_bytes() == before


def test_a_damaged_shard_stays_and_what_it_replaces_does_not_count_again(version):
    first = add(version, ["a", "b", "c"], 1)
    add(version, ["b", "c"], 2)
    add(version, ["c"], 3)
    before = items_of(version)
    flip(version.shard(first).folder / CHUNKS["features"], 9)
    assert first in prune_all(version).damaged
    now = items_of(version)
    assert {id_: now[id_] for id_ in "bc"} == {id_: before[id_] for id_ in "bc"}
    assert {problem.shard for problem in verify(version).problems if problem.shard} == {first}


def test_a_damaged_side_array_is_not_written_again_with_a_checksum_that_fits(scratch):
    """A scale of an item that stays has another bit: nothing of the shard is taken for
    sound."""
    features = make_features(4, (8,), "float32")
    version = make_version(scratch / "cache", features, quantized=True)
    (first,) = version.shard_names()
    add_shard(version, {"utt-0": features["utt-0"]}, row=4, generation=2)
    flip(version.shard(first).folder / "side_quantization/c/0/0/0", 200)
    assert prune_all(version).damaged == (first,)
    assert {problem.shard for problem in verify(version).problems} == {first}


def test_what_an_earlier_prune_had_written_again_and_is_damaged_now_is_written_once_more(version):
    """That prune was cut off before it removed the shard, whose sound items would go for
    damaged ones. (Whether these count before that follows from the names of both
    shards.)"""
    first = add(version, [f"u{number}" for number in range(4)], 1)
    add(version, ["u0"], 2)
    copy = rewrite(version, version.shard(first), [1, 2, 3])
    before = items_of(version)
    for path in CHUNKS.values():
        flip(version.shard(copy).folder / path, 9)
    assert rewrite(version, version.shard(first), [1, 2, 3]) == copy
    assert verify(version).problems == []
    prune_all(version)
    assert items_of(version) == before
    assert verify(version).problems == []


def test_a_damaged_table_or_tag_refuses_all(version):
    first = add(version, ["a", "b"], 1)
    tag(version, "paper")
    add(version, ["b"], 2)
    flip(version.path / "tags" / "paper", 20)
    with pytest.raises(DamagedError, match="tags/paper"):
        plan_prune(version)
    flip(version.path / "tags" / "paper", 20)
    shutil.rmtree(version.path / "index")
    flip(version.shard(first).folder / "zarr.json", 100)
    with pytest.raises(DamagedError, match="featcache repair"):
        plan_prune(version)


def test_nothing_is_removed_beside_a_run_or_after_a_change(version):
    add(version, ["a", "b"], 1)
    add(version, ["b"], 2)
    names, plan = version.shard_names(), plan_prune(version)
    with version.at_work("extract"):
        for remove in (lambda: prune(version, plan), lambda: remove_version(version)):
            with pytest.raises(LockedError, match="featcache extract, process"):
                remove()
    assert version.shard_names() == names
    add(version, ["b"], 3)
    with pytest.raises(StoreError, match="has changed meanwhile; nothing has been removed"):
        prune(version, plan)
    assert {*names} < {*version.shard_names()}


def test_what_was_pruned_and_then_lost_is_whole_once_it_is_extracted_again(cli, plain, scratch):
    cache, wanted = scratch / "cache", plain.manifest()
    assert cli("extract", wanted, "-o", cache).code == 0
    fewer = plain.manifest(plain.rows[1:], "fewer.csv")
    assert cli("prune", cache, "--manifest", fewer, "--force", "--yes").code == 0
    assert cli("verify", cache).code == 0  # what was pruned is not missing
    (shard,) = cache.glob("*/shards/*/")
    shutil.rmtree(shard)
    assert "missing" in cli("verify", cache).out
    assert cli("extract", wanted, "-o", cache).code == 0
    assert cli("verify", cache).code == 0
    featcache.open(cache, strict=True)


@pytest.mark.parametrize("last", [*range(12)])
def test_in_an_object_store_what_stays_is_there_whichever_removal_is_the_last(monkeypatch, last):
    pytest.importorskip("obstore")
    from featcache.storage.bucket import Bucket

    version = make_version(any_store())
    items = list(make_features(6).items())
    add_shard(version, dict(items[:3]))
    add_shard(version, dict(items[3:5]), row=3)
    add_shard(version, {"utt-1": items[5][1]}, row=9, generation=2)
    wanted = ["utt-0", "utt-1", "utt-2", "utt-4"]
    before, removals, remove = items_of(version), [], Bucket.remove

    def cut_off(self, key):
        removals.append(key)
        if len(removals) > last:
            raise StoreError("cut off")
        remove(self, key)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "remove", cut_off)
        with suppress(StoreError):
            prune_all(version, wanted)
    kept = {id_: before[id_] for id_ in wanted}
    assert kept.items() <= items_of(version).items() <= before.items()
    prune_all(version, wanted)
    assert items_of(version) == kept
    assert plan_prune(version, hashes(wanted)).is_empty
    assert verify(version).problems == []
    remove_version(version)
    assert [*open_store(version.path).walk()] == []


def test_a_version_is_removed_with_everything_and_no_link_is_followed(scratch):
    outside = scratch / "outside"
    (outside / "shards").mkdir(parents=True)
    (outside / "shards" / "mine").touch()
    version = create(scratch / "cache")
    add(version, ["a"], 1)
    (scratch / "cache" / "link").symlink_to(version.path)
    with pytest.raises(StoreError, match="link"):
        remove_version(Version.open(scratch / "cache" / "link"))
    tag(version, "paper")
    with pytest.raises(ArgumentError, match="holds the tags paper: move it away, or give --force"):
        remove_version(version)
    (version.path / "aside").symlink_to(outside)
    remove_version(version, force=True)
    assert [path.name for path in (scratch / "cache").iterdir()] == ["link"]
    assert (outside / "shards" / "mine").exists()
