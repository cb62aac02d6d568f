"""A version: everything extracted under one fingerprint, as one Zarr group in the cache.

<cache>/<name>-<first 12 hex of the fingerprint>/
  zarr.json       attributes.featcache: what `VersionInfo` holds, sealed
  shards/         a group; each member a shard
  index/          derived from the shards; see `featcache.store.index`
  runs/           what each run did, and the failure ledger; see `featcache.store.runs`
  probes/         what was measured of the extractor; see `featcache.store.probes`
  work/           shards that are being written; nothing in it is data
  aside/          shards of other versions that `featcache repair` found in `shards/`
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from featcache.errors import DamagedError, StoreError, listing
from featcache.spec import FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.locks import Claim
from featcache.store.own_folders import (
    WRITTEN,
    folder_to_write,
    is_being_made,
    refuse_links,
    remove_from_cache,
    remove_from_version,
)
from featcache.store.probes import read_probes, write_probe
from featcache.store.shard import Shard
from featcache.store.side import check_specs

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_SHARD_NAME = re.compile("[0-9a-f]{12}")
_ABANDONED_SECONDS = 3600.0
"""After which a version that is still being made is nobody's: making one takes milliseconds."""


@dataclass(frozen=True)
class VersionInfo:
    """The attributes of a version's group.

    Attributes:
        name: the config's.
        fingerprint: 64 hex digits; see `featcache.config`.
        config: resolved: every default filled in.
        spec: of the features as they are read; `spec.stored_dtype` is what is on disk.
        made_by: the versions of featcache and of the libraries that made the version.
        format: of everything below the version's folder.
    """

    name: str
    fingerprint: str
    config: dict[str, Any]
    spec: FeatureSpec
    made_by: dict[str, str]
    format: int = FORMAT

    @property
    def folder_name(self) -> str:
        """The version's folder in its cache."""
        return f"{self.name}-{self.fingerprint[:12]}"

    def attributes(self) -> dict[str, Any]:
        """As JSON; `spec.side` is left out where it is empty, and `spec.padded_to` where it is 0."""
        attributes = asdict(self)
        if not self.spec.side:
            del attributes["spec"]["side"]
        if not self.spec.padded_to:
            del attributes["spec"]["padded_to"]
        return attributes


