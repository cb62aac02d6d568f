"""A version: everything extracted under one fingerprint, a Zarr group in the cache; see
docs/format.md."""

from __future__ import annotations

import json
import math
import os
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from featcache.errors import AT_MOST_NAME, DamagedError, ExtractorError, StoreError
from featcache.format.documents import AT_MOST_BYTES, Hex
from featcache.format.group import naming_remedy, read_attributes
from featcache.format.shard import Shard
from featcache.spec import DTYPES, STORED_KINDS, FeatureSpec
from featcache.storage.base import MARK, Store
from featcache.storage.location import Location
from featcache.storage.opening import open_store

_T = TypeVar("_T")

FORMAT: Literal[2] = 2

_SHARD_NAME = re.compile("[0-9a-f]{16}")

PLAIN_GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
"""The `zarr.json` of `shards/`."""

Name = Annotated[
    str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=AT_MOST_NAME)
]


class _Noise(msgspec.Struct):
    manifest: str
    snr: Annotated[
        list[Annotated[float, msgspec.Meta(ge=-1000, le=1000)]], msgspec.Meta(max_length=100)
    ]
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Augment(msgspec.Struct):
    speed: Annotated[
        list[Annotated[float, msgspec.Meta(ge=0.01, le=100)]], msgspec.Meta(max_length=100)
    ]
    noise: _Noise | None = None


class _Config(msgspec.Struct):
    """The keys of a config that are used without loading it."""

    extractor: str = ""
    augment: _Augment | None = None


class VersionInfo(msgspec.Struct, kw_only=True, frozen=True):
    """The document of a version."""

    format: Literal[2] = 2
    """The format of everything below the version's folder."""
    name: Name
    fingerprint: Hex
    config: dict[str, Any]
    """The config with every default filled in."""
    spec: FeatureSpec
    made_by: dict[str, str]
    """See `library_versions` of `version/records.py`."""
    silence: tuple[float, ...] | msgspec.UnsetType = msgspec.UNSET
    """The values of a frame of long silence, if the extractor has such a value for padding."""

    @property
    def folder_name(self) -> str:
        """The name of the version's folder."""
        return f"{self.name}-{self.fingerprint[:12]}"

    def require_sound(self) -> None:
        """Raise ValueError if the spec contradicts itself, or the config is odd."""
        msgspec.convert(self.config, _Config)
        self.spec.require_sound()
        if self.silence is not msgspec.UNSET and len(self.silence) != math.prod(
            self.spec.item_shape
        ):
            raise ValueError(f"silence of {len(self.silence):,} values: frames have others")


# while this is imported: see the end of `spec`
for _kind in (VersionInfo, _Config):
    msgspec.json.Decoder(_kind)


class _Peek(msgspec.Struct):
    """The keys that tell whether this featcache can read the document."""

    format: int
    spec: dict[str, Any]


def read_info(data: bytes, path: Location) -> VersionInfo:
    """Parse the `zarr.json` of the version at `path`. Raises StoreError if it is another
    featcache's."""
    where = path / MARK
    with naming_remedy(path):
        peek: _Peek = read_attributes(data, _Peek, where)
        _refuse_other_formats(peek, path)
        info: VersionInfo = read_attributes(data, VersionInfo, where)
        try:
            info.require_sound()
        except ValueError as error:
            raise DamagedError(f"{where}: damaged: {error}") from error
    return info


def _refuse_other_formats(peek: _Peek, path: Location) -> None:
    if peek.format == 1:
        what = "has format 1, which only development versions of featcache wrote"
        raise StoreError(f"{path}: {what}: extract it again into another folder")
    if peek.format != FORMAT:
        what = f"has format {peek.format}; this featcache reads format {FORMAT}"
        raise StoreError(f"{path}: {what}: upgrade it")
    for key, known in (("kind", STORED_KINDS), ("dtype", DTYPES)):
        value = peek.spec.get(key, known[0])
        if value not in known:
            what = f"holds features of the {key} {value!r}, which this featcache cannot read"
            raise StoreError(f"{path}: {what}: upgrade it")


def renamed_note(original_name: str) -> str:
    """Describe a version whose folder was made with another name."""
    what = f"its folder is a copy of {original_name}, or was renamed"
    return f"{what}: extract adds to a version only under that name"


class UnfinishedCopyError(DamagedError):
    """A copy of a version that still lacks its document, which only `featcache copy` can write."""


class ShardGoneError(StoreError):
    """A shard that is gone: another one has its current items."""


