"""A version: everything extracted under one fingerprint, as one Zarr group in the cache.

<cache>/<name>-<first 12 hex of the fingerprint>/
  zarr.json       attributes.featcache: what `VersionInfo` holds, sealed
  shards/         a group; each member a shard
  index/          derived from the shards; see `featcache.store.index`
  runs/           what each run did, and the failure ledger; see `featcache.store.runs`
  probes/         what was measured of the extractor; see `Version.write_probe`
  work/           shards that are being written; nothing in it is data
  aside/          shards of other versions that `featcache repair` found in `shards/`
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np

from featcache.errors import DamagedError, StoreError, listing
from featcache.spec import FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.files import (
    WRITTEN,
    folder_to_write,
    is_being_made,
    name_beside,
    publish_folder,
    refuse_links,
    remove_from_cache,
    remove_from_version,
    sync,
    write_file,
)
from featcache.store.locks import Claim
from featcache.store.shard import Shard, check_side_specs

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_SHARD_NAME = re.compile("[0-9a-f]{12}")
_ABANDONED_SECONDS = 3600.0
"""The age at which a version that is not complete yet was abandoned: making one takes milliseconds."""

_LIBRARIES = ("featcache", "numpy", "torch", "torchaudio", "transformers", "soundfile", "miniaudio", "soxr")


def library_versions() -> dict[str, str]:
    """The versions of Python, of the libraries that decide values, and of libsndfile.

    They are recorded with every version and shard, and are no part of the fingerprint.
    """
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):  # an optional one
            found[library] = version_of(library)
    try:
        import soundfile
    except ImportError:
        return found
    return {**found, "libsndfile": soundfile.__libsndfile_version__}


@dataclass(frozen=True)
class VersionInfo:
    """The attributes of a version's group."""

    name: str
    """The config's name."""
    fingerprint: str
    """The config's fingerprint, 64 hex digits; see `featcache.config`."""
    config: dict[str, Any]
    """The config with every default filled in."""
    spec: FeatureSpec
    """What the features are when they are read; `spec.stored_dtype` is what is on disk."""
    made_by: dict[str, str]
    """The versions of featcache and of the libraries that made the version."""
    format: int = FORMAT
    """The format of everything below the version's folder."""

    @property
    def folder_name(self) -> str:
        """The name of the version's folder in its cache."""
        return f"{self.name}-{self.fingerprint[:12]}"

    def attributes(self) -> dict[str, Any]:
        """As JSON has them: without `spec.side` if it is empty, and without `spec.padded_to` if it is 0."""
        attributes = asdict(self)
        if not self.spec.side:
            del attributes["spec"]["side"]
        if not self.spec.padded_to:
            del attributes["spec"]["padded_to"]
        return attributes