class Version:
    """An opened version.

    Attributes:
        path: its folder.
        info: its attributes.
    """

    def __init__(self, path: Path, info: VersionInfo) -> None:
        self.path = path
        self.info = info

    @classmethod
    def open(cls, path: Path) -> Version:
        """Open the version in the folder `path`.

        Raises:
            StoreError: it was written by a newer featcache.
            DamagedError: its metadata is damaged, or missing.
        """
        try:
            attributes = zarr3.read_group(path)
        except FileNotFoundError as error:
            raise DamagedError(f"{path / 'zarr.json'}: damaged: the file is missing", path) from error
        except DamagedError as error:
            raise DamagedError(error.what, path) from error
        if attributes.get("format") != FORMAT:
            raise StoreError(
                f"{path}: has format {attributes.get('format')!r}; this featcache reads format {FORMAT}: upgrade it"
            )
        try:
            info = VersionInfo(**{**attributes, "spec": _spec_of(attributes["spec"])})
            if not (_NAME.fullmatch(info.name) and _FINGERPRINT.fullmatch(info.fingerprint)):
                raise ValueError(f"its name is {info.name!r}, its fingerprint {info.fingerprint!r}")
            return cls(path, info)
        except (TypeError, KeyError, ValueError) as error:
            raise DamagedError(f"{path / 'zarr.json'}: damaged: not a version of format 1 ({error})", path) from error

    @classmethod
    def create(cls, cache: Path, info: VersionInfo) -> Version:
        """Open the version that `info` describes, making it where there is none yet.

        Raises:
            StoreError: the cache cannot be written, its version is of another fingerprint, or a folder of the version
                is a link.
            ExtractorError: the specs of the side arrays do not do.
        """
        check_specs(info.spec.side)
        path = cache / info.folder_name
        refuse_links(path, *WRITTEN)
        _sweep_cache(cache)
        try:
            if not (path / "zarr.json").exists():
                cls._lay_out(path, info)
            for folder in ("runs", "work"):  # a copy of a version may have come without them
                folder_to_write(path, folder)
        except OSError as error:
            raise StoreError(f"{error.filename or path}: cannot be written: {error.strerror}") from error
        version = cls.open(path)
        if version.info.fingerprint != info.fingerprint:
            raise StoreError(f"{path}: its fingerprint does not match its name: move it away and run again")
        return version

    @classmethod
    def _lay_out(cls, path: Path, info: VersionInfo) -> None:
        """Make an empty version beside its place and rename it, so that it is there whole or not at all."""
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        for folder in ("shards", "runs", "work"):
            (beside / folder).mkdir(parents=True)
        (beside / "shards" / "zarr.json").write_bytes(zarr3.group_metadata())
        (beside / "zarr.json").write_bytes(zarr3.group_metadata(info.attributes()))
        zarr3.sync_tree(beside)
        try:
            beside.rename(path)
        except OSError:  # another run was first, or there is one without its metadata
            if not path.is_dir():
                raise
            if not (path / "zarr.json").exists():
                (beside / "zarr.json").rename(path / "zarr.json")
        finally:
            remove_from_cache(beside.parent, beside.name)
        zarr3.sync(path.parent)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the stored features."""
        return np.dtype(self.info.spec.stored_dtype)

    def shard_names(self) -> list[str]:
        """The names of all committed shards, sorted. Folders of other names (`.snapshot`, `.nfs…`) are none."""
        try:
            entries = [entry for entry in os.scandir(self.path / "shards") if _SHARD_NAME.fullmatch(entry.name)]
            return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError as error:
            raise DamagedError(
                f"{error.filename}: damaged: the folder is missing, and every shard with it: move {self.path} away, "
                "and extract again"
            ) from error

    def shard(self, name: str) -> Shard:
        """A committed shard."""
        return Shard(self.path / "shards" / name, self.info.fingerprint)

    def bytes_on_disk(self) -> int:
        """The sizes of all files in the version's folder."""
        num_bytes = 0
        for parent, _, names in os.walk(self.path):
            for name in names:
                with suppress(FileNotFoundError):  # a run has moved it meanwhile
                    num_bytes += os.lstat(os.path.join(parent, name)).st_size
        return num_bytes

    def write_probe(self, document: dict[str, Any]) -> None:
        """Keep what a probe of the version's extractor has found: any document that JSON can hold.

        Raises:
            StoreError: it cannot be written.
            ValueError: the document holds NaN or infinity.
        """
        write_probe(self.path, document)

    def probes(self) -> list[dict[str, Any]]:
        """What `write_probe` has kept, the earliest first; records that are damaged are left out."""
        return read_probes(self.path)

    def folder(self, name: str) -> Path:
        """One of the folders in the version's folder, to write in; it is made if it is missing.

        Raises:
            StoreError: it is a link: what is written there would lie outside the cache.
            OSError: it cannot be made.
        """
        return folder_to_write(self.path, name)

    def claim(self, work: str) -> Claim:
        """A claim on a piece of work, by its name.

        Raises:
            StoreError, OSError: as `folder`.
        """
        return Claim(self.folder("work") / f"{work}.lock")

    def work_folder(self, work: str) -> Path:
        """A fresh folder to write in for a piece of work; it does not exist yet.

        Raises:
            StoreError, OSError: as `folder`.
        """
        return self.folder("work") / f"{work}.{uuid.uuid4().hex[:8]}"

    def remove_work(self, work: str) -> None:
        """Remove what killed processes have left of a piece of work; the caller holds its claim."""
        for entry in list(os.scandir(self.folder("work"))):
            if entry.name.partition(".")[0] == work:
                remove_from_version(self.path, "work", entry.name)

    def sweep(self) -> None:
        """Remove what killed runs left in `work/`: whatever nobody holds a claim on."""
        for entry in list(os.scandir(self.folder("work"))):
            claim = self.claim(entry.name.partition(".")[0])
            with suppress(OSError):  # on a full disk it stays
                if claim.take():
                    if claim.locked:
                        remove_from_version(self.path, "work", entry.name)
                    claim.release()


def _sweep_cache(cache: Path) -> None:
    """Remove the versions that killed processes were about to make."""
    with suppress(OSError):  # there is no cache yet, or it is read-only
        for entry in list(os.scandir(cache)):
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if is_being_made(entry.name) and age > _ABANDONED_SECONDS:
                remove_from_cache(cache, entry.name)


def _spec_of(document: dict[str, Any]) -> FeatureSpec:
    """A version's spec from JSON, which has lists for tuples."""
    shapes = {key: tuple(document[key]) for key in ("item_shape", "codebook_sizes")}
    side = tuple(SideSpec(**{**one, "item_shape": tuple(one["item_shape"])}) for one in document.get("side", []))
    return FeatureSpec(**{**document, **shapes, "side": side})


def version_folders(path: Path) -> list[Path]:
    """The folder of the version at `path`, or of every version in the cache at `path`, sorted.

    Where there is no such folder, `path` may name a version by its config: `features/fbank80`.

    Raises:
        StoreError: there is no version, or several have that name.
    """
    if (path / "shards").is_dir():
        return [path]
    try:
        folders = _folders_in(path)
    except FileNotFoundError:
        return [_named(path.parent, path.name)]
    except NotADirectoryError as error:
        raise StoreError(f"{path}: there is no such cache folder") from error
    if not folders:
        raise StoreError(f"{path}: holds no version: `featcache extract` creates one")
    return folders


