"""A shard task in progress: a writer for each version that it fills, from the first batch to the commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from featcache.engines.others import Others
from featcache.engines.progress import Progress
from featcache.errors import StoreError
from featcache.extract.plan import ShardTask
from featcache.extract.target import Extracted, Target
from featcache.store.runs import Failure, Run
from featcache.store.shard_writer import ShardWriter
from featcache.store.version import Version


@dataclass(frozen=True, eq=False)
class Fill:
    """A version that a run fills.

    Attributes:
        target: the version, and what fills it.
        run: whose ledger takes the failures.
        made_by: recorded with every shard.
        others: what other runs add to it meanwhile.
    """

    target: Target
    run: Run
    made_by: dict[str, Any]
    others: Others


class OpenShard:
    """A task under way. Not thread-safe.

    Args:
        task: what of it is to be done.
        claims: on it; held until it is committed or abandoned. Where this raises, they are still the caller's to close.
        fills: the versions that get it.

    Raises:
        StoreError: the cache cannot be written.
    """

    def __init__(self, task: ShardTask, claims: ExitStack, fills: Sequence[Fill]) -> None:
        self.task = task
        self._fills = fills
        self._failures: list[list[Failure]] = [[] for _ in fills]
        self._audio_seconds = 0.0  # of utterances that any target has extracted
        self._writers: list[ShardWriter] = []
        for version in (fill.target.version for fill in fills):
            spec = version.info.spec
            try:
                writer = ShardWriter(version.work_folder(task.name), spec.item_shape, version.dtype, spec.side)
            except OSError as error:
                raise cannot_write(version, error) from error
            claims.callback(writer.discard)
            self._writers.append(writer)
        self._held = claims.pop_all()  # closing it discards what is not committed, then lets go of the claims

    def append(self, part: Iterable[Extracted], progress: Progress) -> None:
        """Write what each version gets of a part of a batch, and count it.

        Raises:
            StoreError: the cache cannot be written.
        """
        seconds: dict[str, float] = {}  # of each utterance, whichever target has extracted it
        for number, (fill, extracted) in enumerate(zip(self._fills, part, strict=True)):
            try:
                self._writers[number].append(extracted.items, extracted.features, extracted.num_frames, extracted.side)
            except OSError as error:
                raise cannot_write(fill.target.version, error) from error
            self._failures[number] += extracted.failures
            progress.add(fill.target.config.name, extracted)
            rate = fill.target.config.audio.sample_rate
            seconds |= {item.id: item.num_samples / rate for item in extracted.items}
        self._audio_seconds += sum(seconds.values())
        progress.audio_seconds += sum(seconds.values())

    def commit(self, progress: Progress) -> None:
        """Write down what failed, make the shards visible, count them, and let go of the task.

        Raises:
            StoreError: the cache cannot be written.
        """
        for fill, writer, failures in zip(self._fills, self._writers, self._failures, strict=True):
            fill.run.fail(failures, self.task.replaces)
            if not writer.items:
                continue
            version = fill.target.version
            try:
                name = writer.commit(
                    version.path / "shards",
                    sample_rate=fill.target.config.audio.sample_rate,
                    row=self.task.row,
                    supersedes=self.task.supersedes(writer.ids),
                    made_by={**fill.made_by, "run": fill.run.id, "fingerprint": version.info.fingerprint},
                )
            except OSError as error:
                raise cannot_write(version, error) from error
            fill.others.ours(name)
            progress.shards += 1
        self._held.close()

    def abandon(self, progress: Progress) -> None:
        """Drop what was written, take back what was counted of it, and let go of the task."""
        for fill, writer, failures in zip(self._fills, self._writers, self._failures, strict=True):
            progress.take_back(fill.target.config.name, writer.items, writer.num_bytes, failures)
        progress.audio_seconds -= self._audio_seconds
        self._held.close()


def cannot_write(version: Version, error: OSError) -> StoreError:
    """That the disk is full, read-only or broken."""
    return StoreError(
        f"{version.path}: cannot be written: {error.strerror}; the shards committed so far are good: "
        "make room or mend the disk, and run the same command again"
    )
