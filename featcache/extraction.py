"""The main job: takes a manifest and configs, fills versions, returns a summary."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import or_
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.arguments import refuse_url
from featcache.audio.waveform import WaveformMaker
from featcache.config import Config
from featcache.device import Device
from featcache.engines.apart import Apart, Recipe
from featcache.engines.local import LocalEngine
from featcache.engines.others import Others
from featcache.engines.progress import Counted, Progress, Watch
from featcache.engines.shards import Fill
from featcache.errors import ConfigError
from featcache.extract.derived import producer, source_of
from featcache.extract.notes import about_chunks, about_missing_files, about_replaced, about_siblings, about_suspects
from featcache.extract.plan import ShardTask, compare, tasks
from featcache.extract.policy import Choice, choose_policy
from featcache.extract.sources import (
    refuse_another_corpus,
    refuse_other_files,
    row_seconds,
    with_changed_sources,
    would_fail_again,
)
from featcache.extract.target import Target, longest
from featcache.extract.work import Options, Work, refuse_dtype, version_info
from featcache.extractors.rows import RowExtractor
from featcache.extractors.units import Units
from featcache.manifest import Manifest
from featcache.manifest.copies import Copies, expand
from featcache.store.in_flight import InFlight, find_suspects, forget_suspects
from featcache.store.index import build_index, open_index
from featcache.store.provenance import library_versions
from featcache.store.runs import Failure, Run, standing_failures
from featcache.store.version import Version
from featcache.strings import Strings
from featcache.summary import Summary, summarize

SHARD_HOURS = 4.0
"""A shard's audio, at most about: what a kill costs."""


