"""Planning: `plan_extraction` compares a manifest with the versions of configs. It writes
nothing but a source's missing index."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.config import Config
from featcache.device import Device
from featcache.errors import ConfigError, megabytes
from featcache.extraction.audio_files import (
    copying_notes,
    missing_file_notes,
    refuse_another_corpus,
    require_reading,
    row_seconds,
    same_span_notes,
    with_changed_files,
)
from featcache.extraction.from_version import SourceVersion, find_source
from featcache.extraction.options import Options
from featcache.extraction.padded_rows import choose_batching
from featcache.extraction.tasks import want
from featcache.extraction.version_plan import (
    BuiltConfig,
    VersionPlan,
    new_version_notes,
    replacement_notes,
    suspect_notes,
)
from featcache.manifest.copies import Copies
from featcache.manifest.label_files import rows_of
from featcache.manifest.utterances import Manifest
from featcache.storage.base import MARK
from featcache.storage.location import Location, as_location
from featcache.storage.opening import open_store
from featcache.strings import Strings
from featcache.version.in_flight import Suspects, find_suspects
from featcache.version.index import Index
from featcache.version.indexing import index_of, open_index
from featcache.version.join import RowKeys, RowStatus, join, refuse_paths
from featcache.version.ledger import RowFailures, by_id, failures_by_row
from featcache.version.records import read_probes
from featcache.version.version import Version
from featcache.version.wanted import Wanted, read_all_wanted


@dataclass(frozen=True)
class ExtractionPlan:
    """The plan of a run."""

    manifest: Manifest
    cache: Location
    options: Options
    only: Strings | None
    """The ids that the run is restricted to; None for all."""
    source: SourceVersion | None
    """The version whose features are used instead of audio; None for audio."""
    batch_seconds: float
    """Seconds of audio, about, that a worker extracts at once."""
    versions: Sequence[VersionPlan] = ()
    notes: Sequence[str] = ()
    """Lines that a user should read before the run begins."""
    locked: frozenset[str] = frozenset()
    """The places of the versions whose lock this run holds."""

    def again(self) -> ExtractionPlan:
        """Plan the same run again, as its versions have changed."""
        built = [version.built for version in self.versions]
        return plan_extraction(self.manifest, built, self.cache, self.options, self.only)

    @property
    def device(self) -> Device:
        """The device that all configs are built for."""
        return self.versions[0].built.device

    @property
    def seconds_to_decode(self) -> float:
        """Seconds of audio to extract. Copies count; versions that are filled together
        count once."""
        return sum(
            max(version.expected_seconds for version in group)
            for group in group_versions(self.versions)
        )


def plan_extraction(
    manifest: Manifest,
    configs: Sequence[Config | BuiltConfig],
    cache: str | Location,
    options: Options,
    only: Strings | None = None,
) -> ExtractionPlan:
    """Plan a run: compare the manifest with each config's version, and build the
    extractors of incomplete ones, for which torch is configured.

    Args:
        configs: A version is filled for each. A built config is not built again.
        only: Extract these ids, even if there are older items of them, and no others.

    Raises:
        ConfigError: The device does not exist, or a config does not suit its extractor.
        ManifestError: The manifest looks like another corpus, or none of its files is
            there.
        MissingDependencyError: The package that fetches files at URLs is not installed.
        ArgumentError: A version's folder has been renamed, or the cache cannot be
            written.
        DamagedError: A version's metadata, or a shard's table, is damaged.
    """
    cache = as_location("cache", cache)
    device = Device(options.own_device, options.threads)
    all_built = [
        config if isinstance(config, BuiltConfig) else BuiltConfig(config, device)
        for config in configs
    ]
    names = sorted(built.config.name for built in all_built)
    if len({*names}) < len(names):
        raise ConfigError(
            f"two configs have the same name: {', '.join(names)}; each names a version"
        )
    if options.source is None:
        require_reading(manifest)
    for built in all_built:
        if not open_store(cache / built.folder_name).exists(MARK):
            # A config that does not suit its extractor is refused before audio is looked at.
            _ = built.extractor
    source = None
    if options.source is not None:
        source = find_source(all_built, options.source, keep_index=not options.dry_run)
    batch_seconds = all_built[0].device.batch_seconds
    plan = ExtractionPlan(manifest, cache, options, only, source, batch_seconds)
    all_rows: dict[tuple[Copies, str | None], _Rows] = {}
    versions = []
    for built in all_built:
        key = built.config.copies, built.label_files
        if key not in all_rows:
            all_rows[key] = _rows_of_run(plan, built)
        versions.append(_plan_version(plan, built, all_rows[key]))
    plan = replace(plan, versions=versions)
    return replace(plan, notes=_notes(plan))


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows that versions with the same copies, and of the same label files if they are
    made of these, should hold."""

    manifest: Manifest
    """The rows of the run, with the config's copies."""
    seconds: NDArray[np.float64]
    keys: RowKeys
    all_hashes: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    """The hashes of the ids and of the rows of the whole manifest: uint64 `[rows]`."""
    first: int


