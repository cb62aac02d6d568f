"""Finding the version that is meant: by its name, by its folder, or by the config that makes it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Protocol

from featcache.errors import FeatcacheWarning, MissingDependencyError, StoreError, listing
from featcache.loader.cache import Cache
from featcache.loader.tiers import Tiers
from featcache.store.unfinished import find_unfinished
from featcache.store.version import Version, differing_keys, select_version, select_versions

__all__ = ["open"]


class ConfigLike(Protocol):
    """What `open` asks of a `featcache.config.Config`, whose module is not there in training."""

    @property
    def name(self) -> str:
        """Of the version."""

    def fingerprint(self) -> str:
        """A hash of everything that decides the values."""

    def resolved(self) -> dict[str, Any]:
        """The config with every default filled in."""


def open(  # noqa: A001
    path: str | Path,
    name: str | None = None,
    *,
    config: str | Path | ConfigLike | None = None,
    check: bool = False,
    strict: bool = False,
    ram: str | int | None = None,
    copy_to: str | Path | None = None,
    copy_limit: str | int | None = None,
) -> Cache:
    """Open a version of a cache for reading.

    Args:
        path: the cache, or one version's folder in it.
        name: which version: its name or its folder's; not needed where there is but one.
        config: the version that this config makes, and no other: a YAML file, a packaged config's name, or a
            `Config`. The first two need the extra `extract`.
        check: hold every utterance that is read against its checksum.
        strict: refuse a version that extraction has not finished, instead of warning: something of a manifest that it
            was to hold is neither there nor in the failure ledger.
        ram: how much of this process's memory to keep hot utterances in, as "4GB", "512MiB", or a number of bytes;
            none by default, as the page cache does the same for all processes.
        copy_to: a folder on a disk of this machine, or in /dev/shm, to copy shards to while they are read.
        copy_limit: how large all copies there may be; by default, a tenth of the disk stays free.

    Raises:
        StoreError: there is no such version, or there are several; says which there are, and which config
            keys tell them apart, or from `config`. With `strict`, the version is not finished.
        DamagedError: the version's metadata is damaged.
        ConfigError: `config` cannot be read, or has faults.
        MissingDependencyError: `config` is to be read, and the packages for it are not there.
        ArgumentError: a size is none, or the machine has not so much memory.
    """
    tiers = Tiers.of(ram, copy_to, copy_limit)
    path = Path(path).absolute()  # the working directory may change while shards are still to be opened
    version = select_version(path, name) if config is None else _version_of(_load(config), path, name)
    cache = Cache(version, check=check, tiers=tiers)
    for run in find_unfinished(version, cache.index):
        message = f"{version.path}: {run}"
        if strict:
            raise StoreError(message)
        warnings.warn(message, FeatcacheWarning, stacklevel=2)
    return cache


def _load(config: str | Path | ConfigLike) -> ConfigLike:
    if not isinstance(config, (str, Path)):
        return config
    try:
        from featcache.config import load_config
    except ImportError as error:
        raise MissingDependencyError(error.name or "pydantic", "reading a config") from error
    return load_config(config)


def _version_of(config: ConfigLike, path: Path, name: str | None) -> Version:
    """The version in `path` (called `name`) that `config` makes."""
    fingerprint = config.fingerprint()
    wanted = f"{config.name}-{fingerprint[:12]}"
    versions = select_versions(path, name)
    fitting = [version for version in versions if version.info.fingerprint == fingerprint]
    namesakes = [version for version in versions if version.info.name == config.name]
    if fitting:  # several differ in nothing but their names
        return next((version for version in fitting if version in namesakes), fitting[0])
    if not namesakes and len(versions) != 1:
        there = listing(version.path.name for version in select_versions(path))
        raise StoreError(f"{path}: holds no version of this config, which would be {wanted}; it holds {there}")
    other = (namesakes or versions)[0]
    keys = listing(differing_keys(other.info.config, config.resolved())) or "their weights or revision"
    raise StoreError(
        f"{other.path}: made by another config than the one given, which would be {wanted}; they differ in {keys}"
    )