class Extraction:
    """A run, planned and not yet begun: nothing is written before `run`.

    Args:
        manifest: what is wanted.
        configs: one version is filled for each; files are decoded once for all that lack the same rows.
        cache: the folder that holds versions.
        options: of the run.
        only: extract these ids, even where something older of them is there, and no others.

    Attributes:
        work: what each config's version lacks.
        notes: lines worth telling a user before it begins.

    Raises:
        ConfigError: the device does not exist, or a parameter does not go with the sample rate.
        ManifestError: it looks like another corpus with the same ids, or like one of another root: none of its files is
            there.
        ArgumentError: a version's folder has been renamed, or the cache is a URL.
        DamagedError: a version's metadata or columns are damaged.
    """

    def __init__(
        self,
        manifest: Manifest,
        configs: Sequence[Config],
        cache: Path,
        options: Options,
        only: Strings | None = None,
    ) -> None:
        refuse_url("cache", cache)
        names = [config.name for config in configs]
        if len(set(names)) < len(names):
            raise ConfigError(f"two configs have the same name: {', '.join(sorted(names))}; each names a version")
        self.manifest = manifest
        self.cache = cache
        self.options = options
        self._only = only
        self.device = Device(options.device, options.threads)
        self.notes: list[str] = []
        self._started = perf_counter()
        self._extractors = {config.name: config.build(self.device.torch_device) for config in configs}
        for config in configs:
            extractor = self._extractors[config.name]
            refuse_dtype(config, extractor.spec)
            if isinstance(extractor, Units):
                extractor.check_audio(config.audio.model_dump())
            self.notes += about_chunks(config, extractor)
        self._expanded: dict[Copies, Manifest] = {}
        self._made_by = library_versions()
        self._source = source_of(configs, self._extractors, options.source) if options.source else None
        self.work = [self._compare(config) for config in configs]
        if only is None:
            self.notes += [about_replaced(work) for work in self.work if work.replaced]
        if self._source is None and only is None:
            lacking = [work for work in self.work if work.todo.missing.any()]
            for work in lacking[:1]:  # the others' files are the same
                self.notes += about_missing_files(work.manifest, work.todo.missing)
        self._seconds: dict[Copies, NDArray[np.float64]] = {}

    @property
    def missing(self) -> int:
        """Utterances to extract, over all versions."""
        return sum(int(work.todo.missing.sum()) for work in self.work)

    def row_seconds(self, work: Work) -> NDArray[np.float64]:
        """Seconds of audio of each row of what one version is to hold, float64 `[rows]`.

        They are the manifest's or the source's, and else by some files' headers; a faster copy lasts less long.
        """
        copies = work.config.copies
        if copies not in self._seconds:
            speed = np.tile(copies.speeds, len(self.manifest))
            known = work.manifest.duration / speed
            if self._source is not None:
                known = self._source.seconds(replace(work.manifest, duration=known))
            self._seconds[copies] = row_seconds(work.manifest, known, speed)
        return self._seconds[copies]

    def expected_seconds(self, work: Work) -> float:
        """Seconds of audio to extract for one version."""
        return float(self.row_seconds(work)[work.todo.missing].sum())

    @property
    def seconds_to_decode(self) -> float:
        """Seconds of audio to extract, copies counted; versions that are filled together count once."""
        return sum(max(self.expected_seconds(work) for work in group) for group in self._groups())

    def expected_bytes(self, work: Work) -> float:
        """Bytes of features to write for one version, with the scales and offsets of quantised ones.

        How much an extractor gives beside its features is not known before.
        """
        parameters = int(work.todo.missing.sum()) * work.info.spec.bytes_per_item
        return self.expected_seconds(work) * work.bytes_per_second + parameters

    def run(self, report: Callable[[Progress], None] = lambda _: None, stop: threading.Event | None = None) -> Summary:
        """Extract what is missing.

        Args:
            report: called with the progress now and then, from worker threads, one at a time.
            stop: set it to end the run after the shards that are whole.

        Raises:
            StoreError: the cache cannot be written. What was committed stays.
        """
        stop = stop or threading.Event()
        progress = Progress()
        for group in self._groups():
            if not stop.is_set():
                self._fill(group, progress, report, stop)
        return summarize(
            self.work,
            progress,
            self.device,
            utterances=len(self.manifest),
            seconds=perf_counter() - self._started,
            interrupted=stop.is_set(),
        )

    def _compare(self, config: Config) -> Work:
        info = version_info(config, self._extractors[config.name].spec)
        path = self.cache / info.folder_name
        waveform_maker = WaveformMaker.of(config.audio, config.augment)
        copies = waveform_maker.copies
        if copies not in self._expanded:
            self._expanded[copies] = expand(self.manifest, copies)
        manifest = self._expanded[copies]
        if not (path / "zarr.json").exists():
            self.notes += about_siblings(self.cache, info)
            index = build_index([])
            choice = self._choose(config, [])
            return Work(config, manifest, info, path, compare(manifest, index, {}), index, choice)
        version = Version.open(path)
        index = open_index(version)
        failures = standing_failures(version, index)
        limit = self._max_seconds(config)

        def is_unchanged(failure: Failure) -> bool:
            if self.options.retry_failed:
                return False
            seconds = None if limit is None else limit * waveform_maker.speed(failure.id)
            return would_fail_again(manifest, failure, config.audio, seconds)

        todo = compare(manifest, index, failures, is_unchanged)
        if self.options.check_sources:
            todo = with_changed_sources(manifest, todo, index, version)
        elif self._only is None:
            refuse_another_corpus(manifest, todo, index, version)
        if self._only is None and not self.options.replace:
            refuse_other_files(manifest, todo, index, version, len(copies))
        if self._only is not None:
            wanted = np.isin(manifest.ids.hashes(), self._only.hashes())
            # What is there of them is what the items that are gone had replaced.
            older = np.where(wanted, index.find(manifest.ids), todo.replaces)
            todo = replace(todo, wanted=wanted, present=todo.present & ~wanted, replaces=older)
        reasons = Counter(failures[manifest.ids[row]].reason for row in np.flatnonzero(todo.failed).tolist())
        choice = self._choose(config, version.probes())
        suspects = find_suspects(version, failures)
        self.notes += about_suspects(manifest, todo.missing, suspects, path)
        return Work(config, manifest, info, path, todo, index, choice, dict(sorted(reasons.items())), suspects)

    def _choose(self, config: Config, probes: Sequence[dict[str, Any]]) -> Choice:
        """Decide how a version's rows are put together, and tell its extractor."""
        extractor = self._extractors[config.name]
        options = self.options
        choice = choose_policy(extractor, probes, self.device.label, options.batching, options.allow_mismatch)
        if isinstance(extractor, RowExtractor):
            extractor.policy = choice.policy
        if choice.note:
            self.notes.append(f"{config.name}: {choice.note}")
        return choice

    def _max_seconds(self, config: Config) -> float | None:
        return longest(config.audio.max_seconds, self._extractors[config.name].max_seconds)

    def _groups(self) -> list[list[Work]]:
        """Versions that lack the same rows, and copies, are filled together, if they agree on what a GPU may round."""
        groups: list[list[Work]] = []
        for work in self.work:
            if not work.todo.missing.any():
                continue
            for group in groups:
                if (
                    group[0].manifest is work.manifest
                    and np.array_equal(group[0].todo.missing, work.todo.missing)
                    and not (work.replaced or group[0].replaced)
                    and self._rounds(group[0]) == self._rounds(work)
                ):
                    group.append(work)
                    break
            else:
                groups.append([work])
        return groups

    def _rounds(self, work: Work) -> bool:
        """Whether it takes TF32: switching that off and on is nothing for others to run beside."""
        return self._extractors[work.config.name].tf32

    def _fill(
        self,
        group: Sequence[Work],
        progress: Progress,
        report: Callable[[Progress], None],
        stop: threading.Event,
    ) -> None:
        targets = [
            Target(work.config, self._extractors[work.config.name], Version.create(self.cache, work.info))
            for work in group
        ]
        for target in targets:
            target.version.sweep()
        fills = [
            Fill(
                target,
                Run(target.version, self._asked(work)),
                self._provenance(work),
                Others(target.version, work.index.shards),
            )
            for target, work in zip(targets, group, strict=True)
        ]
        produce = producer(self.manifest.root, targets, self.device, self._source)
        recipe = Recipe.of(self.manifest.root, targets, self.device, self._source)
        suspects = reduce(or_, (work.suspects for work in group))
        with (
            InFlight([fill.run.folder for fill in fills], self.device.workers) as in_flight,
            Apart(targets, recipe, suspects) as apart,
        ):
            engine = LocalEngine(fills, produce, self.device, Watch(progress, report, stop), in_flight, apart)
            engine.run(self._tasks(group))
        for fill in fills:
            outcome = asdict(progress.versions.get(fill.target.config.name, Counted()))
            if not stop.is_set():
                index = open_index(fill.target.version)  # built now, so that training opens it at once
                outcome["items"] = len(index)
                forget_suspects(fill.target.version, index)
            fill.run.finish({**outcome, "interrupted": stop.is_set()})

    def _tasks(self, group: Sequence[Work]) -> Iterator[ShardTask]:
        largest = max(work.bytes_per_second for work in group)
        seconds_per_shard = min(SHARD_HOURS * 3600, self.options.shard_megabytes * 1e6 / largest)
        first = group[0]
        return tasks(first.manifest, first.index, first.todo, self.row_seconds(first), seconds_per_shard)

    def _provenance(self, work: Work) -> dict[str, Any]:
        """What is recorded with every shard."""
        made_by = {**self._made_by, "device": self.device.label}
        return {**made_by, "batching": work.choice.policy, "mismatch": work.choice.mismatch}

    def _asked(self, work: Work) -> dict[str, Any]:
        return {
            "manifest": self.manifest.source,
            "root": str(self.manifest.root),
            "utterances": len(work.manifest),
            "new": int(work.todo.missing.sum()) - work.replaced,
            "held": len(work.index),
            "only": self._only is not None,
            "config": work.config.resolved(),
            "device": str(self.device.torch_device),
            "threads": self.device.threads,
            "from": None if self._source is None else str(self._source.version.path),
            "made_by": self._made_by,
        }
