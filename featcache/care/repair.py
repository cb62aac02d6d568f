"""Repairs a version: publishes the sound utterances of damaged shards in other shards,
removes the damaged shards, and extracts what is then missing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from featcache.audio.remote import each_at_once
from featcache.care.prune import rewrite
from featcache.care.recompute import built_again
from featcache.care.report import Report
from featcache.care.verify import examine_shard, verify
from featcache.config import recorded_config
from featcache.device import Device
from featcache.engines.local import run_locally
from featcache.errors import DamagedError, FeatcacheError, StoreError, counted, listing
from featcache.extraction.audio_files import stat_of
from featcache.extraction.built_config import BuiltConfig
from featcache.extraction.extraction import Summary, run_extraction
from featcache.extraction.options import Options
from featcache.extraction.plan import plan_extraction
from featcache.format.documents import AT_MOST_BYTES
from featcache.format.group import GroupInfo, read_attributes
from featcache.format.shard import Shard
from featcache.format.writing import seal_group
from featcache.manifest.audio_locations import is_command
from featcache.manifest.label_files import is_imported, rows_of
from featcache.manifest.strings import Strings
from featcache.manifest.utterances import Manifest
from featcache.storage.base import MARK, Store
from featcache.storage.location import Location
from featcache.storage.opening import open_store
from featcache.version.index import load_index
from featcache.version.indexing import open_index
from featcache.version.ledger import read_failures, rewrite_failures
from featcache.version.records import new_name, read_run, run_names
from featcache.version.selection import select_versions
from featcache.version.tags import tags_to_show
from featcache.version.version import PLAIN_GROUP, UnfinishedCopyError, Version
from featcache.version.wanted import damaged_wanted


@dataclass
class Repaired:
    """The result of a repair: see docs/json.md."""

    path: str
    removed: list[str] = field(default_factory=list)
    metadata: bool = False
    summary: Summary | None = None
    missing: int = 0
    """The number of utterances of the manifest that no shard had, sound or damaged."""
    interrupted: bool = False
    kept: int = 0
    extracted: int = 0
    aside: dict[str, str] = field(default_factory=dict)
    broken_tags: list[str] = field(default_factory=list)
    records: int = 0


def repair(
    path: Location, manifest: Manifest, options: Options, stop: threading.Event | None = None
) -> Repaired:
    """Verify every byte of the version at `path`, and replace its damaged shards. If all
    utterances are sound, neither audio nor the extractor is needed.

    Raises LockedError if another command is at work; StoreError, before anything is
    removed, if the manifest lacks damaged utterances, or their files are gone, or this
    featcache would extract them into another version, or no run has recorded the version's
    metadata."""
    if isinstance(path, Path) and (path.name in ("", "..") or path.is_symlink()):
        path = path.resolve()  # the extraction finds it by its name
    is_restored = _restore_metadata(path)
    version, stop = Version.open(path), stop or threading.Event()
    repaired = Repaired(str(version.path), metadata=is_restored)
    with version.at_work("repair"):
        version.store.sweep()
        threads = options.threads or 1
        verified = verify(version, values=True, threads=threads, manifest=manifest, stop=stop)
        kept: dict[str, list[int]] = {}
        again: Strings | None = Strings.of([])
        built = None
        if not stop.is_set():
            kept, again = _plan_shards(version, verified)
        if again is None or len(again):
            built = _build(version, options)
        if again is not None and built is not None:
            _refuse_loss(version, manifest, again, verified.damaged_shards)
        copies = []
        for name, numbers in kept.items():
            if numbers and not stop.is_set():
                copies.append(rewrite(version, version.shard(name), numbers))
        if stop.is_set():
            repaired.interrupted = True
            return repaired
        # a shard that was written again is sound now
        for name in sorted(kept.keys() - copies):
            repaired.aside |= _take_away(version, name)
        repaired.removed = verified.damaged_shards
        repaired.kept = sum(map(len, kept.values()))
        if again is not None:
            missing = [problem for problem in verified.problems if problem.kind == "missing"]
            repaired.missing = sum(problem.shard is None for problem in missing)
        if built is None:
            open_index(version)  # builds it if it is damaged
        else:
            # the version had them, even if the ledger has failures of them
            options = replace(options, retry_failed=True)
            planned = plan_extraction(manifest, [built], version.path.parent, options, again)
            repaired.summary = run_extraction(planned, run_locally, stop=stop)
            repaired.extracted = sum(filled.extracted for filled in repaired.summary.versions)
        if not stop.is_set():
            repaired.broken_tags = [tag["name"] for tag in tags_to_show(version) if tag["fault"]]
            repaired.records = _remove_damaged_records(version)
        return repaired


def _plan_shards(version: Version, verified: Report) -> tuple[dict[str, list[int]], Strings | None]:
    """Return the rising numbers of the sound items of each damaged shard. Returns also the
    ids of the other current items, to extract again; None if those of a shard are not known."""
    damaged = verified.damaged_shards
    faults = [problem for problem in verified.problems if problem.kind != "missing"]
    faulty = {(fault.shard, fault.id) for fault in faults}
    index = load_index(version, version.shard_names()) if damaged else None
    kept: dict[str, list[int]] = {}
    again: list[Strings | None] = []
    for name in damaged:
        current, kept[name] = None, []
        if index is not None:
            current = index.ids.take(np.arange(*index.span(index.shards.index(name))))
        try:
            shard = version.shard(name)
            shard.check_table()
        except DamagedError:
            again.append(current)
            continue
        ids = shard.table.ids
        sides = [path for path in shard.info.files if path.startswith("side_")]
        if not any(map(shard.file_fault, sides)):
            numbers = [number for number, id_ in enumerate(ids) if (name, id_) not in faulty]
            kept[name] = [number for number, _ in shard.sound_items(numbers)]
        others = ids.take(np.setdiff1d(np.arange(len(ids)), kept[name]))
        if current is not None:  # older items need not be extracted
            others = others.take(np.flatnonzero(np.isin(others.hashes(), current.hashes())))
        again.append(others)
    known = [ids for ids in again if ids is not None]
    return kept, Strings.concatenate(known) if len(known) == len(again) else None


def _build(version: Version, options: Options) -> BuiltConfig:
    """Build the extractor for damaged utterances, which must go into the same version."""
    built = built_again(version, Device(options.device, options.threads))
    if built.info.fingerprint != version.info.fingerprint:
        maker = version.info.made_by.get("featcache", "unknown")
        raise StoreError(
            f"{version.path}: was made with another revision of the extractor, or other "
            f"weights. Nothing has been removed: use its featcache ({maker}), or extract "
            "a new version"
        )
    remedy = "`featcache rm` it, and extract it again with --from CACHE/VERSION"
    built.require_audio(version.path, f"nothing has been removed: {remedy}")
    return built


def _take_away(version: Version, name: str) -> dict[str, str]:
    """Remove a damaged shard. If it belongs to another version, it goes there, or into
    `aside`. Returns its place in `aside` with that version's fingerprint."""
    store, key = version.store, f"shards/{name}"
    stated = _stated_version(store, name)
    aside = {}
    if stated is not None and stated != version.info.fingerprint:
        sizes = dict(store.walk(key))
        files = {path.removeprefix(f"{key}/"): store.read(path, sizes[path]) for path in sizes}
        owner = _sound_owner(version, stated, name)
        if owner is not None:
            owner.store.publish(files, key)
        else:
            store.publish(files, f"aside/{name}")
            aside[f"{version.path}/aside/{name}"] = stated
    store.remove(key)
    return aside


