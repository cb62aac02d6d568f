"""Which versions a path and a name mean, and how versions of one name differ."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from featcache.errors import DamagedError, StoreError, listing
from featcache.storage.location import Location
from featcache.storage.store import store_of
from featcache.store.corpus import CORPUS, Part
from featcache.store.tags import at_tag, tag_names
from featcache.store.version import Version


def version_folders(path: Location) -> list[Location]:
    """The folder of the version at `path`, or of every version in the cache at `path`, sorted.

    If there is no such folder, the last part of `path` may be a config's name: `features/fbank80`.

    Raises:
        StoreError: There is no version, or several have that name.
    """
    folders = _all_folders(path)
    if len(folders) > 1 and folders[0].parent != path:
        raise _several(path.parent, folders)
    return folders


def _all_folders(path: Location) -> list[Location]:
    """As `version_folders`; all, if several have that name."""
    if _is_version(path):
        return [path]
    try:
        folders = _folders_in(path)
    except FileNotFoundError:
        return _named(path.parent, path.name)
    except NotADirectoryError as error:
        raise StoreError(f"{path}: there is no such cache folder") from error
    if not folders:
        _refuse_corpus(path)
        raise StoreError(f"{path}: holds no version: `featcache extract` creates one")
    return folders


def split_tag(path: Location) -> tuple[Location, str | None]:
    """The path of a version, and the name of the tag of `features/fbank80@paper`; None if it names no tag."""
    name, at, tag = path.name.rpartition("@")
    if not at or store_of(path).exists(path):
        return path, None
    return path.parent / name, tag


def version_names(path: Location) -> list[str]:
    """The names of the folders of all versions in the cache at `path`; none if there is no such folder."""
    with suppress(OSError):
        return [folder.name for folder in _folders_in(path)]
    return []


def gone_parts(corpus: Location, parts: Collection[Part]) -> dict[str, str]:
    """Of the parts of a corpus that were extracted, and whose folders are gone: what to say of each, by its name."""
    folders, names = {*store_of(corpus).folders(corpus)}, {part.name for part in parts}
    gone = [part.name for part in parts if part.versions and part.name not in folders]
    others = [name for name in sorted(folders - names) if gone and version_names(corpus / name)]
    are = f"{listing(others)} {'is' if len(others) == 1 else 'are'} no part of it: if it was" if others else ""
    again = "`featcache extract` with its manifest makes it again (or of a copy, the same `featcache copy`)"
    return {
        name: f"{corpus}: the folder of its part {name} is not there; "
        + (f"{are} {name}, rename it back" if are else again)
        for name in gone
    }


def _is_version(path: Location) -> bool:
    shards = path / "shards"
    return shards.is_dir() if isinstance(shards, Path) else store_of(shards).exists(shards)


def _named(cache: Location, name: str) -> list[Location]:
    """The folders of the versions in the cache whose config is called `name`; there are some."""
    there: list[Location] = []
    with suppress(OSError):
        there = _folders_in(cache)
    found = [folder for folder in there if _name_of(folder) == name]
    if not found:
        _refuse_corpus(cache)
        hint = f"; {cache} holds {listing(folder.name for folder in there)}" if there else _meant(cache, name)
        if split_tag(cache / name)[1] is not None:
            hint = ": this takes a version, and no tag"
        raise StoreError(f"{cache / name}: there is no such cache folder{hint}")
    return found


def _meant(parent: Location, name: str) -> str:
    """That a cache of nearly this name may be meant."""
    with suppress(OSError):
        near = get_close_matches(name, store_of(parent).folders(parent), 1, 0.8)
        if near and (version_names(parent / near[0]) or store_of(parent).exists(parent / near[0] / CORPUS)):
            return f": did you mean {parent / near[0]}?"
    return ""


def _refuse_corpus(path: Location) -> None:
    if store_of(path).exists(path / CORPUS):
        raise StoreError(f"{path}: is a corpus: name one of its parts, a folder in it")


def _name_of(folder: Location) -> str:
    """The name of a version's config; if the metadata is damaged, as the folder's name has it."""
    try:
        return Version.open(folder).info.name
    except (StoreError, OSError):
        return folder.name.rpartition("-")[0]


def _several(cache: Location, folders: Sequence[Location], tag: str | None = None) -> StoreError:
    """The error to raise if there are several versions (that have a tag) and a single one is wanted."""
    hint = ""
    with suppress(StoreError):  # some metadata may be damaged
        first, second = (Version.open(folder).info.config for folder in folders[:2])
        hint = f" (the first two differ in {listing(differing_keys(first, second)) or 'their weights or revision'})"
    names = listing(folder.name if tag is None else f"{folder.name}@{tag}" for folder in folders)
    which = "" if tag is None else f" with a tag {tag}"
    return StoreError(f"{cache}: holds {len(folders)} versions{which}: {names}; name one of these folders{hint}")


def _folders_in(cache: Location) -> list[Location]:
    names = store_of(cache).names(cache) if isinstance(cache, Path) else store_of(cache).folders(cache)
    return [cache / name for name in sorted(names) if not name.startswith(".") and _is_version(cache / name)]


def select_versions(path: Location, name: str | None = None, tag: str | None = None) -> list[Version]:
    """The version at `path` (see `version_folders`), or every version in the cache at `path` that is called `name`.

    With a tag, with which the path may end, as in `features/fbank80@paper`: those of them that have it, as they were
    when they were tagged.

    Raises:
        StoreError: There is no version, or no such tag.
        DamagedError: The metadata of such a version is damaged.
    """
    path, of_path = split_tag(path)
    tag = of_path if tag is None else tag
    return [at_tag(version, tag) for version in _opened(path, name, tag)]


def _opened(path: Location, name: str | None, tag: str | None) -> list[Version]:
    """The versions as they are now; of several, those that have the tag."""
    versions = []
    for folder in version_folders(path) if tag is None else _all_folders(path):
        try:
            version = Version.open(folder)
        except DamagedError:
            if name in (None, folder.name, _name_of(folder)):
                raise
            continue  # damage in a version that was not asked for
        if name in (None, version.info.name, folder.name):
            versions.append(version)
    if tag is not None and len(versions) > 1:
        having = [version for version in versions if tag in tag_names(version)]
        if not having:
            names = listing(version.path.name for version in versions)
            raise StoreError(f"{path}: none of its {len(versions)} versions has a tag {tag}: {names}")
        versions = having
    return versions


def version_of_tag(path: Location, tag: str) -> Version:
    """The only version at `path`, as it is now, or of those that have this name the only one that has the tag.

    Raises:
        StoreError: There is none, or there are several.
        DamagedError: The metadata of such a version is damaged.
    """
    versions = _opened(path, None, tag)
    if len(versions) > 1:
        raise _several(versions[0].path.parent, [version.path for version in versions], tag)
    return versions[0]


def select_version(cache: Location, name: str | None = None, tag: str | None = None) -> Version:
    """The only version in the cache (that is called `name`); with a tag, the only one that has it, as it was then.

    Raises:
        StoreError: There is none, or there are several; the message says how they differ.
    """
    versions = select_versions(cache, name, tag)
    if len(versions) == 1:
        return versions[0]
    if not versions:
        there = [folder.name for folder in version_folders(split_tag(cache)[0])]
        raise StoreError(f"{cache}: holds no version called {name!r}; it holds {listing(there)}")
    given = split_tag(cache)[1] if tag is None else tag
    raise _several(versions[0].path.parent, [version.path for version in versions], given)


def select_configured(
    path: Location, name: str | None, config_name: str, fingerprint: str, resolved: dict[str, Any]
) -> Version:
    """The version in the cache (called `name`) that a config of this name and fingerprint makes.

    `resolved` is the config with every default filled in.

    Raises:
        StoreError: There is none; says how the config of another one differs.
    """
    wanted = f"{config_name}-{fingerprint[:12]}"
    versions = select_versions(path, name)
    fitting = [version for version in versions if version.info.fingerprint == fingerprint]
    namesakes = [version for version in versions if version.info.name == config_name]
    if fitting:  # if there are several, only their names differ
        return next((version for version in fitting if version in namesakes), fitting[0])
    if not namesakes and len(versions) != 1:
        there = listing(version.path.name for version in select_versions(path))
        raise StoreError(f"{path}: holds no version of this config, which would be {wanted}; it holds {there}")
    other = (namesakes or versions)[0]
    keys = listing(differing_keys(other.info.config, resolved)) or "their weights or revision"
    raise StoreError(f"{other.path}: made with another config; the given config makes {wanted}; they differ in {keys}")


def distinctions(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """What tells resolved configs of one name from each other: for each of them, the keys in which not all agree, by
    their dotted paths, with its values: `params.low_freq=20.0`. Keys that it has not are left out.
    """
    flat = [dict(_leaves(config)) for config in configs]
    keys = {key for values in flat for key in values if any(other.get(key) != values[key] for other in flat)}
    return [[f"{key}={json.dumps(values[key])}" for key in sorted(keys & values.keys())] for values in flat]


def _leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The dotted paths at which two resolved configs differ, with both values: `params.low_freq: 20.0 -> 0.0`."""

    def shown(config: dict[str, Any]) -> str:
        return json.dumps(config[key]) if key in config else "not given"

    if not prefix and old.get("extractor") != new.get("extractor"):  # two extractors' parameters cannot be compared
        return [f"extractor: {json.dumps(old.get('extractor'))} -> {json.dumps(new.get('extractor'))}"]
    lines = []
    for key in sorted({*old, *new}):
        path, was, now = f"{prefix}{key}", old.get(key), new.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            lines += differing_keys(was, now, f"{path}.")
        elif was != now:
            lines.append(f"{path}: {shown(old)} -> {shown(new)}")
    return lines
