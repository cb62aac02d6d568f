"""Planning: `plan_extraction` says what a manifest and configs need. Only a source's
missing index is written."""

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
from featcache.manifest.copies import Copies, expand
from featcache.manifest.utterances import Manifest
from featcache.storage.base import MARK, open_store
from featcache.storage.location import Location, as_location
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
    """What a run is to do. Nothing has been written yet."""

    manifest: Manifest
    cache: Location
    """The folder, or the place in an object store, that holds the versions."""
    options: Options
    only: Strings | None
    """The ids that the run is restricted to; None for no restriction."""
    source: SourceVersion | None
    """The version whose features are used instead of audio; None for audio."""
    versions: Sequence[VersionPlan] = ()
    notes: Sequence[str] = ()
    """Lines that a user should read before the run begins."""
    locked: frozenset[str] = frozenset()
    """The places of the versions whose lock this run holds."""

    def again(self) -> ExtractionPlan:
        """The same run, planned again: its versions have changed."""
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
    extractors of incomplete ones.

    For these, the process's torch gets one thread of its own, and TF32 is turned off: see
    `Device.configure_torch`.

    Args:
        manifest: The utterances.
        configs: One version is filled for each. Files are decoded once for all that lack
            the same rows. One that was built, for another manifest, is not built again.
        cache: The folder that holds the versions, or a URL.
        options: The options of the run.
        only: Extract these ids, even if there are older items of them, and no others.

    Raises:
        ConfigError: The device does not exist, or a config does not suit its extractor.
        ManifestError: The manifest looks like another corpus with the same ids, or none
            of its files is there.
        MissingDependencyError: Files are at URLs, and the package that fetches them is
            not installed.
        ArgumentError: A version's folder has been renamed, or the cache's URL is none
            that can be written to.
        DamagedError: A version's metadata, or a shard's table, is damaged.
    """
    cache = as_location("cache", cache)
    device = Device(options.own_device, options.threads)
    built_configs = [
        config if isinstance(config, BuiltConfig) else BuiltConfig(config, device)
        for config in configs
    ]
    names = sorted(built.config.name for built in built_configs)
    if len({*names}) < len(names):
        raise ConfigError(
            f"two configs have the same name: {', '.join(names)}; each names a version"
        )
    if options.source is None:
        require_reading(manifest)
    for built in built_configs:
        if not open_store(cache / built.folder_name).exists(MARK):
            # what does not suit it is refused before any audio file is looked at
            _ = built.extractor
    source = (
        None
        if options.source is None
        else find_source(built_configs, options.source, not options.dry_run)
    )
    plan = ExtractionPlan(manifest, cache, options, only, source)
    rows = {
        copies: _rows_of_run(plan, copies)
        for copies in {built.config.copies: None for built in built_configs}
    }
    plan = replace(
        plan,
        versions=[_plan_version(plan, built, rows[built.config.copies]) for built in built_configs],
    )
    return replace(plan, notes=_notes(plan))


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows that versions with the same copies should hold."""

    manifest: Manifest
    """The rows that the run is about: those of its manifest, or of a partition of it,
    with the config's copies."""
    seconds: NDArray[np.float64]
    """Seconds of audio of each row, `[rows]`; those that the manifest does not say are
    estimates."""
    keys: RowKeys
    hashes: tuple[NDArray[np.uint64], NDArray[np.uint64]]
    """The hashes of the ids of the whole manifest's rows, with all copies, and of these
    rows: uint64 `[rows]`."""
    first: int
    """The number of the first row in the whole."""


def _rows_of_run(plan: ExtractionPlan, copies: Copies) -> _Rows:
    """The manifest with copies, or a partition of it, and each row's seconds: its own,
    else the source's or a header's.

    A partition depends on the manifest, and on nothing else that may differ between the
    jobs of an array: it is a slice of the utterances, cut by their durations if all have
    one, else by their number."""
    manifest, partition = plan.manifest, plan.options.own_partition
    rows = expand(manifest, copies)
    keys = RowKeys.of(rows)
    hashes = keys.id_hashes, keys.hashes
    first, end = 0, len(manifest)
    if partition is not None:
        first, end = partition.span(manifest.duration)
        rows = rows.take(np.arange(first * len(copies), end * len(copies)))
        keys = RowKeys.of(rows)
    speed = np.tile(copies.speeds, end - first)
    known = rows.duration / speed  # a faster copy is shorter
    if plan.source is not None:
        known = plan.source.seconds(rows, known)
    return _Rows(rows, row_seconds(rows, known, speed), keys, hashes, first * len(copies))


