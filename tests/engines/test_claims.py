"""Tasks that other runs are doing: taken as they become free."""

from __future__ import annotations

from types import SimpleNamespace

from small_shards import INFO

from featcache.engines.open_shards import claim_shards
from featcache.extract.jobs import Progress
from featcache.extract.tasks import ShardTask
from featcache.manifest import Utterance
from featcache.store.version import Version


def test_whichever_task_is_free_first_comes_next(scratch):
    """Not the first of those that others had claimed."""
    version = Version.create(scratch, INFO)
    concurrent = SimpleNamespace(remaining=lambda task: {*range(len(task.utterances))})
    jobs = [SimpleNamespace(version=version, concurrent=concurrent)]
    tasks = [ShardTask(name, 0, (Utterance(id=name, path="x.wav"),), (1.0,), {}) for name in ("a", "b", "c")]
    held = {name: version.claim(name) for name in ("a", "b")}
    assert all(claim.take() for claim in held.values())
    opened = []
    claimed = claim_shards(iter(tasks), jobs, Progress())

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
