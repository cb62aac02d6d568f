"""Tags: lists of a version's shards, by which it is read as it was then."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from featcache.errors import ArgumentError, DamagedError, StoreError, did_you_mean, listing
from featcache.format.documents import Count, Hash, put_document, read_document
from featcache.version.index import Index
from featcache.version.version import Version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """The document of a tag."""

    made: str
    """The time, for people."""
    items: Count
    shards: Annotated[list[Hash], msgspec.Meta(max_length=1 << 20)]
    name: str = ""


def make_tag(version: Version, name: str, index: Index) -> Tag:
    """Tag what is in a version now. Raises ArgumentError if the name is taken, or no name
    for a tag; StoreError if the version is empty."""
    if not _NAME.fullmatch(name):
        rule = "use at most 100 letters, digits, `.`, `_` and `-`, and begin with a letter or digit"
        raise ArgumentError(f"{name!r} cannot name a tag: {rule}")
    if name in tag_names(version):
        raise ArgumentError(f"{version.path}: has a tag {name} already: choose another name")
    if not len(index):
        raise StoreError(f"{version.path}: has no utterances yet, so there is nothing to tag")
    made = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    tag = Tag(made=made, items=len(index), shards=sorted(index.shards), name=name)
    put_document(version.store, f"tags/{name}", tag)
    return tag


def tag_names(version: Version) -> list[str]:
    """List the names of the tags, sorted."""
    return [name for name in version.store.names("tags") if _NAME.fullmatch(name)]


def read_tag(version: Version, name: str) -> Tag:
    """Read a tag. Raises StoreError if it does not exist."""
    names = tag_names(version)
    if name not in names:
        others = f"its tags are {listing(names)}" if names else "it has no tags"
        raise StoreError(f"{version.path}: has no tag {name}{did_you_mean(name, names)}: {others}")
    tag = read_document(version.store, f"tags/{name}", Tag)
    if tag.name != name:
        what = f"damaged: it is the tag {tag.name[:100]!r}"
        raise DamagedError(f"{version.path}/tags/{name}: {what}")
    return tag


def remove_tag(version: Version, name: str) -> None:
    """Remove a tag, damaged or not. Raises StoreError if it does not exist."""
    if name not in tag_names(version):
        read_tag(version, name)
    version.store.remove(f"tags/{name}")


def at_tag(version: Version, name: str | None) -> Version:
    """Open a version as it was when a tag was made; with None, as it is. Raises StoreError
    if the tag does not exist, or a shard is gone."""
    if name is None:
        return version
    tag = read_tag(version, name)
    fault = _fault(tag, {*version.shard_names()})
    if fault:
        raise StoreError(f"{version.path}: {fault}")
    return Version(version.store, version.info, tag=name, shards=tag.shards)


def tags_to_show(version: Version, shards: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Describe each tag: `name`, `made`, `utterances`, and `fault`, the reason why it
    cannot be read, or None."""
    present, shown = {*(version.shard_names() if shards is None else shards)}, []
    for name in tag_names(version):
        known: dict[str, Any] = {"name": name, "made": None, "utterances": None}
        try:
            tag = read_tag(version, name)
            known |= {"made": tag.made, "utterances": tag.items, "fault": _fault(tag, present)}
        except DamagedError as error:
            known["fault"] = str(error)
        shown.append(known)
    return shown


def _fault(tag: Tag, shards: set[str]) -> str | None:
    gone = [name for name in tag.shards if name not in shards]
    if not gone:
        return None
    return f"the tag {tag.name} names shards that are gone or damaged: {listing(gone)}"
