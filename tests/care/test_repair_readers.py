"""Readers while `repair` takes a shard away: they find its items in the new one, or say
what has happened."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from cache_contents import check, values_of
from damage import CHUNKS, flip, mend, victim
from processes import run_here

import featcache
from featcache.errors import StoreError
from featcache.format.shard import Shard

GONE = "is gone: a repair or prune has taken it away since: open the cache again"


def damage(cache: Path, name: str = CHUNKS["features"]) -> Shard:
    """Spoil the second shard: its first item, or one of its columns."""
    shard = victim(cache)
    flip(shard.folder / name, 3)
    shutil.rmtree(next(cache.glob("*/index")))
    return shard


@pytest.fixture(params=[CHUNKS["features"], CHUNKS["items"]], ids=["features", "table"])
def overtaken(request, cache, plain, monkeypatch):
    """A damaged cache that is repaired just when somebody begins to read the damaged shard.

    After damage to the features, its items are in two other shards; after damage to the
    table, they are in one of the same name."""
    shard = damage(cache, request.param)
    read, begun = Shard.__init__, []

    def overtaken_read(self, store, name, *others):
        if name == shard.name and not begun:
            begun.append(self)
            assert len(mend(cache, plain.manifest()).removed) == 1
        read(self, store, name, *others)

    monkeypatch.setattr(Shard, "__init__", overtaken_read)
    yield cache
    assert begun


def test_a_cache_is_opened_with_all_items(overtaken, sound):
    """Its index is built of the shards that are there now."""
    assert values_of(featcache.open(overtaken)) == values_of(featcache.open(sound))


@pytest.mark.parametrize("command", ["info", "stats", "show", "verify"])
def test_a_command_reads_what_is_there_now(overtaken, plain, command):
    checks = ["--recompute", "3", "--manifest", plain.manifest()]
    arguments = {"show": ["utt-05"], "verify": checks}.get(command, [])
    said = run_here(command, overtaken, *arguments, "--json")
    assert "missing" not in said
    if command == "verify":
        (version,) = json.loads(said)["versions"]
        # nothing of what was taken away
        assert (version["problems"], version["utterances"]) == ([], 12)


def test_an_opened_cache_reads_what_it_has_mapped_and_else_says_that_it_is_to_be_opened_again(
    cache, sound, plain
):
    """Never the features of another utterance, and never that a file is missing."""
    shard = damage(cache)
    opened, mapped = featcache.open(cache), featcache.open(cache)
    inside = [*shard.table.ids]
    whole = values_of(featcache.open(sound))
    assert mapped[inside[-1]].tobytes() == whole[inside[-1]]
    assert len(mend(cache, plain.manifest()).removed) == 1
    for reader in (opened, pickle.loads(pickle.dumps(opened)), pickle.loads(pickle.dumps(mapped))):
        for id_ in reader.ids:
            if id_ in inside:
                with pytest.raises(StoreError, match=GONE):
                    reader[id_]
            else:
                assert reader[id_].tobytes() == whole[id_]
        with pytest.raises(StoreError, match=GONE):
            reader.batch([inside[0]], check=True)
    assert mapped[inside[-1]].tobytes() == whole[inside[-1]]
    assert values_of(featcache.open(cache, check=True)) == whole


def test_a_shard_that_is_taken_away_while_it_is_checked_is_looked_for_again(cache, monkeypatch):
    """Between two looks at its files: nothing of it is damage, and what it held is in no
    shard."""
    lost = victim(cache)
    faults = Shard.faults

    def take_away(shard: Shard, **options) -> list[str]:
        found = list(faults(shard, **options))
        if shard.name == lost.name:
            shutil.rmtree(lost.folder)
        return found

    monkeypatch.setattr(Shard, "faults", take_away)
    report = check(cache)
    assert {problem.kind for problem in report.problems} == {"unfinished"}
    assert lost.name not in {problem.shard for problem in report.problems}
