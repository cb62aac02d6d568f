"""Copies of versions, from a folder or an object store to another.

What is copied is checked on the way: every array's bytes against the checksum behind them, every document against the
shard's sealed record of it. What is there already stays and is not read again, so a copy that was interrupted is
continued by making it again. Nothing is removed.

The order makes half a copy harmless. The records of runs come before the shards: a reader is told what is missing. A
shard appears in a folder by a rename, and in an object store by its `zarr.json`, which comes last; and only when those
are there that replace utterances of it, which would else have their older features. The index, whose name says of which
shards it is, comes after them, its document last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from featcache.errors import ArgumentError, DamagedError, StoreError, listing
from featcache.storage.location import Location
from featcache.storage.objects import read_ahead
from featcache.storage.store import store_of
from featcache.store.check import Problem
from featcache.store.corpus import is_corpus, read_parts, update_parts
from featcache.store.files import (
    folder_to_write,
    make_folders,
    publish_folder,
    refuse_links,
    remove_from_version,
    write_file,
)
from featcache.store.index import Index, index_folder, load_index, open_index
from featcache.store.run_records import record_files, run_names
from featcache.store.selection import version_names
from featcache.store.shard import Shard
from featcache.store.shard_files import ShardFiles
from featcache.store.tags import read_tag, tag_file, tag_names
from featcache.store.version import Version


@dataclass
class Copied:
    """What became of a version."""

    source: str
    """Where it is."""
    path: str
    """Where the copy is."""
    copied: int = 0
    """The number of shards that were copied."""
    there: int = 0
    """The number of shards that were there already."""
    others: int = 0
    """The number of shards of the copy that the version does not have; they stay."""
    num_bytes: int = 0
    """The bytes that were copied."""
    records: int = 0
    """The number of files that were copied besides: records of runs and probes, and the index."""
    problems: list[Problem] = field(default_factory=list)
    """Damaged shards, which were not copied, and those that such a one replaces, which neither were."""
    interrupted: bool = False
    """Whether it was stopped before all shards were copied."""


def copy_version(
    version: Version,
    cache: Location,
    *,
    threads: int = 8,
    report: Callable[[], object] = lambda: None,
    stop: threading.Event | None = None,
) -> Copied:
    """Copy a version into a cache, under the name of its folder: whatever of it is not there yet.

    The cache need not exist. As many shards as there are `threads` are copied at once; `report` is called after each,
    and no more are begun once `stop` is set.

    Raises:
        ArgumentError: The cache is a corpus, or where the version is.
        StoreError: Something cannot be read or written, or another version has that name there.
        DamagedError: The version's own metadata is damaged.
    """
    stop, failed = stop or threading.Event(), threading.Event()
    _refuse_inside(version, cache)
    if is_corpus(cache):
        raise ArgumentError(f"{cache}: is a corpus: copy to one of its parts, a folder in it, or to another cache")
    copy = _create(version, cache)
    result = Copied(str(version.path), str(copy.path))
    index = open_index(version)  # which keeps one, if it is in a folder that can be written
    result.records += _copy_records(version, copy)
    there, runs = {*copy.shard_names()}, dict(zip(index.shards, index.runs, strict=True))
    missing = sorted(
        runs.keys() - there, key=lambda name: (runs[name], name), reverse=True
    )  # what replaces others first
    result.there, result.others = len(runs) - len(missing), len(there - runs.keys())
    replaced_by = _replaced_by(version, index, missing)
    copies: dict[str, Future[int | Problem]] = {}

    def copy_one(name: str, newer: Mapping[str, Future[int | Problem]]) -> int | Problem:
        if lacking := [other for other, copied in newer.items() if isinstance(copied.result(), Problem)]:
            what = "replaces some of its utterances, and is not copied"
            return Problem("missing", f"not copied, as {listing(lacking)} {what}", name)
        if stop.is_set() or failed.is_set():
            return 0
        try:
            return _copy_shard(version.shard(name), version, copy)
        except DamagedError as error:
            return Problem("structure", error.what, name)

    with ThreadPoolExecutor(threads, "featcache-copy") as pool, ExitStack() as ended:
        ended.callback(failed.set)  # after an error, the pool waits for shards that are under way
        for name in missing:
            newer = {other: copies[other] for other in replaced_by.get(name, ()) if other in copies}
            copies[name] = pool.submit(copy_one, name, newer)
        for copied in copies.values():
            if isinstance(done := copied.result(), Problem):
                result.problems.append(done)
            elif done:
                result.copied += 1
                result.num_bytes += done
            report()
        result.interrupted = stop.is_set()
    if not result.interrupted:
        result.records += _copy_records(version, copy)  # what a run has added to them meanwhile
        result.records += _copy_small(version, copy, version.probe_files())
        result.records += _copy_tags(version, copy, result)
        result.records += _copy_index(version, copy)
    return result


def _replaced_by(version: Version, index: Index, names: Sequence[str]) -> dict[str, list[str]]:
    """Of those of some shards that have items which do not count: the shards with those that count in their place."""
    counts = dict(zip(index.shards, np.bincount(index.shard, minlength=len(index.shards)).tolist(), strict=True))
    shards = [version.shard(name) for name in names]
    replaced_by = {}
    with read_ahead(file for shard in shards for file in shard.files(())):
        for shard in shards:
            with suppress(DamagedError):  # which whoever copies it says
                if shard.info.items > counts[shard.name]:
                    positions = index.find(shard.ids)
                    newer = np.unique(index.shard[positions[positions >= 0]])
                    replaced_by[shard.name] = [index.shards[at] for at in newer.tolist()]
    return replaced_by


def copy_parts_list(corpus: Location, to: Location) -> None:
    """List the parts of a corpus in another, too, where they are copied to; others that it lists stay.

    Raises:
        ArgumentError: There is the cache of one manifest.
        DamagedError: The `corpus.json` of one is not what was written.
        StoreError: It cannot be written.
    """
    if versions := version_names(to):
        raise ArgumentError(
            f"{to}: is the cache of one manifest, with {listing(versions)}: give the corpus another folder"
        )
    parts = read_parts(corpus)
    update_parts(to, lambda there: there.update({part.name: part for part in parts}))


def _refuse_inside(version: Version, cache: Location) -> None:
    """Refuse to copy a version to where it is, or into itself."""
    given, path = (str(place.resolve() if isinstance(place, Path) else place) for place in (cache, version.path))
    if given == path.rpartition("/")[0] or f"{given}/".startswith(f"{path}/"):
        raise ArgumentError(f"{cache}: is where {version.path} is: give another cache to copy to")


def _create(version: Version, cache: Location) -> Version:
    """The version at the copy's place, with metadata, and without shards if it is new."""
    name = version.path.name
    if name in ("", ".."):  # of a path that ends so
        name = version.info.folder_name
    copy = Version.create(cache, version.info, name)
    if isinstance(cache, Path):
        copy.sweep()
    return copy


