"""How the files of a cache are spoilt, calls of the system that fail, and what it is to
be repaired."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from cache_contents import check, items, only_version, provenance

from featcache.care.repair import Repaired, repair
from featcache.extraction.options import Options
from featcache.format.shard import Shard
from featcache.manifest.read import read_manifest
from featcache.version.indexing import open_index
from featcache.version.selection import version_folders

CHUNKS = {"features": "features/c/0/0", "items": "items/c/0/0", "text": "text/c/0"}


def victim(cache: Path) -> Shard:
    """The shard to spoil: the second in the cache's order."""
    version = only_version(cache)
    return version.shard(open_index(version).shards[1])


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip one bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def each_flip(path: Path, step: int = 1) -> Iterator[int]:
    """One byte of a file after the other, at this step, while a bit of it is flipped."""
    for at in range(0, path.stat().st_size, step):
        flip(path, at, at % 8)
        yield at
        flip(path, at, at % 8)


def each_cut(path: Path) -> Iterator[int]:
    """One length of a file after the other, from none, while it is cut off there."""
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        yield length
    path.write_bytes(data)


def mend(path: Path, manifest: Path, **settings) -> Repaired:
    """Repair a version, or the only one of a cache, in this process."""
    (folder,) = version_folders(path)
    return repair(folder, read_manifest(manifest), Options("cpu", 1), **settings)


def assert_repaired(cli, cache: Path, sound: Path, plain) -> None:
    """Repair brings back every utterance, bit for bit and with its provenance, and verify
    finds nothing any more."""
    cli("repair", cache, "--manifest", plain.manifest()).with_code(0)
    assert items(cache) == items(sound)
    assert provenance(cache) == provenance(sound)
    report = check(cache, manifest=read_manifest(plain.manifest()))
    assert (report.problems, report.failed) == ([], 0)


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def swap_in_another(path: Path) -> None:
    """The same file of another shard, sound in itself."""
    shard = path
    while shard.parent.name != "shards":
        shard = shard.parent
    other = next(
        folder for folder in sorted(shard.parent.iterdir()) if folder.is_dir() and folder != shard
    )
    shutil.copy(other / path.relative_to(shard), path)


SPOIL = [delete, empty, shorten, lengthen, replace_by_folder, swap_in_another]


def refusing(number: int) -> Callable[..., NoReturn]:
    """A call that always fails, with this number of an error."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return refuse
