"""A store's folder `work/`: what is being written in it, what is being removed, and what the dead have left of both.

Who writes has a folder of his own, `<boot>-<random>/`, and holds a lock on it. Whatever ends him, the kernel lets go of
the lock: so what nobody holds is a leftover. Locks of other machines, and of this one before it was started again, say
nothing: what is theirs is a leftover once nothing in it has changed for a day.

What is to be removed is renamed first, to `removed-<random>`. So it disappears as a whole, and a removal never follows
a folder to its place.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from featcache.storage.locks import Lock, is_held

_DAY_SECONDS = 86400.0
_WRITTEN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{16}")
_REMOVED = re.compile(r"removed-[0-9a-f]{16}")


@contextmanager
def in_work(work: Path) -> Iterator[Path]:
    """The context to write something in: a fresh folder, which is held meanwhile, and removed in the end."""
    while True:
        path = work / f"{_boot()}-{secrets.token_hex(8)}"
        path.mkdir()
        with suppress(FileNotFoundError):
            lock = Lock(path, os.O_RDONLY | os.O_DIRECTORY)
            if taken(lock) and path.exists():  # else it has been swept before it was held
                break
    try:
        yield path
    finally:
        _discard(path)
        lock.release()


def remove_folder(path: Path, work: Path) -> None:
    """Remove a folder, for good: also after a power cut it is gone, as far as it is seen."""
    aside = work / f"removed-{secrets.token_hex(8)}"
    path.rename(aside)
    flush(path.parent)
    flush(work)
    _discard(aside)


def sweep_work(work: Path, *, remove: bool) -> list[str]:
    """The names of leftovers, and only of names that are given here; they are removed if they are to be."""
    names = sorted(os.listdir(work))
    left = [*filter(_REMOVED.fullmatch, names)]
    if remove:
        for name in left:
            _discard(work / name)
    if written := [*filter(_WRITTEN.fullmatch, names)]:
        with suppress(OSError), in_work(work) as own:  # nothing is known of a folder that cannot be written
            for name in written:
                with suppress(OSError):  # it is gone, or not ours to remove
                    if _is_left(work / name, own, remove):
                        left.append(name)
    return left


def _is_left(path: Path, own: Path, remove: bool) -> bool:
    """Whether the writer of a folder is dead, which is then removed if it is to be; `own` is a new folder, and held."""
    lock = Lock(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if path.name.startswith(_boot()) and _excludes(own):
            is_left = lock.take()
        else:  # by the clock of the file system, which is the same for all
            is_left = own.stat().st_mtime - max(_changes(path)) > _DAY_SECONDS
        if is_left and remove:
            remove_folder(path, path.parent)  # while nobody else can hold it
        return is_left
    finally:
        lock.release()


def _excludes(own: Path) -> bool:
    """Whether locks keep others away here, by a folder that is held: some file systems have none, or grant all."""
    try:
        return is_held(own)
    except OSError:
        return False


def _changes(folder: Path) -> Iterator[float]:
    """When a folder and everything in it last changed."""
    yield folder.lstat().st_mtime
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(FileNotFoundError):
                yield os.lstat(os.path.join(parent, name)).st_mtime


def taken(lock: Lock) -> bool:
    """Whether a lock is ours now, or everybody's: there are file systems without locks."""
    try:
        return lock.take()
    except OSError:
        return True


def make_folder(path: Path) -> None:
    """Make a folder, and those that it is in, so that they stay after a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        with suppress(FileExistsError):
            path.mkdir()
        flush(path.parent)


def flush(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # which follows no link: neither one inside, nor the folder itself


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    except OSError:
        return secrets.token_hex(4)  # nobody is known to be of the same boot
