"""Planning: `plan_extraction` compares a manifest with the versions of configs. It writes
nothing but a source's missing index."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache as memoized
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from featcache.audio.formats import OLD_FFMPEG
from featcache.config import Config
from featcache.config.config import find_differences
from featcache.device import Device
from featcache.errors import ArgumentError, ConfigError, StoreError, counted, listing, megabytes
from featcache.extraction.audio_files import (
    copying_notes,
    locations_of,
    missing_file_notes,
    refuse_another_corpus,
    require_reading,
    row_seconds,
    same_span_notes,
    stat_of,
    stats_of,
    with_changed_files,
)
from featcache.extraction.batching import BatchingChoice, choose_batching
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.from_version import SourceVersion, find_source
from featcache.extraction.options import Options
from featcache.extraction.tasks import want
from featcache.format.shard import Item
from featcache.manifest.audio_locations import LocalFile
from featcache.manifest.copies import Copies, expand
from featcache.manifest.label_files import is_imported, with_label_files
from featcache.manifest.strings import Strings, hash_of
from featcache.manifest.utterances import Manifest, rows_at_even_steps
from featcache.storage.base import MARK
from featcache.storage.location import Location, as_location
from featcache.storage.opening import open_store
from featcache.version.in_flight import Suspects, find_suspects
from featcache.version.index import Index
from featcache.version.indexing import index_of, open_index
from featcache.version.join import RowKeys, RowStatus, differences, item_at, join, refuse_paths
from featcache.version.ledger import RowFailures, by_id, failures_by_row
from featcache.version.records import read_probes
from featcache.version.selection import version_names
from featcache.version.version import Version, VersionInfo
from featcache.version.wanted import Wanted, read_all_wanted

_NAMED = 5
"""Utterances that a note names."""

_SIZES = 256
"""The files whose mean size tells how long imported features are."""

_NAME_SOURCE = "name that version, --from CACHE/VERSION"


@dataclass(frozen=True, eq=False)
class _Rows:
    """The rows that versions with the same copies and label files should hold."""

    manifest: Manifest
    seconds: NDArray[np.float64]
    first_row: int
    keys: RowKeys
    whole: NDArray[np.uint64]
    """The rows of a `Wanted` of the whole manifest, with copies, before it has generations."""


@dataclass(frozen=True, eq=False)
class VersionPlan:
    """The plan of a run for one version."""

    manifest: Manifest
    """The rows of the run, with the config's copies."""
    seconds: NDArray[np.float64]
    first_row: int
    """The number of the first row in the whole manifest."""
    built: BuiltConfig
    wanted: Wanted
    info: VersionInfo
    path: Location
    is_new: bool
    index: Index
    rows: RowStatus
    batching: BatchingChoice | None
    """The choice how rows share a batch; None if the extractor is not needed."""
    suspects: Suspects

    @property
    def config(self) -> Config:
        """The config."""
        return self.built.config

    @cached_property
    def failed_before(self) -> dict[str, int]:
        """The number of failed rows that are not tried again, by reason."""
        failed = np.flatnonzero(self.rows.failed).tolist()
        reasons = Counter(self.rows.failures[row].reason for row in failed)
        return dict(sorted(reasons.items()))

    @cached_property
    def num_missing(self) -> int:
        """The number of rows to extract."""
        return int(self.rows.missing.sum())

    @cached_property
    def num_replaced(self) -> int:
        """The number of rows to extract although the version has an item of that id."""
        return int(self.rows.again.sum())

    def find(self, utterance: str) -> int | None:
        """Return the number of the row of this id; None if there is none."""
        rows = np.flatnonzero(self.manifest.ids.hashes() == np.uint64(hash_of(utterance))).tolist()
        return next((row for row in rows if self.manifest.ids[row] == utterance), None)

    @cached_property
    def expected_seconds(self) -> float:
        """Seconds of audio to extract."""
        return float(self.seconds[self.rows.missing].sum())

    @property
    def expected_bytes(self) -> float:
        """Bytes of features to write, without side arrays other than scales and offsets."""
        return self.info.spec.expected_bytes(self.expected_seconds, self.num_missing)


