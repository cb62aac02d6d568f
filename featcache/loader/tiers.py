"""Where shards are kept nearer than the cache: in memory before a local disk."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from featcache.arguments import is_number, refuse_url
from featcache.errors import ArgumentError
from featcache.loader.local_copies import LocalCopies, Place, Tier
from featcache.loader.local_disk import LocalDisk
from featcache.loader.memory import PrivateMemory, shared_memory
from featcache.version.version import Version

__all__ = ["Tiers", "parse_size"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}
_IDLE_SECONDS = 60.0
"""How long nobody has read a copy of a shard in an object store that may make room for another."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)", re.ASCII)


@dataclass(frozen=True)
class Tiers:
    """What a cache keeps nearer, and how much of it."""

    ram: int | None = None
    """Bytes of memory for copies of shards; None makes none."""
    copy_to: Path | None = None
    """A folder on a disk of this machine, for copies of shards; None makes none."""
    copy_limit: int | None = None
    """The limit for all copies in that folder together, in bytes; by default, a tenth of the disk stays free."""

    @classmethod
    def parse(cls, ram: str | float | None, copy_to: str | Path | None, copy_limit: str | float | None) -> Tiers | None:
        """The arguments of `featcache.open`, or None if nothing is kept elsewhere.

        Raises:
            ArgumentError: A size or the folder is invalid, or there is a limit without a folder.
        """
        if copy_limit is not None and copy_to is None:
            raise ArgumentError(f"copy_limit is {copy_limit!r}, but nothing is copied without copy_to=")
        if not isinstance(copy_to, (str, os.PathLike, NoneType)):
            raise ArgumentError(f"copy_to is {copy_to!r}: give a folder on a disk of this machine")
        if copy_to == "":  # of a variable that is not set; it would be the working directory
            raise ArgumentError("copy_to is empty: give a folder on a disk of this machine")
        if copy_to is not None:
            refuse_url("copy_to", copy_to)
        if ram is None and copy_to is None:
            return None
        num_bytes = None if ram is None else parse_size("ram", ram)
        if num_bytes is not None and num_bytes > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            raise ArgumentError(f"ram is {num_bytes:,} bytes: more than this machine has")
        return cls(
            num_bytes,
            None if copy_to is None else Path(copy_to).expanduser().absolute(),
            None if copy_limit is None else parse_size("copy_limit", copy_limit),
        )

    def copies(self, version: Version, shards: Sequence[str]) -> LocalCopies:
        """Makes the copies of a version's shards, which have these names."""
        return LocalCopies(version, shards, [*self._places(version)])

    def _places(self, version: Version) -> Iterator[Tier]:
        """The places of copies, the nearest one first."""
        name, path = version.info.folder_name, version.path
        idle_seconds = None if isinstance(path, Path) else _IDLE_SECONDS
        if (ram := self.ram) is not None:

            def open_memory() -> Place:
                if (folder := shared_memory(ram)) is None:
                    return PrivateMemory(ram, idle_seconds)
                return LocalDisk(folder, ram, name, path, idle_seconds=idle_seconds, is_memory=True)

            yield Tier("memory", ram, "ram", open_memory)
        if (folder := self.copy_to) is not None:
            limit = self.copy_limit
            yield Tier(
                str(folder),
                limit,
                "copy_limit",
                lambda: LocalDisk(folder, limit, name, path, idle_seconds=idle_seconds),
            )


def parse_size(name: str, value: str | float) -> int:
    """A size in bytes.

    Args:
        name: The argument's name, for the message.
        value: A positive number of bytes; or text: a number and kB, MB, GB, TB (powers of 1000), or KiB, MiB, GiB, TiB
            (powers of 1024), in upper or lower case, with or without the B.

    Raises:
        ArgumentError: It is neither, or less than a byte.
    """
    num_bytes = _parsed(value) if isinstance(value, str) else value
    if not is_number(num_bytes) or not math.isfinite(num_bytes):
        raise ArgumentError(f'{name} is {value!r}: give a size like "4GB" or "512MiB", or a number of bytes')
    if num_bytes < 1:
        raise ArgumentError(f"{name} is {value!r}: it must be at least one byte; leave it out for none")
    return int(num_bytes)


def _parsed(text: str) -> float:
    """Bytes; NaN if the text is no size."""
    found = _SIZE.fullmatch(text.strip().lower())
    return float(found[1]) * _UNITS[found[2]] if found and found[2] in _UNITS else math.nan