class Version:
    """An opened version: its folder `path`, and its attributes `info`."""

    def __init__(self, path: Path, info: VersionInfo) -> None:
        self.path = path
        self.info = info

    @classmethod
    def open(cls, path: Path) -> Version:
        """Open the version in the folder `path`.

        Raises:
            StoreError: It was written by a newer featcache.
            DamagedError: Its metadata is damaged, or missing.
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
        """Open the version that `info` describes, and make it if there is none yet.

        Raises:
            StoreError: The cache cannot be written, the version in that folder has another fingerprint, or a folder of
                the version is a link.
            ExtractorError: The side arrays cannot be stored.
        """
        check_side_specs(info.spec.side)
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
        beside = name_beside(path)
        try:
            for folder in ("shards", "runs", "work"):
                (beside / folder).mkdir(parents=True)
            (beside / "shards" / "zarr.json").write_bytes(zarr3.group_metadata())
            (beside / "zarr.json").write_bytes(zarr3.group_metadata(info.attributes()))
            # The folder may be there already: another run was first, or the metadata was lost.
            if not publish_folder(beside, path) and not (path / "zarr.json").exists():
                (beside / "zarr.json").rename(path / "zarr.json")
                sync(path)
        finally:
            remove_from_cache(beside.parent, beside.name)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored features."""
        return np.dtype(self.info.spec.stored_dtype)

    def shard_names(self) -> list[str]:
        """The names of all committed shards, sorted. Folders with other names (`.snapshot`, `.nfs…`) are no shards."""
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
                with suppress(FileNotFoundError):  # a run has moved it in the meantime
                    num_bytes += os.lstat(os.path.join(parent, name)).st_size
        return num_bytes

    def write_probe(self, document: dict[str, Any]) -> None:
        """Keep what a probe of the version's extractor has measured: any document that JSON can hold.

        Raises:
            StoreError: It cannot be written, or `probes/` is a link.
            ValueError: The document holds NaN or infinity, which JSON does not have.
        """
        sealed = zarr3.seal({"probe": document, "checksum": zarr3.UNSEALED})
        try:
            folder = self.folder("probes")
            sync(self.path)
        except OSError as error:
            raise StoreError(f"{self.path / 'probes'}: cannot be written: {error.strerror}") from error
        write_file(folder / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z-{secrets.token_hex(2)}.json", sealed)

    def probes(self) -> list[dict[str, Any]]:
        """What `write_probe` has kept, the earliest first.

        Damaged records are left out: losing them costs another measurement, and nothing else.
        """
        documents = []
        for path in sorted((self.path / "probes").glob("*.json")):
            with suppress(OSError, ValueError, KeyError, TypeError):
                data = path.read_bytes()
                record = json.loads(data)
                if zarr3.is_sealed(data, record["checksum"]):
                    documents.append(record["probe"])
        return documents

    def folder(self, name: str) -> Path:
        """One of the folders in the version's folder, to write in; it is made if it is missing.

        Raises:
            StoreError: It is a link, and what is written there would lie outside the cache.
            OSError: It cannot be made.
        """
        return folder_to_write(self.path, name)

    def claim(self, work: str) -> Claim:
        """A claim on a piece of work, by its name.

        Raises:
            StoreError, OSError: `work/` is a link, or cannot be made.
        """
        return Claim(self.folder("work") / f"{work}.lock")

    def work_folder(self, work: str) -> Path:
        """The path of a fresh folder for a piece of work; it is not made yet.

        Raises:
            StoreError, OSError: `work/` is a link, or cannot be made.
        """
        return self.folder("work") / f"{work}.{uuid.uuid4().hex[:8]}"

    def remove_work(self, work: str) -> None:
        """Remove what killed processes have left of a piece of work, whose claim the caller holds."""
        for entry in list(os.scandir(self.folder("work"))):
            if entry.name.partition(".")[0] == work:
                remove_from_version(self.path, "work", entry.name)

    def sweep(self) -> None:
        """Remove what killed runs have left in `work/`: everything that nobody holds a claim on."""
        for entry in list(os.scandir(self.folder("work"))):
            claim = self.claim(entry.name.partition(".")[0])
            with suppress(OSError):  # on a full disk it stays
                if claim.take():
                    if claim.locked:
                        remove_from_version(self.path, "work", entry.name)
                    claim.release()


def _sweep_cache(cache: Path) -> None:
    """Remove incomplete versions that killed processes have left."""
    with suppress(OSError):  # there is no cache yet, or it is read-only
        for entry in list(os.scandir(cache)):
            age = time.time() - entry.stat(follow_symlinks=False).st_mtime
            if is_being_made(entry.name) and age > _ABANDONED_SECONDS:
                remove_from_cache(cache, entry.name)


def _spec_of(document: dict[str, Any]) -> FeatureSpec:
    """A version's spec from JSON, which has lists for tuples."""
    shapes = {key: tuple(document[key]) for key in ("item_shape", "codebook_sizes")}
    side = tuple(SideSpec(**{**array, "item_shape": tuple(array["item_shape"])}) for array in document.get("side", []))
    return FeatureSpec(**{**document, **shapes, "side": side})


def version_folders(path: Path) -> list[Path]:
    """The folder of the version at `path`, or of every version in the cache at `path`, sorted.

    If there is no such folder, `path` may name a version by its config: `features/fbank80`.

    Raises:
        StoreError: There is no version, or several have that name.
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
    """The folder of the only version in the cache whose config is called `name`."""
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
    """The name of a version's config; if the metadata is damaged, as the folder's name has it."""
    try:
        return Version.open(folder).info.name
    except (StoreError, OSError):
        return folder.name.rpartition("-")[0]


def _several(cache: Path, folders: list[Path]) -> StoreError:
    """The error to raise if there are several versions and a single one is wanted."""
    hint = ""
    with suppress(StoreError):  # some metadata may be damaged
        first, second = (Version.open(folder).info.config for folder in folders[:2])
        hint = f" (the first two differ in {listing(differing_keys(first, second)) or 'their weights or revision'})"
    names = listing(folder.name for folder in folders)
    return StoreError(f"{cache}: holds {len(folders)} versions: {names}; name one of these folders{hint}")


def _folders_in(cache: Path) -> list[Path]:
    entries = [Path(entry.path) for entry in os.scandir(cache) if not entry.name.startswith(".")]
    return sorted(entry for entry in entries if (entry / "shards").is_dir())


def select_versions(path: Path, name: str | None = None) -> list[Version]:
    """The version at `path` (see `version_folders`), or every version in the cache at `path` that is called `name`.

    Raises:
        StoreError: There is no version.
        DamagedError: The metadata of such a version is damaged.
    """
    versions = []
    for folder in version_folders(path):
        try:
            version = Version.open(folder)
        except DamagedError:
            if name in (None, folder.name, _name_of(folder)):
                raise
            continue  # damage in a version that was not asked for
        if name in (None, version.info.name, folder.name):
            versions.append(version)
    return versions


def select_version(cache: Path, name: str | None = None) -> Version:
    """The only version in the cache (that is called `name`).

    Raises:
        StoreError: There is none, or there are several; the message says how they differ.
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


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted paths at which two resolved configs differ, with both values: `params.low_freq: 20.0 -> 0.0`."""

    def shown(config: dict[str, Any]) -> str:
        return json.dumps(config[key]) if key in config else "not given"

    if not prefix and old.get("extractor") != new.get("extractor"):  # whose parameters have nothing in common
        return [f"extractor: {json.dumps(old.get('extractor'))} -> {json.dumps(new.get('extractor'))}"]
    lines = []
    for key in sorted({*old, *new}):
        path, was, now = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differing_keys(was, now, f"{path}.")
        elif was != now:
            lines.append(f"{path}: {shown(old)} -> {shown(new)}")
    return lines
