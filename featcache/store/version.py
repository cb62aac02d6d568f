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
import re
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from reprlib import repr as shown
from typing import Any, TypeVar

import numpy as np

from featcache.errors import DamagedError, ExtractorError, StoreError
from featcache.storage.location import Location, desk_of, folder_of, make_desk
from featcache.storage.objects import REQUESTS
from featcache.storage.store import store_of
from featcache.store import zarr3
from featcache.store.chunk_file import reading_error
from featcache.store.documents import UNSEALED, is_sealed, parse_object, read_bytes, seal
from featcache.store.fields import anything, fields, listed, number, optional, text
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
from featcache.store.locks import Claim, why_not_shared
from featcache.store.shard import Shard
from featcache.store.version_info import FORMAT, VersionInfo

_T = TypeVar("_T")

_SHARD_NAME = re.compile("[0-9a-f]{12}")
_TRIAL = {"policy": text(), "precision": text(), "error": optional(text())}
_FASTEST = {"policy": text(), "precision": text(), "times_real_time": number(0)}
_SHARE = optional(number(0, 1))
_PROBE = fields(
    {},
    or_not={
        "device": text(),
        "date": text(),
        "fastest": optional(fields(_FASTEST, others=anything)),
        "measured": listed(fields(_TRIAL, or_not={"disturbed": _SHARE, "mismatch": _SHARE}, others=anything), 1000),
    },
    others=anything,
)
"""What a probe has measured, as far as others than the one who looks at it use it."""