@dataclass(frozen=True)
class ExtractionPlan:
    """The plan of a run."""

    manifest: Manifest
    cache: Location
    options: Options
    only: Strings | None
    """The ids that the run is restricted to; None for all."""
    source: SourceVersion | None
    """The version whose features are used instead of audio."""
    batch_seconds: float
    """Seconds of audio, about, that a worker extracts at once."""
    versions: Sequence[VersionPlan] = ()
    notes: Sequence[str] = ()
    """Lines that a user should read before the run begins."""
    locked: frozenset[str] = frozenset()
    """The places of the versions whose lock this run holds."""

    def again(self) -> ExtractionPlan:
        """Plan the same run again."""
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

    Raises what `featcache.extract` raises; ArgumentError if a version's folder was renamed;
    DamagedError if a version's metadata, or a shard's table, is damaged."""
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
    _check_new_versions(cache, all_built, options.source is not None)
    source = None
    if options.source is not None:
        source = find_source(all_built, options.source, keep_index=not options.dry_run)
    batch_seconds = all_built[0].device.batch_seconds
    for built in all_built if manifest.has_repeats else ():
        with_label_files(manifest, built.label_files)  # refuses two files for a clip
    plan = ExtractionPlan(manifest.clips(), cache, options, only, source, batch_seconds)
    rows_of = memoized(partial(_rows_of_run, plan))
    versions = []
    for built in all_built:
        rows = rows_of(built.copies, built.label_files)
        if is_imported(built.config.resolved()):
            rows = replace(rows, seconds=_seconds_of_features(rows, built.config.params))
        if len(all_built) > 1:  # each version has its own generations
            rows = replace(rows, whole=rows.whole.copy())
        versions.append(_plan_version(plan, built, rows))
    plan = replace(plan, versions=versions)
    return replace(plan, notes=_notes(plan))


def _check_new_versions(cache: Location, configs: Sequence[BuiltConfig], has_source: bool) -> None:
    """Raise ConfigError if a config does not suit its extractor or needs a source, before
    audio is looked at, or two configs make the same version."""
    name_of: dict[str, str] = {}
    for built in configs:
        if not open_store(cache / built.folder_name).exists(MARK):
            name = built.config.name
            if not has_source:
                built.require_audio(name, _NAME_SOURCE)
            first = name_of.setdefault(built.fingerprint, name)
            if first != name:
                what = f"{first} and {name} are one version, with the fingerprint"
                raise ConfigError(f"{what} {built.fingerprint[:12]}: give one of them")


def _rows_of_run(plan: ExtractionPlan, copies: Copies, label_files: str | None) -> _Rows:
    """Return a version's rows of the manifest, or a partition of it: a slice by the manifest's
    durations alone, so that all jobs of an array agree."""
    manifest, partition = plan.manifest, plan.options.own_partition
    rows = expand(with_label_files(manifest, label_files), copies)
    keys = RowKeys.of(rows)
    first = 0
    if manifest.whole is not None:  # `read_some_rows` has chosen the rows
        whole, first = manifest.whole.hashes, manifest.whole.first_row
    else:
        whole = np.zeros((3, len(rows)), np.uint64)
        whole[0], whole[1] = keys.id_hashes, keys.hashes
        if partition is not None:
            del keys  # the rows of other partitions have only these hashes
            first, end = partition.span(manifest.duration)
            rows = rows.take(np.arange(first * len(copies), end * len(copies)))
            keys = RowKeys.of(rows)
    speed = np.tile(copies.speeds, len(rows) // len(copies))
    known = rows.duration / speed  # a faster copy is shorter
    if plan.source is not None:
        known = plan.source.seconds(rows, known)
    if label_files is not None:  # which have no header that says it
        known = np.nan_to_num(known, nan=10.0)
    return _Rows(rows, row_seconds(rows, known, speed), first * len(copies), keys, whole)


def _seconds_of_features(rows: _Rows, params: Any) -> NDArray[np.float64]:
    """Return each row's seconds: of imported features without a duration, by the mean size of
    some files."""
    seconds = rows.seconds.copy()
    unknown = np.flatnonzero(np.isnan(rows.manifest.duration))
    some = unknown[rows_at_even_steps(len(unknown), _SIZES)]
    whole = [
        source for source in locations_of(rows.manifest, some) if isinstance(source, LocalFile)
    ]
    sizes = [size for size, _ in stats_of(whole) if size]
    if sizes and params.bytes_per_second:
        seconds[unknown] = np.mean(sizes) / params.bytes_per_second
    return seconds


def _plan_version(plan: ExtractionPlan, built: BuiltConfig, rows: _Rows) -> VersionPlan:
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
    again = rows.first_row + np.flatnonzero(status.again)
    wanted = want(name, rows.whole, index, before, again, rows.manifest.whole is not None)
    # If a shard is gone, an older item counts again, but it does not stand for the newer one.
    in_whole = slice(rows.first_row, rows.first_row + len(rows.manifest))
    status = replace(status, present=status.present & ~wanted.lacks(index)[in_whole])
    batching = None
    if info is None or status.missing.any() or options.batching is not None:
        info = built.info
        if plan.source is None:
            built.require_audio(built.config.name, _NAME_SOURCE)
        # Workers look for probes of their devices themselves.
        label = "" if options.workers else built.device.label
        batching = choose_batching(
            built.extractor, probes, label, options.batching, options.allow_mismatch
        )
    return VersionPlan(
        manifest=rows.manifest,
        seconds=rows.seconds,
        first_row=rows.first_row,
        built=built,
        wanted=wanted,
        info=info,
        path=path,
        is_new=is_new,
        index=index,
        rows=status,
        batching=batching,
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
    """Compare the rows with the version's items. Refuses the manifest of another corpus."""
    options, manifest = plan.options, rows.manifest
    status = join(rows.keys, index, failures)
    tried = np.flatnonzero(status.failed)
    stands = np.zeros_like(status.failed)
    if not options.retry_failed:
        failed = [status.failures[row] for row in tried.tolist()]
        stands[tried] = built.would_fail_again(failed, locations_of(manifest, tried))
    status = replace(status, failed=stands)
    if options.check_sources and plan.source is not None:
        status = plan.source.with_changed_items(rows.keys, status, version, index)
    elif options.check_sources:
        status = with_changed_files(manifest, status, index, version)
    elif plan.only is None:
        refuse_another_corpus(manifest, status, index, version)
    if plan.only is not None:
        wanted = np.isin(rows.keys.id_hashes, plan.only.hashes())
        # If the version still holds an item of these ids, it is older than the lost item.
        return replace(status, wanted=wanted, present=status.present & ~wanted)
    if not options.replace:
        refuse_paths(manifest, status, version, index)
    return status


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


