"""Where features are kept besides the cache: in memory, and on a local disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from featcache.errors import ArgumentError
from featcache.loader.sizes import parse_size

__all__ = ["Tiers"]


@dataclass(frozen=True)
class Tiers:
    """What a cache keeps elsewhere, and how much of it; nothing by default.

    Attributes:
        ram: bytes of this process's memory for hot utterances.
        copy_to: a folder on a disk of this machine, for copies of shards.
        copy_limit: bytes of all copies in that folder.
    """

    ram: int | None = None
    copy_to: Path | None = None
    copy_limit: int | None = None

    @classmethod
    def of(cls, ram: str | float | None, copy_to: str | Path | None, copy_limit: str | float | None) -> Tiers:
        """As users say it: sizes are numbers of bytes, or text as "4GB" and "512MiB".

        Raises:
            ArgumentError: a size is none, or the folder, or there is a limit and nothing to copy to.
        """
        if copy_limit is not None and copy_to is None:
            raise ArgumentError(f"copy_limit is {copy_limit!r}, but nothing is copied without copy_to=")
        if not isinstance(copy_to, (str, os.PathLike, NoneType)):
            raise ArgumentError(f"copy_to is {copy_to!r}: give a folder on a disk of this machine")
        if copy_to == "":  # of a variable that is not set; it would be the working directory
            raise ArgumentError("copy_to is empty: give a folder on a disk of this machine")
        return cls(
            None if ram is None else parse_size("ram", ram),
            None if copy_to is None else Path(copy_to).expanduser().absolute(),
            None if copy_limit is None else parse_size("copy_limit", copy_limit),
        )
