"""The parts of a corpus, each extracted by a run of its own.

A part is skipped if its manifest, its shards, and the files of its failed utterances are
unchanged since it was complete."""

from __future__ import annotations

import filecmp
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as with_values
from pathlib import Path
from typing import Any

import xxhash
from msgspec.structs import replace

from featcache.audio.content_hash import hash_of_content
from featcache.config import Config
from featcache.device import Device
from featcache.errors import (
    ArgumentError,
    DamagedError,
    FeatcacheError,
    LockedError,
    ManifestError,
    StoreError,
    listing,
)
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.extraction import Summary
from featcache.extraction.options import Options
from featcache.manifest.audio_locations import AudioLocation, as_root, locate, url_of
from featcache.manifest.numbered import broken_promises, gaps
from featcache.storage.location import Location, as_location
from featcache.storage.opening import open_store
from featcache.version.corpus import (
    Part,
    PartVersion,
    by_part_name,
    gone_parts,
    manifests_of_parts,
    put_part,
    read_parts,
    remove_part,
)
from featcache.version.indexing import open_index
from featcache.version.records import recorded_root, run_names
from featcache.version.selection import is_corpus, version_names
from featcache.version.version import Version
from featcache.version.wanted import wanted_failures

_NAMED = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CorpusPlan:
    """The parts of a corpus that a job is to extract."""

    folder: Location
    manifests: dict[str, Path]
    known: dict[str, Part]
    options: Options
    """The options of each part's run. With a partition (of rows), it is not recorded."""
    root: AudioLocation | None
    """The root of relative paths; None for the manifests' own."""
    reading: str
    """The options that decide how manifests are read; empty for the defaults."""


def plan_corpus(
    folder: Location,
    manifests: Sequence[str | Path],
    options: Options,
    reading: dict[str, Any],
    *,
    is_list: bool = False,
) -> CorpusPlan | None:
    """List the parts that a job extracts from manifests, or patterns, and record all parts,
    unless it is a dry run. Returns None for one manifest (unless it `is_list`) and a folder
    that is no corpus. The job's partition is one of the parts; of a corpus's single
    manifest, one of its rows. `reading` are arguments of `read_manifest`.

    Raises ArgumentError if the folder is a cache of one manifest, or two manifests have
    one name; ManifestError if a manifest does not exist; DamagedError if the record of a
    part is damaged; StoreError if the folder cannot be written."""
    several, partition = manifests_of_parts(manifests), options.own_partition
    paths = [str(path) for path in (several or {}).values()]
    for line in broken_promises(paths) + gaps(paths):
        _log.info("%s", line)
    if several is None and not is_list:
        if not is_corpus(folder):
            return None
        partition = None
    parts = several or by_part_name(map(Path, manifests))
    known = _known_parts(folder, parts)
    if not options.dry_run:
        _update(folder, known, parts)
    if known:
        for line in gone_parts(folder, [*known.values()]).values():
            _log.info("%s", line)
    own_parts = parts
    if partition is not None:
        options = with_values(options, partition=None)
        own_parts = dict([*parts.items()][partition.number :: partition.count])
        if not own_parts:
            _log.info("--partition %s: none of the %s parts", partition, f"{len(parts):,}")
    deciding = {name: value for name, value in reading.items() if value and name != "root"}
    root = reading.get("root")
    own_root = None if root is None else as_root(str(root))
    how_read = json.dumps(deciding, sort_keys=True) if deciding else ""
    return CorpusPlan(folder, own_parts, known, options, own_root, how_read)


def _known_parts(folder: Location, manifests: Mapping[str, Path]) -> dict[str, Part]:
    """Read the records of a corpus. Refuses manifests that cannot be its parts."""
    versions = version_names(folder)
    if versions:
        raise ArgumentError(
            f"{folder}: is the cache of one manifest, with {listing(versions)}: give another "
            f"folder for the corpus of {len(manifests):,} manifests"
        )
    missing = [str(path) for path in manifests.values() if not path.exists()]
    if missing:
        raise ManifestError(f"{listing(missing, _NAMED)}: there is no such file")
    known = {part.name: part for part in read_parts(folder)}
    _refuse_namesakes(known, manifests)
    return known


