"""Tags: immutable named lists of a version's shards. What is read by a tag is what was there when it was made.

    tags/<name>.json    which shards, each with its seal and a hash of its values; how many items count; sealed

Which items count follows from the shards, so a tag needs no index of its own: that of its shards is kept. A shard that
another run has made of the same items has the same name, another seal, and perhaps other bits; the hash of its values
tells. So whatever is read by a tag is what was tagged, or a `DamagedError` that names the tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from featcache.errors import ArgumentError, DamagedError, StoreError, counted, listing
from featcache.spec import FeatureSpec
from featcache.storage.location import Location
from featcache.storage.objects import in_parallel, read_ahead, require_put_if_absent
from featcache.storage.store import store_of
from featcache.store.fields import fields, mapped, text, whole
from featcache.store.files import folder_to_write, refuse_links, sync
from featcache.store.records import read_document, sealed_document, write_document
from featcache.store.shard import Shard, ShardInfo
from featcache.store.version import Version

FORMAT = 1
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_FILE = re.compile(rf"({_NAME})\.json")
_TAG = fields(
    {
        "format": whole(FORMAT, FORMAT),
        "fingerprint": text("[0-9a-f]{64}"),
        "made": text(at_most=64),
        "items": whole(1),
        "shards": mapped(text("[0-9a-f]{12}"), text("[0-9a-f]{8}")),
        "sealed": lambda value: value,
        "checksum": text(),
    },
    or_not={"values": mapped(text("[0-9a-f]{12}"), text("[0-9a-f]{8}"))},
)


@dataclass(frozen=True)
class Tag:
    """What a tag stands for."""

    name: str
    """Its name."""
    made: str
    """When it was made, in ISO 8601, by the clock of whoever made it."""
    items: int
    """The number of utterances."""
    shards: dict[str, str]
    """The seal of each shard, by the shard's name, sorted."""
    values: dict[str, str] = field(default_factory=dict)
    """The hash of each shard's values, by the shard's name; tags that earlier code made have none."""

    def is_of(self, shard: Shard, seal: str, spec: FeatureSpec) -> bool:
        """Whether a shard, which has this seal, is the tagged one of its name, or has the same values.

        Raises:
            DamagedError: It is not what was written.
            StoreError: It cannot be read.
        """
        if seal == self.shards.get(shard.name):
            return True
        return shard.name in self.values and shard.values(spec) == self.values[shard.name]


class TaggedVersion(Version):
    """A version as it was when it was tagged: it has the tag's shards, and no others.

    Raises:
        DamagedError: From whatever lists or reads its shards, also if one is gone, or is not the one that was tagged.
    """

    def __init__(self, version: Version, tag: Tag) -> None:
        super().__init__(version.path, version.info)
        self.tag = tag

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.path, self.tag)

    def listed_shards(self) -> list[str]:
        """The names of the tag's shards, sorted."""
        there = {*super().listed_shards()}
        if gone := [name for name in self.tag.shards if name not in there]:
            raise self.broken(gone)
        return [*self.tag.shards]

    def shard(self, name: str) -> Shard:
        """One of the tag's shards."""
        return _TaggedShard(self, name)

    def broken(self, shards: Sequence[str]) -> DamagedError:
        """The error to raise if some of the shards are not there."""
        return DamagedError(
            f"{self.path}: the tag {self.tag.name} is no longer whole: of its "
            f"{counted(len(self.tag.shards), 'shard')}, {listing(shards)} {'is' if len(shards) == 1 else 'are'} gone, "
            "or made anew: repaired, or removed. Take the version from a copy in which the tag is whole, or remove the "
            f"tag: featcache rm {self.path}@{self.tag.name}"
        )


class _TaggedShard(Shard):
    """A shard that must be the one that was tagged."""

    def __init__(self, version: TaggedVersion, name: str) -> None:
        super().__init__(version.path / "shards" / name, version.info.fingerprint)
        self._tagged = version

    def _read_info(self, data: bytes | None = None) -> ShardInfo:
        info = super()._read_info(data)
        anything, tagged = Shard(self.folder, self.fingerprint), self._tagged
        if not tagged.tag.is_of(anything, self._seal, tagged.info.spec):
            raise tagged.broken([self.name])
        return info


def _reopened(path: Location, tag: Tag) -> TaggedVersion:
    return TaggedVersion(Version.open(path), tag)


def at_tag(version: Version, name: str | None) -> Version:
    """A version as it was when it was tagged; with None, the version itself.

    Raises:
        StoreError: There is no such tag.
        DamagedError: The tag is not what was written.
    """
    return version if name is None else TaggedVersion(version, read_tag(version, name))


