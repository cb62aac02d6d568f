"""What other runs add to a version while this run fills it."""

from __future__ import annotations

from collections.abc import Iterable

from featcache.extract.plan import ShardTask
from featcache.manifest import Segment
from featcache.store.version import Version


class Others:
    """What other runs have added to a version since this run was planned.

    Args:
        version: which.
        planned: names of the shards that there were when the tasks were planned: later ones are others', or ours.
    """

    def __init__(self, version: Version, planned: Iterable[str]) -> None:
        self._version = version
        self._known = set(planned)
        self._done: dict[str, Segment] = {}

    def ours(self, name: str) -> None:
        """A shard of our own needs no looking into."""
        self._known.add(name)

    def remaining(self, task: ShardTask) -> set[int]:
        """Numbers of the task's utterances that are still to do."""
        for name in self._version.shard_names():
            if name not in self._known:
                self._known.add(name)
                for item in self._version.shard(name).items():
                    self._done[item.id] = item.segment
        return {number for number, row in enumerate(task.utterances) if self._done.get(row.id) != row.segment}
