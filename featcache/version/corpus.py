"""A corpus: several manifests that were extracted into one folder, each into a cache of
its own, its part.

<corpus>/
  parts/<part>.json   what was known of a part when it was complete; sealed
  <part>/             a cache: the versions of one manifest, named after the manifest's file

What is known of a part is derived from its versions, and says of which shards: so a
reader sees at once whether it still holds. If not, the part is looked at. Several jobs
may extract parts of one corpus: each writes of its own.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from featcache.errors import ArgumentError, DamagedError, listing
from featcache.format.documents import AT_MOST_BYTES, Count, Hash, encode_line, parse_line
from featcache.storage.base import Store, in_parallel
from featcache.storage.location import Location
from featcache.storage.opening import open_store
from featcache.version.index import Index, index_name
from featcache.version.selection import PARTS, version_names
from featcache.version.version import Version

_MOST_PARTS = 1 << 16
_PART_NAME = r"[^./\x00-\x1f\x7f\ud800-\udfff][^/\x00-\x1f\x7f\ud800-\udfff]{0,199}"
_FileHash = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{16})?\Z")]


class PartVersion(msgspec.Struct, frozen=True):
    """A version of a part, as it was when it held all that it was to hold."""

    manifest: _FileHash
    """The hash of the manifest's file then, and of how it was read; empty if it is not
    known."""
    utterances: Count
    failed: Count
    """How many were in the failure ledger instead."""
    frames: Count
    longest: Count
    """The frames of the longest one."""
    shards: Count
    index: Hash
    """The name of the index of its shards: it has changed since if its shards have
    another one."""

    @classmethod
    def of(cls, version: Version, index: Index, failed: int = 0, manifest: str = "") -> PartVersion:
        """Summarise a version, by its index."""
        frames, longest = int(index.num_frames.sum()), int(index.num_frames.max(initial=0))
        return cls(
            manifest,
            len(index),
            failed,
            frames,
            longest,
            len(index.shards),
            index_name(version, index.shards),
        )

    def is_of(self, version: Version) -> bool:
        """Tell whether the version still has the shards that it had then."""
        return index_name(version, version.shard_names()) == self.index


class Part(msgspec.Struct, frozen=True):
    """A part of a corpus: one manifest, and the cache of what was extracted from it."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{_PART_NAME}\Z")]
    """The name of the part's folder: that of the manifest's file, without its suffix."""
    manifest: Annotated[str, msgspec.Meta(max_length=8192)]
    """The path of the manifest, absolute, where it was extracted."""
    rows: Count = 0
    """The rows of the manifest when it was extracted last, as are the next three; 0 if it
    never was."""
    size: Count = 0
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] = 0
    """When the manifest's file was changed last, in ns since 1970."""
    hash: _FileHash = ""
    """The XXH3-64 of the manifest's bytes, 16 hex digits."""
    versions: dict[str, PartVersion] = {}
    """What is known of its versions, by the names of their folders."""


def gone_parts(corpus: Location, parts: Collection[Part]) -> dict[str, str]:
    """Of the parts of a corpus that were extracted, and whose folders are gone: what to
    say of each, by its name."""
    store, names = open_store(corpus), {part.name for part in parts}
    extracted = [part.name for part in parts if part.versions]
    gone = [
        name
        for name, there in zip(extracted, in_parallel(store.exists, extracted), strict=True)
        if not there
    ]
    if not gone:
        return {}
    others = [
        name for name in store.names("") if name not in names and version_names(corpus / name)
    ]
    again = (
        "`featcache extract` with its manifest makes it again (or of a copy, the same "
        "`featcache copy`)"
    )
    remedy = f"if it was renamed to {listing(others)}, rename it back" if others else again
    return {
        name: f"{corpus}: the folder of its part {name} is not there; {remedy}" for name in gone
    }


def read_parts(corpus: Location, names: Sequence[str] | None = None) -> list[Part]:
    """The parts of a corpus, in the order of their names; or those of these names, as far
    as there are such. Raises DamagedError if what is recorded of one is not what was
    written."""
    store = open_store(corpus)
    there = [name.removesuffix(".json") for name in store.names(PARTS) if name.endswith(".json")]
    if len(there) > _MOST_PARTS:
        raise DamagedError(f"{corpus / PARTS}: damaged: {len(there):,} parts")
    return in_parallel(
        lambda name: _read_part(store, name),
        sorted({*there} if names is None else {*there} & {*names}),
    )


