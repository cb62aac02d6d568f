"""Tags: names for some shards of a version, by which it is read as it was then.

The name of a shard says what is in it, so a list of names is all that there is to a tag."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec

from featcache.errors import ArgumentError, DamagedError, StoreError, listing
from featcache.format.documents import AT_MOST_BYTES, Count, Hash, encode_line, parse_line
from featcache.version.index import Index
from featcache.version.version import Version

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Tag(msgspec.Struct, frozen=True, kw_only=True):
    """The document of a tag."""

    made: str
    """When it was made, for people."""
    items: Count
    """How many items counted then."""
    shards: Annotated[list[Hash], msgspec.Meta(max_length=1 << 20)]
    """The names of the shards that were there."""
    name: str = ""


def make_tag(version: Version, name: str, index: Index) -> Tag:
    """Give what is in a version now, which this is the index of, a name. Raises
    ArgumentError if it is no name for a tag, or there is one of that name; StoreError if
    it cannot be written, or there is nothing to name."""
    if not _NAME.fullmatch(name):
        rule = (
            "letters, digits, `.`, `_` and `-`, at most 100, of which the first is a "
            "letter or digit"
        )
        raise ArgumentError(f"{name!r} is no name for a tag: {rule}")
    if name in tag_names(version):
        raise ArgumentError(
            f"{version.path}: has a tag {name} already, of what was there then: choose another name"
        )
    if not len(index):
        raise StoreError(f"{version.path}: has no utterances yet, so there is nothing to tag")
    tag = Tag(
        made=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        items=len(index),
        shards=sorted(index.shards),
        name=name,
    )
    version.store.put(f"tags/{name}", encode_line(msgspec.to_builtins(tag)))
    return tag


def tag_names(version: Version) -> list[str]:
    """The names of the tags, sorted."""
    return [name for name in version.store.names("tags") if _NAME.fullmatch(name)]


def read_tag(version: Version, name: str) -> Tag:
    """A tag. Raises StoreError if there is none of that name; DamagedError if it is not
    what was written."""
    where = f"{version.path}/tags/{name}"
    if name not in (names := tag_names(version)):
        there = f"there are {listing(names)}" if names else "there are no tags"
        raise StoreError(f"{version.path}: has no tag {name}: {there}")
    tag = parse_line(version.store.read(f"tags/{name}", AT_MOST_BYTES), Tag, where)
    if tag.name != name:
        raise DamagedError(f"{where}: damaged: it is the tag {tag.name[:100]!r}")
    return tag


def remove_tag(version: Version, name: str) -> None:
    """Remove a tag, damaged or not; StoreError if there is none."""
    if name not in tag_names(version):
        read_tag(version, name)
    version.store.remove(f"tags/{name}")


def at_tag(version: Version, name: str | None) -> Version:
    """A version as it was when a tag was made; with None, as it is. Raises StoreError if
    there is no such tag, or a shard of it is gone; DamagedError if the tag is damaged."""
    if name is None:
        return version
    tag = read_tag(version, name)
    if fault := _fault(tag, {*version.shard_names()}):
        raise StoreError(f"{version.path}: {fault}")
    return Version(version.store, version.info, tag=name, shards=tag.shards)


def tags_to_show(version: Version, shards: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Describe each tag of a version, which has these shards (by default those that
    exist): `name`, `made`, `utterances`, and `fault`, the reason why the version cannot
    be read by it any more, or None."""
    there, shown = {*(version.shard_names() if shards is None else shards)}, []
    for name in tag_names(version):
        known: dict[str, Any] = {"name": name, "made": None, "utterances": None}
        try:
            tag = read_tag(version, name)
            known |= {"made": tag.made, "utterances": tag.items, "fault": _fault(tag, there)}
        except DamagedError as error:
            known["fault"] = str(error)
        shown.append(known)
    return shown


def _fault(tag: Tag, shards: set[str]) -> str | None:
    gone = [name for name in tag.shards if name not in shards]
    return (
        f"the tag {tag.name} names shards that are gone or damaged: {listing(gone)}"
        if gone
        else None
    )