def _update(folder: Location, parts: dict[str, Part], manifests: Mapping[str, Path]) -> None:
    """Update the parts' records to the manifests: in `parts`, and on disk."""
    store = open_store(folder)
    lost = [
        name
        for name, part in parts.items()
        if name not in manifests and not os.path.exists(part.manifest)
    ]
    kept = [name for name in lost if store.exists(name)]
    if kept:
        names = listing(kept, _NAMED)
        _log.info("%s: manifests of %s are gone: their folders stay until removed", folder, names)
    dropped = [name for name in lost if name not in kept]
    if dropped:
        names = listing(dropped, _NAMED)
        _log.info("%s: %s: folder and manifest are gone: no part of the corpus now", folder, names)
    for name in dropped:
        del parts[name]
        remove_part(folder, name)
    for name, manifest in manifests.items():
        before = parts.get(name, Part(name, ""))
        parts[name] = replace(before, manifest=str(manifest.absolute()))
        if parts[name] != before:
            put_part(folder, parts[name])


def _refuse_namesakes(parts: Mapping[str, Part], manifests: Mapping[str, Path]) -> None:
    for name, manifest in manifests.items():
        before = Path(parts[name].manifest) if name in parts else manifest
        if not before.exists() or before.samefile(manifest):
            continue
        if manifest.is_dir() or before.is_dir() or not filecmp.cmp(before, manifest, shallow=False):
            raise ArgumentError(
                f"part {name} is that of {before}, and {manifest} is another manifest of this "
                "name: rename one; or if it takes the other's place, remove that one"
            )


@dataclass(frozen=True)
class CorpusSummary:
    """The outcome for the parts of a corpus, by name."""

    parts: dict[str, Summary] = field(default_factory=dict)
    unchanged: dict[str, list[PartVersion]] = field(default_factory=dict)
    """The versions of parts that were skipped, as nothing has changed."""
    errors: dict[str, FeatcacheError] = field(default_factory=dict)
    """The errors of parts that were not extracted."""
    left: list[str] = field(default_factory=list)
    """Parts that were not begun: the run was interrupted, or too many utterances failed."""


RunOfPart = Callable[[Path, list[BuiltConfig], Location, Options, str], Summary]
"""Extracts the manifest of a part, with that name, into its cache."""


def extract_parts(plan: CorpusPlan, configs: Sequence[Config], run: RunOfPart) -> CorpusSummary:
    """Extract the parts of a corpus in turn, with extractors that are built once. Raises
    what `plan_extraction` and `run_extraction` raise; errors of a single part are in the
    summary."""
    options = plan.options
    device = Device(options.own_device, options.threads)
    built = [BuiltConfig(config, device) for config in configs]
    result = CorpusSummary(left=list(plan.manifests))
    for number, (name, manifest) in enumerate(plan.manifests.items(), 1):
        result.left.remove(name)
        try:  # an error of one part does not stop the others
            part = _PartRun(plan, name)
            unchanged = part.unchanged(built)
            if unchanged is not None:
                result.unchanged[name] = unchanged
                continue
            line = f"part {name}, {number:,} of {len(plan.manifests):,}"
            if part.is_changed:
                line += "; its manifest has changed since it was extracted"
            _log.info("%s", line)
            summary = run(manifest, built, part.cache, options, name)
            if options.partition is None and not options.dry_run:
                part.record(summary)
            result.parts[name] = summary
            if summary.interrupted or summary.too_many_failures:
                break
        except (DamagedError, LockedError, ManifestError) as error:
            _log.info("part %s: %s", name, error)
            result.errors[name] = error
    return result


