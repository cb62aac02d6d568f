"""Files and folders that appear whole or not at all, and the folders of a cache that featcache writes in and removes.

Whatever is to appear is written under another name beside its place, flushed to disk, and renamed. The rename is
flushed as well. So neither a kill nor a power cut leaves half of it, and a reader that sees the name sees everything.
What is to be removed is renamed first, too: a removal never follows a folder to its place.

A link inside a cache may lead anywhere, and a cache may be a stranger's. So nothing is written through a link, and
nothing that a link leads to is removed. A cache's own folder and a version's may be links, since users put them on
other disks: the rule is about what lies below a version's folder.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from featcache.errors import StoreError
from featcache.storage.location import Location
from featcache.storage.store import store_of
from featcache.store.leftovers import leftovers, temporary_name, what_of

WRITTEN = ("shards", "runs", "probes", "work")
"""The folders of a version that must be writable to add anything to it."""

SYNC_THREADS = 8
"""Threads that flush the files of a folder side by side; each only waits for the disk."""

_IN_VERSION = {"index": re.compile(r"[0-9a-f]{12}"), "work": re.compile(r"[^.].*\.[0-9a-f]{8}")}
"""The names of the folders that may be removed again, by the folder of the version that they are in."""

_BEING_MADE = re.compile(r"\..+-[0-9a-f]{12}(\.[\w-]+)?\.[0-9a-f]{8}")
"""The name of a version's folder before it is complete."""

_SMALL_FILE = re.compile(r"\..+\.jsonl?(\.[\w-]+)?\.[0-9a-f]{8}")
"""The name of a small file before it is complete."""


def write_file(path: Location, data: bytes) -> None:
    """Write a small file, here or in an object store, so that it appears whole or not at all, also after a power cut.

    Raises:
        StoreError: It cannot be written. If there was a file of this name, it is still there.
    """
    if not isinstance(path, Path):
        store_of(path).put(path, data)
        return
    temporary = name_beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):  # it was never made, or the disk is read-only by now
            temporary.unlink()
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from error


def publish_folder(folder: Path, place: Path, written: Mapping[str, int]) -> bool:
    """Flush a folder with everything in it, and rename it to `place`, on the same file system.

    `written` are the sizes of all files that were written in it, by their paths in the folder. Returns whether it was
    renamed: if not, there is another folder at `place`, and both stay.

    Raises:
        StoreError: A file is not there any more, or has another size.
        OSError: It cannot be flushed or renamed.
    """
    sync_tree(folder)
    for name, num_bytes in written.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            found = 0
        if found != num_bytes:
            raise StoreError(
                f"{folder / name}: has {found} of the {num_bytes} bytes that were written: something has removed it "
                "or cut it off. It has not been committed: run the same command again"
            )
    is_first = True
    try:
        folder.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        is_first = False
    sync(place.parent)
    return is_first


def name_beside(path: Path) -> Path:
    """A fresh temporary name in the same folder; readers ignore names that begin with a dot."""
    return path.with_name(f".{temporary_name(path.name)}")


def make_folders(path: Path) -> None:
    """Make a folder, and those that it is in, so that they stay after a power cut.

    Raises:
        OSError: One cannot be made.
    """
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError as error:  # a file
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from error
    sync(path.parent)


def sync_tree(folder: Path) -> None:
    """Flush every file under `folder` to disk, then every folder.

    Side by side: a disk flushes many small files together in little more time than a single file.
    """
    folders, files = [], []
    for parent, _, names in os.walk(folder):
        folders.append(Path(parent))
        files += [Path(parent, name) for name in names]
    try:
        with ThreadPoolExecutor(SYNC_THREADS, "featcache-sync") as pool:
            list(pool.map(sync, files))
            list(pool.map(sync, folders))
    except RuntimeError:  # no more threads can be started
        for path in (*files, *folders):
            sync(path)


def sync(path: Path) -> None:
    """Flush one file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_to_write(version: Path, name: str) -> Path:
    """One of the folders in a version's folder, to write in; it is made if it is missing.

    Raises:
        StoreError: It is a link.
        OSError: It cannot be made.
    """
    refuse_links(version, name)
    path = version / name
    make_folders(path)
    return path


def refuse_links(version: Path, *names: str) -> None:
    """Refuse to write in a version if one of these folders in it is a link.

    Raises:
        StoreError: Says which, and what to do.
    """
    for name in names:
        path = version / name
        if path.is_symlink():
            raise StoreError(
                f"{path}: is a symbolic link to {os.readlink(path)}, and featcache writes only inside the cache: put "
                "a folder in its place (the version's whole folder may be a link)"
            )


def is_being_made(name: str) -> bool:
    """Whether a folder in a cache is, by its name, a version that is not complete yet."""
    return bool(_BEING_MADE.fullmatch(name))


def is_being_written(name: str) -> bool:
    """Whether a file is, by its name, a small one that is not complete yet."""
    return bool(_SMALL_FILE.fullmatch(name))


def sweep_small_files(folder: Path) -> None:
    """Remove small files that killed processes have not completed, as far as that is possible."""
    with suppress(OSError):
        for name in leftovers(folder, is_being_written):
            with suppress(OSError):
                (folder / name).unlink()


def remove_from_version(version: Path, place: str, name: str) -> None:
    """Remove the folder `place/name` of a version, as far as that is possible.

    Nothing happens if its name is not one that featcache gives to folders there, or if it or `place` is a link.
    """
    if _IN_VERSION[place].fullmatch(name):
        gone = temporary_name(what_of(name)) if place == "work" else name
        _remove(version / place, name, gone, os.O_NOFOLLOW)


def remove_from_cache(cache: Path, name: str) -> None:
    """Remove the folder of a version that is not complete, as far as that is possible."""
    if is_being_made(name):
        _remove(cache, name, temporary_name(what_of(name)))


def _remove(parent: Path, name: str, gone: str, flags: int = 0) -> None:
    """Remove a folder, under the name `gone`, by which nobody renames it to its place."""
    with suppress(OSError):
        descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | flags)
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                if gone != name:
                    os.rename(name, gone, src_dir_fd=descriptor, dst_dir_fd=descriptor)
                # With a folder's descriptor, rmtree follows no link on its way, and refuses to remove a link itself.
                shutil.rmtree(gone, ignore_errors=True, dir_fd=descriptor)
        finally:
            os.close(descriptor)