@dataclass(eq=False, repr=False)
class Version:
    """An opened version: the store of its files, and its document. With `shards`, it is as
    it was when a `tag` was made, or when a pickled cache was opened."""

    store: Store
    info: VersionInfo
    tag: str | None = None
    shards: Sequence[str] | None = None

    @property
    def path(self) -> Location:
        """Its location."""
        return self.store.location

    @classmethod
    def open(cls, path: Location) -> Version:
        """Open the version at `path`. Raises StoreError if it is another featcache's;
        DamagedError also if its document is missing; UnfinishedCopyError if the version is
        an unfinished copy."""
        store = open_store(path)
        try:
            return cls(store, read_info(store.read(MARK, AT_MOST_BYTES), path))
        except FileNotFoundError as error:
            others = [*store.names("runs"), *store.names("index")]
            if not others and cls.has_group(store):
                raise UnfinishedCopyError(
                    f"{path}: a copy that was interrupted, or is going on: run the same `featcache "
                    "copy` again, which continues it"
                ) from error
            what = "the file is missing; if a copy was interrupted, run `featcache copy` again"
            raise DamagedError(f"{path / MARK}: damaged: {what}", path) from error

    @classmethod
    def create(cls, path: Location, info: VersionInfo) -> Version:
        """Open the version that `info` describes, and make it if it does not exist. Raises
        StoreError if it has another fingerprint; ExtractorError if its features cannot be
        stored."""
        from featcache.format.writing import seal_group

        try:
            document = msgspec.to_builtins(info) | {"spec": info.spec.document()}
            msgspec.convert(document, VersionInfo).require_sound()
            # which refuses NaN and odd surrogates
            json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:
            what = f"config {info.name}: features that cannot be stored: {error}"
            raise ExtractorError(what) from error
        store = open_store(path)
        for key, content in ((MARK, seal_group(document, path)), (f"shards/{MARK}", PLAIN_GROUP)):
            if not store.exists(key):
                store.put(key, content)
        version = cls.open(path)
        if version.info.fingerprint != info.fingerprint:
            what = "its fingerprint does not match its name: move it away and run again"
            raise StoreError(f"{path}: {what}")
        return version

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored features."""
        return np.dtype(self.info.spec.stored_dtype)

    @property
    def original_name(self) -> str | None:
        """The name that the folder was made with, if it has been renamed since."""
        name = self.info.folder_name
        return None if name in (self.path.name, self.path.resolve().name) else name

    @staticmethod
    def has_group(store: Store) -> bool:
        """Tell whether a version's store has the group of shards that Zarr libraries need."""
        try:
            return store.read(f"shards/{MARK}", AT_MOST_BYTES) == PLAIN_GROUP
        except (FileNotFoundError, DamagedError):
            return False

    def shard_names(self) -> list[str]:
        """List the names of all shards, sorted."""
        if self.shards is not None:
            return [*self.shards]
        return [name for name in self.store.names("shards") if _SHARD_NAME.fullmatch(name)]

    def shard(self, name: str) -> Shard:
        """Open a shard. Raises ShardGoneError if it does not exist."""
        try:
            return Shard(self.store, name, self.info.fingerprint, self.info.spec)
        except FileNotFoundError as error:
            where = f"{self.path}/shards/{name}"
            if name in self.store.names("shards"):
                what = f"{where}/{MARK}: damaged: the file is missing"
                raise DamagedError(what, self.path) from error
            what = "is gone: a repair or prune has taken it away since: open the cache again"
            raise ShardGoneError(f"{where}: {what}") from error

    def reading(self, read: Callable[[], _T]) -> _T:
        """Call `read`, which lists the shards and reads them, and return its result; again,
        if a shard was removed meanwhile."""
        while True:
            names = self.shard_names()
            try:
                return read()
            except (ShardGoneError, DamagedError):  # both may mean a missing file
                if {*names} <= {*self.shard_names()}:
                    raise

    def at_work(self, command: str) -> AbstractContextManager[None]:
        """Lock the version within a `with` block, to add or remove shards, as far as the
        store has locks. Raises LockedError, which names the other command, if another
        process has the lock."""
        process = f"process {os.getpid()} on {socket.gethostname()}"
        since = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        return self.store.lock(f"featcache {command}, {process}, since {since}")

    def bytes_on_disk(self) -> int:
        """Return the size of all its files."""
        return sum(num_bytes for _, num_bytes in self.store.walk())