def _sound_owner(version: Version, fingerprint: str, name: str) -> Version | None:
    """Find the version of this fingerprint in the same cache, if the shard is sound and the
    version has no damaged shard of this name."""
    # other versions may be damaged
    with suppress(StoreError, FileNotFoundError):
        for other in select_versions(version.path.parent):
            if other.info.fingerprint == fingerprint:
                Shard(version.store, name, fingerprint, other.info.spec).check_table()
                has_own = other.store.exists(f"shards/{name}/{MARK}")
                if has_own and examine_shard(other, name, data=True).problems:
                    return None
                return other
    return None


def _remove_damaged_records(version: Version) -> int:
    lines = list[str]()
    names = version.store.names("failures")
    failures = read_failures(version, lines)
    if lines:  # a disk may refuse once
        lines = []
        failures = read_failures(version, lines)
    if lines:
        rewrite_failures(version, names, f"{new_name()}.000000", failures)
    damaged = damaged_wanted(version)
    for name in damaged:
        version.store.remove(f"wanted/{name}")
    return len(lines) + len(damaged)


def _restore_metadata(path: Location) -> bool:
    """Restore a version's damaged metadata. Returns True if it was damaged."""
    store = open_store(path)
    is_group_damaged = not Version.has_group(store)
    if is_group_damaged:
        store.put(f"shards/{MARK}", PLAIN_GROUP)
    try:
        Version.open(path)
    except UnfinishedCopyError:
        raise
    except DamagedError:
        _restore_document(path, store)
        return True
    return is_group_damaged


