"""Opening a version for reading: found by name, by folder, or by config."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featcache.errors import ArgumentError, FeatcacheWarning, MissingDependencyError, StoreError
from featcache.loader.cache import Cache
from featcache.storage.location import parse_location
from featcache.version.selection import corpus_of, select_configured, select_version
from featcache.version.wanted import find_lacking

if TYPE_CHECKING:
    from featcache.loader.places import PlaceOf


def open(  # noqa: A001
    path: str | Path,
    name: str | None = None,
    *,
    config: str | Path | Any = None,
    tag: str | None = None,
    check: bool = False,
    strict: bool = False,
    ram: str | float | None = None,
    copy_to: str | Path | None = None,
    copy_limit: str | float | None = None,
) -> Cache:
    """Open a version of a cache for reading; or of a corpus, as a `Corpus`: all its parts
    as one sequence.

    Args:
        path: The cache, or a version in it, by its folder or its name:
            "features/fbank80". Or the URL of one: "s3://bucket/features", gs:// or az://,
            which needs the extra `cloud`; see docs/scale.md.
        name: The version's name, or its folder's name; not needed if the cache has only
            one version.
        config: Open the version with this config's fingerprint: a YAML file or a packaged
            config's name, which need the extra `extract`, or a `Config`.
        tag: Open the version as it was when `featcache tag` gave it this name, which also
            selects among several versions. "features/fbank80@paper" does the same.
        check: True to compare every utterance with its checksum. It is then read, and not
            mapped: a disk that fails raises DamagedError, instead of ending the process by SIGBUS.
            Side arrays and other tracks are compared once for each shard, and then mapped.
        strict: True to refuse an unfinished version, instead of a warning. An unfinished
            version lacks utterances of a manifest that are not in the failure ledger, has
            lost shards, or has no records of what is wanted.
        ram: How much memory to use for copies of shards, which all processes of this
            machine share: "4GB", "512MiB", or a number of bytes. They are copied while
            they are read; from an object store, before, so that each byte is fetched
            once. None by default, since the page cache does the same for folders.
        copy_to: A folder on a local disk to which shards are copied in the same way.
            With `ram`, memory comes first.
        copy_limit: The limit for all copies in that folder together; by default, a tenth
            of the disk stays free.

    Raises:
        StoreError: There is no such version, or there are several; lists them, and the
            config keys that differ. With `strict`, also if the version is not finished.
        DamagedError: The version's metadata is damaged; or a shard of the tag is gone.
        ConfigError, MissingDependencyError: `config` has errors or cannot be read, or
            packages for it are missing.
        ArgumentError: A size is invalid, larger than the machine's memory, or less than a
            shard in an object store; or a URL is of no object store.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path is {path!r}: give the folder of a cache, or its URL")
    places: Sequence[PlaceOf] = ()
    if (ram, copy_to, copy_limit) != (None, None, None):
        from featcache.loader.local_copies import parse_copying

        places = parse_copying(ram, copy_to, copy_limit)
    location = parse_location("path", path)
    config = None if config is None else _load(config)
    in_corpus = corpus_of(location)
    if in_corpus is not None:
        if tag is not None:
            raise ArgumentError(
                f"tag is {tag!r}: {location} is a corpus: open its parts, which have their own tags"
            )
        from featcache.loader.corpus import Corpus, open_parts

        corpus, name_in_path = in_corpus
        made_by = None if config is None else (config.name, config.fingerprint())
        if name is None:
            name = name_in_path or None
        parts, messages = open_parts(corpus, name, made_by, strict)
        cache: Cache = Corpus(corpus, parts, check=check, places=places)
    else:
        if config is None:
            version = select_version(location, name, tag)
        else:
            from featcache.version.tags import at_tag

            made = select_configured(location, name, config.fingerprint(), config.resolved())
            version = at_tag(made, tag)
        cache = Cache(version, check=check, places=places)
        messages = [f"{version.path}: {run}" for run in find_lacking(version, cache.index)]
    for message in messages:
        if strict:
            raise StoreError(message)
        warnings.warn(message, FeatcacheWarning, stacklevel=2)
    return cache


def _load(config: Any) -> Any:
    if not isinstance(config, (str, Path)):
        if not hasattr(config, "fingerprint"):
            raise ArgumentError(
                f"config is {config!r}: give a YAML file, the name of a packaged config, or "
                "a Config"
            )
        return config
    try:
        from featcache.config import load_config
    except ImportError as error:
        raise MissingDependencyError(error.name or "pydantic", "reading a config") from error
    return load_config(config)