def _rows_of_run(plan: ExtractionPlan, built: BuiltConfig) -> _Rows:
    """Return the rows of a version, or a partition of them, and each row's seconds.

    A partition is a slice of the utterances by the manifest's durations alone, so that
    all jobs of an array agree."""
    manifest, partition = plan.manifest, plan.options.own_partition
    copies = built.config.copies
    rows = rows_of(manifest, built.config.resolved())
    keys = RowKeys.of(rows)
    all_hashes = keys.id_hashes, keys.hashes
    first, end = 0, len(manifest)
    if partition is not None:
        first, end = partition.span(manifest.duration)
        rows = rows.take(np.arange(first * len(copies), end * len(copies)))
        keys = RowKeys.of(rows)
    speed = np.tile(copies.speeds, end - first)
    known = rows.duration / speed  # a faster copy is shorter
    if plan.source is not None:
        known = plan.source.seconds(rows, known)
    if built.label_files is not None:  # which have no header that says it
        known = np.nan_to_num(known, nan=10.0)
    return _Rows(rows, row_seconds(rows, known, speed), keys, all_hashes, first * len(copies))


def _plan_version(plan: ExtractionPlan, built: BuiltConfig, rows: _Rows) -> VersionPlan:
    """Compare a version with the rows that it should hold, and choose its batching."""
    path, options = plan.cache / built.folder_name, plan.options
    is_new = not open_store(path).exists(MARK)
    index, suspects = index_of([]), Suspects()
    before: list[Wanted] = []
    probes: list[dict[str, Any]] = []
    info = None
    if is_new:
        status = join(rows.keys, index, {})
    else:
        version = Version.open(path)
        index = open_index(version, keep=False)
        failures = failures_by_row(version, index)
        suspects = find_suspects(version, by_id(failures))
        status = _compare(plan, built, rows, version, index, failures)
        before = [*read_all_wanted(version)]
        probes = read_probes(version)
        if version.info.fingerprint == built.fingerprint:
            info = version.info
    name = rows.manifest.source
    if os.path.exists(name):
        name = os.path.realpath(name)
    again = rows.first + np.flatnonzero(status.again)
    wanted = want(name, rows.all_hashes, index, before, again)
    # If a shard is gone, an older item counts again, but it does not stand for the newer one.
    in_whole = slice(rows.first, rows.first + len(rows.manifest))
    status = replace(status, present=status.present & ~wanted.lacks(index)[in_whole])
    failed_rows = np.flatnonzero(status.failed).tolist()
    reasons = Counter(status.failures[row].reason for row in failed_rows)
    batching = None
    if info is None or status.missing.any() or options.batching is not None:
        info = built.info
        # Workers look for probes of their devices themselves.
        label = "" if options.workers else built.device.label
        batching = choose_batching(
            built.extractor, probes, label, options.batching, options.allow_mismatch
        )
    return VersionPlan(
        built=built,
        manifest=rows.manifest,
        seconds=rows.seconds,
        first_row=rows.first,
        wanted=wanted,
        info=info,
        path=path,
        is_new=is_new,
        index=index,
        rows=status,
        batching=batching,
        failed_before=dict(sorted(reasons.items())),
        suspects=suspects,
    )