def make_tag(version: Version, name: str, shards: Sequence[str], items: int) -> Tag:
    """Tag a version as it is.

    Args:
        version: The version, whose shards nobody takes away meanwhile.
        name: The name of the tag.
        shards: The names of the version's shards.
        items: How many items of theirs count.

    Raises:
        ArgumentError: It is no name for a tag, or there is a tag of this name; or the version is empty.
        DamagedError: A shard is not what was written.
        StoreError: It cannot be written.
    """
    place = _place(version, name)
    if not items:
        raise ArgumentError(f"{version.path}: holds nothing yet that could be tagged")
    opened = [version.shard(shard) for shard in sorted(shards)]
    with read_ahead(file for shard in opened for file in shard.files(())):
        seals = {shard.name: shard.seal for shard in opened}
    read_values = partial(Shard.values, spec=version.info.spec)
    values = map(read_values, opened) if isinstance(place, Path) else in_parallel(read_values, opened)
    of_values = dict(zip(seals, values, strict=True))
    tag = Tag(name, datetime.now(UTC).isoformat(timespec="seconds"), items, seals, of_values)
    document = {
        "format": FORMAT,
        "fingerprint": version.info.fingerprint,
        "made": tag.made,
        "items": items,
        "shards": seals,
        "values": of_values,
    }
    if isinstance(place, Path):
        is_new = not store_of(place).exists(place)
        if is_new:
            folder_to_write(version.folder, "tags")
            write_document(place, document)
    else:
        require_put_if_absent(place.parent)
        is_new = store_of(place).put_if_absent(place, sealed_document(document))
    if not is_new:
        raise ArgumentError(
            f"{version.path}: has a tag {name}, and tags never change: choose another name, or remove it first: "
            f"featcache rm {version.path}@{name}"
        )
    return tag


def tag_names(version: Version) -> list[str]:
    """The names of a version's tags, sorted. Files with other names are no tags.

    Raises:
        StoreError: The folder of the tags cannot be read, so that nobody knows what they keep.
    """
    folder = version.path / "tags"
    try:
        files = store_of(folder).names(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read: {error.strerror}") from error
    return sorted(match[1] for file in files if (match := _FILE.fullmatch(file)))


def tag_file(version: Version, name: str) -> Location:
    """The file of a tag."""
    return version.path / "tags" / f"{name}.json"


def read_tag(version: Version, name: str) -> Tag:
    """A tag of a version.

    Raises:
        StoreError: There is none of that name; says which there are.
        DamagedError: It is not what was written, or another version's.
    """
    place = _place(version, name)
    try:
        document = _TAG(read_document(place))
    except FileNotFoundError as error:
        there = tag_names(version)
        hint = f"it has {listing(there)}" if there else f"`featcache tag {version.path} {name}` makes one"
        raise StoreError(f"{version.path}: has no tag {name}; {hint}") from error
    except (DamagedError, ValueError) as error:
        what = error.what if isinstance(error, DamagedError) else f"{place}: damaged: not a tag: {error}"
        raise DamagedError(f"{what}; take it from a copy, or remove it: featcache rm {version.path}@{name}") from error
    if document["fingerprint"] != version.info.fingerprint:
        raise DamagedError(f"{place}: is a tag of another version ({document['fingerprint'][:12]}): remove it")
    shards = dict(sorted(document["shards"].items()))
    return Tag(name, document["made"], document["items"], shards, document.get("values", {}))


def read_tags(version: Version) -> Iterator[Tag]:
    """The tags of a version, by name.

    Raises:
        DamagedError: One is not what was written.
    """
    names = tag_names(version)
    with read_ahead(tag_file(version, name) for name in names):
        for name in names:
            yield read_tag(version, name)


def tags_to_show(version: Version) -> list[dict[str, Any]]:
    """What there is to say of each tag of a version: `name`, `made`, `utterances`, and what is wrong, `fault`."""
    faults = dict(check_tags(version))
    shown = []
    for name in tag_names(version):
        known: dict[str, Any] = {"name": name, "made": None, "utterances": None, "fault": faults.get(name)}
        with suppress(StoreError):
            tag = read_tag(version, name)
            known |= {"made": tag.made, "utterances": tag.items}
        shown.append(known)
    return shown


def check_tags(version: Version) -> Iterator[tuple[str, str]]:
    """What is wrong with the tags of a version: the name of the tag, and what it is."""
    there: set[str] = set()
    if not (names := tag_names(version)):
        return
    with suppress(DamagedError, OSError):
        there = {*version.listed_shards()}
    opened: dict[str, Shard] = {}
    for tag_name in names:
        try:
            tag = read_tag(version, tag_name)
        except StoreError as error:
            yield tag_name, str(error)
            continue
        new = [version.shard(shard) for shard in tag.shards.keys() & there - opened.keys()]
        opened |= {shard.name: shard for shard in new}
        with read_ahead(file for shard in new for file in shard.files(())):
            gone = [name for name in tag.shards if name not in there or _is_another(tag, opened[name], version)]
        if gone:
            yield tag_name, TaggedVersion(version, tag).broken(gone).what


def _is_another(tag: Tag, shard: Shard, version: Version) -> bool:
    with suppress(DamagedError, OSError):  # what is damaged may still be what was tagged
        return not tag.is_of(shard, shard.seal, version.info.spec)
    return False


def remove_tag(version: Version, name: str) -> None:
    """Remove a tag, whatever is in it. The shards stay.

    Raises:
        StoreError: There is no such tag, `tags` is a link, or the tag cannot be removed.
    """
    place = _place(version, name)
    if name not in tag_names(version):
        read_tag(version, name)
    try:
        if isinstance(place, Path):
            refuse_links(version.folder, "tags")
        store_of(place).delete(place)
        if isinstance(place, Path):
            sync(place.parent)
    except OSError as error:
        raise StoreError(f"{place}: cannot be removed: {error.strerror}") from error


def _place(version: Version, name: str) -> Location:
    try:
        text(_NAME)(name)
    except ValueError:
        raise ArgumentError(
            f"{name!r} is no name for a tag: it has letters, digits, `.`, `_` and `-`, at most 100, and begins with a "
            "letter or digit"
        ) from None
    return tag_file(version, name)
