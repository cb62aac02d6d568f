"""Shards that are being made, in memory until they are committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from msgspec import structs

from featcache.errors import Reason
from featcache.extraction.features import Extracted
from featcache.extraction.jobs import DoneTask, Progress, VersionJob
from featcache.extraction.tasks import ShardTask
from featcache.format.shard import Item
from featcache.format.writing import ShardBuilder
from featcache.version.ledger import Failure

_Record = TypeVar("_Record", Item, Failure)

_UNREAD = frozenset({Reason.FILE_MISSING, Reason.FILE_UNREADABLE})


class OpenShard:
    """A task in progress, with a shard for each version. Not thread-safe."""

    def __init__(
        self, task: ShardTask, jobs: Sequence[VersionJob], leaves_unread: bool = False
    ) -> None:
        self.jobs = jobs
        self._task = task
        self._left = _UNREAD if leaves_unread else frozenset()
        self._builders = [ShardBuilder(job.version.info.spec) for job in jobs]
        self._failures: list[list[Failure]] = [[] for _ in jobs]
        self._unread: list[list[Failure]] = [[] for _ in jobs]
        self._progress = Progress()
        ids = (utterance.id for utterance in task.utterances)
        self._generations = dict(zip(ids, task.generations, strict=True))

    def append(self, part: Iterable[Extracted]) -> Progress:
        """Append a part of a batch. Raises ExtractorError if the spec does not hold it."""
        progress = Progress()
        seconds: dict[str, float] = {}  # by utterance, over all versions
        for number, (job, extracted) in enumerate(zip(self.jobs, part, strict=True)):
            failures: list[Failure] = []
            for failure in map(self._with_generation, extracted.failures):
                if failure.reason in self._left:
                    self._unread[number].append(failure)
                else:
                    failures.append(failure)
            self._failures[number] += failures
            items = map(self._with_generation, extracted.items)
            for item, clip in zip(items, extracted.features, strict=True):
                self._builders[number].append(item, clip.features, clip.side)
                seconds[item.id] = item.num_samples / job.built.sample_rate
            progress += job.count(replace(extracted, failures=failures))
        progress += Progress(audio_seconds=sum(seconds.values()))
        self._progress += progress
        return progress

    def _with_generation(self, record: _Record) -> _Record:
        generation = self._generations[record.id]
        return record if generation == 1 else structs.replace(record, generation=generation)

    def commit(self) -> DoneTask:
        """Record the failures, and make the shards visible. Raises StoreError if the
        cache cannot be written."""
        num_shards = 0
        for job, builder, failures in zip(self.jobs, self._builders, self._failures, strict=True):
            job.run.fail(failures)
            if len(builder):
                name, files = builder.files(
                    fingerprint=job.version.info.fingerprint,
                    row=self._task.row,
                    manifest=self._task.manifest,
                    made_by=job.made_by,
                    where=job.version.path,
                )
                job.version.store.publish(files, f"shards/{name}")
                num_shards += 1
        progress = self._progress + Progress(shards=num_shards)
        return DoneTask(self._task.row, progress, self._unread)
