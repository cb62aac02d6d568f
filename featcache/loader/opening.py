"""Opening a version for reading: found by name, by folder, or by config."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from featcache.errors import (
    ArgumentError,
    FeatcacheWarning,
    MissingDependencyError,
    StoreError,
    counted,
    listing,
)
from featcache.loader.cache import Cache
from featcache.loader.corpus import Corpus
from featcache.loader.parts import OpenPart
from featcache.loader.tiers import Tiers
from featcache.storage.location import Location, parse_location
from featcache.storage.objects import REQUESTS
from featcache.store.corpus import PartVersion, corpus_of, read_parts
from featcache.store.index import index_folder, open_index
from featcache.store.selection import select_configured, select_version, version_names
from featcache.store.tags import at_tag
from featcache.store.unfinished import find_unfinished
from featcache.store.version import Version

__all__ = ["open"]

_T = TypeVar("_T")


class _Config(Protocol):
    """The part of `featcache.config.Config` that `open` needs; training may lack the packages to import that."""

    @property
    def name(self) -> str: ...
    def fingerprint(self) -> str: ...
    def resolved(self) -> dict[str, Any]: ...


def open(  # noqa: A001
    path: str | Path,
    name: str | None = None,
    *,
    config: str | Path | _Config | None = None,
    tag: str | None = None,
    check: bool = False,
    strict: bool = False,
    ram: str | float | None = None,
    copy_to: str | Path | None = None,
    copy_limit: str | float | None = None,
) -> Cache:
    """Open a version of a cache for reading; or of a corpus, which gives a `Corpus`: all its parts as one sequence.

    Args:
        path: The cache; or a version's folder in it, or that version's name in the cache: "features/fbank80". Or the
            URL of one: "s3://bucket/features", gs:// or az://, which needs the extra `cloud`; see docs/scale.md.
        name: The version's name, or its folder's name; not needed if the cache has only one version.
        config: Open the version with this config's fingerprint: a YAML file, a packaged config's name, or a `Config`.
            The first two need the extra `extract`.
        tag: Open the version as it was when `featcache tag` gave it this name, whatever was added or replaced since;
            of several versions, the one that has this tag. "features/fbank80@paper" does the same.
        check: Whether to compare every utterance that is read with its checksum. Its features are then read, and not
            mapped, so that a disk that fails gives a DamagedError. Without, it may end the process by SIGBUS.
        strict: Whether to refuse an unfinished version instead of warning: one that lacks utterances of a manifest that
            are not in the failure ledger either, that has lost shards, or of which its records do not tell.
        ram: How much of this process's memory to use for hot utterances: "4GB", "512MiB", or a number of bytes. None by
            default, since the page cache does the same for all processes.
        copy_to: A folder on a local disk, or in /dev/shm, to which shards are copied while they are read; from an
            object store, before they are read, so that each byte is fetched once.
        copy_limit: The limit for all copies in that folder together; by default, a tenth of the disk stays free.

    Raises:
        StoreError: There is no such version, or there are several; lists them, and the config keys that differ. With
            `strict`, also if the version is not finished.
        DamagedError: The version's metadata is damaged; or a shard of the tag is gone. From what is read later, also if
            it is not the shard that was tagged.
        ConfigError, MissingDependencyError: `config` has errors or cannot be read, or packages for it are missing.
        ArgumentError: A size is invalid, larger than the machine's memory, or less than a shard in an object store; or
            a URL is of no object store.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path is {path!r}: give the folder of a cache, or its URL")
    tiers = Tiers.parse(ram, copy_to, copy_limit)
    location = parse_location("path", path)
    if config is not None:
        config = _load(config)
    if (found := corpus_of(location)) is not None:
        if found[1] and name is None:
            name = found[1]
        if tag is not None:
            raise ArgumentError(
                f"tag is {tag!r}: {location} is a corpus: open the parts, each of which has its own tags"
            )
        return _open_corpus(found[0], name, config, check=check, strict=strict, tiers=tiers)
    if config is None:
        version = select_version(location, name, tag)
    else:
        version = select_configured(location, name, config.name, config.fingerprint(), config.resolved())
        version = at_tag(version, tag)
    cache = Cache(version, check=check, tiers=tiers)
    for run in find_unfinished(version, cache.index, all_runs=strict):
        message = f"{version.path}: {run}"
        if strict:
            raise StoreError(message)
        warnings.warn(message, FeatcacheWarning, stacklevel=2)
    return cache


