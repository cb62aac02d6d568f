"""Copies versions from a folder or an object store to another. Shards that the copy has are
not read again, and nothing is removed.

The version's own document comes last, so a new copy cannot be opened before it is complete.
To a copy that exists, wanted sets come first, so that readers know what is missing. It may
have been extracted into (see `care/diverged.py`)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from featcache.care.diverged import Copy, find_diverged
from featcache.care.report import Problem
from featcache.errors import ArgumentError, DamagedError, StoreError, listing
from featcache.format.documents import AT_MOST_BYTES
from featcache.format.shard import Shard
from featcache.storage.base import MARK, Buffer, Store
from featcache.storage.location import Location
from featcache.storage.opening import open_store
from featcache.version.corpus import put_part, read_parts
from featcache.version.index import Index, index_name, load_index
from featcache.version.indexing import open_index
from featcache.version.progress import OnShard, no_progress
from featcache.version.selection import is_corpus, version_names
from featcache.version.tags import read_tag, tag_names
from featcache.version.version import PLAIN_GROUP, Version, read_info
from featcache.version.wanted import read_all_wanted

_AT_MOST_BYTES = 1 << 37
_AT_ONCE_BYTES = 1 << 30
"""The most bytes of shards in memory."""


@dataclass
class Copied:
    """The result of copying a version: see docs/json.md."""

    source: str
    path: str
    copied: int = 0
    there: int = 0
    others: int = 0
    """The number of shards of the copy that the version does not have; they stay."""
    num_bytes: int = 0
    records: int = 0
    """The number of other files that were copied: wanted sets, records and the index."""
    diverged: int = 0
    problems: list[Problem] = field(default_factory=list)
    interrupted: bool = False


def copy_version(
    version: Version,
    cache: Location,
    *,
    threads: int = 8,
    report: OnShard = no_progress,
    stop: threading.Event | None = None,
) -> Copied:
    """Copy a version into a cache, which need not exist, under the name of its folder, at
    most `threads` shards at once, until `stop` is set; `report` is called after each.
    Raises ArgumentError if the cache is a corpus, or overlaps with the version's;
    StoreError if another version has that name there."""
    stop = stop or threading.Event()
    store = _store_of_copy(version, cache)
    is_new = not store.exists(MARK)
    if is_new:
        store.put(f"shards/{MARK}", PLAIN_GROUP)
    else:
        store.sweep()
    copied, missing = _compare(version, store)
    index = open_index(version)
    if is_new:
        _copy_files(version, store, copied, "wanted")
    else:
        _join_wanted(version, index, Version(store, version.info), copied)
    _copy_files(version, store, copied, "failures")

    def copy_one(name: str) -> int | DamagedError:
        if stop.is_set():
            return 0
        try:
            files = _read_shard(version.shard(name))
        except DamagedError as error:
            return error
        store.publish(files, f"shards/{name}")
        return sum(map(len, files.values()))

    amounts = {shard.name: (shard.items, shard.seconds) for shard in index.summaries}
    with ThreadPoolExecutor(_shards_at_once(version, index, threads), "featcache-copy") as pool:
        for name, outcome in zip(missing, pool.map(copy_one, missing), strict=True):
            if isinstance(outcome, DamagedError):
                copied.problems.append(Problem("structure", outcome.what, name))
                report(0, 0.0, True)
            elif outcome:
                copied.copied += 1
                copied.num_bytes += outcome
                report(*amounts.get(name, (0, 0.0)), False)
    copied.interrupted = stop.is_set()
    if not copied.interrupted:
        _copy_files(version, store, copied, "failures", "runs", "probes")
        _copy_tags(version, store, copied)
        _copy_index(version, store, copied)
        if is_new and not copied.problems:
            store.put(MARK, version.store.read(MARK, AT_MOST_BYTES))
    return copied


def _shards_at_once(version: Version, index: Index, threads: int) -> int:
    most_frames = max((shard.frames for shard in index.summaries), default=0)
    largest: int = version.info.spec.num_bytes(most_frames)
    return max(1, min(threads, _AT_ONCE_BYTES // max(1, largest)))


def refuse_overlap(source: Location, *targets: Location) -> None:
    """Raise ArgumentError if a place to copy to lies in the cache or corpus, or holds it."""
    source_path = _with_slash(source)
    for target in targets:
        path = _with_slash(target)
        if path.startswith(source_path) or source_path.startswith(path):
            what = f"is the same folder as {source}, or one lies in the other"
            raise ArgumentError(f"{targets[0]}: {what}: give another cache to copy to")


def _with_slash(location: Location) -> str:
    return f"{location.resolve()}".rstrip("/") + "/"


def plan_copy(version: Version, cache: Location) -> Copied:
    """Count the shards and bytes that `copy_version` would copy, without writing."""
    planned, missing = _compare(version, _store_of_copy(version, cache))
    planned.copied = len(missing)
    for name in missing:
        planned.num_bytes += sum(size for _, size in version.store.walk(f"shards/{name}"))
    return planned


def missing_shards(version: Version, cache: Location) -> list[str]:
    """List the shards that `copy_version` would copy."""
    return _compare(version, _store_of_copy(version, cache))[1]


def _compare(version: Version, store: Store) -> tuple[Copied, list[str]]:
    names, in_copy = version.shard_names(), {*store.names("shards")}
    missing = [name for name in names if name not in in_copy]
    copied = Copied(str(version.path), str(store.location), there=len(names) - len(missing))
    copied.others = len(in_copy.difference(names, [MARK]))
    return copied, missing


def copy_parts_list(corpus: Location, to: Location) -> None:
    """Add the parts of a corpus to the list of another. Raises ArgumentError if `to` is the
    cache of one manifest, or overlaps with the corpus."""
    refuse_overlap(corpus, to)
    versions = version_names(to)
    if versions:
        raise ArgumentError(
            f"{to}: is the cache of one manifest, with {listing(versions)}: give another folder"
        )
    known = {part.name for part in read_parts(to)}
    for part in read_parts(corpus):
        if part.name not in known:
            put_part(to, part)


def _store_of_copy(version: Version, cache: Location) -> Store:
    name = version.path.name
    if name in ("", ".."):
        name = version.info.folder_name
    # the copy's folder may be a link
    refuse_overlap(version.path.resolve().parent, cache, cache / name)
    if is_corpus(cache):
        raise ArgumentError(
            f"{cache}: is a corpus: copy to one of its parts, a folder in it, or to another cache"
        )
    store = open_store(cache / name)
    if store.exists(MARK):
        info = read_info(store.read(MARK, AT_MOST_BYTES), store.location)
        if info.fingerprint != version.info.fingerprint:
            raise StoreError(f"{store.location}: its fingerprint is another: copy to another cache")
    return store


def _read_shard(shard: Shard) -> dict[str, Buffer]:
    files: dict[str, Buffer] = {
        path: b"".join(map(bytes, shard.checked_blocks(path))) for path in shard.info.files
    }
    files[MARK] = shard.store.read(f"{shard.key}/{MARK}", AT_MOST_BYTES)
    return files


def _join_wanted(version: Version, index: Index, to: Version, copied: Copied) -> None:
    """Add the version's wanted sets to a copy's wanted sets. An unreadable set stays as it
    is."""
    damaged = list[str]()
    source = Copy(version, index, [*read_all_wanted(version, damaged)])
    target = Copy(to, open_index(to, keep=False), [*read_all_wanted(to, damaged)])
    copied.problems += [Problem("record", what) for what in damaged]
    diverged = find_diverged(source, target)
    copied.diverged = len(diverged)
    in_target = {wanted.name: wanted for wanted in target.wanted}
    in_source = {wanted.name: wanted for wanted in source.wanted}
    unreadable = {*to.store.names("wanted")} - in_target.keys()
    for name, wanted in (in_target | in_source).items():
        if name not in unreadable:
            joined = wanted.joined(in_target.get(name, wanted), diverged)
            _put(to.store, copied, f"wanted/{name}", joined.encode())


def _copy_files(version: Version, store: Store, copied: Copied, *folders: str) -> None:
    for folder in folders:
        for name in version.store.names(folder):
            key = f"{folder}/{name}"
            try:
                data = version.store.read(key, _AT_MOST_BYTES)
            except (FileNotFoundError, DamagedError):  # removed meanwhile; larger than allowed
                continue
            _put(store, copied, key, data)


def _put(store: Store, copied: Copied, key: str, data: bytes) -> None:
    if not _is_same(store, key, data):
        store.put(key, data)
        copied.records += 1


def _is_same(store: Store, key: str, data: bytes) -> bool:
    with suppress(FileNotFoundError, DamagedError):
        return store.read(key, len(data)) == data
    return False


def _copy_tags(version: Version, store: Store, copied: Copied) -> None:
    """Copy the tags whose shards the copy has, unless it has another tag of that name."""
    shards = {*store.names("shards")}
    for name in tag_names(version):
        key = f"tags/{name}"
        try:
            tag = read_tag(version, name)
        except StoreError as error:
            copied.problems.append(Problem("tag", str(error)))
            continue
        data = version.store.read(key, AT_MOST_BYTES)
        if not store.exists(key):
            if shards.issuperset(tag.shards):
                _put(store, copied, key, data)
        elif not _is_same(store, key, data):
            what = f"{store.location / key}: is not that of {version.path}, and stays"
            copied.problems.append(Problem("tag", what))


def _copy_index(version: Version, store: Store, copied: Copied) -> None:
    names = version.shard_names()
    folder = f"index/{index_name(version, names)}"
    has_others = {*store.names("shards")} - {MARK} != {*names}
    if has_others or store.exists(f"{folder}/{MARK}") or load_index(version, names) is None:
        return
    keys = [key for key, _ in version.store.walk(folder)]
    files: dict[str, Buffer] = {
        key.removeprefix(f"{folder}/"): version.store.read(key, _AT_MOST_BYTES) for key in keys
    }
    store.publish(files, folder)
    copied.records += len(files)
