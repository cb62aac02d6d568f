"""The parts of a corpus, each extracted by a run of its own: which of them need one, and
what is recorded after it.

Whatever a run needs, it needs of its part: the manifest, the index, the plan. So time and
memory depend on the largest part, and not on how many there are. A part is not looked at
if nothing has changed since it was complete: neither the manifest's bytes nor the shards
of its versions, nor the files of utterances that failed."""

from __future__ import annotations

import filecmp
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
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
from featcache.extraction.extraction import Summary
from featcache.extraction.options import Options
from featcache.extraction.version_plan import BuiltConfig
from featcache.manifest.audio_locations import AudioLocation, as_root, locate, url_of
from featcache.manifest.numbered import broken_promises, gaps
from featcache.storage.base import open_store
from featcache.storage.location import Location, as_location
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
from featcache.version.records import read_run, run_names
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
    """The manifests of these parts, by the names of the parts."""
    known: dict[str, Part]
    """What is known of all parts of the corpus, by their names."""
    options: Options
    """Those of each part's run; a partition in them is one of rows, after which nothing
    is recorded of a part."""
    root: AudioLocation | None
    """What relative paths are relative to; None if the manifests say it."""
    reading: str
    """What decides how manifests are read, besides their bytes; empty if nothing does."""


def plan_corpus(
    folder: Location,
    given: Sequence[str | Path],
    options: Options,
    reading: dict[str, Any],
    *,
    is_list: bool = False,
) -> CorpusPlan | None:
    """Which parts a job extracts: all whose manifests are given, or of several jobs every
    n-th; and list them all, unless it is a dry run. None if there are no parts: one
    manifest is given, and the folder is no corpus.

    Args:
        folder: The corpus, which is made if it is missing.
        given: Manifests, or patterns.
        options: Those of the job. Its partition is one of the parts; of a corpus's single
            manifest, one of its rows.
        reading: Arguments of `read_manifest`. The root does not count: rows have paths as
            they are in the manifest.
        is_list: Whether even one manifest makes a corpus.

    Raises:
        ArgumentError: The folder is a cache of one manifest, or a part is that of another
            manifest of the same name.
        ManifestError: A manifest is not there.
        DamagedError: What is known of a part is damaged.
        StoreError: It cannot be written.
    """
    several, partition = manifests_of_parts(given), options.own_partition
    paths = [str(path) for path in (several or {}).values()]
    for line in broken_promises(paths) + gaps(paths):
        _log.info("%s", line)
    if several is None and not is_list:
        if not is_corpus(folder):
            return None
        partition = None
    manifests = several or by_part_name(map(Path, given))
    if versions := version_names(folder):
        what = f"is the cache of one manifest, with {listing(versions)}"
        raise ArgumentError(
            f"{folder}: {what}: give another folder for the corpus of {len(manifests):,} manifests"
        )
    if gone := [str(path) for path in manifests.values() if not path.exists()]:
        raise ManifestError(f"{listing(gone, _NAMED)}: there is no such file")
    known = {part.name: part for part in read_parts(folder)}
    _refuse_namesakes(known, manifests)
    if not options.dry_run:
        _update(folder, known, manifests)
    for line in gone_parts(folder, [*known.values()]).values() if known else ():
        _log.info("%s", line)
    own = manifests
    if partition is not None:
        options = with_values(options, partition=None)
        own = dict([*manifests.items()][partition.number :: partition.count])
        if not own:
            _log.info("--partition %s: none of the %s parts", partition, f"{len(manifests):,}")
    deciding = {name: value for name, value in reading.items() if value and name != "root"}
    decides = json.dumps(deciding, sort_keys=True) if deciding else ""
    root = reading.get("root")
    return CorpusPlan(
        folder, own, known, options, None if root is None else as_root(str(root)), decides
    )


def _update(folder: Location, parts: dict[str, Part], manifests: Mapping[str, Path]) -> None:
    """Bring what is known of the parts of a corpus up to date with the manifests: in
    `parts`, and on disk."""
    lost = [
        part
        for part in parts.values()
        if part.name not in manifests and not os.path.exists(part.manifest)
    ]
    store = open_store(folder)
    dropped = [part.name for part in lost if not store.exists(part.name)]
    if left := [part.name for part in lost if part.name not in dropped]:
        _log.info(
            "%s: manifests of %s are gone: their folders stay until removed",
            folder,
            listing(left, _NAMED),
        )
    if dropped:
        _log.info(
            "%s: %s: folder and manifest are gone: no part of the corpus now",
            folder,
            listing(dropped, _NAMED),
        )
    for name in dropped:
        del parts[name]
        remove_part(folder, name)
    for name, manifest in manifests.items():
        before = parts.get(name)
        parts[name] = replace(before or Part(name, ""), manifest=str(manifest.absolute()))
        if parts[name] != before:
            put_part(folder, parts[name])


def _refuse_namesakes(parts: Mapping[str, Part], manifests: Mapping[str, Path]) -> None:
    """Refuse a manifest whose part is another manifest's: one that still is where it was,
    and not of the same bytes. Raises ArgumentError if there is such a manifest."""
    for name, manifest in manifests.items():
        before = Path(parts[name].manifest) if name in parts else manifest
        if not before.exists() or before.samefile(manifest):
            continue
        if manifest.is_dir() or before.is_dir() or not filecmp.cmp(before, manifest, shallow=False):
            what = (
                f"part {name} is that of {before}, and {manifest} is another manifest of this name"
            )
            raise ArgumentError(
                f"{what}: rename one; or if it takes the other's place, remove that one"
            )


