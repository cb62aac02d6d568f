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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from featcache.errors import DamagedError, StoreError
from featcache.spec import FeatureSpec, SideSpec
from featcache.store import zarr3
from featcache.store.chunk_file import reading_error
from featcache.store.files import (
    WRITTEN,
    folder_to_write,
    is_being_made,
    make_folders,
    name_beside,
    publish_folder,
    refuse_links,
    remove_from_cache,
    remove_from_version,
    sweep_small_files,
    sync,
    write_file,
)
from featcache.store.leftovers import leftovers, temporary_name, what_of
from featcache.store.locks import Claim
from featcache.store.shard import Shard, check_side_specs

_T = TypeVar("_T")

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_FINGERPRINT = re.compile("[0-9a-f]{64}")
_SHARD_NAME = re.compile("[0-9a-f]{12}")

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
    """An opened version: its folder `path`, and its attributes `info`.

    What writes in `work/` raises StoreError if that is a link, and OSError if it cannot be made.
    """

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
        except OSError as error:
            raise reading_error(error, path, path) from error
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
    def create(cls, cache: Path, info: VersionInfo, folder: str | None = None) -> Version:
        """Open the version that `info` describes, and make it if there is none yet; `folder` if it has been renamed.

        Raises:
            StoreError: The cache cannot be written, the version in that folder has another fingerprint, or a folder of
                the version is a link.
            ExtractorError: The side arrays cannot be stored.
        """
        check_side_specs(info.spec.side)
        path = cache / (folder or info.folder_name)
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
            make_folders(path.parent)
            for folder in ("shards", "runs", "work"):
                (beside / folder).mkdir(parents=True)
            files = {"zarr.json": zarr3.group_metadata(info.attributes()), "shards/zarr.json": zarr3.group_metadata()}
            for name, data in files.items():
                (beside / name).write_bytes(data)
            written = {name: len(data) for name, data in files.items()}
            # The folder may be there already: another run was first, or the metadata was lost.
            if not publish_folder(beside, path, written) and not (path / "zarr.json").exists():
                (beside / "zarr.json").rename(path / "zarr.json")
                sync(path)
        finally:
            remove_from_cache(beside.parent, beside.name)

    @property
    def original_name(self) -> str | None:
        """The name that the folder was made with, if it has another one now: it was renamed, or is a copy."""
        name = self.info.folder_name
        return None if name in (self.path.name, self.path.resolve().name) else name

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
        except OSError as error:
            raise reading_error(error, self.path / "shards") from error

    def shard_folders(self) -> dict[str, tuple[int, int]]:
        """The names of all committed shards, each with what tells its folder from a later one of the same name."""
        folders = {}
        for name in self.shard_names():
            with suppress(FileNotFoundError):  # it has just been taken away
                stat = os.stat(self.path / "shards" / name)
                folders[name] = stat.st_ino, stat.st_mtime_ns
        return folders

    def reading(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, which lists the shards and reads them. If one of them is taken away meanwhile, it is
        called again: `featcache repair` has put what was sound in that shard into another.

        Raises:
            DamagedError: As `read` raises it while all shards are still there.
        """
        while True:
            there = self.shard_folders()
            try:
                return read()
            except DamagedError:
                if there.items() <= self.shard_folders().items():
                    raise

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
            folder = folder_to_write(self.path, "probes")
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

    def claim(self, work: str) -> Claim:
        """A claim on a piece of work, by its name."""
        return Claim(self._work() / f"{work}.lock")

    def work_folder(self, work: str) -> Path:
        """The path of a fresh folder for a piece of work; it is not made yet."""
        return self._work() / temporary_name(work)

    def _work(self) -> Path:
        return folder_to_write(self.path, "work")

    def sweep(self) -> None:
        """Remove what killed processes have left: in `work/`, and small files that they did not complete."""
        self.sweep_work()
        for folder in (self.path, self.path / "shards", self.path / "probes", *(self.path / "runs").glob("*/")):
            if not folder.is_symlink():
                sweep_small_files(folder)

    def sweep_work(self) -> None:
        """Remove everything in `work/` whose process is dead, and that nobody holds a claim on."""
        work = self._work()
        locks = [entry.name for entry in os.scandir(work) if entry.name.endswith(".lock")]
        for name in (*locks, *leftovers(work, lambda name: not name.endswith(".lock"))):
            claim = self.claim(what_of(name).partition(".")[0])
            with suppress(OSError):  # on a full disk it stays
                if claim.take():
                    remove_from_version(self.path, "work", name)
                    claim.release()


def _sweep_cache(cache: Path) -> None:
    """Remove incomplete versions that killed processes have left."""
    with suppress(OSError):  # there is no cache yet, or it is read-only
        for name in leftovers(cache, is_being_made):
            remove_from_cache(cache, name)


def _spec_of(document: dict[str, Any]) -> FeatureSpec:
    """A version's spec from JSON, which has lists for tuples."""
    shapes = {key: tuple(document[key]) for key in ("item_shape", "codebook_sizes")}
    side = tuple(SideSpec(**{**array, "item_shape": tuple(array["item_shape"])}) for array in document.get("side", []))
    return FeatureSpec(**{**document, **shapes, "side": side})