def _named(cache: Path, name: str) -> Path:
    """The folder of the one version in the cache whose config is called `name`."""
    there: list[Path] = []
    with suppress(OSError):
        there = _folders_in(cache)
    found = [folder for folder in there if _name_of(folder) == name]
    if len(found) > 1:
        raise _several(cache, found)
    if not found:
        hint = f"; {cache} holds {listing(folder.name for folder in there)}" if there else ""
        raise StoreError(f"{cache / name}: there is no such cache folder{hint}")
    return found[0]


def _name_of(folder: Path) -> str:
    """The name of a version's config; where its metadata is damaged, by the folder's name."""
    try:
        return Version.open(folder).info.name
    except (StoreError, OSError):
        return folder.name.rpartition("-")[0]


def _several(cache: Path, folders: list[Path]) -> StoreError:
    """What to raise where one version is wanted and there are several."""
    hint = ""
    with suppress(StoreError):  # the metadata of one may be damaged
        one, other = (Version.open(folder).info.config for folder in folders[:2])
        hint = f" (the first two differ in {listing(differing_keys(one, other)) or 'their weights or revision'})"
    names = listing(folder.name for folder in folders)
    return StoreError(f"{cache}: holds {len(folders)} versions: {names}; name one of these folders{hint}")


def _folders_in(cache: Path) -> list[Path]:
    entries = [Path(entry.path) for entry in os.scandir(cache) if not entry.name.startswith(".")]
    return sorted(entry for entry in entries if (entry / "shards").is_dir())


def select_versions(path: Path, name: str | None = None) -> list[Version]:
    """The version at `path` (see `version_folders`), or every version in the cache at `path` that is called `name`.

    Raises:
        StoreError: there is no version.
        DamagedError: the metadata of one of them is damaged.
    """
    versions = []
    for folder in version_folders(path):
        try:
            version = Version.open(folder)
        except DamagedError:
            if name in (None, folder.name, _name_of(folder)):
                raise
            continue  # another one's, and not of interest
        if name in (None, version.info.name, folder.name):
            versions.append(version)
    return versions


def select_version(cache: Path, name: str | None = None) -> Version:
    """The one version in the cache (called `name`).

    Raises:
        StoreError: there is none, or there are several; says how they differ.
    """
    versions = select_versions(cache, name)
    if len(versions) == 1:
        return versions[0]
    if not versions:
        there = [folder.name for folder in version_folders(cache)]
        raise StoreError(f"{cache}: holds no version called {name!r}; it holds {listing(there)}")
    raise _several(cache, [version.path for version in versions])


def select_configured(
    path: Path, name: str | None, config_name: str, fingerprint: str, resolved: dict[str, Any]
) -> Version:
    """The version in the cache (called `name`) that a config makes.

    Args:
        path: The cache, or a version in it.
        name: The version's name; None for any.
        config_name: The config's name.
        fingerprint: The config's fingerprint.
        resolved: The config with every default filled in.

    Raises:
        StoreError: There is none; says how the config of another one differs.
    """
    wanted = f"{config_name}-{fingerprint[:12]}"
    versions = select_versions(path, name)
    fitting = [version for version in versions if version.info.fingerprint == fingerprint]
    namesakes = [version for version in versions if version.info.name == config_name]
    if fitting:  # several differ in nothing but their names
        return next((version for version in fitting if version in namesakes), fitting[0])
    if not namesakes and len(versions) != 1:
        there = listing(version.path.name for version in select_versions(path))
        raise StoreError(f"{path}: holds no version of this config, which would be {wanted}; it holds {there}")
    other = (namesakes or versions)[0]
    keys = listing(differing_keys(other.info.config, resolved)) or "their weights or revision"
    raise StoreError(f"{other.path}: made with another config; the given config makes {wanted}; they differ in {keys}")


def differing_keys(one: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted paths at which two resolved configs differ, with both values: `params.low_freq: 20.0 -> 0.0`."""

    def shown(config: dict[str, Any]) -> str:
        return json.dumps(config[key]) if key in config else "not given"

    if not prefix and one.get("extractor") != other.get("extractor"):  # whose parameters have nothing in common
        return [f"extractor: {json.dumps(one.get('extractor'))} -> {json.dumps(other.get('extractor'))}"]
    lines = []
    for key in sorted({*one, *other}):
        path, a, b = f"{prefix}{key}", one.get(key), other.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differing_keys(a, b, f"{path}.")
        elif a != b:
            lines.append(f"{path}: {shown(one)} -> {shown(other)}")
    return lines
