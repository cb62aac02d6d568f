"""A corpus: several manifests that were extracted into one folder, each into its own cache,
its part.

    <corpus>/
      parts/<part>.json   what was known of a part when it was complete; sealed
      <part>/             a cache: the versions of one manifest, named after its file

A part's file names the shards that it was derived from, so a reader sees whether it still
holds. Several jobs may extract parts of one corpus: each writes its own files."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from featcache.errors import ArgumentError, DamagedError, listing
from featcache.format.documents import Count, Hash, Int64, put_document, read_document
from featcache.manifest.numbered import expand_braces
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
    """A version of a part, as it was when it was complete."""

    manifest: _FileHash
    """The hash of the manifest's file, of the options to read it and of where its audio is;
    empty if unknown."""
    utterances: Count
    failed: Count
    frames: Count
    longest: Count
    """The frames of the longest utterance."""
    shards: Count
    index: Hash
    """The name of the index of its shards."""

    @classmethod
    def of(cls, version: Version, index: Index, failed: int = 0, manifest: str = "") -> PartVersion:
        """Summarise a version, by its index."""
        return cls(
            manifest,
            len(index),
            failed,
            int(index.num_frames.sum()),
            int(index.num_frames.max(initial=0)),
            len(index.shards),
            index_name(version, index.shards),
        )

    def is_of(self, version: Version) -> bool:
        """Tell whether the version still has the same shards."""
        return index_name(version, version.shard_names()) == self.index


class Part(msgspec.Struct, frozen=True):
    """A part of a corpus: one manifest, and its cache."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{_PART_NAME}\Z")]
    """The name of the part's folder: that of the manifest's file, without its suffix."""
    manifest: Annotated[str, msgspec.Meta(max_length=8192)]
    """The absolute path of the manifest, where it was extracted."""
    rows: Count = 0
    """The manifest's rows, size, mtime in ns since 1970, and XXH3-64 in 16 hex digits, when
    it was extracted last; 0 and "" if it never was."""
    size: Count = 0
    mtime_ns: Int64 = 0
    hash: _FileHash = ""
    versions: dict[str, PartVersion] = {}
    """Its versions, by the names of their folders."""


def gone_parts(corpus: Location, parts: Collection[Part]) -> dict[str, str]:
    """Find the extracted parts whose folders are gone: a message for each, by its name."""
    store, names = open_store(corpus), {part.name for part in parts}
    extracted = [part.name for part in parts if part.versions]
    exist = in_parallel(store.exists, extracted)
    gone = [name for name, exists in zip(extracted, exist, strict=True) if not exists]
    if not gone:
        return {}
    others = [
        name for name in store.names("") if name not in names and version_names(corpus / name)
    ]
    remedy = (
        "`featcache extract` with its manifest makes it again (or of a copy, the same "
        "`featcache copy`)"
    )
    if others:
        remedy = f"if it was renamed to {listing(others)}, rename it back"
    return {
        name: f"{corpus}: the folder of its part {name} is not there; {remedy}" for name in gone
    }


def read_parts(corpus: Location, names: Sequence[str] | None = None) -> list[Part]:
    """Read the parts of a corpus, or those of these names, sorted by name."""
    store = open_store(corpus)
    recorded = [name.removesuffix(".json") for name in store.names(PARTS) if name.endswith(".json")]
    if len(recorded) > _MOST_PARTS:
        raise DamagedError(f"{corpus / PARTS}: damaged: {len(recorded):,} parts")
    wanted = sorted({*recorded} if names is None else {*recorded} & {*names})
    return in_parallel(lambda name: _read_part(store, name), wanted)


def _read_part(store: Store, name: str) -> Part:
    key = f"{PARTS}/{name}.json"
    try:
        part = read_document(store, key, Part)
        if part.name != name:
            raise DamagedError(
                f"{store.location}/{key}: damaged: it is the part {part.name[:200]!r}"
            )
    except DamagedError as error:
        remedy = "remove it, and run `featcache extract` with all manifests: what is there stays"
        raise DamagedError(f"{error.what}; {remedy}") from error
    return part


def put_part(corpus: Location, part: Part) -> None:
    """Record a part; each job does so for its own."""
    put_document(open_store(corpus), f"{PARTS}/{part.name}.json", part)


def remove_part(corpus: Location, name: str) -> None:
    """Remove the record of a part."""
    open_store(corpus).remove(f"{PARTS}/{name}.json")


def record_version(version: Version, known: PartVersion) -> None:
    """Record a version if it is in a part of a corpus; without a manifest's hash, the
    recorded hash stays."""
    name, corpus = version.path.parent.name, version.path.parent.parent
    store = open_store(corpus)
    if not store.exists(f"{PARTS}/{name}.json"):
        return
    part = _read_part(store, name)
    before = part.versions.get(version.path.name)
    if before and not known.manifest:
        known = msgspec.structs.replace(known, manifest=before.manifest)
    versions = {**part.versions, version.path.name: known}
    put_part(corpus, msgspec.structs.replace(part, versions=versions))


def manifests_of_parts(paths: Sequence[str | Path]) -> dict[str, Path] | None:
    """Find the manifests of parts, by the parts' names, from paths and shell patterns, also
    with braces; None for one path, which is no corpus. Raises ArgumentError if nothing fits
    a pattern; see also `by_part_name`."""
    manifests, is_several = list[Path](), len(paths) > 1
    for path in map(str, paths):
        if not path:
            raise ArgumentError("the manifest's path is empty")
        names = expand_braces(path)
        if os.path.exists(path) or ([path] == names and not glob.has_magic(path)):
            manifests.append(Path(path))
            continue
        files = [file for name in names for file in _fitting(name)]
        if not any(map(os.path.exists, files)):
            raise ArgumentError(f"{path}: there is no such file, and as a pattern, it fits none")
        manifests += map(Path, files)
        is_several = True
    return by_part_name(manifests) if is_several else None


def _fitting(name: str) -> list[str]:
    if glob.has_magic(name):
        return sorted(glob.glob(name, recursive=True))
    return [name]


def by_part_name(manifests: Iterable[Path]) -> dict[str, Path]:
    """Map the names of parts, sorted, to manifests. Raises ArgumentError if two would have
    the same name, or a manifest cannot name a folder, or is standard input."""
    parts: dict[str, Path] = {}
    for manifest in manifests:
        if str(manifest) == "-":
            what = "standard input is one manifest, and the parts of a corpus are named after files"
            raise ArgumentError(f"-: {what}")
        name = part_name(manifest)
        if not re.fullmatch(_PART_NAME, name) or name == PARTS:
            rule = "no dot at its beginning, no control characters, at most 200 characters, UTF-8"
            what = f"{name!r} cannot name a part: give the manifest another name: {rule}"
            raise ArgumentError(f"{manifest}: {what}")
        if parts.setdefault(name, manifest).absolute() != manifest.absolute():
            what = f"would both be the part {name}: rename one of them"
            raise ArgumentError(f"{parts[name]} and {manifest} {what}")
    return dict(sorted(parts.items()))


def part_name(manifest: Path) -> str:
    """Return the name of a manifest's part: `train-00` for `train-00.parquet`,
    `train-00.csv.gz` and the folder `train-00`."""
    if manifest.is_dir():
        return manifest.resolve().name
    return (manifest.with_suffix("") if manifest.suffix.lower() == ".gz" else manifest).stem