def _read_part(store: Store, name: str) -> Part:
    where = store.location / PARTS / f"{name}.json"
    try:
        part = parse_line(store.read(f"{PARTS}/{name}.json", AT_MOST_BYTES), Part, where)
        if part.name != name:
            raise DamagedError(f"{where}: damaged: it is the part {part.name[:200]!r}")
    except DamagedError as error:
        remedy = "remove it, and run `featcache extract` with all manifests: what is there stays"
        raise DamagedError(f"{error.what}; {remedy}") from error
    return part


def put_part(corpus: Location, part: Part) -> None:
    """Replace what is known of a part; each job does so for its own. Raises StoreError if
    it cannot be written."""
    open_store(corpus).put(f"{PARTS}/{part.name}.json", encode_line(msgspec.to_builtins(part)))


def remove_part(corpus: Location, name: str) -> None:
    """Have a corpus know nothing of a part."""
    open_store(corpus).remove(f"{PARTS}/{name}.json")


def record_version(version: Version, known: PartVersion) -> None:
    """Record what is known of a version, if it is one of a part of a corpus; without a
    manifest's hash, the one that is recorded stays. Raises StoreError, DamagedError if it
    cannot be written, or what there is was not what was written.
    """
    name, corpus = version.path.parent.name, version.path.parent.parent
    store = open_store(corpus)
    if store.exists(f"{PARTS}/{name}.json"):
        part = _read_part(store, name)
        before = part.versions.get(version.path.name)
        if before and not known.manifest:
            known = msgspec.structs.replace(known, manifest=before.manifest)
        put_part(
            corpus,
            msgspec.structs.replace(part, versions={**part.versions, version.path.name: known}),
        )


def manifests_of_parts(given: Sequence[str | Path]) -> dict[str, Path] | None:
    """The manifests of parts, by the names of the parts; None if what is given is one
    manifest, and no corpus.

    Paths of manifests are given, or patterns as in a shell, of which each may stand for
    any number of them. Raises ArgumentError if two parts would have the same name, a name
    is not one for a folder, nothing fits a pattern, or there are several manifests, and
    one is standard input."""
    found, is_several = list[Path](), len(given) > 1
    for one in map(str, given):
        if not glob.has_magic(one) or Path(one).exists():
            found.append(Path(one))
            continue
        if not (files := glob.glob(one, recursive=True)):
            raise ArgumentError(f"{one}: there is no such file, and as a pattern, it fits none")
        found += sorted(map(Path, files))
        is_several = True
    return by_part_name(found) if is_several else None


def by_part_name(manifests: Iterable[Path]) -> dict[str, Path]:
    """Manifests by the names of their parts, sorted; a manifest that is given twice
    counts once. Raises ArgumentError if two parts would have the same name, or one is
    standard input."""
    parts: dict[str, Path] = {}
    for manifest in manifests:
        if str(manifest) == "-":
            raise ArgumentError(
                "-: standard input is one manifest, and the parts of a corpus are named after files"
            )
        name = part_name(manifest)
        if not re.fullmatch(_PART_NAME, name) or name == PARTS:
            rule = "no dot at its beginning, no control characters, at most 200 characters, UTF-8"
            raise ArgumentError(
                f"{manifest}: {name!r} cannot name a part: give the manifest another name: {rule}"
            )
        if parts.setdefault(name, manifest).absolute() != manifest.absolute():
            raise ArgumentError(
                f"{parts[name]} and {manifest} would both be the part {name}: rename one of them"
            )
    return dict(sorted(parts.items()))


def part_name(manifest: Path) -> str:
    """The name of a manifest's part: `train-00` for `train-00.parquet`, `train-00.csv.gz`
    and the folder `train-00`."""
    if manifest.is_dir():
        return manifest.resolve().name
    return (manifest.with_suffix("") if manifest.suffix.lower() == ".gz" else manifest).stem
