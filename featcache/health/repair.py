"""Repair: keeps the sound utterances of damaged shards, and extracts only the damaged ones again.

Before a damaged shard is removed, its sound utterances have been committed as a shard of their own. So at every
moment, the damaged shard or a shard of its sound utterances is there.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from featcache.audio.remote import each_at_once
from featcache.config import Config, recorded_config
from featcache.device import Device
from featcache.engines.local import run_locally
from featcache.errors import DamagedError, FeatcacheError, StoreError, counted, listing
from featcache.extraction.extraction import run_extraction
from featcache.extraction.failures import stat_of
from featcache.extraction.jobs import Progress
from featcache.extraction.plan import Options, plan_extraction
from featcache.extraction.summary import Summary
from featcache.extraction.version_plan import version_info
from featcache.health.records import mend_records
from featcache.health.verify import Report, verify
from featcache.manifest import Manifest
from featcache.manifest.audio_locations import is_command
from featcache.manifest.copies import expand
from featcache.storage.location import Location, folder_of
from featcache.storage.objects import require_put_if_absent
from featcache.store import zarr3
from featcache.store.check import check_shard
from featcache.store.damaged import DamagedShard, RepairPlan, copy_sound_items, plan_repairs, put_back
from featcache.store.files import WRITTEN, folder_to_write, refuse_links, remove_from_version, write_file
from featcache.store.index import build_index, open_index
from featcache.store.records import read_document
from featcache.store.removing import claim_shards, forget_indexes, remove_shard, take_shard
from featcache.store.run_records import ShardEvent, names_of_runs, run_names
from featcache.store.runs import Run
from featcache.store.selection import select_versions
from featcache.store.shard import Shard
from featcache.store.tags import check_tags, read_tag, tag_names
from featcache.store.unfinished import held_before
from featcache.store.version import Version
from featcache.store.version_info import VersionInfo, library_versions
from featcache.strings import Strings


@dataclass(frozen=True)
class Repaired:
    """What a repair did."""

    path: str
    """The folder of the version."""
    removed: list[str]
    """The names of the damaged shards."""
    metadata: bool
    """Whether metadata was damaged and has been written again."""
    summary: Summary | None
    """The summary of the extraction that followed; None if nothing had to be extracted."""
    missing: int = 0
    """The number of utterances of the manifest that no shard held, sound or damaged. `featcache extract` adds them."""
    interrupted: bool = False
    """Whether the repair was stopped before it removed anything."""
    kept: int = 0
    """The number of utterances of damaged shards that were sound. They are unchanged."""
    extracted: int = 0
    """The number of utterances that were extracted again."""
    aside: dict[str, str] = field(default_factory=dict)
    """The shards of other versions that were found in this one and that their own versions lack: where each is now, and
    the fingerprint of the version that it belongs to."""
    broken_tags: list[str] = field(default_factory=list)
    """The names of the version's tags that are not whole, since shards of theirs were removed or made anew."""
    records: int = 0
    """The number of records of runs that were damaged. What was sound in them is kept; they say that the rest is lost.
    """