def _copy_shard(shard: Shard, version: Version, copy: Version) -> int:
    """Copy a shard; returns how many bytes. If it is not what was written, there is no copy of it."""
    files = ShardFiles(shard, version.info.spec)
    with read_ahead(files.small()):
        if isinstance(copy.path, Path):
            return _into_folder(files, copy)
        place = copy.path / "shards" / shard.name
        num_bytes = sum(files.upload_arrays(place).values())
        document = files.document()
        store_of(place).put(place / "zarr.json", document)
        return num_bytes + len(document)


def _into_folder(files: ShardFiles, copy: Version) -> int:
    work, written = copy.work_folder(files.shard.name), dict[str, int]()
    try:
        for name, blocks in files.arrays():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                written[name] = sum(map(file.write, blocks()))
        written["zarr.json"] = (work / "zarr.json").write_bytes(files.document())
        folder_to_write(copy.folder, "shards")
        publish_folder(work, copy.folder / "shards" / files.shard.name, written)
    except OSError as error:
        raise StoreError(f"{error.filename or copy.path}: cannot be written: {error.strerror}") from error
    finally:
        remove_from_version(copy.folder, "work", work.name)
    return sum(written.values())


def _copy_records(version: Version, copy: Version) -> int:
    """Copy the records of runs that are new, or have changed; returns how many."""
    return _copy_small(version, copy, [*record_files(version, run_names(version))])


def _copy_tags(version: Version, copy: Version, result: Copied) -> int:
    """Copy the tags whose shards are all there. One of the copy's that has the same name, and is another, stays."""
    files, held, own = [], {*copy.shard_names()}, {*tag_names(copy)}
    for name in tag_names(version):
        try:
            tag = read_tag(version, name)
            if name in own and read_tag(copy, name).shards != tag.shards:
                what = f"{tag_file(copy, name)}: is another tag than that of {version.path}, and stays"
                result.problems.append(Problem("tag", what))
        except StoreError as error:
            result.problems.append(Problem("tag", str(error)))
            continue
        if name not in own and held.issuperset(tag.shards):
            files.append(tag_file(version, name))
    return _copy_small(version, copy, files)


def _copy_index(version: Version, copy: Version) -> int:
    """Copy the index, if the copy has the same shards; in a folder, it is built when the copy is opened."""
    names = version.shard_names()
    if isinstance(copy.path, Path) or copy.shard_names() != names or load_index(version, names) is None:
        return 0
    folder = index_folder(version, names)
    files = sorted(store_of(folder).names(folder), key=lambda name: (name == "index.json", name))
    return _copy_small(version, copy, [folder / name for name in files])


def _copy_small(version: Version, copy: Version, files: list[Location]) -> int:
    """Copy files that lie at the same place in the copy's folder, and are not the same there; in their order."""
    places = [copy.path.joinpath(*str(file).removeprefix(f"{version.path}/").split("/")) for file in files]
    copied = 0
    with read_ahead([*files, *places]):
        for file, place in zip(files, places, strict=True):
            data = _read(file)
            if data is None or data == _read(place):
                continue
            if isinstance(place, Path):
                parents = place.parent.relative_to(copy.folder)
                folder_to_write(copy.folder, parents.parts[0])
                refuse_links(copy.folder, str(parents))
                make_folders(place.parent)
            write_file(place, data)
            copied += 1
    return copied


def _read(file: Location) -> bytes | None:
    try:
        return store_of(file).get(file, lambda size: None)
    except (FileNotFoundError, NotADirectoryError):
        return None
