"""Compares audio files with the files that a version was extracted from."""

from __future__ import annotations

import os
import stat
from collections import defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from featcache.audio.content_hash import UNKNOWN_HASH, ContentHashes, hash_of_content
from featcache.audio.members import copy_of, stamp_now
from featcache.audio.remote import FILES_AT_ONCE, URLS_AT_ONCE
from featcache.care.report import Problem
from featcache.errors import AudioError, counted
from featcache.format.shard import Shard
from featcache.manifest.audio_locations import (
    AudioLocation,
    AudioSource,
    Command,
    LocalFile,
    Member,
    Url,
    locate,
    url_of,
)
from featcache.version.index import Index
from featcache.version.join import by_shard
from featcache.version.progress import OnShard
from featcache.version.records import root_of
from featcache.version.version import Version


@dataclass(frozen=True)
class SourceCheck:
    """How audio files are compared with what they were."""

    by_content: bool = False
    """True to compare the hash of their bytes, if known, instead of size and mtime."""
    root: AudioLocation | None = None
    """The root of relative paths; None for the root of the run that extracted each
    utterance."""
    urls: frozenset[Url] = frozenset()
    """The URLs whose files are compared: `Manifest.urls`."""

    def root_of(self, shard: Shard, version: Version) -> AudioLocation:
        """Return the root of the paths of a shard."""
        if self.root is not None:
            return self.root
        return root_of(version, shard) or Path()


class _File(NamedTuple):
    location: AudioSource
    size: int
    mtime_ns: int
    content_hash: int = UNKNOWN_HASH


def check_sources(
    version: Version,
    index: Index,
    shards: Collection[str],
    wanted: SourceCheck,
    threads: int,
    report: OnShard,
    stopped: Callable[[], bool],
) -> tuple[list[Problem], list[str]]:
    """Compare the audio files of the current items in some sound shards, by `threads`
    threads, until `stopped`; `report` is called after each shard.

    Returns a problem for each file that is missing, changed or unreadable, and notes on
    utterances that could not be compared."""
    hashes, unknown, not_asked = ContentHashes(), 0, 0
    ids_of_fault: defaultdict[str, list[str]] = defaultdict(list)
    at_once = threads if wanted.by_content else FILES_AT_ONCE
    if wanted.urls:
        at_once = URLS_AT_ONCE

    def find_fault(file: _File) -> str | None:
        return None if stopped() else _fault(file, hashes)

    with ThreadPoolExecutor(at_once) as pool:
        for number, name in enumerate(index.shards):
            if stopped():
                break
            if name not in shards:
                continue
            files = _files_of(version, index, number, wanted)
            for file in [*files]:
                url = url_of(file.location)
                if url and url not in wanted.urls:
                    not_asked += len(files.pop(file))
                elif wanted.by_content and file.content_hash == UNKNOWN_HASH:
                    unknown += len(files[file])
            faults = pool.map(find_fault, files)
            for (file, ids), fault in zip(files.items(), faults, strict=True):
                if fault is not None:
                    ids_of_fault[f"{file.location}: {fault}"] += ids
            report(0, 0.0, False)
    notes = []
    if unknown:
        why = "compared by size and mtime: no hash of their audio is known"
        notes.append(f"{counted(unknown, 'utterance')} {why}")
    if not_asked:
        why = "not checked: featcache asks only for URLs that --manifest has"
        notes.append(f"{counted(not_asked, 'utterance')} {why}")
    return [_problem(fault, *ids) for fault, ids in ids_of_fault.items()], notes


def _problem(fault: str, id_: str, *others: str) -> Problem:
    if others:
        return Problem("source", f"{id_} and {counted(len(others), 'other')}: {fault}")
    return Problem("source", f"{id_}: {fault}", id=id_)


def _files_of(
    version: Version, index: Index, number: int, wanted: SourceCheck
) -> dict[_File, list[str]]:
    """Map the files of the current items of shard `number` to the ids of their utterances.
    A file that was changed between two utterances appears twice."""
    names = ["source_size", "source_mtime_ns"]
    if wanted.by_content:
        names.append("source_hash")
    files: dict[_File, list[str]] = {}
    positions = np.arange(*index.span(number))
    for _, shard, items in by_shard(version, index, positions):
        table, folder = shard.table, wanted.root_of(shard, version)
        columns = [table[name][items].tolist() for name in names]
        rows = zip(index.ids.take(positions), table.paths.take(items), *columns, strict=True)
        for id_, path, *known in rows:
            files.setdefault(_File(locate(folder, path), *known), []).append(id_)
    return files


def _fault(file: _File, hashes: ContentHashes) -> str | None:
    """Return the fault of a file, if one can be told."""
    try:
        return _change(file, hashes)
    except AudioError as error:
        return str(error)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # a zero byte, say
        return f"not a valid path: {error}"


def _change(file: _File, hashes: ContentHashes) -> str | None:
    """Return how a file has changed, if that can be told. Commands are not run."""
    location, by_content = file.location, file.content_hash != UNKNOWN_HASH
    copy = None
    if isinstance(location, Command):
        return None
    size: int | None
    if isinstance(location, LocalFile):
        status = os.stat(location)
        if not stat.S_ISREG(status.st_mode):
            return "is not a file any more"
        size, mtime_ns = status.st_size, status.st_mtime_ns
    elif by_content:
        copy = copy_of(location)
        size, mtime_ns = copy.stamp
    else:
        size, mtime_ns = stamp_now(location)
    if size not in (file.size, None):
        return f"has changed since: {file.size:,} → {size:,} bytes"
    if not by_content:
        if mtime_ns == file.mtime_ns:
            return None
        whose = "its container's" if isinstance(location, Member) else "its"
        what = "ETag or date" if url_of(location) else "mtime"
        return f"has changed since: {whose} {what} is another"
    if copy is None:
        with open(str(location), "rb", buffering=0) as opened:
            content_hash = hashes.of(opened.fileno())
    else:
        # A copy's inode may be used again, so its hash is not remembered.
        with copy.open() as opened:
            content_hash = hash_of_content(opened.fileno())
    if content_hash == file.content_hash:
        return None
    return "has changed since: other bytes, of the same number"
