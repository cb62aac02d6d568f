"""Claims tasks for this run, so that several runs share work without a coordinator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from featcache.engines.progress import Progress
from featcache.engines.shards import Fill, OpenShard, cannot_write
from featcache.extract.plan import ShardTask


def claimed(tasks: Iterator[ShardTask], fills: Sequence[Fill], progress: Progress) -> Iterator[OpenShard | None]:
    """Tasks that are ours to do, begun: those that another run is doing come last, for it may not finish them.

    None, time and again, while it does them: what this run has begun must go on, for the other may wait for that.

    Raises:
        StoreError: the cache cannot be written.
        DamagedError: a shard that another run has added meanwhile is not what was written.
    """
    deferred = []
    for task in tasks:
        if (claims := _claim(task, fills)) is None:
            deferred.append(task)
        elif shard := _begin(task, claims, fills, progress):
            yield shard
    for task in deferred:
        while (claims := _claim(task, fills)) is None:
            yield None
        if shard := _begin(task, claims, fills, progress):
            yield shard


def _claim(task: ShardTask, fills: Sequence[Fill]) -> ExitStack | None:
    """The claims on a task, one in each version; None where another run holds one of them."""
    with ExitStack() as claims:
        for version in (fill.target.version for fill in fills):
            claim = claims.enter_context(version.claim(task.name))
            try:
                is_ours = claim.take()
            except OSError as error:
                raise cannot_write(version, error) from error
            if not is_ours:
                return None
        return claims.pop_all()


def _begin(task: ShardTask, claims: ExitStack, fills: Sequence[Fill], progress: Progress) -> OpenShard | None:
    """Open writers for what of a claimed task no other run has done by now; None where nothing is left of it."""
    with claims:
        remaining = set().union(*(fill.others.remaining(task) for fill in fills))
        progress.elsewhere += len(task.utterances) - len(remaining)
        if not remaining:
            return None
        if len(remaining) < len(task.utterances):
            task = task.only(remaining)
        return OpenShard(task, claims, fills)
