"""Whether the audio files are still those that a version was extracted from."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from featcache.audio.content_hash import UNKNOWN_HASH, ContentHashes, hash_of_content
from featcache.audio.members import copy_of, stamp_now
from featcache.audio.remote import FILES_AT_ONCE, URLS_AT_ONCE
from featcache.errors import AudioError, DamagedError, counted
from featcache.format.shard import Shard
from featcache.manifest.audio_locations import (
    AudioLocation,
    AudioSource,
    Command,
    Member,
    Url,
    is_audio_url,
    locate,
    url_of,
)
from featcache.manifest.utterances import CallersUrls
from featcache.version.index import Index
from featcache.version.records import read_run
from featcache.version.version import Version


@dataclass(frozen=True)
class SourceCheck:
    """How audio files are compared with what they were."""

    by_content: bool = False
    """Whether by the hash of their bytes, if it is known; else by size and mtime."""
    root: AudioLocation | None = None
    """What relative paths are relative to; None for that of the run that extracted each
    utterance."""
    urls: CallersUrls = field(default_factory=lambda: CallersUrls(None))
    """Files at URLs that are asked for; others are not looked at."""

    def root_of(self, shard: Shard, version: Version) -> AudioLocation:
        """What the paths of a shard's items are relative to."""
        if self.root is not None:
            return self.root
        record = read_run(version.store, shard.run)
        root = str((record.asked if record is not None else {}).get("root", "."))
        return Url(root) if is_audio_url(root) else Path(root)


class _File(NamedTuple):
    """An audio file as it was when it was decoded."""

    location: AudioSource
    size: int
    mtime_ns: int
    content_hash: int


def check_sources(
    version: Version,
    index: Index,
    shards: Collection[str],
    wanted: SourceCheck,
    threads: int,
    report: Callable[[], object],
    stopped: Callable[[], bool],
) -> tuple[dict[tuple[AudioSource, str], list[str]], list[str]]:
    """Compare the audio files of the items that count in some sound shards with what they
    were, as `wanted`.

    So many threads hash files. `report` is called after each shard. Once `stopped`, which
    is called now and then, returns True, the rest is not looked at.

    Returns:
        Files that are missing, changed or unreadable, each with what is wrong with it,
        and the ids of its utterances. And notes on utterances whose files could not be
        compared so.
    """
    hashes, unknown, not_asked = ContentHashes(), 0, 0
    faulty: dict[tuple[AudioSource, str], list[str]] = {}
    at_once = URLS_AT_ONCE if wanted.urls else threads if wanted.by_content else FILES_AT_ONCE
    with ThreadPoolExecutor(at_once) as pool:
        for number, name in enumerate(index.shards):
            if stopped():
                break
            if name not in shards:
                continue
            files = _files_of(version.shard(name), version, index, number, wanted)
            for file in [
                file for file in files if (url := url_of(file.location)) and url not in wanted.urls
            ]:
                not_asked += len(files.pop(file))
            if wanted.by_content:
                unknown += sum(
                    len(ids) for file, ids in files.items() if file.content_hash == UNKNOWN_HASH
                )
            faults = pool.map(lambda file: None if stopped() else _fault(file, hashes), files)
            for (file, ids), fault in zip(files.items(), faults, strict=True):
                if fault is not None:
                    faulty.setdefault((file.location, fault), []).extend(ids)
            report()
    notes = []
    if unknown:
        notes.append(
            f"{counted(unknown, 'utterance')} compared by size and mtime: no hash of their "
            "audio is known"
        )
    if not_asked:
        notes.append(
            f"{counted(not_asked, 'utterance')} not looked at: URLs are asked for only if "
            "--manifest has them"
        )
    return faulty, notes


def _files_of(
    shard: Shard, version: Version, index: Index, number: int, wanted: SourceCheck
) -> dict[_File, list[str]]:
    """The files of a shard's items that count, and for each the ids of its utterances.

    `number` is the shard's in the index. A file that was changed between two utterances
    is there twice."""
    first, last = index.span(number)
    items, table, folder = index.item[first:last], shard.table, wanted.root_of(shard, version)
    if (items >= len(table)).any():  # an index that is sealed, and wrong all the same
        raise DamagedError(f"{shard}: damaged: there is no item {items.max()}", version.path)
    sizes, mtimes = table["source_size"][items].tolist(), table["source_mtime_ns"][items].tolist()
    hashes = (
        table["source_hash"][items].tolist() if wanted.by_content else [UNKNOWN_HASH] * len(items)
    )
    files: dict[_File, list[str]] = {}
    for position, path, *known in zip(
        range(first, last), table.paths.take(items), sizes, mtimes, hashes, strict=True
    ):
        files.setdefault(_File(locate(folder, path), *known), []).append(index.ids[position])
    return files


def _fault(file: _File, hashes: ContentHashes) -> str | None:
    """What is wrong with a file; None if it is what it was, as far as can be told.

    One at a URL or inside a container is asked for, or to compare its content, copied.
    What a command prints is not kept, and none is run for this."""
    location, by_content, copy = file.location, file.content_hash != UNKNOWN_HASH, None
    if isinstance(location, Command):
        return None
    size: int | None
    try:
        if isinstance(location, Path):
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
            whose = "its container's" if isinstance(location, Member) else "its"
            what = f"{whose} ETag or date" if url_of(location) else f"{whose} mtime"
            return None if mtime_ns == file.mtime_ns else f"has changed since: {what} is another"
        with copy.open() if copy is not None else open(str(location), "rb", buffering=0) as opened:
            # A copy is hashed each time: once it is gone, another may have its inode.
            content_hash = (hashes.of if copy is None else hash_of_content)(opened.fileno())
    except AudioError as error:
        return str(error)
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # a zero byte, say
        return f"not a valid path: {error}"
    return (
        None
        if content_hash == file.content_hash
        else "has changed since: other bytes, of the same number"
    )