def _compare(
    plan: ExtractionPlan,
    built: BuiltConfig,
    rows: _Rows,
    version: Version,
    index: Index,
    failures: RowFailures,
) -> RowStatus:
    """Compare the rows with the version's items, and refuse the manifest of another
    corpus."""
    options, manifest = plan.options, rows.manifest
    status = join(rows.keys, index, failures)
    tried = np.flatnonzero(status.failed)
    files = [manifest.resolve(path) for path in manifest.paths.take(tried)]
    failed = [status.failures[row] for row in tried.tolist()]
    stands = np.zeros_like(status.failed)
    if not options.retry_failed:
        stands[tried] = built.would_fail_again(failed, files)
    status = replace(status, failed=stands)
    if options.check_sources:
        status = with_changed_files(manifest, status, index, version)
    elif plan.only is None:
        refuse_another_corpus(manifest, status, index, version)
    if plan.only is not None:
        wanted = np.isin(rows.keys.id_hashes, plan.only.hashes())
        # An item that the version still holds of these ids is older than the lost one.
        return replace(status, wanted=wanted, present=status.present & ~wanted)
    if not options.replace:
        refuse_paths(manifest, status, version, index)
    return status


def _notes(plan: ExtractionPlan) -> list[str]:
    notes = []
    lacking = [version for version in plan.versions if version.num_missing]
    for version in plan.versions:
        name = version.config.name
        if version.num_missing:
            warning = version.built.extractor.chunk_warning(version.config.extractor)
            if warning is not None:
                notes.append(f"{name}: {warning}")
        if version.is_new:
            notes += new_version_notes(plan.cache, version.info)
        if version.batching is not None and version.batching.note is not None:
            notes.append(f"{name}: {version.batching.note}")
        notes += suspect_notes(version)
        if plan.only is None:
            notes += replacement_notes(version)
    if plan.only is not None:
        return notes
    if any(version.is_new for version in plan.versions):
        notes += same_span_notes(plan.manifest)
    if plan.source is None and lacking:  # the other versions need the same files
        first = lacking[0]
        is_partition = len(first.wanted) != len(first.manifest)
        whole = plan.manifest if is_partition else None
        notes += missing_file_notes(first.manifest, first.rows.missing, whole)
        notes += copying_notes(first.manifest)
    num_bytes = sum(version.expected_bytes for version in plan.versions)
    return notes + disk_space_notes(plan.cache, num_bytes)


def disk_space_notes(cache: Location, num_bytes: float) -> list[str]:
    """Warn if the disk has no room for so many bytes, about."""
    if not isinstance(cache, Path):
        return []
    free = shutil.disk_usage(existing_folder(cache)).free
    if num_bytes <= free:
        return []
    return [
        f"{cache}: the features take about {megabytes(num_bytes)}, and the disk has "
        f"{megabytes(free)} free"
    ]


def existing_folder(folder: Path) -> Path:
    """Return the folder, or the lowest above it that exists."""
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def group_versions(versions: Sequence[VersionPlan]) -> list[list[VersionPlan]]:
    """Group the versions that are filled together: they lack the same rows, and agree on
    TF32, which is a switch of the whole process."""
    groups: dict[object, list[VersionPlan]] = {}
    for version in versions:
        if version.num_missing:
            key = (
                id(version.manifest),
                version.rows.missing.tobytes(),
                version.wanted.rows[2].tobytes(),
                version.built.extractor.tf32,
            )
            groups.setdefault(key, []).append(version)
    return [*groups.values()]
