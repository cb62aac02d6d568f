"""Tasks that other runs are doing: taken as they become free."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from small_shards import INFO, item, write

from featcache.engines.open_shards import open_shards
from featcache.extraction.jobs import ConcurrentRuns, Progress, RunControl
from featcache.extraction.tasks import ShardTask
from featcache.manifest import Utterance
from featcache.store.version import Version


def control(**settings) -> RunControl:
    return RunControl(Progress(), lambda _: None, threading.Event(), **settings)


def task(name: str, *ids: str) -> ShardTask:
    utterances = tuple(Utterance(id=id_, path=f"{id_}.wav") for id_ in ids or (name,))
    return ShardTask(name, 0, utterances, (1.0,) * len(utterances), {})


def test_whichever_task_is_free_first_comes_next(scratch):
    """Not the first of those that others had claimed."""
    version = Version.create(scratch, INFO)
    concurrent = SimpleNamespace(remaining=lambda task, was_taken: {*range(len(task.utterances))})
    jobs = [SimpleNamespace(version=version, concurrent=concurrent)]
    tasks = [task(name) for name in ("a", "b", "c")]
    held = {name: version.claim(name) for name in ("a", "b")}
    assert all(claim.take() for claim in held.values())
    opened = []
    claimed = open_shards(iter(tasks), jobs, control())

    def names(count):
        found = [next(claimed) for _ in range(count)]
        opened.extend(shard for shard in found if shard is not None)
        return [shard and shard.task.name for shard in found]

    assert names(3) == ["c", None, None]
    held["b"].release()
    assert names(2) == ["b", None]
    held["a"].release()
    assert names(1) == ["a"]
    assert list(claimed) == []
    for shard in opened:
        shard._held.close()


def test_tasks_that_were_dealt_out_are_neither_claimed_nor_looked_for(scratch):
    version = Version.create(scratch, INFO)
    jobs = [SimpleNamespace(version=version, concurrent=None)]
    held = version.claim("a")
    assert held.take()
    shards = list(open_shards(iter([task("a"), task("b")]), jobs, control(takes_claims=False)))
    assert [shard.task.name for shard in shards] == ["a", "b"]
    assert [path.name for path in (version.path / "work").glob("*.lock")] == ["a.lock"]
    for shard in shards:
        shard._held.close()


class Listed(Version):
    """A version that counts how often its shards are listed, and on whose clock that takes a while."""

    listings = 0
    seconds = 0.0
    takes = 0.0

    def shard_names(self):
        self.listings += 1
        self.seconds += self.takes
        return super().shard_names()


@pytest.mark.parametrize("takes", [0.001, 2.0])
def test_looking_for_shards_of_other_runs_takes_a_small_share_of_a_run(scratch, takes):
    """A twentieth. What another run has added is seen a little later; at once, if it is known to have had the task."""
    version = Version.create(scratch, INFO)
    listed = Listed(version.path, version.info)
    listed.takes = takes
    concurrent = ConcurrentRuns(listed, [], clock=lambda: listed.seconds)
    num_tasks = 2000
    for number in range(num_tasks):
        if number == 600:
            write(version, [item("t1500")])
        left = concurrent.remaining(task("t", f"t{number}"))
        assert left == (set() if number == 1500 else {0})
        listed.seconds += takes / 5  # a look takes as long as five tasks
    assert listed.listings <= num_tasks / 100 + 1
    write(version, [item("t2001")])
    assert concurrent.remaining(task("t", "t2001"), is_likely_done=True) == set()
