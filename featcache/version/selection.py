"""Finding the version or corpus that a path and a name mean."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from featcache.errors import (
    ArgumentError,
    StoreError,
    did_you_mean,
    differing_keys,
    listing,
    nearest,
)
from featcache.storage.location import Location
from featcache.storage.opening import open_store
from featcache.version.version import Version

PARTS = "parts"
"""The folder in a corpus that lists its parts."""

_MARKS = ("zarr.json", "shards/zarr.json")
"""The marks of a version, of which a damaged one may lack one."""


def is_corpus(location: Location) -> bool:
    """Tell whether a corpus is at a location."""
    return open_store(location).exists(PARTS)


def corpus_of(location: Location) -> tuple[Location, str] | None:
    """Find the corpus that a path names, and the config whose versions it means (empty for
    all), as in `corpus/fbank80`; else None."""
    if is_corpus(location):
        return location, ""
    parent = location.parent
    if is_corpus(parent) and not (open_store(location).exists("") or _is_part(location)):
        return parent, location.name
    return None


def _is_part(location: Location) -> bool:
    return f"{location.name}.json" in open_store(location.parent).names(PARTS)


def version_folders(path: Location, *, of_one_name: bool = False) -> list[Location]:
    """List the folders of the version at `path`, or of all in the cache at `path`, sorted.
    The last part of `path` may be a config's name: `features/fbank80`. Raises StoreError if
    there is no version, or several have that name, unless all `of_one_name` are meant;
    ArgumentError for a corpus."""
    if _is_version(path):
        return [path]
    if names := version_names(path):
        return [path / name for name in names]
    if open_store(path).exists(""):
        _refuse_corpus(path)
        raise StoreError(f"{path}: holds no version: `featcache extract` creates one")
    named = _named(path.parent, path.name)
    if len(named) > 1 and not of_one_name:
        raise _several(named)
    return named


def split_tag(path: Location) -> tuple[Location, str | None]:
    """Split `features/fbank80@paper` into a path and the name of a tag, or None."""
    name, at, tag = path.name.rpartition("@")
    if not at or open_store(path).exists(""):
        return path, None
    return path.parent / name, tag


def version_names(path: Location) -> list[str]:
    """List the folder names of all versions in the cache at `path`, which may not exist."""
    return [name for name in open_store(path).names("") if _is_version(path / name)]


def refuse_version(cache: Location) -> None:
    """Raise ArgumentError for a cache in a version, or at a path that opens a version."""
    versions = [
        folder
        for folder in (cache, cache.parent)
        if _is_version(folder) and any(map(open_store(folder).exists, _MARKS))
    ]
    if not versions and not open_store(cache).exists(""):
        with suppress(StoreError, ArgumentError):
            versions = _named(cache.parent, cache.name)
    if versions:
        remedy = f"give a cache, as {versions[0].parent}"
        raise ArgumentError(f"{cache}: is the version {versions[0]}, or in it: {remedy}")


def _is_version(path: Location) -> bool:
    return open_store(path).exists("shards")


def _named(cache: Location, name: str) -> list[Location]:
    """List the folders of the versions whose config is called `name`. Raises StoreError if
    there is none."""
    names, faults = dict[str, str](), dict[str, StoreError]()
    for folder in open_store(cache).names(""):
        try:
            if _is_version(cache / folder):
                names[folder] = _name_of(cache / folder)
        except StoreError as error:
            faults[folder] = error
    named = [cache / folder for folder, own_name in names.items() if own_name == name]
    if named:
        return named
    _refuse_unnamed(cache, name)
    for folder, fault in faults.items():
        if folder.startswith(name):  # others have nothing to do with it
            raise fault
    hint = _meant(cache, name)
    if names:
        hint = did_you_mean(name, [*names.values(), *names])
    if split_tag(cache / name)[1] is not None:
        hint = ": this takes a version, and no tag"
    if names:
        hint += f"; {cache} holds {listing(names)}"
    raise StoreError(f"{cache / name}: there is no such cache folder{hint}")


def _refuse_unnamed(cache: Location, name: str) -> None:
    for part in (cache, cache / name):
        if _is_part(part) and not open_store(part).exists(""):
            what = "nothing of this part of the corpus is there"
            raise StoreError(f"{part}: {what}: `featcache extract` with its manifest extracts it")
    _refuse_corpus(cache)


def _meant(parent: Location, name: str) -> str:
    near = parent / (nearest(name, open_store(parent).names("")) or name)
    with suppress(StoreError):  # it is a file
        if near.name != name and (version_names(near) or is_corpus(near)):
            return f" (did you mean {near}?)"
    return ""


def _refuse_corpus(path: Location) -> None:
    if is_corpus(path):
        raise ArgumentError(f"{path}: is a corpus: name one of its parts, a folder in it")


def _name_of(folder: Location) -> str:
    try:
        return Version.open(folder).info.name
    except StoreError:  # it is damaged
        return folder.name.rpartition("-")[0]


def _several(folders: Sequence[Location], tag: str | None = None) -> StoreError:
    hint = ""
    with suppress(StoreError):  # some metadata may be damaged
        first, second = (Version.open(folder).info.config for folder in folders[:2])
        hint = f" (the first two differ in {_differences(first, second)})"
    names, held = [folder.name for folder in folders], f"{len(folders)} versions"
    if tag is not None:
        names, held = [f"{name}@{tag}" for name in names], f"{held} with a tag {tag}"
    return StoreError(
        f"{folders[0].parent}: holds {held}: {listing(names)}; name one of these folders{hint}"
    )


def _differences(first: dict[str, Any], second: dict[str, Any]) -> str:
    return listing(differing_keys(first, second)) or "their weights or revision"


def select_versions(
    path: Location, name: str | None = None, tag: str | None = None
) -> list[Version]:
    """Open the versions at `path` (see `version_folders`), or those called `name`. With a
    tag, also as in `features/fbank80@paper`: those that have it, as they were then. Raises
    StoreError if there is no version, or no such tag."""
    path, of_path = split_tag(path)
    tag = of_path if tag is None else tag
    versions = _opened(path, name, tag)
    if tag is None:
        return versions
    from featcache.version.tags import at_tag

    return [at_tag(version, tag) for version in versions]


def _opened(path: Location, name: str | None, tag: str | None) -> list[Version]:
    """Open versions as they are now; of several, those that have the tag."""
    folders = version_folders(path, of_one_name=tag is not None)
    versions = [
        Version.open(folder)
        for folder in folders
        if name in (None, folder.name) or name == _name_of(folder)
    ]
    if tag is not None and len(versions) > 1:
        from featcache.version.tags import tag_names

        names = listing(version.path.name for version in versions)
        what = f"none of its {len(versions)} versions has a tag {tag}: {names}"
        versions = [version for version in versions if tag in tag_names(version)]
        if not versions:
            raise StoreError(f"{path}: {what}")
    return versions


def version_of_tag(path: Location, tag: str) -> Version:
    """Open the only version at `path` that has the tag, as it is now. Raises StoreError if
    there is none, or several."""
    versions = _opened(path, None, tag)
    if len(versions) > 1:
        raise _several([version.path for version in versions], tag)
    return versions[0]


def select_version(cache: Location, name: str | None = None, tag: str | None = None) -> Version:
    """Open the only version that `select_versions` finds. Raises StoreError if there is
    none, or several, and says how they differ."""
    versions = select_versions(cache, name, tag)
    if len(versions) == 1:
        return versions[0]
    if not versions:
        folders = [folder.name for folder in version_folders(split_tag(cache)[0])]
        raise StoreError(
            f"{cache}: holds no version called {name!r}{did_you_mean(str(name), folders)}; it "
            f"holds {listing(folders)}"
        )
    raise _several([version.path for version in versions], versions[0].tag)


def select_configured(
    path: Location, name: str | None, fingerprint: str, resolved: dict[str, Any]
) -> Version:
    """Open the version in the cache (called `name`) that a config of this fingerprint
    makes; `resolved` has all defaults. Raises StoreError if there is none, and says how
    another differs."""
    wanted = f"{resolved['name']}-{fingerprint[:12]}"
    versions = select_versions(path, name)
    fitting = [version for version in versions if version.info.fingerprint == fingerprint]
    namesakes = [version for version in versions if version.info.name == resolved["name"]]
    if fitting:  # if there are several, only their names differ
        return next((version for version in fitting if version in namesakes), fitting[0])
    if not namesakes and len(versions) != 1:
        held = listing(version.path.name for version in select_versions(path))
        what = f"holds no version of this config, which would be {wanted}; it holds {held}"
        raise StoreError(f"{path}: {what}")
    other = (namesakes or versions)[0]
    keys = _differences(other.info.config, resolved)
    what = f"made with another config; the given config makes {wanted}; they differ in {keys}"
    raise StoreError(f"{other.path}: {what}")
