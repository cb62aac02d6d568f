"""Copies of versions, from a folder or an object store to another.

What is copied is checked on the way, against the checksums that the shards' documents
have. What is there already stays and is not read again, so a copy that was interrupted is
continued by making it again. Nothing is removed.

The version's own document comes last: nobody opens a new copy before it is whole. To one
that there is, what manifests want comes first: so a reader is told what is missing. It may
want more than the source, and go on wanting it; and it may have been extracted into, as
`care/diverged.py` says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from featcache.care.diverged import Copy, find_diverged
from featcache.care.report import Problem
from featcache.errors import ArgumentError, DamagedError, StoreError, listing
from featcache.format.documents import AT_MOST_BYTES
from featcache.format.shard import Shard
from featcache.storage.base import MARK, Buffer, Store, open_store
from featcache.storage.location import Location
from featcache.version.corpus import put_part, read_parts
from featcache.version.index import Index, index_name, load_index
from featcache.version.indexing import open_index
from featcache.version.selection import is_corpus, version_names
from featcache.version.tags import read_tag, tag_names
from featcache.version.version import PLAIN_GROUP, Version, read_info
from featcache.version.wanted import read_all_wanted

_AT_MOST_BYTES = 1 << 37
_AT_ONCE_BYTES = 1 << 30
"""How much of shards may be in memory."""


@dataclass
class Copied:
    """What became of a version."""

    source: str
    path: str
    copied: int = 0
    there: int = 0
    """The number of shards that were there already."""
    others: int = 0
    """The number of shards of the copy that the version does not have; they stay."""
    num_bytes: int = 0
    records: int = 0
    """The number of files that were copied besides: what is wanted, has failed and was
    done, and the index."""
    diverged: int = 0
    """The number of utterances of which both have made features, and nothing tells which
    are newer. They are missing in the copy until they are extracted again."""
    problems: list[Problem] = field(default_factory=list)
    """Damaged shards, which were not copied."""
    interrupted: bool = False


def copy_version(
    version: Version,
    cache: Location,
    *,
    threads: int = 8,
    report: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> Copied:
    """Copy a version into a cache, under the name of its folder: whatever of it is not
    there yet.

    The cache need not exist. At most as many shards as there are `threads` are copied at
    once; `report` is called after each, and no more are begun once `stop` is set.

    Raises ArgumentError if the cache is a corpus, or overlaps with the version's; StoreError if
    something cannot be read or written, or another version has that name there;
    DamagedError if the version's own metadata is damaged."""
    stop = stop or threading.Event()
    store = _store_of_copy(version, cache)
    is_new = not store.exists(MARK)
    if is_new:
        store.put(f"shards/{MARK}", PLAIN_GROUP)
    else:
        store.sweep()
    copied, missing = _compare(version, store)
    index = open_index(version)  # which keeps one, if the version can be written
    if is_new:
        copied.records += _copy_files(version, store, ["wanted"])
    else:
        _join_wanted(version, index, Version(store, version.info), copied)
    copied.records += _copy_files(version, store, ["failures"])

    def copy_one(name: str) -> int | DamagedError:
        if stop.is_set():
            return 0
        try:
            files = _read_shard(version.shard(name))
        except DamagedError as error:
            return error
        store.publish(files, f"shards/{name}")
        return sum(map(len, files.values()))

    most_frames = max((shard.frames for shard in index.summaries), default=0)
    largest = version.info.spec.num_bytes(most_frames)
    at_once = max(1, min(threads, _AT_ONCE_BYTES // max(1, largest)))
    # after an error, those that wait are cancelled
    with ThreadPoolExecutor(at_once, "featcache-copy") as pool:
        for name, done in zip(missing, pool.map(copy_one, missing), strict=True):
            if isinstance(done, DamagedError):
                copied.problems.append(Problem("structure", done.what, name))
            elif done:
                copied.copied += 1
                copied.num_bytes += done
            report()
    copied.interrupted = stop.is_set()
    if not copied.interrupted:
        copied.records += _copy_files(version, store, ["failures", "runs", "probes"])
        _copy_tags(version, store, copied)
        copied.records += _copy_index(version, store)
        if is_new and not copied.problems:
            store.put(MARK, version.store.read(MARK, AT_MOST_BYTES))
    return copied


def refuse_overlap(source: Location, *targets: Location) -> None:
    """Refuse to copy a cache, or a corpus, to a place in it, or to one that it is in: one
    version would hide the other. Raises ArgumentError."""
    given, *others = (f"{place.resolve()}".rstrip("/") + "/" for place in (source, *targets))
    if any(other.startswith(given) or given.startswith(other) for other in others):
        what = f"is {source}, which is copied, lies in it or holds it"
        raise ArgumentError(f"{targets[0]}: {what}: give another cache to copy to")


def plan_copy(version: Version, cache: Location) -> Copied:
    """Say which shards `copy_version` would copy, and how many bytes; nothing is written.
    Raises what `copy_version` raises of these places."""
    planned, missing = _compare(version, _store_of_copy(version, cache))
    sizes = (version.store.walk(f"shards/{name}") for name in missing)
    planned.copied = len(missing)
    planned.num_bytes = sum(num_bytes for files in sizes for _, num_bytes in files)
    return planned


def _compare(version: Version, store: Store) -> tuple[Copied, list[str]]:
    """How many shards of a version its copy has, and the names of those that it lacks."""
    names, there = version.shard_names(), {*store.names("shards")}
    missing = [name for name in names if name not in there]
    copied = Copied(str(version.path), str(store.location), there=len(names) - len(missing))
    copied.others = len(there.difference(names, [MARK]))
    return copied, missing


def copy_parts_list(corpus: Location, to: Location) -> None:
    """List the parts of a corpus in another, too, where they are copied to; what that
    knows of parts stays. Raises ArgumentError if that is the cache of one manifest, or
    overlaps with the corpus; DamagedError if what a corpus says of a part is not what was
    written; StoreError if the list cannot be written."""
    refuse_overlap(corpus, to)
    if versions := version_names(to):
        raise ArgumentError(
            f"{to}: is the cache of one manifest, with {listing(versions)}: give another folder"
        )
    known = {part.name for part in read_parts(to)}
    for part in read_parts(corpus):
        if part.name not in known:
            put_part(to, part)


def _store_of_copy(version: Version, cache: Location) -> Store:
    """Return the store of a version's copy in a cache, which need not exist."""
    name = version.path.name
    if name in ("", ".."):  # of a path that ends so
        name = version.info.folder_name
    refuse_overlap(version.path.resolve().parent, cache, cache / name)  # which may be a link
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
    """The files of a shard, all of which are what was written. Raises DamagedError if one
    is not."""
    files: dict[str, Buffer] = {
        path: b"".join(map(bytes, shard.checked_blocks(path))) for path in shard.info.files
    }
    return {**files, MARK: shard.store.read(f"{shard.key}/{MARK}", AT_MOST_BYTES)}


def _join_wanted(version: Version, index: Index, to: Version, copied: Copied) -> None:
    """Have a copy want what the version wants, besides what it wants itself. A set that
    cannot be read stays as it is."""
    damaged = list[str]()
    source = Copy(version, index, [*read_all_wanted(version, damaged)])
    target = Copy(to, open_index(to, keep=False), [*read_all_wanted(to, damaged)])
    copied.problems += [Problem("record", what) for what in damaged]
    diverged = find_diverged(source, target)
    copied.diverged = len(diverged)
    theirs = {one.name: one for one in target.wanted}
    unreadable = {*to.store.names("wanted")} - theirs.keys()
    for name, one in (theirs | {one.name: one for one in source.wanted}).items():
        key, data = f"wanted/{name}", one.joined(theirs.get(name, one), diverged).encode()
        if name not in unreadable and not _is_same(to.store, key, data):
            to.store.put(key, data)
            copied.records += 1


def _copy_files(version: Version, store: Store, folders: Iterable[str]) -> int:
    """Copy what is in some folders, and is not the same there; returns how many files."""
    copied = 0
    for key in (f"{folder}/{name}" for folder in folders for name in version.store.names(folder)):
        try:
            data = version.store.read(key, _AT_MOST_BYTES)
        except (FileNotFoundError, DamagedError):  # taken away since; or what nobody reads
            continue
        if not _is_same(store, key, data):
            store.put(key, data)
            copied += 1
    return copied


def _is_same(store: Store, key: str, data: bytes) -> bool:
    with suppress(FileNotFoundError, DamagedError):
        return store.read(key, len(data)) == data
    return False


def _copy_tags(version: Version, store: Store, copied: Copied) -> None:
    """Copy the tags whose shards are all there. One of the copy's that has the same name,
    and is another, stays."""
    shards = {*store.names("shards")}
    for name in tag_names(version):
        key = f"tags/{name}"
        try:
            tag = read_tag(version, name)
        except StoreError as error:
            copied.problems.append(Problem("tag", str(error)))
            continue
        data, is_there = version.store.read(key, AT_MOST_BYTES), store.exists(key)
        if is_there and not _is_same(store, key, data):
            copied.problems.append(
                Problem("tag", f"{store.location / key}: is not that of {version.path}, and stays")
            )
        elif not is_there and shards.issuperset(tag.shards):
            store.put(key, data)
            copied.records += 1


def _copy_index(version: Version, store: Store) -> int:
    """Copy the index, if the copy has the same shards and no index: whole, for somebody
    may open it meanwhile. Returns how many files."""
    names = version.shard_names()
    folder = f"index/{index_name(version, names)}"
    has_others = {*store.names("shards")} - {MARK} != {*names}
    if has_others or store.exists(f"{folder}/{MARK}") or load_index(version, names) is None:
        return 0
    keys = [key for key, _ in version.store.walk(folder)]
    files: dict[str, Buffer] = {
        key.removeprefix(f"{folder}/"): version.store.read(key, _AT_MOST_BYTES) for key in keys
    }
    store.publish(files, folder)
    return len(files)
