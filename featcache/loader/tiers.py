"""Where utterances are kept besides the cache: in this process's memory, and on a local disk."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from featcache.arguments import is_number, refuse_url
from featcache.errors import ArgumentError
from featcache.loader.fetched_copies import FetchedCopies
from featcache.loader.local_copies import LocalCopies
from featcache.loader.memory import HotUtterances
from featcache.loader.object_shards import ObjectShards, open_shards
from featcache.loader.shards import Shards
from featcache.storage.location import Location
from featcache.store.index import Index
from featcache.store.version import Version

__all__ = ["Tiers", "parse_size"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power}
    _UNITS |= {f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)", re.ASCII)


@dataclass(frozen=True)
class Tiers:
    """What a cache keeps elsewhere, and how much of it."""

    ram: int | None = None
    """Bytes of this process's memory for hot utterances; None keeps none."""
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
        return cls(
            None if ram is None else parse_size("ram", ram),
            None if copy_to is None else Path(copy_to).expanduser().absolute(),
            None if copy_limit is None else parse_size("copy_limit", copy_limit),
        )

    def fetches(self, place: Location) -> bool:
        """Whether the shards of a version are copied from an object store, and all that is read is read from copies."""
        return self.copy_to is not None and self.ram is None and not isinstance(place, Path)

    def shards(self, version: Version, index: Index, check: bool) -> Shards:
        """A version's shards, with their copies on the local disk.

        Raises:
            ArgumentError: The version is in an object store, and `copy_limit` is less than a shard.
        """
        if self.copy_to is None:
            return open_shards(version, index, check=check)
        if isinstance(version.path, Path):
            copies = LocalCopies(version, index.shards, self.copy_to, self.copy_limit)
            return Shards(version, index, check=check, copies=copies)
        fetched = FetchedCopies(version, index.shards, self.copy_to, self.copy_limit)
        shards = ObjectShards(version, index, check=check, copies=fetched)
        most = int(shards.sizes.max(initial=0))
        if self.copy_limit is not None and self.copy_limit < most:
            raise ArgumentError(
                f"copy_limit is {self.copy_limit:,} bytes: the largest shard of {version.path} has {most:,}, and "
                "shards are copied whole: give more, or no copy_to="
            )
        return shards

    def reader(self, shards: Shards) -> Shards | HotUtterances:
        """What a cache reads its utterances from.

        Raises:
            ArgumentError: The machine has less memory than is asked for.
        """
        return shards if self.ram is None else HotUtterances(shards, self.ram)


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
