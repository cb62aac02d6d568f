"""A version: everything extracted under one fingerprint, a Zarr group in the cache, as
docs/format.md describes."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from featcache import __version__
from featcache.errors import DamagedError, ExtractorError, StoreError
from featcache.format.documents import AT_MOST_BYTES, AT_MOST_NAME, Hex
from featcache.format.group import read_attributes
from featcache.format.shard import Shard
from featcache.spec import STORED_KINDS, FeatureSpec
from featcache.storage.base import MARK, Store
from featcache.storage.location import Location
from featcache.storage.opening import open_store

_T = TypeVar("_T")

FORMAT: Literal[2] = 2

_SHARD_NAME = re.compile("[0-9a-f]{16}")

PLAIN_GROUP = b'{"zarr_format": 3, "node_type": "group", "attributes": {}}'
"""The `zarr.json` of `shards/`: of a group that says nothing."""

_LIBRARIES = (
    "numpy",
    "torch",
    "torchaudio",
    "transformers",
    "soundfile",
    "miniaudio",
    "av",
    "praatio",
    "soxr",
    "zarr",
)

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
    """The config's fingerprint; see `featcache.config`."""
    config: dict[str, Any]
    """The config with every default filled in."""
    spec: FeatureSpec
    """What the features are when they are read; `spec.stored_dtype` is what is on disk."""
    made_by: dict[str, str]
    """The versions of featcache and of the libraries that made the version."""

    @property
    def folder_name(self) -> str:
        """The name of the version's folder in its cache."""
        return f"{self.name}-{self.fingerprint[:12]}"

    def require_sound(self) -> None:
        """Raise ValueError if the spec contradicts itself, or the config is odd."""
        msgspec.convert(self.config, _Config)
        self.spec.require_sound()


class _Peek(msgspec.Struct):
    """The keys that tell whether the rest of a document can be understood."""

    format: int
    spec: dict[str, Any]


def read_info(data: bytes, path: Location) -> VersionInfo:
    """Parse the `zarr.json` of the version at `path`. Raises StoreError if another
    featcache has written it; DamagedError if it is not what was written."""
    peek: _Peek = read_attributes(data, _Peek, path / "zarr.json", path)
    if peek.format == 1:
        what = "has format 1, which only development versions of featcache wrote"
        raise StoreError(f"{path}: {what}: extract it again into another folder")
    if peek.format != FORMAT:
        raise StoreError(
            f"{path}: has format {peek.format}; this featcache reads format {FORMAT}: upgrade it"
        )
    kind = peek.spec.get("kind", "frames")
    if kind not in STORED_KINDS:
        raise StoreError(
            f"{path}: holds features of the kind {kind!r}, which this featcache cannot "
            "read: upgrade it"
        )
    info: VersionInfo = read_attributes(data, VersionInfo, path / "zarr.json", path)
    try:
        info.require_sound()
    except ValueError as error:
        raise DamagedError(f"{path / 'zarr.json'}: damaged: {error}", path) from error
    return info


def library_versions() -> dict[str, str]:
    """The versions of Python, of the libraries that decide values, and of libsndfile.

    They are recorded with every version and shard, and are no part of the fingerprint."""
    versions = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "featcache": __version__,
    }
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # an optional one
            versions[library] = version_of(library)
    try:
        import soundfile
    except ImportError:
        return versions
    return {**versions, "libsndfile": soundfile.__libsndfile_version__}


class ShardGoneError(StoreError):
    """A shard that is not there any more: what counts of it is in another one."""