def _open_corpus(
    corpus: Location, name: str | None, config: _Config | None, *, check: bool, strict: bool, tiers: Tiers | None
) -> Corpus:
    """Open the version that the parts of a corpus hold; those that lack it are left out, which is said."""
    known = {part.name: part for part in read_parts(corpus)}
    folders = dict(zip(known, _each(lambda part: version_names(corpus / part), list(known), corpus), strict=True))
    version = _version_in(corpus, folders, name, config)
    folder = version.path.name
    lacking = [part for part, there in folders.items() if folder not in there]
    messages = []
    if lacking:
        have = counted(len(lacking), "part has", "parts have")
        messages.append(f"{corpus}: {have} no {folder}, not extracted yet: {listing(lacking)}")

    def look(part: str) -> tuple[OpenPart, list[str]]:
        return _look(corpus / part / folder, part, known[part].versions.get(folder), strict)

    found = _each(look, [part for part in known if part not in lacking], corpus)
    for message in [*messages, *(message for _, unfinished in found for message in unfinished)]:
        if strict:
            raise StoreError(message)
        warnings.warn(message, FeatcacheWarning, stacklevel=3)
    return Corpus(corpus, version.info, [part for part, _ in found], check=check, tiers=tiers)


def _version_in(
    corpus: Location, folders: Mapping[str, Sequence[str]], name: str | None, config: _Config | None
) -> Version:
    """The only version that parts of a corpus hold; of that name, or of that config.

    Args:
        corpus: The corpus.
        folders: The names of the versions' folders in each part.
        name, config: As for `open`.

    Raises:
        StoreError: There is none, or there are several.
    """
    first = {folder: corpus / part / folder for part, there in [*folders.items()][::-1] for folder in there}
    fingerprint = None if config is None else config.fingerprint()
    fitting = []
    for path in first.values():
        version = Version.open(path)
        if name in (None, path.name, version.info.name) and fingerprint in (None, version.info.fingerprint):
            fitting.append(version)
    if len(fitting) == 1:
        return fitting[0]
    if not first:
        raise StoreError(f"{corpus}: no part holds a version yet: `featcache extract` creates them")
    if fitting:
        names = listing(version.path.name for version in fitting)
        raise StoreError(f"{corpus}: its parts hold {len(fitting)} versions: {names}; give the name of one")
    wanted = f"called {name!r}" if config is None or fingerprint is None else f"{config.name}-{fingerprint[:12]}"
    raise StoreError(f"{corpus}: no part holds a version {wanted}; they hold {listing(sorted(first))}")


def _look(path: Location, name: str, known: PartVersion | None, strict: bool) -> tuple[OpenPart, list[str]]:
    """A part as it is now, and what is unfinished in it. It is read only if what is known of it no longer holds."""
    version = Version.open(path)
    is_known = known is not None and index_folder(version, version.listed_shards()).name == known.index
    if known is not None and is_known and not strict:
        return OpenPart(name, path, known), []
    index = open_index(version)
    unfinished = [f"{path}: {run}" for run in find_unfinished(version, index, all_runs=strict)]
    return OpenPart(name, path, PartVersion.of(version, index)), unfinished


def _each(work: Callable[[str], _T], names: Sequence[str], corpus: Location) -> list[_T]:
    """What `work` returns for each name; of an object store, for several at once. `work` may call `in_parallel`."""
    if isinstance(corpus, Path):
        return list(map(work, names))
    with ThreadPoolExecutor(REQUESTS) as threads:
        return list(threads.map(work, names))


def _load(config: str | Path | _Config) -> _Config:
    if not isinstance(config, (str, Path)):
        if not hasattr(config, "fingerprint"):
            raise ArgumentError(f"config is {config!r}: give a YAML file, the name of a packaged config, or a Config")
        return config
    try:
        from featcache.config import load_config
    except ImportError as error:
        raise MissingDependencyError(error.name or "pydantic", "reading a config") from error
    return load_config(config)