@dataclass(frozen=True)
class CorpusSummary:
    """What became of the parts of a corpus, by their names."""

    parts: dict[str, Summary] = field(default_factory=dict)
    """What was done to the parts that were looked at."""
    unchanged: dict[str, list[PartVersion]] = field(default_factory=dict)
    """What is known of the versions of parts that have not changed since they were
    complete, and were not looked at."""
    errors: dict[str, FeatcacheError] = field(default_factory=dict)
    """Why parts were not extracted: their manifest has faults, or their cache is damaged
    or in use."""
    left: list[str] = field(default_factory=list)
    """Parts that were not begun: the run was interrupted, or too many utterances failed."""


RunOfPart = Callable[[Path, list[BuiltConfig], Location, Options, str], Summary]
"""Extracts the manifest of a part into its cache; it is told the part's name."""


def extract_parts(plan: CorpusPlan, configs: Sequence[Config], run: RunOfPart) -> CorpusSummary:
    """Extract the parts of a corpus, one after the other; the configs' extractors are
    built once for all that lack something, on the device of the run. Raises what
    `plan_extraction` and `run_extraction` raise of any part, as ConfigError or
    StoreError; but an error that concerns a part alone is in the summary."""
    options = plan.options
    device = Device(options.own_device, options.threads)
    built = [BuiltConfig(config, device) for config in configs]
    result = CorpusSummary(left=list(plan.manifests))
    for number, (name, manifest) in enumerate(plan.manifests.items(), 1):
        result.left.remove(name)
        try:
            part = _PartRun(plan, name)
            if (known := part.unchanged(built)) is not None:
                result.unchanged[name] = known
                continue
            changed = "; its manifest has changed since it was extracted" if part.is_changed else ""
            _log.info(
                "part %s, %s of %s%s", name, f"{number:,}", f"{len(plan.manifests):,}", changed
            )
            summary = run(manifest, built, part.cache, options, name)
            if options.partition is None and not options.dry_run:
                part.record(summary)
            result.parts[name] = summary
        except (
            DamagedError,
            LockedError,
            ManifestError,
        ) as error:  # the other parts need not wait for it
            _log.info("part %s: %s", name, error)
            result.errors[name] = error
            continue
        if summary.interrupted or summary.too_many_failures:
            break
    return result


class _PartRun:
    """The run over one part of a corpus: whether there is anything to do, and what to
    record afterwards. Raises ManifestError if the manifest cannot be read."""

    def __init__(self, plan: CorpusPlan, name: str) -> None:
        self.cache = plan.folder / name
        self._plan = plan
        self._known = plan.known.get(name, Part(name, ""))
        self._now = _signed(self._known, plan.manifests[name])
        self.is_changed = bool(self._known.hash) and self._now.hash != self._known.hash
        """Whether the manifest is another than when the part was extracted last."""
        self._rows = self._now.hash
        """The hash of the manifest's bytes, and of how they are read if that is said;
        empty if nothing is known."""
        if self._rows and plan.reading:
            self._rows = f"{xxhash.xxh3_64_intdigest(f'{self._rows} {plan.reading}'.encode()):016x}"

    def unchanged(self, built: Sequence[BuiltConfig]) -> list[PartVersion] | None:
        """What is known of the versions of these configs if a run would find nothing to
        do; None if it must look."""
        options = self._plan.options
        if options.check_sources or options.source is not None or not self._now.hash:
            return None
        found = []
        for one in built:
            known = self._known.versions.get(one.folder_name)
            if (
                known is None
                or known.manifest != self._rows
                or (known.failed and options.retry_failed)
            ):
                return None
            try:
                version = Version.open(self.cache / one.folder_name)
                if not known.is_of(version) or (
                    known.failed and not _all_fail_again(version, one, self._plan.root)
                ):
                    return None
            except (OSError, StoreError):  # which the run says
                return None
            found.append(known)
        if not options.dry_run and self._now != self._known:
            # the file's time has changed, or its path, and nothing else
            self._record(self._known.versions)
        return found

    def record(self, summary: Summary) -> None:
        """Record what the part's versions hold, after a run over it; of those that lack
        nothing."""
        complete = {}
        for one in summary.versions:
            if not (summary.interrupted or one.missing):
                version = Version.open(as_location("path", one.path))
                complete[version.path.name] = PartVersion.of(
                    version, open_index(version), one.failed, self._rows
                )
        self._now = replace(self._now, rows=summary.utterances)
        self._record(complete)

    def _record(self, versions: Mapping[str, PartVersion]) -> None:
        before = next(
            (part.versions for part in read_parts(self._plan.folder, [self._now.name])), {}
        )
        put_part(self._plan.folder, replace(self._now, versions={**before, **versions}))


def _signed(known: Part, manifest: Path) -> Part:
    """What there is to know of a part's manifest now: its bytes are read if their number
    or time has changed. Nothing is known of a folder, which may be a manifest too, so
    that a run looks at what is in it."""
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
    """Whether the files of all utterances whose failures stand are as they were; False where
    a server would have to say, or nothing says where they are. Without a `root`, paths
    are relative to what the latest extraction took."""
    if root is None:  # a manifest may say itself what its paths are relative to
        # the latest first; a prune, and a command that was killed, says nothing of it
        runs = (read_run(version.store, name) for name in reversed(run_names(version.store)))
        roots = (run.asked.get("root") for run in runs if run is not None)
        latest = next((named for named in roots if named is not None), None)
        if latest is None:
            return False
        root = as_root(latest)
    failures = [*wanted_failures(version, open_index(version)).values()]
    files = [locate(root, failure.path) for failure in failures]
    return not any(map(url_of, files)) and all(built.would_fail_again(failures, files))