class Version:
    """An opened version: its place `path`, and its attributes `info`.

    What writes in `work/` raises StoreError if that is a link, and OSError if it cannot be made.
    """

    def __init__(self, path: Location, info: VersionInfo) -> None:
        self.path = path
        self.info = info
        self._known_whole: set[str] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return Version.open, (self.path,)

    @property
    def folder(self) -> Path:
        """Its folder, for what writes, renames or locks.

        Raises:
            StoreError: It is in an object store.
        """
        return folder_of(self.path)

    @property
    def desk(self) -> Path:
        """The folder for what is of this machine alone: what is being written, locks, marks of what is in flight. It is
        the version's own folder; for a version in an object store, one below the temporary folder.
        """
        return self.path if isinstance(self.path, Path) else desk_of(self.path)

    def place_on_desk(self, folder: str) -> Path:
        """One of the folders on the desk, to write in; it is made if it is missing.

        Raises:
            StoreError: It is a link; or the desk is not this user's.
            OSError: It cannot be made.
        """
        if not isinstance(self.path, Path):
            make_desk(self.desk)
        return folder_to_write(self.desk, folder)

    @classmethod
    def open(cls, path: Location) -> Version:
        """Open the version at `path`.

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
                f"{path}: has format {shown(attributes.get('format'))}; this featcache reads format {FORMAT}: "
                "upgrade it"
            )
        try:
            return cls(path, VersionInfo.of(attributes))
        except ValueError as error:
            raise DamagedError(f"{path / 'zarr.json'}: damaged: not a version of format 1: {error}", path) from error

    @classmethod
    def create(cls, cache: Location, info: VersionInfo, folder: str | None = None) -> Version:
        """Open the version that `info` describes, and make it if there is none yet; `folder` if it has been renamed.

        Raises:
            StoreError: The cache cannot be written, the version in that folder has another fingerprint, or a folder of
                the version is a link.
            ExtractorError: What the extractor says of its features cannot be stored.
        """
        try:
            VersionInfo.of(json.loads(json.dumps(info.attributes())))
        except ValueError as error:
            raise ExtractorError(f"config {info.name}: features that cannot be stored: {error}") from error
        path = cache / (folder or info.folder_name)
        if isinstance(path, Path):
            cls._make_folder(path, info)
        else:  # with `shards`, there is a version
            for place, attributes in ((path, info.attributes()), (path / "shards", None)):
                store_of(path).put_if_absent(place / "zarr.json", zarr3.group_metadata(attributes))
        version = cls.open(path)
        if version.info.fingerprint != info.fingerprint:
            raise StoreError(f"{path}: its fingerprint does not match its name: move it away and run again")
        return version

    @classmethod
    def _make_folder(cls, path: Path, info: VersionInfo) -> None:
        refuse_links(path, *WRITTEN)
        sweep_cache(path.parent)
        try:
            if not (path / "zarr.json").exists():
                cls._lay_out(path, info)
            for folder in ("runs", "work"):  # a copy of a version may have come without them
                folder_to_write(path, folder)
        except OSError as error:
            raise StoreError(f"{error.filename or path}: cannot be written: {error.strerror}") from error

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
        real = self.path.resolve().name if isinstance(self.path, Path) else self.path.name
        return None if name in (self.path.name, real) else name

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored features."""
        return np.dtype(self.info.spec.stored_dtype)

    def shard_names(self) -> list[str]:
        """The names of all committed shards, sorted. Folders with other names (`.snapshot`, `.nfs…`) are no shards.

        In an object store, where nothing is renamed, a shard is there once its `zarr.json` is, which comes last.
        """
        return self.whole(self.listed_shards())

    def listed_shards(self) -> list[str]:
        """The names that shards have in the listing, sorted; in an object store, some may not be there as a whole."""
        shards = self.path / "shards"
        try:
            return sorted(filter(_SHARD_NAME.fullmatch, store_of(shards).folders(shards)))
        except FileNotFoundError as error:
            raise DamagedError(
                f"{error.filename}: damaged: the folder is missing, and every shard with it: move {self.path} away, "
                "and extract again"
            ) from error
        except OSError as error:
            raise reading_error(error, self.path / "shards") from error

    def has_shard(self, name: str) -> bool:
        """Whether there is a shard of that name, damaged or not."""
        place = self.path / "shards" / name
        return store_of(place).exists(place if isinstance(place, Path) else place / "zarr.json")

    def take_for_whole(self, names: Iterable[str]) -> None:
        """Take these shards for whole without looking."""
        self._known_whole.update(names)

    def whole(self, names: list[str]) -> list[str]:
        """Those of some listed shards that are there as a whole: in an object store, whose `zarr.json` is there. Nobody
        takes it away again.
        """
        if isinstance(self.path, Path):
            return names
        new = [name for name in names if name not in self._known_whole]
        with ThreadPoolExecutor(REQUESTS) as pool:
            there = list(pool.map(self.has_shard, new))
        self._known_whole.update(name for name, is_there in zip(new, there, strict=True) if is_there)
        return [name for name in names if name in self._known_whole]

    def shard_folders(self) -> dict[str, tuple[int, int]]:
        """The names of all committed shards, each with what tells its folder from a later one of the same name."""
        if not isinstance(self.path, Path):  # an object of a shard is never replaced by another
            return dict.fromkeys(self.shard_names(), (0, 0))
        folders = {}
        for name in self.shard_names():
            with suppress(FileNotFoundError):  # it has just been taken away
                stat = os.lstat(self.path / "shards" / name)
                folders[name] = stat.st_ino, stat.st_mtime_ns
        return folders

    def reading(self, read: Callable[[], _T]) -> _T:
        """What `read` returns, which lists the shards and reads them. If one of them is taken away meanwhile, it is
        called again: `featcache repair` has put what was sound in that shard into another.

        Raises:
            DamagedError: As `read` raises it while all shards are still there.
        """
        # In an object store, without a request for each shard: what a killed run has left of one comes and goes, too.
        listed = self.shard_folders if isinstance(self.path, Path) else lambda: dict.fromkeys(self.listed_shards())
        while True:
            there = listed()
            try:
                return read()
            except DamagedError:
                if there.items() <= listed().items():
                    raise

    def shard(self, name: str) -> Shard:
        """A committed shard."""
        return Shard(self.path / "shards" / name, self.info.fingerprint)

    def bytes_on_disk(self) -> int:
        """The sizes of all files in the version's folder."""
        return sum(size for _, size in store_of(self.path).walk(self.path))

    def write_probe(self, document: dict[str, Any]) -> None:
        """Keep what a probe of the version's extractor has measured: any document that JSON can hold.

        Raises:
            StoreError: It cannot be written, or `probes/` is a link.
            ValueError: The document holds NaN or infinity, which JSON does not have.
        """
        sealed = seal({"probe": document, "checksum": UNSEALED})
        place = self.path / "probes" / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}Z-{secrets.token_hex(2)}.json"
        if isinstance(place, Path):
            try:
                folder_to_write(self.folder, "probes")
            except OSError as error:
                raise StoreError(f"{self.path / 'probes'}: cannot be written: {error.strerror}") from error
        write_file(place, sealed)

    def probes(self) -> list[dict[str, Any]]:
        """What `write_probe` has kept, the earliest first.

        Damaged records are left out: losing them costs another measurement, and nothing else.
        """
        documents = []
        for path in self.probe_files():
            with suppress(OSError, DamagedError, ValueError, KeyError, TypeError):
                data = read_bytes(path)
                record = parse_object(data, path)
                if is_sealed(data, record["checksum"]):
                    documents.append(_PROBE(record["probe"]))
        return documents

    def probe_files(self) -> list[Location]:
        """The files that `write_probe` has written, the earliest first; some may be damaged."""
        folder = self.path / "probes"
        try:
            names = store_of(folder).names(folder)
        except OSError:  # there is none
            return []
        return [folder / name for name in sorted(names) if name.endswith(".json")]

    def claim(self, work: str) -> Claim:
        """A claim on a piece of work, by its name."""
        return Claim(self._work() / f"{work}.lock")

    def why_locks_are_not_shared(self) -> str | None:
        """Why claims do not keep runs from doing the same work, as far as can be seen; None if they do.

        Raises:
            OSError: The version cannot be written.
        """
        path = self._work() / f"probe-{secrets.token_hex(4)}.lock"  # which `sweep_work` removes after a kill
        path.touch()
        try:
            return why_not_shared(path)
        finally:
            path.unlink(missing_ok=True)

    def work_folder(self, work: str) -> Path:
        """The path of a fresh folder for a piece of work; it is not made yet."""
        return self._work() / temporary_name(work)

    def _work(self) -> Path:
        return self.place_on_desk("work")

    def sweep(self) -> None:
        """Remove what killed processes have left: in `work/`, and small files that they did not complete."""
        self.sweep_work()
        for folder in self.folders_of_small_files():
            sweep_small_files(folder)

    def folders_of_small_files(self) -> list[Path]:
        """The folders that such files are in, without those that are links."""
        path = self.desk
        folders = (path, *(path / name for name in ("shards", "probes", "tags")), *(path / "runs").glob("*/"))
        return [folder for folder in folders if not folder.is_symlink()]

    def sweep_work(self) -> None:
        """Remove everything in `work/` whose process is dead, and that nobody holds a claim on."""
        work = self._work()
        locks = [entry.name for entry in os.scandir(work) if entry.name.endswith(".lock")]
        for name in (*locks, *leftovers(work, lambda name: not name.endswith(".lock"))):
            claim = self.claim(what_of(name).partition(".")[0])
            with suppress(OSError):  # on a full disk it stays
                if claim.take():
                    remove_from_version(self.desk, "work", name)
                    claim.release()


def sweep_cache(cache: Path) -> None:
    """Remove incomplete versions that killed processes have left."""
    with suppress(OSError):  # there is no cache yet, or it is read-only
        for name in leftovers(cache, is_being_made):
            remove_from_cache(cache, name)
