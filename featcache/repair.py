"""Repair: what is damaged is removed, and just that is extracted again."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from featcache.config import config_from
from featcache.copies import expand
from featcache.device import Device
from featcache.engines.progress import Progress
from featcache.errors import DamagedError, FeatcacheError, StoreError, listing
from featcache.extraction import Extraction
from featcache.manifest import Manifest
from featcache.store import zarr3
from featcache.store.index import index_folder, load_index
from featcache.store.version import Version, VersionInfo
from featcache.strings import Strings
from featcache.summary import Summary
from featcache.verify import verify
from featcache.work import Options, version_info


@dataclass(frozen=True)
class Repaired:
    """What a repair did.

    Attributes:
        path: of the version.
        removed: names of the damaged shards.
        metadata: whether metadata or the index had to be written anew.
        summary: of the extraction that followed; None where no shard was damaged.
        missing: utterances of the manifest that are in no shard, where none was damaged: extract adds them.
        interrupted: whether it was stopped before it removed anything.
    """

    path: str
    removed: list[str]
    metadata: bool
    summary: Summary | None
    missing: int = 0
    interrupted: bool = False


def repair(
    path: Path,
    manifest: Manifest,
    options: Options,
    report: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Repaired:
    """Verify the version at `path` down to every byte, remove what is damaged, and extract that again.

    Raises:
        StoreError: the manifest lacks utterances of the damaged shards, or their files are gone, or this
            featcache would extract them into another version; or the version's own metadata is damaged and
            no run's record tells what it was. Nothing has been removed then.
    """
    path = path.resolve()  # what is extracted goes beside it, by its name
    restored = restore_metadata(path)
    version = Version.open(path)
    names = version.shard_names()
    try:
        found = verify(version, threads=options.threads or 1, manifest=manifest, stop=stop)
    except KeyboardInterrupt:
        return Repaired(str(path), [], restored, None, interrupted=True)
    if stop is not None and stop.is_set():
        return Repaired(str(path), [], restored, None, interrupted=True)
    index_damaged = any(problem.kind == "index" for problem in found.problems)
    if index_damaged:
        shutil.rmtree(index_folder(version, names), ignore_errors=True)
    restored |= index_damaged
    damaged = found.damaged_shards
    if not damaged:
        missing = sum(problem.kind == "missing" for problem in found.problems)
        return Repaired(str(path), [], restored, None, missing)
    config = config_from(version.info.config, str(version.path))
    # What was there was not too long, whatever the limit was of the run that made the version.
    config = replace(config, audio=config.audio.model_copy(update={"max_seconds": None}))
    device = Device(options.device, options.threads)
    extractor = config.build(device.torch_device)
    _refuse_another_version(version, version_info(config, extractor.spec))
    ids = _ids_in(version, names, damaged)
    if ids is not None:
        _refuse_loss(ids, expand(manifest, config.copies), damaged)
    (path / "work").mkdir(exist_ok=True)
    for name in damaged:
        gone = version.work_folder(name)
        (path / "shards" / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # a run that begins just now may sweep it
    options = replace(options, retry_failed=True)  # they were there, whatever the ledger once said of them
    extraction = Extraction(manifest, [config], path.parent, options, only=ids)
    return Repaired(str(path), damaged, restored, extraction.run(report, stop))


def restore_metadata(path: Path) -> bool:
    """Write a version's own metadata anew from a run's record, where it is damaged; returns whether it was.

    Raises:
        StoreError: no run's record has the config.
    """
    group = path / "shards" / "zarr.json"
    mended = not group.exists() or group.read_bytes() != zarr3.group_metadata()
    if mended:
        zarr3.write_file(group, zarr3.group_metadata())
    with suppress(DamagedError):  # which is what the rest is for
        Version.open(path)
        return mended
    for folder in sorted((path / "runs").glob("*/run.json"), reverse=True):
        try:
            config = config_from(json.loads(folder.read_text(encoding="utf-8"))["asked"]["config"])
        except (OSError, ValueError, KeyError, FeatcacheError):
            continue  # torn, or of a config that cannot be had here: an older run's record may do
        extractor = config.build(torch.device("cpu"))
        info = version_info(config, extractor.spec)
        if info.folder_name == path.name:
            zarr3.write_file(path / "zarr.json", zarr3.group_metadata(info.attributes()))
            return True
    raise StoreError(
        f"{path}/zarr.json: damaged, and no record in {path}/runs tells what it was: run `featcache extract` with the "
        "version's config into another cache, and move its zarr.json here"
    )


def _ids_in(version: Version, names: Sequence[str], damaged: Sequence[str]) -> Strings | None:
    """The ids that the damaged shards held; None where neither they nor the index can tell."""
    with suppress(OSError, ValueError):  # there is no index, or it is damaged: the shards may tell
        index = load_index(index_folder(version, names))
        numbers = [index.shards.index(name) for name in damaged]
        return index.ids.take(np.flatnonzero(np.isin(index.shard, numbers)))
    parts = []
    for name in damaged:
        shard = version.shard(name)
        try:
            for column in ("ids", "id_offsets"):
                array, checksum = zarr3.read_array(shard.folder / column)
                if zarr3.crc32c(array) != checksum:
                    return None
            parts.append(shard.ids)
        except (DamagedError, OSError):
            return None
    return Strings.concatenate(parts)


def _refuse_another_version(version: Version, info: VersionInfo) -> None:
    if info.fingerprint != version.info.fingerprint:
        raise StoreError(
            f"{version.path}: was made by an extractor of another revision, or with other weights: what is damaged "
            "cannot be extracted again as it was. Nothing has been removed: repair it with the featcache that made "
            f"it ({version.info.made_by.get('featcache', 'unknown')}), or extract a new version"
        )
    if info.folder_name != version.path.name:
        raise StoreError(f"{version.path}: rename it back to {info.folder_name}; nothing has been removed")


def _refuse_loss(ids: Strings, manifest: Manifest, damaged: Sequence[str]) -> None:
    paths = dict(zip(manifest.ids, manifest.paths, strict=True))
    gone = [path for path in {paths[id_]: None for id_ in ids if id_ in paths} if not manifest.resolve(path).exists()]
    if gone:
        raise StoreError(
            f"{len(gone):,} audio files of the damaged shards {listing(damaged)} are not below {manifest.root}: "
            f"{listing(gone)}. Nothing has been removed: say where they are with --root, or remove "
            "those shards yourself and run featcache extract"
        )
    lost = [id_ for id_ in ids if id_ not in paths]
    if lost:
        raise StoreError(
            f"{len(lost):,} utterances of the damaged shards {listing(damaged)} are not in {manifest.source}, so they "
            f"cannot be extracted again: {listing(lost)}. Nothing has been removed: give the manifest they came "
            "from, or remove those shards yourself"
        )