def _plan_version(plan: ExtractionPlan, built: BuiltConfig, rows: _Rows) -> VersionPlan:
    """Open the version, compare it with the rows that it should hold, and choose how to
    put rows together."""
    path, options = plan.cache / built.folder_name, plan.options
    index, suspects = index_of([]), Suspects()
    before, probes = list[Wanted](), list[dict[str, Any]]()
    info, batching = None, None
    is_new = not open_store(path).exists(MARK)
    if not is_new:
        version = Version.open(path)
        index = open_index(version, keep=False)
        failures = failures_by_row(version, index)
        suspects = find_suspects(version, by_id(failures))
        status = _compare(plan, built, rows, version, index, failures)
        before, probes = [*read_all_wanted(version)], read_probes(version)
        info = version.info if version.info.fingerprint == built.fingerprint else None
    else:
        status = join(rows.keys, index, {})
    source = rows.manifest.source
    # however it was typed
    source = os.path.realpath(source) if os.path.exists(source) else source
    wanted = want(
        source, rows.hashes, index, before, again=rows.first + np.flatnonzero(status.again)
    )
    # An older item, which counts again since the shard of the newer one is gone, does not
    # stand for that.
    own = slice(rows.first, rows.first + len(rows.manifest))
    status = replace(status, present=status.present & ~wanted.lacks(index)[own])
    failed_rows = np.flatnonzero(status.failed).tolist()
    reasons = Counter(status.failures[row].reason for row in failed_rows)
    if info is None or status.missing.any() or options.batching is not None:
        info, extractor = built.info, built.extractor
        # Workers look for probes of their devices themselves.
        label = "" if options.workers else built.device.label
        batching = choose_batching(
            extractor, probes, label, options.batching, options.allow_mismatch
        )
    failed_before = dict(sorted(reasons.items()))
    of_run = rows.manifest, rows.seconds, rows.first
    return VersionPlan(
        built, *of_run, wanted, info, path, is_new, index, status, batching, failed_before, suspects
    )


def _compare(
    plan: ExtractionPlan,
    built: BuiltConfig,
    rows: _Rows,
    version: Version,
    index: Index,
    failures: RowFailures,
) -> RowStatus:
    """Compare the rows with what the version holds, and refuse the manifest of another
    corpus."""
    options, keys, manifest = plan.options, rows.keys, rows.manifest
    status = join(keys, index, failures)
    tried = np.flatnonzero(status.failed)
    failed = [status.failures[row] for row in tried.tolist()]
    files = [manifest.resolve(path) for path in manifest.paths.take(tried)]
    stands = status.failed.copy()
    stands[tried] = not options.retry_failed and built.would_fail_again(failed, files)
    status = replace(status, failed=stands)
    if options.check_sources:
        status = with_changed_files(manifest, status, index, version)
    elif plan.only is None:
        refuse_another_corpus(manifest, status, index, version)
    if plan.only is None:
        if not options.replace:
            refuse_paths(manifest, status, version, index)
        return status
    wanted = np.isin(keys.id_hashes, plan.only.hashes())
    # Items that the version still holds of these ids are those that the lost items had
    # replaced.
    return replace(status, wanted=wanted, present=status.present & ~wanted)


def _notes(plan: ExtractionPlan) -> list[str]:
    """What a user should read before the run."""
    notes = []
    for version in plan.versions:
        name, extractor = version.config.name, version.config.extractor
        if (
            version.num_missing
            and (warning := version.built.extractor.chunk_warning(extractor)) is not None
        ):
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
    lacking = [version for version in plan.versions if version.num_missing]
    if plan.source is None and lacking:  # the other versions need the same files
        whole = None if len(lacking[0].wanted) == len(lacking[0].manifest) else plan.manifest
        notes += missing_file_notes(lacking[0].manifest, lacking[0].rows.missing, whole)
        notes += copying_notes(lacking[0].manifest)
    return notes + disk_space_notes(
        plan.cache, sum(version.expected_bytes for version in plan.versions)
    )


def disk_space_notes(cache: Location, num_bytes: float) -> list[str]:
    """That the disk has no room for so many bytes, approximately. The cache may not exist
    yet."""
    if not isinstance(cache, Path) or num_bytes <= (
        free := shutil.disk_usage(existing_folder(cache)).free
    ):
        return []
    return [
        f"{cache}: the features take about {megabytes(num_bytes)}, and the disk has "
        f"{megabytes(free)} free"
    ]


def existing_folder(folder: Path) -> Path:
    """The folder, or the lowest above it that exists."""
    return next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
    )


def group_versions(versions: Sequence[VersionPlan]) -> list[list[VersionPlan]]:
    """Group the versions that are filled together: they lack the same rows, and agree on
    what a GPU may round.

    TF32 is a switch of the whole process, so that nothing else may run while one version
    switches it on."""
    groups: dict[object, list[VersionPlan]] = {}
    for version in versions:
        if version.num_missing:
            missing, generations = version.rows.missing.tobytes(), version.wanted.rows[2].tobytes()
            alike = id(version.manifest), missing, generations, version.built.extractor.tf32
            groups.setdefault(alike, []).append(version)
    return [*groups.values()]