@dataclass(eq=False, repr=False)
class Version:
    """An opened version: the store of its files, and what it says of itself. It is as it
    is now; or of these `shards`, as it was when a `tag` was made, or a cache was opened
    that was pickled then."""

    store: Store
    info: VersionInfo
    tag: str | None = None
    shards: Sequence[str] | None = None

    @property
    def path(self) -> Location:
        """Its place."""
        return self.store.location

    @classmethod
    def open(cls, path: Location) -> Version:
        """Open the version at `path`. Raises StoreError if another featcache wrote it, or
        it cannot be read now; DamagedError if its metadata is damaged, or missing."""
        store = open_store(path)
        try:
            return cls(store, read_info(store.read(MARK, AT_MOST_BYTES), path))
        except FileNotFoundError as error:
            what = "the file is missing; if this is a copy that was interrupted, make it again"
            raise DamagedError(f"{path / MARK}: damaged: {what}", path) from error

    @classmethod
    def create(cls, path: Location, info: VersionInfo) -> Version:
        """Open the version that `info` describes, and make it if there is none yet. It is
        there with its folder of shards, which is made last. Raises StoreError if it
        cannot be written, or the version there has another fingerprint; ExtractorError if
        what the extractor says of its features cannot be stored."""
        from featcache.format.writing import seal_group

        try:
            document = msgspec.to_builtins(info) | {"spec": info.spec.document()}
            msgspec.convert(document, VersionInfo).require_sound()
            # which refuses what nobody could read
            json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
        except ValueError as error:
            raise ExtractorError(
                f"config {info.name}: features that cannot be stored: {error}"
            ) from error
        store = open_store(path)
        for key, content in ((MARK, seal_group(document, path)), (f"shards/{MARK}", PLAIN_GROUP)):
            if not store.exists(key):
                store.put(key, content)
        version = cls.open(path)
        if version.info.fingerprint != info.fingerprint:
            raise StoreError(
                f"{path}: its fingerprint does not match its name: move it away and run again"
            )
        return version

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored features."""
        return np.dtype(self.info.spec.stored_dtype)

    @property
    def original_name(self) -> str | None:
        """The name that the folder was made with, if it has another one now: it was
        renamed, or is a copy."""
        name = self.info.folder_name
        return None if name in (self.path.name, self.path.resolve().name) else name

    @staticmethod
    def has_group(store: Store) -> bool:
        """Tell whether a version's store has the group of all shards, which Zarr
        libraries need."""
        try:
            return store.read(f"shards/{MARK}", AT_MOST_BYTES) == PLAIN_GROUP
        except (FileNotFoundError, DamagedError):
            return False

    def shard_names(self) -> list[str]:
        """The names of all shards, sorted."""
        if self.shards is not None:
            return [*self.shards]
        return [name for name in self.store.names("shards") if _SHARD_NAME.fullmatch(name)]

    def shard(self, name: str) -> Shard:
        """A shard, its document read. Raises ShardGoneError if there is none;
        DamagedError if it is not as written."""
        try:
            return Shard(self.store, name, self.info.fingerprint, self.info.spec)
        except FileNotFoundError as error:
            where = f"{self.path}/shards/{name}"
            if name in self.store.names("shards"):
                raise DamagedError(
                    f"{where}/{MARK}: damaged: the file is missing", self.path
                ) from error
            what = "is gone: a repair or prune has taken it away since: open the cache again"
            raise ShardGoneError(f"{where}: {what}") from error

    def reading(self, read: Callable[[], _T]) -> _T:
        """Call `read`, which lists the shards and reads them, and return its result. If a
        shard is taken away meanwhile, call it again: another shard has its current items."""
        while True:
            names = self.shard_names()
            try:
                return read()
            except (ShardGoneError, DamagedError):  # which both say of a file that is missing now
                if {*names} <= {*self.shard_names()}:
                    raise

    def at_work(self, command: str) -> AbstractContextManager[None]:
        """The right to add or take away shards, for the time of a `with` block: one
        process has it at a time, as far as the store has locks. Jobs that extract
        partitions do without it. Others are told which command this process does. Raises
        LockedError if somebody else has it."""
        since = datetime.now(UTC)
        who = (
            f"featcache {command}, process {os.getpid()} on {socket.gethostname()}, since "
            f"{since:%Y-%m-%d %H:%M} UTC"
        )
        return self.store.lock(who)

    def bytes_on_disk(self) -> int:
        """The sizes of all its files."""
        return sum(num_bytes for _, num_bytes in self.store.walk())