def repair(
    path: Location,
    manifest: Manifest,
    options: Options,
    report: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Repaired:
    """Verify the version at `path` down to every byte, and replace its damaged shards.

    Their sound utterances are kept, and the others are extracted again. A shard of another version is taken away too;
    if that version is not in the same cache, or has no sound shard of this name, the shard is kept in the folder
    `aside`. If all utterances are sound, neither their audio nor the extractor is needed.

    Raises:
        StoreError: A folder of the version is a link; or the manifest lacks damaged utterances, or their files are
            gone, or this featcache would extract them into another version; or another repair is running; or the cache
            cannot be written; or the version's own metadata is damaged and no run's record says what it was. Nothing
            has been removed then.
    """
    if isinstance(path, Path):
        if path.name in ("", "..") or path.is_symlink():
            path = path.resolve()  # for its name, by which the extraction finds it
        refuse_links(path, *WRITTEN, "aside")
    else:
        require_put_if_absent(path.parent)
    stop = stop or threading.Event()
    restored = restore_metadata(path)
    version = Version.open(path)
    found = verify(version, threads=options.threads or 1, manifest=manifest, stop=stop)
    if stop.is_set():
        return Repaired(str(path), [], restored, None, interrupted=True)
    with suppress(OSError, StoreError):  # on a full disk, or a read-only one, they stay
        version.sweep()
    if not found.damaged_shards:
        open_index(version, keep=True)  # builds it if it is damaged
        missing = sum(problem.kind == "missing" for problem in found.problems)
        return Repaired(str(path), [], restored, None, missing, records=mend_records(version))
    with claim_shards(version):
        repaired = _replace_damaged_shards(version, found, restored, manifest, options, report, stop)
    repaired = replace(repaired, broken_tags=[name for name, _ in check_tags(version)])
    return repaired if stop.is_set() else replace(repaired, records=mend_records(version))


def _replace_damaged_shards(
    version: Version,
    found: Report,
    restored: bool,
    manifest: Manifest,
    options: Options,
    report: Callable[[Progress], None],
    stop: threading.Event,
) -> Repaired:
    path, damaged = version.path, found.damaged_shards
    plans = plan_repairs(version, damaged, stop.is_set)
    if not isinstance(path, Path):
        _refuse_other_versions(version, plans)
    again = _ids_to_extract(plans)
    held = _ids_to_extract(plan for plan in plans if plan.was_held)
    config = None if again is not None and not len(again) else _config_for(version, options)
    if config is not None and held is not None:
        _refuse_loss(held, expand(manifest, config.copies), damaged)
    copies = []
    for plan in plans:
        if plan.kept and isinstance(plan.shard, DamagedShard) and not stop.is_set():
            copied = copy_sound_items(version, plan.shard, plan.kept)
            copies.append(ShardEvent(copied.name, len(plan.kept), entry=copied.entry))
    if stop.is_set():
        return Repaired(str(path), [], restored, None, interrupted=True)
    missing = 0 if again is None else _count_in_no_shard(found, plans)
    run = _record(version, manifest, plans, copies, again)
    forget_indexes(version, [plan.shard.name for plan in plans])
    tagged = _tagged(version)
    to_put_back = [plan.shard for plan in plans if plan.shard.name in tagged and isinstance(plan.shard, DamagedShard)]
    aside, taken = _take_away(version, [plan.shard for plan in plans], to_put_back)
    held_now = {*version.listed_shards()} - {copy.shard for copy in copies}
    removed, kept = [plan.shard.name for plan in plans], sum(len(plan.kept) for plan in plans)
    if config is None:
        _put_back(version, taken, held_now, run)
        run.finish({"extracted": 0, "failed": 0, "interrupted": False})
        return Repaired(str(path), removed, restored, None, missing, kept=kept, aside=aside)
    options = replace(options, retry_failed=True)  # the version had them, whatever the ledger says of them
    planned = plan_extraction(manifest, [config], path.parent, options, again, path.name)
    summary = run_extraction(planned, run_locally, report, stop)
    extracted = sum(filled.extracted for filled in summary.versions)
    _put_back(version, taken, held_now, run)
    run.finish({"extracted": 0, "failed": 0, "interrupted": stop.is_set()})
    return Repaired(str(path), removed, restored, summary, missing, kept=kept, extracted=extracted, aside=aside)


def _record(
    version: Version,
    manifest: Manifest,
    plans: Sequence[RepairPlan],
    copies: Sequence[ShardEvent],
    again: Strings | None,
) -> Run:
    """Record, before it is done, which shards are taken away and how many utterances are then to be extracted."""
    removed = [plan.shard.name for plan in plans]
    index = build_index(version.shard(name) for name in version.shard_names() if name not in removed)
    key = manifest.source, str(manifest.root)
    asked = {
        "manifest": key[0],
        "root": key[1],
        "utterances": len(manifest),
        "replaced": 0,
        "held": len(index),
        "only": True,
        "config": version.info.config,
        "made_by": library_versions(),
        "repaired": removed,
    }
    if again is not None:
        lacking = again.take(np.flatnonzero(index.find(again) < 0))
        asked |= {"new": len(lacking), **held_before(version, index, key, lacking)}
    run = Run(version, asked, after=index.runs)
    until = max([*run_names(version), run.id])
    run.record_shards([*copies, *(ShardEvent(name, 0, until=until) for name in removed)])
    return run


def _tagged(version: Version) -> set[str]:
    """The names of the shards that tags name; in an object store none, where no shard comes back under its name."""
    if not isinstance(version.path, Path):
        return set()
    found = set[str]()
    for name in tag_names(version):
        with suppress(DamagedError):  # `check_tags` tells
            found |= read_tag(version, name).shards.keys()
    return found


def _take_away(
    version: Version, shards: Iterable[Shard], to_put_back: Collection[Shard]
) -> tuple[dict[str, str], list[DamagedShard]]:
    """Remove damaged shards, or set them aside if another version may need them, or move them to `work/`, to be put
    back. Returns `Repaired.aside`, and the last ones where they are now.
    """
    aside: dict[str, str] = {}
    taken = []
    for shard in shards:
        with suppress(FileNotFoundError):  # without locks, another repair may have been faster
            stated, folder = shard.stated_version, shard.folder
            is_link = isinstance(folder, Path) and folder.is_symlink()
            is_own = stated in (None, version.info.fingerprint)
            if shard in to_put_back and not is_link and is_own:
                gone = take_shard(version, shard.name)
                taken.append(DamagedShard(gone, version.info.fingerprint, version.info.spec))
            elif is_link or is_own or _has_sound(version.path.parent, str(stated), shard.name):
                remove_shard(version, shard.name)
            else:
                place = folder_to_write(version.folder, "aside") / f"{shard.name}.{uuid.uuid4().hex[:8]}"
                folder_of(folder).rename(place)
                aside[str(place)] = str(stated)
    return aside, taken


def _put_back(version: Version, taken: Sequence[DamagedShard], held: Collection[str], run: Run) -> None:
    """Commit shards that were taken away again, as they were, for the tags that name them, and remove what was made in
    their place since only these shards were `held`. A shard whose values are others now stays away.
    """
    if not taken:
        return
    index, rows, back = open_index(version), set[tuple[object, ...]](), []
    for shard in taken:
        name = shard.info.digest[:12]
        with suppress(OSError, StoreError):  # on a full disk, for example: what was made in its place has all of it
            if put_back(version, shard, index):
                back.append(ShardEvent(name, shard.info.items))
                rows |= _rows(shard)
        remove_from_version(version.folder, "work", shard.name)
    run.record_shards(back)
    until = max(run_names(version))
    for name in {*version.listed_shards()}.difference(held, [event.shard for event in back]):
        if _rows(version.shard(name)) <= rows:
            run.record_shards([ShardEvent(name, 0, until=until)])
            remove_shard(version, name)
    open_index(version, keep=True)


def _rows(shard: Shard) -> set[tuple[object, ...]]:
    return {tuple(item.row().values()) for item in shard.items()}


def _refuse_other_versions(version: Version, plans: Iterable[RepairPlan]) -> None:
    """Refuse to repair a version in an object store that has shards which another version may need."""
    for shard in (plan.shard for plan in plans):
        stated = shard.stated_version
        if stated not in (None, version.info.fingerprint) and not _has_sound(version.path.parent, stated, shard.name):
            raise StoreError(
                f"{shard.folder}: belongs to the version {stated[:12]}, which has no sound shard of this name in this "
                "cache: move it there, or remove it. Nothing has been removed"
            )


def _has_sound(cache: Location, fingerprint: str, name: str) -> bool:
    """Whether the version of this fingerprint, in the same cache, has a sound shard of this name."""
    try:
        own = [version for version in select_versions(cache) if version.info.fingerprint == fingerprint]
        return any(not [*check_shard(version.shard(name), version.info.spec)] for version in own)
    except StoreError:
        return False  # something else in the cache is damaged, so the shard may still be needed


def _ids_to_extract(plans: Iterable[RepairPlan]) -> Strings | None:
    """The ids to extract again; None, for all that are missing, if some shard's ids cannot be read."""
    parts = []
    for plan in plans:
        if plan.again is None:
            return None
        parts.append(plan.again)
    return Strings.concatenate(parts)


def _count_in_no_shard(found: Report, plans: Iterable[RepairPlan]) -> int:
    """The number of the manifest's utterances that neither a sound nor a damaged shard had."""
    missing = {problem.id for problem in found.problems if problem.kind == "missing"}
    for plan in plans:
        missing -= {*(plan.again or ()), *(plan.shard.ids.take(np.array(plan.kept)) if plan.kept else ())}
    return len(missing)


def _config_for(version: Version, options: Options) -> Config:
    """The config for extracting damaged utterances, which must go into the same version."""
    config = recorded_config(version.info.config, str(version.path))
    # The stored utterances were within the first run's limit, so no limit is needed.
    config = replace(config, audio=config.audio.model_copy(update={"max_seconds": None}))
    device = Device(options.device, options.threads)
    _refuse_another_version(version, version_info(config, config.build(device.torch_device).spec))
    return config


def restore_metadata(path: Location) -> bool:
    """Restore a version's own metadata from a run's record if it is damaged; returns whether it was.

    Raises:
        StoreError: No run's record has a config that can be loaded here.
        ConfigError: The config's weights are not here.
    """
    group = path / "shards" / "zarr.json"
    is_group_damaged = not zarr3.is_plain_group(path / "shards")
    if is_group_damaged:
        write_file(group, zarr3.group_metadata())
    with suppress(DamagedError):  # the version's own file is damaged too: it is restored below
        Version.open(path)
        return is_group_damaged
    faults: list[str] = []
    for name in reversed(names_of_runs(path)):
        record = path / "runs" / name / "run.json"
        try:
            config = recorded_config(read_document(record)["asked"]["config"], str(record))
        except (FileNotFoundError, DamagedError, KeyError, TypeError):
            continue  # the record is damaged, or not of an extraction
        except FeatcacheError as error:
            faults.append(str(error))
            continue  # the config cannot be loaded here: an older run's record may have another
        extractor = config.build(torch.device("cpu"))
        info = version_info(config, extractor.spec)
        if path.name == info.folder_name or _state_one(path, info):
            write_file(path / "zarr.json", zarr3.group_metadata(info.attributes()))
            return True
    fault = f" ({faults[0]})" if faults else ""
    raise StoreError(
        f"{path}/zarr.json: damaged, and no record in {path}/runs says what it was{fault}: run `featcache extract` "
        "with the version's config into another cache, and move its zarr.json here"
    )


def _state_one(path: Location, info: VersionInfo) -> bool:
    """Whether all shards of the version at `path`, which may have been renamed, say that they belong to it."""
    shards = Version(path, info).shard_names()
    return {Version(path, info).shard(name).stated_version for name in shards} == {info.fingerprint}


def _refuse_another_version(version: Version, info: VersionInfo) -> None:
    if info.fingerprint != version.info.fingerprint:
        raise StoreError(
            f"{version.path}: was made with another revision of the extractor, or with other weights: damaged "
            "utterances cannot be extracted again with the same values. Nothing has been removed: repair it with the "
            "featcache that made "
            f"it ({version.info.made_by.get('featcache', 'unknown')}), or extract a new version"
        )


def _refuse_loss(ids: Strings, manifest: Manifest, damaged: Sequence[str]) -> None:
    paths = dict(zip(manifest.ids, manifest.paths, strict=True))
    needed = list({paths[id_]: None for id_ in ids if id_ in paths and not is_command(paths[id_])})
    found = each_at_once(stat_of, [manifest.resolve(path) for path in needed])
    gone = [path for path, stat in zip(needed, found, strict=True) if stat == (None, None)]
    if gone:
        raise StoreError(
            f"damaged utterances of the shards {listing(damaged)} need {counted(len(gone), 'audio file')} not found "
            f"below {manifest.root}: {listing(gone)}. Nothing has been removed: say with --root where they are, or "
            "remove those shards yourself, with what is sound in them, and run featcache extract"
        )
    lost = [id_ for id_ in ids if id_ not in paths]
    if lost:
        raise StoreError(
            f"{manifest.source} lacks {counted(len(lost), 'damaged utterance')} of the shards {listing(damaged)}: "
            f"{listing(lost)}. Nothing has been removed: give the manifest they came from, or remove those shards "
            "yourself, with what is sound in them"
        )
