"""What takes shards or versions away: one at a time, never beside a run, and nothing outside the cache."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from featcache.errors import ArgumentError, DamagedError, StoreError, listing
from featcache.storage.location import ObjectPath
from featcache.storage.objects import Objects
from featcache.storage.store import store_of
from featcache.store import commits
from featcache.store.documents import read_bytes
from featcache.store.files import remove_from_cache, remove_from_version, sync
from featcache.store.leftovers import temporary_name
from featcache.store.locks import Claim
from featcache.store.run_records import is_running, read_run, read_runs, request_of, run_names
from featcache.store.tags import tag_names
from featcache.store.version import Version

_NAME = re.compile(b'"([0-9a-f]{12})"')
_OWN_FILE = re.compile(
    r"(shards/)?zarr\.json|(shards|index)/[0-9a-f]{12}(/.+)?|(tags|probes)/[^/]+\.json|(runs|commits|work|aside)/.+"
    r"|(.+/)?\.[^/]+\.[0-9a-f]{8}"
)
"""What the files of a version are called; the last are those that are being written."""


def claim_shards(version: Version) -> Claim:
    """The right to take shards away, or to rely on it that nobody does. While it is held, runs do not remove what is
    being copied.

    Raises:
        StoreError: Somebody else has it, or the version cannot be written.
    """
    try:
        claim = version.claim("repair")
        is_ours = claim.take()
    except OSError as error:
        raise StoreError(f"{version.path}: cannot be written: {error.strerror}; nothing has been removed") from error
    if not is_ours:
        raise StoreError(
            f"{version.path}: another repair is running, or the version is being tagged or pruned: run this one again "
            "when it has finished"
        )
    return claim


def refuse_beside_runs(version: Version, own: str = "") -> None:
    """Refuse to take anything away while a run fills the version, as far as can be seen here; with a run of our own,
    while one does that has begun after it. In an object store, a run elsewhere fills it if it has not ended, and
    something was written within a day.

    Raises:
        StoreError: Says which run.
    """
    names = [name for name in run_names(version) if name > own]
    for name in names:
        if is_running(version, name):
            asked = request_of(version, name)
            process = f", process {asked['pid']} on {asked['host']}" if {"pid", "host"} <= asked.keys() else ""
            raise StoreError(f"{version.path}: a run is under way ({name}{process}): nothing is removed beside it")
    if isinstance(version.path, Path):
        return
    elsewhere = read_runs(version, [name for name in names if not (version.desk / "runs" / name).exists()])
    # Of a record that is lost, nothing tells that the run has ended: half a removal leaves such ones, too.
    unended = [run for run in elsewhere if run.is_known and run.outcome is None]
    if unended and commits.was_written_lately(version):
        run = unended[0]
        raise StoreError(
            f"{version.path}: a run on {run.asked.get('host', 'another machine')} may be under way ({run.name}): "
            "nothing is removed beside it. If it was killed, wait until nothing has been written for a day"
        )


def prune_claim(version: Version) -> Claim:
    """The claim that a prune holds while it takes shards away; waits until it is free. A prune stops for a run that
    begins, and the run waits for that.

    Raises:
        StoreError: The version cannot be written.
    """
    try:
        claim = version.claim("prune")
        claim.take(wait=True)
    except OSError as error:
        raise StoreError(f"{version.path}: cannot be written: {error.strerror}") from error
    return claim


def refuse_pruned(version: Version, planned: Iterable[str]) -> None:
    """Refuse to go on with a run that has begun, if a prune has taken away shards since it was `planned` with these.

    As soon as a run has begun, no prune takes a shard away that it has not begun with.

    Raises:
        StoreError: A shard was pruned. Says that the same command does what is now to be done.
    """
    if not isinstance(version.path, Path):
        return
    with prune_claim(version):
        gone = {*planned}.difference(version.listed_shards())
    if not gone:
        return
    for run in reversed(run_names(version)):
        record = read_run(version, run)
        if record is not None and any(event.pruned and event.shard in gone for event in record.events()):
            raise StoreError(f"{version.path}: was pruned while this run was being planned: run the same command again")


def forget_indexes(version: Version, shards: Collection[str]) -> None:
    """In an object store, remove the indexes that have one of these shards, before it is taken away: else, what a kill
    leaves of it would be taken for a shard that is damaged.
    """
    if isinstance(version.path, Path):
        return
    folder, store = version.path / "index", Objects()
    with suppress(FileNotFoundError):
        for name in store.names(folder):
            with suppress(FileNotFoundError, DamagedError):
                described = {*_NAME.findall(read_bytes(folder / name / "index.json"))}
                if not described.isdisjoint(shard.encode() for shard in shards):
                    store.delete_folder(folder / name)


def remove_shard(version: Version, name: str) -> None:
    """Remove a shard. What a link leads to stays.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It cannot be removed.
    """
    if not isinstance(version.path, Path):
        commits.remove_shard_of_objects(version, name)
        return
    folder = version.path / "shards" / name
    if folder.is_symlink():
        folder.unlink()
        return
    remove_from_version(version.path, "work", take_shard(version, name).name)  # a run that has just begun may be first


def take_shard(version: Version, name: str) -> Path:
    """Move a shard, which is a folder, to `work/`, whence it is removed after a kill; returns where it is now.

    Raises:
        FileNotFoundError: It is not there.
        OSError: It cannot be moved.
    """
    folder = version.folder / "shards" / name
    gone = version.work_folder(name)
    folder.rename(gone)
    sync(gone.parent)  # else, after a power cut, half of it may be back in its place
    sync(folder.parent)
    return gone


def what_is_kept(version: Version) -> list[str]:
    """What of a version is not removed without a word from the user: its tags, and files of others in its folder."""
    kept, tags = [], tag_names(version)
    if tags:
        kept.append(f"the tags {listing(tags)}")
    files = sorted(name for name, _ in store_of(version.path).walk(version.path) if not _OWN_FILE.fullmatch(name))
    if files:
        kept.append(f"files that are not featcache's: {listing(files)}")
    return kept


def refuse_with_what_is_kept(version: Version) -> None:
    """Refuse to remove a version with `what_is_kept`.

    Raises:
        ArgumentError: Says what it is.
    """
    if kept := what_is_kept(version):
        raise ArgumentError(f"{version.path}: holds {'; '.join(kept)}: move it away, or give --force to remove it too")


def remove_version(version: Version, *, force: bool = False) -> None:
    """Remove a version, with everything in its folder: it is gone at once, by a rename, and then deleted. In an object
    store, its shards are removed one by one, and its own `zarr.json` last: after a kill, it can be done again, unless
    that file alone is left, which is no version.

    Raises:
        ArgumentError: It has tags, or there are files of others in its folder, without `force`.
        StoreError: Its folder is a link, a run is under way, or it cannot be removed.
    """
    if isinstance(version.path, Path) and version.path.is_symlink():
        link = os.path.abspath(version.path)
        raise StoreError(f"{link}: is a symbolic link to {os.readlink(link)}: remove that folder, and the link")
    if not force:
        refuse_with_what_is_kept(version)
    if isinstance(version.path, ObjectPath):
        with claim_shards(version):
            refuse_beside_runs(version)
            commits.remove_version_of_objects(version)
        return
    folder = Path(os.path.abspath(version.folder))
    refuse_beside_runs(version)
    mark = f".removed-{secrets.token_hex(6)}"
    hidden = folder.with_name(temporary_name(mark))
    with claim_shards(version):
        try:
            folder.rename(hidden)
            try:
                refuse_beside_runs(Version(hidden, version.info))  # one that has begun a moment ago
            except StoreError:
                hidden.rename(folder)
                raise
            sync(folder.parent)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be removed: {error.strerror}") from error
    remove_from_cache(folder.parent, hidden.name)
    if left := [name for name in os.listdir(folder.parent) if name.startswith(mark)]:
        raise StoreError(f"{folder.parent / left[0]}: this is left of {folder.name}, and cannot be removed")