# Notes for the user before the run


def _notes(plan: ExtractionPlan) -> list[str]:
    notes = [note for version in plan.versions for note in _version_notes(plan, version)]
    if plan.only is not None:
        return notes
    if any(version.is_new for version in plan.versions):
        hashes = [
            version.wanted.rows[1]
            for version in plan.versions
            if version.built.copies.are_plain and version.built.label_files is None
        ]
        notes += same_span_notes(plan.manifest, next(iter(hashes), None))
    lacking = [version for version in plan.versions if version.num_missing]
    if lacking:
        first = lacking[0]  # the other versions need the same files
        if plan.source is not None:
            plan.source.refuse_another_manifest(first.manifest, first.wanted, first.first_row)
        else:
            is_partition = len(first.wanted) != len(first.manifest)
            whole = plan.manifest if is_partition else None
            notes += missing_file_notes(first.manifest, first.rows.missing, whole)
            notes += copying_notes(first.manifest)
    num_bytes = sum(version.expected_bytes for version in plan.versions)
    return notes + disk_space_notes(plan.cache, num_bytes)


def _version_notes(plan: ExtractionPlan, version: VersionPlan) -> Iterator[str]:
    name, batching = version.config.name, version.batching
    if version.num_missing:
        warning = version.built.extractor.chunk_warning(version.config.extractor)
        if warning is not None:
            yield f"{name}: {warning}"
    if version.is_new:
        yield from new_version_notes(plan.cache, version.info)
    if batching is not None and batching.note is not None:
        yield f"{name}: {batching.note}"
    yield from _suspect_notes(version)
    if plan.only is None:
        yield from _replacement_notes(version)