def _restore_document(path: Location, store: Store) -> None:
    """Restore a version's document from a run's record. Raises StoreError if no
    record has a config that can be loaded here."""
    faults: list[str] = []
    for name in reversed(run_names(store)):
        record = read_run(store, name)
        if record is None or "config" not in record.asked:
            continue
        try:
            config = recorded_config(record.asked["config"], f"{path}/runs/{name}.json")
        except FeatcacheError as error:
            faults.append(str(error))  # an older run may have had another config
            continue
        info = BuiltConfig(config, Device("cpu", 1)).info
        version = Version(store, info)
        shards = (_stated_version(store, name) for name in version.shard_names())
        # its folder may have been renamed
        if path.name == info.folder_name or {*shards} == {info.fingerprint}:
            store.put(MARK, seal_group(msgspec.to_builtins(info), path))
            return
    reason = f" ({faults[0]})" if faults else ""
    raise StoreError(
        f"{path}/zarr.json: damaged, and no record in runs/ says what it was{reason}: extract "
        "with its config into another cache, and move that file here"
    )


def _stated_version(store: Store, name: str) -> str | None:
    """Return the fingerprint in a shard's document; None if that cannot be read."""
    key = f"shards/{name}/{MARK}"
    with suppress(FileNotFoundError, DamagedError):
        data = store.read(key, AT_MOST_BYTES)
        return str(read_attributes(data, GroupInfo, key).fingerprint)
    return None


def _refuse_loss(
    version: Version, manifest: Manifest, ids: Strings, damaged: Sequence[str]
) -> None:
    """Raise StoreError if the manifest lacks some utterances, or their files are gone, or it
    is not that of imported features."""
    config = version.info.config
    rows = rows_of(manifest, config)
    paths = dict(zip(rows.ids, rows.paths, strict=True))
    if is_imported(config) and not all(paths.get(id_, True) for id_ in ids):
        made_by = config["params"].get("made_by")
        raise StoreError(
            f"{version.path}: features were imported (made by {made_by}), and cannot be extracted "
            "from audio. Nothing has been removed: give what they were imported from, as "
            "--manifest SOURCE --format features"
        )

    needed = list({paths[id_]: None for id_ in ids if id_ in paths and not is_command(paths[id_])})
    stats = each_at_once(stat_of, [rows.resolve(path) for path in needed])
    gone = [path for path, stat in zip(needed, stats, strict=True) if stat == (None, None)]
    lost = [id_ for id_ in ids if id_ not in paths]
    if gone:
        files = f"{counted(len(gone), 'audio file')} of damaged utterances: {listing(gone)}"
        what, remedy = f"{rows.root} lacks {files}", "say with --root where they are"
    elif lost:
        what = f"{rows.source} lacks {counted(len(lost), 'damaged utterance')}: {listing(lost)}"
        remedy = "give the manifest they came from"
    else:
        return
    raise StoreError(
        f"{what}. Nothing has been removed: {remedy}, or remove the shards {listing(damaged)} "
        "yourself, with what is sound in them, and extract again"
    )
