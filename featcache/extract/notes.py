"""Notes for the user before a run begins."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from featcache.config import Config
from featcache.errors import ArgumentError, FeatcacheError, ManifestError, counted, listing
from featcache.extract.decoding import where
from featcache.extract.sources import stat_of
from featcache.extract.work import Work
from featcache.extractors import Extractor, Params, find
from featcache.extractors.model import ModelExtractor
from featcache.manifest import Manifest, rows_at_even_steps
from featcache.store.in_flight import Suspects
from featcache.store.join import differences, item_at
from featcache.store.shard import Item
from featcache.store.version import Version, VersionInfo, differing_keys, select_versions

_LOOKED_AT = 256
"""Files that are looked for, of all that are to be extracted."""

_TOLD = 5
"""Utterances that a note names."""


def about_siblings(cache: Path, info: VersionInfo) -> list[str]:
    """What is different where there is a version of the same name under another fingerprint.

    Raises:
        ArgumentError: there is one under this fingerprint, whose folder has another name than it should.
    """
    try:
        siblings = select_versions(cache, info.name)
    except FeatcacheError:
        return []  # no cache yet, or damage elsewhere in it, which is verify's to tell
    places = [f"params.{name}:" for name in find(info.config["extractor"]).Params.locations]
    places.append("augment.noise.manifest:")
    notes = []
    for sibling in siblings:
        if sibling.info.fingerprint == info.fingerprint:
            raise ArgumentError(
                f"{sibling.path} has this config's fingerprint, but another folder name: rename it back to "
                f"{info.folder_name}, or move it out of {cache} to extract everything again"
            )
        keys = differing_keys(sibling.info.config, info.config)
        deciding = [key for key in keys if not key.startswith(tuple(places))]
        notes.append(
            f"{info.folder_name} is a new version next to {sibling.path.name}: "
            + (", ".join(deciding) or "the extractor's revision, or the content of its weights, differs")
        )
    return notes


def about_chunks(config: Config, extractor: Extractor[Params]) -> list[str]:
    """That long clips will be cut into chunks whose values are not quite those of the whole, if so.

    Raises:
        ConfigError: such chunks leave nothing of a clip.
    """
    if not isinstance(extractor, ModelExtractor) or extractor.params.chunk is None:
        return []
    chunk = extractor.params.chunk
    extractor.pieces(round(3 * chunk.seconds * extractor.spec.sample_rate))  # which refuses them now, and not later
    if extractor.chunks_are_exact:
        return []
    return [
        f"{config.name}: chunks with {chunk.overlap:g} s of overlap are not exact for {config.extractor}, whose frames "
        "depend on more than that: `featcache probe` measures the difference"
    ]


def about_replaced(work: Work) -> str:
    """Which utterances of a version are extracted again though there are items of them, and what is different; at least
    one is.

    Raises:
        DamagedError: the shard of such an item is not what was written.
    """
    rows = np.flatnonzero(work.todo.missing & (work.todo.replaces >= 0)).tolist()
    version = Version.open(work.path)
    told = []
    for row in rows[:_TOLD]:
        item = item_at(version, work.index, int(work.todo.replaces[row]))
        differ = differences(item, work.manifest[row]) or _of_file(item, work.manifest)
        told.append(f"{item.id}: {differ}")
    more = f" … and {len(rows) - _TOLD:,} more" if len(rows) > _TOLD else ""
    again = counted(len(rows), "utterance is", "utterances are")
    return f"{work.info.folder_name}: {again} extracted again: {'; '.join(told)}{more}"


def _of_file(item: Item, manifest: Manifest) -> str:
    """What is different of the file that an item was extracted from, and of the file at that path now."""
    size, mtime_ns = stat_of(manifest.resolve(item.path))
    differ = [name for name, same in (("size", size == item.size), ("mtime", mtime_ns == item.mtime_ns)) if not same]
    return f"its file's {' and '.join(differ)}" if differ else "its file, which has failed meanwhile"


def about_missing_files(manifest: Manifest, rows: NDArray[np.bool_]) -> list[str]:
    """That none of the audio files to be extracted is where it should be, by some of them.

    Args:
        manifest: `[rows]`.
        rows: bool `[rows]`, which are to be extracted.

    Raises:
        ManifestError: nor is any other file of the manifest, by some: the root is another than was meant, most likely.
            A single file that is missing may be just that.
    """
    paths = _some_paths(manifest, rows)
    if len(paths) < 2 or _may_any_be_there(manifest, paths):
        return []
    hint = "" if Path(paths[0]).is_absolute() else "; --root says what relative paths are relative to"
    example = f"for example {paths[0]}{where(paths[0], manifest.root)}"
    note = f"none of {len(paths):,} audio files checked exists, {example}{hint}"
    if not _may_any_be_there(manifest, _some_paths(manifest, ~rows)):
        raise ManifestError(f"{manifest.source}: {note}")
    return [note]


def _some_paths(manifest: Manifest, rows: NDArray[np.bool_]) -> list[str]:
    """The different paths of some of these rows, from the first to the last."""
    there = np.flatnonzero(rows)
    some = there[rows_at_even_steps(len(there), _LOOKED_AT)]
    return list(dict.fromkeys(manifest.paths[row] for row in some.tolist()))


def _may_any_be_there(manifest: Manifest, paths: Iterable[str]) -> bool:
    return any(map(_may_be_there, map(manifest.resolve, paths)))


def about_suspects(manifest: Manifest, missing: NDArray[np.bool_], suspects: Suspects, path: Path) -> list[str]:
    """That some of what is to be extracted may have crashed an earlier run, and what is done about it.

    Args:
        manifest: `[rows]`.
        missing: bool `[rows]`, which are to be extracted.
        suspects: what was in flight in runs that have died.
        path: the folder of the version.
    """
    if not suspects.ids:
        return []
    here = [id_ for id_ in manifest.ids.take(np.flatnonzero(missing)) if id_ in suspects.ids]
    if not here:
        return []
    return [
        f"{path.name}: an earlier run died with {counted(len(here), 'utterance')} in flight ({listing(here, 3)}): "
        "extracted one by one, in a process of their own"
    ]


def about_space(cache: Path, num_bytes: float) -> list[str]:
    """That a disk has no room for what is to be written, if so; a disk that does not say has room.

    Args:
        cache: which may not be there yet.
        num_bytes: to be written, about.
    """
    there = next((folder for folder in (cache.absolute(), *cache.absolute().parents) if folder.is_dir()), None)
    if there is None:
        return []
    free = shutil.disk_usage(there).free
    if num_bytes <= free:
        return []
    return [f"{cache}: the features take about {num_bytes / 1e9:,.1f} GB, and the disk has {free / 1e9:,.1f} GB free"]


def _may_be_there(path: Path) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # no permission, say, which is not for these notes to tell
        return True
    return True