class _PartRun:
    def __init__(self, plan: CorpusPlan, name: str) -> None:
        self.cache = plan.folder / name
        self._plan = plan
        self._known = plan.known.get(name, Part(name, ""))
        self._now = _signed(self._known, plan.manifests[name])
        self.is_changed = bool(self._known.hash) and self._now.hash != self._known.hash
        self._rows = self._now.hash
        """A hash of the manifest's bytes, of how they are read and of where the audio is;
        empty if it is unknown."""
        if self._rows:
            root = plan.root or plan.manifests[name].parent
            if isinstance(root, Path):
                root = root.absolute()
            read_as = f"{self._rows} {root} {plan.reading}".encode(errors="surrogateescape")
            self._rows = f"{xxhash.xxh3_64_intdigest(read_as):016x}"

    def unchanged(self, built: Sequence[BuiltConfig]) -> list[PartVersion] | None:
        """Return the records of these versions; None if a run must look at the part."""
        options = self._plan.options
        if options.check_sources or options.source is not None or not self._now.hash:
            return None
        versions = []
        for config in built:
            known = self._known.versions.get(config.folder_name)
            if known is None or not self._is_unchanged(known, config):
                return None
            versions.append(known)
        if not options.dry_run and self._now != self._known:
            # Only the manifest's time or path has changed.
            self._record(self._known.versions)
        return versions

    def _is_unchanged(self, known: PartVersion, config: BuiltConfig) -> bool:
        retries = known.failed and self._plan.options.retry_failed
        if known.manifest != self._rows or retries:
            return False
        with suppress(OSError, StoreError):  # the run reports it
            version = Version.open(self.cache / config.folder_name)
            if known.is_of(version):
                return not known.failed or _all_fail_again(version, config, self._plan.root)
        return False

    def record(self, summary: Summary) -> None:
        """Record the complete versions."""
        complete = {}
        for outcome in summary.versions:
            if not (summary.interrupted or outcome.missing):
                version = Version.open(as_location("path", outcome.path))
                complete[version.path.name] = PartVersion.of(
                    version, open_index(version), outcome.failed, self._rows
                )
        self._now = replace(self._now, rows=summary.utterances)
        self._record(complete)

    def _record(self, versions: Mapping[str, PartVersion]) -> None:
        recorded: dict[str, PartVersion] = {}
        for part in read_parts(self._plan.folder, [self._now.name]):
            recorded |= part.versions
        put_part(self._plan.folder, replace(self._now, versions={**recorded, **versions}))


def _signed(known: Part, manifest: Path) -> Part:
    """Return the record with the manifest's hash. Its bytes are read if their number or
    time has changed. A folder has no hash, so a run always reads it."""
    known = replace(known, manifest=str(manifest.absolute()))
    if manifest.is_dir():
        return replace(known, size=0, mtime_ns=0, hash="")
    try:
        with manifest.open("rb") as file:
            status = os.fstat(file.fileno())
            if known.hash and (status.st_size, status.st_mtime_ns) == (known.size, known.mtime_ns):
                return known
            content = f"{hash_of_content(file.fileno()):016x}"
    except OSError as error:
        raise ManifestError(f"{manifest}: cannot be read: {error.strerror}") from error
    return replace(known, size=status.st_size, mtime_ns=status.st_mtime_ns, hash=content)


def _all_fail_again(version: Version, built: BuiltConfig, root: AudioLocation | None) -> bool:
    """Tell whether the files of all standing failures are unchanged. False if a server
    would have to tell, or the root is unknown: without `root`, the latest extraction's."""
    if root is None:
        # The latest run first. A prune records no root, nor does a command that was killed.
        store = version.store
        roots = (recorded_root(store, run) for run in reversed(run_names(store)))
        latest = next((recorded for recorded in roots if recorded is not None), None)
        if latest is None:
            return False
        root = as_root(latest)
    failures = [*wanted_failures(version, open_index(version)).values()]
    files = [locate(root, failure.path) for failure in failures]
    return not any(map(url_of, files)) and all(built.would_fail_again(failures, files))