def new_version_notes(cache: Location, info: VersionInfo) -> list[str]:
    """Note how a new version differs from those of the same name. Raises ArgumentError if
    a version has this fingerprint under another name."""
    notes: list[str] = []
    names: list[str] = []
    with suppress(StoreError):  # writing reports it
        names = version_names(cache)
    for name in names:
        if name == info.folder_name:  # another run may have made it meanwhile
            continue
        try:
            sibling = Version.open(cache / name)
        except StoreError:  # `verify` reports it
            continue
        is_namesake = sibling.info.name == info.name
        if sibling.info.fingerprint == info.fingerprint:
            if is_namesake:
                remedy = f"but another folder name: rename it back to {info.folder_name}"
            else:
                remedy = f"under another name: call the config {sibling.info.name} to go on with it"
            raise ArgumentError(
                f"{sibling.path} has this config's fingerprint, {remedy}, or move it out of "
                f"{cache} to extract everything again"
            )
        if is_namesake:
            difference = find_differences(
                sibling.info.config, sibling.info.fingerprint, info.config, info.fingerprint
            )
            deciding = ", ".join(difference.deciding)
            notes.append(f"{info.folder_name} is a new version next to {name}: {deciding}")
    return notes


def _suspect_notes(plan: VersionPlan) -> list[str]:
    """Note that rows to be extracted may have crashed an earlier run."""
    if not plan.suspects.ids:
        return []
    missing = plan.manifest.ids.take(np.flatnonzero(plan.rows.missing))
    suspects = [id_ for id_ in missing if id_ in plan.suspects.ids]
    if not suspects:
        return []
    return [
        f"{plan.path.name}: an earlier run died with {counted(len(suspects), 'utterance')} in "
        f"flight ({listing(suspects, 3)}): extracted one by one, in a process of their own"
    ]


def _replacement_notes(plan: VersionPlan) -> list[str]:
    """Note which rows are extracted again although there are items of them, and why."""
    rows = np.flatnonzero(plan.rows.again).tolist()
    if not rows:
        return []
    version = Version.open(plan.path)
    changes = []
    for row in rows[:_NAMED]:
        item = item_at(version, plan.index, int(plan.rows.positions[row]))
        change = differences(item, plan.manifest[row]) or file_change(plan, row, item)
        changes.append(f"{item.id}: {change}")
    examples = "; ".join(changes)
    if len(rows) > _NAMED:
        examples += f" … and {len(rows) - _NAMED:,} more"
    again = counted(len(rows), "utterance is", "utterances are")
    return [f"{plan.info.folder_name}: {again} extracted again: {examples}"]


NOT_THE_NEWEST = "its features are not the newest: those are lost, or another copy's"


def file_change(plan: VersionPlan, row: int, item: Item) -> str:
    """Describe why a row is extracted again that is the item's."""
    size, mtime_ns = stat_of(plan.manifest.resolve(item.path))
    changes = []
    if size != item.size and (size is not None or mtime_ns is None):  # unknown in a container
        changes.append("size")
    if mtime_ns != item.mtime_ns:
        changes.append("mtime")
    if changes:
        return f"its file's {' and '.join(changes)}"
    if item.decoder == OLD_FFMPEG:
        return "how FFmpeg decodes its file"
    if row in plan.rows.failures:
        return "its file, which has failed meanwhile"
    return NOT_THE_NEWEST


def disk_space_notes(cache: Location, num_bytes: float) -> list[str]:
    """Warn if the disk has no room for so many bytes."""
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
