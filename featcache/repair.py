"""Repair: what is damaged is removed, and just that is extracted again."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from featcache.config import config_from
from featcache.engines.local import Progress
from featcache.errors import DamagedError, FeatcacheError, StoreError, listing
from featcache.extraction import Extraction, Options, Summary, version_info
from featcache.manifest import Manifest
from featcache.store import zarr3
from featcache.store.index import index_folder, load_index
from featcache.store.version import Version
from featcache.strings import Strings
from featcache.verify import verify


@dataclass(frozen=True)
class Repaired:
    """What a repair did.

    Attributes:
        path: of the version.
        removed: names of the damaged shards.
        metadata: whether metadata or the index had to be written anew.
        summary: of the extraction that followed; None where no shard was damaged.
    """

    path: str
    removed: list[str]
    metadata: bool
    summary: Summary | None


def repair(
    path: Path,
    manifest: Manifest,
    options: Options,
    report: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> Repaired:
    """Verify the version at `path` down to every byte, remove what is damaged, and extract that again.

    Raises:
        StoreError: the manifest lacks utterances of the damaged shards, or the version's own metadata is
            damaged and no run's record tells what it was. Nothing has been removed then.
    """
    restored = restore_metadata(path)
    version = Version.open(path)
    names = version.shard_names()
    found = verify(version, threads=options.threads or 1)
    index_damaged = any(problem.kind == "index" for problem in found.problems)
    if index_damaged:
        shutil.rmtree(index_folder(version, names), ignore_errors=True)
    restored |= index_damaged
    damaged = found.damaged_shards
    if not damaged:
        return Repaired(str(path), [], restored, None)
    ids = _ids_in(version, names, damaged)
    if ids is not None:
        _refuse_loss(ids, manifest, damaged)
    for name in damaged:
        gone = version.work_folder(name)
        (version.path / "shards" / name).rename(gone)
        shutil.rmtree(gone)
    extraction = Extraction(manifest, [config_from(version.info.config)], path.parent, options, only=ids)
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
    try:
        Version.open(path)
        return mended
    except DamagedError:
        pass
    for folder in reversed(list((path / "runs").glob("*/run.json"))):
        try:
            config = config_from(json.loads(folder.read_text(encoding="utf-8"))["asked"]["config"])
        except (OSError, ValueError, KeyError, FeatcacheError):
            continue
        extractor = config.extractor_class(config.params, config.audio.sample_rate, torch.device("cpu"))
        info = version_info(config, extractor.spec)
        if info.folder_name == path.name:
            zarr3.write_file(path / "zarr.json", zarr3.group_metadata(asdict(info)))
            return True
    raise StoreError(
        f"{path}/zarr.json: damaged, and no record in {path}/runs tells what it was: run `featcache extract` with the "
        "version's config into another cache, and move its zarr.json here"
    )


def _ids_in(version: Version, names: Sequence[str], damaged: Sequence[str]) -> Strings | None:
    """The ids that the damaged shards held; None where neither they nor the index can tell."""
    try:
        index = load_index(index_folder(version, names))
        numbers = [index.shards.index(name) for name in damaged]
        return index.ids.take(np.flatnonzero(np.isin(index.shard, numbers)))
    except (OSError, ValueError):
        pass
    parts = []
    for name in damaged:
        shard = version.shard(name)
        try:
            for column in ("ids", "id_offsets"):
                array, checksum = zarr3.read_array(shard.folder / column)
                if zarr3.crc32c(array) != checksum:
                    return None
            parts.append(shard.ids)
        except DamagedError:
            return None
    return Strings.concatenate(parts)


def _refuse_loss(ids: Strings, manifest: Manifest, damaged: Sequence[str]) -> None:
    wanted = set(manifest.ids)
    lost = [id_ for id_ in ids if id_ not in wanted]
    if lost:
        raise StoreError(
            f"{len(lost):,} utterances of the damaged shards {listing(damaged)} are not in {manifest.source}, so they "
            f"cannot be extracted again: {listing(lost)}. Nothing has been removed: give the manifest they came "
            "from, or remove those shards yourself"
        )
