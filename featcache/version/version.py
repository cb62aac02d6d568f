"""A version: everything extracted under one fingerprint, as one Zarr group in the cache.

<cache>/<name>-<first 12 hex digits of the fingerprint>/
  zarr.json       what `VersionInfo` holds, sealed
  shards/         a group; each member is a shard
  index/          the items that count, and where they are; see `index.py`
  wanted/         what manifests want of it; see `wanted.py`
  failures/       what could not be extracted; see `ledger.py`
  tags/           names for some of its shards; see `tags.py`
  runs/, probes/  what was done and measured, for people; see `records.py`
  work/           what is being written; nothing in it is data
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from featcache.errors import DamagedError, ExtractorError, StoreError
from featcache.format.documents import AT_MOST_BYTES
from featcache.format.shard import Shard
from featcache.storage.base import MARK, Store, open_store
from featcache.storage.location import Location
from featcache.version.info import VersionInfo, read_info

_T = TypeVar("_T")

_SHARD_NAME = re.compile("[0-9a-f]{16}")

PLAIN_GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
"""The `zarr.json` of `shards/`: of a group that says nothing."""


class ShardGoneError(StoreError):
    """A shard that is not there any more: what counts of it is in another one."""


class Version:
    """An opened version: the store of its files, and what it says of itself. It is as it is now; or of these `shards`,
    as it was when a `tag` was made."""

    def __init__(
        self, store: Store, info: VersionInfo, *, tag: str | None = None, shards: Sequence[str] | None = None
    ) -> None:
        self.store = store
        self.info = info
        self.tag = tag
        self._shards = shards

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Version, tag=self.tag, shards=self._shards), (self.store, self.info)

    @property
    def path(self) -> Location:
        """Its place."""
        return self.store.location

    @classmethod
    def open(cls, path: Location) -> Version:
        """Open the version at `path`. Raises StoreError if another featcache wrote it, or it cannot be read now;
        DamagedError if its metadata is damaged, or missing."""
        store = open_store(path)
        try:
            return cls(store, read_info(store.read(MARK, AT_MOST_BYTES), path))
        except FileNotFoundError as error:
            what = "the file is missing; if this is a copy that was interrupted, make it again"
            raise DamagedError(f"{path / MARK}: damaged: {what}", path) from error

    @classmethod
    def create(cls, path: Location, info: VersionInfo) -> Version:
        """Open the version that `info` describes, and make it if there is none yet. It is there with its folder of
        shards, which is made last. Raises StoreError if it cannot be written, or the version there has another
        fingerprint; ExtractorError if what the extractor says of its features cannot be stored."""
        from featcache.format.writing import seal_group

        try:
            info.require_sound()
            data = seal_group(msgspec.to_builtins(info), path)
            read_info(data, path)
        except (ValueError, DamagedError) as error:
            raise ExtractorError(f"config {info.name}: features that cannot be stored: {error}") from error
        store = open_store(path)
        for key, content in ((MARK, data), (f"shards/{MARK}", PLAIN_GROUP)):
            if not store.exists(key):
                store.put(key, content)
        version = cls.open(path)
        if version.info.fingerprint != info.fingerprint:
            raise StoreError(f"{path}: its fingerprint does not match its name: move it away and run again")
        return version

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored features."""
        return np.dtype(self.info.spec.stored_dtype)

    @property
    def original_name(self) -> str | None:
        """The name that the folder was made with, if it has another one now: it was renamed, or is a copy."""
        name = self.info.folder_name
        return None if name in (self.path.name, self.store.real_name) else name

    @staticmethod
    def has_group(store: Store) -> bool:
        """Whether the group of all shards is there, for Zarr libraries, in the store of a version."""
        try:
            return store.read(f"shards/{MARK}", AT_MOST_BYTES) == PLAIN_GROUP
        except (FileNotFoundError, DamagedError):
            return False

    def shard_names(self) -> list[str]:
        """The names of all shards, sorted."""
        if self._shards is not None:
            return [*self._shards]
        return [name for name in self.store.names("shards") if _SHARD_NAME.fullmatch(name)]

    def shard(self, name: str) -> Shard:
        """A shard; its document has been read. Raises ShardGoneError if there is none; DamagedError if its document is
        not what was written."""
        try:
            return Shard(self.store, name, self.info.fingerprint, self.info.spec)
        except FileNotFoundError as error:
            if name in self.store.names("shards"):
                raise DamagedError(
                    f"{self.path}/shards/{name}/{MARK}: damaged: the file is missing", self.path
                ) from error
            raise ShardGoneError(
                f"{self.path}/shards/{name}: is gone: a repair or prune has taken it away since: open the cache again"
            ) from error

    def reading(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, which lists the shards and reads them. If one of them is taken away meanwhile, it is
        called again: what counted in it is in another."""
        while True:
            names = self.shard_names()
            try:
                return read()
            except ShardGoneError:
                if {*names} <= {*self.shard_names()}:
                    raise

    def at_work(self, command: str, wait: Callable[[str], object] | None = None) -> AbstractContextManager[None]:
        """The right to add or take away shards, for the time of a `with` block: one process has it at a time, as far as
        the store has locks. Jobs that extract partitions do without it.

        Args:
            command: What others are told that this process does.
            wait: Called with what the holder says, before this waits for it; None not to wait.

        Raises:
            LockedError: Somebody else has it.
        """
        since = datetime.now(UTC)
        who = f"featcache {command}, process {os.getpid()} on {socket.gethostname()}, since {since:%Y-%m-%d %H:%M} UTC"
        return self.store.lock(who, wait)

    def bytes_on_disk(self) -> int:
        """The sizes of all its files."""
        return sum(num_bytes for _, num_bytes in self.store.walk())
