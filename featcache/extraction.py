"""The main job: a manifest and configs in, versions filled, a summary out."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio import probe_seconds
from featcache.config import Config
from featcache.derived import Source, derive, open_source
from featcache.device import Device
from featcache.engines.local import Counted, LocalEngine, Produce, Progress
from featcache.errors import ConfigError, FeatcacheError, ManifestError, Reason
from featcache.extractors import find
from featcache.extractors.model import ModelExtractor
from featcache.extractors.rows import RowExtractor
from featcache.extractors.units import Units
from featcache.manifest import Manifest
from featcache.memory import AudioMemory
from featcache.pipeline import Target, longest, process
from featcache.plan import ShardTask, Todo, compare, tasks
from featcache.policy import Choice, choose_policy
from featcache.provenance import library_versions
from featcache.spec import FeatureSpec
from featcache.store.index import Index, build_index, open_index
from featcache.store.runs import Failure, Run, latest_failures, roots
from featcache.store.version import Version, VersionInfo, differing_keys, select_versions
from featcache.strings import Strings

SHARD_MEGABYTES = 128.0
"""A shard's size, about."""

SHARD_HOURS = 4.0
"""A shard's audio, at most about: what a kill costs."""

_PROBED = 256
"""Files whose headers are read to estimate durations that the manifest does not give."""

_STAT_THREADS = 16


@dataclass(frozen=True)
class Options:
    """What a run may choose, and values do not depend on.

    Attributes:
        device: `cpu`, `cuda`, `cuda:1`; None is cuda where there is one.
        threads: the budget for everything; None is what `Device` says.
        shard_megabytes: a shard's size, about.
        retry_failed: try failures of earlier runs again, whether or not their files changed.
        check_sources: extract again where a file's size or mtime is not what it was.
        source: a version, or the cache that holds it, to make features from instead of audio; for `units` alone.
        batching: how rows are put together: `single`, `equal_length`, `padded`; None for the loosest that is clean.
        allow_mismatch: take that, though it was neither declared nor found to be clean.
    """

    device: str | None = None
    threads: int | None = None
    shard_megabytes: float = SHARD_MEGABYTES
    retry_failed: bool = False
    check_sources: bool = False
    source: Path | None = None
    batching: str | None = None
    allow_mismatch: bool = False


@dataclass(frozen=True)
class Work:
    """What one config's version lacks.

    Attributes:
        config: the config.
        info: of the version.
        path: of the version, which may not exist yet.
        todo: what is missing.
        index: of what is there.
        choice: how its extractor's rows are put together.
        replaced: how many items there are of rows or files that have changed.
    """

    config: Config
    info: VersionInfo
    path: Path
    todo: Todo
    index: Index
    choice: Choice

    @property
    def replaced(self) -> int:
        """Rows whose item in the cache another row or another file made."""
        return int((self.todo.missing & (self.todo.replaces >= 0)).sum())


@dataclass(frozen=True)
class VersionSummary:
    """What a run did to one version.

    Attributes:
        name: the config's.
        path: of the version.
        present: utterances of the manifest that were there already.
        extracted: utterances extracted by this run.
        failed: utterances in the ledger: by this run and, not tried again, by earlier ones.
        num_bytes: of features, written by this run.
        seconds: of worker threads that computing them took.
    """

    name: str
    path: str
    present: int
    extracted: int
    failed: int
    num_bytes: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        utterances: in the manifest.
        versions: one entry a config.
        failures: of this run, by reason.
        resampled: utterances whose file had another rate than the config.
        audio_hours: extracted.
        seconds: from start to end.
        device: that extracted.
        threads: the budget.
        stages: each stage's share of the worker threads' time, 0 to 1.
        bottleneck: the stage that held the run back; empty where there was nothing to do.
        elsewhere: utterances that another run did meanwhile.
        interrupted: whether the run was stopped before its end.
    """

    utterances: int
    versions: list[VersionSummary]
    failures: dict[str, int]
    resampled: int
    audio_hours: float
    seconds: float
    device: str
    threads: int
    stages: dict[str, float] = field(default_factory=dict)
    bottleneck: str = ""
    elsewhere: int = 0
    interrupted: bool = False

    @property
    def times_real_time(self) -> float:
        """Seconds of audio extracted in a second."""
        return self.audio_hours * 3600 / self.seconds if self.seconds else 0.0

    @property
    def failed(self) -> int:
        """Utterances in the failure ledger, over all versions."""
        return sum(version.failed for version in self.versions)


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
            _refuse_dtype(config, extractor.spec)
            if isinstance(extractor, Units):
                extractor.check_audio(config.audio.model_dump())
            self._note_inexact_chunks(config)
        self._made_by = library_versions()
        self._source = self._open_source(configs) if options.source else None
        self.work = [self._compare(config) for config in configs]
        self.notes += [
            f"{work.info.folder_name}: {work.replaced:,} utterances are extracted again: their path, start, duration, "
            "channel or file is not what it was"
            for work in self.work
            if work.replaced and only is None
        ]
        self._seconds: NDArray[np.float64] | None = None

    @property
    def missing(self) -> int:
        """Utterances to extract, over all versions."""
        return sum(int(work.todo.missing.sum()) for work in self.work)

    @property
    def row_seconds(self) -> NDArray[np.float64]:
        """Seconds of audio of each row, float64 `[rows]`: the manifest's or source's, else by some files' headers."""
        if self._seconds is None:
            known = self.manifest.duration if self._source is None else self._source.seconds(self.manifest)
            self._seconds = _row_seconds(self.manifest, known)
        return self._seconds

    def expected_seconds(self, work: Work) -> float:
        """Seconds of audio to extract for one version."""
        return float(self.row_seconds[work.todo.missing].sum())

    def expected_bytes(self, work: Work) -> float:
        """Bytes of features to write for one version."""
        return self.expected_seconds(work) * _bytes_per_second(work.info)

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
        return self._summary(progress, stop.is_set())

    def _compare(self, config: Config) -> Work:
        info = version_info(config, self._extractors[config.name].spec)
        path = self.cache / info.folder_name
        if not (path / "zarr.json").exists():
            self._note_siblings(info)
            index = build_index([])
            return Work(config, info, path, compare(self.manifest, index, {}), index, self._choose(config, []))
        version = Version.open(path)
        index = open_index(version)
        failures = {} if self.options.retry_failed else latest_failures(version)
        todo = compare(self.manifest, index, failures, partial(self._is_unchanged, self._max_seconds(config)))
        if self.options.check_sources:
            todo = _with_changed_sources(self.manifest, todo, index, version)
        elif self._only is None:
            self._refuse_another_corpus(version, index, todo)
        if self._only is not None:
            wanted = np.isin(self.manifest.ids.hashes(), self._only.hashes())
            # What is there of them is what the items that are gone had replaced.
            older = np.where(wanted, index.find(self.manifest.ids), todo.replaces)
            todo = replace(todo, wanted=wanted, present=todo.present & ~wanted, replaces=older)
        return Work(config, info, path, todo, index, self._choose(config, version.probes()))

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

    def _open_source(self, configs: Sequence[Config]) -> Source:
        """The version that the configs' features are made from.

        Raises:
            ConfigError: they are made from audio alone, or from other features than these.
        """
        assert self.options.source is not None
        for config in configs:
            if not isinstance(self._extractors[config.name], Units):
                raise ConfigError(f"--from: {config.name}: {config.extractor} is made from audio; only units are not")
        sources = {
            extractor.source_fingerprint for extractor in self._extractors.values() if isinstance(extractor, Units)
        }
        if len(sources) > 1:
            raise ConfigError("--from: these units are not all of the same features: give their configs one at a time")
        return open_source(self.options.source, sources.pop())

    def _refuse_another_corpus(self, version: Version, index: Index, todo: Todo) -> None:
        """Refuse a manifest that has the version's ids and paths, and other files: another corpus, it seems.

        Only where its root is one that the version does not know, and by some files' sizes: a corpus that has been
        moved has the same.

        Raises:
            ManifestError: says what to do in either case.
        """
        if not todo.present.any() or str(self.manifest.root) in roots(version):
            return
        present = np.flatnonzero(todo.present)
        some = present[np.unique(np.linspace(0, len(present) - 1, _PROBED).astype(np.int64))]
        sample = replace(todo, present=np.isin(np.arange(len(self.manifest)), some))
        changed = some[~_with_changed_sources(self.manifest, sample, index, version, sizes_only=True).present[some]]
        if len(changed):
            row = self.manifest[int(changed[0])]
            raise ManifestError(
                f"{self.manifest.source}: {len(changed):,} of {len(some):,} files looked at are of another size than "
                f"those that {version.path} holds, {self.manifest.resolve(row.path)} for one: another corpus "
                "with the same ids and paths? Then give it a cache of its own with -o. Or has the audio changed? "
                "Then --check-sources extracts that again"
            )

    def _max_seconds(self, config: Config) -> float | None:
        return longest(config.audio.max_seconds, self._extractors[config.name].max_seconds)

    def _note_siblings(self, info: VersionInfo) -> None:
        """Say what is different where there is a version of the same name under another fingerprint."""
        try:
            siblings = select_versions(self.cache, info.name)
        except FeatcacheError:
            return  # no cache yet, or damage elsewhere in it, which is verify's to tell
        places = [f"params.{name}:" for name in find(info.config["extractor"]).Params.locations]
        for sibling in siblings:
            keys = differing_keys(sibling.info.config, info.config)
            deciding = [key for key in keys if not key.startswith(tuple(places))]
            self.notes.append(
                f"{info.folder_name} is a new version beside {sibling.path.name}: "
                + (", ".join(deciding) or "the extractor's revision, or what its weights hold, differs")
            )

    def _note_inexact_chunks(self, config: Config) -> None:
        """Say where long clips will be cut into chunks whose values are not quite those of the whole."""
        extractor = self._extractors[config.name]
        if isinstance(extractor, ModelExtractor) and extractor.params.chunk:
            extractor.pieces(
                round(3 * extractor.params.chunk.seconds * extractor.spec.sample_rate)
            )  # or it is refused now
        if isinstance(extractor, ModelExtractor) and not extractor.chunks_are_exact:
            self.notes.append(
                f"{config.name}: chunks with {extractor.params.chunk.overlap:g} s of overlap are not exact for "
                f"{config.extractor}, whose frames look further: `featcache probe` says by how much"
            )

    def _is_unchanged(self, max_seconds: float | None, failure: Failure) -> bool:
        """Whether what failed would fail again: its file is still the same, and it still too long, if it was.

        An unreadable file may be readable by now, and what was not in the source be there.
        """
        path = self.manifest.resolve(failure.path)
        if failure.reason in (Reason.FILE_UNREADABLE, Reason.NOT_IN_SOURCE) or _stat(path) != (
            failure.size,
            failure.mtime_ns,
        ):
            return False
        if failure.reason != Reason.TOO_LONG:
            return True
        held = math.inf if failure.duration else probe_seconds(path)  # infinite: at least its duration
        if max_seconds is None or held is None:
            return False
        return min(failure.duration or math.inf, held - (failure.start or 0.0)) > max_seconds

    def _groups(self) -> list[list[Work]]:
        """Versions that lack the same rows are filled together, if they agree on what a GPU may round."""
        groups: list[list[Work]] = []
        for work in self.work:
            if not work.todo.missing.any():
                continue
            for group in groups:
                if (
                    np.array_equal(group[0].todo.missing, work.todo.missing)
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
        runs = [Run(target.version, self._asked(target)) for target in targets]
        produce: Produce
        if self._source is None:
            produce = partial(process, self.manifest.root, targets, self.device, AudioMemory())
        else:
            produce = partial(derive, self.manifest.root, targets, self.device, self._source)
        engine = LocalEngine(
            targets=targets,
            runs=runs,
            produce=produce,
            device=self.device,
            made_by=[
                {
                    **self._made_by,
                    "device": self.device.label,
                    "batching": work.choice.policy,
                    "mismatch": work.choice.mismatch,
                }
                for work in group
            ],
            progress=progress,
            report=report,
            stop=stop,
            planned=[work.index.shards for work in group],
        )
        engine.run(self._tasks(group))
        for target, run in zip(targets, runs, strict=True):
            counted = progress.versions.get(target.config.name, Counted())
            run.finish({**asdict(counted), "interrupted": stop.is_set()})
            if not stop.is_set():
                open_index(target.version)  # built now, so that training opens it at once

    def _tasks(self, group: Sequence[Work]) -> Iterator[ShardTask]:
        largest = max(_bytes_per_second(work.info) for work in group)
        seconds_per_shard = min(SHARD_HOURS * 3600, self.options.shard_megabytes * 1e6 / largest)
        first = group[0]
        return tasks(self.manifest, first.index, first.todo, self.row_seconds, seconds_per_shard)

    def _asked(self, target: Target) -> dict[str, Any]:
        return {
            "manifest": self.manifest.source,
            "root": str(self.manifest.root),
            "config": target.config.resolved(),
            "device": str(self.device.torch_device),
            "threads": self.device.threads,
            "from": None if self._source is None else str(self._source.version.path),
            "made_by": self._made_by,
        }

    def _summary(self, progress: Progress, interrupted: bool) -> Summary:
        versions = []
        for work in self.work:
            counted = progress.versions.get(work.config.name, Counted())
            versions.append(
                VersionSummary(
                    name=work.config.name,
                    path=str(work.path),
                    present=int(work.todo.present.sum()),
                    extracted=counted.extracted,
                    failed=int(work.todo.failed.sum()) + counted.failed,
                    num_bytes=counted.num_bytes,
                    seconds=round(counted.seconds, 3),
                )
            )
        spent = sum(progress.stages.values())
        stages = {name: round(seconds / spent, 4) for name, seconds in progress.stages.items()} if spent else {}
        return Summary(
            utterances=len(self.manifest),
            versions=versions,
            failures={reason: count for reason, count in sorted(progress.failures.items()) if count},
            resampled=progress.resampled,
            audio_hours=progress.audio_seconds / 3600,
            seconds=perf_counter() - self._started,
            device=self.device.label,
            threads=self.device.threads,
            stages=stages,
            bottleneck=max(stages, key=lambda name: stages[name]) if stages else "",
            elsewhere=progress.elsewhere,
            interrupted=interrupted,
        )


def _refuse_dtype(config: Config, spec: FeatureSpec) -> None:
    """Refuse to store features as integers, and codes as what does not hold them all: casts do not complain."""
    made, stored = np.dtype(spec.dtype), np.dtype(config.dtype)
    if made.kind == "f" and stored.kind != "f":
        raise ConfigError(
            f"store.dtype: {stored} cannot hold the features of {config.extractor}, which are {made}: "
            "take float16 or float32"
        )
    if made.kind != "f":
        largest = max(spec.codebook_sizes, default=int(np.iinfo(made).max) + 1) - 1
        if stored.kind == "f" or largest > np.iinfo(stored).max:
            raise ConfigError(
                f"store.dtype: {stored}: codes of {config.extractor} are unsigned integers up to {largest}: "
                f"take {np.min_scalar_type(largest)}"
            )


def version_info(config: Config, spec: FeatureSpec) -> VersionInfo:
    """What a version of `config` says of itself, whose extractor's features are as `spec` says."""
    stored = replace(spec, dtype=config.dtype)
    return VersionInfo(config.name, config.fingerprint(), config.resolved(), stored, library_versions())


def _bytes_per_second(info: VersionInfo) -> float:
    return info.spec.frame_rate * math.prod(info.spec.item_shape) * np.dtype(info.spec.dtype).itemsize


def _row_seconds(manifest: Manifest, known: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row's duration; where it is not known, being NaN, the mean of what some files' headers say."""
    seconds = known.copy()
    unknown = np.flatnonzero(np.isnan(seconds))
    if not len(unknown):
        return seconds
    probed = unknown[np.unique(np.linspace(0, len(unknown) - 1, _PROBED).astype(np.int64))]
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        found = pool.map(lambda row: probe_seconds(manifest.resolve(manifest.paths[row])), probed.tolist())
    known = np.array([math.nan if one is None else one for one in found])
    known -= np.nan_to_num(manifest.start[probed])
    usable = known > 0
    seconds[unknown] = known[usable].mean() if usable.any() else 1.0
    seconds[probed[usable]] = known[usable]
    return seconds


def _with_changed_sources(
    manifest: Manifest, todo: Todo, index: Index, version: Version, sizes_only: bool = False
) -> Todo:
    """Also miss the rows whose file's size or mtime is not what it was when it was decoded."""
    rows = np.flatnonzero(todo.present)
    positions = index.find(manifest.ids.take(rows))
    sources = np.empty((len(rows), 2), np.int64)
    for number, name in enumerate(index.shards):
        inside = np.flatnonzero(index.shard[positions] == number)
        sources[inside] = version.shard(name).column("sources")[index.item[positions[inside]], :2]

    def look(some: NDArray[np.int64]) -> list[tuple[int | None, int | None]]:
        return [_stat(manifest.resolve(path)) for path in manifest.paths.take(some)]

    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        now = list(chain.from_iterable(pool.map(look, np.array_split(rows, 1 + len(rows) // 1024))))
    gone = None, None  # what is no more cannot be extracted again
    counts = 1 if sizes_only else 2
    same = [
        stat == gone or stat[:counts] == tuple(source[:counts])
        for stat, source in zip(now, sources.tolist(), strict=True)
    ]
    changed = ~np.array(same, bool)
    present, replaces = todo.present.copy(), todo.replaces.copy()
    present[rows[changed]] = False
    replaces[rows[changed]] = positions[changed]
    return replace(todo, present=present, replaces=replaces)


def _stat(path: Path) -> tuple[int | None, int | None]:
    """A file's size in bytes and mtime in ns; None where there is no such file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns
